"""Has all ranks record the same steps when one seems late, and asks the model of `pacecar analyze` which it is.

    rank 0, monitor thread      suspicion -> offer to all -> order for a step ahead -> parts -> verdict -> `Straggler`
    every rank, training        records the steps (`step_recording`)
    every rank, other process   condenses the trace to some KB (`analysis.reading.rank_window`), at a low priority
    rank 0, other process       judges all parts

Ranks are asked over the sockets that hangs are asked about (`account_road`), so no step waits for a message.  A window
is ordered only if all ranks answer that their overhead budget allows its predicted price; else one line of the log says
why not, and windows of one rank wait for a while so that it soon does.  What recording costs is charged to the budget.
So is what the other processes may have taken from the job: their processor time, but at most TAKEN_RATIO of the time
that they took, and no more than they themselves waited for processors.

`NamedRanks` has what becomes of the verdict.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import socket
import subprocess  # noqa: TID251  a process of its own, so that nothing is analyzed under the job's GIL
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from pacecar.analysis.reading.rank_window import TAKEN_RATIO, TimedStretch, WindowVerdict
from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.profiler.hangs.account_road import Question, Road, Silence, WindowState, ask
from pacecar.profiler.timing.overhead_budget import OverheadBudget
from pacecar.records import JobHello, Straggler

from ..exchange.phase_sums_message import RankRange
from ..exchange.totals import LedgerTotals
from .named_ranks import NamedRanks
from .step_recording import ROW_NS, RecordedHook, StepRecorder
from .window_trigger import WindowTrigger

__all__ = ["WINDOW_STEPS", "CrossRankWindow", "WindowRank"]

WINDOW_STEPS = 6
"""Steps of a window: enough for the verdict's test with two ranks."""

OPEN_NS = 2_000_000
"""The cost of a recording without rows."""

BESIDE_NS = 50_000_000
"""What condensing costs a job that has no processor to spare; judging, on rank 0, costs twice that."""

PRICE_MARGIN = 1.3

AHEAD_STEPS = 4
AHEAD_SECONDS = 1.0
"""How far ahead the first step is, by steps and by time, so that the order reaches all ranks before it."""

POLL_SECONDS = 1.0
"""How often ranks are asked for their parts."""

PROCESS_SECONDS_MAX = 120.0
WINDOW_SECONDS_MAX = 300.0
"""The longest that a process of ours, and a window from its order on, may take."""

SAVING_SECONDS = 40.0
"""How long after an offer that its budget forbids a rank takes no windows of its own: until after the next one."""

STDERR_BYTES_MAX = 500

_PROGRAM = "import sys; sys.path[:] = {path!r}; from pacecar.analysis.reading.rank_window import main; {run}"

_log = logging.getLogger("pacecar")


class RecordingHook(RecordedHook, Protocol):
    """The hook, as seen by a rank's part."""

    @property
    def budget(self) -> OverheadBudget:
        """The overhead budget that the recording is charged to."""
        ...


