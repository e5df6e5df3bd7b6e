"""Compression and bucket sizes turned together in real jobs: what is exact stays exact, and every loss is known."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import TuneConfig
from pacecar.controller.knobs.actuator import ActuatorError
from pacecar.controller.knobs.ddp import compression
from pacecar.controller.knobs.ddp.buckets import BucketActuator, FirstBucketActuator
from pacecar.controller.knobs.ddp.comm_hook import sent_by_gather, sent_by_reduce
from pacecar.controller.knobs.ddp.compression import CHOICES, CompressionActuator, sent_ratio
from pacecar.controller.knobs.ddp.reducer import DdpReducer
from tests.kit.lone_rank import lone_rank

Rank = dict[str, Any]
Run = Callable[..., list[list[Rank]]]

FLAVOURS: list[tuple[dict[str, Any], str]] = [
    ({}, "ordered"),
    ({"view": True, "keeps_grads": True, "micro": 2}, "ordered"),
    ({"unused": True, "micro": 2}, "helper"),
    ({"unused": True, "view": True}, "helper"),
    ({"static": True}, "helper"),
    ({"compiled": "inside", "micro": 2}, "ordered"),
    ({"compiled": "outside"}, "ordered"),
]


def check(rank: Rank, recipe: str, options: dict[str, Any]) -> None:
    assert (rank["recipe"], set(rank["refusals"].values())) == (recipe, {None}), options
    assert rank["unequal"]["none"] == 0, f"no compression is plain DDP to the last bit: {options}"
    assert rank["unequal"]["fp16"] == 0, f"fp16 is torch's own fp16 hook to the last bit: {options}"
    assert 0 < rank["worst"]["bf16"] < 2**-7, f"bf16 keeps 8 bits: {options}"
    assert rank["disagreements"] == 0, f"all ranks hold the same gradients: {options}"
    assert rank["not_once"] == 0, f"three knobs in one switch build one Reducer: {options}"


@pytest.mark.distributed
@pytest.mark.slow
def test_buckets_and_compression_alternate_in_every_flavour_of_ddp(run_ranks: Run) -> None:
    *flavours, feedback = run_ranks("job_compression.py", 2, [*(o for o, _ in FLAVOURS), {"feedback": True}])
    for (options, recipe), ranks in zip(FLAVOURS, flavours, strict=True):
        for rank in ranks:
            check(rank, recipe, options)
    for rank in feedback:
        check_feedback(rank, 0.1)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.slow
def test_no_compression_is_plain_ddp_to_the_last_bit_at_three_ranks_too(run_ranks: Run) -> None:
    """Division by three rounds: a hook that does nothing would differ here."""
    jobs: list[dict[str, Any]] = [{"rounds": 8}, {"view": True, "keeps_grads": True, "rounds": 8}]
    *plain, feedback = run_ranks("job_compression.py", 3, [*jobs, {"feedback": True}])
    for options, ranks in zip(jobs, plain, strict=True):
        for rank in ranks:
            check(rank, "ordered", options)
    for rank in feedback:
        check_feedback(rank, 0.15)


def check_feedback(rank: Rank, sent: float) -> None:
    assert rank["off"] < 1e-6, "reduced plus kept is the sum of all gradients, whatever the buckets were"
    assert rank["sent_ratio"] == pytest.approx(sent, rel=1e-2), "5 % of the values at twice their size, to every rank"
    assert rank["inf_is_seen"]
    assert rank["residuals_stay_finite"]
    assert rank["residuals_after_none"] == 0, "taken back, error feedback is forgotten"


# --- what is offered ---------------------------------------------------------------------------------


def test_a_rank_sends_what_the_ring_algorithms_send() -> None:
    assert [sent_by_reduce(1200, n) for n in (2, 3, 4)] == [1200, 1600, 1800]
    assert [sent_by_gather(100, n) for n in (2, 3, 4)] == [100, 200, 300]


def test_top_k_is_cheaper_on_few_ranks_and_dearer_on_many() -> None:
    def share(ranks: int, ratio: float = 0.01) -> float:
        found = sent_ratio("topk", element_size=4, ranks=ranks, topk_ratio=ratio)
        assert found is not None
        return found

    assert share(2) == pytest.approx(0.02)
    assert share(100) == pytest.approx(1.0)
    assert share(8, 0.125) == pytest.approx(1.0)


def test_bf16_of_bf16_saves_nothing_and_of_float64_three_quarters() -> None:
    shares = [sent_ratio("bf16", element_size=n, ranks=2, topk_ratio=0.01) for n in (2, 4, 8)]
    assert shares == [1.0, 0.5, 0.25]


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a single process believe that it has a peer: what is offered never communicates."""
    with lone_rank(tmp_path):
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        yield


def actuator(model: nn.Module, *choices: str, **options: Any) -> CompressionActuator:
    allowed: Any = choices or ("bf16", "fp16", "powersgd", "topk")
    return CompressionActuator(TuneConfig(compression=allowed), DdpReducer(model), **options)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def test_on_gloo_powersgd_is_not_offered_and_the_reason_is_its_deadlock(two_ranks: None) -> None:
    knob = actuator(DistributedDataParallel(net()))
    assert [CHOICES[v] for v in knob.domain()] == ["none", "bf16", "fp16", "topk"]
    assert "deadlocks with more than one bucket" in str(knob.unusable("powersgd"))


