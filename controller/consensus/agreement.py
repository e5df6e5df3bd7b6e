"""Defines `Agreement`, by which all ranks turn a knob at the same step, and implements it for a job of one rank.

The Tuner calls an Agreement and does not know how many ranks there are (several: `rank_agreement`).  At every step
boundary it calls `note` (one step was done).  Where the agreement `has_vote` it also calls, in this order, `listen`
(what came in) and `decide` (what all ranks apply now, if anything).  `decide` is called there in every case, also after
an exception elsewhere, because all ranks launch the votes at fixed boundaries.

Left out: what the knobs are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pacecar.profiler.transport.store_rendezvous import RendezvousError

from ..observation import KnobSpace
from .capabilities import Offer, live_knobs
from .channels import VoteSubject
from .protocol import JobPace, Proposal, ProposalKind

__all__ = ["Agreement", "AgreementUpdate", "LocalAgreement", "RendezvousError"]


@dataclass(slots=True)
class AgreementUpdate:
    """What came in at one boundary: `refused` (knob -> reason) once, when the knobs are settled; then paces."""

    refused: dict[str, str] | None = None
    paces: list[JobPace] = field(default_factory=list)


class Agreement(Protocol):
    """How the Tuner reaches the other ranks."""

    @property
    def spaces(self) -> tuple[KnobSpace, ...]:
        """The knobs that every rank can turn; empty until the offers were exchanged."""
        ...

    @property
    def frozen(self) -> str | None:
        """Why nothing will ever be turned again, or None."""
        ...

    @property
    def has_retired(self) -> bool:
        """Whether every rank froze; they all see it at the same boundary, and no vote follows."""
        ...

    @property
    def has_vote(self) -> bool:
        """Whether `listen` and `decide` can have anything to do at this boundary."""
        ...

    @property
    def are_all_calm(self) -> bool:
        """Whether no rank has anything under way, by the last vote."""
        ...

    def rest(self, *, is_calm: bool, step_ns: int) -> None:
        """Say whether this rank has nothing under way, and how long its steps take.

        The ranks vote less often while all are calm, and more often where all have long steps.
        """
        ...

    def disturb(self, number: int | None) -> None:
        """Tell rank 0, with the next report, the number of what disturbs this rank's step times; None: nothing does."""
        ...

    @property
    def disturbed(self) -> Mapping[int, int]:
        """Rank -> the number that it reported last; ranks that nothing disturbs are left out."""
        ...

    def afford(self, switches: int | None) -> None:
        """Tell rank 0, with the next report, how many switches this rank can pay for; None: nothing limits them."""
        ...

    @property
    def affordable(self) -> int | None:
        """The fewest switches that any rank reported last; None: nothing limits them."""
        ...

    def open(self, claim: str) -> None:
        """Meet the other ranks.

        Raises:
            RendezvousError: they did not all come with the same `claim`.
        """
        ...

    def offer(self, offer: Offer) -> None:
        """Say once, at the same boundary on every rank, what this rank can turn."""
        ...

    def note(self, step: int, pace_ns: int | None, *, profiled: bool) -> None:
        """One step of this rank is done; its pace is None where it was not measured."""
        ...

    def listen(self) -> AgreementUpdate:
        """Return what came in since the last call; never waits and never raises: a failure freezes tuning."""
        ...

    def propose(self, decision: int, values: Sequence[int], *, kind: ProposalKind = ProposalKind.KEEP) -> None:
        """Rank 0: ask all ranks to apply `values`, in the order of `spaces`."""
        ...

    def withdraw(self) -> None:
        """Rank 0: ask for nothing any more."""
        ...

    def decide(self, can_apply: Callable[[Proposal], bool]) -> Proposal | None:
        """Take part in the votes; return what all ranks must apply now; whoever applies it calls `settle`."""
        ...

    @property
    def has_left(self) -> bool:
        """Whether a rank, this one or another, takes no further part: nothing can be turned on all ranks any more."""
        ...

    def gather_for(self, proposal: Proposal, *, closes: bool = False) -> bool:
        """Return whether every rank is at the same point, ready to carry `proposal` out; else none carries it out.

        `closes`: this rank does so as the last thing before it closes, and all others must do the same.
        """
        ...

    def settle(self, proposal: Proposal, *, is_done: bool, undo: Callable[[], bool]) -> bool:
        """Return whether every rank carried `proposal` out; where one did not, all ranks `undo`."""
        ...

    def ask(self, subject: VoteSubject, numbers: Sequence[float]) -> list[list[float]] | None:
        """Return the `numbers` of every rank, in order of rank; waits for all.  None: they cannot be asked any more.

        All ranks ask the same, with as many numbers, at the same point between two of their collectives.
        """
        ...

    def tell(self, subject: VoteSubject, numbers: Sequence[float]) -> Callable[[], list[list[float]] | None]:
        """Do the same without waiting: what is returned waits, and gives the answer."""
        ...

    def freeze(self, reason: str) -> None:
        """Turn nothing any more, on any rank."""
        ...

    def leave(self) -> None:
        """Abandon what was sent and take no further part: no rank waits for another any more."""
        ...

    def close(self) -> None:
        """Leave the other ranks; waits at most CLOSE_SECONDS for what was sent."""
        ...


