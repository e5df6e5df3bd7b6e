"""Reads all collectors once a tick, on one thread while they return, with one deadline for all; any driver may hang.

A loop over the collectors waits for the slowest, and for ever for one that hangs (NVML in a driver reset, statvfs on a
dead disk).  A thread for each is safe, and costs more than the reading: two wake-ups of a tick for each.  So the tick
gives all to a pool (`worker_pool`), which reads one after the other on one thread and begins a second one as soon as a
collector takes long; it waits until its deadline, and takes what has come.  A collector that is still busy is
Failed("still running since ..."), is asked nothing more until it returns, and holds up nobody else.

What was read goes through the reader's screen (`sample_screen`): a value that cannot be true is left out and named.

Between two ticks the thread that waits for the next one *glances*: of each collector that offers `glance` it reads the
windowed metrics, of all in one wake-up, at the rate that `GlanceRate` gives.  The tick adds lowest, mean and highest
of the window to what it read.  No collector is called by two threads at a time.

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
from contextlib import suppress
from functools import partial

import msgspec

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.formatting.quantities import plural
from pacecar.records import Absent, Failed, Ok, Outcome, Sample, Snapshot

from ..catalog_sample import sample
from ..collectors.source_reader import FAILURES_MAX, Collector, bounded
from ..ingest.log_limiter import LogLimiter
from ..worker_pool import LONG_SECONDS, STAGGER_SECONDS, Between, WorkerPool
from .sample_screen import Refusal, SampleScreen, in_range
from .ticker import SamplingTick
from .window_stats import WindowStats

__all__ = ["GlanceRate", "Sampler"]

WINDOW_SECONDS = 15.0
"""The default window: Prometheus' common scrape interval, so that no peak falls between two scrapes."""

GLANCE_JITTER_RATIO = 0.2
"""Glances are moved at random by up to this share of their interval: a training step is periodic too."""

LATE_SECONDS = 0.5
"""What was read in glances that together took longer, because one hung, is older than a recording would say."""

CLOSE_SECONDS = 1.0
"""How long stopping waits for the collectors to close; one that hangs is left behind."""

LINES_PER_MINUTE = 10
"""Lines in the log about one collector: a source that is read at one tick and not at the next has two a tick to say."""

STAGGERS_MIN = 8
"""A collector that hangs delays those behind it by so small a part of the deadline at most, however short that is."""

_log = logging.getLogger(__name__)


class GlanceRate:
    """How often collectors glance between ticks.  One thread sets it, the workers read it."""

    __slots__ = ("glances_per_second",)

    def __init__(self, glances_per_second: float = 0.0) -> None:
        self.glances_per_second = glances_per_second


class _Reader:
    """Reads one collector.  All fields but the counts of glances belong to the sampler's condition."""

    def __init__(self, collector: Collector, window_ns: int) -> None:
        self.collector = collector
        self.busy_since_ns: int | None = None
        """When the reading was asked for that has not come yet."""
        self.result: tuple[Outcome, int] | None = None
        self.took_ns = 0
        self.is_entered = False
        """Whether a thread is in the collector."""
        self.is_wanted = False
        """Whether that thread is to do, when it leaves, what another one wanted of the collector meanwhile."""
        self.is_closed = False
        self.glances = self.glance_failures = 0
        self.glance: Callable[[], Sequence[Sample]] | None = getattr(collector, "glance", None)
        self.read_failures = 0
        self._note_refused: Callable[[Sequence[Refusal]], None] | None = getattr(collector, "note_refused", None)
        self._screen = SampleScreen()
        self._glanced: list[Refusal] = []
        """What glances read since the tick before and left out; the tick names it."""
        self._window = WindowStats(window_ns)

    def is_hung(self, now_ns: int) -> bool:
        """Return whether a reading takes longer than most, so that closing does not wait for it."""
        is_late = self.busy_since_ns is not None and now_ns - self.busy_since_ns >= LONG_SECONDS * NS_PER_SECOND
        return is_late and self.is_entered

    def leave(self) -> bool:
        """Note that no thread is in the collector; return whether another one wants something of it."""
        is_wanted = self.is_wanted
        self.is_entered = self.is_wanted = False
        return is_wanted

    def collect(self, now_ns: int) -> Outcome:
        try:
            outcome = self._screened(self.collector.collect())
            if not isinstance(outcome, Absent):
                self.read_failures += outcome.read_failures
            return _over_window(outcome, self._window, now_ns)
        except BaseException as error:  # noqa: BLE001  the outer boundary: it must not stop the others
            _log.debug("collector %s raised", self.collector.name, exc_info=True)
            return Failed(f"{type(error).__name__}: {error}")

    def _screened(self, outcome: Outcome) -> Outcome:
        """Return `outcome` without the samples that cannot be true, which are read failures."""
        if isinstance(outcome, Absent):
            return outcome
        samples, refusals = self._screen.screen(outcome.samples)
        if self._note_refused is not None:
            self._note_refused(refusals)
        refusals, self._glanced = refusals + self._glanced, []
        if not refusals and samples is outcome.samples:
            return outcome
        reasons = ([outcome.reason] if outcome.reason else []) + [refusal.reason for refusal in refusals]
        return msgspec.structs.replace(
            outcome,
            samples=samples,
            read_failures=outcome.read_failures + len(refusals),
            reason=bounded(reasons),
        )

    def look(self, glance: Callable[[], Sequence[Sample]]) -> Sequence[Sample]:
        self.glances += 1
        try:
            samples, refusals = in_range(glance())
            self._glanced = (self._glanced + refusals)[:FAILURES_MAX]
            self._window.add(samples)
            return samples
        except BaseException as error:  # noqa: BLE001  the outer boundary; the tick meets the same fault and names it
            self.glance_failures += 1
            _log.debug("collector %s: glance: %s: %s", self.collector.name, type(error).__name__, error)
            return ()

    def close(self) -> None:
        try:
            self.collector.close()
        except Exception:  # noqa: BLE001  it costs this collector alone
            _log.warning("collector %s: cannot be closed", self.collector.name, exc_info=True)


