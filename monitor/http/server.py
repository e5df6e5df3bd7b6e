"""Serves HTTP to many clients, some of them very slow, on one thread with a selector and a deadline for each client.

A thread for each client has no bound, and slow clients block a fixed number of threads: eight that send nothing, and
Prometheus has a gap.  This server never waits for a client.  It reads a request as it arrives, answers within a
millisecond once the head is complete, and sends the response as fast as the client reads.  A client that exceeds its
deadline is disconnected.  When all places are taken, the source with the most clients (`client_source`: a local user or
an address) loses its oldest one.  So a scraper that sends its request at once is always served.

Pages are computed on this thread: handing them to another means waiting for the interpreter behind all collectors,
which takes longer than the page.  Only password checks (bcrypt) are slow; they have their own thread, one at a time and
in a fair order (`password_queue`).  A response that never ends (server-sent events) takes the connection over.

TLS and passwords come as a `Security` that can be replaced at any time; existing connections keep theirs.

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

from pacecar.clock import SystemClock
from pacecar.records import Sample

from ..catalog_sample import sample
from ..fair_share import yielding_item
from ..fault_containment import ContainedPart, FaultContainment
from ..ingest.log_limiter import LogLimiter
from ..wakeable_selector import WakeableSelector
from ..watched_threads import LIMIT_SECONDS, TURN_SECONDS, WatchedThread
from .request import HEAD_BYTES_MAX, HttpError, HttpRequest, HttpResponse, WebRefusal, ends, head, parse, plain
from .security.basic_auth import AuthVerdict, BasicAuth
from .security.client_source import LoopbackUsers, source_of
from .security.password_queue import PasswordQueue
from .security.web_config import OPEN, Security, authorization

__all__ = ["WEB_CONNECTIONS_MAX", "WebError", "WebServer"]

WEB_CONNECTIONS_MAX = 256
"""Clients at one time.  Together with the socket server's 512 and our own files: below the usual 1024 open files."""

HEAD_SECONDS = 5.0
"""Time from the connection to the end of the request's head, including the TLS handshake."""

ANSWER_SECONDS = 10.0
"""Time for the client to read the whole response: a page of 1 MB at 1 Mbit/s."""

ACCEPTS_PER_TURN = 32
"""Clients accepted in a row before the connected ones get their turn."""

ACCEPT_PAUSE_SECONDS = 0.1
"""Pause after a failed accept: without free file descriptors the next one would fail at once, too."""

CHECK_SECONDS = 20.0
"""Time to queue for and finish a password check: enough for WAITING_MAX others ahead, at the usual cost."""

RETRY_SECONDS = 5
"""Retry-After of a client that lost its place in the queue of password checks."""

BACKLOG = 128

NOTICES_PER_MINUTE = 6
"""Log lines about clients that were not served, per reason and source; the metric counts them all."""

CLOSE_SECONDS = 1.0
"""How long `close` waits for each thread."""

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_log = logging.getLogger(__name__)


class WebError(RuntimeError):
    """The address cannot be bound; the message names it and says what to do."""


class _Client:
    """One connection.  `out` is the unsent rest of the response; `take_over` gets the connection after that."""

    __slots__ = ("deadline", "has_shaken_hands", "out", "peer", "received", "request", "sock", "source", "take_over")

    def __init__(self, sock: socket.socket, peer: str, source: str, deadline: float) -> None:
        self.sock = sock
        self.peer = peer
        self.source = source
        self.deadline = deadline
        self.has_shaken_hands = not isinstance(sock, ssl.SSLSocket)
        self.received = bytearray()
        self.request: HttpRequest | None = None
        self.out: memoryview | None = None
        self.take_over: Callable[[socket.socket], None] | None = None


