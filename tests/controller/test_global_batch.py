"""A larger global batch: every sample once and in order, the learning rate by the rule and only inside `step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.config import TuneConfig
from pacecar.controller.consensus.capabilities import KnobOffer, Offer, decode_offer, encode_offer
from pacecar.controller.consensus.protocol import KNOBS_MAX
from pacecar.controller.knobs.actuator import ActuatorError
from pacecar.controller.knobs.batch.global_batch import (
    BatchGrouper,
    GlobalBatchActuator,
    LearningRate,
    open_global_batch,
    put_together,
)
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.knobs import KNOBS
from pacecar.profiler.hook.step_hooks import before_step
from tests.kit.lone_rank import lone_rank


@pytest.mark.slow
@given(st.integers(0, 20), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_every_sample_comes_once_and_in_order_whatever_is_switched(batches: int, multipliers: list[int]) -> None:
    grouper = BatchGrouper(MicroBatcher(None))
    loader = [torch.arange(3 * i, 3 * i + 3) for i in range(batches)]
    seen: list[int] = []
    sizes: list[int] = []
    for update in grouper.batches(loader):
        seen += update.tolist()
        sizes.append(len(update) // 3)
        assert grouper.present_samples == len(update)
        grouper.multiplier = multipliers[len(sizes) % len(multipliers)]  # turned at the boundary
    assert seen == list(range(3 * batches))
    wanted = [1] + [multipliers[i % len(multipliers)] for i in range(1, len(sizes))]
    assert sizes[:-1] == wanted[: len(sizes)][:-1]
    assert not sizes or sizes[-1] <= wanted[len(sizes) - 1]


def test_nests_are_put_together_and_what_is_no_tensor_is_the_first_s() -> None:
    first, second = ({"x": (torch.ones(2, 3), [torch.zeros(2)]), "tag": tag, "n": torch.tensor(5)} for tag in "ab")
    both = put_together([first, second])
    assert both["x"][0].shape == (4, 3)
    assert both["x"][1][0].shape == (4,)
    assert (both["tag"], int(both["n"])) == ("a", 5)


def test_batches_of_other_widths_are_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 4\)"):
        put_together([torch.ones(2, 3), torch.ones(2, 4)])


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_the_learning_rate_is_the_script_s_again_after_each_step(rate: Any) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": rate}])
    factors = iter([1.0, 4.0, 2.0])
    hooks = LearningRate(optimizer, lambda: next(factors))
    moved = []
    for _ in range(3):
        before = weight.item()
        weight.grad = torch.ones(1)
        optimizer.step()
        moved.append(before - weight.item())
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert moved == pytest.approx([0.1, 0.4, 0.2])
    hooks.remove()
    optimizer.step()


class Careful(torch.optim.SGD):
    """Takes smaller steps than torch, and fails when told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("told to")
        for group in self.param_groups:
            group["lr"] /= 8
        answer = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 8
        return answer


def test_the_learning_rate_is_raised_once_where_torch_runs_the_hooks_twice_and_also_after_a_step_that_failed() -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # from now on torch wraps the step inside the step too
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Careful([weight], lr=0.5)
    LearningRate(optimizer, lambda: 4.0)
    moved = []
    for fails in (False, True, False):
        optimizer.fails = fails
        before = weight.item()
        weight.grad = torch.ones(1)
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            optimizer.step()
        moved.append(before - weight.item())
    assert moved == [0.25, 0.0, 0.25]
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    with lone_rank(tmp_path):
        yield DistributedDataParallel(nn.Linear(2, 1))


def unanswered(numbers: Sequence[float]) -> Callable[[], None]:
    """Send nothing, and receive no answers."""
    return lambda: None


