"""Blocks keep or recompute activations with the same bits; what would compute other bits is refused with the reason."""

from __future__ import annotations

import copy
import io
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from pacecar.config import TuneConfig
from pacecar.controller.forecast.gain_model import GainModel
from pacecar.controller.guards.objection_rollback import ObjectionRollback
from pacecar.controller.knobs import memory_limit
from pacecar.controller.knobs.activation_checkpointing import blocks as blocks_module
from pacecar.controller.knobs.activation_checkpointing.knob import (
    CheckpointedBlocksActuator,
    open_checkpointed_blocks,
)
from pacecar.controller.knobs.actuator import ActuatorError, Objection
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator
from pacecar.controller.observation import BlockCosts, JobFacts, KnobSpace, Observation
from pacecar.controller.policy.geometric_search import GeometricSearch
from pacecar.kernel_files.reader import KernelFiles
from pacecar.torch_internals import forget, suppose_missing
from tests.kit.larger_size import LargerSize
from tests.kit.selection import decisive

WIDTH, SAMPLES = 16, 8


class Block(nn.Module):
    """A residual block with dropout, which keeps two tensors of 4 x WIDTH and a mask of one a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.drop(torch.tanh(self.into(x))))


class Smooth(Block):
    """Without random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.into(x)))


def stack(kind: Callable[[], nn.Module] = Block, count: int = 4, *, wraps: bool = True, **how: Any) -> nn.Sequential:
    torch.manual_seed(0)
    made = [kind() for _ in range(count)]
    return nn.Sequential(*[checkpoint_wrapper(block, **how) if wraps else block for block in made])


def train(
    net: nn.Module, steps: int, on_step: Callable[[int], object] = lambda step: None, *, micro: int = 1
) -> list[str]:
    """Return the hashes of gradients and losses; each step has `micro` forwards and backwards."""
    torch.manual_seed(1)
    random.seed(1)
    seen = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            loss = net(torch.randn(SAMPLES, WIDTH)).square().mean()
            loss.backward()
        optimizer.step()
        gradients = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        seen.append(f"{loss.item().hex()} {hash(gradients.numpy().tobytes())}")
        on_step(step)
    return seen


def knob_of(net: nn.Module, *, is_useful: bool = True, charged: list[int] | None = None) -> CheckpointedBlocksActuator:
    costs: list[int] = [] if charged is None else charged
    sizes = [LargerSize()] if is_useful else []
    knob = open_checkpointed_blocks(net, TuneConfig(), 1, sizes=sizes, charge=costs.append)
    assert knob is not None
    return knob


def measured(net: nn.Module, **options: Any) -> CheckpointedBlocksActuator:
    """Return the knob after the boundaries that it needs to measure."""
    knob = knob_of(net, **options)
    train(net, 4, lambda step: knob.on_boundary())
    return knob


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [True, False])
def test_gradients_are_equal_to_the_bit_whatever_is_turned_while_it_is_measured_and_after(wraps: bool) -> None:
    expected = train(stack(wraps=wraps), 14)
    assert expected == train(stack(wraps=not wraps), 14)
    net, turns = stack(wraps=wraps), [0, 4, 2, 3, 1, 0, 4, 2]
    knob = knob_of(net)

    def turn(step: int) -> None:
        knob.on_boundary()
        if step >= 4 and turns:
            assert knob.refusal() is None
            knob.apply(turns.pop())

    assert train(net, 14, turn) == expected
    assert not turns