class _Process:
    """A process of ours with a low priority, and the file that it writes at its end."""

    def __init__(self, words: Sequence[str], out: Path, charge: Callable[[int], None]) -> None:
        self._out = out
        self._charge = charge
        self._begun_ns = time.monotonic_ns()
        self._errors = out.with_suffix(".err")
        code = _PROGRAM.format(path=sys.path, run="sys.exit(main(sys.argv[1:]))")
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter and program
                [sys.executable, "-c", code, *words],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environ, cwd=out.parent,
            )  # fmt: skip

    def poll(self) -> bytes | str | None:
        """Return what it wrote, or why it failed; None: it still runs."""
        before_ns = _children_ns()
        status = self._process.poll()
        if status is None:
            return None
        spent_ns, took_ns = max(0, _children_ns() - before_ns), time.monotonic_ns() - self._begun_ns
        self._charge(min(spent_ns, round(TAKEN_RATIO * took_ns), max(0, took_ns - spent_ns)))
        try:
            if status == 0:
                return self._out.read_bytes()
            lines = self._errors.read_bytes()[-STDERR_BYTES_MAX:].decode(errors="replace").strip().splitlines()
        except OSError as error:
            return str(error)
        return lines[-1] if lines else f"its process ended with {status}"

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _children_ns() -> int:
    """Return the processor time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round((used.ru_utime + used.ru_stime) * NS_PER_SECOND)


class WindowRank:
    """One rank's part of cross-rank windows."""

    def __init__(self, hello: JobHello, hook: RecordingHook, clock: Clock, *, on_device: bool) -> None:
        self._hello = hello
        self._hook = hook
        self._clock = clock
        self.on_device = on_device
        self.recorder = StepRecorder(hook, hook.budget.charge, on_device=on_device)
        """For the training thread."""
        self._folder: Path | None = None
        self._process: _Process | None = None
        self._begun_ns = self._saves_until_ns = 0
        self._beside_ns: int | None = None
        self._part: bytes | None = None
        self._refusal: str | None = None

    def charge(self, cost_ns: int) -> None:
        """Charge the cost of a process of a window's."""
        self._beside_ns = cost_ns + (self._beside_ns or 0)
        self._hook.budget.charge(cost_ns)

    def _price_ns(self, rows: int) -> int:
        """Return the predicted price of a window of so many rows."""
        beside_ns = self._beside_ns
        if beside_ns is None:
            is_crowded = os.getloadavg()[0] + 1 > len(os.sched_getaffinity(0))
            beside_ns = BESIDE_NS * (1 if self._hello.rank else 3) * is_crowded
        return OPEN_NS + round(PRICE_MARGIN * (ROW_NS * rows + beside_ns))

    @property
    def usual_step_ns(self) -> int | None:
        """How long a step usually takes; None before any was measured."""
        return self._hook.budget.usual_ns

    # --- the accounts' thread ---------------------------------------------------------------------

    def answer(self, question: Question) -> WindowState:
        """Answer rank 0."""
        step = self._hook.step
        match question.what:
            case "window_offer":
                return WindowState(step, self._why_not(question.steps))
            case "window_order":
                why = self._why_not(question.steps)
                return WindowState(step, why or self._begin(question))
            case _:
                return WindowState(step, self._refusal, self._part)

    def _why_not(self, steps: int) -> str | None:
        rows = self._hook.windows.row_count
        if self._folder is not None or self.recorder.is_pending:
            return "a window is under way already"
        if not self._hook.windows.is_installed:
            return "windows are not possible here"
        if rows is None:
            return "no window was taken yet, so the price is unknown"
        price_ns = self._price_ns(rows * steps)
        headroom_ns = self._hook.budget.headroom_ns(wall_ns=0, cost_ns=0)
        if headroom_ns is not None and price_ns > headroom_ns:
            self._saves_until_ns = self._clock.monotonic_ns() + round(SAVING_SECONDS * NS_PER_SECOND)
            return f"{price_ns / NS_PER_SECOND:.2f} s are more than overhead_budget allows now"
        self._saves_until_ns = 0
        return None

    @property
    def is_saving(self) -> bool:
        """Whether windows of this rank alone have to wait, so that the budget soon allows one of all ranks."""
        return self._saves_until_ns > 0 and self._clock.monotonic_ns() < self._saves_until_ns

    def _begin(self, order: Question) -> str | None:
        """Have the training thread record, at once: the monitor thread may sleep for longer than the order is ahead."""
        try:
            folder = Path(tempfile.mkdtemp(prefix="pacecar-window-"))
        except OSError as error:
            return str(error)[:STDERR_BYTES_MAX]
        self._part = self._refusal = self._beside_ns = None
        self._begun_ns = self._clock.monotonic_ns()
        self.recorder.order(order.first_step, order.steps, str(folder / "trace.json"))
        self._folder = folder
        return None

    # --- the monitor thread -----------------------------------------------------------------------

    def tick(self) -> None:
        """Go on with the window: have what was recorded condensed, keep the part."""
        try:
            self._go_on()
        except OSError as error:
            self._refuse(str(error))

    def _go_on(self) -> None:
        if self._folder is None:
            return
        recorded = self.recorder.result
        if self._process is None and recorded is not None:
            if recorded.refusal is not None:
                self._refuse(recorded.refusal)
                return
            rank, world = str(self._hello.rank), str(self._hello.world_size)
            out, timed = self._folder / "part", self._folder / "timed.json"
            offset_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
            stretches = [TimedStretch(name, start + offset_ns, end + offset_ns) for name, start, end in recorded.timed]
            timed.write_bytes(msgspec.json.encode(stretches))
            trace = str(self._folder / "trace.json")
            self._process = _Process(
                ["condense", trace, str(timed), str(out), rank, world, socket.gethostname()], out, self.charge
            )
            self._begun_ns = self._clock.monotonic_ns()
        found = None if self._process is None else self._process.poll()
        if isinstance(found, bytes):
            self._part = found
            _log.debug("recorded %s: %d bytes", recorded, len(found))
            self._clean()
        elif found is not None:
            self._refuse(found)
        elif self._clock.monotonic_ns() - self._begun_ns > PROCESS_SECONDS_MAX * NS_PER_SECOND:
            self._refuse("recording or condensing took too long")

    def close(self) -> None:
        """End what is under way."""
        self._clean()

    def _refuse(self, why: str) -> None:
        self._refusal = why[:STDERR_BYTES_MAX]
        self._clean()

    def _clean(self) -> None:
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None:
            process.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class CrossRankWindow:
    """Rank 0's side; all methods are called on the monitor thread."""

    def __init__(
        self,
        hello: JobHello,
        own: WindowRank,
        report: Callable[[Straggler], None],
        clock: Clock,
        step: Callable[[], int],
    ) -> None:
        self._hello = hello
        self._own = own
        self._clock = clock
        self._step = step
        self._trigger = WindowTrigger()
        self._names = NamedRanks(hello.job, report, clock, on_device=own.on_device)
        self._missing: set[int] = set()
        self._folder: Path | None = None
        self._judging: _Process | None = None
        self._ordered_ns = self._next_ns = 0
        self._first_step = 0
        self._has_said_no = False
        self.part_bytes: dict[int, int] = {}
        """Size of each rank's part of the last window."""

    def detected(self, changes: Sequence[Straggler]) -> None:
        """Report what the always-on detector says."""
        if self._names.detected(changes):
            self._trigger.named()

    def compare(self, rows: Sequence[RankRange]) -> None:
        """Look at one range of the ranks that are compared with this one."""
        self._trigger.add(rows)

    def look(self, totals: Sequence[LedgerTotals | None]) -> None:
        """Look at the ledgers of all ranks so far."""
        self._trigger.look(totals)
        if self._trigger.is_over:
            self._names.recovered(self._step())

    def tick(self, road: Road | None, is_closing: Callable[[], bool]) -> None:
        """Order a window if one is due, or go on with it."""
        now_ns = self._clock.monotonic_ns()
        if road is None or now_ns < self._next_ns:
            return
        if self._folder is None:
            if self._trigger.is_due(now_ns):
                self._order(road, now_ns, is_closing)
            return
        self._next_ns = now_ns + round(POLL_SECONDS * NS_PER_SECOND)
        try:
            self._go_on(road, now_ns, is_closing)
        except (OSError, msgspec.MsgspecError) as error:
            self._give_up(str(error))

    def _ask(
        self, road: Road, ranks: Iterator[int] | set[int] | range, question: Question, is_closing: Callable[[], bool]
    ) -> dict[int, WindowState | Silence]:
        chosen = set(ranks)
        answers = ask(road, chosen - {self._hello.rank}, question, is_over=is_closing)
        if self._hello.rank in chosen:
            answers[self._hello.rank] = self._own.answer(question)
        return answers

    def _order(self, road: Road, now_ns: int, is_closing: Callable[[], bool]) -> None:
        everyone = range(self._hello.world_size)
        offer = Question(token=road.token, what="window_offer", steps=WINDOW_STEPS)
        answers = self._ask(road, everyone, offer, is_closing)
        if (why := _first_refusal(answers)) is not None:
            self._say_no(why)
            self._trigger.put_off(now_ns)
            return
        step = max(answer.step for answer in answers.values() if isinstance(answer, WindowState))
        median_ns = self._own.usual_step_ns
        ahead = AHEAD_STEPS if median_ns is None else max(AHEAD_STEPS, round(AHEAD_SECONDS * NS_PER_SECOND / median_ns))
        self._first_step = step + ahead
        order = Question(token=road.token, what="window_order", first_step=self._first_step, steps=WINDOW_STEPS)
        answers = self._ask(road, everyone, order, is_closing)
        self._folder = Path(tempfile.mkdtemp(prefix="pacecar-verdict-"))
        self._missing, self._ordered_ns = set(everyone), self._clock.monotonic_ns()
        self._next_ns = self._ordered_ns + round(POLL_SECONDS * NS_PER_SECOND)
        self.part_bytes = {}
        self._trigger.ordered()
        self._names.ordered()
        _log.info(
            "pacecar: all ranks record steps %d to %d to see which is late",
            self._first_step,
            self._first_step + WINDOW_STEPS - 1,
        )
        if (why := _first_refusal(answers)) is not None:
            self._give_up(why)

    def _go_on(self, road: Road, now_ns: int, is_closing: Callable[[], bool]) -> None:
        folder = self._folder
        assert folder is not None, "a window is under way"
        if now_ns - self._ordered_ns > WINDOW_SECONDS_MAX * NS_PER_SECOND:
            self._give_up(f"{len(self._missing)} ranks have not sent their part")
            return
        if self._judging is not None:
            self._judge(self._judging)
            return
        for rank, answer in self._ask(
            road, set(self._missing), Question(token=road.token, what="window_part"), is_closing
        ).items():
            if isinstance(answer, Silence):
                if answer.refused:
                    self._give_up(f"rank {rank}: {answer.reason}")
                    return
                continue  # asked again
            if answer.refusal is not None:
                self._give_up(f"rank {rank}: {answer.refusal}")
                return
            if answer.part is not None:
                (folder / f"{rank}.part").write_bytes(answer.part)
                self.part_bytes[rank] = len(answer.part)
                self._missing.discard(rank)
        if not self._missing:
            out = folder / "verdict"
            self._judging = _Process(["judge", str(folder), str(out)], out, self._own.charge)

    def _judge(self, process: _Process) -> None:
        found = process.poll()
        if found is None:
            return
        if isinstance(found, str):
            self._give_up(found)
            return
        verdict = msgspec.json.decode(found, type=WindowVerdict)
        seconds = (self._clock.monotonic_ns() - self._ordered_ns) / NS_PER_SECOND
        _log.info("pacecar: %d steps of all ranks are judged, %.1f s after their order", verdict.steps, seconds)
        _log.debug("the verdict on them: %s", found.decode())
        if self._trigger.is_outdated:
            self._give_up("steps are as short again as before")
            return
        self._done(has_changed=self._names.judged(verdict, self._first_step))

    # --- endings ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End what is under way."""
        self._clean()

    def _say_no(self, why: str) -> None:
        if not self._has_said_no:
            self._has_said_no = True
            _log.info("pacecar: a rank seems late, and no steps are recorded to see which: %s", why)

    def _give_up(self, why: str) -> None:
        _log.info("pacecar: the steps that all ranks should record tell nothing: %s", why)
        self._done(has_changed=False)

    def _done(self, *, has_changed: bool) -> None:
        self._trigger.done(self._clock.monotonic_ns(), self._step(), has_changed=has_changed)
        self._clean()

    def _clean(self) -> None:
        judging, self._judging = self._judging, None
        folder, self._folder = self._folder, None
        if judging is not None:
            judging.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _first_refusal(answers: dict[int, WindowState | Silence]) -> str | None:
    for rank, answer in sorted(answers.items()):
        why = answer.reason if isinstance(answer, Silence) else answer.refusal
        if why is not None:
            return f"rank {rank}: {why}"
    return None
