"""Parses the head of an HTTP request into a WSGI environment or refuses it, and writes the heads of answers.

The standard library reads a head from a blocking file and parses it as an e-mail, which is ten times the work and needs
a thread for each client.  We answer GET and HEAD without a body, so a head is all there is, and it is small: what is
larger, has a body, or is ambiguous is refused and not repaired (RFC 9112, section 2.2).

Pure: bytes in, values out.  Left out: chunked bodies, pipelining and persistent connections; a scrape is one request.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

__all__ = ["HEAD_BYTES_MAX", "HttpError", "WebRefusal", "ends", "head", "parse", "plain"]

HEAD_BYTES_MAX = 16 * 1024
"""Prometheus sends 400 bytes, a browser with cookies of other services on this host a few thousand."""

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
    """A request that is not served; `status` is the answer's first line."""

    def __init__(self, refusal: WebRefusal, status: str, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.status = status


def ends(received: bytes | bytearray) -> bool:
    """Return whether the head is whole; raises HttpError when it exceeds its bound."""
    if received.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX + 4) >= 0:
        return True
    if len(received) > HEAD_BYTES_MAX:
        raise HttpError(
            WebRefusal.HEAD_SIZE,
            "431 Request Header Fields Too Large",
            f"a request's head has at most {HEAD_BYTES_MAX} bytes",
        )
    return False


def parse(received: bytes | bytearray, *, peer: str, host: str, port: int, scheme: str) -> WSGIEnvironment:
    """Return the WSGI environment (PEP 3333) of a whole head; raises HttpError."""
    lines = bytes(received).partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[0].isalpha() or not words[1].isprintable():
        raise _malformed("the first line is no HTTP/1 request")
    method, target, protocol = words
    if not target.startswith("/"):
        raise _malformed("the target of a request is a path")
    if len(lines) - 1 > HEADERS_MAX:
        raise HttpError(
            WebRefusal.HEAD_SIZE, "431 Request Header Fields Too Large", f"a request has at most {HEADERS_MAX} headers"
        )
    path, _, query = target.partition("#")[0].partition("?")
    environ: WSGIEnvironment = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
        "SERVER_NAME": host,
        "SERVER_PORT": str(port),
        "SERVER_PROTOCOL": protocol,
        "REMOTE_ADDR": peer,
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scheme,
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or "\0" in value:
            raise _malformed("a line of the head is no header")
        if "_" in name:
            continue  # it would become the same key as a dash: a way past whoever checked the other
        key = "HTTP_" + name.upper().replace("-", "_")
        if key == "HTTP_HOST" and key in environ:
            raise _malformed("a request names one host")  # RFC 9112, section 3.2
        value = value.strip(" \t")
        environ[key] = f"{environ[key]},{value}" if key in environ else value
    if environ.get("HTTP_CONTENT_LENGTH", "0") != "0" or "HTTP_TRANSFER_ENCODING" in environ:
        raise HttpError(WebRefusal.BODY, "413 Content Too Large", "a request here has no body")
    return environ


def _malformed(message: str) -> HttpError:
    return HttpError(WebRefusal.MALFORMED, "400 Bad Request", message)


def head(status: str, headers: Iterable[tuple[str, str]], ours: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return the head of an answer; `ours`, the administrator's, take the place of the page's of the same name."""
    taken = {name.lower() for name, _ in ours}
    lines = [f"HTTP/1.1 {status}", f"Date: {formatdate(usegmt=True)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers if name.lower() not in taken]
    lines += [f"{name}: {value}" for name, value in ours]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def plain(status: str, text: str) -> tuple[str, list[tuple[str, str]], list[bytes]]:
    """Return status, headers and body of an answer of one line."""
    body = f"{text}\n".encode()
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    return status, [*headers, ("Cache-Control", "no-store")], [body]