def knob(ddp: Any, **options: Any) -> tuple[GlobalBatchActuator, MicroBatcher, Any]:
    batcher = MicroBatcher(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    config = TuneConfig(mode="adaptive", **options)
    grouper = BatchGrouper(batcher)
    actuator = GlobalBatchActuator(
        optimizer, grouper, batcher, config, 2, start_gather=unanswered, noise_scale=lambda: 64.0
    )
    return actuator, batcher, optimizer


def used(actuator: GlobalBatchActuator, batcher: MicroBatcher, batches: int = 1) -> list[int]:
    """Iterate as a loop does; return the sizes that went through the model."""
    sizes = []
    for update in actuator.grouper.batches([torch.ones(8, 2)] * batches):
        sizes += [len(part) for part in batcher.split(update)]
    return sizes


def test_what_it_cannot_work_with_is_refused_with_the_reason(ddp: DistributedDataParallel) -> None:
    actuator, batcher, optimizer = knob(ddp)
    assert "pacer.batches(loader)" in str(actuator.refusal())
    with pytest.raises(ActuatorError):
        actuator.value()
    for _ in actuator.grouper.batches([torch.ones(8, 2)]):
        pass
    assert "micro-batches are not used" in str(actuator.refusal())
    used(actuator, batcher)
    assert actuator.refusal() is None
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert "scheduler counts this optimizer's steps" in str(actuator.refusal())
    actuator._config = TuneConfig(mode="adaptive", scheduler_by_samples=True)
    assert actuator.refusal() is None
    ddp.static_graph = True
    assert "static_graph" in str(actuator.refusal())


def test_off_unless_asked_for(ddp: DistributedDataParallel) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for config in (TuneConfig(), TuneConfig(mode="lossy"), TuneConfig(mode="adaptive", knobs=("micro_batch",))):
        assert open_global_batch(optimizer, MicroBatcher(ddp), config, 2, unanswered) is None
    with pacecar.attach(ddp, optimizer, tune="off") as pacer:
        assert [len(b) for b in pacer.batches([torch.ones(2), torch.ones(3)])] == [2, 3]


def test_values_are_multiples_of_the_loader_s_batch_within_the_bounds(ddp: DistributedDataParallel) -> None:
    actuator, batcher, _ = knob(ddp, batch_samples_max=70)
    used(actuator, batcher)
    assert (actuator.value(), actuator.domain()) == (16, (16, 32, 64))
    for value in (8, 40):
        with pytest.raises(ActuatorError, match="not a multiple"):
            actuator.apply(value)
    actuator.apply(64)
    assert actuator.value() == 64
    assert used(actuator, batcher, 6) == [8] * 6, "what went through the model at once stays what it was"


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0), ("adascale", 2.5)])
def test_the_rate_follows_the_update_s_true_size(ddp: DistributedDataParallel, rule: Any, factor: float) -> None:
    actuator, batcher, _ = knob(ddp, learning_rate_rule=rule)
    used(actuator, batcher)
    assert actuator.factor() == 1.0
    actuator.apply(64)
    factors = [actuator.factor() for _ in actuator.grouper.batches([torch.ones(8, 2)] * 5)]
    assert factors == pytest.approx([factor, 1.0]), "the rest of the epoch is one batch"


@pytest.mark.parametrize("is_back", [True, False], ids=["went back on all ranks", "stays on all ranks"])
def test_closing_leaves_the_rate_to_the_script_only_where_the_updates_are_its_own_again(
    ddp: DistributedDataParallel, *, is_back: bool
) -> None:
    actuator, batcher, optimizer = knob(ddp, learning_rate_rule="linear")
    used(actuator, batcher)
    actuator.apply(64)
    if is_back:
        actuator.apply(16)
    actuator.close()
    assert (batcher.meter is None) == is_back, "no measurement without use"
    rates: list[float] = []
    before_step(optimizer, lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    script = optimizer.param_groups[0]["lr"]
    for _ in actuator.grouper.batches([torch.ones(8, 2)] * 4):
        optimizer.step()
    assert rates == pytest.approx([script] * 4 if is_back else [4 * script])
    assert optimizer.param_groups[0]["lr"] == script


def test_every_knob_there_is_fits_into_a_proposal_and_an_offer() -> None:
    assert len(KNOBS) <= KNOBS_MAX
    domain = tuple(2**31 + i for i in range(64))
    offer = Offer(tuple(KnobOffer(knob.name, domain[0], domain, "x" * 200, "") for knob in KNOBS))
    assert decode_offer(encode_offer(offer)) == offer


# --- on real ranks --------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_measure_the_same_noise_scale_and_train_on_larger_batches(
    run_ranks: Callable[..., list[list[dict[str, Any]]]],
) -> None:
    noisy, quiet = run_ranks("job_global_batch.py", 2, [{"noise": 12.0, "steps": 500}, {"noise": 0.05, "steps": 120}])
    for ranks in (noisy, quiet):
        assert ranks[0]["noise_scales"] == ranks[1]["noise_scales"], "to the last bit: learning rates follow from it"
        assert ranks[0]["switches"] == ranks[1]["switches"]
        assert all(rank["models_agree"] for rank in ranks)
        assert all(rank["seen"] == rank["drawn"] for rank in ranks), "every sample once and in order"
        assert all(rank["state"] != "frozen" for rank in ranks)
    truth, found = noisy[0]["true_noise_scale"], noisy[0]["noise_scales"][-1]
    assert found == pytest.approx(truth, rel=0.5)
    assert "kept" in [outcome for outcome, _ in noisy[0]["verdicts"]], noisy[0]["verdicts"]
    assert "kept" not in [outcome for outcome, _ in quiet[0]["verdicts"]], "twice the samples for the same way"
    rates = dict(noisy[0]["rates"])
    assert rates[32] == pytest.approx(0.01)
    assert all(rate == pytest.approx(0.01 * (size / 32) ** 0.5) for size, rate in rates.items())
