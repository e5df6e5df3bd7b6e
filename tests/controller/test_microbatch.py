"""Micro-batches: the gradient of the whole batch from any split, synchronized with the last one only."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import TuneConfig
from pacecar.controller.knobs.actuator import ActuatorError
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator
from pacecar.controller.knobs.batch.oom_safe_trial import OomSafeTrial
from pacecar.job.handle import Pacer
from tests.kit.lone_rank import lone_rank

Pair = namedtuple("Pair", "x y")
BATCH = 7


def batch() -> dict[str, Any]:
    x = torch.arange(BATCH * 2.0).reshape(BATCH, 2)
    return {"pair": Pair(x, [x + 1, (x[:, 0], "tag")]), "scalar": torch.tensor(3.0), "count": 5, "none": None}


def test_every_tensor_of_a_nest_is_cut_along_dim_0_and_the_rest_passes_through() -> None:
    parts = list(MicroBatcher(None, 3).split(batch()))
    assert [len(p["pair"].x) for p in parts] == [3, 3, 1]
    whole = batch()
    for index, part in enumerate(parts):
        low = 3 * index
        assert isinstance(part["pair"], Pair)
        assert torch.equal(part["pair"].x, whole["pair"].x[low : low + 3])
        assert torch.equal(part["pair"].y[0], whole["pair"].y[0][low : low + 3])
        assert torch.equal(part["pair"].y[1][0], whole["pair"].y[1][0][low : low + 3])
        assert part["pair"].y[1][1] == "tag"
        assert (part["scalar"], part["count"], part["none"]) == (3.0, 5, None)


def test_other_mappings_keep_their_type() -> None:
    parts = list(MicroBatcher(None, 4).split(OrderedDict(x=torch.ones(BATCH, 1))))
    assert [type(p) for p in parts] == [OrderedDict, OrderedDict]


def test_a_mapping_that_is_not_made_from_items_is_cut_too() -> None:
    whole = defaultdict(list, x=torch.arange(BATCH))
    parts = list(MicroBatcher(None, 4).split(whole))
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6]]
    assert {part.default_factory for part in parts} == {list}
    assert len(whole["x"]) == BATCH


@given(st.integers(0, 40), st.integers(1, 45))
def test_sizes_add_up_are_the_micro_batch_but_for_the_last_and_weights_sum_to_one(samples: int, size: int) -> None:
    batcher = MicroBatcher(None, size)
    sizes, weights = [], []
    for part in batcher.split(torch.arange(samples)):
        sizes.append(len(part))
        weights.append(batcher.weight)
    assert sum(sizes) == samples
    assert all(s == min(size, samples) for s in sizes[:-1])
    assert sum(weights) == pytest.approx(1.0)
    assert batcher.weight == 1.0


def test_a_batch_that_needs_no_split_is_the_same_object() -> None:
    whole = batch()
    for size in (None, BATCH, 100):
        assert [part is whole for part in MicroBatcher(None, size).split(whole)] == [True]


def test_tensors_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"batch\['b'\]\[1\] has 3 samples in dim 0, batch\['a'\] has 2"):
        MicroBatcher(None, 1).split({"a": torch.ones(2), "b": [torch.ones(2), torch.ones(3)]})


def test_a_batch_without_tensors_and_one_that_contains_itself_are_refused() -> None:
    with pytest.raises(ValueError, match="no tensor to split"):
        MicroBatcher(None, 1).split(["a", 1])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested deeper"):
        MicroBatcher(None, 1).split(loop)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        MicroBatcher(None, 0)


# --- gradients -------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def gradients(size: int | None, scaler: Any = None) -> list[torch.Tensor]:
    net, batcher = model(), MicroBatcher(None, size, scaler=scaler)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 3, generator=generator)
    for part_x, part_y in batcher.split((x, y)):
        batcher.backward(nn.functional.mse_loss(net(part_x), part_y))
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_split_gives_the_gradient_of_the_batch(size: int) -> None:
    for split, whole in zip(gradients(size), gradients(None), strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-7)


def test_the_whole_batch_at_once_is_the_plain_loop_to_the_last_bit() -> None:
    net = model()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 3, generator=generator)
    nn.functional.mse_loss(net(x), y).backward()
    for ours, plain in zip(gradients(BATCH), net.parameters(), strict=True):
        assert torch.equal(ours, plain.grad)


@pytest.mark.slow
def test_a_scaler_scales_the_weighted_loss() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for scaled, plain in zip(gradients(3, scaler), gradients(3), strict=True):
        torch.testing.assert_close(scaled, plain * 1024.0)


# --- DDP -------------------------------------------------------------------------------------------


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    with lone_rank(tmp_path):
        yield DistributedDataParallel(model())


def test_gradients_are_synchronized_with_the_last_micro_batch_only(ddp: DistributedDataParallel) -> None:
    flags = [ddp.require_backward_grad_sync for _ in MicroBatcher(ddp, 3).split(torch.ones(BATCH, 4))]
    assert flags == [False, False, True]
    assert ddp.require_backward_grad_sync


def test_inside_the_user_s_no_sync_nothing_is_synchronized(ddp: DistributedDataParallel) -> None:
    with ddp.no_sync():
        flags = [ddp.require_backward_grad_sync for _ in MicroBatcher(ddp, 3).split(torch.ones(BATCH, 4))]
        assert not ddp.require_backward_grad_sync
    assert flags == [False, False, False]
    assert ddp.require_backward_grad_sync


def test_a_loop_that_breaks_or_raises_leaves_synchronization_on(ddp: DistributedDataParallel) -> None:
    batcher = MicroBatcher(ddp, 3)
    for _ in batcher.split(torch.ones(BATCH, 4)):
        break
    assert ddp.require_backward_grad_sync
    with pytest.raises(RuntimeError, match="planted"):  # noqa: PT012  the loop is what is tested
        for _ in batcher.split(torch.ones(BATCH, 4)):
            raise RuntimeError("planted")
    assert ddp.require_backward_grad_sync
    assert batcher.weight == 1.0


def test_an_iterator_that_was_left_open_is_undone_by_the_next_split(ddp: DistributedDataParallel) -> None:
    batcher = MicroBatcher(ddp, 3)
    left = iter(batcher.split(torch.ones(BATCH, 4)))
    next(left)
    assert not ddp.require_backward_grad_sync
    assert [ddp.require_backward_grad_sync for _ in batcher.split(torch.ones(2, 4))] == [True]


# --- the knob -------------------------------------------------------------------------------------


def actuator(net: nn.Module, size: int | None = 2, samples: int | None = 16, **bounds: int) -> MicroBatchActuator:
    batcher = MicroBatcher(None, size)
    if samples is not None:
        for _ in batcher.split(torch.ones(samples)):
            pass
    return MicroBatchActuator(net, batcher, TuneConfig(**bounds))  # type: ignore[arg-type]


def test_the_domain_is_the_present_size_times_powers_of_two_and_the_batch() -> None:
    assert actuator(model()).domain() == (1, 2, 4, 8, 16)
    assert actuator(model(), size=3, samples=20).domain() == (1, 3, 6, 12, 20)
    assert actuator(model(), size=None).domain() == (1, 2, 4, 8, 16)
    assert actuator(model(), micro_batch_min=2, micro_batch_max=8).domain() == (2, 4, 8)
    assert actuator(model(), size=32).domain() == (1, 2, 4, 8, 16, 32)


def test_apply_takes_effect_at_the_next_split() -> None:
    batcher = MicroBatcher(None, 2)
    knob = MicroBatchActuator(model(), batcher, TuneConfig())
    iterator = batcher.split(torch.ones(8))
    next(iterator)
    knob.apply(8)
    assert [len(p) for p in iterator] == [2, 2, 2]
    assert [len(p) for p in batcher.split(torch.ones(8))] == [8]
    with pytest.raises(ActuatorError, match="below 1"):
        knob.apply(0)


def test_where_the_script_gave_no_size_a_batch_that_grows_later_still_goes_through_whole() -> None:
    batcher = MicroBatcher(None)
    knob = MicroBatchActuator(model(), batcher, TuneConfig())

    def sizes(samples: int) -> list[int]:
        return [len(part) for part in batcher.split(torch.ones(samples))]

    assert sizes(8) == [8]
    knob.apply(knob.value())  # as all ranks do before anything is tried
    assert (sizes(16), knob.value()) == ([16], 8)
    knob.apply(4)
    assert (sizes(16), knob.value()) == ([4, 4, 4, 4], 4)
    knob.apply(8)
    assert (sizes(16), knob.value()) == ([16], 8)


def test_an_unknown_batch_is_refused() -> None:
    knob = actuator(model(), size=None, samples=None)
    assert "batch size is not known" in str(knob.refusal())
    with pytest.raises(ActuatorError, match="not known yet"):
        knob.value()


def test_a_batch_of_one_is_refused() -> None:
    assert "nothing to split" in str(actuator(model(), samples=1).refusal())


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(8).to_sparse(),
        lambda: torch.eye(8).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(i + 1, 2) for i in range(8)], layout=torch.jagged),
    ],
)
def test_a_batch_that_cannot_be_cut_trains_whole_and_is_refused_before_another_size_is_tried(
    make: Callable[[], torch.Tensor],
) -> None:
    batcher, whole = MicroBatcher(None), {"x": make()}
    assert [part is whole for part in batcher.split(whole)] == [True]
    assert "a batch cannot be cut" in str(MicroBatchActuator(model(), batcher, TuneConfig()).refusal())


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize(
    ("draw", "batches", "is_refused"),
    [
        (lambda: torch.randn(3), (2,), True),
        (random.random, (1, 2, 3), True),
        (lambda: None, (0, 1, 2, 3), False),
        (lambda: torch.randn(3), (0,), False),
        (lambda: torch.randn(3, generator=torch.Generator()), (0, 1, 2, 3), False),
    ],
    ids=["torch", "python", "nothing", "at first", "a generator of its own"],
)
def test_a_loop_that_draws_random_numbers_for_each_micro_batch_is_refused(
    draw: Callable[[], object], batches: tuple[int, ...], is_refused: bool, size: int | None
) -> None:
    batcher = MicroBatcher(None, size)
    for number in range(4):
        for _ in batcher.split(torch.ones(8)):
            if number in batches:
                draw()
    reason = MicroBatchActuator(model(), batcher, TuneConfig()).refusal()
    assert (reason is not None and "the loop draws random numbers" in reason) is is_refused


@pytest.mark.parametrize("is_weighted", [True, False])
def test_a_loop_that_does_not_weight_its_losses_is_refused(is_weighted: bool) -> None:
    net, batcher = model(), MicroBatcher(None)
    pacer = Pacer(OomSafeTrial(net, batcher))
    for part in pacer.microbatches(torch.ones(BATCH, 4)):
        loss = net(part).mean()
        if is_weighted:
            pacer.backward(loss)
        else:
            loss.backward()
    expected = None if is_weighted else "losses are not weighted: use pacer.backward(loss) instead of loss.backward()"
    assert MicroBatchActuator(net, batcher, TuneConfig()).refusal() == expected


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused_while_it_is_there(name: str) -> None:
    net = model()
    handle = getattr(net[3].weight, name)(lambda _: None)
    assert "the gradient of 3.weight has a hook" in str(actuator(net).refusal())
    handle.remove()
    assert actuator(net).refusal() is None


class HiddenDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.1


class StochasticDepth(nn.Module):
    """As torchvision's, which drops whole samples."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm1d(4), "0 is BatchNorm1d"),
        (nn.SyncBatchNorm(4), "0 is SyncBatchNorm"),
        (nn.Dropout(0.1), r"0 (Dropout) has p=0.1"),
        (nn.MultiheadAttention(4, 2, dropout=0.2), "has dropout=0.2"),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.3), "has dropout=0.3"),
        (HiddenDropout(), "has attention_dropout=0.1"),
        (StochasticDepth(0.2), "0 (StochasticDepth) has p=0.2"),
        (nn.RReLU(), "0 (RReLU) has random numbers"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "0 is InstanceNorm1d"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "is _SpectralNorm"),
        (nn.utils.spectral_norm(nn.Linear(4, 4)), "0 (Linear) has spectral_norm"),
    ],
)
def test_what_depends_on_the_micro_batch_is_refused_by_name(layer: nn.Module, reason: str) -> None:
    assert reason in str(actuator(nn.Sequential(layer)).refusal())


def test_what_does_not_is_not_refused() -> None:
    assert (
        actuator(
            nn.Sequential(
                nn.Dropout(0.0),
                StochasticDepth(0.0),
                nn.GroupNorm(1, 4),
                nn.LayerNorm(4),
                nn.InstanceNorm1d(4),
                nn.Embedding(3, 3),
            )
        ).refusal()
        is None
    )


@pytest.mark.slow
@pytest.mark.parametrize("hides", [nn.Sequential, lambda model: torch.compile(model, backend="eager")])
def test_a_model_whose_ranks_wait_for_each_other_inside_is_refused(
    hides: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    with lone_rank(tmp_path):
        mesh = init_device_mesh("cpu", (1,))
        assert "FSDP or tensor" in str(actuator(hides(fully_shard(nn.Linear(4, 4), mesh=mesh))).refusal())
        divided = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
        assert "FSDP or tensor" in str(actuator(hides(divided)).refusal())


def test_a_static_graph_is_refused(ddp: DistributedDataParallel) -> None:
    ddp.static_graph = True
    assert "static_graph" in str(actuator(ddp).refusal())
