"""Orders password checks so that no guesser keeps another client's right password from being checked.

One rate limit for all would lock everyone out while one client guesses; a lock per user name would lock out the real
user.  So checks wait in a fair queue: the next one comes from the source that was served least recently, within it
from the user name that was served least recently, and among those at random.  Wrong guesses use up the source's own
token bucket (GUESSES_AT_ONCE, then GUESSES_PER_SECOND), and its further checks wait for the next token.  After a wrong
guess nothing is checked for REST_RATIO times its duration, so all guessers together take a quarter of a processor.

When WAITING_MAX checks wait, a random one of the source and name with the most is turned away, perhaps the newcomer.
Left out: checking (`basic_auth`), and what a source is (`client_source`).
"""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict
from typing import Generic, NamedTuple, TypeVar

from pacecar.clock import NS_PER_SECOND, Clock

__all__ = ["GUESSES_AT_ONCE", "GUESSES_PER_SECOND", "REST_RATIO", "WAITING_MAX", "PasswordQueue"]

GUESSES_PER_SECOND = 2.0
GUESSES_AT_ONCE = 8
"""Tokens of a source that was quiet: a page, a Prometheus and a person who come together do not wait."""

WAITING_MAX = 64
REST_RATIO = 3
SOURCES_MAX = 1024
"""Sources remembered; the least recently served is forgotten."""

T = TypeVar("T")


class _Waiting(NamedTuple):
    source: str
    user: str
    item: object


class _Source:
    def __init__(self, now_ns: int) -> None:
        self.tokens = float(GUESSES_AT_ONCE)
        self.refilled_ns = now_ns
        self.served = 0
        self.users: OrderedDict[str, int] = OrderedDict()

    def refill(self, now_ns: int) -> float:
        earned = (now_ns - self.refilled_ns) / NS_PER_SECOND * GUESSES_PER_SECOND
        self.tokens, self.refilled_ns = min(GUESSES_AT_ONCE, self.tokens + earned), now_ns
        return self.tokens


class PasswordQueue(Generic[T]):
    """Waiting checks.  All methods may be called from any thread."""

    def __init__(self, clock: Clock, chance: random.Random | None = None) -> None:
        self._clock = clock
        self._chance = chance or random.Random()
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._turns = 0
        self._rest_until_ns = 0
        self._is_closed = False

    def put(self, item: T, source: str, user: str) -> T | None:
        """Add `item`; return the one that is turned away for it, which may be itself."""
        turned_away: _Waiting | None = None
        with self._changed:
            self._waiting.append(_Waiting(source, user, item))
            if len(self._waiting) > WAITING_MAX:
                most = Counter(one.source for one in self._waiting).most_common(1)[0][0]
                of_most = [one for one in self._waiting if one.source == most]
                name = Counter(one.user for one in of_most).most_common(1)[0][0]
                turned_away = self._chance.choice([one for one in of_most if one.user == name])
                self._waiting.remove(turned_away)
            self._changed.notify()
        return None if turned_away is None else turned_away.item  # type: ignore[return-value]  # what was put

    def pop(self) -> tuple[T | None, float | None]:
        """Return the next check; or None and the seconds until there may be one (None: not before the next `put`)."""
        with self._changed:
            return self._pop()

    def wait(self) -> T | None:
        """Return the next check, however long that takes; None after `close`."""
        with self._changed:
            while not self._is_closed:
                item, seconds = self._pop()
                if item is not None:
                    return item
                self._changed.wait(seconds)
        return None

    def checked(self, source: str, *, is_right: bool, took_ns: int) -> None:
        """Record the result of a check for `source`: a right password costs no token."""
        with self._changed:
            if is_right:
                found = self._source(source, self._clock.monotonic_ns())
                found.tokens = min(GUESSES_AT_ONCE, found.tokens + 1)
            else:
                self._rest_until_ns = self._clock.monotonic_ns() + REST_RATIO * took_ns
            self._changed.notify()

    def close(self) -> None:
        """Make `wait` return."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _pop(self) -> tuple[T | None, float | None]:
        now = self._clock.monotonic_ns()
        if not self._waiting:
            return None, None
        if now < self._rest_until_ns:
            return None, (self._rest_until_ns - now) / NS_PER_SECOND
        tokens = {one.source: self._source(one.source, now).refill(now) for one in self._waiting}
        due = [one for one in self._waiting if tokens[one.source] >= 1]
        if not due:
            return None, (1 - max(tokens.values())) / GUESSES_PER_SECOND
        order = [(self._sources[one.source].served, self._sources[one.source].users.get(one.user, 0)) for one in due]
        first = min(order)
        chosen = self._chance.choice([one for one, place in zip(due, order, strict=True) if place == first])
        self._waiting.remove(chosen)
        self._note_turn(chosen)
        return chosen.item, 0.0  # type: ignore[return-value]  # what was put

    def _note_turn(self, chosen: _Waiting) -> None:
        self._turns += 1
        source = self._sources[chosen.source]
        source.tokens -= 1
        source.served = source.users[chosen.user] = self._turns
        source.users.move_to_end(chosen.user)
        while len(source.users) > WAITING_MAX:
            source.users.popitem(last=False)
        self._sources.move_to_end(chosen.source)

    def _source(self, name: str, now_ns: int) -> _Source:
        found = self._sources.get(name)
        if found is None:
            found = self._sources[name] = _Source(now_ns)
            # At most WAITING_MAX sources wait now, and they were looked up last.
            while len(self._sources) > SOURCES_MAX:
                self._sources.popitem(last=False)
        return found
