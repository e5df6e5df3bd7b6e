"""Reads NCCL's log: the shape of its lines, and how many collectives each rank launched on each communicator.

NCCL_DEBUG=INFO with COLL in NCCL_DEBUG_SUBSYS logs a line for each call.  Its opCount cannot be compared between ranks:
it counts launches with network traffic only since 2.27 (on one node it stays 0), and before that whole groups of calls.
So lines are counted: collectives, but not sends and receives, of which each rank has its own, nor what CUDA graphs
replay.  A line says that a rank launched a call, not that it completed.  Where ranks share a file their lines may be
cut into each other; a process of which a line is torn is left out, since its count may be too low.

A line names a communicator by a pointer, and INIT lines, which are on by default, say which one that is: by its commId,
or for a split by its parent, how many splits came before, and the color.  Without them ranks cannot be compared.

Source: src/enqueue.cc, src/init.cc, src/proxy.cc and src/debug.cc in NVIDIA/nccl, 2.18.3 to 2.30.7.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import plural
from pacecar.nccl_ras import some_of

__all__ = [
    "Launched",
    "LaunchedCommunicator",
    "debug_files",
    "is_debug_log",
    "launch_words",
    "log_lines",
    "read_launches",
]

FILE_BYTES_MAX = 64 << 20
"""Of one file: 300 000 calls.  Of a larger one nothing is counted, since ranks could not be compared."""

BYTES_MAX = 256 << 20
"""Of all files together: eight seconds."""

FILES_MAX = 1024

SENTENCES_MAX = 4
"""Communicators whose ranks differ and are named; they are sorted by size."""

LINE_BYTES_MAX = 64 * 1024
CALL_BYTES_MAX = 2048
"""NCCL's own lines have less than 1 kB, and a path."""

COMMUNICATORS_MAX = 1024
"""Of one process."""

_PROCESS = rb"([\w.-]+):(\d+):\d+ \[\d+\] NCCL "
_PROCESS_OF = re.compile(_PROCESS)
_ANY = re.compile(rb"^.{0,64}[\w.-]+:\d+:\d+ \[\d+\] (?:.{1,300} )?NCCL (?:INFO|WARN) ", re.MULTILINE)
_CALL = re.compile(
    _PROCESS
    + rb"INFO (\w+): opCount \w+ sendbuff \S+ recvbuff \S+ count (\d+) datatype \S+ op \S+ root \S+"
    + rb" comm (0x[0-9a-f]+) \[nranks=\d+\]"
)
_INIT = re.compile(
    _PROCESS + rb"INFO .*\bcomm (0x[0-9a-f]+) rank (\d+) nranks (\d+) .*busId [0-9a-f]+"
    rb"(?: parent (0x[0-9a-f]+)(?: (?:split|child)Count (\d+))? color (-?\d+) key -?\d+)?(?: commId (0x[0-9a-f]+))?"
    rb" ?- Init (START|COMPLETE)"
)
_PEER_CALLS = (b"Send", b"Recv")


class Launched(NamedTuple):
    """What a rank's process launched on a communicator; `last` is its last call and the line, empty without any."""

    host: str
    pid: int
    calls: int
    last: str


class LaunchedCommunicator(NamedTuple):
    """A communicator, and the ranks whose log was read, numbered within it."""

    name: str
    size: int
    ranks: Mapping[int, Launched]


class _Own:
    """One process's handle of a communicator."""

    def __init__(self, identity: tuple[object, ...], rank: int, size: int) -> None:
        self.identity, self.rank, self.size = identity, rank, size
        self.count = 0
        self.last: tuple[bytes, bytes, Path, int] | None = None


def debug_files(pattern: str, pids: Container[int], host: str | None = None) -> list[Path]:
    """Return the existing files that NCCL_DEBUG_FILE=`pattern` names for processes on `host`, None for any.

    Only files: NCCL may as well log to a terminal or a pipe.
    """
    short = None if host is None else host.partition(".")[0]
    said = {
        "%%": ("%", "%"),
        "%p": ("*", r"(\d{1,9})"),
        "%h": ("*", r"[^/]*") if short is None else (glob.escape(short), re.escape(short)),
    }
    pieces = [said.get(piece, (glob.escape(piece), re.escape(piece))) for piece in re.split("(%.)", pattern)]
    is_named = re.compile("".join(named for _, named in pieces))
    found = []
    for name in sorted(glob.glob("".join(wild for wild, _ in pieces))):
        match = is_named.fullmatch(name)
        if match is not None and all(int(pid) in pids for pid in match.groups()) and Path(name).is_file():
            found.append(Path(name))
    return found


def is_debug_log(data: bytes) -> bool:
    """Return whether `data`, the beginning of a file, has a line of NCCL's."""
    return _ANY.search(data) is not None


