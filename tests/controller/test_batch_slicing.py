"""Cuts: neighbours only, within the bounds, and weighted so that they give the gradient of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pacecar.controller.knobs.batch.batch_slicing import BatchSlices, Lengths, cut, measure, plan, terms_of
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher

IGNORED = -100
VOCABULARY = 11


def test_the_drawing_of_the_docstring_is_what_comes_out() -> None:
    cuts = plan(4, tokens_max=6, lengths=Lengths((5, 2, 2, 6), 6), terms=(4, 1, 0, 5), trim=True)
    assert cuts == [BatchSlices(0, 1, 0.4, 5), BatchSlices(1, 3, 0.1, 2), BatchSlices(3, 4, 0.5, 6)]


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 8)),
    st.booleans(),
    st.booleans(),
)
def test_cuts_are_all_samples_in_order_within_the_bounds_and_no_more_than_needed(
    each: list[int], tokens_max: int, samples_max: int | None, trim: bool, counted: bool
) -> None:
    lengths = Lengths(tuple(each), max(each))
    terms = each if counted else None
    cuts = plan(len(each), samples_max=samples_max, tokens_max=tokens_max, lengths=lengths, terms=terms, trim=trim)
    covered = [i for piece in cuts for i in range(piece.low, piece.high)]
    assert covered == sorted(set(covered))
    assert all(each[i] == 0 for i in set(range(len(each))) - set(covered)), "only what has no loss terms is left out"
    assert counted or covered == list(range(len(each)))
    assert sum(piece.weight for piece in cuts) == pytest.approx(1.0) or sum(each) == 0
    for piece in cuts:
        size = piece.high - piece.low
        assert samples_max is None or size <= samples_max
        assert size == 1 or lengths.padded(piece.low, piece.high, trim=trim) <= tokens_max
        assert piece.keep == (max(1, *each[piece.low : piece.high]) if trim else None)


def test_zero_is_a_length_and_a_mask_reaches_to_its_last_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]])
    assert measure(mask, 4) == Lengths((2, 0, 3, 4), 4)
    assert measure(mask.bool(), 4) == Lengths((2, 0, 3, 4), 4)
    assert measure(torch.tensor([3, 0]), 2) == Lengths((3, 0), 3)
    assert measure([3, 0], 2) == Lengths((3, 0), 3)
    assert measure([3, 0], 2, 8) == Lengths((3, 0), 8)
    assert terms_of(mask, 4) == (2, 0, 1, 2)
    assert terms_of([7, 0], 2) == (7, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measure(torch.ones(3, 4), 2), r"shape \(3, 4\)"),
        (lambda: measure([5, 9], 2, 8), "9 for a sample, the batch is 8 wide"),
        (lambda: measure([1], 2), "tokens has 1 entries for 2 samples"),
        (lambda: terms_of(torch.ones(3, 4), 2), r"count has shape \(3, 4\)"),
        (lambda: terms_of([1, -1], 2), "negative"),
        (lambda: list(MicroBatcher(None).split(torch.ones(2, 3), trim=True)), "trim needs tokens"),
    ],
)
def test_what_does_not_belong_to_the_batch_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_only_tensors_as_wide_as_the_mask_are_trimmed() -> None:
    batch = {"ids": torch.ones(4, 6), "features": torch.ones(4, 5), "label": torch.ones(4)}
    part = cut(batch, BatchSlices(1, 3, 0.5, keep=2), 6)
    assert {name: tuple(t.shape) for name, t in part.items()} == {"ids": (2, 2), "features": (2, 5), "label": (2,)}


# --- gradients, with a model that looks at its mask ----------------------------------------------------


class Reader(nn.Module):
    """Attention over what the mask shows, a prediction at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        seen, _ = self.attention(x, x, x, key_padding_mask=mask == 0, need_weights=False)
        out: Tensor = self.head(x + seen)
        return out


def ragged(lengths: tuple[int, ...] = (9, 2, 7, 1, 3, 9, 4)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(0, VOCABULARY, mask.shape, generator=generator) * mask
    labels = torch.randint(0, VOCABULARY, mask.shape, generator=generator).masked_fill(mask == 0, IGNORED)
    labels[3] = IGNORED  # a sample without a single loss term
    return {"ids": ids, "mask": mask, "labels": labels}


def mean_over_tokens(net: nn.Module, part: dict[str, Tensor]) -> Tensor:
    logits = net(part["ids"], part["mask"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), ignore_index=IGNORED)


def mean_over_samples(net: nn.Module, part: dict[str, Tensor]) -> Tensor:
    logits = net(part["ids"], part["mask"]) * part["mask"][:, :, None]
    return logits.square().sum((1, 2)).mean()


def gradients(loss_of: Any, **how: Any) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    torch.manual_seed(0)
    net, batch = Reader().double(), ragged()
    batcher = MicroBatcher(None, how.pop("micro_batch", None), micro_tokens=how.pop("micro_tokens", None))
    shapes = []
    for part in batcher.split(batch, **how):
        shapes.append(tuple(part["ids"].shape))
        batcher.backward(loss_of(net, part))
    return [p.grad for p in net.parameters() if p.grad is not None], shapes


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("bounds", [{"micro_tokens": 14}, {"micro_batch": 2}, {"micro_tokens": 18, "micro_batch": 3}])
@pytest.mark.parametrize("loss_of", [mean_over_tokens, mean_over_samples])
def test_ragged_batches_cut_by_tokens_give_the_gradient_of_the_whole_batch(
    loss_of: Any, bounds: dict[str, int], trim: bool
) -> None:
    batch = ragged()
    count = batch["labels"] != IGNORED if loss_of is mean_over_tokens else None
    whole, _ = gradients(loss_of)
    parts, shapes = gradients(loss_of, tokens=batch["mask"], count=count, trim=trim, **bounds)
    assert len(shapes) >= 3
    assert not trim or len({width for _, width in shapes}) > 1, "padding was trimmed"
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_without_count_a_mean_over_tokens_is_another_gradient() -> None:
    """Proves that the weights matter: the test above would pass without them if this one failed."""
    whole, _ = gradients(mean_over_tokens)
    parts, _ = gradients(mean_over_tokens, micro_batch=3)
    assert any(not torch.allclose(a, b, rtol=1e-3) for a, b in zip(parts, whole, strict=True))


def test_a_loss_that_is_a_sum_has_the_weight_one() -> None:
    net, batch = nn.Linear(3, 1).double(), torch.randn(5, 3, dtype=torch.double)
    net(batch).square().sum().backward()
    whole = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    batcher = MicroBatcher(None, 2)
    for part in batcher.split(batch):
        batcher.backward(net(part).square().sum(), weight=1.0)
    for ours, theirs in zip(net.parameters(), whole, strict=True):
        torch.testing.assert_close(ours.grad, theirs)


def test_a_batch_without_any_loss_term_is_the_script_s_to_handle() -> None:
    assert len(plan(4, samples_max=2, terms=(0, 0, 0, 0))) == 2
