"""Keeps the state of one connection of the socket server: its socket, its peer, and what it may send."""

from __future__ import annotations

import select
import socket
import struct

from pacecar.formatting.plain_text import clean
from pacecar.records import Throttling
from pacecar.records.job_identity import JobKey
from pacecar.wire import Refusal

from ..jobs.evictions import EvictionCandidate
from .frame_validation import FrameValidation, Peer

__all__ = ["Connection", "is_hung_up", "peer_of"]

_PEERCRED = struct.Struct("3i")


class Connection:
    """One hook: its socket, the validation of its frames, and which of its faults were logged."""

    def __init__(self, number: int, sock: socket.socket, validation: FrameValidation, since_ns: int) -> None:
        self.number = number
        self.sock = sock
        self.validation = validation
        self.uid = validation.peer.uid
        self.since_ns = self.heard_ns = since_ns
        self.logged: set[Refusal] = set()
        self.is_admitted = self.was_refused = False
        self.is_selected = False
        """Whether the selector watches it: not while its user is paused."""
        self.throttling: Throttling | None = None
        """The latest that was sent to it."""

    def lose(self, victim: EvictionCandidate) -> None:
        """If `victim` is this hook's own job or rank, tell it why it is not shown, with its next refused frame."""
        hello = self.validation.hello
        if hello is not None and JobKey.of(hello) == victim.job and victim.rank in (None, hello.rank):
            self.is_admitted = self.was_refused = False

    def __str__(self) -> str:
        peer, hello = self.validation.peer, self.validation.hello
        who = f"rank {hello.rank} of job {clean(hello.job)}, " if hello is not None else ""
        return f"connection {self.number} ({who}pid {peer.pid}, uid {peer.uid})"


def peer_of(sock: socket.socket) -> Peer:
    """Return the process at the other end, as the kernel recorded it when it connected."""
    return Peer(*_PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)))


def is_hung_up(sock: socket.socket) -> bool:
    """Return whether a read of nothing is the end of the connection and not an empty frame (recv(2))."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
