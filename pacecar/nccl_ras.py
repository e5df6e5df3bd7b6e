"""Asks NCCL's RAS service which ranks answer, and how many collectives each rank has launched.

Since 2.24, the processes of an NCCL job form a network of their own, and one process on each node answers clients on
loopback (28028, or NCCL_RAS_ADDR).  A status asks all processes of the job, so it is asked for when something is wrong
and never regularly.  2.28.7 was the first to answer in JSON; older versions answer in prose, which is not read.

A count says that a rank launched a collective, not that it completed.  So one status can show ranks that differ for a
moment, and shows nothing wrong in a job that hangs with equal counts.  `compare` takes two, some time apart, and only
reports ranks whose process launched nothing on any communicator in between.  Even so a rank may be loading data, and
equal counts that stand still say nothing: sends, receives and what CUDA graphs replay are not counted.

Source of protocol and format: src/ras/client_support.cc in NVIDIA/nccl, 2.28.7 to 2.30.7.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pacecar.formatting.quantities import plural
from pacecar.records.ranges import Count, Rank, WorldSize

__all__ = [
    "RAS_PORT",
    "RasCommunicator",
    "RasError",
    "RasFinding",
    "RasMissingRank",
    "RasRank",
    "RasStatus",
    "ask_ras",
    "ask_ras_twice",
    "compare",
    "parse_ras",
    "ras_address",
    "some_of",
]

RAS_PORT = 28028

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""A rank takes about 500 bytes for each of its communicators."""

LINE_BYTES_MAX = 1024

RANKS_SHOWN = 4
"""Ranks that a sentence names."""

PAUSE_SECONDS = 2.0
"""Time between two statuses: longer than most steps, so that a rank at work is not taken for one that stands still."""

CONNECT_SECONDS = 1.0
COLLECT_SECONDS = 5
"""How long NCCL waits for a process that does not answer (RAS_COLLECTIVE_LEG_TIMEOUT); the reply then lists it."""

EXTRA_SECONDS = 5
"""How much longer it waits for others that wait for such a process (RAS_COLLECTIVE_EXTRA_TIMEOUT), times
NCCL_RAS_TIMEOUT_FACTOR."""

COLLECTIONS = 2
"""A status collects from all processes twice: who is there, and what their communicators are."""

_FACTOR = re.compile(r"[1-9][0-9]?")

# What RAS says is shown in a terminal and in commands, and whoever listens on its port may say anything.
_Host = Annotated[str, Meta(pattern=r"\A[\w.:%-]{1,255}\Z")]
_Hash = Annotated[str, Meta(pattern=r"\A[0-9a-fx:]{1,64}\Z")]
_Pid = Annotated[int, Meta(ge=-1, lt=1 << 31)]

_UNSEPARATED = re.compile(rb'("nvml_dev": -?\d+)(\s+"status")')
"""2.28.7 and 2.28.9 forget this comma wherever a rank is missing."""


class RasError(Exception):
    """RAS did not answer, or gave an answer that cannot be read; the message says which."""


class RasRank(msgspec.Struct, frozen=True):
    """A rank that answered; `collective_counts` is operation -> how many it has launched on this communicator.

    The `pid` is -1 and the `host` "unknown" where RAS does not know the process.
    """

    rank: Rank
    host: _Host
    pid: _Pid
    collective_counts: dict[str, Count]
    status: dict[str, Any] = {}

    @property
    def launched(self) -> int:
        """How many collectives of any kind the rank has launched."""
        return sum(self.collective_counts.values())


class RasMissingRank(msgspec.Struct, frozen=True):
    """A rank without a report; `status` says whether its process is `unresponsive` or `considered_dead`."""

    rank: Rank
    host: _Host
    pid: _Pid
    status: dict[str, Any] = {}

    @property
    def is_dead(self) -> bool:
        """Whether RAS has given the process up."""
        return self.status.get("considered_dead") is True

    @property
    def is_silent(self) -> bool:
        """Whether the process did not answer, or is given up; one that answered may only lack this communicator."""
        return self.is_dead or self.status.get("unresponsive") is True


