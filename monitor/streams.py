"""Who gets a body that comes bit by bit?  Each on a thread of its own, at most STREAMS_MAX, and none is waited for.

Server-sent events end when their viewer leaves.  The server's one thread cannot sit in such a body, so it gives the
socket away.  A viewer that does not take a bit within STREAM_SECONDS is hung up on.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

__all__ = ["STREAMS_MAX", "Streams", "close_body"]

STREAMS_MAX = 32
"""At one time; each has a thread."""

STREAM_SECONDS = 5.0
"""How long one bit of a body may take to leave."""

_log = logging.getLogger(__name__)


class Streams:
    """The sockets that were given away.  `late` is called when one was hung up on."""

    def __init__(self, late: Callable[[], None]) -> None:
        self._late = late
        self._socks: set[socket.socket] = set()
        self._closing = False

    def __len__(self) -> int:
        return len(self._socks)

    @property
    def is_full(self) -> bool:
        """Whether one more would be too many."""
        return len(self._socks) >= STREAMS_MAX

    def begin(self, sock: socket.socket, first: Callable[[], bytes | None], body: Iterable[bytes]) -> None:
        """Send what `first` gives and then `body` as it comes, and close both.

        `first`, the head, may be None until the body's first bit is there: a generator says its status then.
        """
        sock.settimeout(STREAM_SECONDS)
        self._socks.add(sock)
        threading.Thread(target=self._flow, args=(sock, first, body), name="pacecar-web-stream", daemon=True).start()

    def close(self) -> None:
        """Hang up on everybody; their threads end with the next bit."""
        self._closing = True
        for sock in list(self._socks):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _flow(self, sock: socket.socket, first: Callable[[], bytes | None], body: Iterable[bytes]) -> None:
        try:
            head = first()
            if head is not None:
                sock.sendall(head)
            for bits in body:
                if head is None:
                    head = first() or b""
                    sock.sendall(head)
                sock.sendall(bits)
                if self._closing:
                    break
        except TimeoutError:
            self._late()
        except OSError:
            """It went away, which is its right."""
        except Exception:  # noqa: BLE001  a bug of ours in one page
            _log.exception("a stream failed")
        finally:
            close_body(body)
            self._socks.discard(sock)
            sock.close()


def close_body(body: Iterable[bytes]) -> None:
    """Close a WSGI body, if it can be closed (PEP 3333)."""
    close = getattr(body, "close", None)
    if close is not None:
        with suppress(Exception):
            close()
