"""Collects what NVML reports of all GPUs, of which any may hang for 45 s and must not delay the others.

    collect -> opener        opens the driver: without a session, with a void one, or when a GPU was down for a while
            -> GpuState      one for each GPU: ask all that are idle, wait until the deadline, take what came
            -> XidSources    Xid errors

The sampler sees one collector, `gpu`.  GPUs and Xid errors are read on threads of a pool (`worker_pool`): on one, one
after the other, while calls return, and on more as soon as one does not, up to one for each.  A GPU whose call does not
return in the time that its calls take is down ("hung"): it is asked nothing until the call returns, and costs its own
series only.  One that is only slow is up, and is read less often (`gpu_state`).  No tick waits for either.

When GPUs are lost the driver is opened anew, which voids all handles for as long as that takes (a few ms to a
second).  So it is tried rarely: after REINIT_AFTER_SECONDS, then ever more seldom, and never while a call hangs,
because a shutdown waits for locks that the hung call may hold.  A GPU that answers again by itself needs none of that.

A GPU keeps its label for the daemon's life, by its UUID: when GPU 3 vanishes and the driver calls the old 4 now 3, the
series must not be those of another GPU.

No driver or no GPU is absent, not failed.  Because drivers get loaded after daemons, the driver is looked for again
every REOPEN_SECONDS.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Absent, Failed, Ok, Outcome, Sample

from ..gpu.call_deadlines import CALL_SECONDS_FIRST
from ..gpu.device import DeviceReading
from ..gpu.driver import DriverMissingError, Nvml, NvmlError
from ..gpu.driver_session import DriverSession, DriverSessions, FoundDevice
from ..gpu.driver_thread import DriverThread
from ..gpu.gpu_state import GpuState
from ..gpu.xid_news import GpuChangeLog
from ..gpu.xid_sources import XidReports, XidSources
from ..sampling.sample_screen import Refusal
from ..worker_pool import WorkerPool
from .source_reader import bounded

__all__ = ["GpuCollector"]

DEADLINE_SECONDS = 0.5
"""How long a tick waits for its GPUs; less than the sampler's own deadline at one tick a second."""

GLANCE_SECONDS = 0.05
"""How long a glance waits; a call that takes longer is waited for by the tick."""

OPEN_SECONDS = 2.0
"""How long a tick waits for the driver and the first probe while no GPU was ever up: nothing else is delayed then."""

