"""Pushes each tick to all open pages as server-sent events, from one thread that waits for no viewer.

The web server answers the request and hands over the connection; one thread here sends each new frame to all viewers
without blocking.  (A thread for each viewer would be a thread for each forgotten browser tab.)  Bytes that the kernel
does not accept at once are sent later, frames that come meanwhile are skipped, and a viewer that accepts nothing for
SLOW_SECONDS is disconnected.  The page reconnects by itself.

The daemon cannot tell whether a viewer reads: its kernel accepts megabytes that its program never reads.  So no viewer
keeps its place for ever.  When all places are taken, the source with the most viewers (`fair_share`), or the newcomer's
own, gives up one: a viewer that is behind, else the oldest.  A page that lost its place reconnects after two seconds
and gets another one; an idle client does not.

Server-sent events (HTML standard, section 9.2), not WebSockets: viewers have nothing to send, and any proxy passes
plain HTTP.  A viewer that sends anything is disconnected.  Left out: what is in a frame (`routes`).
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample

from ..catalog_sample import sample
from ..fair_share import yielding_item
from ..wakeable_selector import WakeableSelector
from ..watched_threads import CLOSE_SECONDS, WatchedThread

__all__ = ["KEEP_ALIVE_SECONDS", "SLOW_SECONDS", "VIEWERS_MAX", "EventStream"]

VIEWERS_MAX = 32
"""Open pages.  More than one operator needs; a wall of screens should use Grafana."""

SLOW_SECONDS = 5.0
"""A viewer that accepts no byte of a pending frame for this long is disconnected."""

SEND_BYTES = 256 * 1024
"""The kernel's send buffer for a viewer: it is at most a few frames late, and all together use 8 MiB."""

KEEP_ALIVE_SECONDS = 15.0
"""Proxies close silent connections (nginx after 60 s), so long periods get a comment between frames."""

_COMMENT = b": still here\n\n"
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_log = logging.getLogger(__name__)


class _Viewer:
    def __init__(self, connection: socket.socket, source: str, now_ns: int) -> None:
        self.connection = connection
        self.source = source
        self.is_leaving = False
        self.rest = memoryview(b"")
        self.moved_ns = now_ns

    def send(self, frame: bytes, now_ns: int) -> None:
        """Send `frame`, or skip it if an earlier one is not sent yet; raises OSError if the viewer is gone."""
        if not self.rest:
            self.rest, self.moved_ns = memoryview(frame), now_ns
            self.send_rest(now_ns)

    def send_rest(self, now_ns: int) -> None:
        """Send as much of the rest as the kernel accepts."""
        while self.rest:
            try:
                sent = self.connection.send(self.rest)
            except _NOT_NOW:
                return
            self.rest, self.moved_ns = self.rest[sent:], now_ns


