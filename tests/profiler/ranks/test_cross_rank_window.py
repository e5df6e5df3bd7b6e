"""A cross-rank window with ranks that refuse, say nonsense, are late or die, and a job that ends meanwhile."""

from __future__ import annotations

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
    WINDOW_SECONDS_MAX,
    WINDOW_STEPS,
    CrossRankWindow,
    WindowRank,
)
from pacecar.profiler.timing.overhead_budget import OverheadBudget
from pacecar.records import Cause, JobHello, Straggler
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, simulate
from tests.kit.simulated_jobs.kineto import write_trace
from tests.kit.waiting import until

pytestmark = pytest.mark.slow

SECOND = 10**9
STEP = 100
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
            "window_offer": WindowState(STEP), "window_order": WindowState(STEP),
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
        self.window = CrossRankWindow(hello_of(0), own, self.records.append, self.clock, lambda: STEP)

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

    is_installed, is_settled, row_count = True, True, 100

    def may_open(self) -> bool:
        return True

    def open_recording(self) -> None:
        pass

    def discard_recording(self) -> None:
        pass

    def pause_recording(self) -> bool:
        return True

    def close_recording(self, path: str) -> int:
        write_trace(Path(path), RUN.traces()[1], RUN.job.layout)
        return 100


class Hook:
    """A hook at one step."""

    def __init__(self) -> None:
        self.step, self.is_traced, self.windows = STEP, False, Windows()
        self.budget = OverheadBudget(1.0, warmup_steps=3, interval_steps=50)
        self.is_awake = False

    def wake(self) -> None:
        self.is_awake = True


@pytest.fixture
def rank(folders: Any) -> Iterator[tuple[WindowRank, Hook]]:
    hook: Any = Hook()
    rank = WindowRank(hello_of(1), hook, FakeClock(), on_device=False)
    yield rank, hook
    rank.close()


def ask(rank: WindowRank, what: str, first: int = STEP + 4) -> WindowState:
    return rank.answer(Question(token="", what=what, first_step=first, steps=WINDOW_STEPS))  # type: ignore[arg-type]


def record(rank: WindowRank, hook: Hook, steps: int = WINDOW_STEPS + 4) -> None:
    for _ in range(steps):
        hook.step += 1
        rank.recorder.boundary()


def test_a_rank_records_condenses_and_charges_what_was_ordered(rank: tuple[WindowRank, Hook]) -> None:
    window, hook = rank
    assert ask(window, "window_offer") == WindowState(STEP)
    assert ask(window, "window_order") == WindowState(STEP)
    assert hook.is_awake
    record(window, hook, 5)
    assert hook.is_traced
    record(window, hook, 5)
    assert not hook.is_traced
    assert hook.budget.cost_ns > 0
    until(lambda: (window.tick(), ask(window, "window_part").part)[1])
    part = ask(window, "window_part").part
    assert part is not None
    trace = decode_trace(part, "rank 1")
    assert (trace.rank, trace.world_size, len(trace.steps)) == (1, 2, RUN.job.steps)
    assert len(part) < 20 * 1024


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
    window.tick()
    assert "came at step" in str(ask(window, "window_part").refusal)


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
