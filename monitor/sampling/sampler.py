"""Reads all collectors once a tick, with one deadline for all of them; any driver may hang.

A loop over the collectors waits for the slowest, and for ever for one that hangs (NVML in a driver reset, statvfs on a
dead disk).  A thread for each is safe, but its two wake-ups a tick cost more than the reading.  So the tick gives all
collectors to a pool (`worker_pool`): one thread reads them in turn, and a second one helps as soon as a collector takes
long.  The tick waits until its deadline and takes what has come.  A collector that is still busy is Failed("still
running since ..."), is not called again until it returns, and delays no other.

A tick need not read everything (`sample`): outcomes and samples that are not read again are the same objects as before.

A reader removes impossible values from what it read (`sample_screen`).

Between two ticks the thread that waits for the next job *glances*: at the rate that `glances_per_second` returns it
reads the windowed metrics of all collectors that have `glance`, in one wake-up.  The tick adds minimum, mean and
maximum of the window to what it read.  Only one thread at a time calls a collector.

Left out: killing a hung call.  A thread inside the kernel cannot be killed; as a daemon thread it does not block the
end of the process.
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
from ..worker_pool import LONG_SECONDS, STAGGER_SECONDS, IdleTask, WorkerPool
from .sample_screen import RefusedSample, SampleScreen, in_range
from .ticker import SamplingTick
from .window_stats import MetricPlaces, WindowStats

__all__ = ["Sampler"]

WINDOW_SECONDS = 15.0
"""The default window: Prometheus' usual scrape interval, so that no peak falls between two scrapes."""

GLANCE_JITTER_RATIO = 0.2
"""Glances move at random by up to this share of their interval, because a training step is periodic too."""

LATE_SECONDS = 0.5
"""Results of glances that together took longer, because one hung, are too old for a recording."""

CLOSE_SECONDS = 1.0
"""How long closing waits for the collectors; one that hangs is left behind."""

LINES_PER_MINUTE = 10
"""Log lines for one collector: a source that can be read only at every other tick changes its state at each."""

STAGGERS_MIN = 8
"""A hung collector delays the next ones by at most one part in so many of the deadline, however short that is."""

_log = logging.getLogger(__name__)


