"""Which samples go through together: every one of an update once and in order, whatever the size and the shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pacecar.adapters.loss_additivity import undisturbed
from pacecar.adapters.regroup import SIZING_UPDATES, Regrouper
from pacecar.config import TuneConfig
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator


class Ddp:
    """The one attribute of DistributedDataParallel that matters here."""

    require_backward_grad_sync = True


def batches(widths: list[int], samples: int) -> list[dict[str, Any]]:
    """One batch a width; every sample has a number of its own, in its first column."""
    numbers = iter(range(len(widths) * samples))
    made = []
    for width in widths:
        rows = torch.zeros(samples, width)
        rows[:, 0] = torch.tensor([float(next(numbers)) for _ in range(samples)])
        made.append({"x": rows, "flag": True})
    return made


def update(
    regrouper: Regrouper, made: list[dict[str, Any]], ddp: Ddp | None = None
) -> list[tuple[Tensor, float, bool]]:
    """Return each micro-batch's samples, its share, and whether it synchronizes, as they come in a trainer's loop."""
    seen = []
    for number, batch in enumerate(made, start=1):
        if ddp is not None:  # what Trainer, Accelerate and Lightning do around a batch
            ddp.require_backward_grad_sync = number == len(made)
        for micro, share in regrouper.micros(batch, is_last=number == len(made)):
            assert micro["flag"] is True
            seen.append((micro["x"][:, 0], share, ddp is None or ddp.require_backward_grad_sync))
    return seen


def regrouper_of(size: int | None, ddp: Any = None) -> Regrouper:
    return Regrouper(MicroBatcher(ddp, size))


SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=9)


@pytest.mark.slow
@given(widths=SHAPES, samples=st.integers(1, 5), size=st.integers(1, 40))
def test_an_update_has_every_sample_once_in_order_and_its_whole_weight(
    widths: list[int], samples: int, size: int
) -> None:
    seen = update(regrouper_of(size), batches(widths, samples))
    assert torch.cat([numbers for numbers, _, _ in seen]).tolist() == list(range(len(widths) * samples))
    assert abs(sum(share for _, share, _ in seen) - len(widths)) < 1e-9
    assert all(abs(share - len(numbers) / samples) < 1e-9 for numbers, share, _ in seen), "each weighs its samples"
    assert all(len(numbers) <= max(size, samples if size >= samples else size) for numbers, _, _ in seen)


@pytest.mark.slow
@given(widths=SHAPES, samples=st.integers(1, 5), size=st.integers(1, 40))
def test_only_the_last_micro_batch_of_an_update_synchronizes(widths: list[int], samples: int, size: int) -> None:
    ddp = Ddp()
    seen = update(regrouper_of(size, ddp), batches(widths, samples), ddp)
    assert [is_synchronized for _, _, is_synchronized in seen] == [False] * (len(seen) - 1) + [True]


def test_without_a_size_batches_go_through_as_they_come_and_the_first_says_the_size() -> None:
    batcher = MicroBatcher(None)
    seen = update(Regrouper(batcher), batches([4, 4, 4], 2))
    assert [len(numbers) for numbers, _, _ in seen] == [2, 2, 2]
    assert (batcher.micro_batch, batcher.batch_samples) == (2, 6)


def test_larger_batches_than_the_first_go_through_as_they_come_until_another_size_is_in_force() -> None:
    batcher = MicroBatcher(None)
    regrouper, knob = Regrouper(batcher), MicroBatchActuator(nn.Linear(1, 1), batcher, TuneConfig())

    def sizes() -> list[int]:
        mixed = [*batches([4], 2), *batches([4], 6), *batches([4], 3)]
        return [len(numbers) for numbers, _, _ in update(regrouper, mixed)]

    assert (sizes(), knob.value()) == ([2, 6, 3], 2)
    knob.apply(2)  # as all ranks do before anything is tried
    assert (sizes(), knob.value()) == ([2, 6, 3], 2)
    knob.apply(3)
    assert (sizes(), knob.value()) == ([2, 3, 3, 3], 3)
    knob.apply(2)
    assert sizes() == [2, 6, 3]


def test_longer_batches_than_those_that_memory_was_measured_with_are_put_together_in_fewer() -> None:
    batcher = MicroBatcher(None)
    regrouper = Regrouper(batcher)
    for _ in range(SIZING_UPDATES):
        update(regrouper, batches([8, 6, 8, 8], 2))
    batcher.samples.value = 8
    assert [len(n) for n, _, _ in update(regrouper, batches([8] * 4, 2))] == [8]
    assert [len(n) for n, _, _ in update(regrouper, batches([16] * 4, 2))] == [4, 4], "twice as long, half as many"
    assert [len(n) for n, _, _ in update(regrouper, batches([40] * 4, 2))] == [2, 2, 2, 2], (
        "as the untuned run has them"
    )
    assert [len(n) for n, _, _ in update(regrouper, batches([4] * 4, 2))] == [8]


def test_a_batch_without_one_number_of_samples_goes_through_whole_and_refuses_the_knob() -> None:
    batcher = MicroBatcher(None, 4)
    odd = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}
    ((micro, share),) = Regrouper(batcher).micros(odd, is_last=True)
    assert micro is odd
    assert share == 1.0
    assert "dim 0" in str(batcher.refused)


def test_an_update_that_the_loop_gave_up_leaves_nothing_for_the_next() -> None:
    regrouper = regrouper_of(8)
    assert list(regrouper.micros(batches([4], 2)[0], is_last=False)) == []
    regrouper.reset()
    seen = update(regrouper, batches([4, 4], 2))
    assert torch.cat([numbers for numbers, _, _ in seen]).tolist() == [0, 1, 2, 3]


def test_trying_a_loss_leaves_each_module_in_its_own_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    before = model[1].running_mean.clone()
    with undisturbed(model):
        assert model[1].training
        model(torch.randn(4, 2))
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.equal(model[1].running_mean, before)
