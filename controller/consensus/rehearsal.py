"""Chooses the knobs that all ranks apply at the values in force, before the first trial (a rehearsal of a switch).

If a knob cannot be applied on some rank, that is better found out with the values in force than with new ones.  All
knobs are applied in one go first, because a switch does so.  Where that fails, each is applied by itself, so that one
knob that fails costs no other knob.

Left out: what a failure bars (`knob_switch`).
"""

from __future__ import annotations

from collections.abc import Sequence

from .agreement import Agreement
from .protocol import PERIOD, Proposal, ProposalKind

__all__ = ["REHEARSAL_BOUNDARIES_MAX", "SwitchRehearsal"]

REHEARSAL_BOUNDARIES_MAX = 32 * PERIOD
"""Ranks that did not agree on applying the values in force within this many steps will not agree on anything."""


class SwitchRehearsal:
    """The sets of knobs still to rehearse, as bit masks in the order of the spaces: a rehearsal's `decision`."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._sets: list[int] = []
        self._since = 0

    def plan(self) -> None:
        """Begin with all knobs."""
        self._sets = [(1 << len(self._agreement.spaces)) - 1]

    def ask(self, boundary: int, values: Sequence[int]) -> bool:
        """Propose the next set, with the `values` in force; return False when none is left."""
        if not self._sets:
            return False
        self._since = boundary
        self._agreement.propose(self._sets[0], values, kind=ProposalKind.REHEARSAL)
        return True

    def played(self, proposal: Proposal, *, is_done: bool) -> None:
        """Remove the set that was rehearsed; a set of several knobs that failed is replaced by one set a knob."""
        del self._sets[0]
        single = [1 << i for i in range(len(self._agreement.spaces)) if proposal.decision >> i & 1]
        if not is_done and len(single) > 1:
            self._sets = single

    def is_late(self, boundary: int) -> bool:
        """Return whether the ranks have not agreed within REHEARSAL_BOUNDARIES_MAX boundaries."""
        return bool(self._sets) and boundary - self._since > REHEARSAL_BOUNDARIES_MAX
