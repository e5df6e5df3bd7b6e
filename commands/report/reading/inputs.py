"""Finds what a report is made of, in a run folder or in a recording of the daemon, and reads its records rank by rank.

A folder is what `attach(run_dir=...)` leaves (`rank<r>.jsonl`) and what the demo adds: losses, the daemon's last
answer, a recording.  A recording alone is the last minutes of one node and of all jobs on it.  Nothing that is found is
trusted: file names must match as a whole, and a link whose target is not there is an error that says so.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, get_args

from pacecar.records import JobRecord
from pacecar.records.rank_file import (
    LINE_BYTES_MAX,
    NOT_A_RECORD,
    PIECE_BYTES_MAX,
    RankFile,
    decode,
    rank_files,
)
from pacecar.records.recording import Recording, RecordingError, Tick, read_recording

from .notices import ReportError, ReportNotices

__all__ = ["Inputs", "Row", "find_inputs"]

RECORDINGS_MAX = 256
"""Recordings of one run: of as many nodes, or of as many triggers."""

PIECES_BYTES = 32 << 20
"""How much of all ranks' files together is in memory at a time."""

PIECE_BYTES_MIN = 16 * 1024
"""Read at a time where there are thousands of ranks; it still holds some records."""

KNOWN_KINDS = frozenset(str(struct.__struct_config__.tag).encode() for struct in get_args(JobRecord))

LATE_KINDS = frozenset({b"step", b"vitals"})
"""Kinds of records that make up nearly all of a file; the first reading skips them, the second reads only them."""

_KIND = re.compile(rb'"type"\s*:\s*"([^"\\]{1,64})"')

Row = tuple[int, int, int, JobRecord]
"""Rank, life (how often the rank's job had been attached before), line number, record."""


class RankInput(NamedTuple):
    """`rank<r>.jsonl` of one rank, as far as it went when the report began, so that both readings see the same."""

    path: Path
    rank: int
    bytes_end: int
    piece_bytes: int

    @property
    def place(self) -> str:
        """Return how the file is named in messages."""
        return self.path.name


@dataclass(frozen=True)
class Inputs:
    """What a report is made of.  `name` is for people, `folder` is where outputs go by default.

    `recording` is there when it was all that was given; `recordings` are beside the records, for what hosts saw.
    """

    name: str
    folder: Path
    files: tuple[RankInput, ...] = ()
    recording: Recording | None = None
    recordings: tuple[Path, ...] = ()
    metrics: Path | None = None
    losses: Path | None = None
    notices: ReportNotices = field(default_factory=ReportNotices)

    def told(self) -> Iterator[Row]:
        """Yield all records but steps and vitals; what cannot be read becomes a notice."""
        for file in self.files:
            yield from _rows(file, self.notices, late=False)
        for rank, record in self._recorded():
            yield rank, 0, 0, record

    def measured(self, notices: ReportNotices | None = None) -> list[Iterator[Row]]:
        """Return the steps and vitals of each rank, as iterators that may be advanced side by side.

        A caller that only looks ahead gives `notices` of its own, or faults would be counted twice.
        """
        if self.recording is None:
            told = self.notices if notices is None else notices
            return [_rows(file, told, late=True) for file in self.files]
        ranks: dict[int, list[JobRecord]] = {}
        for rank, record in self._recorded():
            ranks.setdefault(rank, []).append(record)  # some minutes of one node: bounded by the recorder
        return [iter([(rank, 0, 0, record) for record in records]) for rank, records in sorted(ranks.items())]

    def _recorded(self) -> Iterator[tuple[int, JobRecord]]:
        if self.recording is None:
            return
        for hello in self.recording.header.hellos:
            yield hello.rank, hello
        try:
            for _, record in self.recording.records():
                yield _rank_of(record), record
        except RecordingError as error:
            self.notices.add(self.recording.path.name, "chunk", str(error))

    def ticks(self) -> Iterator[tuple[str, Tick]]:
        """Yield (host, tick) of all recordings, each moment of a host once, one file in memory at a time."""
        latest: dict[str, int] = {}
        for recording in self._opened():
            host = recording.header.host
            try:
                for tick in recording.ticks():
                    # Each file holds the minutes before its trigger, so files of a host overlap.
                    if tick.wall_ns > latest.get(host, -1):
                        latest[host] = tick.wall_ns
                        yield host, tick
            except RecordingError as error:
                self.notices.add(recording.path.name, "chunk", str(error))

    def _opened(self) -> Iterator[Recording]:
        if self.recording is not None:
            yield self.recording
        for path in self.recordings:
            try:
                recording = read_recording(path, salvage=True)
            except RecordingError as error:
                self.notices.add(path.name, "recording", str(error))
                continue
            if recording.problem is not None:
                self.notices.add(path.name, "damaged", recording.problem)
            yield recording


def _rank_of(record: JobRecord) -> int:
    rank = getattr(record, "rank", 0)  # what is said of the whole job is said by rank 0
    return int(rank) if rank is not None else 0