def test_checkpointed_blocks_can_be_differentiated_by_torch_func() -> None:
    net = stack(Smooth, wraps=False)
    knob, x = measured(net), torch.randn(SAMPLES, WIDTH)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (x,)).square().mean()

    def derive() -> list[Tensor]:
        parameters = dict(net.named_parameters())
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        return [*each.values(), torch.func.jacrev(lambda one: net(one).square())(x[0])]

    expected = derive()
    knob.apply(4)
    assert all(map(torch.equal, derive(), expected))


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [True, False])
def test_so_many_blocks_compute_again_the_first_ones(wraps: bool) -> None:
    net = stack(wraps=wraps)
    knob = measured(net)
    home = knob.value()
    assert home == (4 if wraps else 0)
    assert knob.domain() == (0, 1, 2, 3, 4)
    calls: list[int] = []
    for at, block in enumerate(net):
        inner = block._checkpoint_wrapped_module if wraps else block
        inner.into.register_forward_hook(lambda *_, at=at: calls.append(at))
    for value in (0, 1, 3, 4, home):
        knob.apply(value)
        calls.clear()
        train(net, 1)
        assert [calls.count(at) for at in range(4)] == [2] * value + [1] * (4 - value)
    for wrong in (-1, 5):
        with pytest.raises(ActuatorError, match=f"checkpointed_blocks {wrong} is not 0 to 4"):
            knob.apply(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [True, False])
def test_names_state_pickles_and_copies_of_the_model_stay_the_scripts(wraps: bool) -> None:
    net = stack(wraps=wraps)
    before = [vars(module).copy() for module in net.modules()]
    keys, file = list(net.state_dict()), io.BytesIO()
    knob = measured(net)
    for value in (0, 4, 2):
        knob.apply(value)
        train(net, 1)
        assert [vars(module) for module in net.modules()] == before
        assert list(net.state_dict()) == keys
        assert copy.deepcopy(net).state_dict().keys() == net.state_dict().keys()
    torch.save(net, file)
    assert b"pacecar" not in file.getvalue()
    with torch.no_grad():  # an evaluation
        assert torch.equal(net.eval()(torch.ones(1, WIDTH)), net(torch.ones(1, WIDTH)))


