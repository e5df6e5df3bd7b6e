"""A profiler's session ends only when no thread of a process group can write to it any more."""

from __future__ import annotations

import gzip
import json
import logging
import platform
import subprocess
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pacecar.config import HookConfig
from pacecar.profiler.hook import window_schedule
from pacecar.profiler.hook.commands.trace_request import PAUSED_STEPS_MAX
from pacecar.profiler.windows import session_pause
from pacecar.profiler.windows.kineto_window import WindowProfiler
from pacecar.profiler.windows.session_pause import FUTEX_NUMBERS, GLOO_THREAD, SessionPause, without_sessions
from pacecar.profiler.windows.window_reader import WindowReader
from tests.kit.fake_clock import FakeClock
from tests.kit.forking_python import forking_python
from tests.kit.hook_inspection import inspect
from tests.kit.waiting import until
from tests.profiler.test_tracing import Job as TracedJob
from tests.profiler.test_tracing import marks_of

FUTEX = FUTEX_NUMBERS.get(platform.machine(), "none")
IDLE = f"{FUTEX} 0x55d0 0x189 0x0 0x0 0x0 0xffffffff 0x7f00 0x7f01"
COLLECTIVE = f"{FUTEX} 0x55d0 0x189 0x0 0x7f0011 0x0 0xffffffff 0x7f00 0x7f01"
EPOLL = "7777 0x5 0x7f00 0x40 0xa 0x0 0x0 0x7f00 0x7f01"

needs_system_calls = pytest.mark.skipif(
    FUTEX == "none" or not Path("/proc/self/syscall").exists(), reason="this kernel does not tell what a thread does"
)


class Tasks:
    """The kernel's folder of a process's threads, written by a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, **calls: str) -> None:
        for task, call in calls.items():
            self.thread(task, GLOO_THREAD, call)

    def thread(self, task: str, name: str, call: str) -> None:
        (self.folder / task).mkdir(exist_ok=True)
        (self.folder / task / "comm").write_text(f"{name}\n")
        (self.folder / task / "syscall").write_text(f"{call}\n")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setitem(FUTEX_NUMBERS, "x86_64", FUTEX)
    folder = tmp_path / "task"
    folder.mkdir()
    return Tasks(folder)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time in seconds, which a test sets."""
    at = [100.0]
    monkeypatch.setattr(session_pause.time, "monotonic", lambda: at[0])
    return at


class Pair:
    """Both ranks of a group in one process: a collective is under way until the other rank joins it."""

    def __init__(self) -> None:
        store, self.groups = dist.HashStore(), dict[int, Any]()
        makers = [threading.Thread(target=self._make, args=(store, rank)) for rank in (0, 1)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()

    def _make(self, store: dist.Store, rank: int) -> None:
        self.groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    def begin(self) -> dist.Work:
        return self.groups[0].allreduce([torch.ones(8)])

    def join(self) -> None:
        self.groups[1].allreduce([torch.ones(8)]).wait()


@pytest.fixture
def lone_rank(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("calls", "working"),
    [
        ({"11": IDLE}, set()), ({"11": IDLE, "12": IDLE}, set()), ({"11": IDLE, "12": COLLECTIVE}, {"12"}),
        ({"11": "running", "12": IDLE}, {"11"}), ({"11": EPOLL}, {"11"}), ({"11": "-1 0x7f00 0x7f01"}, {"11"}),
        ({"11": ""}, None), ({}, None),
    ],
)  # fmt: skip
def test_a_thread_of_gloo_works_unless_it_waits_without_a_limit(
    tasks: Tasks, calls: dict[str, str], working: set[str] | None
) -> None:
    tasks.has(**calls)
    tasks.thread("9", "gloo_tcp_loop", EPOLL)
    tasks.thread("10", "python", "running")
    assert SessionPause(str(tasks.folder)).working() == working


def test_a_thread_that_was_idle_once_may_have_new_work(tasks: Tasks) -> None:
    tasks.has(**{"11": COLLECTIVE, "12": "running"})
    pause = SessionPause(str(tasks.folder))
    pause.begin()
    assert not pause.is_over()
    tasks.has(**{"11": IDLE, "13": COLLECTIVE})  # a third is a new group's
    assert not pause.is_over()
    tasks.has(**{"11": COLLECTIVE, "12": IDLE})
    assert pause.is_over()
    pause.end()
    pause.begin()
    assert not pause.is_over(), "the next pause begins anew"
    pause.end()


def test_a_thread_that_has_ended_writes_no_more(tasks: Tasks) -> None:
    tasks.has(**{"11": COLLECTIVE})
    pause = SessionPause(str(tasks.folder))
    pause.begin()
    for name in ("comm", "syscall"):
        (tasks.folder / "11" / name).unlink()
    assert not pause.is_over(), "a thread that is there and cannot be read"
    (tasks.folder / "11").rmdir()
    assert pause.is_over()
    pause.end()


def test_threads_of_our_own_groups_do_not_count(lone_rank: None) -> None:
    until(lambda: SessionPause().working() == set(), "idle threads")
    with without_sessions():
        ours = Pair()
    theirs = Pair()
    until(lambda: SessionPause().working() == set(), "idle threads")
    work = ours.begin()
    later = theirs.begin()
    until(lambda: len(SessionPause().working() or ()) == 1, "one of the job's")
    theirs.join()
    later.wait()
    until(lambda: SessionPause().working() == set(), "ours is still out")
    assert not work.is_completed()
    ours.join()
    work.wait()


def test_the_number_of_a_thread_of_ours_that_has_ended_may_be_a_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_pause, "_own_tasks", {"999999999", str(threading.get_native_id())})
    SessionPause().working()
    assert session_pause._own_tasks == {str(threading.get_native_id())}


