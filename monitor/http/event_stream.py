"""Pushes each tick to all open pages as server-sent events: one frame for all, on one thread that waits for no viewer.

A thread for each viewer would be a thread for each browser tab that somebody forgot, and a slow viewer would block it.
So the web server answers the request, hands over the connection, and one thread here sends each new frame to all of
them without ever blocking.  What the kernel does not take at once is sent when it does, frames that come meanwhile are
skipped, and a viewer that takes nothing for SLOW_SECONDS is disconnected.  The page connects again by itself.

Nobody can tell whether a viewer reads: its kernel takes megabytes that its program never reads.  So a place is not held
for ever.  When all are taken a new viewer gets one of the source with most of them (`fair_share`), or of its own
source: that of a viewer that takes nothing just now, else of the oldest.  A page that lost its place connects again two
seconds later and gets another's; a client that only sits there does not.

Server-sent events (HTML standard, section 9.2), not WebSockets: viewers have nothing to send, and any proxy passes on
plain HTTP.  A viewer that sends something all the same is disconnected too.  Left out: what is in a frame (`routes`).
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample

from ..catalog_sample import sample
from ..fair_share import yielding_holder
from ..wakeable_selector import WakeableSelector
from ..watched_threads import CLOSE_SECONDS, WatchedThread

__all__ = ["KEEP_ALIVE_SECONDS", "SLOW_SECONDS", "VIEWERS_MAX", "EventStream"]

VIEWERS_MAX = 32
"""Pages open at one time.  More than one operator needs; for a wall of screens there is Grafana."""

SLOW_SECONDS = 5.0
"""A viewer that takes nothing of a frame for so long is disconnected."""

SEND_BYTES = 256 * 1024
"""Send buffer of the kernel for a viewer: VIEWERS_MAX times 256 KiB in all, and a few frames late at most."""

KEEP_ALIVE_SECONDS = 15.0
"""Proxies close silent connections, nginx after 60 s; with long periods a comment is sent between frames."""

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

    def offer(self, frame: bytes, now_ns: int) -> None:
        """Send `frame`, or skip it while an earlier one is under way; raises OSError when the viewer is gone."""
        if not self.rest:
            self.rest, self.moved_ns = memoryview(frame), now_ns
            self.go_on(now_ns)

    def go_on(self, now_ns: int) -> None:
        """Send as much of the rest as the kernel takes."""
        while self.rest:
            try:
                sent = self.connection.send(self.rest)
            except _NOT_NOW:
                return
            self.rest, self.moved_ns = self.rest[sent:], now_ns


class EventStream:
    """Connections that get every frame.  `admit` and `push` may be called from any thread and never block."""

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
        self._said_ns = 0
        self._displaced = 0
        self._dropped = 0
        self._frames = 0

    @property
    def count(self) -> int:
        """How many are connected."""
        viewers = list(self._viewers.values())
        return sum(not viewer.is_leaving for viewer in viewers) + len(self._waiting)

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many viewers there are, what became of the others, and how many frames were pushed."""
        yield sample("pacecar_daemon_viewers", self.count)
        yield sample("pacecar_daemon_viewers_displaced_total", self._displaced)
        yield sample("pacecar_daemon_viewers_dropped_total", self._dropped)
        yield sample("pacecar_daemon_viewer_frames_total", self._frames)

    def start(self) -> None:
        """Begin to send."""
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
        """Close what the thread works with, which the thread does: the number of a closed file is soon another's."""
        for viewer in [*self._viewers.values(), *self._waiting]:
            _hang_up(viewer.connection)
        self._viewers.clear()
        self._waiting.clear()
        self._selector.close()

    def admit(self, connection: socket.socket, *, source: str = "") -> None:
        """Take over `connection`, whose request is answered, for a client of `source`; another may have to leave."""
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
        """Choose the viewer that leaves for one of `source`, when all places are taken."""
        here = [*(v for v in list(self._viewers.values()) if not v.is_leaving), *self._waiting]
        if len(here) < self._viewers_max:
            return
        held = Counter(viewer.source for viewer in here)
        giver = yielding_holder(source, held)
        giver = giver if giver is not None or source not in held else source
        those = [viewer for viewer in here if giver in (None, viewer.source)]
        leaving = next((viewer for viewer in those if viewer.rest), those[0])  # in order of age
        self._displaced += 1
        leaving.is_leaving = True
        if leaving in self._waiting:
            self._waiting.remove(leaving)
            _hang_up(leaving.connection)

    def push(self, frame: bytes) -> None:
        """Send `frame` to all; one that is not sent yet is replaced."""
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
            self._take_in()
            with self._lock:
                frame, self._frame = self._frame, None
            now_ns = self._clock.monotonic_ns()
            if frame is None and now_ns - self._said_ns >= KEEP_ALIVE_SECONDS * NS_PER_SECOND:
                frame = _COMMENT
            if frame is not None:
                self._send(frame, now_ns)
            for viewer in [v for v in self._viewers.values() if v.rest and now_ns - v.moved_ns >= self._slow_ns]:
                self._dropped += 1
                self._forget(viewer)
        self._release()

    def _take_in(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                viewer = self._waiting.popleft()
                self._viewers[viewer.connection] = viewer
            self._selector.register(viewer.connection, selectors.EVENT_READ)

    def _send(self, frame: bytes, now_ns: int) -> None:
        self._said_ns = now_ns
        self._frames += frame is not _COMMENT
        for viewer in list(self._viewers.values()):
            try:
                viewer.offer(frame, now_ns)
            except OSError:
                self._forget(viewer)
                continue
            self._listen(viewer)

    def _answer(self, viewer: _Viewer | None, mask: int) -> None:
        if viewer is None:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                viewer.go_on(self._clock.monotonic_ns())
            if mask & selectors.EVENT_READ and not _is_quiet(viewer.connection):
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


def _is_quiet(connection: socket.socket) -> bool:
    """Return whether the viewer sent nothing and is still there: TLS is readable for records that carry no data."""
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
