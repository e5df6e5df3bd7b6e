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

    def __init__(self, number: int, sock: socket.socket, conversation: FrameValidation, since_ns: int) -> None:
        self.number = number
        self.sock = sock
        self.conversation = conversation
        self.since_ns = since_ns
        self.logged: set[Refusal] = set()
        self.is_admitted = self.was_turned_away = False
        self.is_heard = False
        """Whether the selector knows it: not while its user is paused."""
        self.told: Throttling | None = None

    def lose(self, place: EvictionCandidate) -> None:
        """If `place` was this hook's own, have it told, with the next frame that is refused, why it is not shown."""
        hello = self.conversation.hello
        if hello is not None and JobKey.of(hello) == place.job and place.rank in (None, hello.rank):
            self.is_admitted = self.was_turned_away = False

    def __str__(self) -> str:
        peer, hello = self.conversation.peer, self.conversation.hello
        who = f"rank {hello.rank} of job {clean(hello.job)}, " if hello is not None else ""
        return f"connection {self.number} ({who}pid {peer.pid}, uid {peer.uid})"


def peer_of(sock: socket.socket) -> Peer:
    """Return who is at the other end, as the kernel noted it when he connected."""
    return Peer(*_PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)))


def is_hung_up(sock: socket.socket) -> bool:
    """Tell the end of a connection from an empty frame: both read as nothing (recv(2))."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
