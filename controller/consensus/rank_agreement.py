"""Lets several ranks turn a knob at the same step: runs `protocol` on gloo groups of pacecar's own.

All ranks launch votes at fixed boundaries and read each one boundary later.  A vote that is not there then, but for a
moment's wait, is looked for at each later boundary while the training goes on.  A rank that reads one late refuses the
switch that the vote may have decided, so that none carries it out.

A rank may leave at any moment.  The last
frame that it sends says so; the others read it when they send their own next frame.  From then on nothing is turned, on
any rank, and what is in force stays, on all alike.

Between a vote and the switch that it decides runs code of the job, which may close pacecar, raise, or leave out a step.
So a vote alone turns nothing.  At the boundary where it was read all ranks `gather_for` the switch, which proves that
they are all there, and at the same place among the job's own collectives.  A rank that waits there too long and one
that saw all of them come may both be right; the job's store keeps the first of the two answers, for all.

Ranks that close gather in the same way, each for itself and without a vote: where all of them do so at the same
boundary, they go back to what is proven, and else none does.

A rank that dies breaks its connections, and the frame that is waited for fails: that has the same effect as leaving.

Left out: what the knobs are.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
from collections.abc import Callable, Mapping, Sequence

from pacecar.profiler.ranks.torch_flight_recorder import sequence
from pacecar.profiler.transport.side_address import prove_address
from pacecar.profiler.transport.side_group import SideGroup, failure, job_store
from pacecar.profiler.transport.store_rendezvous import MEET_SECONDS, RendezvousError, meet
from pacecar.torch_internals import lacking

from ..observation import KnobSpace
from .agreement import AgreementUpdate
from .capabilities import Offer
from .channels import BODY_WORDS, Frame, LateError, LeftError, VoteChannel, VoteSubject
from .protocol import CALM_PERIOD, LEISURE_PERIOD, PERIOD, VERSION, Proposal, ProposalKind, ProtocolMember

__all__ = ["VOTE_WORDS", "RankAgreement"]

CLOSE_SECONDS = 0.2
"""Longest wait for what was sent when the job ends: it has had a step to complete, and to abandon it harms no rank."""

CLOSE_POLL_SECONDS = 0.001

PATIENCE_STEPS = 2
"""Other ranks are waited for as long as this many steps take, within the bounds below: more is not worth its cost."""

VOTE_SECONDS = (0.05, 0.25)
"""Least and longest wait for a vote.  Ranks that are in step launched it a step before; gloo's thread may need its turn
on a busy machine.  A vote that is later is read at a later boundary, for which nobody waits."""

SWITCH_SECONDS = (0.25, 1.0)
"""Least and longest wait for all ranks to come to a switch, or to close, at the same boundary; else none switches.

The same for answers that are needed now: a gradient's norms, the noise scale.
"""

MEMORY_SECONDS = 1.0
"""Least wait for whether a larger micro-batch fits: other ranks still run it, which may take a step or two."""

DONE_SECONDS = 1.0
"""Longest wait for the others' word that they have switched, beyond DONE_RATIO times what this rank's own took."""

DONE_RATIO = 4

OVERDUE_STEPS = 32
OVERDUE_SECONDS = 10.0
"""A vote that is not there after so many steps, and so much time, never comes: this rank leaves."""

MISSED_MAX = 4
"""After so many switches left out in a row, or votes of ranks that had made different numbers of collectives, the ranks
are out of step for good."""

_VOTE_NUMBERS = 5

VOTE_WORDS = _VOTE_NUMBERS + 1
"""The five numbers of a vote, and how many collectives the job's group has had."""

_NO_PLACE = -1
"""Instead of that number, in a vote that a rank launches later than the others."""

_meetings = itertools.count()
"""Attachments of this process so far.  Ranks that attached equally often meet; others do not meet and are refused."""


