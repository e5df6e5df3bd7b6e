"""Reads all collectors once a tick, with one worker thread a collector and one deadline for all; any driver may hang.

A loop over the collectors waits for the slowest, and for ever for one that hangs (NVML in a driver reset, statvfs on a
dead disk).  Here the tick asks one worker after the other, waits a moment for each and at the end for all until its
deadline, and takes what has come.  (To ask all at once is no faster under one interpreter lock: they hold each other
up, and a scrape that comes meanwhile waits for each of them.)  A worker that is still busy is
Failed("still running since ..."), is asked nothing more until it returns, and holds up nobody else.

Between two ticks the same thread *glances*: a collector that offers `glance` is asked for its windowed metrics at the
rate that `GlanceRate` gives, and the tick adds lowest, mean and highest of the window to what it read.  A thread of its
own for glances would need a lock around every driver handle.

Left out on purpose: killing a hanging call.  A thread inside the kernel cannot be killed; it is a daemon thread,
so it cannot hold up the end of the process either.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

import msgspec

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Absent, Failed, Ok, Outcome, Sample, Snapshot

from ..catalog_sample import sample
from ..collectors.source_reader import Collector
from .ticker import SamplingTick
from .window_stats import WindowStats

__all__ = ["GlanceRate", "Sampler"]

WINDOW_SECONDS = 15.0
"""The default window: Prometheus' common scrape interval, so that no peak falls between two scrapes."""

STAGGER_SECONDS = 0.005
"""How long a tick waits for one collector before it asks the next as well: most take a millisecond."""

GLANCE_JITTER_RATIO = 0.2
"""Glances are moved at random by up to this share of their interval: a training step is periodic too."""

JOIN_SECONDS = 0.5
"""How long stopping waits for a worker; a hung one is left behind."""

_log = logging.getLogger(__name__)


class GlanceRate:
    """How often collectors glance between ticks.  One thread sets it, the workers read it."""

    __slots__ = ("glances_per_second",)

    def __init__(self, glances_per_second: float = 0.0) -> None:
        self.glances_per_second = glances_per_second


class _Worker:
    """The thread of one collector.  `busy_since_ns` and `result` belong to the sampler's condition."""

    def __init__(
        self,
        collector: Collector,
        clock: Clock,
        returned: threading.Condition,
        pace: GlanceRate,
        window_ns: int,
        overhear: Callable[[Sequence[Sample]], None] | None,
    ) -> None:
        self.collector = collector
        self.busy_since_ns: int | None = None
        self.result: tuple[Outcome, int] | None = None
        self.glances = self.glance_failures = self.glance_cpu_ns = 0
        self._glance: Callable[[], Sequence[Sample]] | None = getattr(collector, "glance", None)
        self._pace = pace
        self._window = WindowStats(window_ns)
        self._overhear = overhear
        self._chance = random.Random()
        self._clock = clock
        self._returned = returned
        self._asked: SimpleQueue[bool] = SimpleQueue()  # at most one request and one stop: bounded by its users
        self._thread = threading.Thread(target=self._work, name=f"pacecar-{collector.name}", daemon=True)

    @property
    def can_glance(self) -> bool:
        return self._glance is not None

    def is_free(self) -> bool:
        return self.busy_since_ns is None

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
        """Collect when asked, then close the collector: never beside a call of its own, however long that takes."""
        while self._wait():
            started = self._clock.monotonic_ns()
            outcome = _collect(self.collector, self._window, started)
            duration = self._clock.monotonic_ns() - started
            with self._returned:
                self.result = (outcome, duration)
                self.busy_since_ns = None
                self._returned.notify()
        try:
            self.collector.close()
        except Exception:  # noqa: BLE001  it costs this collector alone
            _log.warning("collector %s: cannot be closed", self.collector.name, exc_info=True)

    def _wait(self) -> bool:
        """Glance until the sampler asks (True) or says stop (False)."""
        while True:
            rate = self._pace.glances_per_second
            if self._glance is None or rate <= 0:
                return self._asked.get()
            try:
                return self._asked.get(timeout=(1 + GLANCE_JITTER_RATIO * (self._chance.random() - 0.5)) / rate)
            except Empty:
                self._look(self._glance)

    def _look(self, glance: Callable[[], Sequence[Sample]]) -> None:
        self.glances += 1
        begun = time.thread_time_ns()
        try:
            samples = glance()
            self._window.add(samples)
            if self._overhear is not None and samples:
                self._overhear(samples)
        except BaseException as error:  # noqa: BLE001  the outer boundary; the tick meets the same fault and names it
            self.glance_failures += 1
            _log.debug("collector %s: glance: %s: %s", self.collector.name, type(error).__name__, error)
        finally:
            self.glance_cpu_ns += time.thread_time_ns() - begun


