"""Reads TLS, passwords and headers of the endpoint from a web configuration file, as Prometheus uses it.

One file serves Prometheus, its exporters and pacecar.  The format is that of prometheus/exporter-toolkit (its
docs/web-configuration.md): `tls_server_config`, `http_server_config`, `basic_auth_users`.  A key that we do not support
is an error: an administrator who sets `client_allowed_sans` must not believe that it works.

The whole file is read and tried before any of it is used.  So a certificate that does not match its key is found at
once, the previous one stays in use, and no bad file leads to an unprotected server.

The file is YAML, and passwords are bcrypt hashes.  The extra `secure` brings both libraries; they are imported only if
such a file is configured.

Left out: HTTP/2 (`http2` is accepted and ignored), cipher and curve lists (OpenSSL's defaults apply), inline keys, and
the two client certificate types that request a certificate without verifying it.
"""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = ["OPEN", "Security", "WebConfigError", "authorization", "read_security"]

BYTES_MAX = 256 * 1024
"""A web configuration has a few lines, plus one for each user."""

USERS_MAX = 1024

COST_MAX = 14
"""bcrypt's cost is a power of two: 10 takes some 50 ms of the training job's CPU, 14 a second."""

_HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_TLS_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


class WebConfigError(ValueError):
    """The web configuration cannot be used; the message names the file and the place, and says what to do."""


class _Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cert_file: str
    key_file: str
    client_ca_file: str | None = None
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    max_version: Literal["TLS12", "TLS13"] = "TLS13"


class _Headers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    content_security_policy: str | None = msgspec.field(default=None, name="Content-Security-Policy")
    frame_options: Literal["deny", "sameorigin"] | None = msgspec.field(default=None, name="X-Frame-Options")
    content_type_options: Literal["nosniff"] | None = msgspec.field(default=None, name="X-Content-Type-Options")
    xss_protection: str | None = msgspec.field(default=None, name="X-XSS-Protection")
    transport_security: str | None = msgspec.field(default=None, name="Strict-Transport-Security")


class _Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    http2: bool = True
    headers: _Headers = _Headers()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tls_server_config: _Tls | None = None
    http_server_config: _Http = _Http()
    basic_auth_users: dict[str, str] = {}


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """TLS context, users, headers and password check, ready for use."""

    context: ssl.SSLContext | None = None
    users: dict[str, bytes] = {}
    """User -> bcrypt hash; empty: anyone may read."""
    headers: tuple[tuple[str, str], ...] = ()
    verify: Callable[[bytes, bytes], bool] | None = None
    """Returns whether a password matches a hash; set if there are users."""
    files: tuple[Path, ...] = ()
    """The files that were read; they are reloaded when they change."""


OPEN = Security()
"""No encryption and no password: used without a file."""


def read_security(file: str | Path | None) -> Security:
    """Return what `file` configures; `OPEN` for None.

    Raises:
        WebConfigError: it cannot be read or used; the message names the place.
    """
    if file is None:
        return OPEN
    path = Path(file)
    wanted = _parse(path)
    tls = wanted.tls_server_config
    files = [path]
    context = None
    if tls is not None:
        # Relative to the file that names them, as in exporter-toolkit.
        cert, key = path.parent / tls.cert_file, path.parent / tls.key_file
        ca = None if tls.client_ca_file is None else path.parent / tls.client_ca_file
        files += [part for part in (cert, key, ca) if part is not None]
        context = _context(path, tls, cert, key, ca)
    users = {user: _hash(path, user, text) for user, text in wanted.basic_auth_users.items()}
    if len(users) > USERS_MAX:
        raise WebConfigError(f"{path}: basic_auth_users: {len(users)} users, {USERS_MAX} are possible")
    headers = msgspec.to_builtins(wanted.http_server_config.headers)
    for name, value in headers.items():
        if value is not None and not value.isprintable():
            raise WebConfigError(f"{path}: http_server_config: headers: {name}: a header is one line of text")
    return Security(
        context=context,
        users=users,
        headers=tuple((name, value) for name, value in headers.items() if value is not None),
        verify=_verifier(path) if users else None,
        files=tuple(files),
    )