def test_a_record_that_is_asked_for_is_written_although_a_step_before_it_is_held(
    lone_rank: None, job: Any, attach: Any, sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Unrest(monkeypatch, float("inf"))
    steps = list[Any]()
    attach(job, config=HookConfig(overhead_budget=1.0, window_interval_steps=30), on_boundary=steps.append)
    until(lambda: bool(job.run(1) or True) and any(step.is_held for step in steps), "a window")
    job.run(2)
    first = next(at for at, step in enumerate(steps) if step.is_held)
    assert [step.is_held for step in steps[first:]] == [True] * len(steps[first:])
    assert steps[first + 1].record is None
    assert steps[first + 1].settled().step == first + 1
    assert steps[first].record.source == "estimate"
    assert not any(step.is_held for step in steps)


SLEEPING = {"x86_64": "230", "aarch64": "115"}.get(platform.machine(), "none")


@pytest.mark.parametrize(
    ("calls", "rests"),
    [((IDLE, f"{SLEEPING} 0x0"), True), ((IDLE, COLLECTIVE), False), (("running",), False), (("-1 0x0",), False)],
)
def test_where_no_thread_has_a_name_each_that_is_not_pythons_may_be_a_groups(
    tasks: Tasks, now: list[float], monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...], rests: bool
) -> None:
    """As with torch before 2.11."""
    monkeypatch.setitem(session_pause.OTHER_WAITS, "x86_64", frozenset({SLEEPING}))
    for number, call in enumerate(calls):
        tasks.thread(f"{10 + number}", "python", call)
    tasks.thread(str(threading.main_thread().native_id), "python", "running")
    pause = SessionPause(str(tasks.folder))
    assert pause.working() is None, "so that no window of a device is cut for a guess"
    pause.begin()
    assert pause.is_over() is rests
    now[0] += 0.99
    assert pause.is_over() is rests
    for number in range(len(calls)):
        tasks.thread(f"{10 + number}", "python", IDLE)
    assert pause.is_over()
    pause.end()


@needs_system_calls
def test_without_names_a_collective_of_this_torch_is_seen_to_work_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, pause = Pair(), SessionPause()
    work = pair.begin()
    until(lambda: len(pause.working() or ()) == 1, "a thread at work")
    (task,) = pause.working() or ()
    monkeypatch.setattr(session_pause, "GLOO_THREAD", "unnamed")
    assert task in (pause._unnamed() or ())
    pair.join()
    work.wait()
    until(lambda: task not in (pause._unnamed() or ()), "an idle thread")


