"""When did this process not run, and what may be called compute?  Arithmetic; `test_stopped_process` is real."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.profiler.timing.process_stops import Counts as Kernel
from pacecar.profiler.timing.process_stops import KernelCounts, StopDetector, cause_of
from pacecar.profiler.timing.step_timer import STOPPED, RawStep, Stretch, phase_of, time_step
from pacecar.profiler.windows.estimate import Calibration, capped, estimate
from pacecar.records import Ledger

MS = 1_000_000
S = 1000 * MS


class Clocks:
    """The two clocks, and a detector that looks at them whenever the process has run for a period."""

    def __init__(self) -> None:
        self.now = 1000 * S
        self.processor = 3 * S
        self.kernel = Silent()
        self.detector = StopDetector(
            now_ns=lambda: self.now, processor_ns=lambda: self.processor, counts=self.kernel, period_seconds=0.2
        )
        self.detector.is_looking = True
        self.detector.look()

    def run(self, duration: int, *, threads: float = 1.0) -> None:
        """Run for `duration`, on so many processors; the detector's thread has its turn every 200 ms."""
        left = duration
        while left:
            part = min(left, 200 * MS - (self.now % (200 * MS)))
            self.now += part
            self.processor += round(part * threads)
            left -= part
            if self.now % (200 * MS) == 0:
                self.detector.look()

    def stop(self, duration: int) -> None:
        self.now += duration


class Silent(KernelCounts):
    counts = Kernel()

    def read(self) -> Kernel:
        return self.counts


def stopped(clocks: Clocks, since: int) -> int:
    return sum(stop.end_ns - stop.start_ns for stop in clocks.detector.stops(since, clocks.now))


@pytest.mark.parametrize("ran", [0, 1 * MS, 90 * MS, 199 * MS])
@pytest.mark.parametrize("lasted", [500 * MS, 3 * S, 167 * S, 40_000 * S])
def test_a_stop_is_as_long_as_it_was_wherever_between_two_looks_it_began(ran: int, lasted: int) -> None:
    clocks = Clocks()
    begun = clocks.now
    clocks.run(2 * S + ran)
    at = clocks.now
    clocks.stop(lasted)
    clocks.detector.look()
    clocks.run(2 * S)
    (stop,) = clocks.detector.stops(begun, clocks.now)
    assert stop.stretch == (at, at + lasted)
    assert stopped(clocks, begun) == lasted
    assert clocks.detector.went_on_ns == at + lasted


@pytest.mark.parametrize("threads", [0.0, 0.01, 1.0, 8.0])
def test_a_process_that_has_its_turns_is_not_stopped_whatever_it_takes_of_the_processor(threads: float) -> None:
    clocks = Clocks()
    begun = clocks.now
    clocks.run(20 * S, threads=threads)
    assert clocks.detector.stops(begun, clocks.now) == []
    assert clocks.detector.went_on_ns is None


def test_who_computes_and_holds_pythons_lock_meanwhile_is_not_stopped() -> None:
    clocks = Clocks()
    begun = clocks.now
    clocks.now += 30 * S
    clocks.processor += 30 * S - 100 * MS
    clocks.detector.look()
    assert clocks.detector.stops(begun, clocks.now) == []


def test_several_threads_make_a_stop_shorter_and_never_longer_than_it_was() -> None:
    clocks = Clocks()
    clocks.run(1 * S + 150 * MS, threads=8)
    begun = clocks.now
    clocks.stop(5 * S)
    clocks.detector.look()
    assert 3 * S < stopped(clocks, begun) <= 5 * S


def test_a_stop_of_which_somebody_asks_before_the_thread_had_its_turn_is_seen() -> None:
    clocks = Clocks()
    clocks.run(1 * S + 50 * MS)
    begun = clocks.now
    clocks.stop(2 * S)
    assert clocks.detector.stops(begun, clocks.now) == []
    clocks.detector.look()
    assert stopped(clocks, begun) == 2 * S


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1 * MS, 3 * S), st.integers(0, 5 * S)), min_size=1, max_size=12))
def test_what_is_called_stopped_was_and_processor_time_is_never_too_low(parts: list[tuple[int, int]]) -> None:
    clocks = Clocks()
    begun, took, really = clocks.now, clocks.processor, 0
    for ran, lasted in parts:
        clocks.run(ran)
        clocks.stop(lasted)
        clocks.detector.look()
        really += lasted
    assert stopped(clocks, begun) <= really
    assert stopped(clocks, begun) >= sum(lasted - 1 for _, lasted in parts if lasted > 500 * MS)
    bound = clocks.detector.processor_ns(begun, clocks.now)
    assert bound >= clocks.processor - took


def test_the_processor_time_of_an_hour_is_known_from_a_bounded_number_of_looks() -> None:
    clocks = Clocks()
    clocks.run(3600 * S, threads=0.5)
    assert len(clocks.detector._at) <= 513
    bound = clocks.detector.processor_ns(1000 * S, clocks.now)
    assert bound == 1800 * S
    assert clocks.detector.processor_ns(999 * S, clocks.now) is None, "before the first look nobody knows"


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        (Kernel(), Kernel(), None),
        (Kernel(throttled_ns=0), Kernel(throttled_ns=3 * S), "throttled"),
        (Kernel(frozen_ns=7 * S), Kernel(frozen_ns=10 * S), "frozen"),
        (Kernel(run_delay_ns=1), Kernel(run_delay_ns=1 + 2 * S), "preempted"),
        (Kernel(throttled_ns=0, run_delay_ns=0), Kernel(throttled_ns=0, run_delay_ns=1 * S), None),
        (Kernel(), Kernel(is_traced=True), "traced"),
        (Kernel(throttled_ns=None), Kernel(throttled_ns=3 * S), None),
    ],
)
def test_the_kernels_counters_name_the_cause_where_one_has_grown_by_it(
    before: Kernel, after: Kernel, word: str | None
) -> None:
    assert cause_of(3 * S, before, after) == word


