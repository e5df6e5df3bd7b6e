"""Checks user and password (HTTP Basic, bcrypt) so that neither the time nor the cost of an answer helps guessers.

bcrypt is slow on purpose, some 50 ms at cost 10.  A scraper that comes each second would take 5 % of a processor from
the training job, so credentials that were found right are remembered: as a keyed hash, under a key that this process
drew at random, so that memory holds no password.  This gives a guesser nothing: a new guess is as slow as before.

A guesser must not learn which users there are.  So a user who does not exist is checked too, against a hash that no
password fits.  That hash needs a cost.  Where the users' costs differ, a fixed one would tell the users of other costs
from unknown names; so each name is given one of the costs that exist, the same one each time.

Wrong credentials are remembered too: a scraper with an old password comes each second, and costs nothing.

Left out: the order of the checks (`password_queue`), and locking a user out: anybody could do that to another user.
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
"""Right credentials remembered, and as many wrong ones; the least recently used ones go."""

PASSWORD_BYTES_MAX = 72
"""bcrypt uses no more.  Libraries differ in what they do with the rest; Go's, which Prometheus uses, drops it."""

_NO_PASSWORD = "$2b${cost:02d}$" + "." * 53
"""A string in the form of a hash; no password is known to give it."""


class AuthVerdict(Enum):
    """What becomes of a request."""

    ALLOWED = "allowed"
    NO_CREDENTIALS = "no_credentials"
    WRONG = "credentials"
    TOO_MANY = "guesses"
    UNCHECKED = "unchecked"
    """Not known without bcrypt: ask `check`, on a thread that may take its time."""


class BasicAuth:
    """Decides for one `Security`; a new one, with nothing remembered, is made when that changes."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._costs = sorted({int(text[4:6]) for text in security.users.values()})

    def look(self, header: str | None) -> AuthVerdict:
        """Return what is known about an Authorization header without a check by bcrypt."""
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
        assert given is not None, "only what `look` could read is checked"
        assert self._security.verify is not None, "users come with a way to verify them"
        user, password = given
        stored = self._security.users.get(user)
        # bcrypt's C ends a password at a zero byte or refuses it: such a one is nobody's, but takes the same time.
        raw = password.encode()[:PASSWORD_BYTES_MAX]
        usable = b"\0" not in raw
        fits = self._security.verify(raw if usable else b"x", stored or self._strangers(user))
        is_right = fits and usable and stored is not None
        known = self._right if is_right else self._wrong
        with self._lock:
            known[self._digest(user, password)] = None
            while len(known) > REMEMBERED_MAX:
                known.popitem(last=False)
        return AuthVerdict.ALLOWED if is_right else AuthVerdict.WRONG

    def _digest(self, user: str, password: str) -> bytes:
        # A user's name has no colon, so no two pairs make one text.
        return hmac.digest(self._key, f"{user}:{password}".encode(), hashlib.sha256)

    def _strangers(self, user: str) -> bytes:
        """Return the hash against which a user who does not exist is checked."""
        place = int.from_bytes(hmac.digest(self._key, user.encode(), hashlib.sha256)[:8], "big") % len(self._costs)
        return _NO_PASSWORD.format(cost=self._costs[place]).encode()
