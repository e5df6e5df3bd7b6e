"""A cross-rank window with ranks that refuse, say nonsense, are late or die, and a job that ends meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pacecar.analysis.one_rank.trace_bytes import decode_trace, encode_trace
from pacecar.analysis.reading.rank_window import MEMORY_BYTES_MAX, NICENESS, prepared
from pacecar.process_state import ProcessIdentity
from pacecar.profiler.hangs.account_road import AccountListener, Door, Heard, Question, Road, WindowState
from pacecar.profiler.ranks.cross_rank import cross_rank_window
from pacecar.profiler.ranks.cross_rank.cross_rank_window import (
    COUNT_POLL_SECONDS,
    COUNT_SECONDS_MAX,
    COUNTED_SECONDS_MAX,
    OPEN_NS,
    PRICE_MARGIN,
    ROW_NS,
    WINDOW_SECONDS_MAX,
    WINDOW_STEPS,
    CrossRankWindow,
    WindowRank,
)
from pacecar.profiler.ranks.cross_rank.row_watch import RowWatch
from pacecar.profiler.ranks.cross_rank.step_recording import PRICE_NS_MAX, STEPS_MIN
from pacecar.profiler.ranks.cross_rank.window_trigger import RETRY_SECONDS
from pacecar.profiler.timing.overhead_budget import OverheadBudget
from pacecar.profiler.timing.preemption import Preemption
from pacecar.records import Cause, JobHello, Straggler
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, simulate
from tests.kit.simulated_jobs.kineto import write_trace
from tests.kit.waiting import until

pytestmark = pytest.mark.slow

SECOND = 10**9
STEP = 100
ROWS = 1000
RUN = simulate(Job(Layout(data=2), is_cpu=True, seed=4, faults=(Fault(FaultKind.SLOW_COMPUTE, (1,), 0.5),)))
PARTS = [encode_trace(prepared(trace, [])) for trace in RUN.traces()]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Path]]]:
    """What windows have left in the temporary folder; each test must leave nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def left() -> list[Path]:
        return sorted(tmp_path.glob("pacecar-*"))

    yield left
    assert left() == []


def hello_of(rank: int) -> JobHello:
    return job_hello(rank, 2, job="j")


class Rank:
    """What one rank answers, by question; an answer may be a function that makes it."""

    on_device = False
    usual_step_ns = SECOND

    def __init__(self, rank: int) -> None:
        self.asked: list[Question] = []
        self.charged: list[int] = []
        self.charge = self.charged.append
        self.says: dict[str, Any] = {
            "window_offer": WindowState(STEP, steps=WINDOW_STEPS), "window_order": WindowState(STEP),
            "window_part": WindowState(STEP, part=PARTS[rank]),
        }  # fmt: skip

    def answer(self, question: Question) -> Any:
        self.asked.append(question)
        said = self.says[question.what]
        return said() if callable(said) else said


class Job2:
    """Rank 0's side in this thread, and rank 1 behind a socket."""

    def __init__(self) -> None:
        self.own, self.peer, self.clock = Rank(0), Rank(1), FakeClock()
        self.listener = AccountListener(self.peer.answer)
        port = self.listener.open("127.0.0.1")
        self.listener.start("token")
        door = Door("127.0.0.1", port, ProcessIdentity("here", os.getpid(), os.getpid(), 0))
        self.road = Road("token", (door, door))
        self.records: list[Straggler] = []
        own: Any = self.own
        self.step = STEP
        self.window = CrossRankWindow(hello_of(0), own, self.records.append, self.clock, lambda: self.step)

    def suspect(self) -> None:
        self.window.detected([
            Straggler(
                job="j", late_rank=1, cause=Cause.COMPUTE, phase="forward", since_step=60, step=72, wall_ns=0,
                excess_ns=10**6, evidence="",
            )
        ])  # fmt: skip
        self.records.clear()

    def tick(self, seconds: float = 1.0) -> None:
        self.clock.advance(round(seconds * SECOND))
        self.window.tick(self.road, lambda: False)

    def goes_on(self, until_so: Callable[[], object]) -> None:
        """Tick until it is so; a process of the window's takes seconds, on a busy machine a minute."""
        until(lambda: (self.tick(0.25), until_so())[1], seconds=150.0, look_seconds=0.125)

    def questions(self) -> list[str]:
        return [question.what for question in self.peer.asked]