@pytest.mark.parametrize("lacks", ["rest", "calls", "machine", "all"])
def test_where_nothing_tells_what_the_threads_do_a_second_passes(
    tasks: Tasks, now: list[float], monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    tasks.thread("11", "python", "running")
    if lacks == "calls":
        (tasks.folder / "11" / "syscall").unlink()
    if lacks == "machine":
        monkeypatch.setattr(platform, "machine", lambda: "s390x")
    pause = SessionPause(str(tasks.folder / "none") if lacks == "all" else str(tasks.folder))
    assert pause.working() is None
    pause.begin()
    now[0] += 0.99
    assert not pause.is_over()
    now[0] += 0.02
    assert pause.is_over()
    pause.end()


@needs_system_calls
def test_the_threads_of_this_torch_are_known_and_work_until_the_last_rank_has_come() -> None:
    pair, pause = Pair(), SessionPause()
    until(lambda: pause.working() == set(), "idle threads")
    work = pair.begin()
    until(lambda: len(pause.working() or ()) == 1, "a thread at work")
    pause.begin()
    assert not pause.is_over()
    pair.join()
    work.wait()
    until(pause.is_over, "idle threads")
    pause.end()


@pytest.mark.slow
@needs_system_calls
def test_a_session_that_must_end_now_waits_for_the_collectives(lone_rank: None) -> None:
    pair, profiler = Pair(), WindowProfiler(on_device=False)
    profiler.install()
    profiler.open()
    work = pair.begin()
    until(lambda: bool(SessionPause().working()), "a thread at work")
    joined = []

    def join_late() -> None:
        joined.append(profiler.is_open)
        pair.join()

    late = threading.Timer(0.2, join_late)
    late.start()
    with torch.profiler.profile():  # the user's
        torch.ones(4).add(1.0)
    assert joined == [True], "the session went on until the other rank came"
    assert not profiler.is_open
    late.join()
    work.wait()
    profiler.uninstall()


@pytest.mark.parametrize(("is_known", "seconds"), [(True, 1.0), (False, 0.1)])
def test_a_session_that_must_end_now_waits_for_a_second_at_most_for_a_guess_less(
    lone_rank: None, now: list[float], monkeypatch: pytest.MonkeyPatch, is_known: bool, seconds: float
) -> None:
    pause, slept = SessionPause(), list[float]()
    monkeypatch.setattr(pause, "working", lambda: {"1"} if is_known else None)
    monkeypatch.setattr(pause, "_unnamed", lambda: {"1"})
    monkeypatch.setattr(pause, "is_over", lambda: False)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(session_pause.time, "sleep", sleep)
    pause.wait()
    assert sum(slept) == pytest.approx(seconds, abs=0.01)
    pause.end()


class Unrest:
    """Stands in for threads that work on for some looks of the hook's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: float) -> None:
        self.left, self.looks = looks, looks
        monkeypatch.setattr(SessionPause, "is_over", lambda pause: self._is_over())
        monkeypatch.setattr(SessionPause, "wait", lambda pause: None)
        plain = SessionPause.begin

        def begin(pause: SessionPause) -> None:
            self.left = self.looks
            plain(pause)

        monkeypatch.setattr(SessionPause, "begin", begin)

    def _is_over(self) -> bool:
        self.left -= 1
        return self.left < 0


def exact_steps(sink: Any) -> list[int]:
    return [record.step for record in sink.steps if record.source == "exact"]


@pytest.mark.slow
@pytest.mark.parametrize("looks", [0, 1, 2, 9, 40])
def test_a_window_is_read_at_the_first_boundary_at_which_the_threads_have_rested(
    lone_rank: None, job: Any, attach: Any, sink: Any, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    Unrest(monkeypatch, looks)
    held = []
    config = HookConfig(overhead_budget=1.0, window_interval_steps=30)
    hook = attach(job, config=config, on_boundary=lambda step: held.append((step.step, step.is_held)))
    open_after = []
    for _ in range(100):
        job.run(1)
        open_after.append(hook.windows.is_open)
    exact = exact_steps(sink)
    assert len(exact) >= 2
    held_steps = {step for step, is_held in held if is_held}
    assert sorted(step for step in held_steps if step - 1 not in held_steps)[: len(exact)] == exact
    for step in exact:
        assert {step, open_after[step:].index(False) + step - 1} <= held_steps, "and all between, with their records"
        assert open_after[step], "it goes on over its boundary"
        lasted = open_after[step:].index(False)
        assert (lasted == 1) if looks <= 1 else (1 <= lasted <= looks), "a look at each boundary and phase"
    assert inspect(hook).failures == 0


@pytest.mark.slow
def test_a_window_whose_threads_never_rest_is_dropped_and_the_job_is_measured_without(
    lone_rank: None, job: Any, attach: Any, sink: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(window_schedule, "HOLD_SECONDS_MAX", 0.02)
    unrest = Unrest(monkeypatch, float("inf"))
    hook = attach(job, config=HookConfig(overhead_budget=1.0, window_interval_steps=5))
    with caplog.at_level(logging.INFO, logger="pacecar"):
        job.run(20)
        until(lambda: bool(job.run(5)) and inspect(hook).cut_because is not None, "the limit")
        job.run(20)
        assert exact_steps(sink) == []
        written = sink.steps
        assert written[-1].step >= hook.step - 3, "no record waits any more"
        assert not any(record.disturbed for record in written[-10:]), "a paused session disturbs no step"
        assert hook.windows.is_open
        unrest.left = unrest.looks = 0
        job.run(40)
    assert "cut off: collectives were under way for 0.02 s" in caplog.text
    assert len(exact_steps(sink)) >= 2, "when they rest again, there are windows again"
    assert inspect(hook).failures == 0


@pytest.mark.slow
def test_a_device_window_amid_collectives_on_the_host_is_dropped(
    lone_rank: None, job: Any, attach: Any, sink: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The profiler of a device is stood in for by that of the host, its `must_be_cut` by a test's."""
    Unrest(monkeypatch, 2)
    hook = attach(job, config=HookConfig(overhead_budget=1.0, window_interval_steps=10))
    asked = []

    def must_be_cut() -> bool:
        asked.append(hook.step)
        return len(asked) == 1

    monkeypatch.setattr(hook.windows, "must_be_cut", must_be_cut)
    with caplog.at_level(logging.INFO, logger="pacecar"):
        job.run(60)
    assert caplog.text.count("cut off: the job's own collectives were under way on the host") == 1
    assert asked[0] not in exact_steps(sink)
    assert exact_steps(sink) == asked[1 : 1 + len(exact_steps(sink))] != []


@pytest.mark.parametrize(
    ("on_device", "warm", "working"), [(True, 0, True), (True, 1, True), (False, 0, True), (True, 0, False)]
)
def test_only_a_devices_window_that_would_end_now_must_be_cut(on_device: bool, warm: int, working: bool) -> None:
    class Profiler:
        def open(self) -> None:
            pass

        def are_collectives_under_way(self) -> bool:
            return working

    profiler: Any = Profiler()
    reader = WindowReader(FakeClock(), on_device=on_device, profiler=profiler)
    reader._warm_steps_left = warm
    assert reader.must_be_cut() is (on_device and not warm and working)


@pytest.mark.parametrize(("looks", "steps_more"), [(0, 1), (3, 4), (10_000, PAUSED_STEPS_MAX)])
def test_a_trace_is_paused_after_its_last_step_and_ends_when_the_threads_have_rested(
    lone_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int, steps_more: int
) -> None:
    Unrest(monkeypatch, looks)
    job = TracedJob(tmp_path)
    job.run(1)
    job.ask(steps=3)
    job.run(30)
    _, path = job.written()
    assert marks_of(path) == ["ProfilerStep#41", "ProfilerStep#42", "ProfilerStep#43"]
    assert job.marks == [(41, True), (44 + steps_more, False)]
    assert products_of(path) == 3, "what follows is not recorded"


def products_of(path: str) -> int:
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


def test_a_job_that_ends_while_its_trace_is_paused_leaves_the_trace(
    lone_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Unrest(monkeypatch, 10_000)
    job = TracedJob(tmp_path)
    job.ask(steps=2)
    job.run(3)
    state, path = job.written()
    assert (state, products_of(path)) == ("done", 2)
    with torch.autograd.profiler.profile() as profile:
        torch.ones(1).add(1.0)
    assert "aten::add" in [event.name for event in profile.function_events or ()], "the pause is over"


KINETOS = """
import time
from pacecar.clock import SystemClock
from pacecar.profiler.windows.session_pause import SessionPause
from pacecar.profiler.windows.window_reader import WindowReader
reader = WindowReader(SystemClock(), on_device=False)
reader.install()
until = time.monotonic() + 20
while SessionPause()._unnamed() and time.monotonic() < until:  # others run, or rest a moment later
    time.sleep(0.01)
print(SessionPause()._unnamed())
"""


@pytest.mark.slow
@needs_system_calls
def test_kinetos_own_thread_is_not_taken_for_a_groups() -> None:
    """It waits with a limit for a new configuration, as a thread does that works on a collective."""
    done = subprocess.run([forking_python(), "-c", KINETOS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
