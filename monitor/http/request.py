"""Parses the head of an HTTP request, and writes the heads of responses.

The standard library reads a head from a blocking file and parses it as an e-mail: ten times the work, and a thread for
each client.  We answer GET and HEAD without a body, so a request is just a small head.  A head that is too large, has
a body or is ambiguous is refused, not repaired (RFC 9112, section 2.2).

Pure: bytes in, values out.  Left out: chunked bodies, pipelining and persistent connections; a scrape is one request.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.utils import formatdate
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

__all__ = ["HEAD_BYTES_MAX", "HttpError", "HttpRequest", "HttpResponse", "WebRefusal", "ends", "head", "parse", "plain"]

HEAD_BYTES_MAX = 16 * 1024
"""Prometheus sends 400 bytes; a browser with cookies of other services on this host sends a few thousand."""

HEADERS_MAX = 100

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, section 5.6.2."""


class WebRefusal(StrEnum):
    """Why a client was not served: the label values of the refusal counter."""

    CONNECTIONS = "connections"
    TIMEOUT = "timeout"
    HEAD_SIZE = "head_size"
    MALFORMED = "malformed"
    BODY = "body"
    TLS = "tls"
    NO_CREDENTIALS = "no_credentials"
    CREDENTIALS = "credentials"
    GUESSES = "guesses"


class HttpError(ValueError):
    """The request is refused; `status` is the first line of the response."""

    def __init__(self, refusal: WebRefusal, status: str, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.status = status


class HttpRequest(NamedTuple):
    """A request; `headers` maps lower-case names to values, `source` is the client's (`client_source`)."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = {}
    source: str = ""

    def header(self, name: str) -> str:
        """Return the value of the header `name` (lower case), "" if it was not sent."""
        return self.headers.get(name, "")


class HttpResponse(NamedTuple):
    """A response.  If `take_over` is set, it gets the connection once `body` was sent, and must bound it from then on.

    The page adds Content-Length itself: a response that goes on has none.
    """

    status: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    take_over: Callable[[socket.socket], None] | None = None


def ends(received: bytes | bytearray) -> bool:
    """Return whether the head is complete; raises HttpError if it exceeds its bound."""
    if received.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX + 4) >= 0:
        return True
    if len(received) > HEAD_BYTES_MAX:
        raise _too_large(f"{HEAD_BYTES_MAX} bytes")
    return False


def parse(received: bytes | bytearray, source: str = "") -> HttpRequest:
    """Return the request in a complete head; raises HttpError."""
    lines = bytes(received).partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[0].isalpha() or not words[1].isprintable():
        raise _malformed("the first line is not an HTTP/1 request line")
    method, target, _ = words
    if not target.startswith("/"):
        raise _malformed("the target of a request must be a path")
    if len(lines) - 1 > HEADERS_MAX:
        raise _too_large(f"{HEADERS_MAX} headers")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or "\0" in value:
            raise _malformed("a line of the head is not a header")
        name, value = name.lower(), value.strip(" \t")
        if name == "host" and name in headers:
            raise _malformed("a request must name one host")  # RFC 9112, section 3.2
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise HttpError(WebRefusal.BODY, "413 Content Too Large", "requests must not have a body")
    path, _, query = target.partition("#")[0].partition("?")
    return HttpRequest(method, unquote_to_bytes(path).decode("latin-1"), query, headers, source)


def _malformed(message: str) -> HttpError:
    return HttpError(WebRefusal.MALFORMED, "400 Bad Request", message)


def _too_large(bound: str) -> HttpError:
    message = f"the head of a request can have at most {bound}"
    return HttpError(WebRefusal.HEAD_SIZE, "431 Request Header Fields Too Large", message)


def head(status: str, headers: Iterable[tuple[str, str]], ours: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return the head of a response; the administrator's headers, `ours`, replace the page's of the same name."""
    taken = {name.lower() for name, _ in ours}
    lines = [f"HTTP/1.1 {status}", f"Date: {formatdate(usegmt=True)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers if name.lower() not in taken]
    lines += [f"{name}: {value}" for name, value in ours]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def plain(status: str, text: str, *headers: tuple[str, str]) -> HttpResponse:
    """Return a response of one line of text, not to be cached."""
    body = f"{text}\n".encode()
    kind = ("Content-Type", "text/plain; charset=utf-8")
    return HttpResponse(
        status, [kind, ("Content-Length", str(len(body))), ("Cache-Control", "no-store"), *headers], body
    )