def _rows(file: RankInput, notices: ReportNotices, *, late: bool) -> Iterator[Row]:
    """Yield the records of a file; in the `late` reading those of LATE_KINDS, in the first one all others.

    Lives are counted in both readings, by the hellos.  Each line is judged in one of the two.
    """
    lives = 0
    has_spoken = False
    reader = RankFile(file.path, piece_bytes=file.piece_bytes)
    try:
        for number, line in reader.lines(file.bytes_end):
            if line is None:
                if not late:
                    text = f"line {number}: longer than {LINE_BYTES_MAX} bytes, no record"
                    notices.add(file.place, "long", text)
                continue
            kind = _kind_of(line)
            has_spoken = True
            if kind == b"hello":
                lives += 1
            if (kind in LATE_KINDS) is not late:
                continue
            try:
                record = decode(line)
            except NOT_A_RECORD as error:
                _refuse(file, notices, number, kind, error)
                continue
            told_rank = getattr(record, "rank", file.rank)
            if told_rank != file.rank and told_rank is not None:
                notices.add(file.place, "rank", f"line {number}: a record of rank {told_rank}; such are left out")
                continue
            yield file.rank, max(0, lives - 1), number, record
    except OSError as error:
        notices.add(file.place, "read", f"{file.path}: cannot be read: {error.strerror or error}")
        return
    if late:
        return
    if reader.rest.strip():
        text = f"line {reader.number + 1}: the last line is cut off: the job was ended, or still runs"
        notices.add(file.place, "cut", text, is_damage=False)
    if not has_spoken:
        notices.add(file.place, "empty", "the file is empty" if file.bytes_end == 0 else "not one whole line")


def _kind_of(line: bytes) -> bytes | None:
    """Return the tag of the record in `line`, which stands first in what we write; None: it has none."""
    found = _KIND.search(line)
    return None if found is None else found[1]


def _refuse(file: RankInput, notices: ReportNotices, number: int, kind: bytes | None, error: Exception) -> None:
    if kind is not None and kind not in KNOWN_KINDS:
        name = kind.decode("utf-8", "replace")
        text = f"line {number}: records of type {name!r} are unknown here (a newer pacecar?) and left out"
        notices.add(file.place, f"kind {name}", text, is_damage=False)
    else:
        notices.add(file.place, "malformed", f"line {number}: not a record: {error}")


def find_inputs(run: Path, extra_recordings: tuple[Path, ...] = ()) -> Inputs:
    """Return what lies at `run`.

    Raises:
        ReportError: nothing is there, or nothing that a report could be made of.
    """
    try:
        if run.is_symlink() and not run.exists():
            raise ReportError(f"{run}: a link to {run.readlink()}, which is not there")
        if not run.exists():
            raise ReportError(f"{run}: no such run folder or recording")
        run = run.resolve()
    except OSError as error:
        raise ReportError(f"{run}: cannot be read: {error.strerror or error}") from error
    return _of_recording(run, extra_recordings) if run.is_file() else _of_folder(run, extra_recordings)


def _of_recording(run: Path, more: tuple[Path, ...]) -> Inputs:
    try:
        recording = read_recording(run, salvage=True)
    except RecordingError as error:
        raise ReportError(str(error)) from error
    inputs = Inputs(run.name, run.parent, recording=recording, recordings=more)
    if recording.problem is not None:
        inputs.notices.add(run.name, "damaged", recording.problem)
    return inputs


def _of_folder(run: Path, more: tuple[Path, ...]) -> Inputs:
    notices = ReportNotices()
    try:
        names = {path.name for path in run.iterdir()}
        paths = rank_files(run)
    except OSError as error:
        raise ReportError(f"{run}: cannot be read: {error.strerror or error}") from error
    files = []
    piece_bytes = min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, PIECES_BYTES // max(1, len(paths))))
    for rank, path in paths.items():
        try:
            status = path.stat()
        except OSError as error:
            notices.add(path.name, "read", f"{path}: cannot be read: {error.strerror or error}")
            continue
        if stat.S_ISREG(status.st_mode):
            files.append(RankInput(path, rank, status.st_size, piece_bytes))
        else:
            notices.add(path.name, "read", f"{path}: not a file")
    if not files:
        said = f": {notices.list()[0].text}" if notices.list() else ""
        raise ReportError(f"{run}: no rank<r>.jsonl that can be read, so this is no run folder{said}")
    found = [path for folder in (run, run / "recordings") for path in folder.glob("*.recording")]
    # Their names begin with the time at which they were written.
    found.sort(key=lambda path: path.name)
    if len(found) > RECORDINGS_MAX:
        text = f"{len(found)} recordings, the last {RECORDINGS_MAX} are read"
        notices.add(run.name, "recordings", text, is_damage=False)
    return Inputs(
        run.name,
        run,
        tuple(files),
        recordings=(*found[-RECORDINGS_MAX:], *more),
        metrics=run / "metrics.txt" if "metrics.txt" in names else None,
        losses=run / "losses.jsonl" if "losses.jsonl" in names else None,
        notices=notices,
    )