class RankAgreement:
    """One rank among several.

    `votes` False (advise mode) leaves votes out: nothing is ever turned, paces still come to rank 0.
    `collectives` counts those of the job so far, where that can be told.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        votes: bool,
        meet_seconds: float = MEET_SECONDS,
        collectives: Callable[[], int | None] = sequence,
    ) -> None:
        self._meet_seconds = meet_seconds
        self._member = ProtocolMember(rank, world_size)
        self._side = SideGroup(rank, world_size)
        self._main = VoteChannel(rank, world_size)
        self._votes = votes
        self._collectives = collectives
        self._vote: Frame | None = None
        self._is_late = False
        self._has_refused = False
        self._switch_began = 0.0
        self._missed = 0
        self._boundary = 0
        self._vote_due = PERIOD
        self._offer_is_heard = False
        self._has_offered = False
        self._range: list[tuple[int, int | None, bool]] = []
        self.has_left = False
        """Whether a rank, this one or another, takes no further part."""

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
        """Whether every rank froze, or one left; they all see it at the same boundary, and no vote follows."""
        return self._member.has_retired

    @property
    def has_vote(self) -> bool:
        """Whether a vote is launched or read at this boundary; gathers are polled and posted there too.

        A gather that was posted where a vote was read is taken where the next is launched, if it is complete by then,
        just before the vote on what it brought.
        """
        return self._boundary >= self._vote_due - 1 or self._member.frozen is not None

    @property
    def are_all_calm(self) -> bool:
        """Whether no rank has anything under way, by the vote read last; without votes nothing ever is."""
        return self._member.are_all_calm or not self._votes

    def rest(self, *, is_calm: bool, step_ns: int) -> None:
        """Put both into the next votes."""
        self._member.is_calm = is_calm
        self._member.step_ns = step_ns

    def disturb(self, number: int | None) -> None:
        """Put the number into the next reports."""
        self._member.disturbance = number

    @property
    def disturbed(self) -> Mapping[int, int]:
        """Rank -> the number that it sent in the last gather."""
        return dict(self._member.disturbed)

    def afford(self, switches: int | None) -> None:
        """Put the number into the next reports."""
        self._member.affordable = switches

    @property
    def affordable(self) -> int | None:
        """The fewest that any rank sent in the last gather."""
        return self._member.affordable_everywhere

    def open(self, claim: str) -> None:
        """Meet through the store, prove that the ranks reach each other, and make the groups."""
        member, name = self._member, f"agreement/{next(_meetings)}"
        reason = lacking("agreement")
        if reason is not None:
            raise RendezvousError(reason)
        claim = f"protocol {VERSION}, period {LEISURE_PERIOD}, {PERIOD} or {CALM_PERIOD}, {claim}"
        try:
            store = job_store()
            meet(store, member.rank, member.world_size, claim, name=name, seconds=self._meet_seconds)
            address = prove_address(store, member.rank, member.world_size, name=name)
            self._side.open(store, f"{name}/side", address)
            if self._votes:
                self._main.open(store, name, address)
        except Exception as error:  # whatever store and gloo raise: nothing was started
            self._side.close()
            self._main.close()
            if isinstance(error, RendezvousError):
                raise
            raise RendezvousError(f"the job's store failed: {failure(error)}") from error

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
        if self._boundary == self._vote_due:
            self._close_range()

    def _close_range(self) -> None:
        """Queue the paces up to the boundary at which the vote is due, which is this one or an earlier one."""
        end = len(self._range) - (self._boundary - self._vote_due)
        last = self._range[max(0, end - CALM_PERIOD) : max(0, end)]
        del self._range[: max(0, end)]
        if last:
            self._member.close_range(last[0][0], [p for _, p, _ in last], [f for _, _, f in last])

    def listen(self) -> AgreementUpdate:
        """Take the outstanding gather, if it is complete, and post the next."""
        heard = AgreementUpdate()
        if self.has_left:
            return heard
        try:
            words = self._side.receive()
            if words is not None:
                if self._offer_is_heard:
                    heard.paces = self._member.receive(words)
                else:
                    heard.refused = self._member.receive_offers(words)
                    self._offer_is_heard = True
            if not self._side.is_busy:
                vector = self._member.next_vector()
                if vector is not None:
                    self._side.post(vector)
        except Exception as error:  # noqa: BLE001  whatever gloo raises: the job goes on without the side channel
            self._side_failed(error)
        return heard

    def _side_failed(self, error: Exception) -> None:
        self._member.freeze(f"side group failed: {failure(error)}")
        self._member.close_side_channel()

    def propose(self, decision: int, values: Sequence[int], *, kind: ProposalKind = ProposalKind.KEEP) -> None:
        """Carry the proposal in the next gathers until it is applied."""
        self._member.propose(decision, values, kind=kind)

    def withdraw(self) -> None:
        """Carry no proposal."""
        self._member.withdraw()

    def decide(self, can_apply: Callable[[Proposal], bool]) -> Proposal | None:
        """Launch a vote one boundary before it is due and read it when it is; the result says when the next is due.

        A vote that is not there when it is due is looked for at each later boundary.  The other ranks may have launched
        the next one by the time that it comes: this rank then launches that one late, and for no proposal.
        """
        proposal: Proposal | None = None
        if self._boundary >= self._vote_due:
            if self._vote is not None:
                proposal = self._read(self._vote)
                if self._vote is not None:
                    return None
            self._vote_due += self._member.period
            if self._boundary >= self._vote_due and self._has_offered:
                self._close_range()
        is_due = self._boundary >= self._vote_due - 1 and self._vote is None
        if is_due and self._votes and not self._member.has_retired:
            self._launch(can_apply)
        return proposal

    def _launch(self, can_apply: Callable[[Proposal], bool]) -> None:
        is_late = self._boundary >= self._vote_due
        place = _NO_PLACE if is_late else self._collectives() or 0
        ballot = self._member.ballot(can_apply=not is_late and self._can_apply(can_apply), place=place)
        try:
            self._vote = self._main.post(VoteSubject.VOTE, [*ballot, place])
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._gone(failure(error))

    def _read(self, vote: Frame) -> Proposal | None:
        overdue = self._boundary - self._vote_due
        try:
            rows = self._main.receive(vote, 0.0 if overdue else self._patience(*VOTE_SECONDS))
        except LateError:
            if overdue >= OVERDUE_STEPS and self._main.age_seconds(vote) >= OVERDUE_SECONDS:
                self._gone(f"a vote has not come back from all ranks in {OVERDUE_STEPS} steps")
            return None
        except LeftError as error:
            self._gone(str(error), is_known=True)
            return None
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._gone(failure(error))
            return None
        self._vote, self._is_late = None, overdue > 0
        proposal = self._member.tally([min(words) for words in zip(*rows, strict=True)][:_VOTE_NUMBERS])
        places = {row[_VOTE_NUMBERS] for row in rows} - {_NO_PLACE}
        if len(places) > 1:
            self._count_missed("ranks have made different numbers of collectives")
        elif proposal is None and self._member.held is None:
            self._missed = 0
        if proposal is not None and self._is_late:
            self._refuse()
        return proposal

    def _refuse(self) -> None:
        """Take this rank's place in the switch that others may be waiting at, and say that it does not switch."""
        self._has_refused = True
        try:
            self._main.post(VoteSubject.SWITCH, [])
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._gone(failure(error))

    def _patience(self, least: float, longest: float) -> float:
        """Return how many seconds other ranks are waited for."""
        return min(max(PATIENCE_STEPS * self._member.step_ns / 1e9, least), longest)

    def _gone(self, reason: str | None, *, is_known: bool = False) -> None:
        """Leave: no frame can be had of all ranks any more; tell the ranks that still send frames.

        `reason` None: this rank was closed.  `is_known`: every rank has read it.
        """
        if reason is not None:
            self._member.freeze(reason)
        self._member.has_retired = True
        self._member.close_side_channel()
        self.has_left = True
        self._vote = None
        if not is_known:
            with contextlib.suppress(Exception):  # a group that failed carries no last frame either
                self._main.leave()

    def _count_missed(self, reason: str) -> None:
        self._missed += 1
        if self._missed >= MISSED_MAX:
            self._member.freeze(f"{reason}: they are out of step")

    def _can_apply(self, can_apply: Callable[[Proposal], bool]) -> bool:
        held = self._member.held
        try:
            return held is not None and can_apply(held)
        except Exception as error:  # noqa: BLE001  the vote must be launched whatever happens
            self._member.freeze(f"{type(error).__name__}: {error}")
            return False

    def gather_for(self, proposal: Proposal, *, closes: bool = False) -> bool:
        """Wait for all ranks, SWITCH_SECONDS at most; where one does not come, or comes elsewhere, none switches.

        `closes`: no vote has brought the ranks here, so they prove that they closed after the same boundary.
        """
        if self.has_left:
            return False
        if self._is_late and not closes:  # the others were here some steps ago
            if not self._has_refused:
                self._refuse()
            self._has_refused = False
            self._left_out(proposal)
            return False
        mine = [self._collectives() or 0, self._member.epoch, proposal.digest(self._member.epoch, 0, self._boundary)]
        frame: Frame | None = None
        rows: list[list[int]] | None = None
        try:
            frame = self._main.post(VoteSubject.CLOSE if closes else VoteSubject.SWITCH, mine)
            rows = self._main.receive(frame, self._patience(*SWITCH_SECONDS))
        except LeftError as error:  # all ranks read it in this frame
            self._gone(None if closes else str(error), is_known=True)
            return False
        except LateError:
            pass
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._gone(failure(error))
        is_complete = rows is not None and all(row[: len(mine)] == mine for row in rows)
        try:
            is_on = frame is not None and self._main.verdict(frame, is_complete=is_complete)
        except Exception as error:  # noqa: BLE001  the store is gone, and the job with it
            self._gone(failure(error))
            return False
        if is_on:
            self._missed = 0
            self._switch_began = time.monotonic()
        elif closes:  # the others read that in this frame
            self._gone(None, is_known=True)
        else:
            self._left_out(proposal)
        return is_on

    def _left_out(self, proposal: Proposal) -> None:
        self._member.failed(proposal)
        self._count_missed("the ranks did not come to a switch together")

    def settle(self, proposal: Proposal, *, is_done: bool, undo: Callable[[], bool]) -> bool:
        """Ask all ranks; where one failed, or does not answer, undo on all."""
        if self._confirm(is_done=is_done):
            self._member.applied(proposal)
            return True
        if not undo():
            self._member.freeze("the values before a failed switch could not be restored")
        self._member.failed(proposal)
        return False

    def _confirm(self, *, is_done: bool) -> bool:
        """Return whether every rank says `is_done`: the same answer on all ranks.

        A rank that does not answer in time may have failed.  So this one says in the job's store that all must undo,
        unless another rank has read there already that all are done.
        """
        seconds = DONE_SECONDS + DONE_RATIO * (time.monotonic() - self._switch_began)
        frame: Frame | None = None
        rows: list[list[int]] | None = None
        try:
            frame = self._main.post(VoteSubject.DONE, [int(is_done)])
            rows = self._main.receive(frame, seconds)
        except LeftError as error:
            self._gone(str(error), is_known=True)
        except Exception as error:  # noqa: BLE001  late, or whatever gloo raises
            self._gone(failure(error))
        are_done = rows is not None and all(row[0] == 1 for row in rows)
        try:
            return frame is not None and self._main.verdict(frame, is_complete=are_done)
        except Exception as error:  # noqa: BLE001  the store is gone, and the job with it
            self._gone(failure(error))
            return are_done

    def ask(self, subject: VoteSubject, numbers: Sequence[float]) -> list[list[float]] | None:
        """Send as many frames as it takes, and wait for them."""
        return self.tell(subject, numbers)()

    def tell(self, subject: VoteSubject, numbers: Sequence[float]) -> Callable[[], list[list[float]] | None]:
        """Send as many frames as it takes; what is returned waits for them, SWITCH_SECONDS at most.

        For gradients it does not wait: it raises LateError, and may be called again.  What else is not there yet is
        given up, by all ranks: they would go on from different answers.  For the same reason, what all ranks sent
        before one of them left is read by all, also by those that know it by then.
        """
        said = [float(self._collectives() or 0), *numbers]
        frames: list[Frame] = []
        try:
            starts = () if self.has_left else range(0, len(said), BODY_WORDS)
            frames.extend(self._main.post(subject, _packed(said[i : i + BODY_WORDS])) for i in starts)
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._gone(failure(error))
        least, longest = SWITCH_SECONDS
        if subject is VoteSubject.MEMORY:
            least, longest = MEMORY_SECONDS, float("inf")
        seconds = 0.0 if subject is VoteSubject.GRADIENTS else self._patience(least, longest)

        def heard() -> list[list[float]] | None:
            answers: list[list[float]] = [[] for _ in range(self._member.world_size)]
            deadline = time.monotonic() + seconds
            is_complete = True
            try:
                for frame in frames:
                    rows = self._main.receive(frame, max(0.0, deadline - time.monotonic()))
                    for answer, row in zip(answers, rows, strict=True):
                        answer.extend(_unpacked(row))
            except LateError:
                if subject is VoteSubject.GRADIENTS:
                    raise
                is_complete = False
            except LeftError as error:
                self._gone(str(error), is_known=True)
                return None
            except Exception as error:  # noqa: BLE001  whatever gloo raises
                self._gone(failure(error))
                return None
            if subject is not VoteSubject.GRADIENTS and frames and not self._is_valid(frames[-1], is_complete):
                return None
            if len({tuple(answer[:1]) for answer in answers}) > 1 or len(answers[0]) < len(said):
                return None  # ranks at different places; or this one could not send
            return [answer[1 : len(said)] for answer in answers]

        return heard

    def _is_valid(self, frame: Frame, is_complete: bool) -> bool:
        """Return whether all ranks use the answers that ended with `frame`: none does if one came too late for one."""
        if self.has_left:
            return is_complete
        try:
            return self._main.verdict(frame, is_complete=is_complete)
        except Exception as error:  # noqa: BLE001  the store is gone, and the job with it
            self._gone(failure(error))
            return False

    def freeze(self, reason: str) -> None:
        """Vote "frozen" from now on, until every rank has seen it and all stop voting."""
        self._member.freeze(reason)

    def close(self) -> None:
        """Send the last frame; let what was sent complete, as where all close after the same step; then leave."""
        with contextlib.suppress(Exception):  # whatever gloo raises: then no rank is left to tell
            self._main.leave()
        deadline = time.monotonic() + CLOSE_SECONDS
        while not self.has_left and time.monotonic() < deadline:
            self.listen()
            if not self._side.is_busy and not self._member.has_more and self._main.is_settled():
                break
            time.sleep(CLOSE_POLL_SECONDS)
        self.leave()

    def leave(self) -> None:
        """Abandon what was sent, and launch nothing any more; the other ranks read that in the next frame."""
        self._gone(None, is_known=self.has_left)
        self._side.close()
        self._main.close()


def _packed(numbers: Sequence[float]) -> list[int]:
    return list(struct.unpack(f"={len(numbers)}q", struct.pack(f"={len(numbers)}d", *numbers)))


def _unpacked(words: Sequence[int]) -> list[float]:
    return list(struct.unpack(f"={len(words)}d", struct.pack(f"={len(words)}q", *words)))
