"""Receives the hooks' records on the Unix socket, on one thread that no peer can block.

Any local process may connect and send anything.  So users share a bounded number of connections (`fair_share`), each
user's frames are bounded per turn and per second (`frame_rate_limit`), and a bad frame is counted without closing the
connection.  It is logged once for each connection and reason, and the hook is told once.

Records are never answered: a hook that waited would make the job wait for the daemon.  People's requests
(`command_routing`) and news about a rank's device and node (`tell`) go the other way; nothing waits for those either.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Literal

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.formatting.plain_text import clean
from pacecar.records import (
    Answer,
    DumpRequest,
    HealthRequest,
    HelloRefused,
    JobHello,
    Request,
    Sample,
    Throttling,
)
from pacecar.records.job_identity import JobKey
from pacecar.records.job_orders import JobAnswer
from pacecar.records.ranges import TEXT_CHARACTERS_MAX
from pacecar.wire import FRAME_BYTES_MAX, FrameError, Message, Refusal, encode_frame, payload_of

from ..catalog_sample import sample
from ..fair_share import round_robin, yielding_holder
from ..fault_containment import ContainedPart, FaultContainment
from ..jobs.node_signals import NodeSignals
from ..jobs.state import DaemonState
from ..recorder.recorder import FlightRecorder
from ..wakeable_selector import WakeableSelector
from ..watched_threads import CLOSE_SECONDS, LIMIT_SECONDS, TURN_SECONDS, WatchedThread
from .authorization import Target, may_dump
from .command_routing import CommandRouting
from .connection import Connection, is_hung_up, peer_of
from .frame_rate_limit import PAUSE_SECONDS, FrameRateLimits
from .frame_validation import FrameValidation
from .log_limiter import LogLimiter
from .unix_socket import UnixSocket

__all__ = ["CONNECTIONS_MAX", "CONNECTIONS_PER_UID_MAX", "SocketServer"]

CONNECTIONS_MAX = 512
"""Connected hooks.  A node has one rank per GPU; this leaves room and stays below the usual 1024 open files."""

CONNECTIONS_PER_UID_MAX = 384
"""Connected hooks of one user, which leaves a quarter of all places to others."""

WARNINGS_PER_MINUTE = 20
"""Log lines for each user and kind of fault, which a process may repeat as often as it likes."""

FRAMES_PER_TURN = 64
"""Frames read from one connection before the next one's turn."""

HELLO_SECONDS = 5
"""A connection without a hello after this time is closed if the table is full."""

ACCEPTS_PER_TURN = 64
"""Hooks accepted in a row before the connected ones get their turn: a launcher starts all ranks of a node at once."""

ACCEPT_PAUSE_SECONDS = 1.0
"""Pause after a failed accept (no file descriptors left): the listener stays readable."""

LIMIT_COST_BYTES = 16 * 1024
"""Added cost of a frame that was refused for lack of room, which takes a scan of the whole job table."""


_log = logging.getLogger(__name__)


