"""Sends a request to a running job, or to the daemon itself, through the daemon's socket, and yields the answers.

One connection carries one request and then its answers: first the daemon's own, which names the ranks that it reached,
then those of the ranks.  The caller waits with a deadline of its own, which grows with the pace of the job; neither the
daemon nor the job waits for him.  Whatever happens after the ranks were reached, he gets a reply for each of them, if
only that no answer came.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Literal

import msgspec

from pacecar.daemon_peer import UntrustedDaemonError, connect
from pacecar.formatting.plain_text import clean_values
from pacecar.records import Answer, DumpRequest, HealthRequest, KnobValue, Request, TunerReport
from pacecar.wire import FRAME_BYTES_MAX, FrameError, decode_frame, encode_frame

__all__ = ["AskError", "Reply", "ask", "converse"]

FIRST_SECONDS = 10.0
"""The daemon answers at once; it may be busy with a tick."""

PATIENCE_SECONDS = 60.0
"""In addition to the steps: ranks look for commands four times a second, and write and compress what they measured."""

SLOWER = 5.0
"""A traced step takes at worst (with stacks) so many times as long."""

UNKNOWN_SECONDS = 300.0
"""For the steps of a job whose pace nobody knows yet: it may be compiling."""

_SERIAL = 1
"""One request a connection."""


class AskError(RuntimeError):
    """No request can be sent, or nobody answers; the message says why and what to do."""


class Reply(msgspec.Struct, frozen=True):
    """One rank's final answer; "silent": it gave none."""

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
    timeout_seconds: float | None = None,
    ranks: tuple[int, ...] = (),
) -> Iterator[Answer | Reply]:
    """Ask `job` for `action` through the daemon at `path`: yield interim answers as they come, then a Reply a rank.

    `ranks` says which are meant, none all of them that are on this node.  `timeout_seconds` None: as long as the steps
    in `arguments` may take at the job's pace, and PATIENCE_SECONDS.

    Raises:
        AskError: there is no daemon, it has no such job, or the job belongs to somebody else.
    """
    begun = time.monotonic()
    request = Request(serial=_SERIAL, job=job, action=action, arguments=arguments, ranks=ranks)
    with _connect(path, FIRST_SECONDS) as connection:
        try:
            connection.send(encode_frame(request))
        except FrameError as error:
            raise AskError(str(error)) from error
        except OSError as error:
            raise AskError(f"the daemon at {path} hung up: {error.strerror}") from error
        first = _next(connection, begun + min(FIRST_SECONDS, timeout_seconds or FIRST_SECONDS))
        if first is None:
            raise AskError(f"the daemon at {path} does not answer")
        if first.state == "refused":
            raise AskError(first.detail)
        yield first
        patience = _patience(first, arguments) if timeout_seconds is None else timeout_seconds
        yield from _replies(connection, first, begun + patience)


def converse(path: str, request: DumpRequest | HealthRequest, *, timeout_seconds: float) -> Answer:
    """Return the one answer that the daemon at `path` gives to a request of its own.

    Raises:
        AskError: there is no daemon, or it does not answer in time.
    """
    deadline = time.monotonic() + timeout_seconds
    with _connect(path, FIRST_SECONDS) as connection:
        try:
            connection.send(encode_frame(request))
        except (FrameError, OSError) as error:
            raise AskError(f"the daemon at {path} cannot be asked: {error}") from error
        answer = _next(connection, deadline)
    if answer is None:
        raise AskError(f"the daemon at {path} does not answer within {timeout_seconds:g} s")
    return answer


def _replies(connection: socket.socket, first: Answer, deadline: float) -> Iterator[Answer | Reply]:
    waiting = dict.fromkeys(first.ranks, "")
    silence = "no answer in time"
    while waiting:
        try:
            answer = _next(connection, deadline)
        except AskError as error:
            silence = str(error)
            break
        if answer is None:
            break
        if answer.rank is None or answer.state == "accepted":
            if answer.rank in waiting:
                waiting[answer.rank] = f"; it last said: {answer.detail}"
            yield answer
        elif answer.rank in waiting:
            del waiting[answer.rank]
            yield Reply(answer.rank, answer.state, answer.detail, answer.report)
    for rank, said in sorted(waiting.items()):
        yield Reply(rank, "silent", silence + said)


def _patience(first: Answer, arguments: dict[str, KnobValue]) -> float:
    steps = arguments.get("steps", 1)
    if first.pace_ns is None or first.expected_ns is None or not isinstance(steps, int):
        return PATIENCE_SECONDS + UNKNOWN_SECONDS
    return PATIENCE_SECONDS + SLOWER * (first.expected_ns + steps * first.pace_ns) / 1e9


def _connect(path: str, timeout_seconds: float) -> socket.socket:
    try:
        # Root's own path is /run/pacecar; another one he has named, to speak with a user's daemon.
        return connect(path, timeout_seconds, any_owner=os.geteuid() == 0)
    except UntrustedDaemonError as error:
        raise AskError(f"the daemon at {path} is not asked: {error}") from error
    except OSError as error:
        hint = ": is the daemon running, and is this its socket?" if isinstance(error, FileNotFoundError) else ""
        raise AskError(f"cannot reach the daemon at {path}: {error.strerror or error}{hint}") from error


def _next(connection: socket.socket, deadline: float) -> Answer | None:
    """Return the next answer; None when none comes in time."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        connection.settimeout(left)
        try:
            frame = connection.recv(FRAME_BYTES_MAX)
        except (TimeoutError, BlockingIOError):
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
            return clean_values(message)  # a job chose its words; a person's terminal must not obey them