class _Reader:
    """Reads one collector.  The sampler's condition guards all fields but the counts of glances."""

    def __init__(self, collector: Collector, window_ns: int) -> None:
        self.collector = collector
        self.busy_since_ns: int | None = None
        """When the pending reading was requested."""
        self.result: tuple[Outcome, int] | None = None
        self.took_ns = 0
        self.is_entered = False
        """Whether a thread is in the collector."""
        self.is_wanted = False
        """Whether that thread must serve the collector again when it leaves, because another one wanted to."""
        self.is_closed = False
        self._is_rarely_read = getattr(collector, "is_rarely_read", False)
        self._collect_fast: Callable[[], Outcome] = getattr(collector, "collect_fast", collector.collect)
        self.is_fast = False
        """Whether the pending reading leaves out details."""
        self._has_failed = self._must_retry = False
        self.glances = self.glance_failures = 0
        self.glance: Callable[[], Sequence[Sample]] | None = getattr(collector, "glance", None)
        self.read_failures = 0
        self._note_refused: Callable[[Sequence[RefusedSample]], None] | None = getattr(collector, "note_refused", None)
        self._screen = SampleScreen()
        self._glanced: list[RefusedSample] = []
        """Samples of glances that were left out since the last tick; the tick reports them."""
        self._window = WindowStats(window_ns)
        self._windowed: list[tuple[str, tuple[str, ...]]] = []
        self._extremes: list[Sample] = []

    def is_left_out(self, *, everything: bool) -> bool:
        """Return whether its last outcome is served for one more tick; after a new failure it is read again first."""
        return self._is_rarely_read and not everything and self.result is not None and not self._must_retry

    def is_hung(self, now_ns: int) -> bool:
        """Return whether a reading takes unusually long, so that closing does not wait for it."""
        is_late = self.busy_since_ns is not None and now_ns - self.busy_since_ns >= LONG_SECONDS * NS_PER_SECOND
        return is_late and self.is_entered

    def leave(self) -> bool:
        """Record that no thread is in the collector; return whether it must be served again."""
        is_wanted = self.is_wanted
        self.is_entered = self.is_wanted = False
        return is_wanted

    def collect(self, now_ns: int) -> Outcome:
        try:
            outcome = self._screened(self._collect_fast() if self.is_fast else self.collector.collect())
            has_failed = isinstance(outcome, Failed)
            if not isinstance(outcome, Absent):
                self.read_failures += outcome.read_failures
                has_failed |= outcome.read_failures > 0
            self._must_retry, self._has_failed = has_failed and not self._has_failed, has_failed
            return self._over_window(outcome, now_ns)
        except BaseException as error:  # noqa: BLE001  the outer boundary: the others go on
            _log.debug("collector %s raised", self.collector.name, exc_info=True)
            return Failed(f"{type(error).__name__}: {error}")

    def _screened(self, outcome: Outcome) -> Outcome:
        """Return `outcome` without impossible samples, which count as read failures."""
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

    def _over_window(self, outcome: Outcome, now_ns: int) -> Outcome:
        """Return `outcome` with minimum, mean and maximum of its windowed series added.

        A reading without details reuses those of the previous reading if it has the same series.
        """
        if isinstance(outcome, Absent):
            return outcome
        windowed = self._window.add_tick(outcome.samples)
        self._window.close(now_ns)
        series = [(sample.metric, sample.labels) for sample in windowed]
        if not self.is_fast or series != self._windowed:
            self._windowed, self._extremes = series, self._window.over(windowed)
        more = self._extremes
        return msgspec.structs.replace(outcome, samples=(*outcome.samples, *more)) if more else outcome

    def run_glance(self, glance: Callable[[], Sequence[Sample]]) -> Sequence[Sample]:
        self.glances += 1
        try:
            samples, refusals = in_range(glance())
            if refusals:
                self._glanced = (self._glanced + refusals)[:FAILURES_MAX]
            if samples:
                self._window.add(samples)
            return samples
        except BaseException as error:  # noqa: BLE001  the outer boundary; the tick meets the same fault and names it
            self.glance_failures += 1
            _log.debug("collector %s: glance: %s: %s", self.collector.name, type(error).__name__, error)
            return ()

    def close(self) -> None:
        try:
            getattr(self.collector, "close", _nothing)()
        except Exception:  # noqa: BLE001  the others must be closed too
            _log.warning("collector %s: cannot be closed", self.collector.name, exc_info=True)


def _nothing() -> None:
    """Close a collector that holds nothing open."""