class SocketServer:
    """Receives records from hooks and adds them to the daemon's state."""

    def __init__(
        self,
        unix_socket: UnixSocket,
        state: DaemonState,
        clock: Clock,
        *,
        connections_max: int = CONNECTIONS_MAX,
        connections_per_uid_max: int = CONNECTIONS_PER_UID_MAX,
        recorder: FlightRecorder | None = None,
        faults: FaultContainment | None = None,
        trouble: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._unix_socket = unix_socket
        self._state = state
        self._clock = clock
        self._connections_max = connections_max
        self._per_uid_max = connections_per_uid_max
        self._by_uid: Counter[int] = Counter()
        self._limits = FrameRateLimits(clock)
        self._displaced = 0
        self._notices = LogLimiter(_log, WARNINGS_PER_MINUTE, clock)
        self._recorder = recorder
        self._faults = faults or FaultContainment()
        self._trouble = trouble
        self._connections: dict[int, Connection] = {}
        self._requests = CommandRouting(self._send)
        self._numbers = itertools.count(1)
        self._frames = 0
        self._refused: Counter[Refusal] = Counter()
        self._buffer = bytearray(FRAME_BYTES_MAX)
        self._is_stopping = False
        self._accept_again_ns: int | None = None
        self._thread: WatchedThread | None = None

    @property
    def thread(self) -> WatchedThread | None:
        """The thread; None before `start` and after `close`."""
        return self._thread

    @property
    def connections(self) -> int:
        """How many hooks are connected."""
        return len(self._connections)

    @property
    def frames(self) -> int:
        """How many frames were accepted."""
        return self._frames

    def members(self) -> list[tuple[int, JobHello]]:
        """Return pid and hello of the connected ranks whose pid this daemon can see.

        The first of each user comes first, then the second of each, so that any prefix has some of each user.
        """
        validations = [connection.validation for connection in list(self._connections.values())]
        known = [(one.peer, one.hello) for one in validations if one.hello is not None and one.peer.pid != 0]
        return round_robin((peer.uid, (peer.pid, hello)) for peer, hello in known)

    def tell(self, throttles: Mapping[str, Throttling], signals: NodeSignals | None = None) -> None:
        """Send each connected rank what throttles its device, if that has changed, and `signals` if it wants them.

        May be called from any thread.  A rank whose socket is full gets the throttling at the next tick and misses the
        signals.
        """
        for connection in list(self._connections.values()):
            hello = connection.validation.hello
            if hello is not None:
                try:
                    self._tell(connection, hello, throttles, signals)
                except Exception as error:  # noqa: BLE001  a failure for one hook must not affect the others
                    self._faults.caught(ContainedPart.INBOX, str(connection), error)

    def _tell(
        self,
        connection: Connection,
        hello: JobHello,
        throttles: Mapping[str, Throttling],
        signals: NodeSignals | None,
    ) -> None:
        throttling = None if hello.device_uuid is None else throttles.get(hello.device_uuid)
        if signals is not None and hello.hears_signals and connection.is_admitted:
            self._send_to(connection, signals.of(hello, throttling))
        if hello.device_uuid is None:
            return
        if throttling is None and connection.throttling is not None:
            throttling = Throttling(device_uuid=hello.device_uuid, reasons=None)
        if throttling is not None and throttling != connection.throttling and self._send_to(connection, throttling):
            connection.throttling = throttling

    def refused(self) -> dict[Refusal, int]:
        """Return how many frames were refused, for every reason."""
        return {refusal: self._refused[refusal] for refusal in Refusal}

    def own_samples(self) -> Iterator[Sample]:
        """Yield connections, frames, frames refused by reason, and displaced connections and requests."""
        yield sample("pacecar_inbox_connections", self.connections)
        yield sample("pacecar_inbox_frames_total", self.frames)
        for refusal, count in self.refused().items():
            yield sample("pacecar_inbox_frames_refused_total", count, refusal.value)
        yield sample("pacecar_inbox_displaced_total", self._displaced, "connection")
        yield sample("pacecar_inbox_displaced_total", self._requests.displaced, "request")

    def start(self) -> None:
        """Open the socket and start the thread; raises UnixSocketError."""
        self._listener = self._unix_socket.open()
        self._selector = WakeableSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = WatchedThread("inbox", self._serve, self._clock, limit_seconds=LIMIT_SECONDS)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, close all connections and remove the socket file."""
        if self._thread is None:
            return
        self._is_stopping = True
        self._selector.wake()
        has_ended = self._thread.join(CLOSE_SECONDS)
        self._thread = None
        self._unix_socket.close()
        if has_ended:
            self._release()
        else:
            _log.warning("the inbox thread does not end and is left running")

    def _release(self) -> None:
        """Close sockets; on the thread that uses them, because the number of a closed file is reused soon."""
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.sock.close()
        self._connections.clear()
        self._by_uid.clear()
        self._selector.close()

    def _serve(self) -> None:
        thread = self._thread
        assert thread is not None, "it runs this"
        while not self._is_stopping:
            thread.progress()
            self._limits.begin_turn()
            pause = TURN_SECONDS if self._accept_again_ns is None else ACCEPT_PAUSE_SECONDS
            if self._limits.is_any_paused:
                pause = PAUSE_SECONDS
            for key, _ in self._selector.select(pause):
                if key.fileobj is self._listener:
                    for _ in range(ACCEPTS_PER_TURN):
                        if not self._accept_safely():
                            break
                elif isinstance(key.data, Connection):
                    self._read_safely(key.data)
            self._resume_accepting()
            self._resume_reading()
        self._release()

    def _accept_safely(self) -> bool:
        try:
            return self._accept()
        except Exception as error:  # noqa: BLE001  the outer boundary: one hook must not end the service for others
            self._faults.caught(ContainedPart.INBOX, "a hook that connects", error)
            self._pause_accepting()
            return False

    def _pause_accepting(self) -> None:
        """Ignore the listener, which stays readable, for a while."""
        self._selector.unregister(self._listener)
        self._accept_again_ns = self._clock.monotonic_ns() + int(ACCEPT_PAUSE_SECONDS * NS_PER_SECOND)

    def _accept(self) -> bool:
        """Accept one hook; return whether there may be another."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            self._notices.warn("accept", "cannot accept a hook: %s; retrying in %s s", error, ACCEPT_PAUSE_SECONDS)
            self._pause_accepting()
            return False
        sock.setblocking(False)
        peer = peer_of(sock)
        now = self._clock.monotonic_ns()
        connection = Connection(next(self._numbers), sock, FrameValidation(peer), now)
        full = self._make_room(now, peer.uid)
        if full is not None:
            self._refuse(connection, FrameError(Refusal.LIMIT, f"{full} already, hung up on this one"))
            sock.close()
            return True
        self._connections[sock.fileno()] = connection
        self._by_uid[peer.uid] += 1
        if not self._limits.of(peer.uid, self._by_uid).is_paused:
            self._select(connection)
        _log.debug("%s: connected", connection)
        return True

    def _resume_accepting(self) -> None:
        if self._accept_again_ns is not None and self._clock.monotonic_ns() >= self._accept_again_ns:
            self._accept_again_ns = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _select(self, connection: Connection) -> None:
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)
        connection.is_selected = True

    def _pause_reading(self, uid: int) -> None:
        """Stop reading a user who sent too much, until the token bucket allows it."""
        self._notices.warn("flood", "uid %d exceeds its share of frames: reading it more slowly", uid, of=uid)
        for connection in self._connections.values():
            if connection.uid == uid and connection.is_selected:
                self._selector.unregister(connection.sock)
                connection.is_selected = False

    def _resume_reading(self) -> None:
        for uid in self._limits.resume():
            for connection in self._connections.values():
                if connection.uid == uid and not connection.is_selected:
                    self._select(connection)

    def _make_room(self, now: int, uid: int) -> str | None:
        """Make room for one more of `uid`; return None, or what is full.

        The oldest connection that never sent a hello goes first, then the youngest of the user with most.
        """
        of_uid = self._by_uid[uid] >= self._per_uid_max
        if not of_uid and len(self._connections) < self._connections_max:
            return None
        for connection in self._connections.values():  # in order of age
            if of_uid and connection.uid != uid:
                continue
            if connection.validation.hello is None and now - connection.since_ns > HELLO_SECONDS * NS_PER_SECOND:
                self._refuse(connection, FrameError(Refusal.NO_HELLO, f"no hello in {HELLO_SECONDS} s, hung up"))
                self._hang_up(connection)
                return None
        if of_uid:
            return f"{self._per_uid_max} hooks of uid {uid} are connected"
        giver = yielding_holder(uid, self._by_uid)
        if giver is None:
            return f"{self._connections_max} hooks are connected"
        youngest = [one for one in self._connections.values() if one.uid == giver][-1]
        self._displaced += 1
        why = f"{self._connections_max} hooks are connected, and uid {giver} has most of them: made room for uid {uid}"
        self._refuse(youngest, FrameError(Refusal.LIMIT, why))
        self._lose(youngest)
        return None

    def _read_safely(self, connection: Connection) -> None:
        try:
            self._read(connection)
        except Exception as error:  # noqa: BLE001  the outer boundary: one peer must not end the service for others
            self._faults.caught(ContainedPart.INBOX, str(connection), error)
            self._lose(connection)

    def _read(self, connection: Connection) -> None:
        """Read frames from `connection`, up to its own limit for this turn and its user's."""
        if not connection.is_selected:
            return None  # its user was paused in this turn
        uid = connection.uid
        limit = self._limits.of(uid, self._by_uid)
        for _ in range(FRAMES_PER_TURN):
            if limit.is_paused:
                return self._pause_reading(uid)
            if limit.is_spent:
                return None
            try:
                size, _, flags, _ = connection.sock.recvmsg_into([self._buffer])
            except (BlockingIOError, InterruptedError):
                return None
            except ConnectionResetError:  # once, from a peer that did not read all we sent; its frames follow
                continue
            except OSError as error:
                _log.debug("%s: %s", connection, error)
                return self._lose(connection)
            if size == 0 and is_hung_up(connection.sock):
                return self._lose(connection)
            limit.spend(size)
            try:
                if flags & socket.MSG_TRUNC:
                    raise FrameError(Refusal.OVERSIZED, f"a frame of more than {FRAME_BYTES_MAX} bytes")
                self._handle(connection, bytes(memoryview(self._buffer)[:size]))
            except FrameError as error:
                self._refuse(connection, error)
                if error.refusal is Refusal.LIMIT:
                    limit.spend(LIMIT_COST_BYTES)
        return None

    def _handle(self, connection: Connection, frame: bytes) -> None:
        (record, hello), uid = connection.validation.decode(frame), connection.uid
        connection.heard_ns = self._clock.monotonic_ns()
        if isinstance(record, Request):
            self._route(connection, record)
        elif isinstance(record, DumpRequest):
            self._request_dump(connection, record)
        elif isinstance(record, HealthRequest):
            self._answer_health(connection, record)
        elif isinstance(record, Answer | JobAnswer):
            self._requests.forward(record, connection=connection.number)
        else:
            assert hello is not None, "a record has a hello before it"
            left = self._state.record(record, hello=hello, uid=uid, owner=connection.number, size=len(frame))
            for displaced in left:
                self._notices.warn("displaced", "%s", displaced, of=displaced.victim.uid)
                for other in self._connections.values():
                    other.lose(displaced.victim)
            connection.is_admitted = True
            if self._recorder is not None:
                self._recorder.record_rank(record, payload_of(frame), hello, uid)
        self._frames += 1
        if isinstance(record, JobHello):
            line = "%s: hello from %s on %s"
            self._notices.tell(logging.INFO, "hello", line, connection, record.host, record.device, of=uid)

    def _route(self, connection: Connection, request: Request) -> None:
        line = "%s: asks job %s for %s"
        self._notices.tell(logging.INFO, "request", line, connection, request.job, request.action, of=connection.uid)
        targets = [
            Target(other.number, other.validation.hello, other.uid, other.heard_ns)
            for other in self._connections.values()
            if other.validation.hello is not None and other.is_admitted
            # An evicted or forgotten job may be another user's by now.
            if self._state.uid_of(JobKey.of(other.validation.hello)) in (None, other.uid)
        ]
        self._requests.route(
            request, asker=connection.number, uid=connection.uid, targets=targets, steps_of=self._state.rank_steps
        )

    def _request_dump(self, connection: Connection, request: DumpRequest) -> None:
        uid = connection.uid

        def answer(done: bool, detail: str) -> None:  # called by the recorder's threads
            state: Literal["done", "refused"] = "done" if done else "refused"
            self._send(connection.number, Answer(job="", rank=None, number=request.serial, state=state, detail=detail))

        if not may_dump(uid, os.geteuid()):
            self._notices.warn("dump", "%s: refused to write a recording for it", connection, of=uid)
            answer(
                False, "a recording shows what all users' jobs did: only root and the daemon's own user may have one"
            )
        elif self._recorder is None:
            answer(False, "this daemon has no recorder: see [daemon] recorder_seconds")
        else:
            self._recorder.ask(uid, request.note, answer)

    def _answer_health(self, connection: Connection, request: HealthRequest) -> None:
        """Answer whether the daemon's numbers are fresh, for every user, as at /-/healthy."""
        trouble = self._trouble()
        state: Literal["done", "refused"] = "done" if trouble is None else "refused"
        answer = Answer(job="", rank=None, number=request.serial, state=state, detail=trouble or "ok")
        self._send_to(connection, answer)

    def _send(self, number: int, message: Message) -> bool:
        for connection in list(self._connections.values()):
            if connection.number == number:
                return self._send_to(connection, message)
        return False

    def _send_to(self, connection: Connection, message: Message) -> bool:
        try:
            connection.sock.send(encode_frame(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except (OSError, FrameError) as error:
            _log.debug("%s: %s", connection, error)
            return False
        return True

    def _refuse(self, connection: Connection, error: FrameError) -> None:
        self._refused[error.refusal] += 1
        if not connection.is_admitted and not connection.was_refused:
            connection.was_refused = True
            self._send_to(connection, HelloRefused(reason=clean(error, TEXT_CHARACTERS_MAX)))
        if error.refusal not in connection.logged:
            connection.logged.add(error.refusal)
            line = "%s: refused a frame: %s: %s"
            self._notices.warn(error.refusal, line, connection, error.refusal, error, of=connection.uid)

    def _lose(self, connection: Connection) -> None:
        """Handle the loss of a peer: without a goodbye from its job, it is logged."""
        hello = connection.validation.hello
        if hello is not None and self._state.leave(hello, connection.number):
            self._notices.warn("lost", "%s: left without a goodbye", connection, of=connection.uid)
        self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        self._requests.forget(connection.number)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        if self._connections.pop(connection.sock.fileno(), None) is not None:
            self._by_uid[connection.uid] -= 1
            self._by_uid += Counter()  # drops counts of zero, else an entry would stay for each user who ever came
        connection.sock.close()
