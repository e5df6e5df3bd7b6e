"""Decides which ranks meet in which round.  Pure.

First each rank meets others in log2(n) rounds: in round k, rank r meets r XOR 2^k, so that with whole nodes of 2^m
ranks the first m rounds stay within nodes.  Who has nobody in a round meets another who has nobody.

Then, in at most AGAIN_ROUNDS more, ranks that were slow with somebody meet ranks that were slow with nobody, to tell
which end it was; and pairs that were slow meet again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

__all__ = ["AGAIN_ROUNDS", "Pair", "again", "first_rounds"]

AGAIN_ROUNDS = 4

Pair = tuple[int, int]
"""Two ranks, the lower one first."""


def first_rounds(ranks: int) -> list[list[Pair]]:
    """Return the pairs of each round: ceil(log2(ranks)) rounds, and one more if some ranks met but one of several."""
    rounds: list[list[Pair]] = []
    met: set[Pair] = set()
    for bit in range((ranks - 1).bit_length()):
        pairs = [(rank, rank | 1 << bit) for rank in range(ranks) if not rank >> bit & 1 and rank | 1 << bit < ranks]
        busy = {rank for pair in pairs for rank in pair}
        pairs += _pair_up([rank for rank in range(ranks) if rank not in busy], met)
        met.update(pairs)
        rounds.append(pairs)
    times = Counter(rank for pair in met for rank in pair)
    # Those who met but one come first, and meet anybody.
    rare = sorted((rank for rank in range(ranks) if times[rank] < min(2, ranks - 1)), key=times.__getitem__)
    more = _pair_up([*rare, *(rank for rank in range(ranks) if rank not in set(rare))], met) if rare else []
    return [*rounds, more] if more else rounds


def again(ranks: int, slow: Mapping[Pair, bool], doubted: Collection[Pair]) -> list[Pair]:
    """Return the pairs of one more round.

    `slow` tells of each pair that met whether it was slow, `doubted` are pairs that are slow though neither end is by
    itself; they meet again.  Empty: there is nothing to clear up, or nobody to clear it up with.
    """
    suspects = sorted({rank for pair, is_slow in slow.items() if is_slow for rank in pair})
    calm = [rank for rank in range(ranks) if rank not in set(suspects)]
    pairs: list[Pair] = []
    busy: set[int] = set()
    for pair in sorted(doubted):
        if not busy.intersection(pair):
            pairs.append(pair)
            busy.update(pair)
    for suspect in suspects:
        if suspect in busy:
            continue
        partner = next((rank for rank in calm if rank not in busy and _pair(rank, suspect) not in slow), None)
        if partner is not None:
            pairs.append(_pair(suspect, partner))
            busy.update((suspect, partner))
    return pairs


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def _pair_up(ranks: Iterable[int], met: Collection[Pair]) -> list[Pair]:
    """Return pairs of `ranks` that have not met, greedily."""
    left, pairs = list(ranks), []
    while left:
        one = left.pop(0)
        other = next((rank for rank in left if _pair(one, rank) not in met), None)
        if other is not None:
            left.remove(other)
            pairs.append(_pair(one, other))
    return pairs
