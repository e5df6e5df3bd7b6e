"""Lets ranks ask each other what they are doing, over sockets of pacecar's own.

A hanging job has no collective left and perhaps no store, so each rank listens on a TCP socket at the address that
pacecar's groups use (`transport.rendezvous`).  Addresses and a random token are exchanged once, when the ranks meet.

    frame = length:u32be  MessagePack of at most FRAME_BYTES_MAX bytes; of a question, after its proof
    asker -> rank  Question        rank -> asker  RankAccount, Heard, ProcessStates, WindowState or RankReplies

A thread waits for questions in the kernel and costs nothing until one comes.  A connection carries one question.  One
that is late, too long or without a proof is closed and counted; the count is part of this rank's account.  An answer
that takes long (`Later`) is given on a thread of its own.

A question may order something, so the token itself is only in the job's store, which is as open as the job.  The proof
of a question is its HMAC-SHA256 with the token.  Who repeats a recorded question gets another answer to it, and nothing
is done twice: orders have an id, windows a step.

`ask` asks many ranks at once and gives each the same time; it never waits longer than ROUND_SECONDS_MAX.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pacecar.process_state import ProcessIdentity
from pacecar.records.hangs import ProcessState, RankAccount
from pacecar.records.job_orders import RANKS_MAX, JobOrder, RankReply
from pacecar.records.ranges import Count, Label, Rank

from ..transport.rendezvous import RendezvousError, consult

__all__ = [
    "ABSENT_MAX", "ANSWER_SECONDS", "ASKED_AT_ONCE_MAX", "AccountListener", "Door", "Heard", "Later",
    "ProcessStates", "Question", "RankReplies", "Road", "RoadAnswer", "Silence", "WindowState", "ask", "exchange_doors",
]  # fmt: skip

FRAME_BYTES_MAX = 1024 * 1024
"""An account of a hundred groups and sixty threads has about 300 KiB."""

QUESTION_BYTES_MAX = 4096

PROOF_BYTES = 32

ANSWER_SECONDS = 1.5
"""How long a rank may take to answer: a busy interpreter lets other threads run after 5 ms, 0.1 s on a bad day."""

ROUND_SECONDS_MAX = 10.0
"""The longest a round of questions to all ranks may take; ranks that were not asked by then gave no answer."""

ASKED_AT_ONCE_MAX = 64

POLL_SECONDS = 0.05
"""How often `ask` looks for ranks that are late."""

SERVED_SECONDS = 2.0
"""How long one connection may keep the listening thread."""

BACKLOG = 4096
"""Connections that wait while a rank holds Python's lock; with more of them its host would seem to be cut off."""

ABSENT_MAX = 64
"""Ranks of whose processes one question asks."""

_LENGTH = struct.Struct(">I")
_log = logging.getLogger("pacecar")


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank asks another.

    Its account, or only its `counters`, to look into a hang (`summon`), what it knows of the processes of `ranks` on
    its host, or nothing (`greeting`), which shows that it can be reached.  Or how many of `steps` steps it can record
    for a cross-rank window, whose rows are to be counted after step `first_step` (`window_offer`), to record them from
    `first_step` on (`window_order`), and what it recorded (`window_part`).  Or to carry out an `order`, alone (`order`)
    or with the other ranks of its subgroup (`pass_on`).
    """

    what: Literal[
        "account", "counters", "summon", "processes", "greeting", "window_offer", "window_order", "window_part",
        "order", "pass_on",
    ]  # fmt: skip
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=ABSENT_MAX)] = ()
    first_step: Count = 0
    steps: Count = 0
    order: JobOrder | None = None


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """The answer to a greeting, and to a summons: this rank looks into it, or has another one do so.

    `is_idle`: by its latest look, no rank waits for another.  `judges`: False if it answers for itself only.
    """

    is_idle: bool = False
    judges: bool = True


class ProcessStates(msgspec.Struct, frozen=True, tag="processes"):
    """States of processes on the answering rank's host, in the order of the question; None: not on this host."""

    states: Annotated[tuple[ProcessState | None, ...], Meta(max_length=ABSENT_MAX)] = ()


class WindowState(msgspec.Struct, frozen=True, tag="window"):
    """How far a rank at `step` is with a cross-rank window, or why it has none; `part` is its condensed trace.

    `steps`: how many it can record now; 0: it has yet to count their rows.
    """

    step: Count
    refusal: Annotated[str, Meta(max_length=500)] | None = None
    steps: Count = 0
    part: Annotated[bytes, Meta(max_length=FRAME_BYTES_MAX)] | None = None


class RankReplies(msgspec.Struct, frozen=True, tag="replies"):
    """The replies of the answering rank to an order, and of those that it passed the order on to."""

    replies: Annotated[tuple[RankReply, ...], Meta(max_length=RANKS_MAX)]


class Silence(msgspec.Struct, frozen=True):
    """Why a rank gave no answer.

    `refused`: its host answers, and nothing listens there any more.  `unreachable`: its host does not answer; the
    kernel takes connections also for a process that is stopped.  `was_asked`: False if the asker is to blame.
    """

    reason: str
    refused: bool = False
    unreachable: bool = False
    was_asked: bool = True


