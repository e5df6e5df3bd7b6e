"""Scheduled garbage collections: the knob, what a policy sees of their cost, and how they are taken back."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from pacecar.config import TuneConfig
from pacecar.controller.consensus.protocol import ProtocolMember
from pacecar.controller.consensus.step_observations import ObservationListener
from pacecar.controller.forecast.gain_model import GainModel
from pacecar.controller.guards.collection_cost import STEPS_MIN, CollectionCost
from pacecar.controller.knobs import garbage_collection
from pacecar.controller.knobs.actuator import ActuatorError, Objection
from pacecar.controller.knobs.garbage_collection import (
    BACKSTOP_OBJECTS,
    BLOCKS_MIN,
    FULL_EVERY,
    NEVER,
    CollectionSchedule,
    GcIntervalActuator,
    HostAndDeviceMemory,
    gc_knobs,
)
from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Proposal
from pacecar.controller.policy.tuning_policy import TuningPolicy
from pacecar.kernel_files.reader import KernelFiles
from pacecar.knobs import KNOBS
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.records import Decision, Knobs, Verdict
from tests.kit.selection import reduced

SPACE = KnobSpace("gc_interval", 0, (0, 16, 64, 256))
MS = 1_000_000


class Memory(HostAndDeviceMemory):
    """A host with 1000 bytes free."""

    def __init__(self) -> None:
        self.used: int | None = 100

    def used_bytes(self) -> list[int | None]:
        return [self.used, None]

    def free_bytes(self) -> list[int | None]:
        return [1000, None]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The generations collected; the collector is put back as it was."""
    found, generations = gc.get_threshold(), []

    def note(phase: str, told: dict[str, int]) -> None:
        if phase == "stop":
            generations.append(told["generation"])

    gc.unfreeze()  # a parent that forked this process has frozen its objects
    gc.set_threshold(700, 10, 10)
    monkeypatch.setattr(garbage_collection, "BLOCKS_MIN", 0)
    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*found)


@pytest.mark.usefixtures("collector")
def test_switching_on_and_off_leaves_the_collector_as_it_was() -> None:
    gc.set_threshold(700, 7, 9)
    knob = GcIntervalActuator(Memory())
    assert (knob.value(), knob.domain(), knob.refusal()) == (0, (0, 16, 64, 256), None)
    knob.apply(16)
    assert gc.get_threshold() == (BACKSTOP_OBJECTS, 7, NEVER)
    assert gc.isenabled(), "an evaluation without boundaries is bounded too"
    knob.apply(64)
    knob.apply(0)
    assert gc.get_threshold() == (700, 7, 9)
    assert (knob.value(), knob.on_boundary(), gc.get_freeze_count()) == (0, 0, 0)
    knob.apply(16)
    knob.close()
    knob.close()
    assert gc.get_threshold() == (700, 7, 9)


@pytest.mark.usefixtures("collector")
def test_a_python_that_does_not_tell_the_third_threshold_is_not_taken_for_a_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, ask = gc.get_threshold(), gc.get_threshold
    monkeypatch.setattr(gc, "get_threshold", lambda: (*ask()[:2], 0))  # as Python 3.14
    knob = GcIntervalActuator(Memory())
    knob.apply(16)
    for _ in range(4):
        knob.on_boundary()
    assert knob.objection() is None
    knob.apply(0)
    assert ask()[:2] == before[:2]


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize(
    ("act", "words"),
    [
        (gc.disable, "turned Python's automatic garbage collection off"),
        (lambda: gc.set_threshold(50_000, 20, 20), "thresholds, to (50000, 20, 20)"),
        (lambda: gc.set_threshold(0), "thresholds, to (0, "),
        (gc.freeze, "frozen its objects"),
    ],
)
def test_a_script_that_manages_the_collector_is_left_alone(act: Any, words: str) -> None:
    act()
    before = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0
    knob = GcIntervalActuator(Memory())
    assert words in str(knob.refusal())
    with pytest.raises(ActuatorError):
        knob.apply(16)
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0) == before
    assert knob.value() == 0


def test_few_objects_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.getallocatedblocks", lambda: BLOCKS_MIN - 1)
    assert "full collections are short" in str(GcIntervalActuator(Memory()).refusal())


def test_there_is_no_knob_if_the_user_left_it_out() -> None:
    assert gc_knobs(TuneConfig(knobs=("bucket_bytes",)), torch.device("cpu")) == []
    with pytest.raises(ValueError, match="gc_interval_min is above gc_interval_max"):
        TuneConfig(gc_interval_min=300)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"gc_interval_max": -1}, TuneConfig)
    assert [knob.knob_class for knob in KNOBS if knob.name == "gc_interval"] == ["exact"]


