"""How do the ranks turn a knob at the same step?  `protocol.py` on the job's process groups, or alone.

The Tuner talks to an Agreement and does not know how many ranks there are.  At every step boundary it calls `note` (one
step was done), and where the agreement `has_business`, in this order: `listen` (what came in), `decide` (what all ranks
apply now, if anything).  `decide` is called there in every case, also after an exception elsewhere: the votes are
launched at fixed boundaries by all ranks, and a rank that leaves one out hangs the job.

For the same reason every rank must pass the same boundaries: attach on all ranks, step on all ranks, and close on
all ranks after the same step.  A rank that stops calling `decide` while others train hangs them at the next vote.

Left out: what the knobs are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pacecar.controller.channels import MEET_SECONDS, MainRoad, MeetingError, SideRoad, meet
from pacecar.controller.observation import KnobSpace
from pacecar.controller.offers import Offer, live_knobs
from pacecar.controller.protocol import CALM_PERIOD, LEISURE_PERIOD, PERIOD, VERSION, JobPace, Kind, Member, Proposal
from pacecar.torch_internals import lacking, need

__all__ = ["Agreement", "Heard", "LocalAgreement", "MeetingError", "RankAgreement"]

CLOSE_SECONDS = 2.0
"""What is out when the job ends has had a step to complete; after this it is abandoned."""

CLOSE_POLL_SECONDS = 0.001

_meetings = itertools.count()
"""Attachments of this process so far.  Ranks that attach equally often meet; others miss each other and are refused."""


@dataclass(slots=True)
class Heard:
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

    def listen(self) -> Heard:
        """Return what came in since the last call; never waits, never raises: what breaks freezes."""
        ...

    def propose(self, decision: int, values: Sequence[int], *, kind: Kind = Kind.KEEP) -> None:
        """Rank 0: ask all ranks to apply `values`, in the order of `spaces`."""
        ...

    def withdraw(self) -> None:
        """Rank 0: ask for nothing any more."""
        ...

    def decide(self, can_apply: Callable[[Proposal], bool]) -> Proposal | None:
        """Take part in the votes; return what all ranks must apply now, with `settle` told how it went."""
        ...

    def settle(self, proposal: Proposal, *, is_done: bool, undo: Callable[[], bool]) -> bool:
        """Return whether every rank carried `proposal` out; where one did not, all ranks `undo`."""
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
        self._heard = Heard()
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

    def listen(self) -> Heard:
        """Return what was noted."""
        heard, self._heard = self._heard, Heard()
        return heard

    def propose(self, decision: int, values: Sequence[int], *, kind: Kind = Kind.KEEP) -> None:
        """Apply at the next `decide`."""
        self._wanted = Proposal(next(self._serials), decision, tuple(values), kind)

    def withdraw(self) -> None:
        """Forget the proposal."""
        self._wanted = None

    def decide(self, can_apply: Callable[[Proposal], bool]) -> Proposal | None:
        """Return the proposal, once."""
        wanted, self._wanted = self._wanted, None
        return wanted if wanted is not None and self.frozen is None and can_apply(wanted) else None

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


class RankAgreement:
    """One rank among several.  `group` is the job's own process group, None for the default one.

    `votes` False (advise mode) leaves the main road out: nothing is ever turned, paces still come to rank 0.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        votes: bool,
        group: Any = None,  # noqa: ANN401  dist.ProcessGroup
        meet_seconds: float = MEET_SECONDS,
    ) -> None:
        self._meet_seconds = meet_seconds
        self._member = Member(rank, world_size)
        self._side = SideRoad(world_size)
        self._main = MainRoad(group)
        self._votes = votes
        self._boundary = 0
        self._meets_at = PERIOD
        self._offer_is_heard = False
        self._has_offered = False
        self._range: list[tuple[int, int | None, bool]] = []

    @property
    def spaces(self) -> tuple[KnobSpace, ...]:
        """The knobs that every rank can turn; empty until the offers were exchanged."""
        return self._member.spaces

    @property
    def frozen(self) -> str | None:
        """Why nothing will ever be turned again, or None."""
        return self._member.frozen

    @property
    def has_retired(self) -> bool:
        """Whether every rank froze; they all see it at the same boundary, and no vote follows."""
        return self._member.has_retired

    @property
    def has_business(self) -> bool:
        """At the boundaries where a vote is launched or read; gathers are looked at, and posted, there too.

        A gather that was posted where a vote was read is taken where the next is launched, if it is there by then, just
        before the vote on what it brought.
        """
        return self._boundary >= self._meets_at - 1 or self._member.frozen is not None

    @property
    def are_all_calm(self) -> bool:
        """What the vote read last says; where nothing is ever turned nothing is under way."""
        return self._member.are_all_calm or not self._votes

    def rest(self, *, is_calm: bool, step_ns: int) -> None:
        """Put both into the votes to come."""
        self._member.is_calm = is_calm
        self._member.step_ns = step_ns

    def disturb(self, number: int | None) -> None:
        """Put it into the reports to come."""
        self._member.disturbance = number

    @property
    def disturbed(self) -> Mapping[int, int]:
        """Rank -> what it told in the last gather."""
        return dict(self._member.disturbed)

    def open(self, claim: str) -> None:
        """Meet through the store, then make the side group: a collective that every rank now is sure to join.

        Once the ranks have met, this rank is bound to vote: a side group that fails freezes, it does not raise.
        """
        member, name = self._member, str(next(_meetings))
        reason = lacking("agreement")
        if reason is not None:
            raise MeetingError(reason)
        store: Any = need("torch.distributed.distributed_c10d._get_default_store")()
        self._main.open()
        claim = f"protocol {VERSION}, period {LEISURE_PERIOD}, {PERIOD} or {CALM_PERIOD}, {claim}"
        meet(store, member.rank, member.world_size, claim, name=name, seconds=self._meet_seconds)
        try:
            self._side.open()
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._side_failed(error)

    def offer(self, offer: Offer) -> None:
        """Queue the offer for the first gather; ranges are counted from here."""
        self._member.offer(offer)
        self._has_offered = True
        self._range.clear()

    def note(self, step: int, pace_ns: int | None, *, profiled: bool) -> None:
        """Count the boundary and close the range where the vote is read."""
        self._boundary += 1
        if not self._has_offered:
            return
        self._range.append((step, pace_ns, profiled))
        if self._boundary == self._meets_at and self._range:
            last = self._range[-CALM_PERIOD:]
            self._range.clear()
            self._member.close_range(last[0][0], [p for _, p, _ in last], [f for _, _, f in last])

    def listen(self) -> Heard:
        """Take the gather that is out, if it is complete, and post the next."""
        heard = Heard()
        try:
            words = self._side.take()
            if words is not None:
                if self._offer_is_heard:
                    heard.paces = self._member.hear(words)
                else:
                    heard.refused = self._member.hear_offers(words)
                    self._offer_is_heard = True
            if not self._side.is_busy:
                vector = self._member.next_vector()
                if vector is not None:
                    self._side.post(vector)
        except Exception as error:  # noqa: BLE001  whatever gloo raises: the job goes on without the side road
            self._side_failed(error)
        return heard

    def _side_failed(self, error: Exception) -> None:
        self._member.freeze(f"side group failed: {type(error).__name__}: {str(error)[:200]}")
        self._member.abandon_side()

    def propose(self, decision: int, values: Sequence[int], *, kind: Kind = Kind.KEEP) -> None:
        """Carry the proposal in the next gathers until it is applied."""
        self._member.propose(decision, values, kind=kind)

    def withdraw(self) -> None:
        """Carry no proposal."""
        self._member.withdraw()

    def decide(self, can_apply: Callable[[Proposal], bool]) -> Proposal | None:
        """Launch a vote one boundary before the ranks meet, read it there; what it says sets the next meeting."""
        member = self._member
        votes = self._votes and not member.has_retired
        if self._boundary == self._meets_at - 1:
            if votes:
                self._main.launch(member.ballot(can_apply=self._can_apply(can_apply)))
            return None
        if self._boundary != self._meets_at:
            return None
        try:
            return member.tally(self._main.read()) if votes and self._main.is_busy else None
        finally:
            self._meets_at += member.period

    def _can_apply(self, can_apply: Callable[[Proposal], bool]) -> bool:
        held = self._member.held
        try:
            return held is not None and can_apply(held)
        except Exception as error:  # noqa: BLE001  the vote must be launched whatever happens
            self._member.freeze(f"{type(error).__name__}: {error}")
            return False

    def settle(self, proposal: Proposal, *, is_done: bool, undo: Callable[[], bool]) -> bool:
        """Ask all ranks; where one failed, undo on all and ask again whether that worked."""
        if self._main.confirm(is_done=is_done):
            self._member.applied(proposal)
            return True
        if not self._main.confirm(is_done=undo()):
            self._member.freeze("the values before a failed switch could not be restored on all ranks")
        self._member.failed(proposal)
        return False

    def freeze(self, reason: str) -> None:
        """Vote "frozen" from now on, until every rank has seen it and all stop voting."""
        self._member.freeze(reason)

    def close(self) -> None:
        """Let what is out complete: all ranks close after the same step, so it can."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < deadline:
            self.listen()
            if not self._side.is_busy and not self._member.has_more and self._main.is_settled():
                break
            time.sleep(CLOSE_POLL_SECONDS)
        self.leave()

    def leave(self) -> None:
        """Abandon what is out, and launch nothing any more."""
        self._member.has_retired = True
        self._member.abandon_side()
        self._side.close()
        self._main.close()
