"""Bounds how many frames of one user are read in a turn of the loop and in a second: a token bucket for each uid.

Every frame costs the daemon processor time next to the training jobs, and a large one costs memory in the recorder.  A
user who floods all connections would keep the daemon reading all the time.  Instead the daemon stops reading a user
without tokens for a moment: the user's sockets fill, and only the user's own hooks wait or drop records.
"""

from __future__ import annotations

from collections.abc import Container

from pacecar.clock import NS_PER_SECOND, Clock

__all__ = ["BURST_TOKENS", "PAUSE_SECONDS", "TOKENS_PER_SECOND", "TURN_TOKENS", "FrameRateLimit", "FrameRateLimits"]

TOKENS_PER_SECOND = 5000
"""A user with 16 ranks and steps of 4 ms sends 4000 records a second."""

BURST_TOKENS = 10_000
"""After a restart of the daemon all hooks' queues arrive at once."""

TURN_TOKENS = 256
"""Tokens of one user in one turn, over all connections: some milliseconds, then it is the others' turn."""

TOKEN_BYTES = 2048
"""A frame costs one token, plus one for each TOKEN_BYTES: a StepRecord costs one, the largest record 33."""

PAUSE_SECONDS = 0.1

USERS_MAX = 1024
"""Token buckets remembered; beyond that, buckets of users who are not connected are dropped."""


class FrameRateLimit:
    """The tokens of one user.  One thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens = float(BURST_TOKENS)
        self._refilled_ns = clock.monotonic_ns()
        self._turn_tokens = TURN_TOKENS
        self._paused_until_ns: int | None = None

    def begin_turn(self) -> None:
        """Add the tokens earned since the previous turn."""
        now = self._clock.monotonic_ns()
        earned = (now - self._refilled_ns) / NS_PER_SECOND * TOKENS_PER_SECOND
        self._tokens, self._refilled_ns = min(float(BURST_TOKENS), self._tokens + earned), now
        self._turn_tokens = TURN_TOKENS

    def spend(self, size: int) -> bool:
        """Spend the tokens for a frame of `size` bytes; return whether more may be read in this turn."""
        cost = 1 + size // TOKEN_BYTES
        self._tokens -= cost
        self._turn_tokens -= cost
        if self._tokens <= 0:
            self._paused_until_ns = self._clock.monotonic_ns() + int(PAUSE_SECONDS * NS_PER_SECOND)
        return not self.is_spent

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be read in this turn."""
        return self._turn_tokens <= 0 or self._tokens <= 0

    @property
    def is_paused(self) -> bool:
        """Whether the user is not read at all at the moment."""
        return self._paused_until_ns is not None

    def may_resume(self) -> bool:
        """Return whether a pause has just ended."""
        if self._paused_until_ns is None or self._clock.monotonic_ns() < self._paused_until_ns:
            return False
        self._paused_until_ns = None
        self.begin_turn()
        return True


class FrameRateLimits:
    """The token buckets of all users.  A bucket outlives the connections: reconnecting gives no new tokens."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_uid: dict[int, FrameRateLimit] = {}

    def of(self, uid: int, connected: Container[int]) -> FrameRateLimit:
        """Return the bucket of `uid`; buckets of the users in `connected` are never dropped."""
        found = self._by_uid.get(uid)
        if found is None:
            if len(self._by_uid) >= USERS_MAX:
                self._by_uid = {other: limit for other, limit in self._by_uid.items() if other in connected}
            found = self._by_uid[uid] = FrameRateLimit(self._clock)
        return found

    def begin_turn(self) -> None:
        """Begin a turn for all users."""
        for limit in self._by_uid.values():
            limit.begin_turn()

    @property
    def is_any_paused(self) -> bool:
        """Whether any user is paused."""
        return any(limit.is_paused for limit in self._by_uid.values())

    def resume(self) -> list[int]:
        """Return the users whose pause has just ended."""
        return [uid for uid, limit in self._by_uid.items() if limit.may_resume()]