def log_lines(stream: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of `most_bytes`, cut to LINE_BYTES_MAX, which no line of NCCL's reaches."""
    room, is_new = most_bytes, True
    while room > 0 and (raw := stream.readline(min(room, LINE_BYTES_MAX))):
        room -= len(raw)
        if is_new:
            yield raw
        is_new = raw.endswith(b"\n")


def read_launches(
    paths: Sequence[Path], bytes_max: int = BYTES_MAX
) -> tuple[tuple[LaunchedCommunicator, ...], tuple[str, ...]]:
    """Return the communicators in these logs, the largest first, and notes on what was not read; raises nothing."""
    counts, notes = _Counts(), []
    if len(paths) > FILES_MAX:
        notes.append(f"{len(paths)} logs of NCCL: only the first {FILES_MAX} were read")
    for path in paths[:FILES_MAX]:
        try:
            with path.open("rb") as stream:
                size = stream.seek(0, 2)
                if size > min(FILE_BYTES_MAX, bytes_max):
                    notes.append(f"{path}: not read: {size >> 20} MiB are too many to count calls in")
                    continue
                bytes_max -= size
                stream.seek(0)
                for number, line in enumerate(log_lines(stream, size), start=1):
                    if len(line) <= CALL_BYTES_MAX:
                        counts.add(line, path, number)
        except OSError as error:
            notes.append(f"{path}: {error.strerror or error}")
    return counts.communicators(), (*notes, *counts.notes())


class _Counts:
    """The calls of all processes: (host, pid) -> pointer -> handle."""

    def __init__(self) -> None:
        self._own: dict[tuple[bytes, bytes], dict[bytes, _Own]] = {}
        self._torn: set[tuple[bytes, bytes]] = set()
        self._torn_lines = 0
        self._is_all_torn = False

    def add(self, line: bytes, path: Path, number: int) -> None:
        """Count the call in `line`, if it has one."""
        if b"- Init " in line:
            self._add_handle(line)
        elif b": opCount " in line or b" [nranks=" in line or line.count(b" NCCL INFO ") > 1:
            call = _CALL.search(line)
            of = None if call is None else self._own.get((call[1], call[2]), {}).get(call[5])
            if call is None or of is None or line.count(b" NCCL ") > 1 or not line.endswith(b"\n"):
                whose = [process for process in _PROCESS_OF.findall(line) if process in self._own]
                self._is_all_torn |= len(whose) < max(1, line.count(b" NCCL "))
                self._torn.update(whose)
                self._torn_lines += 1
            else:
                of.count += call[3] not in _PEER_CALLS
                of.last = call[3], call[4], path, number

    def _add_handle(self, line: bytes) -> None:
        found = _INIT.search(line)
        if found is None:
            return
        host, pid, pointer, rank, size, parent, before, color, number, when = found.groups()
        handles = self._own.setdefault((host, pid), {})
        identity: tuple[object, ...] = (number,)
        if parent is not None:
            if parent not in handles:
                return
            identity = handles[parent].identity, before, color
        # An address is used again once its communicator is destroyed.
        is_new = when == b"START" or pointer not in handles or handles[pointer].identity != identity
        if is_new and len(handles) < COMMUNICATORS_MAX:
            handles[pointer] = _Own(identity, int(rank[:9]), int(size[:9]))

    def notes(self) -> Iterator[str]:
        """Yield what could not be counted."""
        if self._torn_lines:
            what = "cut off or into each other" if self._own else "of calls, without INIT lines (NCCL_DEBUG_SUBSYS)"
            whose = some_of([pid.decode() for _, pid in sorted(self._torn)])
            left = "nothing is compared" if self._is_all_torn else f"pids {whose} are left out"
            yield f"NCCL's logs: {plural(self._torn_lines, 'line')} {what}: {left}"

    def communicators(self) -> tuple[LaunchedCommunicator, ...]:
        """Return those with ranks that can be compared, the largest first."""
        grouped: dict[tuple[object, int], dict[int, Launched]] = {}
        twice = set()
        for (host, pid), handles in self._own.items():
            for one in () if self._is_all_torn or (host, pid) in self._torn else handles.values():
                ranks = grouped.setdefault((one.identity, one.size), {})
                if one.rank in ranks:  # made again, or splits that cannot be told apart
                    twice.add((one.identity, one.size))
                ranks[one.rank] = Launched(host.decode(), int(pid[:9]), one.count, _last_words(one.last))
        found = [
            LaunchedCommunicator(_name(identity), size, ranks)
            for (identity, size), ranks in grouped.items()
            if (identity, size) not in twice
        ]
        return tuple(sorted(found, key=lambda one: -one.size))


def launch_words(
    communicators: Iterable[LaunchedCommunicator], rank_of: Callable[[Launched], int | None] = lambda _: None
) -> Iterator[str]:
    """Yield sentences on ranks that launched fewer collectives; `rank_of` gives a process's rank in the job.

    If several launched and no counts differ, one sentence says so, since the log cannot see a hang then.
    """
    are_compared, told = False, 0
    for one in communicators:
        most = max((rank.calls for rank in one.ranks.values()), default=0)
        are_compared |= len(one.ranks) > 1 and most > 0
        behind = [
            _words(number, rank, rank_of(rank)) for number, rank in sorted(one.ranks.items()) if rank.calls < most
        ]
        if behind and told < SENTENCES_MAX:
            told += 1
            seen = "" if len(one.ranks) == one.size else f" ({len(one.ranks)} of them have a log here)"
            who = f"communicator {one.name} of {plural(one.size, 'rank')}{seen}"
            yield f"NCCL's log: on {who} others launched {plural(most, 'collective')}, {some_of(behind)}"
    if are_compared and not told:
        yield "NCCL's log: all ranks launched as many collectives, so it cannot see who holds the job up"


def _words(number: int, rank: Launched, job_rank: int | None) -> str:
    of_job = "" if job_rank is None else f", which is rank {job_rank} of the job,"
    last = f", the last call {rank.last}" if rank.last else ""
    return f"rank {number} (pid {rank.pid} on {rank.host}){of_job} only {rank.calls}{last}"


def _last_words(last: tuple[bytes, bytes, Path, int] | None) -> str:
    if last is None:
        return ""
    operation, count, path, number = last
    return f"{operation.decode()} of {plural(int(count[:18]), 'element')} ({clean(path)}:{number})"


def _name(identity: object) -> str:
    """Return the words for a communicator: its commId, or whose part it is."""
    assert isinstance(identity, tuple), "made by _add_handle"
    if len(identity) == 1:
        return "without an id" if identity[0] is None else identity[0].decode()
    above, _, color = identity
    return f"{_name(above)} split {color.decode()}"
