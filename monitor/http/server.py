"""Serves HTTP to many clients, some of them very slow, on one thread: one selector, and a deadline for each client.

A thread for each client is bounded by nothing, and a fixed number of threads is blocked by that many slow clients:
eight that send nothing, and Prometheus has a gap.  Here nobody is waited for.  A request is read as it comes, answered
in a millisecond when its head is whole, and its answer leaves as fast as the client takes it.  A client that is not
done in time is disconnected.  When all places are taken the source with most of them (`client_source`: a local user, or
an address) loses its oldest client.  So a scraper that sends its request at once is served whoever else is there.

The pages are computed on this thread: to hand one over to another is a wait for the interpreter, behind all collectors
that want it, and longer than the page takes.  One thing is not quick, and has a thread: a password that must be
checked (bcrypt), one at a time and in a fair order (`password_queue`).  A page whose answer never ends (server-sent
events) takes the connection over by HAND_OVER once its first bytes have left, and must bound it from then on.

TLS and passwords come as a `Security`, which may be exchanged at any time: connections made before keep theirs.

Left out: persistent connections, HTTP/2, and a limit on TLS handshakes (a millisecond of CPU each).
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Queue
from typing import TYPE_CHECKING

from pacecar.clock import SystemClock
from pacecar.records import Sample

from ..catalog_sample import sample
from ..fair_share import yielding_holder
from ..fault_containment import ContainedPart, FaultContainment
from ..ingest.log_limiter import LogLimiter
from ..wakeable_selector import WakeableSelector
from ..watched_threads import LIMIT_SECONDS, TURN_SECONDS, WatchedThread
from .request import HEAD_BYTES_MAX, HttpError, WebRefusal, ends, head, parse, plain
from .routes import HAND_OVER, SOURCE
from .security.basic_auth import AuthVerdict, BasicAuth
from .security.client_source import LoopbackUsers, source_of
from .security.password_queue import PasswordQueue
from .security.web_config import OPEN, Security, authorization

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication, WSGIEnvironment

__all__ = ["WEB_CONNECTIONS_MAX", "WebError", "WebServer"]

WEB_CONNECTIONS_MAX = 256
"""Clients at one time.  With the socket server's 512 and our own files that is below the usual 1024 open files."""

HEAD_SECONDS = 5.0
"""Time from the connection to the end of the request's head, the TLS handshake included."""

ANSWER_SECONDS = 10.0
"""Time for the whole answer to be taken: a page of 1 MB at 1 Mbit/s."""

ACCEPTS_PER_TURN = 32
"""Clients accepted before those that are connected have their turn."""

ACCEPT_PAUSE_SECONDS = 0.1
"""Pause after a failed accept: without file descriptors it would fail again at once, for ever."""

CHECK_SECONDS = 20.0
"""Time for a password to have its turn and be checked: with WAITING_MAX others before it, at the usual cost."""

RETRY_SECONDS = 5
"""Retry-After of a client that lost its place among those whose passwords wait."""

BACKLOG = 128

NOTICES_PER_MINUTE = 6
"""Lines in the log about clients that were not served, for each reason and source; the metric counts them all."""

CLOSE_SECONDS = 1.0
"""How long stopping waits for each thread that still answers."""

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_log = logging.getLogger(__name__)


class WebError(RuntimeError):
    """The address cannot be bound; the message names it and what to do."""


class _Client:
    """One connection.  `out` is what it has not taken yet of its answer; `take` gets the connection after that."""

    __slots__ = ("deadline", "environ", "is_shaken", "out", "peer", "received", "sock", "source", "take")

    def __init__(self, sock: socket.socket, peer: str, source: str, deadline: float) -> None:
        self.sock = sock
        self.peer = peer
        self.source = source
        self.deadline = deadline
        self.is_shaken = not isinstance(sock, ssl.SSLSocket)
        self.received = bytearray()
        self.environ: WSGIEnvironment | None = None
        self.out: memoryview | None = None
        self.take: Callable[[socket.socket], None] | None = None