@pytest.fixture
def job(folders: Callable[[], list[Path]]) -> Iterator[Job2]:
    job = Job2()
    yield job
    job.window.close()
    job.listener.close()


def test_all_ranks_get_the_same_order_and_the_verdict_is_told(job: Job2, folders: Any) -> None:
    job.tick()
    assert job.questions() == [], "nobody is suspected"
    job.suspect()
    job.tick()
    for orders in (job.own.asked[1], job.peer.asked[1]):
        assert (orders.what, orders.steps) == ("window_order", WINDOW_STEPS)
        assert orders.first_step > STEP
    job.suspect()  # another suspicion meanwhile orders no second window
    job.goes_on(lambda: job.records)
    assert job.questions().count("window_order") == 1
    assert [(one.late_rank, one.cause) for one in job.records] == [(1, Cause.COMPUTE)]
    assert "that all ranks recorded" in job.records[0].evidence
    assert len(job.own.charged) == 1, "the judge"
    assert folders() == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (WindowState(STEP, "0.31 s are more than overhead_budget allows now"), "rank 1: 0.31 s are more than"),
        (Heard(), "rank 1: its answer is nonsense"),
    ],
)
def test_without_an_offer_of_every_rank_nobody_records(job: Job2, caplog: Any, answer: Any, words: str) -> None:
    caplog.set_level(logging.INFO, "pacecar")
    job.peer.says["window_offer"] = answer
    job.suspect()
    for _ in range(3):
        job.tick()
    assert job.questions() == ["window_offer"], "it is not asked again at once"
    assert words in caplog.text


def test_the_rank_that_can_record_fewest_steps_decides(job: Job2) -> None:
    job.peer.says["window_offer"] = WindowState(STEP, steps=4)
    job.suspect()
    job.tick()
    assert [(one.what, one.steps) for one in job.peer.asked] == [("window_offer", WINDOW_STEPS), ("window_order", 4)]
    assert job.own.asked[1].steps == 4


def test_ranks_that_count_rows_are_asked_again_soon_and_not_for_ever(job: Job2, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "pacecar")
    job.peer.says["window_offer"] = WindowState(STEP)
    job.suspect()
    job.tick()
    job.tick(COUNT_POLL_SECONDS)
    assert job.questions() == ["window_offer"] * 2
    assert {one.first_step for one in job.peer.asked} == {STEP}, "one count, after the suspicion"
    job.tick(COUNT_SECONDS_MAX)
    assert "does not allow yet to count the rows" in caplog.text
    job.tick(COUNT_POLL_SECONDS)
    assert len(job.peer.asked) == 3, "not before the next try"
    job.peer.says["window_offer"] = WindowState(STEP, steps=WINDOW_STEPS)
    job.tick(RETRY_SECONDS)
    assert job.questions()[3:] == ["window_offer", "window_order"]


def test_an_old_count_is_not_good_any_more(job: Job2) -> None:
    job.peer.says["window_offer"] = WindowState(STEP, "0.31 s are more than overhead_budget allows now")
    job.suspect()
    job.tick()
    job.step += 7
    job.tick(RETRY_SECONDS)
    job.tick(COUNTED_SECONDS_MAX)
    assert [one.first_step for one in job.peer.asked] == [STEP, STEP, STEP + 7]


def test_a_rank_that_is_gone_is_no_offer(job: Job2, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "pacecar")
    job.listener.close()
    job.suspect()
    job.tick()
    assert "nothing listens there any more" in caplog.text


@pytest.mark.parametrize(
    ("what", "answer", "words"),
    [
        ("window_order", WindowState(STEP, "a window is under way already"), "a window is under way already"),
        ("window_part", WindowState(STEP, "the order for step 104 came at step 200"), "came at step 200"),
        ("window_part", WindowState(STEP, part=b"nonsense"), "incorrect header check"),
    ],
)
def test_a_window_that_fails_on_one_rank_is_given_up(
    job: Job2, caplog: Any, what: str, answer: Any, words: str
) -> None:
    caplog.set_level(logging.INFO, "pacecar")
    job.peer.says[what] = answer
    job.suspect()
    job.goes_on(lambda: words in caplog.text)
    assert "tell nothing" in caplog.text
    assert job.records == []


