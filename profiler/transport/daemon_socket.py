"""Sends a job's records to the daemon of this node, and receives commands and news from it, over its Unix socket.

One frame holds one record.  The hello comes first on every connection, so that a restarted daemon knows the sender at
once.  The training thread only appends to a queue (`RecordQueue`); the daemon may be overloaded, gone or never there.

On the same connection the daemon sends commands that it was asked to pass on, news of the device, and signals of the
node.  The queue's thread reads them when it checks its queue, so they may be LOOK_SECONDS old.  A command names the
user who gave it, as the daemon learned from the kernel.  This is trusted because no connection is made to a daemon that
another user could run (`daemon_peer`).
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections.abc import Callable
from typing import Protocol

from pacecar.daemon_peer import connect
from pacecar.formatting.plain_text import clean
from pacecar.records import Answer, Command, HelloRefused, JobHello, Throttling
from pacecar.records.host_signals import HostSignals
from pacecar.wire import FRAME_BYTES_MAX, FrameError, decode_frame, encode_frame

from .record_queue import QUEUE_LENGTH_MAX, RecordQueue, RecordRefused, Sendable

__all__ = ["DaemonInbox", "DaemonSocket", "News"]

News = Throttling | HostSignals
"""The messages that the daemon sends unasked."""

COMMANDS_PER_LOOK = 16
"""The most frames read at once, so that a daemon that never stops sending does not keep records from leaving."""

_log = logging.getLogger(__name__)


class DaemonInbox(Protocol):
    """Receives the daemon's frames.  Both methods run on the queue's thread and must not wait."""

    def receive_command(self, command: Command) -> Answer | None:
        """Keep `command` for the training thread, or refuse it at once and return the answer."""
        ...

    def receive_news(self, news: News | None) -> None:
        """Record news of device and node; None: the connection broke."""
        ...


class DaemonSocket(RecordQueue):
    """A `RecordSink` to the daemon that listens at `path`; the daemon's messages go to `inbox`."""

    def __init__(
        self,
        path: str,
        hello: JobHello,
        *,
        queue_length_max: int = QUEUE_LENGTH_MAX,
        inbox: DaemonInbox | None = None,
        is_optional: bool = False,
    ) -> None:
        self._to_daemon = _SocketCarrier(path, hello, inbox, self._received)
        super().__init__(self._to_daemon, queue_length_max=queue_length_max, is_optional=is_optional)

    @property
    def is_connected(self) -> bool:
        """Whether a daemon takes the records."""
        return self._to_daemon.is_connected

    def _received(self, refusal: Answer | None) -> None:
        """Answer a refused command, or wake the training thread for one that was kept."""
        if refusal is not None:
            self.put(refusal)
        elif self._source is not None:
            self._source.wake()


class _SocketCarrier:
    """Calls `received` after each command with its refusal, if any."""

    def __init__(
        self, path: str, hello: JobHello, inbox: DaemonInbox | None, received: Callable[[Answer | None], None]
    ) -> None:
        self._path = path
        self._inbox = inbox
        self._received = received
        self._hello = encode_frame(hello)
        self._socket: socket.socket | None = None
        self._has_complained = False
        self._refusal: str | None = None

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    @property
    def destination(self) -> str:
        return f"the daemon at {self._path}"

    def deliver(self, record: Sendable, timeout_seconds: float) -> None:
        try:
            frame = encode_frame(record)
        except FrameError as error:
            raise RecordRefused(str(error)) from error
        try:
            if self._socket is None:
                self._connect(timeout_seconds)
            self._send(frame, timeout_seconds)
        except _DaemonFullError:
            raise  # the connection is fine, only full
        except OSError:
            self.close()
            raise

    def listen(self) -> None:
        for _ in range(COMMANDS_PER_LOOK):
            if self._socket is None:
                return
            try:
                frame = self._socket.recv(FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            if not frame:  # the daemon has gone; the next record connects to the new one
                self.close()
                return
            try:
                message = decode_frame(frame)
            except FrameError as error:
                # Once: a newer daemon may send it again every few seconds.
                level = logging.DEBUG if self._has_complained else logging.WARNING
                self._has_complained = True
                _log.log(level, "pacecar does not understand a message from the daemon at %s: %s", self._path, error)
                continue
            if isinstance(message, Command) and self._inbox is not None:
                self._received(self._inbox.receive_command(message))
            elif isinstance(message, Throttling | HostSignals) and self._inbox is not None:
                self._inbox.receive_news(message)
            elif isinstance(message, HelloRefused) and message.reason != self._refusal:
                self._refusal = message.reason  # once: the daemon repeats it on each connection
                _log.warning("pacecar: the daemon at %s does not show this rank: %s", self._path, clean(message.reason))

    def close(self) -> None:
        if self._socket is not None:
            if self._inbox is not None:
                self._inbox.receive_news(None)
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None

    def _connect(self, timeout_seconds: float) -> None:
        self._socket = connect(self._path, 0.0)
        self._send(self._hello, timeout_seconds)

    def _send(self, frame: bytes, timeout_seconds: float) -> None:
        assert self._socket is not None, "connected before sending"
        try:
            self._socket.send(frame, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            select.select([], [self._socket], [], timeout_seconds)
            try:
                self._socket.send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError as error:
                raise _DaemonFullError("the daemon does not read") from error


class _DaemonFullError(BlockingIOError):
    """The socket's buffer stayed full."""