class EventStream:
    """Connections that get every frame.  `admit` and `push` never block, and any thread may call them."""

    def __init__(self, clock: Clock, *, viewers_max: int = VIEWERS_MAX, slow_seconds: float = SLOW_SECONDS) -> None:
        self._clock = clock
        self._viewers_max = viewers_max
        self._slow_ns = int(slow_seconds * NS_PER_SECOND)
        self._lock = threading.Lock()
        self._waiting: deque[_Viewer] = deque()  # bounded by viewers_max in all
        self._frame: bytes | None = None
        self._viewers: dict[socket.socket, _Viewer] = {}
        self.thread: WatchedThread | None = None
        """The thread that sends; None before `start` and after `close`."""
        self._is_closing = False
        self._selector = WakeableSelector()
        self._sent_ns = 0
        self._displaced = 0
        self._dropped = 0
        self._frames = 0

    @property
    def count(self) -> int:
        """How many viewers are connected."""
        viewers = list(self._viewers.values())
        return sum(not viewer.is_leaving for viewer in viewers) + len(self._waiting)

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many viewers are connected, were displaced or dropped, and how many frames were pushed."""
        yield sample("pacecar_daemon_viewers", self.count)
        yield sample("pacecar_daemon_viewers_displaced_total", self._displaced)
        yield sample("pacecar_daemon_viewers_dropped_total", self._dropped)
        yield sample("pacecar_daemon_viewer_frames_total", self._frames)

    def start(self) -> None:
        """Start the thread."""
        self.thread = WatchedThread("viewers", self._run, self._clock)
        self.thread.start()

    def close(self) -> None:
        """Disconnect all viewers."""
        with self._lock:
            self._is_closing = True
        self._selector.wake()
        has_ended = self.thread is None or self.thread.join(CLOSE_SECONDS)
        self.thread = None
        if has_ended:
            self._release()

    def _release(self) -> None:
        """Close sockets; on the thread that uses them, because the number of a closed file is reused soon."""
        for viewer in [*self._viewers.values(), *self._waiting]:
            _hang_up(viewer.connection)
        self._viewers.clear()
        self._waiting.clear()
        self._selector.close()

    def admit(self, connection: socket.socket, *, source: str = "") -> None:
        """Add a viewer of `source` whose request is answered; another one may have to leave."""
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        with self._lock:
            is_open = not self._is_closing
            if is_open:
                self._make_room(source)
                self._waiting.append(_Viewer(connection, source, self._clock.monotonic_ns()))
        if is_open:
            self._selector.wake()
        else:
            _hang_up(connection)

    def _make_room(self, source: str) -> None:
        """If all places are taken, choose the viewer that leaves for one of `source`."""
        here = [*(v for v in list(self._viewers.values()) if not v.is_leaving), *self._waiting]  # in order of age
        if len(here) < self._viewers_max:
            return
        here.sort(key=lambda viewer: not viewer.rest)
        leaving = yielding_item(source, here, lambda viewer: viewer.source)
        self._displaced += 1
        leaving.is_leaving = True
        if leaving in self._waiting:
            self._waiting.remove(leaving)
            _hang_up(leaving.connection)

    def push(self, frame: bytes) -> None:
        """Send `frame` to all viewers; it replaces one that is not sent yet."""
        with self._lock:
            if self._is_closing or not self.count:
                return
            self._frame = frame
        self._selector.wake()

    def _run(self) -> None:
        while not self._is_closing:
            now_ns = self._clock.monotonic_ns()
            wait = 1.0 if any(viewer.rest for viewer in self._viewers.values()) else KEEP_ALIVE_SECONDS
            for key, mask in self._selector.select(wait if self._viewers else None):
                if isinstance(key.fileobj, socket.socket):
                    self._answer(self._viewers.get(key.fileobj), mask)
            for viewer in [viewer for viewer in self._viewers.values() if viewer.is_leaving]:
                self._forget(viewer)
            self._add_waiting()
            with self._lock:
                frame, self._frame = self._frame, None
            now_ns = self._clock.monotonic_ns()
            if frame is None and now_ns - self._sent_ns >= KEEP_ALIVE_SECONDS * NS_PER_SECOND:
                frame = _COMMENT
            if frame is not None:
                self._send(frame, now_ns)
            for viewer in [v for v in self._viewers.values() if v.rest and now_ns - v.moved_ns >= self._slow_ns]:
                self._dropped += 1
                self._forget(viewer)
        self._release()

    def _add_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                viewer = self._waiting.popleft()
                self._viewers[viewer.connection] = viewer
            self._selector.register(viewer.connection, selectors.EVENT_READ)

    def _send(self, frame: bytes, now_ns: int) -> None:
        self._sent_ns = now_ns
        self._frames += frame is not _COMMENT
        for viewer in list(self._viewers.values()):
            try:
                viewer.send(frame, now_ns)
            except OSError:
                self._forget(viewer)
                continue
            self._listen(viewer)

    def _answer(self, viewer: _Viewer | None, mask: int) -> None:
        if viewer is None:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                viewer.send_rest(self._clock.monotonic_ns())
            if mask & selectors.EVENT_READ and not _is_silent(viewer.connection):
                self._forget(viewer)
                return
        except OSError:
            self._forget(viewer)
            return
        self._listen(viewer)

    def _listen(self, viewer: _Viewer) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if viewer.rest else 0)
        if self._selector.get_key(viewer.connection).events != wanted:
            self._selector.modify(viewer.connection, wanted)

    def _forget(self, viewer: _Viewer) -> None:
        with self._lock:
            del self._viewers[viewer.connection]
        with suppress(KeyError, ValueError):
            self._selector.unregister(viewer.connection)
        _hang_up(viewer.connection)


def _is_silent(connection: socket.socket) -> bool:
    """Return whether the viewer sent nothing and is still there: TLS records without data make it readable, too."""
    try:
        connection.recv(4096)
    except _NOT_NOW:
        return True
    return False


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        connection.close()