def test_without_room_for_a_folder_nothing_is_ordered(
    job: Job2, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)

    def is_full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pacecar.profiler.ranks.cross_rank.cross_rank_window.TemporaryFolder", is_full)
    job.suspect()
    job.goes_on(lambda: "No space left on device" in caplog.text)
    assert "window_order" not in job.questions()


def test_a_rank_that_dies_after_the_order_ends_the_window_at_once(job: Job2, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "pacecar")
    job.suspect()
    job.tick()
    job.listener.close()
    job.tick()
    assert "rank 1: nothing listens there any more" in caplog.text


def test_a_late_answer_is_asked_for_again(job: Job2) -> None:
    job.peer.says["window_part"] = lambda: (time.sleep(1.8), WindowState(STEP, part=PARTS[1]))[1]
    job.suspect()
    job.tick()
    job.tick()
    job.peer.says["window_part"] = WindowState(STEP, part=PARTS[1])
    job.goes_on(lambda: job.records)


def test_a_rank_that_never_sends_its_part_is_not_waited_for_for_ever(job: Job2, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "pacecar")
    job.peer.says["window_part"] = WindowState(STEP)
    job.suspect()
    job.tick()
    job.tick()
    job.tick(WINDOW_SECONDS_MAX + 1)
    assert "1 ranks have not sent their part" in caplog.text


def test_a_job_that_ends_while_it_is_judged_leaves_no_process(job: Job2, folders: Any) -> None:
    job.suspect()
    job.tick()
    job.tick()
    process = job.window._judging
    assert process is not None
    assert folders()
    job.window.close()
    assert process._process.returncode is not None


# --- one rank's part ------------------------------------------------------------------------------


class Windows:
    """The hook's windows: a recording is the simulated trace of a rank."""

    is_installed, is_settled, row_count, ended_ns, ending_row_ns = True, True, ROWS, -1, 0

    def __init__(self) -> None:
        self.did: list[str] = []

    def may_open(self) -> bool:
        return True

    def open_recording(self) -> None:
        self.did.append("open")

    def discard_recording(self) -> None:
        self.did.append("discard")

    def pause_recording(self) -> bool:
        self.did.append("pause")
        return True

    def close_recording(self, path: str) -> int:
        self.did.append("close")
        write_trace(Path(path), RUN.traces()[1], RUN.job.layout)
        return ROWS * WINDOW_STEPS


class Hook:
    """A hook at one step."""

    def __init__(self) -> None:
        self.step, self.is_traced, self.windows, self.preemption = STEP, False, Windows(), Preemption()
        self.budget = OverheadBudget(1.0, warmup_steps=3, interval_steps=50)
        self.is_awake = False
        self.allowed_ns: int | None = None
        self.requested = 0
        self.entered: Callable[[str], None] | None = None

    def wake(self) -> None:
        self.is_awake = True

    def request_window(self) -> None:
        self.requested += 1

    def headroom_ns(self) -> int | None:
        return self.allowed_ns

    def watch_phases(self, listener: Callable[[str], None] | None) -> None:
        self.entered = listener


@pytest.fixture
def rank(folders: Any) -> Iterator[tuple[WindowRank, Hook]]:
    hook: Any = Hook()
    rank = WindowRank(hello_of(1), hook, FakeClock(), on_device=False)
    yield rank, hook
    rank.close()


def ask(rank: WindowRank, what: str, first: int = STEP + 4, steps: int = WINDOW_STEPS) -> WindowState:
    return rank.answer(Question(what=what, first_step=first, steps=steps))  # type: ignore[arg-type]


def counted(rank: WindowRank, hook: Hook, since: int = STEP) -> WindowState:
    """The offer of a rank that has counted the rows of a step."""
    assert ask(rank, "window_offer", since) == WindowState(STEP), "not yet"
    rank.recorder.boundary()
    hook.windows.ended_ns = rank._clock.monotonic_ns() + 1
    return ask(rank, "window_offer", since)


