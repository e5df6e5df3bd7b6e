"""Sends a request to a running job, or to the daemon itself, through the daemon's socket, and yields the answers.

One connection carries one request and its answers: first the daemon's, with the ranks that it reached, then those of
the ranks.  The caller's deadline depends on the pace of the job; neither daemon nor job waits for the caller.  Once the
ranks are reached, the caller gets a reply for each of them, even if it is only that no answer came.

An order to a whole job (`ask_job`) goes to one rank here, which asks all others.  If it shows no sign of life, another
one is asked, with the same id, so that nothing is done twice.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Literal

import msgspec

from pacecar.daemon_peer import UntrustedDaemonError, connect
from pacecar.formatting.plain_text import clean_values
from pacecar.records import Answer, DumpRequest, HealthRequest, KnobValue, Request, TunerReport
from pacecar.records.job_orders import ALL_RANKS, JobAnswer
from pacecar.wire import FRAME_BYTES_MAX, FrameError, decode_frame, encode_frame

__all__ = ["AskError", "Reply", "ask", "ask_job", "converse"]

FIRST_SECONDS = 10.0
"""The daemon answers at once, unless it is busy with a tick."""

PATIENCE_SECONDS = 60.0
"""Added to the time of the steps: ranks poll for commands four times a second, and write and compress traces."""

SLOWER = 5.0
"""A traced step takes at worst (with stacks) this many times as long."""

UNKNOWN_SECONDS = 300.0
"""For the steps of a job whose pace is not known yet: it may be compiling."""

SIGN_SECONDS = 0.75
"""A rank that runs answers an order to the job at once; it polls for commands every half a second."""

LAST_SIGN_SECONDS = 5.0
"""The same, once all ranks here were asked."""

JOB_PATIENCE_SECONDS = 60.0
"""The longest a rank may then say nothing."""

_SERIAL = 1
"""There is one request per connection."""


class AskError(RuntimeError):
    """The request cannot be sent, or there is no answer; the message says why and what to do."""


class Reply(msgspec.Struct, frozen=True):
    """The final answer of one rank; "silent" if it gave none."""

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
    """Ask `job` for `action` through the daemon at `path`: yield interim answers as they come, and a Reply per rank.

    An empty `ranks` means all ranks on this node.  Without `timeout_seconds`, the deadline is the time of the steps in
    `arguments` at the job's pace, plus PATIENCE_SECONDS.

    Raises:
        AskError: there is no daemon, it has no such job, or the job belongs to another user.
    """
    begun = time.monotonic()
    request = Request(serial=_SERIAL, job=job, action=action, arguments=arguments, ranks=ranks)
    with _connect(path, FIRST_SECONDS) as connection:
        first = _first(connection, path, request, begun + min(FIRST_SECONDS, timeout_seconds or FIRST_SECONDS))
        yield first
        patience = _patience(first, arguments) if timeout_seconds is None else timeout_seconds
        yield from _replies(connection, first, begun + patience)


def ask_job(
    path: str,
    job: str,
    order: str,
    arguments: dict[str, KnobValue],
    *,
    patience_seconds: float = JOB_PATIENCE_SECONDS,
) -> Iterator[Answer | JobAnswer]:
    """Give `order` to all ranks of `job` through the daemon at `path`; yield answers, the last one not "accepted".

    An empty `job` means the user's only one there.

    Raises:
        AskError: there is no daemon, it has no such job, the job belongs to another user, or no rank here answers.
    """
    given: dict[str, KnobValue] = {**arguments, "job_order": order, "id": secrets.token_hex(8)}
    asked: list[int] = []
    while True:
        request = Request(serial=_SERIAL, job=job, action=ALL_RANKS, arguments={**given, "attempt": len(asked)})
        with _connect(path, FIRST_SECONDS) as connection:
            first = _first(connection, path, request, time.monotonic() + FIRST_SECONDS)
            is_last = set(first.ranks) <= set(asked)
            asked += first.ranks
            seconds = LAST_SIGN_SECONDS if is_last else SIGN_SECONDS
            while (answer := _next(connection, time.monotonic() + seconds)) is not None:
                yield answer
                if isinstance(answer, Answer) and answer.state != "accepted":
                    return
                is_last, seconds = True, patience_seconds
        if is_last:
            ranks = ", ".join(map(str, sorted(set(asked))))
            raise AskError(
                f"no answer from rank {ranks} of {first.job}, which this daemon knows: stopped, or in a call that holds"
                " Python's lock; try on another node"
            )


def converse(path: str, request: DumpRequest | HealthRequest, *, timeout_seconds: float) -> Answer:
    """Return the answer of the daemon at `path` to a request to itself.

    Raises:
        AskError: there is no daemon, or it does not answer in time.
    """
    deadline = time.monotonic() + timeout_seconds
    with _connect(path, FIRST_SECONDS) as connection:
        try:
            connection.send(encode_frame(request))
        except (FrameError, OSError) as error:
            raise AskError(f"cannot ask the daemon at {path}: {error}") from error
        answer = _next(connection, deadline)
    if not isinstance(answer, Answer):
        raise AskError(f"the daemon at {path} does not answer within {timeout_seconds:g} s")
    return answer


def _first(connection: socket.socket, path: str, request: Request, deadline: float) -> Answer:
    """Send `request`; return the daemon's own answer, which says which ranks it reached; raises AskError."""
    try:
        connection.send(encode_frame(request))
    except FrameError as error:
        raise AskError(str(error)) from error
    except OSError as error:
        raise AskError(f"the daemon at {path} hung up: {error.strerror}") from error
    first = _next(connection, deadline)
    if not isinstance(first, Answer):
        raise AskError(f"the daemon at {path} does not answer")
    if first.state == "refused":
        raise AskError(first.detail)
    return first


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
        if isinstance(answer, JobAnswer):
            continue
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
        # Root's own path is /run/pacecar; with another one, root asks for a user's daemon.
        return connect(path, timeout_seconds, any_owner=os.geteuid() == 0)
    except UntrustedDaemonError as error:
        raise AskError(f"refusing to use the daemon at {path}: {error}") from error
    except OSError as error:
        hint = ": is the daemon running, and is this its socket?" if isinstance(error, FileNotFoundError) else ""
        raise AskError(f"cannot reach the daemon at {path}: {error.strerror or error}{hint}") from error


def _next(connection: socket.socket, deadline: float) -> Answer | JobAnswer | None:
    """Return the next answer; None if the deadline passes."""
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
        if isinstance(message, Answer | JobAnswer):
            return clean_values(message)  # text from a job must not control the terminal
