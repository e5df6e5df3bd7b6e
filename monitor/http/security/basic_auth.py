"""Checks user and password (HTTP Basic, bcrypt) so that neither the time nor the cost of a response helps guessers.

bcrypt is slow on purpose, about 50 ms at cost 10.  A scrape every second would take 5 % of a processor from the
training job, so right and wrong credentials are remembered: as a hash keyed by random bytes, so that memory holds no
password.  A new guess is as slow as before.

A guesser must not learn which users exist.  So an unknown user is also checked, against a hash that no password
matches.  If users have hashes of different costs, one fixed cost would give unknown names away; so each name gets one
of the existing costs, always the same.

Left out: the order of the checks (`password_queue`), and locking out users: anyone could lock out anyone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from enum import Enum

from .web_config import Security, authorization

__all__ = ["AuthVerdict", "BasicAuth"]

REMEMBERED_MAX = 128
"""Right credentials remembered, and as many wrong ones; the least recently used ones are dropped."""

PASSWORD_BYTES_MAX = 72
"""bcrypt uses no more.  Libraries treat the rest differently; Go's, which Prometheus uses, drops it."""

_NO_PASSWORD = "$2b${cost:02d}$" + "." * 53
"""A string in the form of a hash that no known password has."""


class AuthVerdict(Enum):
    """How a request is to be answered."""

    ALLOWED = "allowed"
    NO_CREDENTIALS = "no_credentials"
    WRONG = "credentials"
    TOO_MANY = "guesses"
    UNCHECKED = "unchecked"
    """Unknown without bcrypt: call `check` on a thread that may block."""


class BasicAuth:
    """Checks credentials against one `Security`; when that changes, a new object starts with nothing remembered."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._costs = sorted({int(text[4:6]) for text in security.users.values()})

    def recall(self, header: str | None) -> AuthVerdict:
        """Return what is known about an Authorization header without running bcrypt."""
        if not self._security.users:
            return AuthVerdict.ALLOWED
        given = None if header is None else authorization(header)
        if given is None:
            return AuthVerdict.NO_CREDENTIALS
        digest = self._digest(*given)
        with self._lock:
            for known, verdict in ((self._right, AuthVerdict.ALLOWED), (self._wrong, AuthVerdict.WRONG)):
                if digest in known:
                    known.move_to_end(digest)
                    return verdict
        return AuthVerdict.UNCHECKED

    def check(self, header: str) -> AuthVerdict:
        """Return ALLOWED or WRONG, in the time that bcrypt takes."""
        given = authorization(header)
        assert given is not None, "only what `recall` could read is checked"
        assert self._security.verify is not None, "users come with a way to verify them"
        user, password = given
        stored = self._security.users.get(user)
        # bcrypt's C code ends a password at a zero byte or refuses it: never right, but it takes the same time.
        raw = password.encode()[:PASSWORD_BYTES_MAX]
        is_usable = b"\0" not in raw
        matches = self._security.verify(raw if is_usable else b"x", stored or self._hash_for_unknown(user))
        is_right = matches and is_usable and stored is not None
        known = self._right if is_right else self._wrong
        with self._lock:
            known[self._digest(user, password)] = None
            while len(known) > REMEMBERED_MAX:
                known.popitem(last=False)
        return AuthVerdict.ALLOWED if is_right else AuthVerdict.WRONG

    def _digest(self, user: str, password: str) -> bytes:
        # User names have no colon, so different pairs give different texts.
        return hmac.digest(self._key, f"{user}:{password}".encode(), hashlib.sha256)

    def _hash_for_unknown(self, user: str) -> bytes:
        """Return the hash to check an unknown user against."""
        place = int.from_bytes(hmac.digest(self._key, user.encode(), hashlib.sha256)[:8], "big") % len(self._costs)
        return _NO_PASSWORD.format(cost=self._costs[place]).encode()