class RasCommunicator(msgspec.Struct, frozen=True):
    """One communicator of the job; ranks are numbered within it."""

    hash: _Hash
    secondary_hash: _Hash
    size: WorldSize
    ranks: list[RasRank] = []
    missing_ranks: list[RasMissingRank] = []

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the communicator from one status to the next."""
        return self.hash, self.secondary_hash


class RasStatus(msgspec.Struct, frozen=True):
    """The answer to a status request."""

    nccl_version: str
    communicators: list[RasCommunicator] = []


_status = msgspec.json.Decoder(RasStatus)


class RasFinding(msgspec.Struct, frozen=True):
    """What two statuses say of one communicator of `size` ranks.

    `missing` did not answer either time.  `behind` is rank -> how many collectives it has launched, where others have
    launched `most`, and nobody launched any in between.  `pids` has the host and process of each rank named.
    """

    communicator: str
    size: int
    missing: tuple[RasMissingRank, ...]
    behind: Mapping[int, int]
    most: int
    pids: Mapping[int, tuple[str, int]]

    def __str__(self) -> str:
        return f"communicator {self.communicator} of {plural(self.size, 'rank')}"

    def rank_words(self, rank: int) -> str:
        """Return the words for one of its ranks: number, process and host."""
        host, pid = self.pids[rank]
        return f"rank {rank} (pid {pid} on {host})" if pid > 0 else f"rank {rank} (of an unknown process)"


def ras_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and port of this node's RAS, which NCCL_RAS_ADDR may set.

    Raises:
        RasError: NCCL_RAS_ADDR is not an address with a port.
    """
    text = environ.get("NCCL_RAS_ADDR")
    if not text:
        return "localhost", RAS_PORT
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise RasError(f"NCCL_RAS_ADDR={text}: not HOST:PORT")
    return host.strip("[]"), int(port)


def ask_ras(
    address: tuple[str, int], *, clock: Callable[[], float] = time.monotonic, environ: Mapping[str, str] = os.environ
) -> RasStatus | None:
    """Return the status of the job that answers at `address`; None if nothing listens there.

    Takes milliseconds in a healthy job, and COLLECTIONS times COLLECT_SECONDS or more where processes do not answer.
    `environ` is this process's: where the job has another NCCL_RAS_TIMEOUT_FACTOR, the answer may come too late.

    Raises:
        RasError: what listens is not RAS, is too old, is too slow, or sends what cannot be read.
    """
    place = f"NCCL's RAS at {address[0]}:{address[1]}"
    deadline = clock() + CONNECT_SECONDS
    try:
        connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
    except ConnectionRefusedError:
        return None
    except OSError as error:
        raise RasError(f"{place}: {error.strerror or error}") from error
    with connection:
        client = _Client(connection, place, clock)
        hello = client.ask(b"CLIENT PROTOCOL 2\n", deadline)
        if not hello.upper().startswith(b"SERVER PROTOCOL "):
            raise RasError(f"{place}: not RAS, it answers {_shown(hello)}")
        if client.ask(b"TIMEOUT %d\n" % COLLECT_SECONDS, deadline) != b"OK":
            raise RasError(f"{place}: refuses a timeout")
        said = client.ask(b"SET FORMAT json\n", deadline)
        if said != b"OK":
            raise RasError(f"{place}: has no JSON ({_shown(said)}); NCCL 2.28.7 was the first with it")
        return parse_ras(client.read_all(b"VERBOSE STATUS\n", clock() + _status_seconds(environ)), place)


def ask_ras_twice(
    address: tuple[str, int], *, pause: Callable[[float], object] = time.sleep
) -> tuple[RasFinding, ...] | None:
    """Return what is wrong with the job at `address`, by two statuses PAUSE_SECONDS apart; None if nothing listens.

    Raises:
        RasError: as for `ask_ras`.
    """
    first = ask_ras(address)
    if first is None:
        return None
    pause(PAUSE_SECONDS)
    second = ask_ras(address)
    return None if second is None else compare(first, second)


def some_of(ranks: Sequence[str]) -> str:
    """Return the words for ranks, of many the first RANKS_SHOWN."""
    more = len(ranks) - RANKS_SHOWN
    return ", ".join(ranks[:RANKS_SHOWN]) + (f", and {more} more" if more > 0 else "")


