"""Which knobs does rank 0 still want applied, as they are, before the first trial?

A knob that cannot be applied on some rank is better found out with the values in force than with new ones.  All of them
in one go first, for that is what a switch does; where that fails, each by itself, so that one knob costs one knob.

Left out: what a failure bars (the switchboard).
"""

from __future__ import annotations

from collections.abc import Sequence

from .agreement import Agreement
from .protocol import PERIOD, Proposal, ProposalKind

__all__ = ["REHEARSAL_BOUNDARIES_MAX", "SwitchRehearsal"]

REHEARSAL_BOUNDARIES_MAX = 32 * PERIOD
"""Ranks that did not agree on applying the values in force within this many steps will not agree on anything."""


class SwitchRehearsal:
    """The sets of knobs that wait, one bit a knob in the order of the spaces: a rehearsal's `decision`."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._sets: list[int] = []
        self._since = 0

    def plan(self) -> None:
        """Begin with all knobs."""
        self._sets = [(1 << len(self._agreement.spaces)) - 1]

    def ask(self, boundary: int, values: Sequence[int]) -> bool:
        """Propose the next one, with the `values` in force; return False when none is left."""
        if not self._sets:
            return False
        self._since = boundary
        self._agreement.propose(self._sets[0], values, kind=ProposalKind.REHEARSAL)
        return True

    def played(self, proposal: Proposal, *, is_done: bool) -> None:
        """Strike it off; one of several knobs that failed is replaced by one for each knob."""
        del self._sets[0]
        single = [1 << i for i in range(len(self._agreement.spaces)) if proposal.decision >> i & 1]
        if not is_done and len(single) > 1:
            self._sets = single

    def is_late(self, boundary: int) -> bool:
        """Return whether the ranks were asked too long ago."""
        return bool(self._sets) and boundary - self._since > REHEARSAL_BOUNDARIES_MAX
