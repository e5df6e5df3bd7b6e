"""How does a command line ask a running job for something?  Through the socket of its node's daemon.

One connection, one request, and then answers: first the daemon's own, which says whom it reached, then those of the
ranks.  An asker waits with a deadline of its own; neither the daemon nor the job waits for him.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Literal

import msgspec

from pacecar.records import Answer, KnobValue, Request, TunerReport
from pacecar.wire import FRAME_BYTES_MAX, FrameError, decode_frame, encode_frame

__all__ = ["AskError", "Reply", "ask"]

_SERIAL = 1
"""One request a connection."""


class AskError(RuntimeError):
    """Nothing can be asked, or nobody answers; the message says why and what to do."""


class Reply(msgspec.Struct, frozen=True):
    """What one rank finally said."""

    rank: int
    state: Literal["done", "refused", "silent"]
    detail: str
    report: TunerReport | None = None


def ask(
    path: str,
    job: str,
    action: str,
    arguments: dict[str, KnobValue],
    *,
    timeout_seconds: float,
    ranks: tuple[int, ...] = (),
) -> Iterator[Answer | Reply]:
    """Ask `job` for `action` through the daemon at `path`: yield what is said on the way, then a Reply a rank.

    `ranks` says which are meant, none all of them that are on this node.

    Raises:
        AskError: there is no daemon, it has no such job, or the job belongs to somebody else.
    """
    deadline = time.monotonic() + timeout_seconds
    request = Request(serial=_SERIAL, job=job, action=action, arguments=arguments, ranks=ranks)
    with _connect(path, timeout_seconds) as connection:
        try:
            connection.send(encode_frame(request))
        except FrameError as error:
            raise AskError(str(error)) from error
        first = _next(connection, deadline)
        if first is None:
            raise AskError(f"the daemon at {path} does not answer")
        if first.state == "refused":
            raise AskError(first.detail)
        yield first
        waiting = set(first.ranks)
        while waiting:
            answer = _next(connection, deadline)
            if answer is None:
                break
            if answer.rank is None or answer.state == "accepted":
                yield answer
            elif answer.rank in waiting:
                waiting.discard(answer.rank)
                yield Reply(answer.rank, answer.state, answer.detail, answer.report)
        for rank in sorted(waiting):
            yield Reply(rank, "silent", f"no answer in {timeout_seconds:g} s")


def _connect(path: str, timeout_seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout_seconds)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        hint = "is the daemon running, and is this its socket?" if isinstance(error, FileNotFoundError) else ""
        raise AskError(f"cannot reach the daemon at {path}: {error.strerror or error} {hint}".rstrip()) from error
    return connection


def _next(connection: socket.socket, deadline: float) -> Answer | None:
    """Return the next answer; None when none comes in time."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        connection.settimeout(left)
        try:
            frame = connection.recv(FRAME_BYTES_MAX)
        except TimeoutError:
            return None
        except OSError as error:
            raise AskError(f"the daemon hung up: {error.strerror}") from error
        if not frame:
            raise AskError("the daemon hung up: it was stopped, or is of an older version")
        try:
            message = decode_frame(frame)
        except FrameError as error:
            raise AskError(f"the daemon cannot be understood: {error}") from error
        if isinstance(message, Answer):
            return message