@pytest.mark.slow
def test_what_a_block_keeps_is_measured_while_it_is_checkpointed() -> None:
    charged: list[int] = []
    wrapped, plain = measured(stack(), charged=charged), measured(stack(wraps=False))
    # tanh's output, the dropped one, each 4 x WIDTH floats; dropout's mask on CPUs is of floats, too
    one = SAMPLES * 4 * WIDTH * 4
    assert [reading.kept_bytes for reading in wrapped._readings] == [3 * one] * 4
    assert [reading.kept_bytes for reading in plain._readings] == [3 * one] * 4
    assert wrapped.kept_bytes(1) == 9 * one
    costs = wrapped.costs()
    assert costs is not None
    assert costs.again_ratio is not None
    assert costs == BlockCosts(4, 4, costs.again_ratio, 3 * one // SAMPLES)
    assert 0 < costs.again_ratio < 1
    assert len(charged) == 1
    assert charged[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("wraps", decisive([True, False], False))
def test_where_gradients_are_accumulated_a_forward_is_measured_and_all_are_timed(wraps: bool) -> None:
    net = stack(wraps=wraps)
    knob = knob_of(net)
    assert train(net, 4, lambda step: knob.on_boundary(), micro=3) == train(stack(wraps=wraps), 4, micro=3)
    assert knob.refusal() is None
    assert knob.kept_bytes(0) == measured(stack(wraps=wraps)).kept_bytes(0)
    assert [reading.calls for reading in knob._readings] == [3] * 4
    assert all(reading.again_ns for reading in knob._readings)


@pytest.mark.slow
def test_larger_inputs_than_the_measured_ones_keep_more() -> None:
    net = stack()
    knob = measured(net)
    before = knob.kept_bytes(0)
    net(torch.randn(5 * SAMPLES, WIDTH)).sum().backward()
    net(torch.randn(SAMPLES, WIDTH)).sum().backward()
    assert knob.kept_bytes(0) == 5 * before


def with_memory(monkeypatch: pytest.MonkeyPatch, folder: Path, available_kib: int, total_kib: int = 10_000) -> None:
    (folder / "meminfo").write_text(f"MemTotal: {total_kib} kB\nMemAvailable: {available_kib} kB\n")
    monkeypatch.setattr(memory_limit, "KernelFiles", lambda: KernelFiles(proc=folder))


@pytest.mark.slow
def test_only_what_fits_is_offered_and_a_rank_without_room_votes_no(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    knob = measured(stack())  # a block keeps 6 KiB
    with_memory(monkeypatch, tmp_path, 1013)
    assert knob.domain() == (2, 3, 4)
    assert [knob.is_barred(value) for value in (4, 2, 1)] == [False, False, True]
    with_memory(monkeypatch, tmp_path, 1001)
    assert knob.domain() == (4,)
    assert "activations that are kept would bring the host's memory to 90%" in str(knob.refusal())
    assert [measured(stack(wraps=False)).is_barred(value) for value in (0, 4)] == [False, False]


def test_what_the_process_held_at_most_counts_beside_what_it_holds_between_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_memory(monkeypatch, tmp_path, 5_000)
    assert memory_limit.beyond_memory(torch.device("cpu"), 3_500 * 1024, "it") is None
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("VmHWM:\t    2000 kB\nVmRSS:\t    1000 kB\n")
    reason = memory_limit.beyond_memory(torch.device("cpu"), 3_500 * 1024, "it")
    assert reason == "it would bring the host's memory to 95%"


def test_activations_lie_where_offloaded_parameters_are_gathered() -> None:
    net = stack()
    assert knob_of(net)._device.type == "cpu"
    for parameter in net.parameters():
        parameter.device_mesh = SimpleNamespace(device_type="cuda")  # type: ignore[attr-defined]
    assert knob_of(net)._device.type == "cuda"


@pytest.mark.slow
def test_memory_that_gets_short_later_has_all_ranks_go_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = stack()
    knob = measured(net)
    with_memory(monkeypatch, tmp_path, 5_000)
    knob.apply(1)
    train(net, 4, lambda step: knob.on_boundary())
    assert knob.objection() is None
    with_memory(monkeypatch, tmp_path, 400)
    train(net, 4, lambda step: knob.on_boundary())
    objection = knob.objection()
    assert objection is Objection.BLOCKS
    assert [knob.is_barred(value) for value in (1, 4)] == [True, False]

    objections: dict[int, int] = {}
    guard = ObjectionRollback("checkpointed_blocks", lambda: objections)
    guard.begin(JobFacts("job", 2), [KnobSpace("checkpointed_blocks", 4, (1, 4))], turns_knobs=True)
    guard.judgeable(Observation(7, 10, {"checkpointed_blocks": 1}, 10))
    assert not guard.must_act()
    objections[1] = int(objection)
    assert guard.must_act()
    proposal, records = guard.take_back(None, [])
    assert proposal is not None
    assert proposal.values == {"checkpointed_blocks": 4}
    assert "on rank 1 memory gets short" in records[0].reason

    knob.apply(4)
    assert knob.objection() is None, "a rank reports one objection, and others may follow"
    assert knob.is_barred(1), "for good"


def test_without_a_use_for_the_memory_plain_blocks_are_left_alone() -> None:
    knob = measured(stack(wraps=False), is_useful=False)
    assert "no larger micro-batch could use the memory" in str(knob.refusal())
    assert knob.costs() is None
    assert measured(stack(), is_useful=False).refusal() is None


def test_more_checkpointed_blocks_than_the_script_has_are_tried_with_a_larger_micro_batch_only() -> None:
    knob = measured(stack(wraps=False))
    assert [knob.companions(value) for value in (0, 1)] == [(), (("micro_batch", 2),)]
    assert measured(stack()).companions(1) == ()


class WithoutDropout(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


def test_a_size_that_did_not_fit_may_fit_with_more_checkpointed_blocks_and_bars_fewer() -> None:
    net = stack(WithoutDropout, wraps=False)
    batcher = MicroBatcher(net, 1)
    batcher.batch_samples = 4
    micro = MicroBatchActuator(net, batcher, TuneConfig())
    knob = open_checkpointed_blocks(net, TuneConfig(), 1, sizes=[micro], charge=print)
    assert knob is not None
    batcher.samples.checkpointed = knob.value
    train(net, 4, lambda step: knob.on_boundary())
    micro.apply(4)
    assert batcher.samples.retreat() == (4, 1)
    assert [micro.is_barred(4), micro.is_barred(4, {"checkpointed_blocks": 1, "micro_batch": 4})] == [True, False]
    with pytest.raises(ActuatorError, match="did not fit"):
        micro.apply(4)
    knob.apply(2)
    micro.apply(4)
    assert not knob.is_barred(1, {"checkpointed_blocks": 1, "micro_batch": 4})
    assert knob.is_barred(0, {"checkpointed_blocks": 0, "micro_batch": 4}), "that did not fit"
    assert not knob.is_barred(0, {"checkpointed_blocks": 0, "micro_batch": 1})


def test_a_model_without_repeated_blocks_has_no_such_knob() -> None:
    for net in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))):
        assert open_checkpointed_blocks(net, TuneConfig(), 1, sizes=(), charge=print) is None
    left_out = TuneConfig(knobs=("micro_batch",))
    assert open_checkpointed_blocks(stack(), left_out, 1, sizes=(), charge=print) is None


def test_the_largest_list_is_taken() -> None:
    net = nn.ModuleDict({"small": stack(count=2, wraps=False), "large": stack(count=3, wraps=False)})
    assert [block.name for block in knob_of(net).blocks] == ["large.0", "large.1", "large.2"]


# --- what is refused -----------------------------------------------------------------------------------------


class Normalized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Collecting(Block):
    """Keeps something of every forward in a list, as routers keep their auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(x.detach().mean())
        return super().forward(x)


class Filling(Block):
    """Changes the items of a collection and a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.seen = {"calls": 0}, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return super().forward(x)

    def count(self) -> None:
        self.counts["calls"] += 1


class Adding(Filling):
    def count(self) -> None:
        self.seen += 1


class OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.clone())
        with torch.no_grad():
            x.mul_(0.5)
        return y


class OtherRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Unstable(Block):
    """Computes something else in backward, as arithmetic whose order differs from run to run."""

    def forward(self, x: Tensor) -> Tensor:
        is_again = torch._C._current_graph_task_id() != -1
        return super().forward(x) * (1 + 1e-6 * is_again)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0 * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


class ReadsTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Same.apply(super().forward(x))


class ChecksItself(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class InsideCheckpoint(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class ByKeyword(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x=x)
        return x


class WithCache(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x, SimpleNamespace())
        return x


class TakesCache(Block):
    def forward(self, x: Tensor, cache: object) -> Tensor:
        return super().forward(x)


class WithList(nn.Sequential):
    """Collects something of every block in a list that outlives the step."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x, self.means)
        return x


class Appends(Block):
    def forward(self, x: Tensor, means: list[Tensor]) -> Tensor:
        means.append(x.detach().mean())
        return super().forward(x)


class Frozen(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


class Attention(nn.Sequential):
    """Sets a global switch in forward only, as `sdpa_kernel` does."""

    def forward(self, x: Tensor) -> Tensor:
        GatedBlock.is_on = True
        try:
            return super().forward(x)
        finally:
            GatedBlock.is_on = False


class GatedBlock(Block):
    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if GatedBlock.is_on else super().forward(x).sin()


def plain(kind: type[Block] = Block, holder: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return holder(*stack(kind, wraps=False))


def hooked() -> nn.Sequential:
    net = stack()
    net[1]._checkpoint_wrapped_module.back.register_forward_hook(lambda *_: None)
    return net


def compiled() -> nn.Sequential:
    net = stack()
    net[2].compile(backend="eager")
    return net


class FullyShardedDataParallel(nn.Sequential):
    """As FSDP1's class is called."""


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "statistics": (lambda: stack(Normalized), r"0 changes its norm\.num_batches_tracked \(version\) in forward"),
    "statistics, plain": (lambda: plain(Normalized), "norm"),
    "an attribute": (lambda: stack(Counting), "0 changes its calls in forward"),
    "a list": (lambda: plain(Collecting), r"0 changes its losses(\[\d\]| \(length\)) in forward"),
    "an item": (lambda: plain(Filling), r"0 changes its counts\[0\] in forward"),
    "a tensor": (lambda: stack(Adding), r"0 changes its seen \(version\) in forward"),
    "a generator": (lambda: stack(OwnGenerator), "random generator of its own"),
    "an input in place": (lambda: plain(InPlace), "0 computes or saves something else when it runs again"),
    "random numbers": (lambda: plain(OtherRandom), "0 changes the random numbers of Python or numpy in forward"),
    "random numbers, wrapped": (lambda: stack(OtherRandom), "0 changes the random numbers of Python or numpy"),
    "other bits": (lambda: plain(Unstable), "0 computes or saves something else when it runs again"),
    "a context": (lambda: plain(GatedBlock, Attention), "0 computes or saves something else when it runs again"),
    "read twice": (lambda: plain(ReadsTwice), "0 has a saved tensor that backward reads twice"),
    "checkpoint in the block": (lambda: plain(ChecksItself), "keeps nothing for backward but its inputs"),
    "checkpoint around": (lambda: plain(holder=InsideCheckpoint), "0 is inside a checkpoint"),
    "called twice": (lambda: plain(holder=Twice), "0 was called 2 times in 1 forwards"),
    "by keyword": (lambda: plain(holder=ByKeyword), "gets its tensors by keyword"),
    "a list that it is given": (
        lambda: plain(Appends, WithList),
        r"0 changes its argument 1(\[\d\]| \(length\)) in forward",
    ),
    "other inputs": (lambda: plain(TakesCache, WithCache), "it is called with a SimpleNamespace"),
    "no gradient": (lambda: nn.Sequential(*stack(Frozen), nn.Linear(WIDTH, 1)), "keeps nothing for backward"),
    "one block": (lambda: stack(count=1), "there is one block"),
    "hooks": (hooked, r"1\._checkpoint_wrapped_module\.back|1\.back has forward hooks"),
    "compiled": (compiled, "2 is compiled"),
    "FSDP1": (lambda: FullyShardedDataParallel(*stack()), "FSDP1"),
    "reentrant": (lambda: stack(checkpoint_impl=CheckpointImpl.REENTRANT), "0 uses the reentrant checkpoint"),
    "no random state": (lambda: stack(preserve_rng_state=False), "0 has preserve_rng_state=False"),
    "context_fn": (lambda: stack(context_fn=lambda: (None, None)), "0 has a context_fn"),
    "no check": (lambda: stack(determinism_check="none"), "0 has determinism_check='none'"),
    "own function": (lambda: stack(checkpoint_fn=checkpoint, use_reentrant=False, own=1), "0 is checkpointed with own"),
    "nested": (lambda: nn.Sequential(*[checkpoint_wrapper(stack(count=2)) for _ in range(2)]), "inside another"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_exact_is_refused_with_the_reason_and_the_job_goes_on(case: str) -> None:
    make, reason = REFUSED[case]
    net = make()
    knob = knob_of(net)
    if case in ("context_fn", "own function", "reentrant", "compiled"):  # they need more to train
        for _ in range(3):
            knob.on_boundary()
        seen = expected = []
    else:
        expected = train(make(), 5)
        seen = train(net, 5, lambda step: knob.on_boundary())
    assert seen == expected
    refusal = knob.refusal()
    assert refusal is not None
    assert re.search(reason, refusal), refusal


def test_a_stage_of_a_pipeline_is_refused() -> None:
    net = stack()
    assert blocks_module.refusal_of(net, blocks_module.find_blocks(net), 2) == (
        "not all ranks are known to share the model (stages of a pipeline?)"
    )


def test_ranks_whose_blocks_differ_have_other_layouts() -> None:
    layouts = {knob_of(net).layout() for net in (stack(), stack(), stack(count=3), stack(Counting))}
    assert len(layouts) == 3


def test_a_torch_without_the_wrappers_names_is_left_alone() -> None:
    try:
        suppose_missing(["torch._C._autograd._top_saved_tensors_default_hooks"])
        assert "activation checkpointing is not tuned" in str(measured(stack()).refusal())
    finally:
        forget()


def test_an_error_in_the_block_reaches_the_script_and_leaves_its_checkpoint_in_place() -> None:
    class Breaks(Block):
        is_broken = False

        def forward(self, x: Tensor) -> Tensor:
            if Breaks.is_broken:
                raise ValueError("planted")
            return super().forward(x)

    net = stack(Breaks)
    own = [block.checkpoint_fn for block in net if isinstance(block, CheckpointWrapper)]
    knob = measured(net)
    knob.apply(0)
    Breaks.is_broken = True
    with pytest.raises(ValueError, match="planted"):
        train(net, 1)
    assert [block.checkpoint_fn for block in net if isinstance(block, CheckpointWrapper)] == own


class SlowDevice:
    """A CUDA event of a device that takes a hundred times as long as its host, which does not wait for it."""

    def __init__(self, *, enable_timing: bool) -> None:
        self.ns = 0

    def record(self) -> None:
        self.ns = 100 * time.monotonic_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: SlowDevice) -> float:
        return (end.ns - self.ns) / 1e6


def test_the_step_is_the_devices_where_the_host_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", SlowDevice)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    net = stack()
    knob = knob_of(net)
    knob._device = torch.device("cuda")
    train(net, 4, lambda step: knob.on_boundary())
    costs = knob.costs()
    assert costs is not None
    assert costs.again_ratio is not None
    assert 0 < costs.again_ratio < 1


# --- the forecast ------------------------------------------------------------------------------------------


def test_the_gain_is_the_share_of_the_step_in_which_blocks_run_again() -> None:
    model = GainModel(JobFacts("job", 2, blocks=BlockCosts(8, 8, 0.2, None)))

    def gain(here: int, to: int) -> float:
        forecast = model.expect("checkpointed_blocks", {"checkpointed_blocks": here}, to)
        assert forecast is not None
        assert abs(forecast.gain_ratio) / 2 <= forecast.spread_ratio <= abs(forecast.gain_ratio) / 2 + 0.01
        return forecast.gain_ratio

    assert gain(8, 4) == pytest.approx(0.1)
    assert gain(8, 0) == pytest.approx(0.2)
    assert gain(0, 8) == pytest.approx(-0.2 / 0.8)
    assert (1 - gain(8, 4)) * (1 - gain(4, 0)) == pytest.approx(1 - gain(8, 0))
    for home, tried in ((8, True), (0, False)):  # more checkpointed blocks are never tried alone
        model = GainModel(JobFacts("job", 2, blocks=BlockCosts(8, home, 0.02, None)))
        search = GeometricSearch([KnobSpace("checkpointed_blocks", home, (0, 2, 4, 6, 8))])
        found, _ = search.candidates({"checkpointed_blocks": home}, model.expect, None)
        assert bool(found) == tried
    for blocks in (None, BlockCosts(8, 8, None, None)):
        unknown = GainModel(JobFacts("job", 2, blocks=blocks))
        assert unknown.expect("checkpointed_blocks", {"checkpointed_blocks": 8}, 4) is None