def test_on_nccl_powersgd_is_offered(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_backend", lambda *_: "nccl")
    assert "powersgd" in {CHOICES[v] for v in actuator(DistributedDataParallel(net())).domain()}


def test_only_what_the_user_allows_is_offered(two_ranks: None) -> None:
    assert [CHOICES[v] for v in actuator(DistributedDataParallel(net()), "fp16").domain()] == ["none", "fp16"]


def test_a_gradient_scaler_leaves_error_feedback_out(two_ranks: None) -> None:
    knob = actuator(DistributedDataParallel(net()), has_scaler=True)
    assert [CHOICES[v] for v in knob.domain()] == ["none", "bf16", "fp16"]
    assert "GradScaler" in str(knob.unusable("topk"))


def test_a_model_in_half_precision_is_refused_with_every_choice_s_reason(two_ranks: None) -> None:
    knob = actuator(DistributedDataParallel(net().bfloat16()), "bf16", "fp16")
    assert "bf16: it would send 1.00 times the bytes" in str(knob.refusal())


def test_a_hook_of_the_script_s_own_is_refused_by_name(two_ranks: None) -> None:
    ddp = DistributedDataParallel(net())

    def my_hook(state, bucket):  # type: ignore[no-untyped-def]
        raise AssertionError("never called: no backward runs here")

    ddp.register_comm_hook(None, my_hook)
    assert "my_hook" in str(actuator(ddp).refusal())


def test_sparse_gradients_are_refused(two_ranks: None) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True), nn.Linear(4, 4)))
    assert "sparse gradients" in str(actuator(ddp).refusal())


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("_use_python_reducer", True, "python reducer"),
        ("mixed_precision", object(), "mixed_precision"),
        ("_delay_all_reduce_params", [1], "delay_all_reduce"),
    ],
)
def test_what_belongs_to_the_reducer_refuses_all_three_knobs(
    two_ranks: None, attribute: str, value: Any, reason: str
) -> None:
    ddp = DistributedDataParallel(net())
    setattr(ddp, attribute, value)
    config = TuneConfig(bucket_bytes_min=1024, first_bucket_bytes_min=1024)
    reducer = DdpReducer(ddp)
    knobs = (BucketActuator(config, reducer), FirstBucketActuator(config, reducer), actuator(ddp))
    assert all(reason in str(knob.refusal()) for knob in knobs)


def test_not_under_ddp_the_reason_says_what_to_do() -> None:
    knob = actuator(net())
    assert "wrap it in torch.nn.parallel.DistributedDataParallel" in str(knob.refusal())
    with pytest.raises(ActuatorError):
        knob.value()


# --- one Reducer, several knobs -------------------------------------------------------------------


@pytest.fixture
def shared(two_ranks: None) -> tuple[Any, DdpReducer, BucketActuator, FirstBucketActuator]:
    ddp = DistributedDataParallel(net())
    for _ in range(3):
        ddp(torch.ones(2, 64)).sum().backward()
    config = TuneConfig(bucket_bytes_min=4096, first_bucket_bytes_min=1024)
    reducer = DdpReducer(ddp)
    buckets, first = BucketActuator(config, reducer), FirstBucketActuator(config, reducer)
    assert (buckets.refusal(), first.refusal()) == (None, None)
    return ddp, reducer, buckets, first


def test_the_first_bucket_keeps_its_size_when_the_others_change(shared: Any) -> None:
    ddp, reducer, buckets, first = shared
    own = (ddp.bucket_bytes_cap, ddp._bucket_config)
    assert first.value() == 2**20, "torch's own first bucket"
    assert first.domain() == (1024, 2048, 4096, 8192, 16384, 32768, 2**20)
    first.apply(2048)
    buckets.apply(16384)
    assert (buckets.value(), first.value()) == (16384, 2048)
    assert reducer._sizes(reducer.plan) == (16384, 2048)
    assert (ddp.bucket_bytes_cap, ddp._bucket_config) == own, "a pickle of DDP has what the user gave"
    assert DdpReducer(ddp).plan == reducer.plan, "the next tuner knows what is in force"
    buckets.apply(1024)
    assert first.value() == 2048, "the value stays what was asked for"
    assert reducer._sizes(reducer.plan) == (1024, 1024), "and is no larger than the others in effect"


def test_what_is_gathered_is_forgotten_when_something_raises_inside(shared: Any) -> None:
    ddp, reducer, buckets, first = shared
    before = weakref.ref(ddp.reducer)

    def fail() -> None:
        with buckets.gathered(), first.gathered():
            buckets.apply(8192)
            raise RuntimeError("another knob failed")

    with pytest.raises(RuntimeError, match="another knob"):
        fail()
    assert ddp.reducer is before()
    first.apply(4096)
    assert buckets.value() == 25 * 2**20, "nothing of the failed switch comes along with the next"
    assert reducer.plan.first_bytes == 4096


def test_a_gathered_switch_that_fails_leaves_the_old_plan_in_a_new_reducer(shared: Any, monkeypatch: Any) -> None:
    ddp, reducer, buckets, first = shared
    calls = []
    build = reducer._rebuild

    def once(ddp: Any, plan: Any) -> None:
        calls.append(plan)
        if len(calls) == 1:
            raise ValueError("planted")
        build(ddp, plan)

    monkeypatch.setattr(reducer, "_rebuild", once)
    before = weakref.ref(ddp.reducer)

    def turn() -> None:
        with buckets.gathered():
            buckets.apply(8192)
            first.apply(2048)

    with pytest.raises(ActuatorError, match="planted"):
        turn()
    assert (buckets.value(), first.value()) == (25 * 2**20, 2**20)
    assert before() is None, "it is a new Reducer of the old sizes: the other ranks then make one too"


def test_ranks_of_which_only_some_have_the_first_bucket_s_knob_have_different_layouts(shared: Any) -> None:
    ddp, reducer, *_ = shared
    alone = DdpReducer(ddp)
    alone.refusal()
    alone.prepare()
    assert alone.layout() != reducer.layout()
