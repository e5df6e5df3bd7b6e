"""Aligns the collectives of two ranks in one process group: which call of one rank is which call of the other.

Pairing the i-th call of one rank with the i-th of the other fails as soon as one trace began a collective earlier, lost
a row or was thinned out: it pairs unrelated calls, and each wait computed from such a pair is false.  So sequence
numbers decide if both ranks have them.  Otherwise one sequence is shifted against the other until operations, bytes and
steps agree.  Training repeats itself, so several shifts may fit, and the clocks decide between them:

    rank 0   A B C A B C        contents fit at a shift of 0, 3 and -3; on one clock only one of them makes
    rank 1     A B C A B C      every pair overlap; on two clocks only one leaves the ends evenly apart

A collective needs all its ranks at one instant, so a true pair overlaps on a common clock.  If rows are missing, no
shift fits.  Then, if the clocks agree, calls that end together are paired, unless a shift pairs more calls whose ends
are as evenly apart.  Ambiguous calls stay unpaired.

Pure: columns in, indices out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE

__all__ = ["Alignment", "CallSequence", "align"]

SHIFTS_MAX = 2048
"""The most shifts tried to either side: two traces of one job may begin this many collectives apart."""

LOOKS = 32
"""Pairs of a shift that are sampled first."""

CANDIDATES_MAX = 64
"""The most shifts that are measured in full."""

OVERLAP_LOOK_MIN = 0.8
"""The ratio of the sampled pairs that must overlap to expect it of nearly all."""

OVERLAP_SLACK_NS = 5_000
"""True pairs may miss each other by this much: time stamps of whole microseconds, and the drift of CUPTI's clock."""

OVERLAP_RATIO_MIN = 0.95
"""The ratio of pairs that must overlap on one clock: in a wrong shift few do; a lost or doubled row spoils one pair."""

PAIRED_RATIO_MIN = 0.5
"""The ratio of the shorter sequence that an alignment must pair."""

ENDS_RATIO_MAX = 0.25
"""How far apart ends may be as a ratio of the duration, where only closeness in time supports a pair."""

END_SPREAD_NS = 1_000_000
"""The largest spread of the distances between ends on two clocks: gloo's threads wake that late, and a step's jitter
is above it."""

RIVAL_RATIO = 2.0
"""A second shift whose spread is at most this many times the best one's makes the alignment ambiguous."""

SPREAD_PAIRS_MIN = 3
"""The fewest pairs whose spread means anything."""


@dataclass(frozen=True, slots=True)
class CallSequence:
    """The collectives of one rank in one group, in order of issue; columns of one length.

    Times are on the wall clock as far as the trace knows it.  `operation` numbers operations the same way for all
    ranks; `bytes`, `sequence` and `step` are NONE where unknown or where ranks may differ.  `row` is the caller's.
    """

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    operation: NDArray[np.int64]
    bytes: NDArray[np.int64]
    sequence: NDArray[np.int64]
    step: NDArray[np.int64]
    row: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start_ns)


class Alignment(NamedTuple):
    """`partner[i]` is the index in the other sequence of the i-th here, NONE for none.

    `shift` is the common difference of the indices, where a shift paired them; `by_sequence`: sequence numbers did.
    """

    partner: NDArray[np.int64]
    is_ambiguous: bool = False
    shift: int | None = None
    by_sequence: bool = False


class _Shift(NamedTuple):
    """here[i] is there[i + by]; ends here are later by `offset_ns` (median), with the deviation `spread_ns`."""

    by: int
    pairs: int
    offset_ns: int
    spread_ns: int
    overlap_ratio: float


def align(here: CallSequence, there: CallSequence) -> Alignment:
    """For each element of `here`, return the index of its match in `there`.

    Step numbers are ignored if nothing fits with them: two scripts may number steps from different origins.
    """
    found = _align(here, there)
    if (found.partner == NONE).all() and (here.step != NONE).any() and (there.step != NONE).any():
        return _align(replace(here, step=np.full_like(here.step, NONE)), there)
    return found


