"""Defines a collector, and reads its files so that numbers, what is missing and what is broken stay apart.

The obvious collector is one `try` around everything: then the first odd line loses the whole machine.  Here each line
and each file stands alone: what can be read becomes a sample, what does not exist is noted as missing (healthy), and
what exists but cannot be understood is a failure that names the file and the line.

Left out on purpose: what the numbers mean.  Each collector knows that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pacecar.kernel_files.reader import NOT_THERE, KernelFiles, lines_of
from pacecar.records import Absent, Failed, Ok, Outcome, Sample

from ..catalog_sample import sample

__all__ = ["Collector", "Glancer", "ParsedLines", "Seldom", "SourceReading"]

FAILURES_MAX = 8
"""Reasons spelt out in one outcome; the rest are counted, so that a log line stays a line."""

T = TypeVar("T")


class Collector(Protocol):
    """Reads one source.  Called by one thread at a time, never by a scrape."""

    @property
    def name(self) -> str:
        """The collector's name: the label in self metrics and the word in [daemon] disable."""
        ...

    def collect(self) -> Outcome:
        """Read the source once.  Raises nothing that is an operating error: those are the outcome."""
        ...

    def close(self) -> None:
        """Release what was opened."""
        ...


class Glancer(Collector, Protocol):
    """A collector with metrics that change between two ticks: those that the catalog marks as windowed."""

    def glance(self) -> Sequence[Sample]:
        """Read only the windowed metrics, as cheaply as can be; called up to ten times a second between two ticks.

        Called by the thread that collects, never while it collects.  What cannot be read is left out: the next tick
        meets the same fault and reports it.
        """
        ...


class Seldom(Generic[T]):
    """What hardly changes and costs a file or more to read: read at the first of every `ticks` collects, kept between.

    A reading that met a failure is not kept, so that what was unreadable once is back at the next tick.  What was
    missing is noted at each tick, so that the reason of an absent source stays the same.
    """

    def __init__(self, ticks: int) -> None:
        self._ticks = ticks
        self._left = 0
        self._kept: T | None = None
        self._missing: tuple[str, ...] = ()

    def get(self, reading: SourceReading, read: Callable[[], T]) -> T:
        """Return what `read` gave lately; `read` notes its failures in `reading`."""
        if self._left > 0 and self._kept is not None:
            self._left -= 1
            for reason in self._missing:
                reading.lack(reason)
            return self._kept
        failures, missing = reading.failures, len(reading.missing)
        value = read()
        self._missing = reading.missing[missing:]
        self._kept, self._left = (value, self._ticks - 1) if reading.failures == failures else (None, 0)
        return value


class ParsedLines(Generic[T]):
    """The lines of a file as they were last parsed, with its text: where that is the same they are not parsed again.

    For files that are long and hardly change, as the list of mounts.  Only a text without a failure is kept.
    """

    __slots__ = ("text", "values")

    def __init__(self) -> None:
        self.text: str | None = None
        self.values: list[T] = []


class SourceReading:
    """One tick of one collector: adds up samples, gaps and failures, and ends as an outcome."""

    def __init__(self, files: KernelFiles) -> None:
        self._files = files
        self._samples: list[Sample] = []
        self._missing: list[str] = []
        self._failures: list[str] = []
        self._failed = 0

    @property
    def failures(self) -> int:
        """How many failures were noted so far."""
        return self._failed

    @property
    def missing(self) -> tuple[str, ...]:
        """What was not there so far, in words."""
        return tuple(self._missing)

    def add(self, metric: str, value: int | float, *labels: str) -> None:
        """Add what was read."""
        self._samples.append(sample(metric, value, *labels))

    def add_seldom(self, kept: Seldom[list[Sample]], read: Callable[[], list[Sample]]) -> None:
        """Add the samples that `kept` has, or what `read` gives when they are due."""
        self._samples += kept.get(self, read)

    def fail(self, reason: str) -> None:
        """Note something that is there and could not be read."""
        self._failed += 1
        if len(self._failures) < FAILURES_MAX:
            self._failures.append(reason)

    def lack(self, reason: str) -> None:
        """Note something that is not there, which is healthy."""
        self._missing.append(reason)

    def text(self, path: Path) -> str | None:
        """Return the text of `path`; None, and a note, when it is missing or cannot be read."""
        try:
            return self._files.read(path)
        except OSError as error:
            self._note(path, error)
            return None

    def names(self, path: Path) -> list[str] | None:
        """Return the names in the folder `path`; None, and a note, when it is missing or cannot be read."""
        try:
            return self._files.names(path)
        except OSError as error:
            self._note(path, error)
            return None

    def lines(
        self,
        path: Path,
        parse: Callable[[str], T | None],
        *,
        skip: int = 0,
        only: tuple[str, ...] = ("",),
        before: ParsedLines[T] | None = None,
    ) -> list[T]:
        """Return what `parse` makes of each line after the first `skip` that begins as one of `only`; None is left out.

        A line for which `parse` raises ValueError or IndexError is a failure that names it; the others still count.
        With `before` the same text is parsed once; what is returned then belongs to it.
        """
        text = self.text(path)
        if text is None:
            return []
        if before is not None and before.text == text:
            return before.values
        values: list[T] = []
        failed = self._failed
        for number, line in enumerate(lines_of(text)[skip:], start=skip + 1):
            if not line.startswith(only):
                continue
            try:
                value = parse(line)
            except (ValueError, IndexError) as error:
                self.fail(f"{path}:{number}: {error} in {line[:120]!r}")
                continue
            if value is not None:
                values.append(value)
        if before is not None and self._failed == failed:
            before.text, before.values = text, values
        return values

    def parsed(self, path: Path, parse: Callable[[str], T | None]) -> T | None:
        """Return what `parse` makes of the only line of `path`; None, and a note, when there is no sound one."""
        values = self.lines(path, parse)
        return values[0] if values else None

    def first(self, items: Sequence[T], most: int, what: str) -> Sequence[T]:
        """Return at most `most` of `items`; those left out are a failure, because silence would look complete."""
        if len(items) > most:
            self.fail(f"{len(items) - most} {what} beyond the first {most} left out")
        return items[:most]

    def outcome(self) -> Outcome:
        """Return failed when anything failed, absent when there was nothing at all, else ok."""
        if self._failed:
            more = self._failed - len(self._failures)
            tail = f"; and {more} more" if more > 0 else ""
            return Failed("; ".join(self._failures) + tail, tuple(self._samples))
        if not self._samples:
            return Absent("; ".join(self._missing[:FAILURES_MAX]) or "the source is empty")
        return Ok(tuple(self._samples))

    def _note(self, path: Path, error: OSError) -> None:
        reason = f"{path}: {error.strerror or error}"
        if error.errno in NOT_THERE:
            self.lack(reason)
        else:
            self.fail(reason)
