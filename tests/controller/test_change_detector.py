"""A change of conditions starts a new search with the windows since then, even if the pace does not show it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pacecar.config import TuneConfig
from pacecar.controller.forecast.bucket_model import pack_buckets, play
from pacecar.controller.observation import JobFacts, KnobSpace, Observation
from pacecar.controller.policy.change_detector import ChangeDetector
from pacecar.controller.policy.pace_tracker import TrackedPace
from pacecar.controller.policy.tuning_policy import TuningPolicy
from pacecar.records import BackwardWindow, Ledger
from tests.controller.plant import MIB, Plant, gaussian

MS = 1_000_000
GRADIENTS = (MIB,) * 40
FACTS = JobFacts(job="plant", world_size=2, gradient_bytes=GRADIENTS, bucket_bytes=8 * MIB, first_bucket_bytes=8 * MIB)
SIZES = (MIB, 8 * MIB, 64 * MIB)
INTERVAL = 20
CHANGE_AT = 400
BACKWARD_NS = 300 * MS


class World:
    """All-reduces take `ns_per_byte`, from CHANGE_AT on `then_ns_per_byte`.  Windows as asked for, too."""

    def __init__(self, ns_per_byte: float, then_ns_per_byte: float, *, shows: bool) -> None:
        self.links = ns_per_byte, then_ns_per_byte
        self.shows = shows
        self.asked: list[int] = []
        self.is_window = self.is_due = False

    def _spans(self, step: int, values: dict[str, int]) -> tuple[tuple[int, int], ...]:
        link = self.links[step >= CHANGE_AT]
        played = play(pack_buckets(GRADIENTS, values["bucket_bytes"], None), BACKWARD_NS, 0.0, link, 1)
        return tuple((round(begin), round(end)) for begin, end in played.spans)

    def curve(self, values: dict[str, int], step: int) -> float:
        end = self._spans(step, values)[-1][1] if self.shows else BACKWARD_NS
        return (100 * MS + max(BACKWARD_NS, end)) / 1e9

    def ledger(self, step: int, pace: int) -> Ledger | None:
        self.is_window = step % INTERVAL == 0 or self.is_due
        self.is_due = False
        exposed = max(0, pace - 100 * MS - BACKWARD_NS) if self.shows else 0
        ledger = Ledger(
            wall_ns=pace, compute_ns=pace - exposed, communication_ns=exposed, exposed_communication_ns=exposed
        )
        return ledger if self.is_window else None

    def backward(self, step: int, values: dict[str, int]) -> BackwardWindow | None:
        return BackwardWindow(work_ns=BACKWARD_NS, reduces=self._spans(step, values)) if self.is_window else None

    def note(self, step: int, policy: object) -> None:
        assert isinstance(policy, TuningPolicy)
        if policy.wants_window():
            self.asked.append(step)
            self.is_due = True


def _run(world: World, steps: int, seed: int = 0) -> Plant:
    spaces = [KnobSpace("bucket_bytes", 8 * MIB, SIZES)]
    return Plant(
        world.curve,
        gaussian(0.005),
        spaces,
        seed,
        TuneConfig(exploration_budget=0.05),
        facts=FACTS,
        ledger=world.ledger,
        backward=world.backward,
        at=world.note,
    ).run(steps)


@pytest.mark.parametrize(("before", "after", "said"), [(3.0, 0.6, "0.2 times"), (0.6, 3.0, "5 times")])
def test_a_link_that_changes_under_backward_is_noticed(before: float, after: float, said: str) -> None:
    """The pace is the same before and after: all of the communication hides."""
    world = World(before, after, shows=False)
    plant = _run(world, 700)
    again = [status for status in plant.statuses if "searching again" in status.detail]
    assert [said in status.detail for status in again] == [True], [status.detail for status in again]
    assert CHANGE_AT < again[0].step <= CHANGE_AT + 4 * INTERVAL
    assert world.asked
    assert CHANGE_AT <= world.asked[0] <= CHANGE_AT + 2 * INTERVAL, "more windows are wanted from the first one on"
    assert world.asked[-1] <= again[0].step + 2 * INTERVAL, "and no more when it is certain"


def test_nothing_is_noticed_and_no_window_asked_for_where_nothing_changes() -> None:
    world = World(3.0, 3.0, shows=False)
    plant = _run(world, 700)
    assert not [status for status in plant.statuses if "searching again" in status.detail]
    assert not world.asked


@pytest.mark.slow
def test_windows_since_the_suspicion_inform_the_new_search() -> None:
    """The pace moves; the forecasts after it rest on windows of the new link, not on none."""
    world = World(3.0, 12.0, shows=True)  # 120 ms of all-reduces under 300 of backward, then 480 beside it
    plant = _run(world, 700)
    again = [status.step for status in plant.statuses if "searching again" in status.detail]
    assert len(again) == 1
    assert again[0] <= CHANGE_AT + 15
    after = [decision for decision in plant.decisions if decision.step >= again[0]]
    assert after
    assert "timeline" in after[0].reason
    assert any(CHANGE_AT <= step <= again[0] for step in world.asked), "windows are asked for before it is certain"


def test_the_windows_of_the_new_world_are_what_a_change_carries() -> None:
    lookout, world = ChangeDetector(), World(3.0, 0.6, shows=False)
    changes = []
    for step in range(INTERVAL, 800, INTERVAL):
        values = {"bucket_bytes": 8 * MIB}
        window = Observation(
            step, 1, values, 400 * MS, True, world.ledger(step, 400 * MS), True, backward=world.backward(step, values)
        )
        lookout.keep_window(window)
        change = lookout.observe(values, None, TrackedPace(), window)
        if change is not None:
            changes.append(change)
    assert len(changes) == 1
    assert changes[0].alarm is None
    assert all(window.step >= CHANGE_AT for window in changes[0].windows)
    assert all(b.step > a.step for a, b in pairwise(changes[0].windows))


def _noticed(paces_ms: list[float]) -> list[int]:
    """Return after which of these steps it is said that the pace changed."""
    lookout, pace, found = ChangeDetector(), TrackedPace(), []
    for number, pace_ms in enumerate(paces_ms, 1):
        step = Observation(number, number, {}, round(pace_ms * MS))
        level = pace.observe(step.pace_ns, profiled=False)
        change = lookout.observe({}, level, pace, step)
        if change is not None:
            assert change.alarm is not None
            found.append(number)
            pace.resume(pace.last(number - change.alarm.suspected_at))
    return found


def _steps(count: int, pace_ms: float, noise: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [pace_ms * (1 + draw.gauss(0, noise)) for _ in range(count)]


@pytest.mark.parametrize("noise", [0.005, 0.03])
@pytest.mark.parametrize(("pace_ms", "factor"), [(500, 1.3), (500, 1 / 1.4), (1500, 1.3), (5000, 2.0), (400, 1.6)])
def test_a_jump_of_long_steps_is_noticed_within_15(pace_ms: float, factor: float, noise: float) -> None:
    for seed in range(5):
        before = 100 + seed
        steps = _steps(before, pace_ms, noise, seed) + _steps(100, pace_ms * factor, noise, seed + 50)
        found = _noticed(steps)
        assert len(found) == 1
        assert before + 5 <= found[0] <= before + 15


def _jumps(paces_ms: list[float]) -> int:
    pace, found = TrackedPace(), 0
    for step, pace_ms in enumerate(paces_ms):
        pace.observe(round(pace_ms * MS), profiled=False)
        found += pace.jump(step) is not None
    return found


@pytest.mark.parametrize(("pace_ms", "burst"), [(500, 5), (500, 9), (100, 30), (50, 60)])
def test_a_burst_of_another_job_is_no_jump(pace_ms: float, burst: int) -> None:
    """It lasts seconds: under five, here."""
    for seed in range(5):
        steps = _steps(100 + seed, pace_ms, 0.02, seed) + _steps(burst, 1.6 * pace_ms, 0.02, seed)
        assert not _jumps(steps + _steps(100, pace_ms, 0.02, seed + 50))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_steps_that_are_long_now_and_then_are_no_jump(share: float) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        assert not _jumps([pace * (1.5 if draw.random() < share else 1) for pace in _steps(3000, 500, 0.02, seed)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("change_at", [100, 130, 160, 190, 220])
def test_a_jump_in_the_middle_of_a_trial_or_just_after_it_is_noticed(change_at: int, seed: int) -> None:
    base = {MIB: 0.49, 8 * MIB: 0.5, 64 * MIB: 0.505}
    plant = Plant(
        lambda values, step: base[values["bucket_bytes"]] * (1.4 if step >= change_at else 1),
        gaussian(0.04),
        [KnobSpace("bucket_bytes", 8 * MIB, SIZES)],
        seed,
        TuneConfig(exploration_budget=0.05),
        facts=JobFacts(job="plant", world_size=2),
    ).run(change_at + 60)
    again = [status.step for status in plant.statuses if "slower than before: searching again" in status.detail]
    assert len(again) == 1
    assert change_at + 5 <= again[0] <= change_at + 40


def test_a_trial_learns_the_noise_of_steps_without_their_spikes() -> None:
    pace = TrackedPace()
    for index, pace_ms in enumerate(_steps(64, 100, 0.05, 1)):
        pace.observe(round(pace_ms * (3 if index % 20 == 9 else 1) * MS), profiled=False)
    assert pace.of_incumbent().step_noise == pytest.approx(0.05, rel=0.35)