class WebServer:
    """Serves pages at an address."""

    def __init__(self, host: str, port: int, *, faults: FaultContainment | None = None) -> None:
        self._host = host
        self._port = port
        self._faults = faults or FaultContainment()
        self._listener: socket.socket | None = None
        self._server: WatchedThread | None = None
        self._checker: WatchedThread | None = None
        self._respond: Callable[[HttpRequest], HttpResponse] | None = None
        self._clock = SystemClock()
        self._clients: dict[int, _Client] = {}  # in order of age
        self._refused: Counter[WebRefusal] = Counter()
        self._users = LoopbackUsers()
        self._notices = LogLimiter(_log, NOTICES_PER_MINUTE, self._clock)
        self._checks: PasswordQueue[tuple[_Client, BasicAuth, str]] = PasswordQueue(self._clock)
        self._checked: Queue[tuple[_Client, AuthVerdict]] = Queue()  # bounded by `_checks`
        self._closing = False
        self._accept_again: float | None = None
        self.secure(OPEN)

    @property
    def port(self) -> int:
        """The bound port; if port 0 was requested, known only between `bind` and `close`."""
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
        """How many clients are connected, except those that a page took over."""
        return len(self._clients)

    def refused(self) -> dict[WebRefusal, int]:
        """Return how many clients were not served, for every reason."""
        return {refusal: self._refused[refusal] for refusal in WebRefusal}

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many clients are connected, and how many were not served by reason."""
        yield sample("pacecar_web_connections", self.connections)
        for refusal, count in self.refused().items():
            yield sample("pacecar_web_refused_total", count, refusal.value)

    def secure(self, security: Security) -> None:
        """Apply `security` to new clients; may be called from any thread."""
        self._secured = (security, BasicAuth(security))  # one assignment: users and key always belong together

    def bind(self) -> None:
        """Bind the address; raises WebError."""
        try:
            # The standard library's server asks DNS for our own name, which hangs where DNS is broken.
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

    def start(self, respond: Callable[[HttpRequest], HttpResponse]) -> None:
        """Answer requests by `respond`, on our own threads."""
        assert self._listener is not None, "bind comes first"
        self._respond = respond
        self._selector = WakeableSelector()
        self._selector.register(self._listener, _READ)
        self._server = WatchedThread("web-serve", self._serve, self._clock, limit_seconds=LIMIT_SECONDS)
        self._checker = WatchedThread("web-check", self._check, self._clock)
        self._server.start()
        self._checker.start()

    def close(self) -> None:
        """Stop serving, disconnect all clients and free the address."""
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
        thread, listener = self._server, self._listener
        assert listener is not None and thread is not None, "bound, then started"  # noqa: PT018  one condition
        while not self._closing:
            thread.progress()
            for key, _ in self._selector.select(self._pause()):
                if key.fileobj is listener:
                    self._accept(listener)
                elif isinstance(key.data, _Client):
                    self._safely(key.data, self._proceed)
            while not self._checked.empty():
                self._proceed_as_checked(*self._checked.get())
            self._expire(time.monotonic())
        self._release()

    def _release(self) -> None:
        """Close sockets; on the thread that uses them, because the number of a closed file is reused soon."""
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._users.close()

    def _pause(self) -> float:
        """Return the time to the next deadline or to accepting again, at most TURN_SECONDS."""
        due = [client.deadline for client in self._clients.values()]
        if self._accept_again is not None:
            due.append(self._accept_again)
        return min(TURN_SECONDS, max(0.0, min(due) - time.monotonic())) if due else TURN_SECONDS

    def _expire(self, now: float) -> None:
        for client in [client for client in self._clients.values() if client.deadline <= now]:
            self._count(WebRefusal.TIMEOUT, client, "it took too long")
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
                    sock.getpeername()  # raises for a reset client; so does wrap_socket, but it leaves a socket behind
                    sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                except (OSError, ValueError) as error:
                    self._count(WebRefusal.TLS)
                    _log.debug("client %s: %s", address[0], error)
                    sock.close()
                    continue
            client = _Client(sock, str(address[0]), source, time.monotonic() + HEAD_SECONDS)
            self._clients[sock.fileno()] = client
            self._selector.register(sock, _READ, client)
            self._safely(client, self._proceed)  # it has often sent its request by now

    def _make_room(self, source: str) -> None:
        """If all places are taken, disconnect the oldest client of the source with most, or of `source` itself."""
        if len(self._clients) >= WEB_CONNECTIONS_MAX:
            oldest = yielding_item(source, self._clients.values(), lambda client: client.source)
            self._count(WebRefusal.CONNECTIONS, oldest, f"{WEB_CONNECTIONS_MAX} are connected, it made room")
            self._drop(oldest)

    def _safely(self, client: _Client, act: Callable[[_Client], None]) -> None:
        if self._clients.get(client.sock.fileno()) is not client:
            return  # it made room for another client in this turn
        try:
            act(client)
        except (ssl.SSLWantReadError, BlockingIOError, InterruptedError):
            self._selector.modify(client.sock, _WRITE if client.out is not None else _READ, client)
        except ssl.SSLWantWriteError:
            self._selector.modify(client.sock, _WRITE, client)
        except HttpError as error:
            self._refuse(client, error)
        except OSError as error:  # the client left; count it only if TLS failed
            if isinstance(error, ssl.SSLError) or not client.has_shaken_hands:
                self._count(WebRefusal.TLS, client, error)
            self._drop(client)
        except Exception as error:  # noqa: BLE001  the outer boundary: one request must not end the service for others
            self._faults.caught(ContainedPart.WEB, f"the request of {client.peer}", error)
            self._drop(client)

    def _proceed(self, client: _Client) -> None:
        """Take the next step with `client`; raises if the client is not ready."""
        if not client.has_shaken_hands:
            assert isinstance(client.sock, ssl.SSLSocket), "only TLS has handshakes"
            client.sock.do_handshake()
            client.has_shaken_hands = True
        if client.out is not None:
            return self._send(client)
        if client.request is not None:
            return None  # its password is being checked; ignore what it sends meanwhile
        while not ends(client.received):
            received = client.sock.recv(HEAD_BYTES_MAX)
            if not received:
                return self._drop(client)
            client.received += received
        client.request = parse(client.received, client.source)
        auth, header = self._secured[1], client.request.headers.get("authorization")
        verdict = auth.recall(header)
        if verdict is AuthVerdict.UNCHECKED and header is not None:
            return self._queue_check(client, auth, header)
        return self._admit(client, verdict)

    def _queue_check(self, client: _Client, auth: BasicAuth, header: str) -> None:
        """Queue the check of the password in `header`; a client that loses its place is told to retry later."""
        given = authorization(header)
        assert given is not None, "only readable credentials are unchecked"
        client.deadline = time.monotonic() + CHECK_SECONDS
        self._selector.unregister(client.sock)  # until the verdict: unread bytes would wake us for ever
        turned_away = self._checks.put((client, auth, header), client.source, given[0])
        if turned_away is not None:
            self._proceed_as_checked(turned_away[0], AuthVerdict.TOO_MANY)

    def _proceed_as_checked(self, client: _Client, verdict: AuthVerdict) -> None:
        """Proceed with a client whose password was checked, or who was turned away."""
        if self._clients.get(client.sock.fileno()) is client:  # else it left or was dropped meanwhile
            self._selector.register(client.sock, _WRITE, client)
            self._safely(client, partial(self._admit, verdict=verdict))

    def _admit(self, client: _Client, verdict: AuthVerdict) -> None:
        if verdict is AuthVerdict.ALLOWED:
            return self._answer(client)
        refusal = WebRefusal(verdict.value)
        status = "429 Too Many Requests" if verdict is AuthVerdict.TOO_MANY else "401 Unauthorized"
        raise HttpError(refusal, status, "wrong or no credentials" if status[0:3] == "401" else "too many guesses")

    def _check(self) -> None:
        """Check passwords one at a time; runs on its own thread."""
        while (task := self._checks.wait()) is not None and not self._closing:
            client, auth, header = task
            verdict = auth.recall(header)  # known by now if another client waited with the same credentials
            if verdict is AuthVerdict.UNCHECKED:
                verdict = AuthVerdict.WRONG
                begun = time.perf_counter_ns()
                try:
                    verdict = auth.check(header)
                except Exception as error:  # noqa: BLE001  the outer boundary: refuse a client that cannot be checked
                    self._faults.caught(ContainedPart.WEB, "a client whose password was checked", error)
                took_ns = time.perf_counter_ns() - begun
                self._checks.checked(client.source, is_right=verdict is AuthVerdict.ALLOWED, took_ns=took_ns)
            self._checked.put((client, verdict))
            self._selector.wake()

    def _answer(self, client: _Client) -> None:
        """Compute the page and begin to send it."""
        respond, request = self._respond, client.request
        assert respond is not None and request is not None, "started, and the head is read"  # noqa: PT018  as above
        try:
            response = respond(request)
        except Exception as error:  # noqa: BLE001  a bug in one page
            self._faults.caught(ContainedPart.WEB, f"the page {request.path!r}", error)
            response = plain("500 Internal Server Error", "a bug in pacecar; its log has the traceback")
        self._begin(client, response, is_head=request.method == "HEAD")

    def _count(self, refusal: WebRefusal, client: _Client | None = None, why: object = "") -> None:
        self._refused[refusal] += 1
        if client is not None:
            self._notices.warn(refusal, "client %s not served: %s: %s", client.peer, refusal, why, of=client.source)

    def _refuse(self, client: _Client, error: HttpError) -> None:
        self._count(error.refusal, client, error)
        headers: list[tuple[str, str]] = []
        if error.status.startswith("401"):
            headers.append(("WWW-Authenticate", 'Basic realm="pacecar", charset="UTF-8"'))
        if error.refusal is WebRefusal.GUESSES:
            headers.append(("Retry-After", str(RETRY_SECONDS)))
        response, is_head = plain(error.status, str(error), *headers), client.received.startswith(b"HEAD ")
        self._safely(client, lambda client: self._begin(client, response, is_head=is_head))

    def _begin(self, client: _Client, response: HttpResponse, *, is_head: bool) -> None:
        start = head(response.status, response.headers, self._secured[0].headers)
        client.out = memoryview(start if is_head else start + response.body)
        client.take_over = None if is_head else response.take_over
        client.deadline = time.monotonic() + ANSWER_SECONDS
        self._send(client)

    def _send(self, client: _Client) -> None:
        while client.out:
            client.out = client.out[client.sock.send(client.out) :]
        if client.take_over is not None:
            self._forget(client)
            client.take_over(client.sock)
            return
        if isinstance(client.sock, ssl.SSLSocket):
            with suppress(OSError, ValueError):  # closes TLS without waiting for the other side
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
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
