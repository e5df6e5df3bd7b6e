"""Polls the daemon's document on its own thread, so that keys never wait.

Polling, unlike the event stream, works through every proxy, and a stopped terminal (Ctrl-Z) leaves nothing open at the
daemon.  The size of an answer and every wait are bounded.
"""

from __future__ import annotations

import base64
import http.client
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import NamedTuple

import msgspec

from pacecar.records.status_document import VERSION, StatusDocument

__all__ = ["FetchError", "Fetched", "Fetcher", "address", "fetch"]

ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""The document of a node at all its limits is under 1 MiB."""

TIMEOUT_SECONDS = 5.0


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores $http_proxy: no proxy reaches a daemon on this node or in its cluster."""


class FetchError(RuntimeError):
    """The document cannot be fetched; the message names the address and what to do."""


class Fetched(NamedTuple):
    """The latest document, when it arrived (monotonic seconds), and the error since."""

    document: StatusDocument | None = None
    at_seconds: float | None = None
    error: str | None = None


def address(text: str) -> str:
    """Return the daemon's root URL for user input: a port, host:port, or a URL with or without a path."""
    text = f"127.0.0.1:{text}" if text.isdecimal() else text
    url = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = url.port
    except ValueError as error:
        raise FetchError(f"{text}: {error}") from error
    if url.scheme not in ("http", "https") or not url.hostname:
        raise FetchError(f"{text}: not an address; write host:port or http[s]://host:port/prefix")
    netloc = url.netloc if port is not None or url.scheme == "https" or "://" in text else f"{url.netloc}:9850"
    return f"{url.scheme}://{netloc}{url.path.removesuffix('/api/snapshot').rstrip('/')}"


def fetch(root: str, *, timeout: float = TIMEOUT_SECONDS) -> StatusDocument:
    """Return the document of the daemon at `root`; raises FetchError."""
    url = urllib.parse.urlsplit(root)
    request = urllib.request.Request(f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}/api/snapshot")
    if url.username is not None:
        pair = f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
        request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
    shown = request.full_url
    try:
        with _DIRECT.open(request, timeout=timeout) as answer:
            body = answer.read(ANSWER_BYTES_MAX + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise FetchError(f"{shown}: {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FetchError(f"{shown}: {reason}; is `pacecar daemon` running there?") from error
    if len(body) > ANSWER_BYTES_MAX:
        raise FetchError(f"{shown}: more than {ANSWER_BYTES_MAX} bytes")
    return _decoded(shown, body)


def _decoded(shown: str, body: bytes) -> StatusDocument:
    try:
        version = msgspec.json.decode(body, type=_Versioned).version
        if version != VERSION:
            raise FetchError(f"{shown}: the daemon has version {version} of the document, this pacecar needs {VERSION}")
        return msgspec.json.decode(body, type=StatusDocument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FetchError(f"{shown}: not a daemon's answer: {error}") from error


class _Versioned(msgspec.Struct):
    version: int


class Fetcher:
    """Fetches every `period_seconds`; `latest` never waits."""

    def __init__(self, root: str, period_seconds: float) -> None:
        self._root = root
        self._period_seconds = period_seconds
        self._latest = Fetched()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pacecar-top", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread without waiting for a request in progress."""
        self._stopping.set()

    @property
    def latest(self) -> Fetched:
        """The latest document, and the error since."""
        return self._latest

    def _run(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                self._latest = Fetched(fetch(self._root), time.monotonic())
            except FetchError as error:
                self._latest = self._latest._replace(error=str(error))
            if self._stopping.wait(max(0.1, self._period_seconds - (time.monotonic() - begun))):
                return