def test_the_kernels_files_are_read_as_they_are_and_missed_where_they_are_not(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    counts = KernelCounts(proc, groups)
    counts.open()
    assert counts.read() == Kernel()
    (proc / "self").mkdir(parents=True)
    (groups / "a.slice").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("12:cpu:/old\n0::/a.slice\n")
    (proc / "self" / "status").write_text("Name:\tpython\nTracerPid:\t4711\n")
    (groups / "a.slice" / "cpu.stat").write_text("usage_usec 99\nthrottled_usec 1234\n")
    (groups / "a.slice" / "cgroup.stat.local").write_text("frozen_usec 0\n")
    counts.open()
    assert counts.read() == Kernel(throttled_ns=1_234_000, frozen_ns=0, is_traced=True), "zero is a measurement"


def raw(*events: tuple[str, int, int], end: int = 1000, overhead: int = 0) -> RawStep:
    return RawStep(0, end, list(events), overhead, was_marked=False, absorbed=None)


def test_a_stop_is_taken_out_of_the_phase_in_which_it_was() -> None:
    step = raw(
        ("data_wait", 0, 100), ("forward", 100, 500), ("backward", 500, 800), ("overhead", 900, 950), overhead=60
    )
    whole = time_step(step)
    assert STOPPED not in whole.phases
    timed = time_step(step, [(200, 450), (920, 940)])
    assert timed.phases == whole.phases | {"forward": 150, "overhead": 30, STOPPED: 270}
    assert timed.overhead_ns == 40, "nobody is charged for a stop inside our own code"
    assert phase_of(step, 90, 450) == "forward"
    assert phase_of(step, 790, 890) == "outside"


def test_run_delay_that_was_left_out_already_is_not_taken_out_again_as_a_stop() -> None:
    step = raw(("forward", 0, 100), ("overhead", 100, 900), overhead=300)
    assert time_step(step, [(200, 700)]).overhead_ns == 300, "500 of 800 were run delay, and are the stop"
    assert time_step(step, [(100, 750)]).overhead_ns == 150


def test_a_stop_across_phases_and_outside_the_step_counts_where_it_was() -> None:
    step = raw(("forward", 100, 500), ("backward", 500, 800))
    timed = time_step(step, [(-50, 50), (400, 600), (990, 2000)])
    assert timed.phases == {"forward": 300, "backward": 200, STOPPED: 50 + 200 + 10}


def test_a_stop_in_the_closure_of_an_optimizer_is_taken_out_once() -> None:
    step = raw(("forward", 200, 300), ("backward", 300, 400), ("optimizer", 100, 600))
    assert time_step(step).phases == {"forward": 100, "backward": 100, "optimizer": 300}
    timed = time_step(step, [(250, 280), (450, 500)])
    assert timed.phases == {"forward": 70, "backward": 100, "optimizer": 250, STOPPED: 80}
    assert phase_of(step, 250, 280) == "forward"


@st.composite
def stopped_steps(draw: st.DrawFn) -> tuple[RawStep, list[Stretch]]:
    edges = sorted(draw(st.lists(st.integers(0, 10_000), min_size=2, max_size=12)))
    names = ("data_wait", "forward", "backward", "backward_tail", "optimizer", "overhead", "checkpoint")
    events = [(draw(st.sampled_from(names)), start, end) for start, end in zip(edges[::2], edges[1::2], strict=False)]
    marks = sorted(set(draw(st.lists(st.integers(-500, 10_500), max_size=8))))
    stops = list(zip(marks[::2], marks[1::2], strict=False))
    return raw(*events, end=10_000), stops


MIXED = Calibration(
    0,
    {
        name: Ledger(wall_ns=100, compute_ns=88, host_bound_ns=12)
        for name in ("forward", "backward", "optimizer", "rest")
    },
)


@pytest.mark.slow
@given(stopped_steps(), st.sampled_from([None, MIXED]), st.integers(0, 12_000))
def test_headings_sum_to_the_wall_time_and_nothing_but_stopped_grows_with_a_stop(
    step: tuple[RawStep, list[Stretch]], calibration: Calibration | None, taken: int
) -> None:
    timed, whole = time_step(*step), time_step(step[0])
    assert sum(timed.phases.values()) <= timed.wall_ns, "phases are disjoint"
    ledger, before = (estimate(one.wall_ns, one.phases, calibration) for one in (timed, whole))  # sums are checked
    assert ledger.stopped_ns == sum(max(0, min(end, 10_000) - max(start, 0)) for start, end in step[1])
    assert ledger.compute_ns <= before.compute_ns + 6, "each phase is rounded by itself"
    bounded = capped(ledger, taken)
    assert bounded.compute_ns == min(ledger.compute_ns, taken)
    assert bounded.compute_ns + bounded.unknown_ns == ledger.compute_ns + ledger.unknown_ns


def test_the_step_of_the_issue_is_stopped_and_not_compute() -> None:
    step = raw(
        ("forward", 0, 167 * S + 20 * MS), ("backward", 167 * S + 20 * MS, 167 * S + 60 * MS), end=167 * S + 70 * MS
    )
    was = estimate(step.end_ns, time_step(step).phases, MIXED)
    assert was.compute_ns > 146 * S, "what was written down before"
    ledger = estimate(step.end_ns, time_step(step, [(15 * MS, 167 * S + 15 * MS)]).phases, MIXED)
    assert ledger.stopped_ns == 167 * S
    assert ledger.compute_ns < 70 * MS