def _status_seconds(environ: Mapping[str, str]) -> float:
    """Return how long a status may take."""
    factor = environ.get("NCCL_RAS_TIMEOUT_FACTOR", "")
    return COLLECTIONS * (COLLECT_SECONDS + EXTRA_SECONDS * (int(factor) if _FACTOR.fullmatch(factor) else 1))


class _Client:
    """One connection, whose every read ends at a deadline."""

    def __init__(self, connection: socket.socket, place: str, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._place = place
        self._clock = clock
        self._rest = b""

    def ask(self, command: bytes, deadline: float) -> bytes:
        """Send `command` and return the line that answers it."""
        self._send(command)
        while b"\n" not in self._rest:
            if len(self._rest) > LINE_BYTES_MAX:
                raise RasError(f"{self._place}: not RAS, its first line does not end")
            more = self._receive(deadline)
            if not more:
                raise RasError(f"{self._place}: closed the connection")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.rstrip(b"\r")

    def read_all(self, command: bytes, deadline: float) -> bytes:
        """Send `command` and return all that follows until RAS closes the connection."""
        self._send(command)
        parts, size = [self._rest], len(self._rest)
        while more := self._receive(deadline):
            parts.append(more)
            size += len(more)
            if size > ANSWER_BYTES_MAX:
                raise RasError(f"{self._place}: answers with more than {ANSWER_BYTES_MAX >> 20} MiB")
        return b"".join(parts)

    def _send(self, command: bytes) -> None:
        try:
            self._connection.sendall(command)
        except OSError as error:
            raise RasError(f"{self._place}: {error.strerror or error}") from error

    def _receive(self, deadline: float) -> bytes:
        left = deadline - self._clock()
        try:
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            return self._connection.recv(1 << 16)
        except TimeoutError:
            raise RasError(f"{self._place}: does not answer in time") from None
        except OSError as error:
            raise RasError(f"{self._place}: {error.strerror or error}") from error


def parse_ras(answer: bytes, place: str = "NCCL's RAS") -> RasStatus:
    """Return the status in `answer`, RAS's JSON.

    Raises:
        RasError: it is cut off, or is something else.
    """
    reason: Exception | None = None
    for text in (answer, _UNSEPARATED.sub(rb"\1,\2", answer)):
        try:
            return _status.decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            reason = error
    raise RasError(f"{place}: {len(answer)} bytes that cannot be read ({reason})")


def compare(first: RasStatus, second: RasStatus) -> tuple[RasFinding, ...]:
    """Return what is wrong with communicators in both statuses, the largest communicator first.

    A communicator in which any rank launched something in between is working and is left out unless a rank is missing.
    """
    before = {one.key: one for one in first.communicators}
    were = _launched(first)
    moved = {process for process, count in _launched(second).items() if count != were.get(process)}
    found = [_compared(before[now.key], now, moved) for now in second.communicators if now.key in before]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: -one.size))


def _launched(status: RasStatus) -> dict[tuple[str, int], int]:
    """Return process -> how many collectives it has launched on all its communicators."""
    counts: dict[tuple[str, int], int] = {}
    for rank in (rank for one in status.communicators for rank in one.ranks):
        counts[rank.host, rank.pid] = counts.get((rank.host, rank.pid), 0) + rank.launched
    return counts


def _compared(before: RasCommunicator, now: RasCommunicator, moved: AbstractSet[tuple[str, int]]) -> RasFinding | None:
    was_silent = {rank.rank for rank in before.missing_ranks if rank.is_silent}
    missing = tuple(rank for rank in now.missing_ranks if rank.is_silent and rank.rank in was_silent)
    counts = {rank.rank: rank.launched for rank in now.ranks}
    stands_still = counts == {rank.rank: rank.launched for rank in before.ranks}
    most = max(counts.values(), default=0)
    late = [rank for rank in now.ranks if stands_still and rank.launched < most and (rank.host, rank.pid) not in moved]
    if not missing and not late:
        return None
    named: Sequence[RasRank | RasMissingRank] = (*missing, *late)
    return RasFinding(
        communicator=now.hash,
        size=now.size,
        missing=missing,
        behind={rank.rank: rank.launched for rank in late},
        most=most,
        pids={rank.rank: (rank.host, rank.pid) for rank in named},
    )


def _shown(line: bytes) -> str:
    return repr(line[:80].decode("utf-8", "replace"))