def _parse(path: Path) -> _File:
    try:
        import yaml
    except ImportError as error:
        raise WebConfigError(f"{path} is YAML, and PyYAML is not installed: pip install 'pacecar[secure]'") from error
    try:
        with path.open("rb") as stream:
            raw = stream.read(BYTES_MAX + 1)
    except OSError as error:
        raise WebConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > BYTES_MAX:
        raise WebConfigError(f"{path}: larger than {BYTES_MAX} bytes, not a web configuration")
    try:
        tree: Any = yaml.compose(raw.decode("utf-8"), Loader=yaml.SafeLoader)
        _check_keys(path, tree)
        found = yaml.safe_load(raw)
        return msgspec.convert({} if found is None else found, _File)
    except yaml.MarkedYAMLError as error:
        # Not str(error): it quotes the line, which may hold a key or a password.
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise WebConfigError(f"{path}: not valid YAML: {line}{error.problem or error.context}") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise WebConfigError(f"{path}: not valid YAML: {type(error).__name__}") from error
    except msgspec.ValidationError as error:
        raise WebConfigError(f"{path}: {error}") from error


def _check_keys(path: Path, node: Any) -> None:  # noqa: ANN401  PyYAML has no types
    """Raise if a key appears twice: YAML would silently use the later of a user's two hashes."""
    if node is None or not isinstance(node.value, list):
        return
    seen: set[str] = set()
    for pair in node.value:
        if not isinstance(pair, tuple):
            continue
        key, value = pair
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            raise WebConfigError(f"{path}: line {line}: {name} appears twice")
        seen.add(name)
        if key.start_mark.line <= value.start_mark.line:  # an alias leads back up, perhaps to itself
            _check_keys(path, value)


def _context(path: Path, tls: _Tls, cert: Path, key: Path, ca: Path | None) -> ssl.SSLContext:
    place = f"{path}: tls_server_config"
    if (ca is None) != (tls.client_auth_type == "NoClientCert"):
        raise WebConfigError(f"{place}: client_ca_file and a client_auth_type that verifies go together")
    if tls.min_version > tls.max_version:
        raise WebConfigError(f"{place}: min_version is above max_version")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _TLS_VERSIONS[tls.min_version], _TLS_VERSIONS[tls.max_version]
    for name, part in (("cert_file", cert), ("key_file", key), ("client_ca_file", ca)):
        try:
            if part is not None:
                part.read_bytes()[:1]
        except OSError as error:
            raise WebConfigError(f"{place}: {name} {part}: cannot be read: {error.strerror}") from error
    try:
        # Without this, OpenSSL would ask for the pass phrase of a key on the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise WebConfigError(
            f"{place}: {cert} and {key} are not a certificate with its key (no pass phrase) in PEM: {_reason(error)}"
        ) from error
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except (ssl.SSLError, OSError) as error:
            raise WebConfigError(f"{place}: client_ca_file {ca}: no certificates in PEM: {_reason(error)}") from error
    context.verify_mode = _CLIENTS[tls.client_auth_type]
    return context


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


def _hash(path: Path, user: str, text: str) -> bytes:
    found = _HASH.fullmatch(text)
    if not user or ":" in user:
        raise WebConfigError(f"{path}: basic_auth_users: {user!r} cannot be a user's name: it is empty or has a colon")
    # The message leaves the text out: it may be the password itself.
    if found is None:
        raise WebConfigError(
            f"{path}: basic_auth_users: {user}: not a bcrypt hash ($2y$...; `htpasswd -nBC 10 {user}`)"
        )
    if not 4 <= int(found[1]) <= COST_MAX:
        raise WebConfigError(f"{path}: basic_auth_users: {user}: bcrypt cost {found[1]} is not from 4 to {COST_MAX}")
    return text.encode("ascii")


def _verifier(path: Path) -> Callable[[bytes, bytes], bool]:
    try:
        import bcrypt
    except ImportError as error:
        raise WebConfigError(
            f"{path}: basic_auth_users needs bcrypt, which is not installed: pip install 'pacecar[secure]'"
        ) from error
    verify: Callable[[bytes, bytes], bool] = bcrypt.checkpw
    return verify


def authorization(header: str) -> tuple[str, str] | None:
    """Return user and password of an Authorization header (RFC 7617); None for any other header."""
    scheme, _, coded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(coded.strip(), validate=True).decode("utf-8").partition(":")
    except ValueError:
        return None
    return (user, password) if colon else None
