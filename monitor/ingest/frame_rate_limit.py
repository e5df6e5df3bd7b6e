"""Bounds how many frames of one user are read in a turn of the loop and in a second: a token bucket for each uid.

Every frame costs the daemon processor time beside the training jobs, and a large one memory in the recorder.  A user
who floods all his connections would keep the daemon reading all the time.  Here he is not read for a moment when his
tokens are used up; his sockets fill, and only his own hooks wait, or drop records.

Pure but for the clock, which is passed in.
"""

from __future__ import annotations

from collections.abc import Container

from pacecar.clock import NS_PER_SECOND, Clock

__all__ = ["BURST_TOKENS", "PAUSE_SECONDS", "TOKENS_PER_SECOND", "TURN_TOKENS", "FrameRateLimit", "FrameRateLimits"]

TOKENS_PER_SECOND = 5000
"""A user with 16 ranks and steps of 4 ms sends 4000 records a second."""

BURST_TOKENS = 10_000
"""After a restart of the daemon the hooks' queues come all at once."""

TURN_TOKENS = 256
"""Tokens of one user in one turn, over all his connections: some milliseconds, then the others have their turn."""

TOKEN_BYTES = 2048
"""A frame costs one token, and one more for each so many bytes: a StepRecord one, the largest 33."""

PAUSE_SECONDS = 0.1

USERS_MAX = 1024
"""Token buckets remembered; beyond that those of users who are not connected go."""


class FrameRateLimit:
    """The tokens of one user.  One thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens = float(BURST_TOKENS)
        self._then_ns = clock.monotonic_ns()
        self._turn = TURN_TOKENS
        self._paused_until_ns: int | None = None

    def begin_turn(self) -> None:
        """Add the tokens earned since the last turn."""
        now = self._clock.monotonic_ns()
        earned = (now - self._then_ns) / NS_PER_SECOND * TOKENS_PER_SECOND
        self._tokens, self._then_ns = min(float(BURST_TOKENS), self._tokens + earned), now
        self._turn = TURN_TOKENS

    def spend(self, size: int) -> bool:
        """Take the tokens for a frame of `size` bytes; return whether any are left for this turn."""
        cost = 1 + size // TOKEN_BYTES
        self._tokens -= cost
        self._turn -= cost
        if self._tokens <= 0:
            self._paused_until_ns = self._clock.monotonic_ns() + int(PAUSE_SECONDS * NS_PER_SECOND)
        return self._turn > 0 and self._tokens > 0

    @property
    def is_spent(self) -> bool:
        """Whether nothing more is read in this turn."""
        return self._turn <= 0 or self._tokens <= 0

    @property
    def is_paused(self) -> bool:
        """Whether the user is not read at all for the moment."""
        return self._paused_until_ns is not None

    def may_resume(self) -> bool:
        """Return whether a pause is over, and end it."""
        if self._paused_until_ns is None or self._clock.monotonic_ns() < self._paused_until_ns:
            return False
        self._paused_until_ns = None
        self.begin_turn()
        return True


class FrameRateLimits:
    """The token buckets of all users.  One outlives its user's connections: reconnecting gives no new tokens."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_uid: dict[int, FrameRateLimit] = {}

    def of(self, uid: int, connected: Container[int]) -> FrameRateLimit:
        """Return the bucket of `uid`; `connected` are the users whose buckets must not be forgotten."""
        found = self._by_uid.get(uid)
        if found is None:
            if len(self._by_uid) >= USERS_MAX:
                self._by_uid = {other: budget for other, budget in self._by_uid.items() if other in connected}
            found = self._by_uid[uid] = FrameRateLimit(self._clock)
        return found

    def begin_turn(self) -> None:
        """Begin a turn of all users."""
        for budget in self._by_uid.values():
            budget.begin_turn()

    @property
    def is_any_paused(self) -> bool:
        """Whether any user is not read at the moment."""
        return any(budget.is_paused for budget in self._by_uid.values())

    def resume(self) -> list[int]:
        """Return the users whose pause is over, and end it."""
        return [uid for uid, budget in self._by_uid.items() if budget.may_resume()]
