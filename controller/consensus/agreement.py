"""Implements the agreement of a job of one rank, and names what the Tuner calls: `Agreement`, for one rank or several.

The contract of each method is in `rank_agreement`.  At every step boundary the Tuner calls `record_step`.  If the
agreement `has_vote`, it then calls `receive_updates` and `decide`, in this order.  It must call `decide` there even
after an exception elsewhere, because all ranks launch votes at the same boundaries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from pacecar.profiler.transport.rendezvous import RendezvousError

from ..knobs.actuator import Gather
from ..knobs.batch.share_plan import RankWork
from ..observation import KnobSpace
from .capabilities import Offer, live_knobs
from .channels import VoteSubject
from .protocol import AgreementUpdate, JobPace, ProposalKind, SwitchProposal
from .rank_agreement import RankAgreement

__all__ = ["Agreement", "LocalAgreement", "RendezvousError"]


class LocalAgreement:
    """The agreement of a job of one rank, which agrees at once."""

    def __init__(self) -> None:
        self.spaces: tuple[KnobSpace, ...] = ()
        self.frozen: str | None = None
        self.disturbed: dict[int, int] = {}
        self.objections: dict[int, int] = {}
        self.affordable: int | None = None
        self.works: tuple[RankWork, ...] | None = None
        self.are_all_calm = False
        self.has_left = False
        self._update = AgreementUpdate()
        self._proposal: SwitchProposal | None = None
        self._serials = itertools.count(1)

    @property
    def has_retired(self) -> bool:
        """Whether this rank froze."""
        return self.frozen is not None

    @property
    def has_vote(self) -> bool:
        """Always True: a proposal can be decided at once."""
        return True

    def report_calm(self, *, is_calm: bool, step_ns: int) -> None:
        """Keep `is_calm`; a vote of one rank costs nothing."""
        self.are_all_calm = is_calm

    def report_disturbance(self, number: int | None) -> None:
        """Do nothing: the one rank knows what disturbs it."""

    def report_objection(self, number: int | None) -> None:
        """Keep the number."""
        self.objections = {} if number is None else {0: number}

    def report_work(self, work: RankWork | None) -> None:
        """Do nothing: one rank has nobody to share work with."""

    def report_affordable(self, switches: int | None) -> None:
        """Keep the number."""
        self.affordable = switches

    def open(self, claim: str) -> None:
        """Do nothing: there is no other rank."""

    def offer(self, offer: Offer) -> None:
        """Accept every knob that is offered and not refused."""
        self.spaces, self._update.refused = live_knobs([offer])

    def record_step(self, step: int, pace_ns: int | None, *, profiled: bool, collection_ns: int = 0) -> None:
        """Keep this rank's pace, which is the job's."""
        if pace_ns is not None:
            self._update.paces.append(JobPace(step, pace_ns, profiled, collection_ns))

    def receive_updates(self) -> AgreementUpdate:
        """Return what was recorded."""
        update, self._update = self._update, AgreementUpdate()
        return update

    def propose(self, decision: int, values: Sequence[int], *, kind: ProposalKind = ProposalKind.KEEP) -> None:
        """Keep the proposal for the next `decide`."""
        self._proposal = SwitchProposal(next(self._serials), decision, tuple(values), kind)

    def withdraw(self) -> None:
        """Drop the proposal."""
        self._proposal = None

    def decide(self, can_apply: Callable[[SwitchProposal], bool]) -> SwitchProposal | None:
        """Return the proposal, once."""
        proposal, self._proposal = self._proposal, None
        return proposal if proposal is not None and self.frozen is None and can_apply(proposal) else None

    def gather_for(self, proposal: SwitchProposal, *, closes: bool = False) -> bool:
        """Always True."""
        return True

    def start_gather(self, subject: VoteSubject, numbers: Sequence[float]) -> Gather:
        """Return this rank's numbers."""
        return lambda: [list(numbers)]

    def settle(self, proposal: SwitchProposal, *, is_done: bool, undo: Callable[[], bool]) -> bool:
        """Undo what failed; freeze if that fails too."""
        if not is_done and not undo():
            self.freeze("the values before a failed switch could not be restored")
        return is_done

    def freeze(self, reason: str) -> None:
        """Turn nothing any more."""
        self.frozen = self.frozen or reason

    def leave(self) -> None:
        """Do nothing: there is no other rank."""

    def close(self) -> None:
        """Do nothing."""


Agreement = LocalAgreement | RankAgreement
"""The Tuner's connection to the other ranks, if any."""