def _align(here: CallSequence, there: CallSequence) -> Alignment:
    nothing = Alignment(np.full(len(here), NONE, dtype=np.int64))
    if len(here) == 0 or len(there) == 0:
        return nothing
    if (here.sequence != NONE).all() and (there.sequence != NONE).all():
        return _by_sequence(here, there)
    for shift in (_measure(here, there, by) for by in {0: None, _guess(here, there): None}):
        if shift is not None and shift.overlap_ratio >= OVERLAP_RATIO_MIN:
            return _shifted(here, there, shift.by)
    shifts = _candidates(here, there)
    if one_clock := [shift for shift in shifts if shift.overlap_ratio >= OVERLAP_RATIO_MIN]:
        return _shifted(here, there, max(one_clock, key=lambda shift: shift.pairs).by)
    merged, even = _merge(here, there), _most_even(here, there, shifts)
    if merged is not None and even is not None:
        # Clocks that differ by about the distance of messages pair each with a later one and leave the last ones out.
        (many, spread_ns), (more, even_ns) = _evenness(here, there, merged), _evenness(here, there, even)
        return even if more > many and even_ns <= RIVAL_RATIO * spread_ns + OVERLAP_SLACK_NS else merged
    return merged or even or nothing


def _by_sequence(here: CallSequence, there: CallSequence) -> Alignment:
    partner = np.full(len(here), NONE, dtype=np.int64)
    _, mine, theirs = np.intersect1d(here.sequence, there.sequence, return_indices=True)
    same = here.operation[mine] == there.operation[theirs]
    partner[mine[same]] = theirs[same]
    return Alignment(partner, by_sequence=True)


def _fits(
    here: CallSequence, a: slice | NDArray[np.int64], there: CallSequence, b: slice | NDArray[np.int64]
) -> NDArray[np.bool_]:
    """For each pair, return whether its contents agree; unknown contents always agree."""
    fits: NDArray[np.bool_] = here.operation[a] == there.operation[b]
    columns = ((here.bytes, there.bytes), (here.step, there.step), (here.sequence, there.sequence))
    for mine, theirs in ((left[a], right[b]) for left, right in columns):
        fits &= (mine == theirs) | (mine == NONE) | (theirs == NONE)
    return fits


def _slices(here: CallSequence, there: CallSequence, by: int) -> tuple[slice, slice]:
    first, last = max(0, -by), min(len(here), len(there) - by)
    return slice(first, last), slice(first + by, last + by)


def _candidates(here: CallSequence, there: CallSequence) -> list[_Shift]:
    """Return the likeliest shifts, chosen by a sample of the pairs of each."""
    by = np.arange(max(1 - len(here), -SHIFTS_MAX), min(len(there), SHIFTS_MAX + 1))
    first = np.maximum(0, -by)
    pairs = np.minimum(len(here), len(there) - by) - first
    enough = pairs >= max(1, PAIRED_RATIO_MIN * min(len(here), len(there)))
    by, first, pairs = by[enough], first[enough], pairs[enough]
    a = first[:, None] + (pairs[:, None] - 1) * np.arange(LOOKS) // (LOOKS - 1)
    b = a + by[:, None]
    apart = here.end_ns[a] - there.end_ns[b]
    spread = np.median(np.abs(apart - np.median(apart, axis=1)[:, None]), axis=1)
    last = np.maximum(here.start_ns[a], there.start_ns[b])
    overlap = (last <= np.minimum(here.end_ns[a], there.end_ns[b]) + OVERLAP_SLACK_NS).mean(axis=1)
    likely = np.flatnonzero(_fits(here, a, there, b).all(axis=1))
    found: list[_Shift] = []
    # First those that overlap on the clocks as they are, then those with the smallest spread.
    for at in likely[np.lexsort((spread[likely], -np.where(overlap >= OVERLAP_LOOK_MIN, overlap, 0)[likely]))]:
        shift = _measure(here, there, int(by[at]))
        if shift is not None:
            found.append(shift)
            if len(found) == CANDIDATES_MAX:
                break
    return found


def _measure(here: CallSequence, there: CallSequence, by: int) -> _Shift | None:
    """Return how well a shift fits, None when contents contradict it or it pairs too few."""
    a, b = _slices(here, there, by)
    pairs = a.stop - a.start
    if pairs < max(1, PAIRED_RATIO_MIN * min(len(here), len(there))) or not _fits(here, a, there, b).all():
        return None
    apart = here.end_ns[a] - there.end_ns[b]
    offset = int(np.median(apart))
    last = np.maximum(here.start_ns[a], there.start_ns[b])
    first = np.minimum(here.end_ns[a], there.end_ns[b])
    return _Shift(
        by=by,
        pairs=pairs,
        offset_ns=offset,
        spread_ns=int(np.median(np.abs(apart - offset))),
        overlap_ratio=float((last <= first + OVERLAP_SLACK_NS).mean()),
    )


