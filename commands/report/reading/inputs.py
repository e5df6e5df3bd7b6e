"""Finds the inputs of a report, in a run folder or a recording of the daemon, and reads the records of each rank.

`attach(run_dir=...)` writes `rank<r>.jsonl` into a folder, and the demo adds losses, the daemon's last metrics page and
a recording.  A recording alone holds the last minutes of one node and of all its jobs.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple, get_args

from pacecar.records import JobHello, JobRecord
from pacecar.records.rank_file import (
    LINE_BYTES_MAX,
    NOT_A_RECORD,
    PIECE_BYTES_MAX,
    RankFile,
    decode,
    rank_files,
)
from pacecar.records.recording import Recording, RecordingError, Tick, read_recording

from .lives import lives_of
from .notices import ReportError, ReportNotices

__all__ = ["Inputs", "Row", "find_inputs"]

RECORDINGS_MAX = 256
"""Recordings of one run: one for each node and trigger."""

PIECES_BYTES = 32 << 20
"""Memory for pieces of all ranks' files together."""

PIECE_BYTES_MIN = 16 * 1024
"""Smallest piece, for thousands of ranks; it still holds several records."""

KNOWN_KINDS = frozenset(str(struct.__struct_config__.tag).encode() for struct in get_args(JobRecord))

LATE_KINDS = frozenset({b"step", b"vitals"})
"""Kinds that make up nearly all of a file; the first reading skips them, the second reads nothing else."""

_KIND = re.compile(rb'"type"\s*:\s*"([^"\\]{1,64})"')

Row = tuple[int, int, int, JobRecord]
"""Rank, life (number of earlier attaches of the job on this rank), line number, record."""


class RankInput(NamedTuple):
    """`rank<r>.jsonl` of one rank, up to its size when the report began, so that both readings see the same.

    If each attempt has a folder of its own, `attempt` is the place of this one's among them.  `lives` are those that
    begin at its hellos, `first_life` is that of a file without any.
    """

    path: Path
    rank: int
    bytes_end: int
    piece_bytes: int
    attempt: int | None = None
    lives: Sequence[int] = ()
    first_life: int = 0

    @property
    def place(self) -> str:
        """The file's name in messages."""
        return self.path.name if self.attempt is None else f"{self.path.parent.name}/{self.path.name}"

    def life(self, hellos: int) -> int:
        """Return the life after so many hellos."""
        place = max(0, hellos - 1)
        return self.lives[place] if place < len(self.lives) else self.first_life + place


@dataclass(frozen=True)
class Inputs:
    """The inputs of a report.  `name` is its title, `folder` is where outputs go by default.

    `recording` holds the records if no folder was given; `recordings` add what the daemons of the hosts measured.
    """

    name: str
    folder: Path
    files: tuple[RankInput, ...] = ()
    recording: Recording | None = None
    recordings: tuple[Path, ...] = ()
    metrics: Path | None = None
    losses: Path | None = None
    notices: ReportNotices = field(default_factory=ReportNotices)

    def events(self) -> Iterator[Row]:
        """Yield all records except steps and vitals; unreadable lines become notices."""
        for file in self.files:
            yield from _rows(file, self.notices, late=False)
        for rank, record in self._recorded():
            yield rank, 0, 0, record

    def steps_by_rank(self, notices: ReportNotices | None = None) -> list[Iterator[Row]]:
        """Return an iterator over the steps and vitals of each rank.

        A caller that only looks ahead passes its own `notices`; otherwise faults would count twice.
        """
        if self.recording is None:
            told = self.notices if notices is None else notices
            files: dict[int, list[RankInput]] = {}
            for file in self.files:
                files.setdefault(file.rank, []).append(file)
            return [chain.from_iterable(_rows(file, told, late=True) for file in own) for own in files.values()]
        ranks: dict[int, list[JobRecord]] = {}
        for rank, record in self._recorded():
            ranks.setdefault(rank, []).append(record)  # minutes of one node, bounded by the recorder
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
        """Yield (host, tick) of all recordings, without duplicates, with one file in memory at a time."""
        latest: dict[str, int] = {}
        for recording in self._opened():
            host = recording.header.host
            try:
                for tick in recording.ticks():
                    # Files of a host overlap: each holds the minutes before its trigger.
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
    rank = getattr(record, "rank", 0)  # rank 0 writes the records about the whole job
    return int(rank) if rank is not None else 0


def _rows(file: RankInput, notices: ReportNotices, *, late: bool) -> Iterator[Row]:
    """Yield the records of a file: those of LATE_KINDS if `late`, else all others.

    Both readings count lives by the hellos.  A faulty line causes a notice in one of the two only.
    """
    lives = 0
    has_spoken = False
    reader = RankFile(file.path, piece_bytes=file.piece_bytes)
    try:
        for number, line in reader.lines(file.bytes_end):
            if line is None:
                if not late:
                    text = f"line {number}: longer than {LINE_BYTES_MAX} bytes, not a record"
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
                notices.add(file.place, "rank", f"line {number}: a record of rank {told_rank}, left out")
                continue
            yield file.rank, file.life(lives), number, record
    except OSError as error:
        notices.add(file.place, "read", f"{file.path}: cannot be read: {error.strerror or error}")
        return
    if late:
        return
    if reader.rest.strip():
        text = f"line {reader.number + 1}: the last line is cut off: the job was killed, or is still running"
        notices.add(file.place, "cut", text, is_damage=False)
    if not has_spoken:
        notices.add(file.place, "empty", "the file is empty" if file.bytes_end == 0 else "not one whole line")


