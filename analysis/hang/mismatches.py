"""Finds members of a group that called something else at the same number than the others.

The rules of what must be equal are those of torch's own analyzer (torch/distributed/flight_recorder, `Op.match`): the
operation always; sizes and types but for operations that allow ranks to differ.  The odd one out is named if more than
half of at least three members agree, or if it called this out of turn and the others did not (`turns`).  If both say
something else, or neither anything, it cannot be told.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from pacecar.records.hangs import CollectiveCall, HangKind

from .group_members import CollectiveGroup, GroupMember, plain_operation
from .sentences import group_words, ranks_words
from .turns import Turns

__all__ = ["Mismatch", "find_mismatch", "signature"]

_MAY_DIFFER = ("all_to_all", "alltoall", "scatter", "gather", "broadcast", "coalesced", "send", "recv")
"""Operations whose inputs may differ between ranks: uneven parts, or only the root has them.  Of all operations with
one of these names only the flat ones (`_all_gather_base`, `_reduce_scatter_base`) need equal sizes."""

Signature = tuple[str, str, str]


class Mismatch(msgspec.Struct, frozen=True):
    """What members called at `number`.  `odd` are those that differ from most; empty if no majority tells."""

    group: CollectiveGroup
    number: int
    signatures: dict[int, Signature]
    odd: tuple[int, ...]
    kind: HangKind

    @property
    def blamed(self) -> tuple[int, ...]:
        """The odd ones, or both members of a group of two; empty if it cannot be told."""
        is_pair = len(self.group.ranks) == len(self.signatures) == 2
        return self.odd or (tuple(sorted(self.signatures)) if is_pair else ())

    @property
    def sentence(self) -> str:
        """What was called, by whom."""
        by_signature: dict[Signature, list[int]] = {}
        for rank, signature in sorted(self.signatures.items(), key=lambda item: (item[0] not in self.odd, item[0])):
            by_signature.setdefault(signature, []).append(rank)
        called = " and ".join(f"{ranks_words(ranks)} called {_words(one)}" for one, ranks in by_signature.items())
        doubt = "" if self.odd else "; which of them is wrong cannot be told"
        return f"as #{self.number} of {group_words(self.group)}, {called}{doubt}"


def find_mismatch(group: CollectiveGroup, turns: Turns) -> Mismatch | None:
    """Return the first number that a member waits in and at which the members' calls differ."""
    waited = [member.waits_in for member in group.members.values() if member.waits_in is not None]
    numbers = sorted({number for m in group.members.values() for number in m.calls if waited and number >= min(waited)})
    for number in numbers:
        signatures = {rank: signature(m.calls[number]) for rank, m in group.members.items() if number in m.calls}
        if len(set(signatures.values())) > 1:
            return _judged(group, number, signatures, turns)
    return None


def signature(call: CollectiveCall) -> Signature:
    """Return what must be equal on all ranks: the operation, and sizes and types where they may not differ."""
    operation = plain_operation(call)
    if any(name in operation for name in _MAY_DIFFER) and not operation.endswith("_base"):
        return operation, "", ""
    return operation, call.sizes, call.dtypes


def _words(signature: Signature) -> str:
    operation, sizes, dtypes = signature
    return " ".join(part for part in (operation, dtypes, sizes) if part)


def _judged(group: CollectiveGroup, number: int, signatures: dict[int, Signature], turns: Turns) -> Mismatch:
    (common, count), *_ = Counter(signatures.values()).most_common()
    is_majority = len(signatures) >= 3 and 2 * count > len(signatures)
    odd = tuple(sorted(rank for rank, one in signatures.items() if is_majority and one != common))
    out = tuple(sorted(turns.out_of_turn(signatures, group, number)))
    due = {one for rank, one in signatures.items() if rank not in out}
    if out and len(due) == 1:
        odd = out if not odd else odd if odd == out else ()
        common = due.pop()
    if not odd:
        return Mismatch(group, number, signatures, (), HangKind.MISMATCHED)
    peers = [m for rank, m in group.members.items() if rank not in odd]
    kinds = {_kind(group.members[rank], peers, number, common) for rank in odd}
    return Mismatch(group, number, signatures, odd, kinds.pop() if len(kinds) == 1 else HangKind.MISMATCHED)


def _kind(member: GroupMember, peers: list[GroupMember], number: int, common: Signature) -> HangKind:
    """Return whether the member's calls are those of its peers shifted by one, and in which direction."""
    own = signature(member.calls[number])
    following = {signature(peer.calls[number + 1]) for peer in peers if number + 1 in peer.calls}
    earlier = {signature(call) for peer in peers for at, call in peer.calls.items() if at < number}
    if own in following or (not following and own in earlier):
        return HangKind.SKIPPED
    if number + 1 in member.calls and signature(member.calls[number + 1]) == common:
        return HangKind.EXTRA
    return HangKind.MISMATCHED