def _over_window(outcome: Outcome, window: WindowStats, now_ns: int) -> Outcome:
    """Return `outcome` with lowest, mean and highest of its windowed series added."""
    if isinstance(outcome, Absent):
        return outcome
    windowed = window.add(outcome.samples)
    window.close(now_ns)
    more = window.over(windowed)
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
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._returned = threading.Condition()
        self._readers = [_Reader(c, int(window_seconds * NS_PER_SECOND)) for c in collectors]
        self._glancers = [(reader, reader.glance) for reader in self._readers if reader.glance is not None]
        between = Between(self._seconds_to_glance, self._glance) if self._glancers else None
        self._pool = WorkerPool("collect", between)
        self._pace = pace or GlanceRate()
        self._overhear = overhear
        self._chance = random.Random()
        self._glance_cpu_ns = 0
        self._closing = False
        self._failures: Counter[str] = Counter()
        self._states: dict[str, tuple[str, int]] = {}
        self._notices = LogLimiter(_log, LINES_PER_MINUTE, clock)
        self._tick: SamplingTick | None = None

    def start(self) -> None:
        """Begin to glance."""
        self._pool.submit(lambda: None)

    def interrupt(self) -> None:
        """End a `sample` that is waiting, so that stopping never takes as long as the deadline of a long period."""
        with self._returned:
            self._closing = True
            self._returned.notify_all()

    def close(self) -> None:
        """Close all collectors; one that hangs is left behind, and closed when it returns."""
        self.interrupt()
        now_ns = self._clock.monotonic_ns()
        self._submit(self._readers)
        with self._returned:
            quick = [reader for reader in self._readers if not reader.is_hung(now_ns)]
            self._pool.wait(self._returned, lambda: all(reader.is_closed for reader in quick), CLOSE_SECONDS)
            names = [reader.collector.name for reader in self._readers if not reader.is_closed]
        self._pool.stop(CLOSE_SECONDS)
        for name in names:
            _log.warning("collector %s does not return and is left behind", name)

    def own_samples(self) -> Iterator[Sample]:
        """Yield the ticks so far, those missed, and of each collector its failures and, if it glances, its glances."""
        tick = self._tick
        yield sample("pacecar_daemon_ticks_total", 0 if tick is None else tick.number + 1)
        yield sample("pacecar_daemon_ticks_missed_total", 0 if tick is None else tick.missed)
        for reader in self._readers:
            name = reader.collector.name
            yield sample("pacecar_collector_failures_total", self._failures[name], name)
            yield sample("pacecar_collector_read_failures_total", reader.read_failures, name)
            if reader.glance is not None:
                yield sample("pacecar_collector_glances_total", reader.glances, name)
                yield sample("pacecar_collector_glance_failures_total", reader.glance_failures, name)

    def glance_cpu_ns(self) -> int:
        """Return the CPU time of all glances so far."""
        return self._glance_cpu_ns

    def sample(self, tick: SamplingTick) -> Snapshot:
        """Ask every collector that is free, wait for at most the deadline and return what came."""
        self._tick = tick
        asked_ns = self._clock.monotonic_ns()
        with self._returned:
            free = [] if self._closing else [reader for reader in self._readers if reader.busy_since_ns is None]
            for reader in free:
                reader.result, reader.busy_since_ns = None, asked_ns
        self._submit(free)
        with self._returned:
            self._pool.wait(
                self._returned,
                lambda: self._closing or all(reader.busy_since_ns is None for reader in free),
                self._deadline_seconds,
                stagger_seconds=min(STAGGER_SECONDS, self._deadline_seconds / STAGGERS_MIN),
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

    def _submit(self, readers: Sequence[_Reader]) -> None:
        """Have `readers` served: those that took long the last time each on a thread of its own."""
        long_ns = int(LONG_SECONDS * NS_PER_SECOND)
        with suppress(RuntimeError):  # the system gives no thread: they wait for the one there is
            self._pool.submit(*(partial(self._serve, reader) for reader in readers if reader.took_ns <= long_ns))
            for reader in readers:
                if reader.took_ns > long_ns:
                    self._pool.submit(partial(self._serve, reader), at_once=True)

    # --- the pool's threads ---------------------------------------------------------------------

    def _serve(self, reader: _Reader) -> None:
        """Read, or close when all is over; if another thread is in the collector, that one does it when it leaves."""
        with self._returned:
            if reader.is_closed:
                return
            if reader.is_entered:
                reader.is_wanted = True
                return
            reader.is_entered = True
            closing = self._closing
        begun_ns = self._clock.monotonic_ns()
        result: tuple[Outcome, int] | None = None
        if closing:
            reader.close()
        else:
            result = reader.collect(begun_ns), self._clock.monotonic_ns() - begun_ns
        with self._returned:
            reader.result, reader.busy_since_ns, reader.is_closed = result, None, closing
            reader.took_ns = 0 if result is None else result[1]
            is_wanted = reader.leave()
            if not self._pool.has_waiting:  # else the next one wakes who waits for all
                self._returned.notify_all()
        if is_wanted:
            self._serve(reader)

    def _seconds_to_glance(self) -> float | None:
        rate = self._pace.glances_per_second
        return (1 + GLANCE_JITTER_RATIO * (self._chance.random() - 0.5)) / rate if rate > 0 else None

    def _glance(self) -> None:
        """Glance at all collectors that nobody reads."""
        begun_ns, cpu_ns = self._clock.monotonic_ns(), time.thread_time_ns()
        looked: list[Sample] = []
        for reader, glance in self._glancers:
            with self._returned:
                if reader.is_entered or reader.busy_since_ns is not None or self._closing:
                    continue
                reader.is_entered = True
            looked += reader.look(glance)
            with self._returned:
                is_wanted = reader.leave()
            if is_wanted:
                self._serve(reader)
        is_late = self._clock.monotonic_ns() - begun_ns > LATE_SECONDS * NS_PER_SECOND
        if looked and not is_late and self._overhear is not None:
            self._overhear(looked)
        self._glance_cpu_ns += time.thread_time_ns() - cpu_ns

    # --- the tick's thread ----------------------------------------------------------------------

    def _gather(self) -> tuple[dict[str, Outcome], dict[str, int]]:
        outcomes: dict[str, Outcome] = {}
        durations: dict[str, int] = {}
        for reader in self._readers:
            name = reader.collector.name
            if reader.busy_since_ns is not None:
                busy_ns = self._clock.monotonic_ns() - reader.busy_since_ns
                how = "still running since" if reader.is_entered else "has not begun for"
                outcomes[name] = Failed(f"{how} {busy_ns / NS_PER_SECOND:.1f} s")
                durations[name] = busy_ns
            elif reader.result is not None:
                outcomes[name], durations[name] = reader.result
        return outcomes, durations

    def _note(self, name: str, outcome: Outcome) -> None:
        """Count failures, and log a state once when it changes and not at every tick."""
        if isinstance(outcome, Failed):
            self._failures[name] += 1
        kind = {Ok: "ok", Absent: "absent", Failed: "failed"}[type(outcome)]
        unread = outcome.read_failures if isinstance(outcome, Ok) else 0
        before, unread_before = self._states.get(name, (None, 0))
        if kind == before and (unread_before >= unread > 0 or unread == unread_before):
            return
        self._states[name] = (kind, unread)
        if kind == "failed":
            self._notices.warn(name, "collector %s: failed: %s", name, outcome.reason)
        elif kind == "absent":
            self._notices.tell(logging.INFO, name, "collector %s: absent: %s", name, outcome.reason)
        elif unread:
            self._notices.warn(name, "collector %s: %s: %s", name, plural(unread, "read failure"), outcome.reason)
        elif before is not None:
            self._notices.tell(logging.INFO, name, "collector %s: ok", name)
