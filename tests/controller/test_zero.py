"""ZeRO's knobs on a stand-in engine with the attributes of DeepSpeed 0.19; the real one is in tests/adapters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pacecar.config import TuneConfig
from pacecar.controller.knobs.actuator import ActuatorError
from pacecar.controller.knobs.deepspeed_zero import ZeroBucketActuator, ZeroPrefetchActuator, zero_knobs

PREFETCH = "_PartitionedParameterCoordinator__prefetch_bucket_sz"


class DeepSpeedZeroOptimizer:
    def __init__(self, elements):
        self.reduce_bucket_size = elements
        self.ipg_buckets = {torch.float32: SimpleNamespace(elements=0)}
        self.ready_for_gradients = False


class DeepSpeedZeroOptimizer_Stage3:  # noqa: N801  DeepSpeed's name
    def __init__(self, elements):
        self.reduce_bucket_size = elements
        self.ipg_buckets = {torch.float32: SimpleNamespace(elements=0)}
        coordinator = SimpleNamespace(**{PREFETCH: elements})
        self.parameter_offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)


class DeepSpeedEngine(nn.Module):
    def __init__(self, optimizer):
        super().__init__()
        self.module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(16)))
        self.optimizer = optimizer


class PipelineEngine(DeepSpeedEngine):
    pass


CONFIG = TuneConfig(bucket_bytes_min=1024)
LARGEST, TOTAL = 32 * 32 * 4, 16 * 32 * 32 * 4


def bucket(elements=TOTAL // 4, stage=2):
    kind = DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    return ZeroBucketActuator(DeepSpeedEngine(kind(elements)), CONFIG)


def test_only_an_engine_has_these_knobs_and_only_those_that_are_asked_for():
    engine = DeepSpeedEngine(DeepSpeedZeroOptimizer(1024))
    assert [knob.knob for knob in zero_knobs(engine, CONFIG)] == ["zero_bucket_bytes", "zero_prefetch_bytes"]
    assert zero_knobs(engine, TuneConfig(knobs=("bucket_bytes",))) == []
    assert zero_knobs(nn.Linear(2, 2), CONFIG) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_sizes_are_offered_from_the_largest_gradient_to_all_of_them(stage):
    knob = bucket(stage=stage)
    assert knob.value() == TOTAL
    assert knob.domain() == (4096, 8192, 16384, 32768, 65536)
    assert knob.domain()[0] == LARGEST
    knob.apply(8192)
    assert (knob.value(), knob._optimizer.reduce_bucket_size) == (8192, 2048)
    assert knob.domain() == (4096, 8192, 16384, 32768, 65536), "the way back stays open"


def test_zero_3_allocated_its_bucket_once_so_it_never_gets_larger():
    knob = bucket(elements=2048, stage=3)
    assert knob.refusal() is None
    assert knob.domain() == (4096, 8192)
    with pytest.raises(ActuatorError, match="room"):
        knob.apply(65536)
    assert bucket(elements=2048, stage=2).domain()[-1] == 65536


@pytest.mark.parametrize("what", ["a filled bucket", "an open update"])
def test_nothing_changes_while_gradients_are_on_their_way(what):
    knob = bucket()
    assert knob.refusal() is None
    if what == "a filled bucket":
        knob._optimizer.ipg_buckets[torch.float32].elements = 1024
    else:
        knob._optimizer.ready_for_gradients = True
    with pytest.raises(ActuatorError, match="being filled"):
        knob.apply(8192)
    assert knob.value() == TOTAL


@pytest.mark.parametrize("missing", ["reduce_bucket_size", "ipg_buckets", "ready_for_gradients"])
def test_an_attribute_that_another_version_does_not_have_is_never_made_up(missing):
    knob = bucket()
    delattr(knob._optimizer, missing)
    if missing == "reduce_bucket_size":
        assert "not understood" in knob.refusal()
    with pytest.raises(ActuatorError, match="not understood"):
        knob.apply(8192)
    assert not hasattr(knob._optimizer, missing)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (PipelineEngine(DeepSpeedZeroOptimizer(1024)), "the engine is a PipelineEngine"),
        (DeepSpeedEngine(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "no ZeRO 1 to 3"),
        (DeepSpeedEngine(None), "no ZeRO 1 to 3"),
        (DeepSpeedEngine(DeepSpeedZeroOptimizer(0)), "reduce_bucket_size is 0"),
        (DeepSpeedEngine(DeepSpeedZeroOptimizer(float("inf"))), "reduce_bucket_size is inf"),
    ],
    ids=["pipeline", "no ZeRO", "no optimizer", "nothing", "no number"],
)
def test_what_is_not_known_is_refused(engine, why):
    assert why in zero_knobs(engine, CONFIG)[0].refusal()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("zenflow", True, "ZenFlow"),
        ("has_moe_layers", True, "experts"),
        ("is_deepcompile_active", lambda: True, "DeepCompile"),
        ("managed_gradient_accumulation", lambda: False, "accumulation itself"),
    ],
)
def test_parts_of_deepspeed_that_reduce_otherwise_are_refused(name, value, why):
    knob = bucket()
    setattr(knob._engine, name, value)
    assert why in knob.refusal()


def test_only_zero_3_gathers_ahead():
    assert "gather no parameters" in ZeroPrefetchActuator(DeepSpeedEngine(DeepSpeedZeroOptimizer(64)), CONFIG).refusal()
    knob = ZeroPrefetchActuator(DeepSpeedEngine(DeepSpeedZeroOptimizer_Stage3(2048)), CONFIG)
    assert knob.refusal() is None
    knob.apply(65536)
    assert getattr(knob._optimizer.parameter_offload.get_param_coordinator(), PREFETCH) == 16384


def test_ranks_with_other_parameters_have_another_layout():
    other = bucket()
    other._engine.module.append(nn.Linear(2, 2))
    assert bucket().layout() == bucket().layout() != other.layout()
    assert bucket(stage=3).layout() != bucket().layout()
