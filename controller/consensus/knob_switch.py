"""Carries out on one rank what all ranks voted for: all knobs or none, and the old values again on any failure.

Between the agreement's `gather_for` and `settle` the other ranks wait for this rank's answer, so nothing in between may
raise.  An error becomes the answer "no", and all ranks restore the old values.

Which knobs are turned, and back to what, follows only from what all ranks agreed on, never from what one rank sees.  A
rank that keeps its Reducer while the others rebuild theirs hangs in DDP's next rebuild, even if all values are equal.

A knob that cannot be applied on some rank should fail with the values in force rather than with new ones.  So before
the first trial `SwitchRehearsal` has all ranks apply the values in force: all knobs at once, as a switch does, and if
that fails one knob at a time, so that one bad knob does not cost the others.

Not here: which proposals are made (`tuner`) and how ranks agree (`agreement`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pacecar.clock import Clock
from pacecar.knobs import KNOBS
from pacecar.records import KnobValue

from ..knobs.actuator import Actuator
from ..observation import KnobSpace
from ..policy import phrases
from .agreement import Agreement
from .capabilities import KnobOffer, Offer
from .protocol import PERIOD, ProposalKind, SwitchProposal

__all__ = ["REHEARSAL_BOUNDARIES_MAX", "KnobSwitcher", "Switch", "SwitchRehearsal"]

logger = logging.getLogger(__name__)

LOSSLESS_CHOICES: dict[str, int] = {
    knob.name: 0 for knob in KNOBS if knob.knob_class == "lossy" and knob.kind == "choice"
}
"""Knob -> its choice that loses nothing."""

ADAPTIVE: frozenset[str] = frozenset(knob.name for knob in KNOBS if knob.knob_class == "adaptive")

WATCHED: frozenset[str] = frozenset({"work_share"})
"""Knobs that are right only while pacecar sees that the loop does its part."""

REHEARSAL_BOUNDARIES_MAX = 32 * PERIOD
"""Ranks that do not agree on applying the values in force within this many steps will not agree on anything."""


@dataclass(frozen=True, slots=True)
class Switch:
    """The outcome of a proposal: `turned` is knob -> (old, new), on all ranks or on none."""

    is_done: bool
    turned: dict[str, tuple[int, int]]
    duration_ns: int


class KnobSwitcher:
    """The actuators of one rank, in the agreed order.  `barred` knobs failed on some rank and are not turned again."""

    def __init__(self, actuators: Mapping[str, Actuator], agreement: Agreement, clock: Clock) -> None:
        self._actuators = actuators
        self._agreement = agreement
        self._clock = clock
        self._agreed: tuple[int, ...] | None = None
        self.barred: set[str] = set()

    def offer(self) -> Offer:
        """Return what this rank can turn; a knob that raises does not keep the others from being tuned."""
        offers = []
        for knob, actuator in sorted(self._actuators.items()):
            value: int | None = None
            domain: tuple[int, ...] = ()
            layout = ""
            companions: tuple[tuple[int, str, int], ...] = ()
            try:
                refusal = actuator.refusal()
                if refusal is None:
                    value, domain, layout = actuator.value(), actuator.domain(), actuator.layout()
                    companions = tuple((one, *other) for one in domain for other in actuator.companions(one))
            except Exception as error:
                logger.debug("pacecar cannot offer %s", knob, exc_info=True)
                refusal = f"{type(error).__name__}: {error}"
            offers.append(KnobOffer(knob, value, domain, refusal, layout, companions))
        return Offer(tuple(offers))

    def agreed(self) -> tuple[int, ...]:
        """Return the values that all ranks agreed on last; before the first agreement, the values in force here."""
        return self.values() if self._agreed is None else self._agreed

    def adopt_current(self) -> None:
        """Treat the values in force as agreed on: a knob went back by itself, on all ranks in the same step."""
        self._agreed = self.values()

    def values(self) -> tuple[int, ...]:
        """Return the values in force, in the order of the agreed spaces."""
        return tuple(self._actuators[space.knob].value() for space in self._agreement.spaces)

    def current_values(self) -> dict[str, KnobValue]:
        """Return the value in force of every knob that has one, including knobs that are not tuned."""
        values: dict[str, KnobValue] = {}
        for knob, actuator in self._actuators.items():
            try:
                values[knob] = actuator.value()
            except Exception:
                logger.debug("pacecar cannot read %s", knob, exc_info=True)
        return values

    def live(self) -> list[KnobSpace]:
        """Return the knobs that can still be turned."""
        return [space for space in self._agreement.spaces if space.knob not in self.barred]

    def values_for(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """Return `values` in the order of the spaces; knobs that are barred or absent keep their agreed value."""
        pairs = zip(self._agreement.spaces, self.agreed(), strict=True)
        return tuple(old if s.knob in self.barred else values.get(s.knob, old) for s, old in pairs)

    def resting_values(self, proven: Sequence[int] | None, *, closes: bool = False) -> tuple[int, ...]:
        """Return what stays in force once tuning ends: `proven`, else the present values, but nothing lossy or watched.

        `closes`: pacecar is about to close, so the global batch is the script's own, too.
        """
        spaces, going = self._agreement.spaces, WATCHED | ADAPTIVE if closes else WATCHED
        homes = LOSSLESS_CHOICES | {space.knob: space.value for space in spaces if space.knob in going}
        pairs = zip(spaces, proven or self.agreed(), strict=True)
        return tuple(homes.get(space.knob, value) for space, value in pairs)

    def describe_unrestored(self, rest: Sequence[int]) -> str:
        """Return a phrase for what stays in force instead of `rest`; "" for nothing."""
        changes = zip(self._agreement.spaces, self.agreed(), rest, strict=True)
        return "".join(f"; {phrases.staying(space.knob, now, old)}" for space, now, old in changes if now != old)

    def can_apply(self, proposal: SwitchProposal) -> bool:
        """Return whether this rank can carry out `proposal`."""
        spaces, present = self._agreement.spaces, self.values()
        if len(proposal.values) != len(spaces):
            return False
        if proposal.kind is ProposalKind.REHEARSAL:
            return proposal.values == present
        beside = {space.knob: new for space, new in zip(spaces, proposal.values, strict=True)}
        return all(
            new == old
            if space.knob in self.barred
            else now == old and (new == old or self._is_allowed(space, new, beside))
            for space, now, old, new in zip(spaces, present, self.agreed(), proposal.values, strict=True)
        )

    def _is_allowed(self, space: KnobSpace, value: int, beside: Mapping[str, int]) -> bool:
        return value in space.domain and not self._actuators[space.knob].is_barred(value, beside)

    def carry_out(self, proposal: SwitchProposal) -> Switch:
        """Apply `proposal`.  If any rank fails, all ranks apply the old values again and bar the knobs."""
        plan = self._plan(proposal)
        begin_ns = self._clock.monotonic_ns()
        is_done = plan is not None and self._apply({knob: new for knob, (_, new) in plan.items()})
        duration_ns = self._clock.monotonic_ns() - begin_ns

        def undo() -> bool:
            return plan is not None and self._apply({knob: old for knob, (old, _) in plan.items()})

        is_done = self._agreement.settle(proposal, is_done=is_done, undo=undo)
        if is_done or proposal.kind is ProposalKind.REHEARSAL:  # which all ranks voted to be in force already
            self._agreed = proposal.values
        turned = plan or {}
        if not is_done and (len(turned) == 1 or proposal.kind is not ProposalKind.REHEARSAL):
            self.barred.update(turned)
            logger.warning("pacecar: %s could not be turned on all ranks and stays as it is", ", ".join(sorted(turned)))
        return Switch(is_done, turned, duration_ns)

    def _plan(self, proposal: SwitchProposal) -> dict[str, tuple[int, int]] | None:
        """Return knob -> (old, new) for what `proposal` turns; None if this rank cannot tell.

        A rehearsal's `decision` is the set of knobs to rehearse, one bit each in the order of the spaces.
        """
        try:
            olds = proposal.values if proposal.kind is ProposalKind.REHEARSAL else self.agreed()
            changes = zip(self._agreement.spaces, olds, proposal.values, strict=True)
            return {
                space.knob: (old, new)
                for i, (space, old, new) in enumerate(changes)
                if (proposal.decision >> i & 1 if proposal.kind is ProposalKind.REHEARSAL else new != old)
            }
        except Exception:
            logger.exception("pacecar could not plan a switch")
            return None

    def _apply(self, values: dict[str, int]) -> bool:
        try:
            with ExitStack() as together:
                for knob in values:
                    together.enter_context(self._actuators[knob].gathered())
                for knob, value in values.items():
                    self._actuators[knob].apply(value)
        except Exception:  # the other ranks wait for the answer
            logger.exception("pacecar could not apply %s", values)
            return False
        return True


class SwitchRehearsal:
    """The sets of knobs still to rehearse, as bit masks in the order of the spaces: a rehearsal's `decision`."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._sets: list[int] = []
        self._since = 0

    def plan(self) -> None:
        """Begin with all knobs."""
        self._sets = [(1 << len(self._agreement.spaces)) - 1]

    def propose_next(self, boundary: int, values: Sequence[int]) -> bool:
        """Propose the next set, with the `values` in force; return False if none is left."""
        if not self._sets:
            return False
        self._since = boundary
        self._agreement.propose(self._sets[0], values, kind=ProposalKind.REHEARSAL)
        return True

    def record_outcome(self, proposal: SwitchProposal, *, is_done: bool) -> None:
        """Remove the rehearsed set; a failed set of several knobs is replaced by one set for each knob."""
        del self._sets[0]
        single = [1 << i for i in range(len(self._agreement.spaces)) if proposal.decision >> i & 1]
        if not is_done and len(single) > 1:
            self._sets = single

    def is_late(self, boundary: int) -> bool:
        """Return whether the ranks have not agreed within REHEARSAL_BOUNDARIES_MAX boundaries."""
        return bool(self._sets) and boundary - self._since > REHEARSAL_BOUNDARIES_MAX
