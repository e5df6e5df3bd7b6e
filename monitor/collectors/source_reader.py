"""Defines a collector, and reads its files so that numbers, missing sources and broken ones stay apart.

One `try` around everything would lose the whole machine to the first odd line.  Here each line and each file stands
alone: what can be read becomes a sample; what does not exist is noted as missing, which is healthy; what cannot be
understood is a failure that names the file and the line and loses nothing else.  A collector that read anything is ok,
and reports how much it could not read.

Left out: what the numbers mean; each collector knows that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pacecar.kernel_files.reader import NOT_THERE, KernelFiles, lines_of, whole
from pacecar.records import Absent, Failed, Ok, Outcome, Sample

from ..catalog_sample import sample

__all__ = ["FAILURES_MAX", "CachedReading", "Collector", "ParsedLines", "SourceReading", "bounded"]

FAILURES_MAX = 8
"""Reasons spelled out in one outcome; further ones are counted, so that a log line stays a line."""

T = TypeVar("T")


class Collector(Protocol):
    """Reads one source.  Called by one thread at a time, never by a scrape.

    A collector may also have:

    - `close()`, which releases what it opened;
    - `is_rarely_read = True` where it has only totals and levels, which have no peaks to miss and are in no chart: it
      is read only at ticks whose result will be looked at;
    - `collect_fast()`, called at the other ticks instead of `collect`, which leaves such details out;
    - `glance()`, called up to ten times a second between ticks, which returns samples of the windowed metrics, as
      cheaply as possible.  It leaves out what it cannot read: the next tick meets the same fault and reports it;
    - `is_glance_due`, a property that is False while `glance` would read nothing; any thread may read it;
    - `note_refused(refusals)`, called after each reading with the samples that cannot be true.
    """

    @property
    def name(self) -> str:
        """The collector's name: a label of the daemon's own metrics and the word in [daemon] disable."""

    def collect(self) -> Outcome:
        """Read the source once.  Operating errors are not raised: they are the outcome."""


class CachedReading(Generic[T]):
    """A value that rarely changes and costs a file or more: read at the first of every `ticks` collects, then kept.

    After a reading with a new failure the next tick reads again, so that a passing error is over soon.  A reading that
    keeps failing is kept like any other.  What was missing or failed is noted at each tick, so that the outcome stays
    the same.
    """

    def __init__(self, ticks: int) -> None:
        self._ticks = ticks
        self._left = 0
        self._kept: T | None = None
        self._missing: tuple[str, ...] = ()
        self._failed: tuple[int, tuple[str, ...]] = (0, ())

    def get(self, reading: SourceReading, read: Callable[[], T]) -> T:
        """Return the cached value, or what `read` returns; `read` notes its failures in `reading`."""
        if self._left > 0 and self._kept is not None:
            self._left -= 1
            for reason in self._missing:
                reading.note_missing(reason)
            reading.repeat_failures(*self._failed)
            return self._kept
        failures, reasons, missing = reading.failures, len(reading.reasons), len(reading.missing)
        failed_before, _ = self._failed
        self._kept = read()
        self._missing = reading.missing[missing:]
        self._failed = (reading.failures - failures, reading.reasons[reasons:])
        self._left = 0 if reading.failures != failures and not failed_before else self._ticks - 1
        return self._kept


class ParsedLines(Generic[T]):
    """The lines of a file as last parsed, with its text; the same text is not parsed again.

    For long files that hardly change, such as the list of mounts.  A text with a failure is not cached.
    """

    __slots__ = ("text", "values")

    def __init__(self) -> None:
        self.text: str | None = None
        self.values: list[T] = []


class SourceReading:
    """One tick of one collector: collects samples, gaps and failures, and ends as an outcome."""

    def __init__(self, files: KernelFiles) -> None:
        self._files = files
        self._samples: list[Sample] = []
        self._missing: list[str] = []
        self._failures: list[str] = []
        self._failed = 0

    @property
    def failures(self) -> int:
        """The number of failures so far."""
        return self._failed

    @property
    def reasons(self) -> tuple[str, ...]:
        """The failures so far in words, at most FAILURES_MAX."""
        return tuple(self._failures)

    @property
    def missing(self) -> tuple[str, ...]:
        """What was missing so far, in words."""
        return tuple(self._missing)

    def add(self, metric: str, value: int | float, *labels: str) -> None:
        """Add a value that was read."""
        self._samples.append(sample(metric, value, *labels))

    def number(self, where: str, text: str, metric: str, *labels: str, factor: int = 1) -> Sample | None:
        """Return the number in `text`, times `factor`, as a sample; note a failure and return None if it is invalid."""
        try:
            return sample(metric, whole(text) * factor, *labels)
        except ValueError as error:
            self.fail(f"{where}: {metric}: {error}")
            return None

    def add_number(self, where: str, text: str, metric: str, *labels: str, factor: int = 1) -> None:
        """Add what `number` returns: an invalid number loses no other of its row."""
        read = self.number(where, text, metric, *labels, factor=factor)
        if read is not None:
            self._samples.append(read)

    def add_all(self, samples: Iterable[Sample]) -> None:
        """Add the samples of an earlier reading: the same objects, so that later stages recognize them."""
        self._samples += samples

    def add_cached(self, kept: CachedReading[list[Sample]], read: Callable[[], list[Sample]]) -> None:
        """Add the cached samples, or what `read` returns when they are due."""
        self._samples += kept.get(self, read)

    def fail(self, reason: str) -> None:
        """Note something that exists and could not be read."""
        self._failed += 1
        if len(self._failures) < FAILURES_MAX:
            self._failures.append(reason)

    def repeat_failures(self, count: int, reasons: Sequence[str]) -> None:
        """Note `count` failures of a cached reading, with the `reasons` of the first of them."""
        self._failed += count
        self._failures += reasons[: FAILURES_MAX - len(self._failures)]

    def note_missing(self, reason: str) -> None:
        """Note something that does not exist, which is healthy."""
        self._missing.append(reason)

    def text(self, path: Path, has_none: Collection[int] = NOT_THERE) -> str | None:
        """Return the text of `path`; note the error and return None if it is missing or cannot be read."""
        try:
            return self._files.read(path)
        except OSError as error:
            self.note_error(path, error, has_none)
            return None

    def names(self, path: Path) -> list[str] | None:
        """Return the names in the folder `path`; note the error and return None if it is missing or cannot be read."""
        try:
            return self._files.names(path)
        except OSError as error:
            self.note_error(path, error)
            return None

    def lines(
        self,
        path: Path,
        parse: Callable[[str], T | None],
        *,
        skip: int = 0,
        only: tuple[str, ...] = ("",),
        before: ParsedLines[T] | None = None,
        has_none: Collection[int] = NOT_THERE,
    ) -> list[T]:
        """Return what `parse` makes of each line after the first `skip` that starts with one of `only`, without None.

        A line for which `parse` raises ValueError or IndexError is a failure that names it; the others still count.
        With `before` the same text is parsed once; the result then belongs to `before`.
        """
        text = self.text(path, has_none)
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

    def numbered(self, path: Path, *, skip: int = 0) -> Iterator[tuple[str, str]]:
        """Yield each line of `path` after the first `skip` as (location, line): for rows of many numbers."""
        for number, line in enumerate(lines_of(self.text(path) or "")[skip:], start=skip + 1):
            yield f"{path}:{number}", line

    def parsed(
        self, path: Path, parse: Callable[[str], T | None], *, has_none: Collection[int] = NOT_THERE
    ) -> T | None:
        """Return what `parse` makes of the only line of `path`; None, with a note, if there is no valid one.

        `has_none` are the errors by which this source says that it has no value.
        """
        values = self.lines(path, parse, has_none=has_none)
        return values[0] if values else None

    def first(self, items: Sequence[T], most: int, what: str) -> Sequence[T]:
        """Return at most `most` of `items`; leaving out the rest is a failure, because silence would look complete."""
        if len(items) > most:
            self.fail(f"{len(items) - most} {what} beyond the first {most} left out")
        return items[:most]

    def outcome(self) -> Outcome:
        """Return ok if anything was read, with the failures; else failed, or absent if there was nothing at all."""
        reason = bounded(self._failures, self._failed)
        if self._samples:
            return Ok(tuple(self._samples), self._failed, reason)
        if self._failed:
            return Failed(reason)
        return Absent("; ".join(self._missing[:FAILURES_MAX]) or "the source is empty")

    def note_error(self, path: Path | str, error: OSError, has_none: Collection[int] = NOT_THERE) -> None:
        """Note that `path` is missing, if the error is one of `has_none`, or could not be read."""
        reason = f"{path}: {error.strerror or error}"
        if error.errno in has_none:
            self.note_missing(reason)
        else:
            self.fail(reason)


def bounded(reasons: Sequence[str], count: int | None = None) -> str:
    """Return `reasons` as one line: the first FAILURES_MAX, and how many of the `count` in all follow."""
    more = (len(reasons) if count is None else count) - min(len(reasons), FAILURES_MAX)
    return "; ".join(reasons[:FAILURES_MAX]) + (f"; and {more} more" if more > 0 else "")
