"""Decides whether rounds of accounts allow a verdict: whether the job hangs, or is merely slow.

A long step, a first save and a compilation look like a hang for a while, so one round proves nothing.  A verdict needs
two rounds some seconds apart in which nothing moved and which name the same ranks for the same reason.  Then

    stopped, gone, left out a collective, called another one   cannot pass by itself: at once
    has not joined, does not answer, a link, unknown           only after the silence that this job has shown before
                                                               (`RankAccount.patience_ns`)
    the same, but the rank computes, reads or writes           only after `hang_seconds`, as a long save does the same
    no rank waits for another                                  only after IDLE_SECONDS: a pause of all ranks is no hang

Pure: accounts and times in, a verdict out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pacecar.clock import NS_PER_SECOND
from pacecar.records.hangs import GroupState, HangKind, HangVerdict, RankAccount

__all__ = ["CERTAIN", "IDLE_SECONDS", "Inquiry", "Round", "are_counters_unequal", "is_idle"]

IDLE_SECONDS = 1800.0
"""The silence from which on even a job hangs in which no rank waits for another: torch's default timeout."""

_ENDED = frozenset({HangKind.GONE, HangKind.KILLED, HangKind.KILLED_FOR_MEMORY})

CERTAIN = _ENDED | {HangKind.STOPPED, HangKind.SKIPPED, HangKind.EXTRA, HangKind.MISMATCHED}
"""What time alone does not heal."""

IN_A_CALL = frozenset(
    {HangKind.SKIPPED, HangKind.EXTRA, HangKind.MISMATCHED, HangKind.NOT_FINISHED, HangKind.LINK}
)  # fmt: skip
"""Those that are blamed wait in a collective themselves; of other kinds a rank is only to blame if others wait."""

WORKS_RATIO = 0.1
"""A training thread that runs for this part of the time computes; one that waits wakes for microseconds."""

WAKEUPS_PER_SECOND = 1
"""A thread that hangs sleeps without a break, or wakes every 5 s to look after a loader's workers (torch's
MP_STATUS_CHECK_INTERVAL).  One that evaluates on a device, or with pauses, wakes many times a second."""

WORKS_BYTES = 64 * 1024
"""A training thread that transfers this much between two rounds reads or writes."""


@dataclass(frozen=True, slots=True)
class Round:
    """The accounts of all ranks at one time, what they are judged to mean, and the ranks that must not be named.

    Those have closed pacecar, or could not be asked for a reason that is not theirs.
    """

    accounts: Sequence[RankAccount]
    at_ns: int
    verdict: HangVerdict
    not_nameable: Collection[int] = ()


class Inquiry:
    """Compares each round with the one before.  `hang_ns` is the longest time that working ranks are given."""

    def __init__(self, hang_ns: int) -> None:
        self._hang_ns = hang_ns
        self._before: Round | None = None

    def add(self, latest: Round) -> HangVerdict | None:
        """Return the verdict if `latest` and the round before allow it."""
        before, self._before = self._before, latest
        if before is None or not _is_same(before.verdict, latest.verdict) or _has_moved(before, latest):
            return None
        quiet_ns = min((each.silent_ns for each in latest.accounts if each.silent_ns is not None), default=0)
        return latest.verdict if quiet_ns >= self._bound_ns(before, latest) else None

    def _bound_ns(self, before: Round, latest: Round) -> int:
        """Return how long all ranks must have shown no sign of life."""
        verdict = latest.verdict
        accounts = {account.rank: account for account in latest.accounts}
        involved = [accounts[rank] for rank in (*verdict.culprits, *verdict.waiting) if rank in accounts]
        patience_ns = max((each.patience_ns for each in involved if each.patience_ns is not None), default=0)
        ranks = verdict.culprits or tuple(accounts)
        if is_idle(verdict):
            return max(self._hang_ns, patience_ns, round(IDLE_SECONDS * NS_PER_SECOND))
        if (verdict.kind not in IN_A_CALL and not verdict.waiting) or set(latest.not_nameable) & set(verdict.culprits):
            return max(self._hang_ns, patience_ns)
        if verdict.kind in CERTAIN:
            return 0
        if any(_works(_by_rank(before).get(rank), accounts.get(rank), latest.at_ns - before.at_ns) for rank in ranks):
            return max(self._hang_ns, patience_ns)
        return patience_ns


def is_idle(verdict: HangVerdict) -> bool:
    """Return whether no rank waits for another, as far as torch records it."""
    return verdict.kind is HangKind.NOBODY and not verdict.waiting


def are_counters_unequal(accounts: Iterable[RankAccount]) -> bool:
    """Return whether members of any group have begun different numbers of operations on it.

    Sends and receives count as well, so ranks of a pipeline always differ: that costs an inquiry, and proves nothing.
    """
    begun: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for account in accounts:
        for group in account.groups:
            if group.operations is not None:
                begun.setdefault((group.name, group.ranks), set()).add(group.operations)
    return any(len(counts) > 1 for counts in begun.values())


def _is_same(one: HangVerdict, other: HangVerdict) -> bool:
    is_same = one.kind is other.kind or {one.kind, other.kind} <= _ENDED
    return is_same and set(one.culprits) == set(other.culprits)


def _by_rank(found: Round) -> Mapping[int, RankAccount]:
    return {account.rank: account for account in found.accounts}


def _has_moved(before: Round, latest: Round) -> bool:
    """Return whether any rank ended a step, began or finished a collective, showed life, or ceased to answer."""
    old = _by_rank(before)
    return any(_differs(old.get(account.rank), account) for account in latest.accounts)


def _differs(old: RankAccount | None, new: RankAccount) -> bool:
    if old is None or old.answered != new.answered or old.step != new.step:
        return True
    if old.silent_ns is not None and new.silent_ns is not None and new.silent_ns < old.silent_ns:
        return True
    return _counters(old.groups) != _counters(new.groups)


def _counters(groups: Sequence[GroupState]) -> list[tuple[object, ...]]:
    return sorted((group.name, group.enqueued, group.completed, group.operations) for group in groups)


def _works(old: RankAccount | None, new: RankAccount | None, apart_ns: int) -> bool:
    """Return whether a rank's training thread computed, woke, transferred data or was elsewhere in its code."""
    if old is None or new is None:
        return False
    if _training_frames(old) != _training_frames(new):
        return True
    return (
        old.process is not None
        and new.process is not None
        and (
            _gained(old.process.processor_ns, new.process.processor_ns) >= WORKS_RATIO * apart_ns
            or _gained(old.process.wakeups, new.process.wakeups) * NS_PER_SECOND >= WAKEUPS_PER_SECOND * apart_ns
            or _gained(old.process.transferred_bytes, new.process.transferred_bytes) >= WORKS_BYTES
        )
    )


def _gained(before: int | None, after: int | None) -> int:
    """Return the difference; 0 where a reading is missing."""
    return 0 if before is None or after is None else after - before


def _training_frames(account: RankAccount) -> tuple[str, ...] | None:
    return next((stack.frames for stack in account.stacks if stack.is_training), None)