def _collect(collector: Collector, window: WindowStats, now_ns: int) -> Outcome:
    try:
        return _over_window(collector.collect(), window, now_ns)
    except BaseException as error:  # noqa: BLE001  the outer boundary: it must not end this thread, nor stop the others
        _log.debug("collector %s raised", collector.name, exc_info=True)
        return Failed(f"{type(error).__name__}: {error}")


def _over_window(outcome: Outcome, window: WindowStats, now_ns: int) -> Outcome:
    """Return `outcome` with lowest, mean and highest of its windowed series added."""
    if isinstance(outcome, Absent):
        return outcome
    window.add(outcome.samples)
    window.close(now_ns)
    more = window.over(outcome.samples)
    return msgspec.structs.replace(outcome, samples=(*outcome.samples, *more)) if more else outcome


class Sampler:
    """Reads all collectors once a tick, and lets those that can glance in between."""

    def __init__(
        self,
        collectors: Sequence[Collector],
        clock: Clock,
        *,
        deadline_seconds: float,
        pace: GlanceRate | None = None,
        window_seconds: float = WINDOW_SECONDS,
        overhear: Callable[[Sequence[Sample]], None] | None = None,
    ) -> None:
        assert len({c.name for c in collectors}) == len(collectors), "two collectors have one name"
        pace = pace or GlanceRate()
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._returned = threading.Condition()
        self._workers = [
            _Worker(collector, clock, self._returned, pace, int(window_seconds * NS_PER_SECOND), overhear)
            for collector in collectors
        ]
        self._closing = False
        self._failures: Counter[str] = Counter()
        self._states: dict[str, str] = {}
        self._tick: SamplingTick | None = None

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
        """Stop the workers, which close their collectors; one that hangs is left behind and does so later."""
        self.interrupt()
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            if not worker.join(JOIN_SECONDS if worker.busy_since_ns is None else 0.0):
                _log.warning("collector %s does not return and is left behind", worker.collector.name)

    def own_samples(self) -> Iterator[Sample]:
        """Yield the ticks so far, those missed, and of each collector its failures and, if it glances, its glances."""
        tick = self._tick
        yield sample("pacecar_daemon_ticks_total", 0 if tick is None else tick.number + 1)
        yield sample("pacecar_daemon_ticks_missed_total", 0 if tick is None else tick.missed)
        for worker in self._workers:
            name = worker.collector.name
            yield sample("pacecar_collector_failures_total", self._failures[name], name)
            if worker.can_glance:
                yield sample("pacecar_collector_glances_total", worker.glances, name)
                yield sample("pacecar_collector_glance_failures_total", worker.glance_failures, name)

    def glance_cpu_ns(self) -> int:
        """Return the CPU time of all glances so far."""
        return sum(worker.glance_cpu_ns for worker in self._workers)

    def sample(self, tick: SamplingTick) -> Snapshot:
        """Ask every collector that is free, wait for at most the deadline and return what came."""
        self._tick = tick
        with self._returned:
            for worker in self._workers:
                if worker.busy_since_ns is None and not self._closing:
                    worker.result = None
                    worker.busy_since_ns = self._clock.monotonic_ns()
                    worker.ask()
                    self._returned.wait_for(worker.is_free, STAGGER_SECONDS)
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
            tick=tick.number,
            started_ns=tick.started_ns,
            wall_ns=self._clock.wall_ns(),
            lateness_ns=tick.lateness_ns,
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