def _shifted(here: CallSequence, there: CallSequence, by: int, *, is_ambiguous: bool = False) -> Alignment:
    a, b = _slices(here, there, by)
    partner = np.full(len(here), NONE, dtype=np.int64)
    partner[a] = np.arange(b.start, b.stop)
    return Alignment(partner, is_ambiguous, by)


def _guess(here: CallSequence, there: CallSequence) -> int:
    """Return the shift that the clocks suggest."""
    nearest = np.searchsorted(there.end_ns, here.end_ns - OVERLAP_SLACK_NS)
    return int(np.median(nearest - np.arange(len(here))))


def _merge(here: CallSequence, there: CallSequence) -> Alignment | None:
    """Return the pairs that end together on the clocks as they are; None if too few do to trust the clocks."""
    mine, theirs = _nearest(here.end_ns, there.end_ns), _nearest(there.end_ns, here.end_ns)
    a = np.flatnonzero(theirs[mine] == np.arange(len(here)))  # each is the other's nearest, so pairs never cross
    b = mine[a]
    last = np.maximum(here.start_ns[a], there.start_ns[b])
    first = np.minimum(here.end_ns[a], there.end_ns[b])
    apart = np.abs(here.end_ns[a] - there.end_ns[b])
    shorter = np.minimum(here.end_ns[a] - here.start_ns[a], there.end_ns[b] - there.start_ns[b])
    near = apart <= np.maximum(ENDS_RATIO_MAX * shorter, OVERLAP_SLACK_NS)
    good = near & (last <= first + OVERLAP_SLACK_NS) & _fits(here, a, there, b)
    low = max(int(here.start_ns[0]), int(there.start_ns[0]))
    high = min(int(here.end_ns.max()), int(there.end_ns.max()))
    common = min(int(((calls.end_ns > low) & (calls.start_ns < high)).sum()) for calls in (here, there))
    if good.sum() < max(1, PAIRED_RATIO_MIN * common):
        return None
    partner = np.full(len(here), NONE, dtype=np.int64)
    partner[a[good]] = b[good]
    return Alignment(partner)


def _evenness(here: CallSequence, there: CallSequence, found: Alignment) -> tuple[int, int]:
    """Return how many calls `found` pairs, and the deviation of the distances between their ends."""
    a = np.flatnonzero(found.partner != NONE)
    apart = here.end_ns[a] - there.end_ns[found.partner[a]]
    return len(a), int(np.median(np.abs(apart - np.median(apart)))) if len(a) else 0


def _nearest(times: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of `times`, return the index of the nearest in the ascending `among`."""
    right = np.clip(np.searchsorted(among, times), 1, len(among) - 1) if len(among) > 1 else np.zeros(len(times), int)
    left = np.maximum(right - 1, 0)
    nearest: NDArray[np.int64] = np.where(np.abs(among[left] - times) <= np.abs(among[right] - times), left, right)
    return nearest


def _most_even(here: CallSequence, there: CallSequence, shifts: list[_Shift]) -> Alignment | None:
    """Return the shift with the smallest spread: the ends of true pairs differ only by the clocks' offset."""
    shorter = min(int(np.median(calls.end_ns - calls.start_ns)) for calls in (here, there))
    bound = max(END_SPREAD_NS, shorter // 2)
    shifts = [shift for shift in shifts if shift.spread_ns <= bound]
    if not shifts:
        return None
    shifts = [shift for shift in shifts if shift.pairs >= SPREAD_PAIRS_MIN] or shifts
    best = min(shifts, key=lambda shift: (shift.spread_ns, -shift.pairs))
    rivals = [shift for shift in shifts if shift.spread_ns <= RIVAL_RATIO * best.spread_ns + OVERLAP_SLACK_NS]
    chosen = max(rivals, key=lambda shift: (shift.pairs, -abs(shift.offset_ns)))
    return _shifted(here, there, chosen.by, is_ambiguous=len(rivals) > 1)