class Door(msgspec.Struct, frozen=True):
    """Where a rank listens, and which process it is."""

    address: Label
    port: Annotated[int, Meta(ge=1, le=65535)]
    process: ProcessIdentity


class Road(msgspec.Struct, frozen=True):
    """The doors of all ranks, and the token that opens them."""

    token: str
    doors: tuple[Door, ...]


RoadAnswer = RankAccount | Heard | ProcessStates | WindowState | RankReplies

Later = Callable[[], RoadAnswer]
"""Makes an answer that takes long."""

_question = msgspec.msgpack.Decoder(Question)
_encode = msgspec.msgpack.Encoder().encode
_decoders: Mapping[str, msgspec.msgpack.Decoder[Any]] = {
    "account": msgspec.msgpack.Decoder(RankAccount),
    "counters": msgspec.msgpack.Decoder(RankAccount),
    "summon": msgspec.msgpack.Decoder(Heard),
    "greeting": msgspec.msgpack.Decoder(Heard),
    "processes": msgspec.msgpack.Decoder(ProcessStates),
    "window_offer": msgspec.msgpack.Decoder(WindowState),
    "window_order": msgspec.msgpack.Decoder(WindowState),
    "window_part": msgspec.msgpack.Decoder(WindowState),
    "order": msgspec.msgpack.Decoder(RankReplies),
    "pass_on": msgspec.msgpack.Decoder(RankReplies),
}
_door = msgspec.json.Decoder(Door)
_road = msgspec.json.Decoder(Road)


def exchange_doors(
    store: Any,  # noqa: ANN401  dist.Store; its methods are untyped
    rank: int,
    world_size: int,
    own: Door,
    *,
    name: str,
    seconds: float,
    rest: Callable[[float], object],
) -> Road:
    """Return the doors of all ranks; arguments are as for `consult`, which raises RendezvousError."""

    def conclude(said: Sequence[str]) -> str:
        try:
            doors = tuple(_door.decode(each) for each in said)
        except msgspec.MsgspecError as error:
            raise RendezvousError(f"a rank said nonsense about where it listens: {error}") from error
        return msgspec.json.encode(Road(secrets.token_hex(16), doors)).decode()

    concluded = consult(
        store, rank, world_size, msgspec.json.encode(own).decode(), conclude, name=f"{name}/accounts",
        seconds=seconds, absent="did not say where they listen", rest=rest,
    )  # fmt: skip
    return _road.decode(concluded)