def record(rank: WindowRank, hook: Hook, steps: int = WINDOW_STEPS + 4) -> None:
    for _ in range(steps):
        hook.step += 1
        rank.recorder.boundary()


def refusal(rank: WindowRank) -> str:
    rank.tick()
    return str(ask(rank, "window_part").refusal)


def test_a_rank_records_condenses_and_charges_what_was_ordered(rank: tuple[WindowRank, Hook]) -> None:
    window, hook = rank
    assert counted(window, hook) == WindowState(STEP, steps=WINDOW_STEPS)
    assert ask(window, "window_order") == WindowState(STEP)
    assert hook.is_awake
    assert window.is_saving, "another window would spend what this one needs"
    record(window, hook, 5)
    assert hook.is_traced
    assert not window.is_saving
    record(window, hook, 5)
    assert not hook.is_traced
    assert hook.entered is None
    assert hook.budget.cost_ns > 0
    until(lambda: (window.tick(), ask(window, "window_part").part)[1])
    part = ask(window, "window_part").part
    assert part is not None
    trace = decode_trace(part, "rank 1")
    assert (trace.rank, trace.world_size, len(trace.steps)) == (1, 2, RUN.job.steps)
    assert len(part) < 20 * 1024


def test_rows_are_counted_once_after_each_suspicion(rank: tuple[WindowRank, Hook]) -> None:
    window, hook = rank
    hook.windows.ended_ns = window._clock.monotonic_ns() - 1  # a window before the suspicion
    assert ask(window, "window_offer", STEP) == WindowState(STEP)
    assert window.recorder.is_pending
    record(window, hook, 2)
    assert hook.requested == 1
    assert ask(window, "window_offer", STEP) == WindowState(hook.step), "the budget has not allowed it yet"
    hook.step = STEP
    hook.windows.ended_ns = window._clock.monotonic_ns() + 1
    assert ask(window, "window_offer", STEP).steps == WINDOW_STEPS
    window._clock.advance(SECOND)  # type: ignore[attr-defined]
    assert counted(window, hook, STEP + 9).steps == WINDOW_STEPS
    assert hook.requested == 2


@pytest.mark.parametrize(
    ("windows_worth", "steps"), [(10.0, WINDOW_STEPS), (1.01, WINDOW_STEPS), (0.7, 4), (0.55, 3), (0.45, 0), (-1.0, 0)]
)
def test_fewer_steps_are_offered_where_the_budget_allows_no_more(
    rank: tuple[WindowRank, Hook], monkeypatch: pytest.MonkeyPatch, windows_worth: float, steps: int
) -> None:
    window, hook = rank
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    price_ns = PRICE_MARGIN * (ROW_NS * ROWS * WINDOW_STEPS + OPEN_NS)
    monkeypatch.setattr(hook.budget, "headroom_ns", lambda **_: round(windows_worth * price_ns))
    offer = counted(window, hook)
    assert offer.steps == steps
    assert (offer.refusal is None) == bool(steps)
    assert window.is_saving != bool(steps)


def test_a_row_that_took_long_to_end_costs_more(rank: tuple[WindowRank, Hook], monkeypatch: pytest.MonkeyPatch) -> None:
    window, hook = rank
    price_ns = PRICE_MARGIN * (ROW_NS * ROWS * WINDOW_STEPS + OPEN_NS)
    monkeypatch.setattr(hook.budget, "headroom_ns", lambda **_: round(1.2 * price_ns))
    hook.windows.ending_row_ns = 2 * ROW_NS
    assert counted(window, hook).refusal is not None


@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_a_window_has_a_highest_price_however_much_is_allowed(rank: tuple[WindowRank, Hook], ratio: float) -> None:
    window, hook = rank
    hook.budget = OverheadBudget(ratio, warmup_steps=3, interval_steps=50)
    hook.budget.wall_ns = 10**6 * SECOND
    hook.windows.row_count = round(0.7 * PRICE_NS_MAX / ROW_NS / WINDOW_STEPS)
    assert counted(window, hook).steps == WINDOW_STEPS
    hook.windows.row_count = round(PRICE_NS_MAX / ROW_NS / STEPS_MIN)
    assert "more than a recording may cost" in str(ask(window, "window_offer", STEP).refusal)


