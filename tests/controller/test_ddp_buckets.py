"""DDP's bucket size changes live: gradients equal to the last bit, no growth, and impossible changes are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar import torch_internals
from pacecar.config import TuneConfig
from pacecar.controller.knobs.actuator import ActuatorError
from pacecar.controller.knobs.ddp import torch_internals as ddp_internals
from pacecar.controller.knobs.ddp.buckets import BucketActuator
from pacecar.controller.knobs.ddp.reducer import DdpReducer
from pacecar.profiler.ranks.data_parallel import wrapper_of_others
from tests.kit.lone_rank import lone_rank

Run = Callable[..., list[list[dict[str, Any]]]]
ROUNDING = 1e-6


FLAVOURS: list[tuple[dict[str, Any], str]] = [
    ({"view": True, "micro": 3, "hook": True}, "ordered"),
    ({"compiled": True, "micro": 2}, "ordered"),
    ({"unused": True, "micro": 2}, "helper"),
    ({"static": True}, "helper"),
]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("switches", "growth"), [(28, 45), pytest.param(64, 150, marks=pytest.mark.full)])
def test_live_switches_give_the_gradients_of_a_fresh_ddp_to_the_last_bit_and_grow_nothing(
    run_ranks: Run, switches: int, growth: int
) -> None:
    """Consecutive switches compared gradient by gradient, more watched for growth, then every flavour of DDP."""
    alone = {"switches": switches, "growth": growth, "held": True}
    jobs = [alone, *({"switches": 8, **options} for options, _ in FLAVOURS)]
    first, *flavours = run_ranks("job_buckets.py", 2, jobs)
    for rank in first:
        assert (rank["refusal"], rank["recipe"], rank["unequal"]) == (None, "ordered", 0)
        assert rank["reducers"] == 0, "every Reducer that was replaced is gone"
        assert rank["resident_late"] - rank["resident_early"] < 2 * 2**20
        assert rank["buckets_back"] == "761984", "the default's buckets are back as DDP made them"
        assert "its buckets would leak" in rank["held"]
        assert rank["value_after_held"] == 25 * 2**20
    assert first[0]["layout"] == first[1]["layout"]
    assert sum(first[0]["gradient_bytes"]) == 761984
    assert first[0]["gradient_bytes"][0] == 64 * 4, "the last layer's bias is ready first"
    for (options, recipe), ranks in zip(FLAVOURS, flavours, strict=True):
        for rank in ranks:
            assert (rank["refusal"], rank["recipe"], rank["unequal"]) == (None, recipe, 0), options


@pytest.mark.distributed
@pytest.mark.slow
def test_three_ranks_differ_by_the_order_of_summation_only(run_ranks: Run) -> None:
    for rank in run_ranks("job_buckets.py", 3, [{"switches": 14}])[0]:
        assert rank["worst"] < ROUNDING


# --- refusals: each names the thing and what to do ------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    with lone_rank(tmp_path):
        yield


@pytest.fixture
def two_ranks(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a single process believe that it has a peer: refusals never communicate."""
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))


def actuator(model: nn.Module) -> BucketActuator:
    return BucketActuator(TuneConfig(bucket_bytes_min=1024), DdpReducer(model))


def test_a_model_that_is_not_ddp_is_refused_by_name() -> None:
    knob = actuator(nn.Linear(2, 2))
    assert knob.refusal() == (
        "model is Linear, not DistributedDataParallel: bucket size is not tuned; wrap it in"
        " torch.nn.parallel.DistributedDataParallel and pass that to attach()"
    )
    assert knob._reducer.gradient_bytes() == ()
    with pytest.raises(ActuatorError, match="not DistributedDataParallel"):
        knob.value()


def test_another_library_s_wrapper_of_the_same_name_is_refused_by_the_library_s_name() -> None:
    kind = type("DistributedDataParallel", (nn.Linear,), {"__module__": "megatron.core.distributed"})
    assert wrapper_of_others(kind(2, 2)) == "megatron's DistributedDataParallel"
    assert wrapper_of_others(nn.Linear(2, 2)) is None
    assert str(actuator(kind(2, 2)).refusal()).startswith("model is megatron's DistributedDataParallel, not torch's: ")


def named(name: str, *, of: str = "") -> nn.Module:
    """Return a module of a class with that name, which inherits from one named `of`."""
    bases = (type(of, (), {}), nn.Linear) if of else (nn.Linear,)
    return type(name, bases, {"__module__": "torch.nn"})(2, 2)


def divided() -> nn.Module:
    """Return a module whose weight claims what a DTensor on a mesh of four ranks claims."""
    model = nn.Linear(2, 2)
    model.weight.device_mesh = SimpleNamespace(size=lambda _at: 4)
    model.weight.placements = (SimpleNamespace(is_shard=lambda: True),)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (named("FSDPLinear", of="FSDPModule"), "FSDPLinear (FSDP2)"),
        (nn.Sequential(named("FSDPLinear", of="FSDPModule")), "Sequential around FSDP2"),
        (named("FullyShardedDataParallel"), "FullyShardedDataParallel (FSDP1)"),
        (nn.Sequential(named("FullyShardedDataParallel")), "Sequential around FSDP1"),
        (divided(), "Linear, tensor-parallel on 4 ranks"),
    ],
)
def test_ddp_is_not_advised_where_ranks_hold_different_parameters(model: nn.Module, said: str) -> None:
    assert actuator(model).refusal() == (
        f"model is {said}, not under DistributedDataParallel: there are no buckets to size"
    )


