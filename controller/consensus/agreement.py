"""What lets the ranks turn a knob at the same step, and what does so for one rank alone (several: `rank_agreement`).

The Tuner talks to an Agreement and does not know how many ranks there are.  At every step boundary it calls `note` (one
step was done), and where the agreement `has_business`, in this order: `listen` (what came in), `decide` (what all ranks
apply now, if anything).  `decide` is called there in every case, also after an exception elsewhere: the votes are
launched at fixed boundaries by all ranks.

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

__all__ = ["Agreement", "AgreementHeard", "LocalAgreement", "RendezvousError"]


@dataclass(slots=True)
class AgreementHeard:
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
    def has_business(self) -> bool:
        """Whether `listen` and `decide` can have anything to do at this boundary."""
        ...

    @property
    def are_all_calm(self) -> bool:
        """Whether no rank has anything under way, as last heard."""
        ...

    def rest(self, *, is_calm: bool, step_ns: int) -> None:
        """Say whether this rank has nothing under way, and how long its steps take.

        The ranks meet less often while all are calm, and more often where all have long steps.
        """
        ...

    def disturb(self, number: int | None) -> None:
        """Tell rank 0, with the next report, what makes this rank's steps measure something else; None: nothing."""
        ...

    @property
    def disturbed(self) -> Mapping[int, int]:
        """Rank -> what it told, as last heard; ranks that nothing disturbs are not there."""
        ...

    def open(self, claim: str) -> None:
        """Meet the other ranks.

        Raises:
            MeetingError: they did not all come with the same `claim`.
        """
        ...

    def offer(self, offer: Offer) -> None:
        """Say once, at the same boundary on every rank, what this rank can turn."""
        ...

    def note(self, step: int, pace_ns: int | None, *, profiled: bool) -> None:
        """One step of this rank is done; its pace is None where it was not measured."""
        ...

    def listen(self) -> AgreementHeard:
        """Return what came in since the last call; never waits, never raises: what breaks freezes."""
        ...

    def propose(self, decision: int, values: Sequence[int], *, kind: ProposalKind = ProposalKind.KEEP) -> None:
        """Rank 0: ask all ranks to apply `values`, in the order of `spaces`."""
        ...

    def withdraw(self) -> None:
        """Rank 0: ask for nothing any more."""
        ...

    def decide(self, can_apply: Callable[[Proposal], bool]) -> Proposal | None:
        """Take part in the votes; return what all ranks must apply now, with `settle` told how it went."""
        ...

    @property
    def has_left(self) -> bool:
        """Whether a rank, this one or another, takes no further part: nothing can be turned on all ranks any more."""
        ...

    def gather_for(self, proposal: Proposal, *, closes: bool = False) -> bool:
        """Return whether every rank is here, at the same point, to carry `proposal` out; else none does.

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
        """Abandon what is out and take no further part: the other ranks are not waited for and must not wait either."""
        ...

    def close(self) -> None:
        """Let go; waits at most CLOSE_SECONDS for what is out."""
        ...


class LocalAgreement:
    """One rank agrees with itself at once."""

    def __init__(self) -> None:
        self.spaces: tuple[KnobSpace, ...] = ()
        self.frozen: str | None = None
        self.disturbed: dict[int, int] = {}
        self.are_all_calm = False
        self.has_left = False
        self._heard = AgreementHeard()
        self._wanted: Proposal | None = None
        self._serials = itertools.count(1)

    @property
    def has_retired(self) -> bool:
        """One rank is all ranks."""
        return self.frozen is not None

    @property
    def has_business(self) -> bool:
        """One rank hears itself at once."""
        return True

    def rest(self, *, is_calm: bool, step_ns: int) -> None:
        """Meeting oneself costs nothing."""
        self.are_all_calm = is_calm

    def disturb(self, number: int | None) -> None:
        """Whoever says it knows it."""

    def open(self, claim: str) -> None:
        """Nobody to meet."""

    def offer(self, offer: Offer) -> None:
        """All that is offered and not refused is live."""
        self.spaces, self._heard.refused = live_knobs([offer])

    def note(self, step: int, pace_ns: int | None, *, profiled: bool) -> None:
        """The job's pace is this rank's."""
        if pace_ns is not None:
            self._heard.paces.append(JobPace(step, pace_ns, profiled))

    def listen(self) -> AgreementHeard:
        """Return what was noted."""
        heard, self._heard = self._heard, AgreementHeard()
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
        """One rank is here."""
        return True

    def ask(self, subject: VoteSubject, numbers: Sequence[float]) -> list[list[float]] | None:
        """Return what one rank says."""
        return [list(numbers)]

    def tell(self, subject: VoteSubject, numbers: Sequence[float]) -> Callable[[], list[list[float]] | None]:
        """Return what one rank says."""
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
        """There is nobody to leave."""

    def close(self) -> None:
        """Nothing to let go."""