def _with_lives(files: Iterable[RankInput]) -> Iterator[RankInput]:
    """Yield the files with the lives in them; those of a later folder go on from those before."""
    first = 0
    for attempt, its in groupby(files, key=lambda file: file.attempt):
        together = list(its)
        is_one = attempt is None and len(together) == 1  # then hellos are counted while it is read
        lives = [[]] if is_one else lives_of([_hellos(file) for file in together])
        for file, own in zip(together, lives, strict=True):
            yield file._replace(lives=[first + life for life in own], first_life=first)
        first += 1 + max((life for own in lives for life in own), default=0)


def _hellos(file: RankInput) -> list[JobHello | None]:
    found: list[JobHello | None] = []
    try:
        for _, line in RankFile(file.path, piece_bytes=file.piece_bytes).lines(file.bytes_end):
            if line is None or b'"hello"' not in line or _kind_of(line) != b"hello":
                continue
            try:
                hello = decode(line)
            except NOT_A_RECORD:
                hello = None
            found.append(hello if isinstance(hello, JobHello) else None)
    except OSError:
        pass  # said when its records are read
    return found


def _kind_of(line: bytes) -> bytes | None:
    """Return the tag of the record in `line`, which pacecar writes first; None if there is none."""
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
    """Return the inputs at `run`.

    Raises:
        ReportError: `run` does not exist, or is not a run folder or recording.
    """
    try:
        if run.is_symlink() and not run.exists():
            raise ReportError(f"{run}: a link to {run.readlink()}, which does not exist")
        if not run.exists():
            raise ReportError(f"{run}: no such run folder or recording")
        run = run.resolve()
    except OSError as error:
        raise ReportError(f"{run}: cannot be read: {error.strerror or error}") from error
    return _from_recording(run, extra_recordings) if run.is_file() else _from_folder(run, extra_recordings)


def _from_recording(run: Path, more: tuple[Path, ...]) -> Inputs:
    try:
        recording = read_recording(run, salvage=True)
    except RecordingError as error:
        raise ReportError(str(error)) from error
    inputs = Inputs(run.name, run.parent, recording=recording, recordings=more)
    if recording.problem is not None:
        inputs.notices.add(run.name, "damaged", recording.problem)
    return inputs


def _attempt_folders(run: Path, notices: ReportNotices) -> list[dict[int, Path]]:
    """Return rank -> file of each folder in `run` that has any, in the order in which their jobs started."""
    started = []
    for folder in sorted(run.iterdir()):
        try:
            files = rank_files(folder) if folder.is_dir() else {}
        except OSError as error:
            notices.add(folder.name, "read", f"{folder}: cannot be read: {error.strerror or error}")
            continue
        if files:
            at = next((at for file in files.values() if (at := _started_ns(file)) is not None), None)
            started.append((at, _with_numbers(folder.name), files))
    # Without a readable hello, the name must do.
    is_told = all(at is not None for at, _, _ in started)
    return [files for _, _, files in sorted(started, key=lambda one: (one[0] or 0 if is_told else 0, one[1]))]


def _with_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key by which attempt-10 follows attempt-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _started_ns(path: Path) -> int | None:
    try:
        for _, line in RankFile(path).lines():
            record = None if line is None else decode(line)
            return record.started_wall_ns if isinstance(record, JobHello) else None
    except (OSError, *NOT_A_RECORD):
        pass
    return None


def _from_folder(run: Path, more: tuple[Path, ...]) -> Inputs:
    notices = ReportNotices()
    try:
        names = {path.name for path in run.iterdir()}
        paths = rank_files(run)
        several = [] if paths else _attempt_folders(run, notices)
    except OSError as error:
        raise ReportError(f"{run}: cannot be read: {error.strerror or error}") from error
    files = []
    found_at: list[tuple[int | None, int, Path]] = [(None, *found) for found in paths.items()]
    found_at += [(place, *found) for place, folder in enumerate(several) for found in folder.items()]
    piece_bytes = min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, PIECES_BYTES // max(1, len(found_at))))
    for attempt, rank, path in found_at:
        try:
            status = path.stat()
        except OSError as error:
            notices.add(path.name, "read", f"{path}: cannot be read: {error.strerror or error}")
            continue
        if stat.S_ISREG(status.st_mode):
            files.append(RankInput(path, rank, status.st_size, piece_bytes, attempt))
        else:
            notices.add(path.name, "read", f"{path}: not a file")
    if not files:
        said = f": {notices.list()[0].text}" if notices.list() else ""
        raise ReportError(f"{run}: not a run folder: no readable rank<r>.jsonl{said}")
    files = list(_with_lives(files))
    found = [path for folder in (run, run / "recordings") for path in folder.glob("*.recording")]
    # Names begin with the time of writing.
    found.sort(key=lambda path: path.name)
    if len(found) > RECORDINGS_MAX:
        text = f"{len(found)} recordings: only the last {RECORDINGS_MAX} are read"
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