class AccountListener:
    """Answers questions on a thread of its own; `answer` takes a question and returns what to send."""

    def __init__(self, answer: Callable[[Question], RoadAnswer | Later]) -> None:
        self._answer = answer
        self._token: str | None = None
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.refused = 0
        """Connections that were not a rank's of this job, or were late."""
        self.spent_ns = 0
        """Processor time of the thread so far."""

    def open(self, address: str) -> int:
        """Listen at `address`; return the port.  Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        return int(self._socket.getsockname()[1])

    def start(self, token: str) -> None:
        """Answer those who know `token`."""
        self._token = token
        self._thread = threading.Thread(target=self._serve, name="pacecar-hang-accounts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no longer, in forked children as well; may be called again."""
        listening, self._socket = self._socket, None
        if listening is not None:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listening.close()

    def problems(self) -> tuple[str, ...]:
        """Return what is wrong with the questions so far, in words."""
        return (f"{self.refused} connections were no questions of this job",) if self.refused else ()

    def _serve(self) -> None:
        while (listening := self._socket) is not None:
            try:
                connection, _ = listening.accept()
            except OSError:
                if self._socket is None:
                    return
                time.sleep(ANSWER_SECONDS)  # no descriptors left: the job's matter, which passes or ends it
                continue
            with connection:
                try:
                    self._serve_one(connection)
                except (OSError, ValueError, msgspec.MsgspecError) as error:
                    self.refused += 1
                    _log.debug("a connection was no question of this job: %s", error)
                except Exception:  # noqa: BLE001  the job goes on, and so does the next question
                    _log.debug("an account failed", exc_info=True)
            self.spent_ns = time.thread_time_ns()

    def _serve_one(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + SERVED_SECONDS
        frame = _receive_frame(connection, deadline)
        proof, payload = frame[:PROOF_BYTES], frame[PROOF_BYTES:]
        if self._token is None or not hmac.compare_digest(proof, _proof(self._token, payload)):
            raise ValueError("another token")
        answer = self._answer(_question.decode(payload))
        if callable(answer):
            threading.Thread(
                target=_send_later, args=(connection.dup(), answer, deadline), name="pacecar-job-orders", daemon=True
            ).start()
        else:
            _send(connection, answer, deadline)


def _proof(token: str, payload: bytes) -> bytes:
    return hmac.digest(token.encode(), payload, "sha256")


def _send(connection: socket.socket, answer: RoadAnswer, deadline: float) -> None:
    payload = _encode(answer)
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _send_later(connection: socket.socket, answer: Later, deadline: float) -> None:
    with connection:
        try:
            _send(connection, answer(), deadline)
        except Exception:  # noqa: BLE001  as in `_serve`: the asker notices
            _log.debug("an answer failed", exc_info=True)


def _receive_frame(connection: socket.socket, deadline: float) -> bytes:
    """Return one frame of at most QUESTION_BYTES_MAX; raises OSError and ValueError."""

    def exactly(size: int) -> bytes:
        found = b""
        while len(found) < size:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = connection.recv(size - len(found))
            if not part or time.monotonic() > deadline:
                raise ValueError("an incomplete question")
            found += part
        return found

    (length,) = _LENGTH.unpack(exactly(_LENGTH.size))
    if length > QUESTION_BYTES_MAX:
        raise ValueError("a question that is too long")
    return exactly(length)


class _Asked:
    """One question that is under way: what is left to send, and what has come."""

    def __init__(self, rank: int, connection: socket.socket, frame: bytes, deadline: float) -> None:
        self.rank, self.connection, self.left, self.deadline = rank, connection, frame, deadline
        self.came = bytearray()
        self.is_connected = False
        self.result: bytes | Silence | None = None

    def advance(self, selector: selectors.BaseSelector) -> None:
        """Send or receive what is possible without waiting; sets `result` at the end."""
        try:
            if self.left:
                self.left = self.left[self.connection.send(self.left) :]
                self.is_connected = True
                if not self.left:
                    selector.modify(self.connection, selectors.EVENT_READ, self)
                return
            part = self.connection.recv(65536)
        except ConnectionRefusedError:
            self.result = Silence("nothing listens there any more", refused=True)
            return
        except OSError as error:
            self.result = Silence(error.strerror or type(error).__name__, unreachable=not self.is_connected)
            return
        self.came += part
        length = _LENGTH.unpack_from(self.came)[0] if len(self.came) >= _LENGTH.size else None
        if length is not None and length > FRAME_BYTES_MAX:
            self.result = Silence("its answer is too long")
        elif length is not None and len(self.came) >= _LENGTH.size + length:
            self.result = bytes(self.came[_LENGTH.size : _LENGTH.size + length])
        elif not part:
            self.result = Silence("it closed the connection without an answer")


def ask(
    road: Road,
    ranks: Iterable[int],
    question: Question,
    *,
    seconds: float = ANSWER_SECONDS,
    is_over: Callable[[], bool] = lambda: False,
    at_once: int = ASKED_AT_ONCE_MAX,
) -> dict[int, Any]:
    """Ask `ranks`, `at_once` at a time and each for at most `seconds`; return the answer of each, or its Silence.

    `is_over` ends the questions early, with a Silence for those that have not answered.
    """
    payload = _encode(question)
    frame = _LENGTH.pack(PROOF_BYTES + len(payload)) + _proof(road.token, payload) + payload
    answers: dict[int, Any] = {}
    waiting = deque(ranks)
    under_way: dict[int, _Asked] = {}
    end = time.monotonic() + ROUND_SECONDS_MAX
    with selectors.DefaultSelector() as selector:

        def finish(asked: _Asked, answer: object) -> None:
            selector.unregister(asked.connection)
            asked.connection.close()
            del under_way[asked.rank]
            answers[asked.rank] = answer

        while (waiting or under_way) and time.monotonic() < end and not is_over():
            while waiting and len(under_way) < at_once:
                begun = _begin(road.doors[waiting[0]], waiting[0], frame, seconds)
                if isinstance(begun, Silence):
                    answers[waiting[0]] = begun
                else:
                    under_way[begun.rank] = begun
                    selector.register(begun.connection, selectors.EVENT_WRITE, begun)
                waiting.popleft()
            for key, _ in selector.select(POLL_SECONDS):
                asked = key.data
                asked.advance(selector)
                if asked.result is not None:
                    finish(asked, _decoded(question, asked.result))
            now = time.monotonic()
            for asked in [each for each in under_way.values() if now > each.deadline]:
                words = "no answer" if asked.is_connected else "no connection"
                finish(asked, Silence(f"{words} within {seconds:g} s", unreachable=not asked.is_connected))
        for asked in list(under_way.values()):
            finish(asked, Silence("there was no time to wait for it", was_asked=False))
    return answers | {rank: Silence("there was no time to ask it", was_asked=False) for rank in waiting}


def _begin(door: Door, rank: int, frame: bytes, seconds: float) -> _Asked | Silence:
    family = socket.AF_INET6 if ":" in door.address else socket.AF_INET
    try:
        connection = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return Silence(f"no socket: {error.strerror or error}", was_asked=False)
    connection.setblocking(False)
    connection.connect_ex((door.address, door.port))  # an error comes again at the first send
    return _Asked(rank, connection, frame, time.monotonic() + seconds)


def _decoded(question: Question, result: bytes | Silence) -> object:
    if isinstance(result, Silence):
        return result
    try:
        return _decoders[question.what].decode(result)
    except msgspec.MsgspecError as error:
        return Silence(f"its answer is nonsense: {error}")
