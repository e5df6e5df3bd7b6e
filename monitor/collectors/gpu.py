"""Collects what NVML reports about all GPUs; any of them may hang for 45 s and must not delay the others.

    collect -> opener        opens the driver: at the start, when its session is void, or after a GPU was down a while
            -> GpuState      one for each GPU: ask all that are idle, wait until the deadline, take the results
            -> XidSources    Xid errors

The sampler sees one collector, `gpu`.  GPUs and Xid errors are read on threads of a pool (`worker_pool`): one after the
other on one thread while calls return, on more threads as soon as one does not.  A GPU whose call is overdue is down
("hung"): it is asked nothing until the call returns, and loses only its own series.  A GPU that is only slow is up, and
is read less often (`gpu_state`).  No tick waits for either.

When GPUs are lost, the driver is opened again, which voids all handles for a few ms to a second.  So this happens
rarely: after REINIT_AFTER_SECONDS, then less and less often, and never while a call hangs, because a shutdown waits for
locks that the hung call may hold.  A GPU that answers again by itself needs none of that.

A GPU keeps its label while the daemon runs, by its UUID: when GPU 3 vanishes and the driver renumbers GPU 4 as 3, the
series must not become those of another GPU.

A missing driver or GPU is absent, not failed.  Because drivers are loaded after daemons, the collector looks for the
driver every REOPEN_SECONDS.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Absent, Failed, Ok, Outcome, Sample

from ..gpu.call_deadlines import CALL_SECONDS_FIRST
from ..gpu.change_log import GpuChangeLog
from ..gpu.device import DeviceReading
from ..gpu.driver import DriverMissingError, Nvml, NvmlError
from ..gpu.driver_session import GPUS_MAX, DriverSession, DriverSessions, FoundDevice
from ..gpu.driver_thread import DriverThread
from ..gpu.gpu_state import GpuState
from ..gpu.xid import XidReports, XidSources
from ..sampling.sample_screen import RefusedSample
from ..worker_pool import WorkerPool
from .source_reader import bounded

__all__ = ["GpuCollector"]

DEADLINE_SECONDS = 0.5
"""How long a tick waits for its GPUs; less than the sampler's own deadline at one tick a second."""

GLANCE_SECONDS = 0.05
"""How long a glance waits; the tick waits for a call that takes longer."""

OPEN_SECONDS = 2.0
"""How long a tick waits for the driver and the first probe while no GPU has been up: nothing else is delayed then."""

REOPEN_SECONDS = 10
"""Seconds between two attempts to find a missing driver; an attempt costs a failing dlopen."""

REOPEN_STOPPED_SECONDS = 1
"""Seconds between two openings of a driver that stops at once."""

REINIT_AFTER_SECONDS = 10
REINIT_SECONDS_MAX = 300

STOP_SECONDS = 0.3