class Sampler:
    """Reads all collectors once a tick, and glances at those that offer it in between."""

    def __init__(
        self,
        collectors: Sequence[Collector],
        clock: Clock,
        *,
        deadline_seconds: float,
        glances_per_second: Callable[[], float] = lambda: 0.0,
        window_seconds: float = WINDOW_SECONDS,
        on_glance: Callable[[Sequence[Sample]], None] | None = None,
    ) -> None:
        assert len({c.name for c in collectors}) == len(collectors), "two collectors have one name"
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._returned = threading.Condition()
        self._readers = [_Reader(c, int(window_seconds * NS_PER_SECOND)) for c in collectors]
        self._glancers = [(reader, reader.glance) for reader in self._readers if reader.glance is not None]
        idle_task = IdleTask(self._seconds_to_glance, self._glance) if self._glancers else None
        self._pool = WorkerPool("collect", idle_task)
        self._glances_per_second = glances_per_second
        self._on_glance = on_glance
        self._random = random.Random()
        self._glance_cpu_ns = 0
        self._closing = False
        self._failures: Counter[str] = Counter()
        self._states: dict[str, tuple[str, int]] = {}
        self._log_limiter = LogLimiter(_log, LINES_PER_MINUTE, clock)
        self._tick: SamplingTick | None = None
        self._places = MetricPlaces()

    def start(self) -> None:
        """Start to glance."""
        self._pool.submit(lambda: None)

    def interrupt(self) -> None:
        """End a waiting `sample`, so that closing does not take as long as the deadline of a long period."""
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
        """Yield the ticks so far, those missed, and each collector's failures and glances."""
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

    def sample(self, tick: SamplingTick, *, everything: bool = True) -> Snapshot:
        """Call every free collector, wait at most until the deadline and return the results.

        Without `everything`, the last outcome of `is_rarely_read` collectors is served again, and others leave out
        details in `collect_fast`.
        """
        self._tick = tick
        asked_ns = self._clock.monotonic_ns()
        with self._returned:
            free = [
                reader
                for reader in self._readers
                if not self._closing and reader.busy_since_ns is None and not reader.is_left_out(everything=everything)
            ]
            for reader in free:
                reader.result, reader.busy_since_ns, reader.is_fast = None, asked_ns, not everything
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
        if not closing:  # the outcomes of an interrupted tick mean nothing
            unchanged = {
                reader.collector.name for reader in self._readers if reader not in free and reader.result is not None
            }
            for name, outcome in outcomes.items():
                if name not in unchanged:
                    self._note(name, outcome)
        snapshot = Snapshot(
            tick=tick.number,
            started_ns=tick.started_ns,
            wall_ns=self._clock.wall_ns(),
            lateness_ns=tick.lateness_ns,
            outcomes=outcomes,
            durations_ns=durations,
        )
        return msgspec.structs.replace(snapshot, places=self._places.find(snapshot.samples()))

    def _submit(self, readers: Sequence[_Reader]) -> None:
        """Submit `readers`; those that took long the last time each get a thread of their own."""
        long_ns = int(LONG_SECONDS * NS_PER_SECOND)
        with suppress(RuntimeError):  # no thread could be started: they wait for an existing one
            self._pool.submit(*(partial(self._serve, reader) for reader in readers if reader.took_ns <= long_ns))
            for reader in readers:
                if reader.took_ns > long_ns:
                    self._pool.submit(partial(self._serve, reader), at_once=True)

    # --- the pool's threads ---------------------------------------------------------------------

    def _serve(self, reader: _Reader) -> None:
        """Read, or close at the end; if another thread is in the collector, that one does it when it leaves."""
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
            if not self._pool.has_waiting:  # else the next job notifies
                self._returned.notify_all()
        if is_wanted:
            self._serve(reader)

    def _seconds_to_glance(self) -> float | None:
        rate = self._glances_per_second()
        return (1 + GLANCE_JITTER_RATIO * (self._random.random() - 0.5)) / rate if rate > 0 else None

    def _glance(self) -> None:
        """Glance at all collectors that no thread reads."""
        begun_ns, cpu_ns = self._clock.monotonic_ns(), time.thread_time_ns()
        glanced: list[Sample] = []
        for reader, glance in self._glancers:
            if not getattr(reader.collector, "is_glance_due", True):
                continue
            with self._returned:
                if reader.is_entered or reader.busy_since_ns is not None or self._closing:
                    continue
                reader.is_entered = True
            glanced += reader.run_glance(glance)
            with self._returned:
                is_wanted = reader.leave()
            if is_wanted:
                self._serve(reader)
        is_late = self._clock.monotonic_ns() - begun_ns > LATE_SECONDS * NS_PER_SECOND
        if glanced and not is_late and self._on_glance is not None:
            self._on_glance(glanced)
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
        """Count failures, and log a state once when it changes."""
        if isinstance(outcome, Failed):
            self._failures[name] += 1
        kind = {Ok: "ok", Absent: "absent", Failed: "failed"}[type(outcome)]
        unread = outcome.read_failures if isinstance(outcome, Ok) else 0
        before, unread_before = self._states.get(name, (None, 0))
        if kind == before and (unread_before >= unread > 0 or unread == unread_before):
            return
        self._states[name] = (kind, unread)
        if kind == "failed":
            self._log_limiter.warn(name, "collector %s: failed: %s", name, outcome.reason)
        elif kind == "absent":
            self._log_limiter.tell(logging.INFO, name, "collector %s: absent: %s", name, outcome.reason)
        elif unread:
            self._log_limiter.warn(name, "collector %s: %s: %s", name, plural(unread, "read failure"), outcome.reason)
        elif before is not None:
            self._log_limiter.tell(logging.INFO, name, "collector %s: ok", name)