class WebServer:
    """Serves a WSGI application at an address."""

    def __init__(self, host: str, port: int, *, faults: FaultContainment | None = None) -> None:
        self._host = host
        self._port = port
        self._faults = faults or FaultContainment()
        self._listener: socket.socket | None = None
        self._server: WatchedThread | None = None
        self._checker: WatchedThread | None = None
        self._app: WSGIApplication | None = None
        self._clock = SystemClock()
        self._clients: dict[int, _Client] = {}  # in order of age
        self._refused: Counter[WebRefusal] = Counter()
        self._by_source: Counter[str] = Counter()
        self._users = LoopbackUsers()
        self._notices = LogLimiter(_log, NOTICES_PER_MINUTE, self._clock)
        self._checks: PasswordQueue[tuple[_Client, BasicAuth, str]] = PasswordQueue(self._clock)
        self._checked: Queue[tuple[_Client, AuthVerdict]] = Queue()  # bounded by what was in the other
        self._closing = False
        self._accept_again: float | None = None
        self.secure(OPEN)

    @property
    def port(self) -> int:
        """The port that is bound; meaningful between `bind` and `close` where port 0 was asked for."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else self._port

    @property
    def thread(self) -> WatchedThread | None:
        """The thread that serves; None before `start` and after `close`."""
        return self._server

    @property
    def checker(self) -> WatchedThread | None:
        """The thread that checks passwords; None before `start` and after `close`."""
        return self._checker

    @property
    def connections(self) -> int:
        """How many clients are connected, without those that a page took over."""
        return len(self._clients)

    def refused(self) -> dict[WebRefusal, int]:
        """Return how many clients were not served, by reason; every reason is there."""
        return {refusal: self._refused[refusal] for refusal in WebRefusal}

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many clients are connected, and how many were not served, by reason."""
        yield sample("pacecar_web_connections", self.connections)
        for refusal, count in self.refused().items():
            yield sample("pacecar_web_refused_total", count, refusal.value)

    def secure(self, security: Security) -> None:
        """Apply `security` to each client from now on; from any thread."""
        self._secured = (security, BasicAuth(security))  # one assignment: never one's users, another's key

    def bind(self) -> None:
        """Bind the address; raises WebError."""
        try:
            # Not the standard server's way, which asks DNS for our own name and hangs where DNS is broken.
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            both = address[0] == "::" and socket.has_dualstack_ipv6()
            self._listener = socket.create_server(
                (str(address[0]), self._port), family=family, backlog=BACKLOG, dualstack_ipv6=both
            )
        except OSError as error:
            raise WebError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error};"
                " stop what listens there (another pacecar daemon?),"
                " or choose another address with --host and --port or [daemon] host and port"
            ) from error
        self._listener.setblocking(False)

    def start(self, app: WSGIApplication) -> None:
        """Serve `app` on threads of our own."""
        assert self._listener is not None, "bind comes first"
        self._app = app
        self._selector = WakeableSelector()
        self._selector.register(self._listener, _READ)
        self._server = WatchedThread("web-serve", self._serve, self._clock, limit_seconds=LIMIT_SECONDS)
        self._checker = WatchedThread("web-check", self._check, self._clock)
        self._server.start()
        self._checker.start()

    def close(self) -> None:
        """Stop serving and free the address; clients that are still served are disconnected."""
        if self._listener is None:
            return
        self._closing = True
        if self._server is not None and self._checker is not None:
            self._selector.wake()
            self._checks.close()
            has_ended, _ = [thread.join(CLOSE_SECONDS) for thread in (self._server, self._checker)]
            if has_ended:
                self._release()
        self._server = self._checker = None
        self._listener.close()
        self._listener = None

    def _serve(self) -> None:
        assert self._listener is not None, "bound before it was started"
        thread = self._server
        assert thread is not None, "it runs this"
        while not self._closing:
            thread.progress()
            for key, _ in self._selector.select(self._pause()):
                if key.fileobj is self._listener:
                    self._accept(self._listener)
                elif isinstance(key.data, _Client):
                    self._safely(key.data, self._go_on)
            self._take_verdicts()
            self._expire(time.monotonic())
        self._release()

    def _release(self) -> None:
        """Close what the thread works with, which the thread does: the number of a closed file is soon another's."""
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._users.close()

    def _pause(self) -> float:
        """Return the time until a client's deadline, or until accepting again, and TURN_SECONDS at most."""
        due = [client.deadline for client in self._clients.values()]
        if self._accept_again is not None:
            due.append(self._accept_again)
        return min(TURN_SECONDS, max(0.0, min(due) - time.monotonic())) if due else TURN_SECONDS

    def _expire(self, now: float) -> None:
        for client in [client for client in self._clients.values() if client.deadline <= now]:
            self._count(WebRefusal.TIMEOUT, client, "it was not done in time")
            self._drop(client)
        if self._accept_again is not None and self._accept_again <= now:
            self._accept_again = None
            if self._listener is not None:
                self._selector.register(self._listener, _READ)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of file descriptors
                if not self._closing:
                    _log.warning("cannot accept a client: %s; trying again", error)
                    self._selector.unregister(listener)
                    self._accept_again = time.monotonic() + ACCEPT_PAUSE_SECONDS
                return
            source = source_of(sock, self._users)
            self._make_room(source)
            sock.setblocking(False)
            context = self._secured[0].context
            if context is not None:
                try:
                    sock.getpeername()  # a client that has reset raises in wrap_socket, too, but leaves a socket there
                    sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                except (OSError, ValueError) as error:
                    self._count(WebRefusal.TLS)
                    _log.debug("client %s: %s", address[0], error)
                    sock.close()
                    continue
            client = _Client(sock, str(address[0]), source, time.monotonic() + HEAD_SECONDS)
            self._clients[sock.fileno()] = client
            self._by_source[source] += 1
            self._selector.register(sock, _READ, client)
            self._safely(client, self._go_on)  # a client that speaks first has often spoken by now

    def _make_room(self, source: str) -> None:
        """Disconnect the oldest client of the source with most, or of `source` itself, when all places are taken."""
        if len(self._clients) >= WEB_CONNECTIONS_MAX:
            giver = yielding_holder(source, self._by_source)
            giver = giver if giver is not None or source not in self._by_source else source
            oldest = next(one for one in self._clients.values() if giver in (None, one.source))
            self._count(WebRefusal.CONNECTIONS, oldest, f"{WEB_CONNECTIONS_MAX} are connected, it made room")
            self._drop(oldest)

    def _safely(self, client: _Client, act: Callable[[_Client], None]) -> None:
        if self._clients.get(client.sock.fileno()) is not client:
            return  # it made room for another in this same turn
        try:
            act(client)
        except (ssl.SSLWantReadError, BlockingIOError, InterruptedError):
            self._selector.modify(client.sock, _WRITE if client.out is not None else _READ, client)
        except ssl.SSLWantWriteError:
            self._selector.modify(client.sock, _WRITE, client)
        except HttpError as error:
            self._refuse(client, error)
        except OSError as error:  # it went away, which is its right; or it does not speak our TLS, which is counted
            if isinstance(error, ssl.SSLError) or not client.is_shaken:
                self._count(WebRefusal.TLS, client, error)
            self._drop(client)
        except Exception as error:  # noqa: BLE001  the outer boundary: one request must not end the service of all others
            self._faults.caught(ContainedPart.WEB, f"the request of {client.peer}", error)
            self._drop(client)

    def _go_on(self, client: _Client) -> None:
        """Take the next step with `client`; raises where it must be waited for."""
        if not client.is_shaken:
            assert isinstance(client.sock, ssl.SSLSocket), "only TLS has handshakes"
            client.sock.do_handshake()
            client.is_shaken = True
        if client.out is not None:
            return self._send(client)
        if client.environ is not None:
            return None  # its password is being checked; what it says meanwhile is of no interest
        while not ends(client.received):
            bits = client.sock.recv(HEAD_BYTES_MAX)
            if not bits:
                return self._drop(client)
            client.received += bits
        security, gate = self._secured
        client.environ = parse(
            client.received, peer=client.peer, host=self._host, port=self.port,
            scheme="http" if security.context is None else "https",
        )  # fmt: skip
        header = client.environ.get("HTTP_AUTHORIZATION")
        verdict = gate.look(header)
        if verdict is AuthVerdict.UNCHECKED and header is not None:
            return self._have_checked(client, gate, header)
        return self._judge(client, verdict)

    def _have_checked(self, client: _Client, gate: BasicAuth, header: str) -> None:
        """Queue the check of the password in `header`; a client that loses its place for it is told to come again."""
        given = authorization(header)
        assert given is not None, "only what the gate could read is unchecked"
        client.deadline = time.monotonic() + CHECK_SECONDS
        self._selector.unregister(client.sock)  # not read until it is known: readable would wake us for ever
        turned_away = self._checks.put((client, gate, header), client.source, given[0])
        if turned_away is not None:
            self._tell(turned_away[0], AuthVerdict.TOO_MANY)

    def _tell(self, client: _Client, verdict: AuthVerdict) -> None:
        """Go on with a client whose password was checked, or was turned away."""
        if self._clients.get(client.sock.fileno()) is client:  # else it went, or was dropped, meanwhile
            self._selector.register(client.sock, _WRITE, client)
            self._safely(client, partial(self._judge, verdict=verdict))

    def _judge(self, client: _Client, verdict: AuthVerdict) -> None:
        if verdict is AuthVerdict.ALLOWED:
            return self._answer(client)
        refusal = WebRefusal(verdict.value)
        status = "429 Too Many Requests" if verdict is AuthVerdict.TOO_MANY else "401 Unauthorized"
        raise HttpError(refusal, status, "wrong or no credentials" if status[0:3] == "401" else "too many guesses")

    def _check(self) -> None:
        """Check passwords, one at a time; on a thread of its own."""
        while (task := self._checks.wait()) is not None and not self._closing:
            client, gate, header = task
            verdict = gate.look(header)  # known by now, if another waited with the same
            if verdict is AuthVerdict.UNCHECKED:
                verdict = AuthVerdict.WRONG
                begun = time.perf_counter_ns()
                try:
                    verdict = gate.check(header)
                except Exception as error:  # noqa: BLE001  the outer boundary: who cannot be checked does not come in
                    self._faults.caught(ContainedPart.WEB, "a client whose password was checked", error)
                took_ns = time.perf_counter_ns() - begun
                self._checks.checked(client.source, is_right=verdict is AuthVerdict.ALLOWED, took_ns=took_ns)
            self._checked.put((client, verdict))
            self._selector.wake()

    def _take_verdicts(self) -> None:
        while not self._checked.empty():
            self._tell(*self._checked.get())

    def _answer(self, client: _Client) -> None:
        """Run the application; its answer leaves as fast as the client takes it."""
        assert self._app is not None, "started with one"
        assert client.environ is not None, "the head is read"
        said: list[tuple[str, list[tuple[str, str]]]] = []

        def start_response(status: str, headers: list[tuple[str, str]], _: object = None) -> Callable[[bytes], object]:
            said.append((status, headers))
            return lambda _: None

        def hand_over(take: Callable[[socket.socket], None]) -> None:
            client.take = take

        client.environ[HAND_OVER] = hand_over
        client.environ[SOURCE] = client.source
        try:
            body = b"".join(self._app(client.environ, start_response))
            if not said:
                raise AssertionError("a page without a status")
        except Exception as error:  # noqa: BLE001  a bug of ours in one page
            self._faults.caught(ContainedPart.WEB, f"the page {client.environ['PATH_INFO']!r}", error)
            status, headers, lines = plain("500 Internal Server Error", "a bug in pacecar; its log has the traceback")
            said[:], body, client.take = [(status, headers)], b"".join(lines), None
        if client.environ["REQUEST_METHOD"] == "HEAD":
            body, client.take = b"", None
        self._begin(client, head(*said[-1], self._secured[0].headers) + body)

    def _count(self, refusal: WebRefusal, client: _Client | None = None, why: object = "") -> None:
        self._refused[refusal] += 1
        if client is not None:
            self._notices.warn(refusal, "client %s not served: %s: %s", client.peer, refusal, why, of=client.source)

    def _refuse(self, client: _Client, error: HttpError) -> None:
        self._count(error.refusal, client, error)
        status, headers, body = plain(error.status, str(error))
        if status.startswith("401"):
            headers.append(("WWW-Authenticate", 'Basic realm="pacecar", charset="UTF-8"'))
        if error.refusal is WebRefusal.GUESSES:
            headers.append(("Retry-After", str(RETRY_SECONDS)))
        lines = [] if client.received.startswith(b"HEAD ") else body
        answer = head(status, headers, self._secured[0].headers) + b"".join(lines)
        self._safely(client, lambda client: self._begin(client, answer))

    def _begin(self, client: _Client, answer: bytes) -> None:
        client.out = memoryview(answer)
        client.deadline = time.monotonic() + ANSWER_SECONDS
        self._send(client)

    def _send(self, client: _Client) -> None:
        while client.out:
            client.out = client.out[client.sock.send(client.out) :]
        if client.take is not None:
            self._forget(client)
            client.take(client.sock)
            return
        if isinstance(client.sock, ssl.SSLSocket):
            with suppress(OSError, ValueError):  # closes TLS, and does not wait for the other side's close
                client.sock.unwrap()
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._forget(client)
        with suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
        client.sock.close()

    def _forget(self, client: _Client) -> None:
        if self._clients.get(client.sock.fileno()) is client:
            del self._clients[client.sock.fileno()]
            self._by_source[client.source] -= 1
            if self._by_source[client.source] <= 0:
                del self._by_source[client.source]
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
