"""Receives the hooks' records on the Unix socket: one thread, one selector, and no peer that can hold it up.

Any local process may connect and send anything.  So connections are bounded and shared out among users (`fair_share`),
each user's frames are bounded in a turn and in a second (`frame_rate_limit`), a bad frame is counted and the connection
stays open, and what goes wrong is logged once for each connection and reason.  The hook is told of it once, too.
A record is never answered: a hook that waited would make the job wait for the daemon.  What goes back are people's
requests (`command_routing`), and what concerns a rank's device and node (`tell`); nobody waits for those either.
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
from typing import Literal, Protocol

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.formatting.plain_text import clean
from pacecar.records import (
    Answer,
    DumpRequest,
    HealthRequest,
    HelloRefused,
    JobHello,
    JobRecord,
    Request,
    Sample,
    Throttling,
)
from pacecar.records.job_identity import JobKey
from pacecar.records.ranges import TEXT_CHARACTERS_MAX
from pacecar.wire import FRAME_BYTES_MAX, FrameError, Message, Refusal, encode_frame, payload_of

from ..catalog_sample import sample
from ..fair_share import round_robin, yielding_holder
from ..fault_containment import ContainedPart, FaultContainment
from ..jobs.node_signals import NodeSignals
from ..jobs.state import DaemonState
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
"""Hooks at one time.  A node has a rank a GPU; this leaves room and stays below the usual 1024 open files."""

CONNECTIONS_PER_UID_MAX = 384
"""Hooks of one user; a quarter of all places is left to the others.  A node has a rank a GPU, mostly of one user."""

WARNINGS_PER_MINUTE = 20
"""Lines in the log for each user and kind of fault: a process may do it again as often as it likes."""

FRAMES_PER_TURN = 64
"""Frames taken from one connection before the next has its turn."""

HELLO_SECONDS = 5
"""A connection that has not sent its hello by then is closed when the table is full."""

ACCEPTS_PER_TURN = 64
"""Hooks accepted before those that are connected have their turn: a launcher starts all ranks of a node at once."""

ACCEPT_PAUSE_SECONDS = 1.0
"""After accept failed (no file descriptors left): do not spin on a listener that stays readable."""

LIMIT_COST_BYTES = 16 * 1024
"""Added cost of a frame for which there was no room: to find that out takes a look at the whole job table."""


class RankRecorder(Protocol):
    """What keeps the records of ranks; its calls must not wait."""

    def record_rank(self, record: JobRecord, payload: bytes, hello: JobHello, uid: int) -> None:
        """Keep a record that was accepted: its encoding, its hello and who sent it."""
        ...

    def ask(self, uid: int, note: str, answer: Callable[[bool, str], None]) -> None:
        """Write a recording for a user who may have one; `answer` is called later with whether it was, or why not."""
        ...


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
        recorder: RankRecorder | None = None,
        faults: FaultContainment | None = None,
        trouble: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._unix_socket = unix_socket
        self._state = state
        self._clock = clock
        self._connections_max = connections_max
        self._per_uid_max = connections_per_uid_max
        self._by_uid: Counter[int] = Counter()
        self._budgets = FrameRateLimits(clock)
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
        """How many frames were taken in."""
        return self._frames

    def members(self) -> list[tuple[int, JobHello]]:
        """Return pid and hello of the connected ranks, the pid as this daemon sees it; without those it cannot see.

        The first of each user, then the second of each: whoever looks up only so many looks up some of each user.
        """
        conversations = [connection.conversation for connection in list(self._connections.values())]
        known = [(c.peer, c.hello) for c in conversations if c.hello is not None and c.peer.pid != 0]
        return round_robin((peer.uid, (peer.pid, hello)) for peer, hello in known)

    def tell(self, throttles: Mapping[str, Throttling], signals: NodeSignals | None = None) -> None:
        """Send each connected rank what holds down its device's clocks, where that has changed; from any thread.

        And send what `signals` say of the node to those that asked.  A rank whose socket is full is sent the clocks
        with the next tick, and misses the signals.
        """
        for connection in list(self._connections.values()):
            hello = connection.conversation.hello
            if hello is not None:
                try:
                    self._tell(connection, hello, throttles, signals)
                except Exception as error:  # noqa: BLE001  what fails for one hook must not cost the others theirs
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
            self._say(connection, signals.of(hello, throttling))
        if hello.device_uuid is None:
            return
        if throttling is None and connection.told is not None:
            throttling = Throttling(device_uuid=hello.device_uuid, reasons=None)
        if throttling is not None and throttling != connection.told and self._say(connection, throttling):
            connection.told = throttling

    def refused(self) -> dict[Refusal, int]:
        """Return how many frames were refused, by reason; every reason is there."""
        return {refusal: self._refused[refusal] for refusal in Refusal}

    def own_samples(self) -> Iterator[Sample]:
        """Yield connections, frames, frames refused by reason, and what made room for users with fewer."""
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
            _log.warning("the thread of the inbox does not return and is left behind")

    def _release(self) -> None:
        """Close what the thread works with, which the thread does: the number of a closed file is soon another's."""
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
            self._budgets.begin_turn()
            pause = TURN_SECONDS if self._accept_again_ns is None else ACCEPT_PAUSE_SECONDS
            if self._budgets.is_any_paused:
                pause = PAUSE_SECONDS
            for key, _ in self._selector.select(pause):
                if key.fileobj is self._listener:
                    for _ in range(ACCEPTS_PER_TURN):
                        if not self._accept_safely():
                            break
                elif isinstance(key.data, Connection):
                    self._hear_safely(key.data)
            self._resume_accepting()
            self._resume_hearing()
        self._release()

    def _accept_safely(self) -> bool:
        try:
            return self._accept()
        except Exception as error:  # noqa: BLE001  the outer boundary: who cannot be taken in costs nobody else
            self._faults.caught(ContainedPart.INBOX, "a hook that connects", error)
            self._pause_accepting()
            return False

    def _pause_accepting(self) -> None:
        """Do not spin on a listener that stays readable."""
        self._selector.unregister(self._listener)
        self._accept_again_ns = self._clock.monotonic_ns() + int(ACCEPT_PAUSE_SECONDS * NS_PER_SECOND)

    def _accept(self) -> bool:
        """Accept one hook; return whether there may be another."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            self._notices.warn("accept", "cannot accept a hook: %s; again in %s s", error, ACCEPT_PAUSE_SECONDS)
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
        if not self._budgets.of(peer.uid, self._by_uid).is_paused:
            self._listen_to(connection)
        _log.debug("%s: connected", connection)
        return True

    def _resume_accepting(self) -> None:
        if self._accept_again_ns is not None and self._clock.monotonic_ns() >= self._accept_again_ns:
            self._accept_again_ns = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _listen_to(self, connection: Connection) -> None:
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)
        connection.is_heard = True

    def _pause_hearing(self, uid: int) -> None:
        """Stop reading the user who sent too much, until his token bucket allows it."""
        self._notices.warn("flood", "uid %d sends more than its share of frames: read more slowly", uid, of=uid)
        for connection in self._connections.values():
            if connection.conversation.peer.uid == uid and connection.is_heard:
                self._selector.unregister(connection.sock)
                connection.is_heard = False

    def _resume_hearing(self) -> None:
        for uid in self._budgets.resume():
            for connection in self._connections.values():
                if connection.conversation.peer.uid == uid and not connection.is_heard:
                    self._listen_to(connection)

    def _make_room(self, now: int, uid: int) -> str | None:
        """Return None if one more of `uid` fits, closing the oldest that never sent a hello; else what is full."""
        of_uid = self._by_uid[uid] >= self._per_uid_max
        if not of_uid and len(self._connections) < self._connections_max:
            return None
        for connection in self._connections.values():  # in order of age
            if of_uid and connection.conversation.peer.uid != uid:
                continue
            if connection.conversation.hello is None and now - connection.since_ns > HELLO_SECONDS * NS_PER_SECOND:
                self._refuse(connection, FrameError(Refusal.NO_HELLO, f"no hello in {HELLO_SECONDS} s, hung up"))
                self._hang_up(connection)
                return None
        if of_uid:
            return f"{self._per_uid_max} hooks of uid {uid} are connected"
        giver = yielding_holder(uid, self._by_uid)
        if giver is None:
            return f"{self._connections_max} hooks are connected"
        youngest = [one for one in self._connections.values() if one.conversation.peer.uid == giver][-1]
        self._displaced += 1
        why = f"{self._connections_max} hooks are connected, and uid {giver} has most of them: made room for uid {uid}"
        self._refuse(youngest, FrameError(Refusal.LIMIT, why))
        self._lose(youngest)
        return None

    def _hear_safely(self, connection: Connection) -> None:
        try:
            self._hear(connection)
        except Exception as error:  # noqa: BLE001  the outer boundary: one peer must not end the service of all others
            self._faults.caught(ContainedPart.INBOX, str(connection), error)
            self._lose(connection)

    def _hear(self, connection: Connection) -> None:
        """Read the frames of `connection`, up to its bound for this turn and its user's."""
        if not connection.is_heard:
            return None  # its user was paused in this same turn
        uid = connection.conversation.peer.uid
        budget = self._budgets.of(uid, self._by_uid)
        for _ in range(FRAMES_PER_TURN):
            if budget.is_paused:
                return self._pause_hearing(uid)
            if budget.is_spent:
                return None
            try:
                size, _, flags, _ = connection.sock.recvmsg_into([self._buffer])
            except (BlockingIOError, InterruptedError):
                return None
            except ConnectionResetError:  # once, of a peer that did not read all we sent; its frames are still there
                continue
            except OSError as error:
                _log.debug("%s: %s", connection, error)
                return self._lose(connection)
            if size == 0 and is_hung_up(connection.sock):
                return self._lose(connection)
            budget.spend(size)
            try:
                if flags & socket.MSG_TRUNC:
                    raise FrameError(Refusal.OVERSIZED, f"a frame of more than {FRAME_BYTES_MAX} bytes")
                self._take(connection, bytes(memoryview(self._buffer)[:size]))
            except FrameError as error:
                self._refuse(connection, error)
                if error.refusal is Refusal.LIMIT:
                    budget.spend(LIMIT_COST_BYTES)
        return None

    def _take(self, connection: Connection, frame: bytes) -> None:
        (record, hello), uid = connection.conversation.decode(frame), connection.conversation.peer.uid
        if isinstance(record, Request):
            self._ask(connection, record)
        elif isinstance(record, DumpRequest):
            self._ask_for_dump(connection, record)
        elif isinstance(record, HealthRequest):
            self._say_health(connection, record)
        elif isinstance(record, Answer):
            self._requests.answered(record, connection=connection.number)
        else:
            assert hello is not None, "a record has a hello before it"
            left = self._state.record(record, hello=hello, uid=uid, owner=connection.number, size=len(frame))
            for displaced in left:
                self._notices.warn("displaced", "%s", displaced, of=displaced.place.uid)
                for other in self._connections.values():
                    other.lose(displaced.place)
            connection.is_admitted = True
            if self._recorder is not None:
                self._recorder.record_rank(record, payload_of(frame), hello, uid)
        self._frames += 1
        if isinstance(record, JobHello):
            said = "%s: hello from %s on %s"
            self._notices.tell(logging.INFO, "hello", said, connection, record.host, record.device, of=uid)

    def _ask(self, connection: Connection, request: Request) -> None:
        peer = connection.conversation.peer
        said = "%s: asks job %s for %s"
        self._notices.tell(logging.INFO, "request", said, connection, request.job, request.action, of=peer.uid)
        targets = [
            Target(other.number, other.conversation.hello, other.conversation.peer.uid)
            for other in self._connections.values()
            if other.conversation.hello is not None and other.is_admitted
            # A job that made room, or was forgotten, may be another user's by now.
            if self._state.uid_of(JobKey.of(other.conversation.hello)) in (None, other.conversation.peer.uid)
        ]
        self._requests.ask(request, asker=connection.number, uid=peer.uid, targets=targets, meet=self._state.rank_steps)

    def _ask_for_dump(self, connection: Connection, request: DumpRequest) -> None:
        uid = connection.conversation.peer.uid

        def answer(done: bool, said: str) -> None:  # called by the recorder's threads
            state: Literal["done", "refused"] = "done" if done else "refused"
            self._send(connection.number, Answer(job="", rank=None, number=request.serial, state=state, detail=said))

        if not may_dump(uid, os.geteuid()):
            self._notices.warn("dump", "%s: asked for a recording and may have none", connection, of=uid)
            answer(
                False, "a recording holds what all users' jobs did: only root and the daemon's own user may have one"
            )
        elif self._recorder is None:
            answer(False, "this daemon has no recorder: see [daemon] recorder_seconds")
        else:
            self._recorder.ask(uid, request.note, answer)

    def _say_health(self, connection: Connection, request: HealthRequest) -> None:
        """Answer whether the daemon's numbers are fresh: anybody who may connect may know, as at /-/healthy."""
        trouble = self._trouble()
        state: Literal["done", "refused"] = "done" if trouble is None else "refused"
        answer = Answer(job="", rank=None, number=request.serial, state=state, detail=trouble or "ok")
        self._say(connection, answer)

    def _send(self, number: int, message: Message) -> bool:
        for connection in list(self._connections.values()):
            if connection.number == number:
                return self._say(connection, message)
        return False

    def _say(self, connection: Connection, message: Message) -> bool:
        try:
            connection.sock.send(encode_frame(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except (OSError, FrameError) as error:
            _log.debug("%s: %s", connection, error)
            return False
        return True

    def _refuse(self, connection: Connection, error: FrameError) -> None:
        self._refused[error.refusal] += 1
        if not connection.is_admitted and not connection.was_turned_away:
            connection.was_turned_away = True
            self._say(connection, HelloRefused(reason=clean(error, TEXT_CHARACTERS_MAX)))
        if error.refusal not in connection.logged:
            connection.logged.add(error.refusal)
            said, uid = "%s: refused a frame: %s: %s", connection.conversation.peer.uid
            self._notices.warn(error.refusal, said, connection, error.refusal, error, of=uid)

    def _lose(self, connection: Connection) -> None:
        """Handle that the peer is gone: after a goodbye its job has ended, without one that is worth a line."""
        hello = connection.conversation.hello
        if hello is not None and self._state.leave(hello, connection.number):
            self._notices.warn("lost", "%s: went without a goodbye", connection, of=connection.conversation.peer.uid)
        self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        self._requests.left(connection.number)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        if self._connections.pop(connection.sock.fileno(), None) is not None:
            self._forget(connection.conversation.peer.uid)
        connection.sock.close()

    def _forget(self, uid: int) -> None:
        self._by_uid[uid] -= 1
        if self._by_uid[uid] <= 0:
            del self._by_uid[uid]  # else there is an entry for each user who ever came
