"""Decides which ranks meet in which round.  Pure.

First each rank meets others in log2(n) rounds: in round k, rank r meets r XOR 2^k, so that with whole nodes of 2^m
ranks the first m rounds stay within nodes.  Who has nobody in a round meets another who has nobody.

Then, in what ROUNDS_BEYOND leaves, pairs that were slow meet once more, and ranks that were slow with somebody meet
ranks that were slow with nobody, to tell which end it was.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

__all__ = ["ROUNDS_BEYOND", "Pair", "again", "first_rounds", "rounds_left"]

ROUNDS_BEYOND = 4
"""All rounds are at most so many more than log2(n)."""

DOUBTED_MEETINGS = 2
"""How often a pair meets that is slow though neither end is by itself; then its ends meet others."""

Pair = tuple[int, int]
"""Two ranks, the lower one first."""


def first_rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return the pairs of each round; `nodes` is where each rank is.

    They are ceil(log2(ranks)) rounds, and one more if a rank met only one of several others, other nodes, or ranks on
    them.
    """
    ranks = len(nodes)
    rounds: list[list[Pair]] = []
    met: set[Pair] = set()
    for bit in range((ranks - 1).bit_length()):
        pairs = [(rank, rank | 1 << bit) for rank in range(ranks) if not rank >> bit & 1 and rank | 1 << bit < ranks]
        busy = {rank for pair in pairs for rank in pair}
        pairs += _pair_up([rank for rank in range(ranks) if rank not in busy], met, nodes)
        met.update(pairs)
        rounds.append(pairs)
    # Those who met but one come first, and meet anybody.
    rare = _who_met_one(met, nodes)
    more = _pair_up([*rare, *(rank for rank in range(ranks) if rank not in set(rare))], met, nodes) if rare else []
    return [*rounds, more] if more else rounds


def rounds_left(ranks: int, first: int) -> int:
    """Return how many rounds may follow so many `first` ones."""
    return (ranks - 1).bit_length() + ROUNDS_BEYOND - first


def again(nodes: Sequence[str], slow: Mapping[Pair, bool], doubted: Collection[Pair], met: Counter[Pair]) -> list[Pair]:
    """Return the pairs of one more round.

    `slow` tells of each pair that met whether it was slow, `doubted` are pairs that are slow though neither end is by
    itself; they meet once more.  Who was slow with somebody meets others as far away, within or between nodes.  `met`
    is how often each pair did.  Empty: there is nothing to clear up, or nobody to clear it up with.
    """
    suspects: dict[int, set[bool]] = defaultdict(set)
    for pair in sorted(pair for pair, is_slow in slow.items() if is_slow):
        for rank in pair:
            suspects[rank].add(_is_within(pair, nodes))
    calm = [rank for rank in range(len(nodes)) if rank not in suspects]
    pairs = []
    busy: set[int] = set()
    for pair in sorted(doubted):
        if met[pair] < DOUBTED_MEETINGS and not busy.intersection(pair):
            pairs.append(pair)
            busy.update(pair)
    for suspect, kinds in sorted(suspects.items()):
        if suspect in busy:
            continue
        unmet = (_pair(rank, suspect) for rank in calm if rank not in busy and _pair(rank, suspect) not in met)
        found = next((pair for pair in unmet if _is_within(pair, nodes) in kinds), None)
        if found is not None:
            pairs.append(found)
            busy.update(found)
    return pairs


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def _is_within(pair: Pair, nodes: Sequence[str]) -> bool:
    return nodes[pair[0]] == nodes[pair[1]]


def _who_met_one(met: Collection[Pair], nodes: Sequence[str]) -> list[int]:
    """Return the ranks that met only one other, rank of other nodes, or other node, though there are more.

    Whether it or the one that it met is slow, could not be told.  Who met least comes first.
    """
    others: dict[int, set[int]] = defaultdict(set)
    for one, other in met:
        others[one].add(other)
        others[other].add(one)
    ranks, of_node = len(nodes), Counter(nodes)
    rare = []
    for rank, node in enumerate(nodes):
        away = [other for other in others[rank] if nodes[other] != node]
        counts = (
            (len({nodes[other] for other in away}), len(of_node) - 1),
            (len(away), ranks - of_node[node]),
            (len(others[rank]), ranks - 1),
        )
        if any(found < min(2, there) for found, there in counts):
            rare.append((tuple(found for found, _ in counts), rank))
    return [rank for _, rank in sorted(rare)]


def _pair_up(ranks: Iterable[int], met: Collection[Pair], nodes: Sequence[str]) -> list[Pair]:
    """Return pairs of `ranks` that have not met, greedily; nodes that have not met come first, then other nodes."""
    left, pairs = list(ranks), []
    nodes_met = {(rank, nodes[other]) for pair in met for rank, other in (pair, pair[::-1])} | set(enumerate(nodes))
    while left:
        one = left.pop(0)
        new = (rank for rank in left if (one, nodes[rank]) not in nodes_met)
        unmet = (rank for rank in left if _pair(one, rank) not in met)
        away = (rank for rank in left if not _is_within((one, rank), nodes) and _pair(one, rank) not in met)
        other = next(chain(new, away, unmet), None)
        if other is not None:
            left.remove(other)
            pairs.append(_pair(one, other))
    return pairs
