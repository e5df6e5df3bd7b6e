"""Has all ranks record the same steps when one seems late, and asks the model of `pacecar analyze` which it is.

    rank 0, monitor thread      suspicion -> offer to all -> order for a step ahead -> parts -> verdict -> `Straggler`
    every rank, training        counts the rows of a step, records the steps (`step_recording`)
    every rank, other process   condenses the trace to some KB (`analysis.reading.rank_window`), at a low priority
    rank 0, other process       judges all parts

Ranks are asked over the sockets that hangs are asked about (`account_road`), so no step waits for a message.

A rank that has got slow may write many more rows than before.  So each counts those of a step after the suspicion, in
an exact window of its own, whose price is bounded (`window_schedule`).  All record as many steps as the overhead budget
of each allows at the price of these rows; if that is too few, one line of the log says so, and windows of one rank wait
for a while so that it soon allows more.  What recording costs is charged to the budget.
So is what the other processes may have taken from the job: their processor time, but at most TAKEN_RATIO of the time
that they took, and no more than they themselves waited for processors.

`NamedRanks` has what becomes of the verdict.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import subprocess  # noqa: TID251  a process of its own, so that nothing is analyzed under the job's GIL
import sys
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
from .row_watch import SLOWED_ROW_NS
from .step_recording import PRICE_NS_MAX, STEPS_MIN, RecordedHook, StepRecorder, allowed_price_ns
from .temporary_folder import TemporaryFolder, remove_abandoned
from .window_trigger import WindowTrigger

__all__ = ["WINDOW_STEPS", "CrossRankWindow", "WindowRank"]

WINDOW_STEPS = 6
"""Steps of a window, fewer where the budget does not allow so many."""

ROW_NS = 9_000
"""The least cost of a row (torch 2.13, CPU, 28 000 rows): 1.8 us in the step, 4.8 to end the session, 2.4 to write."""

CLOSING_RATIO = 1.8
"""What ending a recording takes, which is written, relative to ending a window: 11.0 us a row instead of 6.2."""

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

COUNT_POLL_SECONDS = 2.0
COUNT_SECONDS_MAX = 20.0
"""How often ranks are asked whether they have counted the rows of a step, and for how long before the next try."""

COUNTED_SECONDS_MAX = 120.0
"""How long a count is good."""

SAVING_SECONDS = 40.0
"""How long after an offer that its budget forbids a rank takes no windows of its own: until after the next one."""

STDERR_BYTES_MAX = 500

_PROGRAM = "import sys; sys.path[:] = {path!r}; from pacecar.analysis.reading.rank_window import main; {run}"

_log = logging.getLogger("pacecar")

_verdict = msgspec.json.Decoder(WindowVerdict)


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
        self.recorder = StepRecorder(hook, hook.budget.charge, self._rows_price_ns, on_device=on_device)
        """For the training thread."""
        self._folder: TemporaryFolder | None = None
        self._process: _Process | None = None
        self._begun_ns = self._saves_until_ns = 0
        self._has_ticked = False
        self._counted_from: tuple[int, int] | None = None
        self._beside_ns: int | None = None
        self._fixed_ns = self._predicted_ns = 0
        self._part: bytes | None = None
        self._refusal: str | None = None

    def charge(self, cost_ns: int) -> None:
        """Charge the cost of a process of a window's."""
        self._beside_ns = cost_ns + (self._beside_ns or 0)
        self._hook.budget.charge(cost_ns)

    def _rows_price_ns(self, rows: int) -> int:
        """Return the price of a window of so many rows, at what a row of the last window cost to end."""
        row_ns = max(ROW_NS, round(CLOSING_RATIO * self._hook.windows.ending_row_ns) + SLOWED_ROW_NS)
        return OPEN_NS + row_ns * rows + self._fixed_ns

    def _price_ns(self, step_rows: int, steps: int) -> int:
        """Return the price of a window of so many steps, with a margin."""
        return round(PRICE_MARGIN * self._rows_price_ns(step_rows * (steps + self.recorder.steps_around)))

    def _set_fixed_price(self) -> None:
        beside_ns = self._beside_ns
        if beside_ns is None:
            is_crowded = os.getloadavg()[0] + 1 > len(os.sched_getaffinity(0))
            beside_ns = BESIDE_NS * (1 if self._hello.rank else 3) * is_crowded
        self._fixed_ns = beside_ns

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
                return self._offer(step, question)
            case "window_order":
                return WindowState(step, self._why_not() or self._begin(question))
            case _:
                return WindowState(step, self._refusal, part=self._part)

    def _why_not(self) -> str | None:
        if self._folder is not None or self.recorder.is_ordered:
            return "a window is under way already"
        return None if self._hook.windows.is_installed else "windows are not possible here"

    def _offer(self, step: int, question: Question) -> WindowState:
        """Say how many steps can be recorded, once the rows of a step after the suspicion are counted."""
        why, now_ns = self._why_not(), self._clock.monotonic_ns()
        if why is not None:
            return WindowState(step, why)
        if self._counted_from is None or self._counted_from[0] != question.first_step:
            self._counted_from, self._saves_until_ns = (question.first_step, now_ns), 0
            self.recorder.count()
        if self._step_rows is None or self._hook.windows.ended_ns < self._counted_from[1]:
            return WindowState(step)
        self._set_fixed_price()
        allowed_ns = allowed_price_ns(self._hook.budget.headroom_ns(wall_ns=0, cost_ns=0))
        steps = question.steps
        while steps and self._price_ns(self._step_rows, steps) > allowed_ns:
            steps -= 1
        if steps < STEPS_MIN:
            price_ns = self._price_ns(self._step_rows, STEPS_MIN)
            words = "a recording may cost"
            if price_ns <= PRICE_NS_MAX:
                words = "overhead_budget allows now"
                self._saves_until_ns = now_ns + round(SAVING_SECONDS * NS_PER_SECOND)
            return WindowState(step, f"{price_ns / NS_PER_SECOND:.2f} s are more than {words}")
        self._saves_until_ns = 0
        return WindowState(step, steps=steps)

    @property
    def _step_rows(self) -> int | None:
        """The rows of a step, as the last window counted them; on a device a window has two steps."""
        rows = self._hook.windows.row_count
        return None if rows is None else -(-rows // (1 + self.on_device))

    @property
    def is_saving(self) -> bool:
        """Whether windows of this rank alone have to wait, so that the budget allows one of all ranks."""
        if self.recorder.is_awaited:
            return True
        return self._saves_until_ns > 0 and self._clock.monotonic_ns() < self._saves_until_ns

    def _begin(self, order: Question) -> str | None:
        """Have the training thread record, at once: the monitor thread may sleep for longer than the order is ahead."""
        step_rows = self._step_rows
        if step_rows is None:
            return "the rows of a step are not known"
        try:
            folder = TemporaryFolder()
        except OSError as error:
            return str(error)[:STDERR_BYTES_MAX]
        self._part = self._refusal = self._beside_ns = None
        self._begun_ns = self._clock.monotonic_ns()
        self._predicted_ns = self._price_ns(step_rows, order.steps)
        self.recorder.order(order.first_step, order.steps, str(folder.path / "trace.json"), step_rows)
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
        if not self._has_ticked:
            self._has_ticked = True
            remove_abandoned()
        if self._folder is None:
            return
        recorded = self.recorder.result
        if self._process is None and recorded is not None:
            if recorded.refusal is not None:
                self._refuse(recorded.refusal)
                return
            rank, world = str(self._hello.rank), str(self._hello.world_size)
            folder = self._folder.path
            out, timed = folder / "part", folder / "timed.json"
            offset_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
            stretches = [TimedStretch(name, start + offset_ns, end + offset_ns) for name, start, end in recorded.timed]
            timed.write_bytes(msgspec.json.encode(stretches))
            trace = str(folder / "trace.json")
            self._process = _Process(
                ["condense", trace, str(timed), str(out), rank, world, socket.gethostname()], out, self.charge
            )
            self._begun_ns = self._clock.monotonic_ns()
        found = None if self._process is None else self._process.poll()
        if isinstance(found, bytes):
            self._part = found
            paid_ns = (0 if recorded is None else recorded.cost_ns) + (self._beside_ns or 0)
            _log.debug(
                "recorded %s: %d bytes; predicted %.3f s, paid %.3f s", recorded, len(found),
                self._predicted_ns / NS_PER_SECOND, paid_ns / NS_PER_SECOND,
            )  # fmt: skip
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
            folder.close()


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
        self._folder: TemporaryFolder | None = None
        self._judging: _Process | None = None
        self._ordered_ns = self._next_ns = 0
        self._count_from: tuple[int, int] | None = None
        self._counts_until_ns: int | None = None
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
        if self._folder is None and not self._trigger.is_due(now_ns):
            return
        self._next_ns = now_ns + round(POLL_SECONDS * NS_PER_SECOND)
        try:
            if self._folder is None:
                self._order(road, now_ns, is_closing)
            else:
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
        if self._count_from is None or now_ns - self._count_from[1] > COUNTED_SECONDS_MAX * NS_PER_SECOND:
            self._count_from = (self._step(), now_ns)
        offer = Question(
            what="window_offer", first_step=self._count_from[0], steps=WINDOW_STEPS
        )  # fmt: skip
        answers = self._ask(road, everyone, offer, is_closing)
        why, steps = _first_refusal(answers), min(_steps(answer) for answer in answers.values())
        if why is None and not steps:
            if self._counts_until_ns is None:
                self._counts_until_ns = now_ns + round(COUNT_SECONDS_MAX * NS_PER_SECOND)
            if now_ns < self._counts_until_ns:
                self._next_ns = now_ns + round(COUNT_POLL_SECONDS * NS_PER_SECOND)
                return
            why = "overhead_budget does not allow yet to count the rows of a step"
        self._counts_until_ns = None
        if why is not None:
            self._say_no(why)
            self._trigger.put_off(now_ns)
            return
        step = max(answer.step for answer in answers.values() if isinstance(answer, WindowState))
        median_ns = self._own.usual_step_ns
        ahead = AHEAD_STEPS if median_ns is None else max(AHEAD_STEPS, round(AHEAD_SECONDS * NS_PER_SECOND / median_ns))
        self._first_step = step + ahead
        self._folder, self._count_from = TemporaryFolder(), None
        order = Question(what="window_order", first_step=self._first_step, steps=steps)
        answers = self._ask(road, everyone, order, is_closing)
        self._missing, self._ordered_ns = set(everyone), self._clock.monotonic_ns()
        self._next_ns = self._ordered_ns + round(POLL_SECONDS * NS_PER_SECOND)
        self.part_bytes = {}
        self._trigger.ordered()
        self._names.ordered()
        _log.info(
            "pacecar: all ranks record steps %d to %d to see which is late",
            self._first_step,
            self._first_step + steps - 1,
        )
        if (why := _first_refusal(answers)) is not None:
            self._give_up(why)

    def _go_on(self, road: Road, now_ns: int, is_closing: Callable[[], bool]) -> None:
        assert self._folder is not None, "a window is under way"
        folder = self._folder.path
        if now_ns - self._ordered_ns > WINDOW_SECONDS_MAX * NS_PER_SECOND:
            self._give_up(f"{len(self._missing)} ranks have not sent their part")
            return
        if self._judging is not None:
            self._judge(self._judging)
            return
        for rank, answer in self._ask(road, set(self._missing), Question(what="window_part"), is_closing).items():
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
        verdict = _verdict.decode(found)
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
            folder.close()


def _steps(answer: WindowState | Silence) -> int:
    return answer.steps if isinstance(answer, WindowState) else 0


def _first_refusal(answers: dict[int, WindowState | Silence]) -> str | None:
    for rank, answer in sorted(answers.items()):
        why = answer.reason if isinstance(answer, Silence) else answer.refusal
        if why is not None:
            return f"rank {rank}: {why}"
    return None