def test_one_rank_has_nothing_to_win(group: None) -> None:
    assert (
        actuator(DistributedDataParallel(net())).refusal() == "DDP runs on one rank: there is no communication to tune"
    )


def test_an_apply_that_was_not_prepared_changes_nothing(group: None) -> None:
    ddp = DistributedDataParallel(net())
    reducer = ddp.reducer
    with pytest.raises(ActuatorError, match="one rank"):
        actuator(ddp).apply(4096)
    assert ddp.reducer is reducer


def test_a_signal_amid_a_switch_leaves_ddp_a_reducer(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = DistributedDataParallel(net())
    knob = actuator(ddp)
    for _ in range(3):
        ddp(torch.ones(2, 256)).sum().backward()
    assert knob._reducer.prepare() is None
    build = torch_internals.find("torch.distributed.Reducer")
    with monkeypatch.context() as patch:
        patch.setattr(ddp_internals, "build_ordered", Interrupted(ddp_internals.build_ordered))
        with pytest.raises(KeyboardInterrupt):
            knob.apply(4096)
    assert isinstance(ddp.reducer, build)
    assert knob.value() == 25 * 2**20
    copy.deepcopy(ddp)  # as torch.save(ddp)
    ddp(torch.ones(2, 256)).sum().backward()


class Interrupted:
    """A function that Ctrl-C interrupts at its first call."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self._is_due = True

    def __call__(self, *arguments: Any) -> object:
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt
        return self._function(*arguments)


def state_hook(state, bucket):
    """Without annotations: DDP compares them with types, not with their names."""
    raise AssertionError("never called: no backward runs here")


def test_a_hook_with_state_is_refused(two_ranks: None) -> None:
    ddp = DistributedDataParallel(net())
    ddp.register_comm_hook({"error": 1}, state_hook)
    assert "state_hook keeps state (dict)" in str(actuator(ddp).refusal())


def test_a_built_in_hook_is_refused(two_ranks: None) -> None:
    ddp = DistributedDataParallel(net())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert "built-in communication hook" in str(actuator(ddp).refusal())


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("_use_python_reducer", True, "python reducer"),
        ("mixed_precision", object(), "mixed_precision"),
        ("_delay_all_reduce_params", [1], "delay_all_reduce"),
        ("bucket_bytes_cap_list", [1, 2], "bucket_cap_mb_list"),
    ],
)
def test_features_bound_to_the_reducer_are_refused(two_ranks: None, attribute: str, value: Any, reason: str) -> None:
    ddp = DistributedDataParallel(net())
    setattr(ddp, attribute, value)
    assert reason in str(actuator(ddp).refusal())


def test_an_optimizer_in_backward_is_refused(two_ranks: None) -> None:
    ddp = DistributedDataParallel(net())
    ddp.module[0].weight._in_backward_optimizers = []
    assert "optimizer runs in backward" in str(actuator(ddp).refusal())


def test_a_torch_with_another_ddp_inside_is_refused_by_the_name_of_what_is_missing(two_ranks: None) -> None:
    ddp = DistributedDataParallel(net())
    del ddp._comm_hooks
    assert "DistributedDataParallel._comm_hooks" in str(actuator(ddp).refusal())


def test_a_reducer_with_unknown_arguments_leaves_the_helper(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = DistributedDataParallel(net())
    knob = actuator(ddp)
    for _ in range(3):
        ddp(torch.ones(2, 256)).sum().backward()

    class Changed:
        def __init__(self) -> None:
            """(self: R, process_group: c10d::ProcessGroup, novelty: int = 3)."""

    monkeypatch.setattr(dist, "Reducer", Changed)
    monkeypatch.setattr(torch_internals, "_found", {})  # it is another torch now
    assert knob.refusal() is None
    assert knob._reducer.recipe == "helper"


def test_small_models_have_nothing_to_choose(two_ranks: None) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    knob = BucketActuator(TuneConfig(), DdpReducer(ddp))
    assert "fit in the smallest bucket" in str(knob.refusal())
    assert knob.domain() == (25 * 2**20,)


def test_the_domain_is_geometric_and_includes_the_present_value(two_ranks: None) -> None:
    knob = BucketActuator(
        TuneConfig(bucket_bytes_min=10_000, bucket_bytes_max=2**18), DdpReducer(DistributedDataParallel(net()))
    )
    assert sum(knob._reducer.gradient_bytes()) == 2 * (256 * 256 + 256) * 4
    assert knob.domain() == (2**14, 2**15, 2**16, 2**17, 2**18, 25 * 2**20)


def test_parameters_that_changed_make_apply_fail_with_the_old_reducer_s_size(group: None) -> None:
    """Thawing a layer after wrapping would change what is synchronized, so the switch is not made."""
    ddp = DistributedDataParallel(net())
    knob = actuator(ddp)
    for _ in range(3):
        ddp(torch.ones(2, 256)).sum().backward()
    assert knob._reducer.prepare() is None
    knob.apply(4096)
    assert knob.value() == 4096
    assert ddp._get_ddp_logging_data()["bucket_cap_bytes"] == 4096
    ddp.module[0].weight.requires_grad_(False)
    reducer = ddp.reducer
    with pytest.raises(ActuatorError, match="parameters changed"):
        knob.apply(8192)
    assert knob.value() == 4096
    assert ddp.reducer is reducer