class GpuCollector:
    """Collects everything that NVML reports, GPU by GPU."""

    name = "gpu"

    def __init__(
        self,
        nvml: Nvml,
        clock: Clock,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        kernel_log: str = "/dev/kmsg",
    ) -> None:
        self._nvml = nvml
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._returned = threading.Condition()
        self._pool = WorkerPool("gpu")
        self._sessions = DriverSessions(nvml, clock)
        self._stop_first = False
        self._opener: DriverThread[DriverSession] = DriverThread("gpu-open", self._open, clock, self._returned)
        self._xid_sources = XidSources(nvml, clock, kernel_log)
        self._listener: DriverThread[XidReports] = DriverThread(
            "gpu-xid", self._xid_sources.listen, clock, self._returned, self._pool
        )
        self._changes = GpuChangeLog(clock)
        self._gpus: dict[str, GpuState] = {}
        self._searched: dict[int, GpuState] = {}
        self._left_out = 0
        self._is_open = False
        self._closed: Absent | Failed = Absent("the NVIDIA driver is being opened")
        self._reopen_ns: int | None = None
        self._opened_ns = 0
        self._reinit_seconds = REINIT_AFTER_SECONDS
        self._is_begun = False
        self._next_glance_ns = 0
        """No GPU has a glance to make before this time, until the next tick."""

    def collect(self) -> Outcome:
        """Run the queries of every GPU that are due."""
        return self._collect(everything=True)

    def collect_fast(self) -> Outcome:
        """Run them without the details that only a scrape or a viewer needs; their last samples are served again."""
        return self._collect(everything=False)

    def _collect(self, *, everything: bool) -> Outcome:
        if not self._is_begun:
            self._is_begun = True
            self._xid_sources.open()
        self._keep_session()
        if self._is_open:
            self._ask_all(everything=everything)
        self._next_glance_ns = 0
        return self._gather()

    @property
    def is_glance_due(self) -> bool:
        """Whether any GPU may have a glance to make."""
        return self._is_open and self._clock.monotonic_ns() >= self._next_glance_ns

    def glance(self) -> Sequence[Sample]:
        """Read power or utilization of each GPU that is up, if its calls of this tick allow it."""
        if not self._is_open:
            return ()
        due = [unit for unit in self._gpus.values() if unit.prepare_glance()]
        if not due:  # nine times in ten: wake no thread until one is due
            self._next_glance_ns = min((unit.device.next_glance_ns for unit in self._gpus.values()), default=0)
            return ()
        with self._pool.batch():
            for unit in due:
                unit.ask_to_glance()
        self._wait_for_glances(GLANCE_SECONDS)
        return [sample for unit in due for sample in unit.gather_glance()]

    def note_refused(self, refusals: Sequence[RefusedSample]) -> None:
        """Record the impossible samples of the last collect, GPU by GPU; the next collect counts them as failures."""
        for unit in self._gpus.values():
            unit.refused = [one.reason for one in refusals if one.sample.labels[:1] == (unit.label,)]

    def close(self) -> None:
        """Release the driver, unless a call hangs in it: then the end of the process releases it."""
        workers: list[DriverThread[DriverSession] | DriverThread[XidReports] | DriverThread[DeviceReading]] = [
            self._opener,
            self._listener,
        ]
        workers += [unit.worker for unit in self._gpus.values()]
        ended = [worker.stop(STOP_SECONDS if worker.busy_since_ns is None else 0.0) for worker in workers]
        self._pool.stop(STOP_SECONDS)
        self._sessions.abandon()
        if all(ended) and not self._sessions.is_any_hanging():
            self._sessions.close()
            self._xid_sources.close()

    # --- the session ----------------------------------------------------------------------------

    def _open(self) -> DriverSession:
        return self._sessions.open(stop_first=self._stop_first)

    def _keep_session(self) -> None:
        """Start to open the driver when that is due, and use the result of a finished opening."""
        result = self._opener.result()  # of an opening that took longer than its tick
        if result is None and self._opener.busy_since_ns is None and self._opening_is_due():
            self._is_open = False
            # A shutdown would wait for the locks of a call that hangs.
            self._stop_first = not self._is_any_busy()
            self._xid_sources.detach()
            self._opener.ask()
            self._wait(lambda: self._opener.busy_since_ns is None)
            result = self._opener.result()
        if self._is_open:
            for found in self._sessions.late():
                self._unit_of(found).attach(found)
            self._report_silent_gpus()
            return
        if isinstance(result, DriverSession):
            self._begin_session(result)
        elif isinstance(result, Exception):
            self._note_open_error(result)

    def _report_silent_gpus(self) -> None:
        """Call a GPU hung if it has not answered its first queries in the time that a first call may take."""
        for index, age_ns in self._sessions.searching_ns().items():
            unit = self._searched.get(index)
            if unit is not None and age_ns >= CALL_SECONDS_FIRST * NS_PER_SECOND and unit.reason != "hung":
                unit.detach("hung", f"no answer for {CALL_SECONDS_FIRST:g} s to its first queries")

    def _opening_is_due(self) -> bool:
        now = self._clock.monotonic_ns()
        if not self._is_open:
            return self._reopen_ns is None or now >= self._reopen_ns
        # A hung GPU needs no new session: it comes back when its call returns.
        down = [u.down_since_ns for u in self._gpus.values() if u.down_since_ns is not None and u.reason != "hung"]
        if not down:
            self._reinit_seconds = REINIT_AFTER_SECONDS
            return False
        waited_ns = now - max(min(down), self._opened_ns)
        if waited_ns < self._reinit_seconds * NS_PER_SECOND or self._is_any_busy():
            return False
        self._reinit_seconds = min(2 * self._reinit_seconds, REINIT_SECONDS_MAX)
        return True

    def _is_any_busy(self) -> bool:
        if self._sessions.is_any_hanging() or self._listener.busy_since_ns is not None:
            return True
        return any(unit.worker.busy_since_ns is not None for unit in self._gpus.values())

    def _begin_session(self, session: DriverSession) -> None:
        now = self._clock.monotonic_ns()
        self._opened_ns = now
        self._reopen_ns = now + REOPEN_SECONDS * NS_PER_SECOND
        if not session.found and not session.problems and not session.hanging:
            self._detach_all(Absent("the NVIDIA driver sees no GPU"), "vanished")
            return
        self._is_open = True
        self._searched = {}
        self._left_out = session.left_out
        missing = dict(self._gpus)
        gpus: list[tuple[int, str, str]] = []
        for found in session.found:
            unit = self._unit_of(found)
            unit.attach(found)
            missing.pop(unit.label, None)
            gpus.append((found.facts.gpu_index, unit.label, found.facts.identity.pci_bus_id))
        problems = {found.facts.gpu_index: (found, str(error)) for found, error in session.problems}
        for unit in missing.values():
            self._follow_missing(unit, problems, session.hanging)
        for index, (sought, words) in problems.items():
            self._new_unit(index).await_return(sought, "error", words)
        known = {unit.facts.gpu_index for unit in self._gpus.values() if unit.facts is not None}
        for index in set(session.hanging) - known:
            self._search(self._new_unit(index), index)
        self._xid_sources.attach(gpus, session.watched)

    def _follow_missing(
        self, unit: GpuState, problems: dict[int, tuple[FoundDevice, str]], hanging: Sequence[int]
    ) -> None:
        """Keep looking for a GPU that the session lacks, unless a call to it hangs: then it comes back by itself."""
        if unit.worker.busy_since_ns is not None or (unit.facts is None and unit.reason == "hung"):
            unit.detach("hung", "no answer yet")
            return
        if unit.facts is None or unit.facts.gpu_index in hanging:
            self._search(unit, int(unit.label) if unit.facts is None else unit.facts.gpu_index)
            return
        found = FoundDevice(None, unit.facts)
        if unit.facts.gpu_index in problems:
            unit.await_return(found, "lost", problems.pop(unit.facts.gpu_index)[1])
        else:
            unit.await_return(found, "vanished", "the driver no longer lists it")

    def _search(self, unit: GpuState, index: int) -> None:
        """Record that a GPU is being looked for; it may just be slow to answer, so it is not called hung yet."""
        self._searched[index] = unit
        unit.detach("driver", "it has not answered its first queries yet")

    def _unit_of(self, found: FoundDevice) -> GpuState:
        """Return the state of that GPU, by its UUID; a new one for a GPU that was never seen."""
        for unit in self._gpus.values():
            if unit.device.uuid == found.facts.identity.uuid:
                return unit
        return self._new_unit(found.facts.gpu_index)

    def _new_unit(self, index: int) -> GpuState:
        """Return the state at that index that has no UUID yet, or a new one labelled with the first free index."""
        label = str(index)
        unit = self._gpus.get(label)
        if unit is not None and not unit.device.uuid:
            return unit
        while label in self._gpus:
            index += 1
            label = str(index)
        unit = self._gpus[label] = GpuState(
            label, self._nvml, self._clock, self._returned, self._changes,
            deadline_ns=int(self._deadline_seconds * NS_PER_SECOND), pool=self._pool,
        )  # fmt: skip
        return unit

    def _note_open_error(self, error: Exception) -> None:
        if isinstance(error, DriverMissingError):
            self._detach_all(Absent(f"no NVIDIA driver: {error}"), "driver")
        else:
            kind = "" if isinstance(error, NvmlError) else f"{type(error).__name__}: "
            self._detach_all(Failed(f"NVIDIA driver: {kind}{error}"), "driver")
        self._reopen_ns = self._clock.monotonic_ns() + REOPEN_SECONDS * NS_PER_SECOND

    def _detach_all(self, outcome: Absent | Failed, reason: str) -> None:
        self._closed = outcome
        for unit in self._gpus.values():
            unit.detach(reason, outcome.reason)

    # --- a tick ---------------------------------------------------------------------------------

    def _ask_all(self, *, everything: bool) -> None:
        self._wait_for_glances(self._deadline_seconds)
        self._note_xids()  # which were read after the last tick was over
        is_listening = self._xid_sources.is_listening and self._listener.busy_since_ns is None
        with self._pool.batch():
            for unit in self._gpus.values():
                unit.is_glancing = False
                unit.ask(everything=everything)
            if is_listening:
                self._listener.ask()
        # A GPU that was already busy hangs or is slow, so this tick does not wait for it.
        asked: list[DriverThread[DeviceReading] | DriverThread[XidReports]] = [
            u.worker for u in self._gpus.values() if u.was_asked and not u.is_slow
        ]
        if is_listening:
            asked.append(self._listener)
        self._wait(lambda: all(worker.busy_since_ns is None for worker in asked))

    def _wait_for_glances(self, seconds: float) -> None:
        glancing = [unit.worker for unit in self._gpus.values() if unit.is_glancing]
        if glancing:
            self._wait_for(lambda: all(worker.busy_since_ns is None for worker in glancing), seconds)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        was_any_up = any(unit.was_ever_up for unit in self._gpus.values())
        self._wait_for(is_over, self._deadline_seconds if was_any_up else OPEN_SECONDS)

    def _wait_for(self, is_over: Callable[[], bool], seconds: float) -> None:
        with self._returned:
            self._pool.wait(self._returned, is_over, seconds)

    def _gather(self) -> Outcome:
        samples: list[Sample] = []
        failures: list[str] = []
        unread: list[str] = []
        has_stopped = False
        for unit in self._gpus.values():
            if self._is_open:
                read, failed, stopped = unit.gather()
                samples += read
                (failures if unit.reason is not None else unread).extend(failed)
                has_stopped |= stopped
            elif self._opener.busy_since_ns is not None:
                unit.await_driver()
            samples += unit.health()
        failures += self._note_xids()
        samples += self._xid_sources.samples()
        samples.append(Sample("pacecar_gpu_driver_openings_total", (), self._sessions.openings))
        self._changes.flush()
        if has_stopped:
            self._is_open = False
            self._reopen_ns = self._opened_ns + REOPEN_STOPPED_SECONDS * NS_PER_SECOND
        return self._outcome(samples, failures, unread)

    def _note_xids(self) -> list[str]:
        """Count the Xid errors that were read since the last call; return why reading failed, if it did."""
        found = self._listener.result()
        if not isinstance(found, XidReports):
            return []
        self._xid_sources.note(found)
        if found.failure is None:
            return []
        self._xid_sources.detach()  # until the driver is opened again
        return [f"xid events: {found.failure}"]

    def _outcome(self, samples: list[Sample], failures: list[str], unread: list[str]) -> Outcome:
        """Return failed if a GPU or the driver is down; single `unread` numbers lose only themselves."""
        if self._left_out:
            failures.append(f"{self._left_out} GPUs are left out, beyond the first {GPUS_MAX}")
        if not self._is_open and not failures:
            if not self._gpus:
                return self._closed
            return Failed(self._closed.reason, tuple(samples))
        if not failures:
            return Ok(tuple(samples), len(unread), bounded(unread))
        return Failed(bounded(failures + unread), tuple(samples), len(unread))
