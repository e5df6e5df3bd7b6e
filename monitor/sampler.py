"""How is one tick read, when any driver may hang?  One worker thread a collector, and a deadline for all.

A loop over the collectors waits for the slowest, and for ever for one that hangs (NVML in a driver reset, statvfs on a
dead disk).  Here the tick asks all workers at once, waits until its deadline and takes what has come.  A worker that is
still busy is Failed("still running since ..."), is asked nothing more until it returns, and holds up nobody else.

Left out on purpose: killing a hanging call.  A thread inside the kernel cannot be killed; it is a daemon thread,
so it cannot hold up the end of the process either.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from queue import SimpleQueue

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.monitor.collectors.reading import Collector
from pacecar.monitor.tick import Beat
from pacecar.records import Absent, Failed, Ok, Outcome, Snapshot

__all__ = ["Sampler"]

JOIN_SECONDS = 0.5
"""What stopping waits for a worker; a hung one is left behind."""

_log = logging.getLogger(__name__)


class _Worker:
    """The thread of one collector.  `busy_since_ns` and `result` belong to the sampler's condition."""

    def __init__(self, collector: Collector, clock: Clock, returned: threading.Condition) -> None:
        self.collector = collector
        self.busy_since_ns: int | None = None
        self.result: tuple[Outcome, int] | None = None
        self._clock = clock
        self._returned = returned
        self._asked: SimpleQueue[bool] = SimpleQueue()  # at most one question and one stop: bounded by its users
        self._thread = threading.Thread(target=self._work, name=f"pacecar-{collector.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self) -> None:
        self._asked.put(True)

    def stop(self) -> None:
        self._asked.put(False)

    def join(self, timeout_seconds: float) -> bool:
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while self._asked.get():
            started = self._clock.monotonic_ns()
            outcome = _collect(self.collector)
            duration = self._clock.monotonic_ns() - started
            with self._returned:
                self.result = (outcome, duration)
                self.busy_since_ns = None
                self._returned.notify()


def _collect(collector: Collector) -> Outcome:
    try:
        return collector.collect()
    except Exception as error:  # noqa: BLE001  the outer boundary: a bug in one collector must not stop the others
        _log.debug("collector %s raised", collector.name, exc_info=True)
        return Failed(f"{type(error).__name__}: {error}")


class Sampler:
    """Reads all collectors once a tick."""

    def __init__(self, collectors: Sequence[Collector], clock: Clock, *, deadline_seconds: float) -> None:
        assert len({c.name for c in collectors}) == len(collectors), "two collectors have one name"
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._returned = threading.Condition()
        self._workers = [_Worker(collector, clock, self._returned) for collector in collectors]
        self._closing = False
        self._failures: Counter[str] = Counter()
        self._states: dict[str, str] = {}

    def start(self) -> None:
        """Start the workers."""
        for worker in self._workers:
            worker.start()

    def interrupt(self) -> None:
        """End a `sample` that is waiting, so that stopping never takes as long as the deadline of a long period."""
        with self._returned:
            self._closing = True
            self._returned.notify_all()

    def close(self) -> None:
        """Stop the workers; those that hang are left behind, with their collector open."""
        self.interrupt()
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            if worker.join(JOIN_SECONDS if worker.busy_since_ns is None else 0.0):
                worker.collector.close()
            else:
                _log.warning("collector %s does not return and is left behind", worker.collector.name)

    def failures(self) -> dict[str, int]:
        """Return collector -> ticks in which it failed so far."""
        return {worker.collector.name: self._failures[worker.collector.name] for worker in self._workers}

    def sample(self, beat: Beat) -> Snapshot:
        """Ask every collector that is free, wait for at most the deadline and return what came."""
        with self._returned:
            for worker in self._workers:
                if worker.busy_since_ns is None:
                    worker.result = None
                    worker.busy_since_ns = self._clock.monotonic_ns()
                    worker.ask()
            self._returned.wait_for(
                lambda: self._closing or all(worker.busy_since_ns is None for worker in self._workers),
                self._deadline_seconds,
            )
            outcomes, durations = self._gather()
            closing = self._closing
        if not closing:  # an interrupted tick says nothing about its collectors
            for name, outcome in outcomes.items():
                self._note(name, outcome)
        return Snapshot(
            tick=beat.number,
            started_ns=beat.started_ns,
            wall_ns=self._clock.wall_ns(),
            lateness_ns=beat.lateness_ns,
            outcomes=outcomes,
            durations_ns=durations,
        )

    def _gather(self) -> tuple[dict[str, Outcome], dict[str, int]]:
        outcomes: dict[str, Outcome] = {}
        durations: dict[str, int] = {}
        for worker in self._workers:
            name = worker.collector.name
            if worker.busy_since_ns is not None:
                busy_ns = self._clock.monotonic_ns() - worker.busy_since_ns
                outcomes[name] = Failed(f"still running since {busy_ns / NS_PER_SECOND:.1f} s")
                durations[name] = busy_ns
            elif worker.result is not None:
                outcomes[name], durations[name] = worker.result
        return outcomes, durations

    def _note(self, name: str, outcome: Outcome) -> None:
        """Count failures, and log a state once when it changes and not at every tick."""
        if isinstance(outcome, Failed):
            self._failures[name] += 1
        kind = {Ok: "ok", Absent: "absent", Failed: "failed"}[type(outcome)]
        before = self._states.get(name)
        if kind == before:
            return
        reason = "" if isinstance(outcome, Ok) else outcome.reason
        self._states[name] = kind
        if kind == "failed":
            _log.warning("collector %s: failed: %s", name, reason)
        elif kind == "absent":
            _log.info("collector %s: absent: %s", name, reason)
        elif before is not None:
            _log.info("collector %s: ok", name)
