"""Sends dashboards to a running Grafana through its HTTP API, one request per dashboard.

Changes made in Grafana are not lost: without `overwrite`, Grafana refuses a dashboard that exists, and the result says
so.  A refused dashboard does not stop the others.  A failure that concerns all of them (no connection, wrong
credentials) ends the run, to avoid repeated timeouts.

Secrets must not leak: redirects are not followed, because the request would carry the secrets elsewhere, and secrets
are removed from quoted answers.

Source: Grafana's HTTP API, "Dashboard" (POST /api/dashboards/db) and "Folder" (/api/folders).  Left out: rules, which
Prometheus loads from files; Grafana's provisioning, which reads what `export` writes.
"""

from __future__ import annotations

import base64
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any, NoReturn

from pacecar.formatting.plain_text import clean

__all__ = ["Grafana", "Pushed", "Refused", "Unreachable", "push"]

TIMEOUT_SECONDS = 15.0
ANSWER_BYTES_MAX = 1 << 20
"""Bytes read of an answer; a thousand folders are about 200 kB."""

WORDS_MAX = 300
"""Characters quoted from Grafana's message; the rest may be a page of HTML."""

FOLDERS_MAX = 1000


class Unreachable(RuntimeError):  # noqa: N818  it is what happened
    """No request can succeed: no connection, not a Grafana, or wrong credentials."""


class Refused(RuntimeError):  # noqa: N818  it is what happened
    """Grafana refused this one request; the message is Grafana's."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result for one dashboard: its address, or the problem."""

    name: str
    url: str | None
    problem: str | None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Refuse to follow a redirect; the answer becomes an error with its target."""


@dataclass(frozen=True)
class Grafana:
    """The address of a Grafana, and credentials: a service account's token, or user and password."""

    url: str
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    timeout_seconds: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{self.url}: not an address; use http(s)://host[:port][/path]")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("the address has more than host, port and path; pass credentials as a token or a user")
        if (self.token is None) == (self.user is None):
            raise ValueError("pass either a token, or user and password")
        if any(not c.isprintable() or c.isspace() for c in self.token or ""):
            raise ValueError("the token contains blanks or line ends")

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401  a JSON value
        """Return Grafana's answer to a GET of `path`, or to a POST of `body`.

        Raises:
            Unreachable: no request can succeed.
            Refused: this request failed.
        """
        request = urllib.request.Request(
            self.url.rstrip("/") + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Accept": "application/json", **self._who()},
        )
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=self.timeout_seconds) as answer:
                text = _read(answer, self.timeout_seconds)
        except urllib.error.HTTPError as error:
            with error:
                self._fail(path, error)
        except (OSError, HTTPException) as error:
            raise Unreachable(f"{self.url}: {_reason(error, self.timeout_seconds)}") from None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Unreachable(f"{self.url}{path} does not answer with JSON: is it a Grafana?") from None

    def _who(self) -> dict[str, str]:
        if self.token is not None:
            return {"Authorization": f"Bearer {self.token}"}
        pair = f"{self.user}:{self.password or ''}".encode()
        return {"Authorization": "Basic " + base64.b64encode(pair).decode()}

    def _fail(self, path: str, error: urllib.error.HTTPError) -> NoReturn:
        if 300 <= error.code < 400:
            where = self._said(error.headers.get("Location", "elsewhere"))
            raise Unreachable(f"{self.url} redirects to {where}: use that address, without the path {path}")
        words = self._said(_message(error, self.timeout_seconds))
        if error.code == 401:
            raise Unreachable(f"{self.url} rejects these credentials (401): {words}")
        if error.code == 403:
            raise Unreachable(f"{self.url} forbids it (403): {words}; the account needs the role Editor")
        if error.code == 404 and path.startswith("/api/"):
            raise Unreachable(f"{self.url}{path} does not exist (404): {words}; is the path of the address right?")
        raise Refused(f"{words} ({error.code})")

    def _said(self, text: str) -> str:
        """Return `text` on one line, without our secrets, and then cut, because part of a secret would leak too."""
        for secret in (self.token, self.password, self._who()["Authorization"].partition(" ")[2]):
            if secret:
                text = text.replace(secret, "***")
        return clean(" ".join(text.split()), WORDS_MAX) or "no reason given"


def _read(answer: HTTPResponse | urllib.error.HTTPError, timeout_seconds: float) -> bytes:
    """Return the body; raise TimeoutError if it takes too long, since the socket's timeout restarts with each byte."""
    until = time.monotonic() + timeout_seconds
    text = b""
    while len(text) < ANSWER_BYTES_MAX and (part := answer.read1(ANSWER_BYTES_MAX)):
        text += part
        if time.monotonic() > until:
            raise TimeoutError
    return text


def _message(error: urllib.error.HTTPError, timeout_seconds: float) -> str:
    """Return Grafana's message in the JSON of an error, or the text itself."""
    try:
        text = _read(error, timeout_seconds).decode(errors="replace")
    except (OSError, HTTPException):
        return str(error.reason)
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return text or str(error.reason)
    if not isinstance(said, dict):
        return text
    return ": ".join(str(said[key]) for key in ("status", "message") if said.get(key)) or text


def _reason(error: Exception, timeout_seconds: float) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {timeout_seconds:g} s"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate cannot be trusted ({cause.verify_message}); SSL_CERT_FILE names other authorities"
    if isinstance(cause, OSError):
        return cause.strerror or str(cause) or type(cause).__name__
    return f"{type(error).__name__}: {error}"


def _folder_uid(grafana: Grafana, title: str) -> str:
    """Return the uid of the folder `title`, which is created if missing."""
    folders = grafana.ask(f"/api/folders?limit={FOLDERS_MAX}")
    for folder in folders if isinstance(folders, list) else ():
        if isinstance(folder, dict) and folder.get("title") == title and isinstance(folder.get("uid"), str):
            return str(folder["uid"])
    made = grafana.ask("/api/folders", {"title": title})
    if not isinstance(made, dict) or not isinstance(made.get("uid"), str):
        raise Refused("Grafana created the folder but did not return its uid")
    return str(made["uid"])


def push(
    grafana: Grafana, dashboards: Mapping[str, str], *, folder: str | None, overwrite: bool, message: str
) -> Iterator[Pushed]:
    """Send `dashboards` (file name -> JSON text) one by one and yield the result of each.

    Raises:
        Unreachable: no request can succeed; dashboards that were yielded before are in Grafana.
        Refused: the folder could not be created.
    """
    where = {} if folder is None else {"folderUid": _folder_uid(grafana, folder)}
    for name, text in dashboards.items():
        body = {"dashboard": json.loads(text) | {"id": None}, "overwrite": overwrite, "message": message, **where}
        try:
            said = grafana.ask("/api/dashboards/db", body)
        except Refused as error:
            yield Pushed(name, None, str(error))
            continue
        path = said.get("url") if isinstance(said, dict) else None
        yield Pushed(name, urllib.parse.urljoin(grafana.url, path) if isinstance(path, str) else grafana.url, None)