@pytest.mark.usefixtures("collector")
def test_a_wrong_interval_changes_nothing() -> None:
    knob, before = GcIntervalActuator(Memory()), gc.get_threshold()
    for value in (-1, 5, 257):
        with pytest.raises(ActuatorError, match="is none of"):
            knob.apply(value)
    assert gc.get_threshold() == before


def test_intervals_begin_short_and_double() -> None:
    schedule = CollectionSchedule(16)
    due = [boundary for boundary in range(80) if schedule.is_due()]
    assert due == [2, 6, 14, 30, 46, 62, 78], "boundary 0 is that of the switch"


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 20])
def test_new_objects_are_looked_at_when_due_and_all_of_them_if_they_grew(
    collector: list[int], monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    # With the smaller backstop Python sweeps the new objects several times before they are due.
    monkeypatch.setattr(garbage_collection, "BACKSTOP_OBJECTS", len(gc.get_objects()) // parts)
    knob = GcIntervalActuator(Memory())
    gc.collect()
    knob.apply(16)
    collector.clear()
    kept: list[list[int]] = []
    for _ in range(16 * FULL_EVERY + 32):
        kept.append([1])
        knob.on_boundary()
    assert collector.count(2) == 1, "the first full one tells how many objects there are"
    assert collector.count(1) >= FULL_EVERY
    collector.clear()
    for _ in range(16 * FULL_EVERY):
        knob.on_boundary()
    assert (collector.count(1), collector.count(2)) == (FULL_EVERY, 0)
    kept += [[number] for number in range(len(gc.get_objects()) // 5)]
    for _ in range(16 * FULL_EVERY):
        knob.on_boundary()
    assert collector.count(2) == 1
    knob.close()


@pytest.mark.usefixtures("collector")
def test_garbage_in_cycles_is_freed_at_a_boundary() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    knob = GcIntervalActuator(Memory())
    knob.apply(16)
    cycles = [weakref.ref(Cycle()) for _ in range(1000)]
    assert all(cycle() is not None for cycle in cycles)
    assert [knob.on_boundary() > 0 for _ in range(3)] == [False, False, True]
    assert all(cycle() is None for cycle in cycles)
    knob.close()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("act", [lambda: gc.set_threshold(500, 5, 5), gc.disable], ids=["thresholds", "disable"])
def test_a_script_that_takes_the_collector_over_gets_it(act: Any, caplog: pytest.LogCaptureFixture) -> None:
    knob = GcIntervalActuator(Memory())
    knob.apply(16)
    act()
    is_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    assert knob.on_boundary() == 0
    assert knob.objection() is Objection.SCRIPT
    assert "the script turned the collector off, or changed its thresholds" in caplog.text
    assert gc.isenabled() == is_enabled
    assert gc.get_threshold() == ((700, 10, 10) if thresholds[0] == BACKSTOP_OBJECTS else thresholds)
    assert (knob.value(), knob.is_barred(16), knob.is_barred(0)) == (16, True, False)
    knob.apply(0)
    with pytest.raises(ActuatorError):
        knob.apply(16)


@pytest.mark.slow
@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize(("freed", "objection"), [(100, Objection.MEMORY), (10, None)], ids=["garbage", "a cache"])
def test_memory_that_fills_with_garbage_ends_it(
    monkeypatch: pytest.MonkeyPatch, freed: int, objection: Objection | None
) -> None:
    memory = Memory()
    knob = GcIntervalActuator(memory)
    knob.apply(64)
    for _ in range(7):
        knob.on_boundary()
    assert knob.objection() is None
    memory.used = 250
    collect = gc.collect

    def collect_all(*generation: int) -> int:
        assert memory.used is not None
        memory.used -= freed
        return collect(*generation)

    monkeypatch.setattr(gc, "collect", collect_all)
    assert knob.on_boundary() > 0, "the eighth step looks at memory"
    assert knob.objection() is objection
    assert (gc.get_threshold()[0] == 700) == (objection is not None)
    knob.close()


def test_what_the_allocator_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows until the driver has little left, and then every larger batch would count as garbage."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 9_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4_000)
    assert HostAndDeviceMemory(torch.device("cuda")).free_bytes()[1] == 5_100


@pytest.mark.usefixtures("collector")
def test_memory_that_cannot_be_read_ends_nothing(tmp_path: Any) -> None:
    nothing = HostAndDeviceMemory(torch.device("cpu"), KernelFiles(tmp_path, tmp_path))
    assert (nothing.used_bytes(), nothing.free_bytes()) == ([None, None], [None, None])
    knob = GcIntervalActuator(nothing)
    knob.apply(16)
    for _ in range(20):
        knob.on_boundary()
    assert knob.objection() is None
    knob.close()
    here = HostAndDeviceMemory(torch.device("cpu"))
    assert (here.used_bytes()[0] or 0) > 10 * 2**20
    assert (here.free_bytes()[0] or 0) > 0


@pytest.mark.usefixtures("collector")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_worker_collects_by_itself() -> None:
    knob = GcIntervalActuator(Memory())
    knob.apply(16)
    child = os.fork()
    if child == 0:
        os._exit(7 if gc.get_threshold() == (700, 10, 10) else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert gc.get_threshold()[0] == BACKSTOP_OBJECTS
    knob.close()


# --- what the policy sees ---


def step(number: int, pace_ms: float, collection_ms: float = 0.0, interval: int = 0) -> Observation:
    return Observation(
        number, number, {"gc_interval": interval}, round(pace_ms * MS), collection_ns=round(collection_ms * MS)
    )  # fmt: skip


def guard(objections: dict[int, int] | None = None) -> CollectionCost:
    cost = CollectionCost(lambda: objections or {})
    cost.begin(JobFacts("j", 2), [SPACE], turns_knobs=True)
    return cost


def test_without_collections_every_pace_is_passed_on() -> None:
    cost, random = guard(), Random(1)
    paces = [random.uniform(90, 110) for _ in range(200)]
    assert [cost.judgeable(step(i, pace)).pace_ns for i, pace in enumerate(paces)] == [round(p * MS) for p in paces]
    assert cost.automatic_ns() == 0


def test_a_job_whose_knob_cannot_be_turned_is_not_touched() -> None:
    cost = CollectionCost(lambda: {1: 1})
    cost.begin(JobFacts("j", 2), [KnobSpace("micro_batch", 1, (1, 2))], turns_knobs=True)
    seen = Observation(1, 1, {"micro_batch": 1}, 5, collection_ns=3)
    assert cost.judgeable(seen) is seen
    assert not cost.must_act()


@pytest.mark.slow
def test_only_the_time_that_a_step_took_longer_counts_as_a_stall() -> None:
    """A collection that another rank's lateness hides costs nothing; few stalls prove nothing."""
    cost = guard()
    for i in range(STEPS_MIN - 1):
        assert cost.judgeable(step(i, 100)).collection_ns is None
    assert cost.judgeable(step(STEPS_MIN, 100, 50)).pace_ns == 100 * MS, "hidden"
    assert cost.judgeable(step(STEPS_MIN + 1, 130, 50)).pace_ns == 100 * MS, "partly hidden"
    assert cost.judgeable(step(STEPS_MIN + 2, 170, 50)).pace_ns == 120 * MS, "late for another reason, too"
    assert cost.automatic_ns() == 0, "two stalls"
    for i in range(1, 513):
        last = cost.judgeable(step(100 + i, 150 if i % 8 == 0 else 100, 50 if i % 8 == 0 else 0))
    mean_ms = (last.collection_ns or 0) / MS
    assert 4 < mean_ms < 50 / 8, "a lower bound of the mean"


@pytest.mark.slow
def test_what_scheduling_saves_is_taken_off_the_pace() -> None:
    cost = guard()
    for i in range(1024):
        cost.judgeable(step(i, 150 if i % 8 == 0 else 100, 50 if i % 8 == 0 else 0))
    before_ms = (cost.automatic_ns() or 0) / MS
    schedule, seen = CollectionSchedule(16), []
    for i in range(60):
        is_due = schedule.is_due()
        seen.append(cost.judgeable(step(1024 + i, 102 if is_due else 100, 2 if is_due else 0, 16)))
    assert seen[1].pace_ns == 100 * MS, "unknown before the first collection"
    expected_ms = 100 * (100 + 8 / 46) / (100 + before_ms)
    assert [s.pace_ns / MS for s in seen[-16:]] == pytest.approx([expected_ms] * 16, abs=0.2)
    first = cost.judgeable(step(1084, 100, 0, 64))
    assert first.pace_ns < 97 * MS, "a second interval does not look worse than the first for lack of a collection"
    back = [cost.judgeable(step(1100 + i, 100)) for i in range(40)]
    assert {s.pace_ns for s in back} == {100 * MS}
    assert (cost.automatic_ns() or 0) / MS == before_ms, "the aftermath of a trial does not count"


@pytest.mark.slow
def test_the_gain_is_the_share_of_the_step_with_its_collections_even_if_they_take_most_of_it() -> None:
    cost, model = guard(), GainModel(JobFacts("j", 2))
    for i in range(1024):
        automatic = cost.judgeable(step(i, 1020 if i % 8 == 0 else 20, 1000 if i % 8 == 0 else 0))
    before_ms = (cost.automatic_ns() or 0) / MS
    assert before_ms > 80, "four times the rest of the step"
    model.learn(automatic)
    forecast = model.expect("gc_interval", {"gc_interval": 0}, 16)
    assert forecast is not None
    assert forecast.gain_ratio == pytest.approx(before_ms / (20 + before_ms), abs=0.01)
    for i in range(60):
        scheduled = cost.judgeable(step(1024 + i, 24 if i == 3 else 20, 4 if i == 3 else 0, 16))
    assert 1 - scheduled.pace_ns / automatic.pace_ns == pytest.approx(before_ms / (20 + before_ms), abs=0.02)


@pytest.mark.slow
def test_a_collection_that_was_not_observed_is_not_counted_as_free() -> None:
    cost = guard()
    for i in range(1024):
        cost.judgeable(step(i, 150 if i % 8 == 0 else 100, 50 if i % 8 == 0 else 0))
    for i in range(0, 60, 5):
        last = cost.judgeable(step(1024 + i, 100, 0, 16))
    assert last.collection_ns is None or last.collection_ns >= 0
    assert last.pace_ns == 100 * MS or last.collection_ns is not None


def test_negligible_collections_are_named_and_not_tried() -> None:
    model, values = GainModel(JobFacts("j", 2)), {"gc_interval": 0}
    forecast = model.expect("gc_interval", values, 16)
    assert forecast is not None
    assert (forecast.gain_ratio, forecast.basis) == (0, "the cost of garbage collections is not known yet")
    model.learn(step(1, 100, 0.1))
    forecast = model.expect("gc_interval", values, 16)
    assert forecast is not None
    assert (forecast.gain_ratio, forecast.spread_ratio) == (0, 0)
    assert forecast.basis == "garbage collections take 0.1% of the step for certain, nothing to win"
    model.learn(step(2, 94, 6))
    forecast = model.expect("gc_interval", values, 16)
    assert forecast is not None
    assert forecast.gain_ratio == pytest.approx(0.06)
    model.learn(step(3, 99, 1, 16))
    back = model.expect("gc_interval", {"gc_interval": 16}, 0)
    assert back is not None
    assert back.gain_ratio == pytest.approx(-0.05)


def test_a_busy_machine_is_no_reason_to_turn_the_interval_again() -> None:
    """Scheduled collections are bounded from above, so with preemption in them, and automatic ones from below."""
    model = GainModel(JobFacts("j", 2))
    model.learn(step(1, 100, 6))
    model.learn(step(2, 100, 13, 16))
    for to in (0, 64):
        forecast = model.expect("gc_interval", {"gc_interval": 16}, to)
        assert forecast is not None
        assert (forecast.gain_ratio, forecast.spread_ratio) == (0, 0)
    model.forget()  # also where nothing is known
    model.learn(step(3, 100, 13, 16))
    forecast = model.expect("gc_interval", {"gc_interval": 16}, 0)
    assert forecast is not None
    assert (forecast.gain_ratio, forecast.spread_ratio) == (0, 0)


def tuned(per_step_ms: float, stall_ms: float, seed: int, steps: int = 1500) -> tuple[dict[str, int], list[Verdict]]:
    """Play a job that stalls about every 12th step, and whose scheduled collections take so much per step."""
    cost, policy, random = guard(), TuningPolicy(TuneConfig()), Random(seed)
    policy.begin(JobFacts("j", 2), [SPACE], turns_knobs=True)
    values, records = {"gc_interval": 0}, []
    waiting: tuple[int, Proposal] | None = None
    schedule, collected = CollectionSchedule(16), 0
    for i in range(1, steps):
        pace = 100 * random.lognormvariate(0, 0.01)
        if values["gc_interval"] == 0:
            collection = stall_ms if random.random() < 1 / 12 else 0.0
        else:
            collection = per_step_ms * (i - collected) if schedule.is_due() else 0.0
            collected = i if collection else collected
        seen = cost.judgeable(step(i, pace + collection, collection, values["gc_interval"]))
        proposal, told = policy.advance([seen])
        records += told
        if waiting is not None and i >= waiting[0]:
            values, waiting = dict(waiting[1].values), None
            schedule, collected = CollectionSchedule(values["gc_interval"] or 16), i
        if proposal is not None and (waiting is None or waiting[1] != proposal):
            waiting = (i + 5, proposal)
    return values, [record for record in records if isinstance(record, Verdict)]


@pytest.mark.slow
def test_the_policy_keeps_what_saves_time() -> None:
    for seed in range(5):
        values, verdicts = tuned(per_step_ms=0.2, stall_ms=120, seed=seed)
        kept = [verdict for verdict in verdicts if verdict.outcome == "kept"]
        assert values["gc_interval"] > 0
        assert 0.01 < (kept[0].measured_gain_ratio or 0) < 0.1, "at most what collections took: 9 % of the step"


@pytest.mark.slow
def test_the_policy_keeps_nothing_where_scheduling_costs_as_much() -> None:
    """10 ms a step are what automatic stalls of 120 ms in 12 steps take."""
    for seed in range(reduced(10)):
        values, verdicts = tuned(per_step_ms=10, stall_ms=120, seed=seed)
        assert values["gc_interval"] == 0
        assert not [verdict for verdict in verdicts if verdict.outcome == "kept"]


@pytest.mark.slow
def test_nothing_is_tried_where_collections_are_short() -> None:
    values, verdicts = tuned(per_step_ms=0.01, stall_ms=2, seed=0, steps=600)
    assert (values, verdicts) == ({"gc_interval": 0}, [])


def test_an_objection_of_any_rank_takes_it_back_for_good() -> None:
    objections: dict[int, int] = {}
    cost = CollectionCost(lambda: objections)
    cost.begin(JobFacts("j", 2), [SPACE], turns_knobs=True)
    decision = Decision(
        job="j", decision=3, kind="trial", knob="gc_interval", from_value=0, to_value=16, step=5, wall_ns=5,
        expected_gain_ratio=None, expected_gain_error=None, reason="",
    )  # fmt: skip
    cost.take_back(None, [decision])
    cost.judgeable(step(9, 100, 0, 16))
    assert not cost.must_act()
    objections[1] = int(Objection.MEMORY)
    assert cost.must_act()
    proposal, records = cost.take_back(None, [])
    assert proposal == Proposal(3, {"gc_interval": 0})
    (verdict,) = records
    assert isinstance(verdict, Verdict)
    assert (verdict.outcome, verdict.step) == ("rolled_back", 9)
    assert verdict.reason == "taken back: on rank 1 garbage filled the memory between two collections"
    assert cost.judgeable(step(10, 100)).values == {}
    assert not cost.must_act()
    assert cost.take_back(None, []) == (None, [])


@pytest.mark.usefixtures("collector")
def test_a_knob_that_is_back_objects_no_more_so_that_others_are_heard() -> None:
    knob = GcIntervalActuator(Memory())
    knob.apply(16)
    gc.set_threshold(1)
    knob.on_boundary()
    assert knob.objection() is Objection.SCRIPT
    knob.apply(0)
    assert knob.objection() is None
    assert knob.is_barred(16)


def test_collections_and_objections_travel_with_the_paces() -> None:
    members = [ProtocolMember(rank, 2) for rank in range(2)]
    members[0].close_range(5, [10, 20], [False, False], [1, 2])
    members[1].close_range(5, [11, 12], [False, False], [0, 7])
    members[1].objection = int(Objection.SCRIPT)
    vectors = [member.next_vector() or [] for member in members]
    assert [(pace.pace_ns, pace.collection_ns) for pace in members[0].receive(vectors)] == [(11, 1), (20, 7)]
    assert members[0].objections == ((1, 1),)


def test_a_counted_step_is_not_left_out_because_of_a_collection() -> None:
    listener = ObservationListener(10 * MS)
    ends = [100, 200, 600, 1000]
    steps = [CountedStep(i, a * MS, b * MS, 0, Knobs()) for i, (a, b) in enumerate(pairwise(ends))]
    seen = [
        listener.pace_ns(one, are_all_calm=False, collection_ns=taken * MS)
        for one, taken in zip(steps, (0, 300, 0), strict=True)
    ]
    assert seen == [100 * MS, 400 * MS, None]