class LocalAgreement:
    """The agreement of a job of one rank, which agrees at once."""

    def __init__(self) -> None:
        self.spaces: tuple[KnobSpace, ...] = ()
        self.frozen: str | None = None
        self.disturbed: dict[int, int] = {}
        self.affordable: int | None = None
        self.are_all_calm = False
        self.has_left = False
        self._heard = AgreementUpdate()
        self._wanted: Proposal | None = None
        self._serials = itertools.count(1)

    @property
    def has_retired(self) -> bool:
        """Whether this rank froze: it is all ranks."""
        return self.frozen is not None

    @property
    def has_vote(self) -> bool:
        """Always True: what is noted can be taken at once."""
        return True

    def rest(self, *, is_calm: bool, step_ns: int) -> None:
        """Keep `is_calm`; a vote of one rank costs nothing."""
        self.are_all_calm = is_calm

    def disturb(self, number: int | None) -> None:
        """Do nothing: the one rank knows what disturbs it."""

    def afford(self, switches: int | None) -> None:
        """Keep it: this rank is all ranks."""
        self.affordable = switches

    def open(self, claim: str) -> None:
        """Do nothing: there is no other rank to meet."""

    def offer(self, offer: Offer) -> None:
        """Take every knob that is offered and not refused as live."""
        self.spaces, self._heard.refused = live_knobs([offer])

    def note(self, step: int, pace_ns: int | None, *, profiled: bool) -> None:
        """Keep this rank's pace, which is the job's."""
        if pace_ns is not None:
            self._heard.paces.append(JobPace(step, pace_ns, profiled))

    def listen(self) -> AgreementUpdate:
        """Return what was noted."""
        heard, self._heard = self._heard, AgreementUpdate()
        return heard

    def propose(self, decision: int, values: Sequence[int], *, kind: ProposalKind = ProposalKind.KEEP) -> None:
        """Apply at the next `decide`."""
        self._wanted = Proposal(next(self._serials), decision, tuple(values), kind)

    def withdraw(self) -> None:
        """Forget the proposal."""
        self._wanted = None

    def decide(self, can_apply: Callable[[Proposal], bool]) -> Proposal | None:
        """Return the proposal, once."""
        wanted, self._wanted = self._wanted, None
        return wanted if wanted is not None and self.frozen is None and can_apply(wanted) else None

    def gather_for(self, proposal: Proposal, *, closes: bool = False) -> bool:
        """Always True: the one rank is here."""
        return True

    def ask(self, subject: VoteSubject, numbers: Sequence[float]) -> list[list[float]] | None:
        """Return this rank's numbers."""
        return [list(numbers)]

    def tell(self, subject: VoteSubject, numbers: Sequence[float]) -> Callable[[], list[list[float]] | None]:
        """Return what gives this rank's numbers."""
        return lambda: [list(numbers)]

    def settle(self, proposal: Proposal, *, is_done: bool, undo: Callable[[], bool]) -> bool:
        """Undo what failed; a failed undo freezes."""
        if not is_done and not undo():
            self.freeze("the values before a failed switch could not be restored")
        return is_done

    def freeze(self, reason: str) -> None:
        """Turn nothing any more."""
        self.frozen = self.frozen or reason

    def leave(self) -> None:
        """Do nothing: there is no other rank."""

    def close(self) -> None:
        """Do nothing: nothing is held."""
