"""Compares this rank with the others and watches it for hangs, on a thread beside the training.

    training thread   note(step): an append to a bounded queue, a microsecond
    monitor thread    cuts ranges of steps, posts their rows, receives the others', judges them on rank 0, checks for
                      hangs

Nothing blocks: an incomplete gather is checked again later.  While this thread runs, the training thread may wait for
the GIL, and afterwards for its caches, so this thread mostly sleeps.  A few times a second it wakes for a *glance*,
which only compares the pace of the last steps with the usual one.  It cuts, sends and judges rows when a batch of
ranges should be over (a second or two), or at once if the pace has changed.

If the ranks cannot gather (one process, other settings on some rank, a missing rank, a failure, a hook that turned
itself off), the comparison logs one line and is off.  Hangs are still watched for as long as the hook measures.

Records go to the caller's sinks, and a line to the log.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from pacecar.clock import Clock, SystemClock
from pacecar.config import HookConfig
from pacecar.records import JobHello, JobRecord, StepRecord, Straggler

from ..hangs.account_road import Later, Question, RoadAnswer, WindowState
from ..hangs.hang_detector import HangDetector, is_in_loader, where
from ..hangs.hang_watch import HangWatch
from ..hangs.rank_account import TrainingProgress
from ..hangs.torch_flight_recorder import last_collective, sequence
from ..orders.job_orders import JobOrders
from ..timing.step_sampling import next_measured
from ..timing.step_timer import STOPPED, TimedStep
from ..transport.rendezvous import RendezvousError
from ..transport.side_group import SideGroup, failure, is_lost
from .collective_waits import CollectiveWaits
from .cross_rank.cross_rank_window import CrossRankWindow, WindowRank
from .cusum import Usual
from .exchange.gather_schedule import GatherSchedule
from .exchange.gloo_transport import GlooTransport, Meeting
from .exchange.leader_reports import LeaderReports
from .exchange.ledger_sums import LedgerSums, RangeSums
from .exchange.phase_sums_message import VERSION, RankRange, StepNote, gather_range
from .exchange.step_partition import RangeCut, RangesError, StepRanges, gather_seconds, glance_seconds
from .exchange.subgroups import Subgroup, subgroup_of
from .exchange.totals import LedgerTotals, totals_of
from .host_pressure import HostPressureReader
from .reports import RankReports
from .straggler_detector import StragglerDetector

if TYPE_CHECKING:
    from ..hook.hook import Hook

__all__ = ["RankMonitor"]

NOTES_MAX = 4096
"""At most so many steps wait for the monitor thread."""

TICK_SECONDS_MAX = 1.0
"""The longest time between two checks for hangs; shorter where `hang_seconds` is."""

FIRST_LOOK_SECONDS = 0.1
"""How often to look before the first step, or before other ranks' rows have come."""

HANG_LOOKS = 8
"""The least number of checks in `hang_seconds`."""

ALARM_SPREADS = 1.5
"""A change between glances is unusual from this multiple of the median change on; inspecting steps is cheap."""

STRAINED = 4
"""Glances are this many times rarer while the overhead budget is strained, and no range is sent early."""

SURROUNDINGS_SECONDS = 0.5
"""The kernel's totals are read at least this often, so that the first report of a change is mostly about the change."""

RANGE_OVER_SECONDS = 0.002
"""How long after its expected end to look for a range; if it is not over, one step later is soon enough."""

FAREWELL_SECONDS = 3.0
"""A rank that closes at most so much later than another does not log the lost connection."""

LAST_SECONDS = 0.1
LAST_POLL_SECONDS = 0.005
"""How long, and how often, closing checks for the other ranks' last messages."""

JOIN_SECONDS = 1.0
"""How long `close` waits for the thread, which needs a tick and half a second at most; then the thread is abandoned."""

UNSEEN = (
    "pacecar: no observed optimizer has ended step %d for %.0f s, but the model runs forward: something else updates"
    " it, and its steps are not measured; attach to that optimizer"
)

_log = logging.getLogger(__name__)
_monitors = itertools.count()
"""Monitors of this process so far; ranks that attached equally often rendezvous under the same name."""