@pytest.mark.parametrize(("at", "recorded"), [(5, 5), (3, 3), (2, None)])
def test_a_recording_ends_after_the_step_in_which_rows_become_too_many(
    rank: tuple[WindowRank, Hook], monkeypatch: pytest.MonkeyPatch, at: int, recorded: int | None
) -> None:
    """Of a rank with fewer than STEPS_MIN steps by then everything is dropped."""
    window, hook = rank
    counted(window, hook)
    hook.allowed_ns = window._rows_price_ns(2 * ROWS * WINDOW_STEPS)
    ask(window, "window_order")
    record(window, hook, 4)
    monkeypatch.setattr(RowWatch, "rows", lambda _, steps: ROWS * steps * (10 if steps >= at else 1))
    record(window, hook)
    assert hook.windows.did[-1] == ("discard" if recorded is None else "close")
    result = window.recorder.result
    assert result is not None
    assert result.steps == (recorded or 0)
    assert (result.refusal is None) == (recorded is not None)
    assert not hook.is_traced


def test_nothing_more_is_recorded_of_a_step_that_turns_out_to_have_too_many_rows(
    rank: tuple[WindowRank, Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    window, hook = rank
    counted(window, hook)
    hook.allowed_ns = window._rows_price_ns(2 * ROWS * WINDOW_STEPS)
    ask(window, "window_order")
    record(window, hook, 8)
    assert hook.entered is not None
    hook.entered("forward")
    assert hook.windows.did == ["open"]
    monkeypatch.setattr(RowWatch, "rows", lambda _, steps: 100 * ROWS * steps)
    for phase in ("backward", "optimizer"):
        hook.entered(phase)
    assert hook.windows.did == ["open", "pause"], "once"
    record(window, hook, 1)
    assert hook.windows.did[-1] == "discard"
    assert "too many rows" in refusal(window)


def test_a_budget_that_was_spent_after_the_order_is_kept(rank: tuple[WindowRank, Hook]) -> None:
    window, hook = rank
    counted(window, hook)
    hook.allowed_ns = 1000
    ask(window, "window_order")
    record(window, hook)
    assert hook.windows.did == []
    assert "no longer allows" in refusal(window)


def test_a_second_window_is_refused_while_one_is_under_way(rank: tuple[WindowRank, Hook]) -> None:
    window, hook = rank
    ask(window, "window_order")
    record(window, hook, 5)
    for what in ("window_offer", "window_order"):
        assert ask(window, what).refusal == "a window is under way already"


def test_an_order_that_comes_too_late_is_refused(rank: tuple[WindowRank, Hook]) -> None:
    window, hook = rank
    ask(window, "window_order", STEP - WINDOW_STEPS)
    record(window, hook, 1)
    assert "came at step" in refusal(window)


def test_an_order_without_a_step_before_it_is_refused(rank: tuple[WindowRank, Hook]) -> None:
    """How much processor time a step usually needs is not known then."""
    window, hook = rank
    ask(window, "window_order", STEP + 1)
    record(window, hook, 1)
    assert "no step passed" in refusal(window)


def test_a_job_that_ends_while_it_records_leaves_nothing(rank: tuple[WindowRank, Hook], folders: Any) -> None:
    window, hook = rank
    ask(window, "window_order")
    record(window, hook, 5)
    assert folders()
    window.recorder.close()
    window.close()
    assert not hook.is_traced


def test_a_process_has_a_low_priority_and_bounded_memory(tmp_path: Path) -> None:
    code = "import os, resource; from pacecar.analysis.reading.rank_window import _restrain; _restrain(); "
    code += "print(os.nice(0), resource.getrlimit(resource.RLIMIT_DATA)[0], open('/proc/self/oom_score_adj').read())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.split() == [str(min(19, os.nice(0) + NICENESS)), str(MEMORY_BYTES_MAX), "1000"]
    assert cross_rank_window.PROCESS_SECONDS_MAX < WINDOW_SECONDS_MAX