REOPEN_SECONDS = 10
"""Seconds between two looks for a driver that is not there; a look costs a failing dlopen."""

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
        self._is_listening = False
        self._news = GpuChangeLog(clock)
        self._gpus: dict[str, GpuState] = {}
        self._sought: dict[int, GpuState] = {}
        self._left_out = 0
        self._is_open = False
        self._closed: Absent | Failed = Absent("the NVIDIA driver is being opened")
        self._look_again_ns: int | None = None
        self._opened_ns = 0
        self._reinit_seconds = REINIT_AFTER_SECONDS
        self._is_begun = False

    def collect(self) -> Outcome:
        """Ask every GPU what is due."""
        if not self._is_begun:
            self._is_begun = True
            self._xid_sources.open()
        self._keep_session()
        if self._is_open:
            self._ask_all()
        return self._gather()

    def glance(self) -> Sequence[Sample]:
        """Read power or utilization of each GPU that is up, as far as the driver calls of this tick go."""
        if not self._is_open:
            return ()
        due = [unit for unit in self._gpus.values() if unit.prepare_glance()]
        if not due:  # nine times of ten: nobody is woken
            return ()
        with self._pool.together():
            for unit in due:
                unit.ask_to_glance()
        self._wait_for_glances(GLANCE_SECONDS)
        return [sample for unit in due for sample in unit.gather_glance()]

    def note_refused(self, refusals: Sequence[Refusal]) -> None:
        """Count what of the last collect cannot be true, GPU by GPU; the next one says so."""
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
        self._sessions.give_up()
        if all(ended) and not self._sessions.is_anyone_hanging():
            self._sessions.close()
            self._xid_sources.close()

    # --- the session ----------------------------------------------------------------------------

    def _open(self) -> DriverSession:
        return self._sessions.open(stop_first=self._stop_first)

    def _keep_session(self) -> None:
        """Begin to open the driver when that is due, and use the result of an opening that has finished."""
        result = self._opener.result()  # of an opening that took longer than its tick
        if result is None and self._opener.busy_since_ns is None and self._opening_is_due():
            self._is_open = False
            # A shutdown would wait for the locks of a call that hangs.
            self._stop_first = not self._is_anyone_busy()
            self._xid_sources.detach()
            self._opener.ask()
            self._wait(lambda: self._opener.busy_since_ns is None)
            result = self._opener.result()
        if self._is_open:
            for found in self._sessions.late():
                self._unit_of(found).attach(found)
            self._give_up_looking()
            return
        if isinstance(result, DriverSession):
            self._take_session(result)
        elif isinstance(result, Exception):
            self._take_refusal(result)

    def _give_up_looking(self) -> None:
        """Call a GPU hung that has not answered its first queries for as long as a first call may take."""
        for index, age_ns in self._sessions.sought_ns().items():
            unit = self._sought.get(index)
            if unit is not None and age_ns >= CALL_SECONDS_FIRST * NS_PER_SECOND and unit.reason != "hung":
                unit.detach("hung", f"no answer for {CALL_SECONDS_FIRST:g} s to its first questions")

    def _opening_is_due(self) -> bool:
        now = self._clock.monotonic_ns()
        if not self._is_open:
            return self._look_again_ns is None or now >= self._look_again_ns
        # A GPU that hangs needs no new session: it comes back when its call returns.
        down = [u.down_since_ns for u in self._gpus.values() if u.down_since_ns is not None and u.reason != "hung"]
        if not down:
            self._reinit_seconds = REINIT_AFTER_SECONDS
            return False
        waited_ns = now - max(min(down), self._opened_ns)
        if waited_ns < self._reinit_seconds * NS_PER_SECOND or self._is_anyone_busy():
            return False
        self._reinit_seconds = min(2 * self._reinit_seconds, REINIT_SECONDS_MAX)
        return True

    def _is_anyone_busy(self) -> bool:
        if self._sessions.is_anyone_hanging() or self._listener.busy_since_ns is not None:
            return True
        return any(unit.worker.busy_since_ns is not None for unit in self._gpus.values())

    def _take_session(self, session: DriverSession) -> None:
        now = self._clock.monotonic_ns()
        self._opened_ns = now
        self._look_again_ns = now + REOPEN_SECONDS * NS_PER_SECOND
        if not session.found and not session.problems and not session.hanging:
            self._refuse(Absent("the NVIDIA driver sees no GPU"), "vanished")
            return
        self._is_open = True
        self._sought = {}
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
            self._count_missed(unit, problems, session.hanging)
        for index, (sought, words) in problems.items():
            self._new_unit(index).seek(sought, "error", words)
        known = {unit.facts.gpu_index for unit in self._gpus.values() if unit.facts is not None}
        for index in set(session.hanging) - known:
            self._seek(self._new_unit(index), index)
        self._xid_sources.attach(gpus, has_events=session.has_events)

    def _count_missed(
        self, unit: GpuState, problems: dict[int, tuple[FoundDevice, str]], hanging: Sequence[int]
    ) -> None:
        """Go on looking for a GPU that the session lacks, unless a call to it hangs: then it comes back by itself."""
        if unit.worker.busy_since_ns is not None or (unit.facts is None and unit.reason == "hung"):
            unit.detach("hung", "no answer yet")
            return
        if unit.facts is None or unit.facts.gpu_index in hanging:
            self._seek(unit, int(unit.label) if unit.facts is None else unit.facts.gpu_index)
            return
        found = FoundDevice(None, unit.facts)
        if unit.facts.gpu_index in problems:
            unit.seek(found, "lost", problems.pop(unit.facts.gpu_index)[1])
        else:
            unit.seek(found, "vanished", "the driver does not list it any more")

    def _seek(self, unit: GpuState, index: int) -> None:
        """Note that a GPU is looked for; it may only be slow to answer, so it is not called hung yet."""
        self._sought[index] = unit
        unit.detach("driver", "it has not answered its first questions yet")

    def _unit_of(self, found: FoundDevice) -> GpuState:
        """Return the state of that GPU, by its UUID; a new one for a GPU that was never seen."""
        for unit in self._gpus.values():
            if unit.device.uuid == found.facts.identity.uuid:
                return unit
        return self._new_unit(found.facts.gpu_index)

    def _new_unit(self, index: int) -> GpuState:
        """Return the state at that index that has no UUID yet, or a new one; its label is the index unless taken."""
        label = str(index)
        unit = self._gpus.get(label)
        if unit is not None and not unit.device.uuid:
            return unit
        while label in self._gpus:
            index += 1
            label = str(index)
        unit = self._gpus[label] = GpuState(
            label, self._nvml, self._clock, self._returned, self._news,
            deadline_ns=int(self._deadline_seconds * NS_PER_SECOND), pool=self._pool,
        )  # fmt: skip
        return unit

    def _take_refusal(self, error: Exception) -> None:
        if isinstance(error, DriverMissingError):
            self._refuse(Absent(f"no NVIDIA driver: {error}"), "driver")
        else:
            kind = "" if isinstance(error, NvmlError) else f"{type(error).__name__}: "
            self._refuse(Failed(f"NVIDIA driver: {kind}{error}"), "driver")
        self._look_again_ns = self._clock.monotonic_ns() + REOPEN_SECONDS * NS_PER_SECOND

    def _refuse(self, outcome: Absent | Failed, reason: str) -> None:
        self._closed = outcome
        for unit in self._gpus.values():
            unit.detach(reason, outcome.reason)

    # --- a tick ---------------------------------------------------------------------------------

    def _ask_all(self) -> None:
        self._wait_for_glances(self._deadline_seconds)
        self._is_listening = self._xid_sources.is_listening and self._listener.busy_since_ns is None
        with self._pool.together():
            for unit in self._gpus.values():
                unit.is_glancing = False
                unit.ask()
            if self._is_listening:
                self._listener.ask()
        # A GPU that was busy before this tick hangs or is slow, and is not waited for again.
        asked: list[DriverThread[DeviceReading] | DriverThread[XidReports]] = [
            u.worker for u in self._gpus.values() if u.was_asked and not u.is_slow
        ]
        if self._is_listening:
            asked.append(self._listener)
        self._wait(lambda: all(worker.busy_since_ns is None for worker in asked))

    def _wait_for_glances(self, seconds: float) -> None:
        glancing = [unit.worker for unit in self._gpus.values() if unit.is_glancing]
        if glancing:
            self._wait_for(lambda: all(worker.busy_since_ns is None for worker in glancing), seconds)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        someone_was_up = any(unit.was_ever_up for unit in self._gpus.values())
        self._wait_for(is_over, self._deadline_seconds if someone_was_up else OPEN_SECONDS)

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
        heard = self._listener.result() if self._is_listening else None
        if isinstance(heard, XidReports):
            self._xid_sources.note(heard)
            if heard.failure is not None:
                self._xid_sources.detach()  # until the driver is opened anew
                failures.append(f"xid events: {heard.failure}")
        samples += self._xid_sources.samples()
        samples.append(Sample("pacecar_gpu_driver_openings_total", (), self._sessions.openings))
        self._news.flush()
        if has_stopped:
            self._is_open = False
            self._look_again_ns = self._opened_ns + REOPEN_STOPPED_SECONDS * NS_PER_SECOND
        return self._outcome(samples, failures, unread)

    def _outcome(self, samples: list[Sample], failures: list[str], unread: list[str]) -> Outcome:
        """Return failed when a GPU or the driver is; single numbers that were `unread` cost only themselves."""
        if self._left_out:
            failures.append(f"{self._left_out} GPUs beyond the first ones left out")
        if not self._is_open and not failures:
            if not self._gpus:
                return self._closed
            return Failed(self._closed.reason, tuple(samples))
        if not failures:
            return Ok(tuple(samples), len(unread), bounded(unread))
        return Failed(bounded(failures + unread), tuple(samples), len(unread))