class RankMonitor:
    """One rank's part in the comparison.

    `emit` takes records.  `throttled` returns whether the device throttles its clocks, `is_told` whether the log says
    already that a rank has left, and `is_pipeline` whether windows saw point-to-point communication.  `window` is this
    rank's part of cross-rank windows, `orders` that of orders to the whole job; None for none.  With `transport` None
    it uses gloo if there is a process group of several ranks.  `subgroup` has the ranks that this one is compared with,
    None: as many as usual.  Construct and start it on the training thread.
    """

    def __init__(
        self,
        hello: JobHello,
        config: HookConfig,
        watched: Hook,
        *,
        emit: Callable[[JobRecord], None],
        clock: Clock | None = None,
        transport: GlooTransport | None = None,
        throttled: Callable[[], bool | None] = lambda: None,
        is_told: Callable[[], bool] = lambda: False,
        is_pipeline: Callable[[], bool] = lambda: False,
        window: WindowRank | None = None,
        orders: JobOrders | None = None,
        subgroup: Subgroup | None = None,
    ) -> None:
        self._window = window
        self._orders = orders
        self._hello = hello
        self._subgroup = subgroup or subgroup_of(hello.rank, hello.world_size)
        self._period = config.crew_period_steps
        self._run_dir = config.run_dir
        self._watched = watched
        self._clock = clock or SystemClock()
        self._transport = transport
        self._throttled = throttled
        self._is_told = is_told
        self._report = RankReports(hello, emit, self._clock, is_pipeline)
        self._straggler_detector = StragglerDetector(hello.job, hello.world_size, self._subgroup.members)
        self._sums = RangeSums()
        self._leader_reports: LeaderReports | None = None
        self._windows: CrossRankWindow | None = None
        if window is not None and hello.rank == 0:
            self._windows = CrossRankWindow(hello, window, self._report.straggler, self._clock, lambda: watched.step)
        self._tick_seconds_max = min(TICK_SECONDS_MAX, config.hang_seconds / HANG_LOOKS)
        self._hang_ns = round(config.hang_seconds * 1e9)
        self._hang_detector = HangDetector(self._hang_ns, self._clock.monotonic_ns())
        self._host_pressure = HostPressureReader(self._clock.monotonic_ns)
        self._notes: deque[tuple[StepNote, int]] = deque(maxlen=NOTES_MAX)
        self._gather_seconds = gather_seconds(config.overhead_budget, hello.world_size)
        self._glance_seconds = glance_seconds(config.overhead_budget)
        self._ranges = StepRanges(self._period, self._gather_seconds)
        self._gathers: GatherSchedule | None = None
        self._newest: StepRecord | None = None
        self._every = 1
        self._begun: tuple[int, int | None] = (0, None)
        self._paces = Usual(ALARM_SPREADS)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._training = (0, 0)
        self._is_on_device = hello.device.startswith("cuda")
        self._collective_waits = CollectiveWaits(0, lambda: watched.phase, self._clock.monotonic_ns)
        self._is_unseen = False
        self._alive_ns: int | None = None
        self._evaluated_ns: int | None = None
        self._hang_watch: HangWatch | None = None
        self.off_because: str | None = None
        """Why nothing is gathered; None while it is."""
        self.cpu_ns = 0
        """Processor time of the monitor thread so far, without that of the hook's step records."""

    @property
    def gathers(self) -> int:
        """How many gathers have completed."""
        return 0 if self._gathers is None else self._gathers.gathers

    # --- the training thread --------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; returns at once, as the ranks rendezvous on that thread."""
        self._training = (threading.get_ident(), threading.get_native_id())
        self._collective_waits = CollectiveWaits(
            self._training[0], lambda: self._watched.phase, self._clock.monotonic_ns
        )
        if self._transport is None and self._hello.world_size > 1 and dist.is_available() and dist.is_initialized():
            self._transport = GlooTransport(self._hello.rank, self._hello.world_size, self._subgroup)
        self._name = f"crew/{next(_monitors)}"
        self._thread = threading.Thread(target=self._run, name="pacecar-rank-monitor", daemon=True)
        self._thread.start()

    def note(self, step: TimedStep, record: StepRecord) -> None:
        """Queue a finished step; on any thread, in order."""
        every = record.measured_every or 1
        is_odd = record.disturbed or STOPPED in step.phases  # a process that was stopped shows no pace
        device = step.device
        note = StepNote(
            record.step, step.wall_ns, step.phases, record.knobs.epoch, is_odd, every, record.gc_ns,
            device=None if device is None else device.phases, is_behind=device is not None and device.is_behind,
            work=step.elements if record.tokens is None else record.tokens,
        )  # fmt: skip
        self._notes.append((note, step.end_ns))
        self._newest = record
        self._every = every

    def close(self) -> None:
        """End the thread; waits at most JOIN_SECONDS and may be called again."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
            self._thread = None
        if self._hang_watch is not None:
            self._hang_watch.close()

    # --- the monitor thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
            while self._watched.is_alive and not self._rest(self._tick_seconds()):
                self._run_once()
            self._run_once()
            self._receive_last()
        except Exception as error:  # noqa: BLE001  a thread's own outer boundary
            # One line without a traceback, which would not help a user.
            _log.warning("pacecar no longer watches this rank: %s", _reason(error))
            _log.debug("the error was", exc_info=True)
        finally:
            self._host_pressure.close()
            if self._transport is not None:
                self._transport.close()
            if self._leader_reports is not None:
                self._leader_reports.close()
            if self._hang_watch is not None and (self._watched.is_alive or self._closing.is_set()):
                self._hang_watch.close()  # else it still says where this rank is, which trains on unmeasured
            for part in (self._windows, self._window):
                if part is not None:
                    part.close()

    def _rest(self, seconds: float) -> bool:
        """Wait, and sample the training thread's waits in collectives meanwhile; return whether the monitor closes."""
        if not self._samples_waits():
            return self._closing.wait(seconds)
        end_ns, begun_ns = self._clock.monotonic_ns() + round(seconds * 1e9), time.thread_time_ns()
        is_closing = False
        while not is_closing and seconds > 0.0:
            is_closing = self._closing.wait(min(seconds, self._collective_waits.pause_seconds() * self._rarity))
            self._collective_waits.sample()
            seconds = (end_ns - self._clock.monotonic_ns()) / 1e9
        self._charge(time.thread_time_ns() - begun_ns)
        return is_closing

    def _samples_waits(self) -> bool:
        """Return whether ranks may wait for each other where timers do not show it."""
        if self._gathers is None or self._is_on_device:
            return False
        return bool(not self._watched.is_ddp or self._watched.meeting_phases())

    def _receive_last(self) -> None:
        """Receive the gather that all ranks post when they close, if they close together.

        Nothing can be received from a rank that has already ended, because its connections have ended too.
        """
        deadline = time.monotonic() + LAST_SECONDS
        try:
            while self._gathers is not None and self._is_out and time.monotonic() < deadline:
                time.sleep(LAST_POLL_SECONDS)
                self._receive(self._gathers)
        except RuntimeError:
            _log.debug("the last gather was not received", exc_info=True)
        self._report.finish()

    @property
    def _is_out(self) -> bool:
        """Whether a message is under way."""
        leaders = self._leader_reports
        return (self._gathers is not None and self._gathers.is_out) or (leaders is not None and leaders.is_out)

    def _open(self) -> None:
        if self._transport is None:
            self.off_because = "there is one process, or no process group"
            _log.debug("pacecar does not compare ranks: %s", self.off_because)
            return
        try:
            meeting = self._transport.connect(
                f"crew {VERSION}, period {self._period}, {self._gather_seconds:.3f} s apart",
                self._name,
                self._wait_and_check,
            )
            if meeting is not None and self._is_leader and not self._subgroup.is_whole:
                self._leader_reports = self._meet_leaders(meeting)
        except Exception as error:  # noqa: BLE001  any error of store and gloo: the job goes on uncompared
            if not self._closing.is_set():
                self._off(str(error) if isinstance(error, RendezvousError) else failure(error))
            return
        self._host_pressure.open(self._training[1])
        self._gathers = GatherSchedule(
            self._transport, self._subgroup.ranks, self._clock.monotonic_ns, gather_seconds=self._gather_seconds
        )
        self._open_hang_watch(meeting)

    @property
    def _is_leader(self) -> bool:
        return self._hello.rank == self._subgroup.first

    def _meet_leaders(self, meeting: Meeting) -> LeaderReports:
        leaders = self._subgroup.leaders
        group = SideGroup(self._subgroup.number, len(leaders), members=leaders)
        group.open(meeting.store, f"{self._name}/leaders", meeting.address, self._wait_and_check)
        return LeaderReports(group, self._clock.monotonic_ns, is_first=self._hello.rank == 0)

    def _open_hang_watch(self, meeting: Meeting | None) -> None:
        watch = HangWatch(
            self._hello,
            self._report.emit,
            self._clock,
            hang_ns=self._hang_ns,
            training=self._training,
            progress=self._progress,
            is_measuring=lambda: self._watched.is_alive,
            is_closing=self._closing.is_set,
            run_dir=self._run_dir,
            answer_others=self._answer_others,
        )
        self._hang_watch = watch
        if meeting is None:
            return
        if self._orders is not None:
            self._orders.open(watch, self._subgroup, self._progress)
        try:
            watch.open(meeting.store, meeting.address, self._name, self._wait_and_check)
        except Exception as error:  # noqa: BLE001  as above: ranks are compared all the same
            if not self._closing.is_set():
                reason = str(error) if isinstance(error, RendezvousError) else failure(error)
                _log.warning("pacecar cannot ask the ranks of this job why it hangs: %s", reason)

    def _answer_others(self, question: Question) -> RoadAnswer | Later:
        if question.what in ("order", "pass_on") and self._orders is not None:
            return self._orders.answer(question)
        if self._window is None or self.off_because is not None:
            return WindowState(self._watched.step, self.off_because or "the hook takes no windows")
        return self._window.answer(question)

    def _wait_and_check(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise RuntimeError("closed before the ranks met")
        self._check_for_hang()

    def _off(self, reason: str, level: int = logging.WARNING) -> None:
        transport, self._transport, self._gathers = self._transport, None, None
        leader_reports, self._leader_reports = self._leader_reports, None
        self.off_because = reason
        _log.log(level, "pacecar does not compare the ranks of this job: %s", reason)
        if transport is not None:
            transport.close()
        if leader_reports is not None:
            leader_reports.close(leaves=reason)

    def _tick_seconds(self) -> float:
        """Return the seconds until rows may have arrived or a range should be over."""
        longest = self._tick_seconds_max
        if self._gathers is None:
            return longest
        poll_seconds = self._gathers.poll_seconds
        if poll_seconds is not None:
            return min(longest, poll_seconds)
        median, end = self._hang_detector.median_ns, self._next_report_step
        step, begun_ns = self._watched.current_step()
        if median is None or end is None or begun_ns is None:
            return min(longest, FIRST_LOOK_SECONDS)
        over_ns = begun_ns + max(1, end - step) * median
        seconds = (over_ns - self._clock.monotonic_ns()) / 1e9 + RANGE_OVER_SECONDS
        glance_seconds = max(self._glance_seconds * self._rarity, self._period * median / 1e9)
        return min(longest, max(median / 1e9, self._gathers.pause_seconds, min(seconds, glance_seconds)))

    @property
    def _rarity(self) -> int:
        return STRAINED if self._watched.budget.is_strained() else 1

    @property
    def _next_report_step(self) -> int | None:
        """The step at the start of which there is something to send; None if unknown."""
        is_hurried = self._gathers is not None and self._gathers.hurries
        end = self._ranges.end if is_hurried else self._ranges.batch_end
        # A range is over once its last measured step, or a later one, has ended.
        return None if end is None else next_measured(end - 1, self._every) + 1

    def _is_pace_unusual(self) -> bool:
        """Return whether the steps since the last glance took unusually long or short."""
        begun = self._watched.current_step()
        (before, before_ns), (step, begun_ns) = self._begun, begun
        if begun_ns is None or before_ns is None or step <= before:
            self._begun = begun if before_ns is None else self._begun
            return False
        self._begun = begun
        return self._paces.add((begun_ns - before_ns) // (step - before))

    def _run_once(self) -> None:
        begun = time.thread_time_ns()
        try:
            if self._has_news():
                spent = time.thread_time_ns() - begun
                self._watched.records.flush_in_background(0.0)
                begun = time.thread_time_ns() - spent  # which charges its own time
            self._record_steps()
            self._gather()
        except Exception as error:  # noqa: BLE001  as in _open
            # At the end of a job another rank may close first, which looks like a failure for a moment.
            if not self._closing.wait(FAREWELL_SECONDS):
                self._off(_reason(error), logging.INFO if is_lost(error) and self._is_told() else logging.WARNING)
        self._go_on_with_window()
        self._check_for_hang()
        spent = time.thread_time_ns() - begun
        if self._hang_watch is not None:
            spent += self._hang_watch.take_cost()
        self._charge(spent)

    def _charge(self, spent_ns: int) -> None:
        self.cpu_ns += spent_ns
        self._watched.budget.charge(spent_ns)

    def _go_on_with_window(self) -> None:
        if self._window is None or self._closing.is_set():
            return
        try:
            self._window.tick()
            if self._windows is not None and self._gathers is not None and self._hang_watch is not None:
                self._windows.tick(self._hang_watch.road, self._closing.is_set)
        except Exception as error:  # noqa: BLE001  ranks are compared, and hangs watched for, without windows
            _log.warning("pacecar no longer records steps of all ranks together: %s", _reason(error))
            for part in (self._windows, self._window):
                if part is not None:
                    part.close()
            self._window = None

    def _has_news(self) -> bool:
        """Return whether to make records of finished steps now; one by one costs three times as much as in bulk."""
        is_unusual = self._is_pace_unusual()
        if self._gathers is None or self._closing.is_set():
            return self._closing.is_set()
        end = self._next_report_step
        return end is None or self._watched.current_step()[0] >= end or (is_unusual and self._gathers.alarm())

    def _record_steps(self) -> None:
        while self._notes:
            note, ended_ns = self._notes.popleft()
            self._hang_detector.stepped(note.step, note.wall_ns, ended_ns)
            if self._gathers is not None:
                self._ranges.add(note)
        self._hang_detector.seen(self._watched.step, self._clock.monotonic_ns())

    def _gather(self) -> None:
        """Receive rows, cut the ranges that may be cut, and post them."""
        exchange = self._gathers
        if exchange is None:
            return
        self._receive(exchange)
        self._host_pressure.latest(SURROUNDINGS_SECONDS * self._rarity)
        exchange.may_hurry = self._rarity == 1
        for cut in self._ranges.cut():
            exchange.add(self._row(cut), ends_batch=cut.ends_batch)
        if exchange.left:
            raise RangesError(f"rank {self._subgroup.members[exchange.left[0]]} measures no more")
        is_last = self._closing.is_set() and exchange.has_pending
        leaves = not self._watched.is_alive and not self._closing.is_set()
        if exchange.is_due or ((is_last or leaves) and not exchange.is_out):
            exchange.post(
                self._host_pressure.latest(),
                totals=totals_of(self._newest),
                is_throttled=self._throttled(),
                waited=self._collective_waits.ratios() if self._samples_waits() else None,
                leaves=leaves,
            )
        if self._leader_reports is not None and self._leader_reports.is_due(at_once=self._closing.is_set()):
            self._leader_reports.post(exchange.totals)

    def _receive(self, exchange: GatherSchedule) -> None:
        gathers = exchange.gathers
        for rows in exchange.receive():
            self._ranges.receive(rows)
            if self._is_leader and len(rows) > 1:
                sums = self._sums.add(rows)
                changes = self._straggler_detector.judge(rows, self._clock.wall_ns())
                if self._windows is not None:
                    self._windows.compare(rows)
                if self._leader_reports is None:
                    self._tell([sums], changes, exchange.totals)
                else:
                    self._leader_reports.add(sums, changes)
        if self._hang_watch is not None and exchange.gathers > gathers:
            self._hang_watch.heard(self._subgroup.members)
        reports = [] if self._leader_reports is None else self._leader_reports.receive()
        if reports and self._hello.rank == 0:
            sums_known = [report.sums for report in reports if report.sums is not None]
            self._tell(
                sums_known if len(sums_known) == len(reports) else (),
                [late for report in reports for late in report.stragglers],
                [ledger for report in reports for ledger in report.ledgers()],
            )

    def _tell(
        self, sums: Sequence[LedgerSums], changes: Sequence[Straggler], totals: Sequence[LedgerTotals | None]
    ) -> None:
        """Report on rank 0 what is new in the whole job; `sums` are empty while a subgroup has none."""
        if sums:
            self._report.ledger(sums)
        if self._windows is not None:
            self._windows.detected(changes)
            self._windows.look(totals)
        else:
            for late in changes:
                self._report.straggler(late)
        self._report.what_if(totals)

    def _row(self, cut: RangeCut) -> RankRange:
        return gather_range(
            cut.notes,
            number=cut.number,
            first_step=cut.first_step,
            steps=cut.steps,
            epoch=cut.latest.epoch,
            every=cut.latest.every,
            on_device=self._is_on_device,
            meets_in=self._watched.meeting_phases(),
        )

    # --- hangs --------------------------------------------------------------------------------------

    def _check_for_hang(self) -> None:
        if not self._watched.is_alive:
            return  # steps are no longer counted
        now, watched, detector = self._clock.monotonic_ns(), self._watched, self._hang_detector
        phase, trained_ns, evaluated_ns = watched.phase, watched.trained_ns, watched.evaluated_ns
        if detector.is_doubtful(now, phase):
            watched.watch_calls()
        alive_ns = max((at for at in (trained_ns, evaluated_ns) if at is not None), default=None)
        self._alive_ns, self._evaluated_ns = alive_ns, evaluated_ns
        is_quiet = detector.is_quiet(now, phase, alive_ns)
        if self._hang_watch is not None:
            is_long = detector.is_longer_than_steps(now, phase, alive_ns)
            self._hang_watch.check(now, is_suspected=is_quiet, is_long=is_long)
            if self._hang_watch.has_verdict:
                detector.forget_pause()
        is_idle = self._hang_watch is not None and self._hang_watch.is_idle
        suspicion = detector.check(now, phase, alive_ns, is_idle=is_idle)
        if suspicion is None:
            unseen_ns = None if self._is_unseen else detector.unseen_ns(now, phase, trained_ns)
            if unseen_ns is not None:
                self._is_unseen = True
                _log.warning(UNSEEN, self._watched.step, unseen_ns / 1e9)
            return
        # Another thread's stack is read once per hang, not at every tick.
        if suspicion.phase == "outside" and is_in_loader(self._training[0]):
            suspicion = replace(suspicion, phase="data_wait")
        if suspicion.has_ended:
            self._report.hang(suspicion)
        else:
            self._report.hang(
                suspicion, collective=last_collective(), sequence=sequence(), stack=where(self._training[0])
            )

    def _progress(self) -> TrainingProgress:
        """Return how far the training thread is; on any thread."""
        watched, detector = self._watched, self._hang_detector
        phase = watched.phase
        if phase == "outside" and is_in_loader(self._training[0]):
            phase = "data_wait"
        alive_ns = max((at for at in (watched.trained_ns, self._alive_ns) if at is not None), default=None)
        silent_ns = detector.silent_ns(self._clock.monotonic_ns(), alive_ns)
        return TrainingProgress(
            watched.step, phase, silent_ns, detector.patience_ns(phase), self._is_in_step(watched.trained_ns)
        )

    def _is_in_step(self, trained_ns: int | None) -> bool:
        """Return whether the model ran forward in training since the last step ended, and not in evaluation since."""
        _, begun_ns = self._watched.current_step()
        since = [at for at in (begun_ns, self._evaluated_ns) if at is not None]
        return trained_ns is not None and all(at < trained_ns for at in since)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RangesError) else failure(error)
