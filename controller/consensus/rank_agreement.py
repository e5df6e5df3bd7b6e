"""Lets several ranks turn a knob at the same step: runs `protocol` on gloo groups of pacecar's own.

All ranks launch votes at fixed boundaries and read each one boundary later.  If a vote has not arrived by then, a rank
waits briefly, and after that looks again at each later boundary while training goes on.  A rank that reads a vote late
refuses the switch that it may have decided, so that no rank carries it out.

A rank may leave at any moment.  Its last frame says so, and the others read it when they send their own next frame.
From then on nothing is turned on any rank, and the values in force stay, the same on all.  A rank that dies breaks its
connections, so the frame being waited for fails, with the same effect.

A vote alone turns nothing, since code of the job runs before the switch: all ranks first `gather_for` it, at the same
place among the job's own collectives.  Ranks that close do the same without a vote, to go back to the proven values
together.  Whether a wait was too long, the job's store decides for all
(docs/decisions/0011-votes-on-a-group-of-our-own.md).
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
from collections.abc import Callable, Mapping, Sequence

from pacecar.profiler.hangs.torch_flight_recorder import sequence
from pacecar.profiler.transport.rendezvous import MEET_SECONDS, RendezvousError, meet, prove_address
from pacecar.profiler.transport.side_group import SideGroup, failure, job_store
from pacecar.torch_internals import lacking

from ..knobs.actuator import Gather
from ..knobs.batch.share_plan import RankWork
from ..observation import KnobSpace
from .capabilities import Offer
from .channels import BODY_WORDS, Frame, LateError, LeftError, VoteChannel, VoteSubject
from .protocol import (
    CALM_PERIOD,
    LEISURE_PERIOD,
    PERIOD,
    VERSION,
    AgreementUpdate,
    ProposalKind,
    ProtocolMember,
    SwitchProposal,
)

__all__ = ["VOTE_WORDS", "RankAgreement"]

CLOSE_SECONDS = 0.2
"""Longest wait for what was sent when the job ends.  It has had a step to complete, and abandoning it harms no rank."""

CLOSE_POLL_SECONDS = 0.001

PATIENCE_STEPS = 2
"""Wait for other ranks as long as this many steps take, within the bounds below; more costs more than it gains."""

VOTE_SECONDS = (0.05, 0.25)
"""Least and longest wait for a vote.  Ranks in step launched it a step earlier, but gloo's thread may need its turn on
a busy machine.  A later vote is read at a later boundary without waiting."""

SWITCH_SECONDS = (0.25, 1.0)
"""Least and longest wait for all ranks to come to a switch, or to close, at the same boundary; else none switches.

Also for answers that are needed at once: a gradient's norms, the noise scale.
"""

MEMORY_SECONDS = 1.0
"""Least wait for whether a larger micro-batch fits: other ranks still run it, which may take a step or two."""

DONE_SECONDS = 1.0
"""Longest wait for the others to confirm their switch, in addition to DONE_RATIO times what this rank's own took."""

DONE_RATIO = 4

OVERDUE_STEPS = 32
OVERDUE_SECONDS = 10.0
"""A vote that has not arrived after this many steps and this much time never will: this rank leaves."""

MISSED_MAX = 4
"""After this many failed switches in a row, or votes of ranks with different numbers of collectives, the ranks are out
of step for good."""

_VOTE_NUMBERS = 5

VOTE_WORDS = _VOTE_NUMBERS + 1
"""The five numbers of a vote, and how many collectives the job's group has had."""

_NO_PLACE = -1
"""Instead of that number, in a vote that a rank launches later than the others."""

_meetings = itertools.count()
"""Attachments of this process so far.  Ranks that attached equally often meet; others do not meet and are refused."""


class RankAgreement:
    """One rank among several.

    `votes` False (advise mode) omits votes: nothing is ever turned, but paces still reach rank 0.  `collectives` counts
    those of the job so far, if that is known.
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
        self._has_received_offers = False
        self._has_offered = False
        self._range: list[tuple[int, int | None, bool, int]] = []
        self.has_left = False
        """Whether any rank, this one included, takes no further part."""

    @property
    def spaces(self) -> tuple[KnobSpace, ...]:
        """The knobs that every rank can turn; empty until the offers are exchanged."""
        return self._member.spaces

    @property
    def frozen(self) -> str | None:
        """Why nothing will ever be turned again, or None."""
        return self._member.frozen

    @property
    def has_retired(self) -> bool:
        """Whether every rank froze, or one left.  All see it at the same boundary, and no vote follows."""
        return self._member.has_retired

    @property
    def has_vote(self) -> bool:
        """Whether a vote is launched or read at this boundary; gathers are polled and posted there too.

        A gather that is posted where a vote is read is received where the next vote is launched, if it is complete by
        then: just before the vote on what it brought.
        """
        return self._boundary >= self._vote_due - 1 or self._member.frozen is not None

    @property
    def are_all_calm(self) -> bool:
        """Whether the last vote showed that no rank has anything under way; always True without votes."""
        return self._member.are_all_calm or not self._votes

    def report_calm(self, *, is_calm: bool, step_ns: int) -> None:
        """Report whether this rank has nothing under way, and how long its steps take, with the next votes.

        Ranks vote less often while all are calm, and more often if all have long steps.
        """
        self._member.is_calm = is_calm
        self._member.step_ns = step_ns

    def report_disturbance(self, number: int | None) -> None:
        """Send rank 0, with the next reports, the number of what disturbs this rank's step times; None for nothing."""
        self._member.disturbance = number

    @property
    def disturbed(self) -> Mapping[int, int]:
        """Rank -> the number in its last report; undisturbed ranks are left out."""
        return dict(self._member.disturbed)

    def report_objection(self, number: int | None) -> None:
        """Send rank 0, with the next reports, the number of the reason why this rank needs a knob back; None: none."""
        self._member.objection = number

    @property
    def objections(self) -> Mapping[int, int]:
        """Rank -> the number in its last report; ranks without an objection are left out."""
        return dict(self._member.objections)

    def report_work(self, work: RankWork | None) -> None:
        """Send all ranks, with the next reports, what a batch costs this one; None if unknown."""
        self._member.work = work

    @property
    def works(self) -> tuple[RankWork, ...] | None:
        """What a batch costs each rank by its last report; None if one does not know it."""
        return self._member.works

    def report_affordable(self, switches: int | None) -> None:
        """Send rank 0, with the next reports, how many switches this rank can afford; None for no limit."""
        self._member.affordable = switches

    @property
    def affordable(self) -> int | None:
        """The smallest number that any rank reported last; None for no limit."""
        return self._member.affordable_everywhere

    def open(self, claim: str) -> None:
        """Meet through the store, prove that the ranks reach each other, and make the groups.

        Raises:
            RendezvousError: not all ranks came with the same `claim`.
        """
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
        """Offer what this rank can turn, once, at the same boundary on every rank; ranges begin here."""
        self._member.offer(offer)
        self._has_offered = True
        self._range.clear()

    def record_step(self, step: int, pace_ns: int | None, *, profiled: bool, collection_ns: int = 0) -> None:
        """Record a finished step (an unmeasured pace is None); close the range where the vote is read.

        `collection_ns` of it were garbage collections.
        """
        self._boundary += 1
        if not self._has_offered:
            return
        self._range.append((step, pace_ns, profiled, collection_ns))
        if self._boundary == self._vote_due:
            self._close_range()

    def _close_range(self) -> None:
        """Queue the paces up to the boundary at which the vote is due, which is this one or an earlier one."""
        end = len(self._range) - (self._boundary - self._vote_due)
        last = self._range[max(0, end - CALM_PERIOD) : max(0, end)]
        del self._range[: max(0, end)]
        if last:
            steps, paces, profiled, collections = zip(*last, strict=True)
            self._member.close_range(steps[0], paces, profiled, collections)

    def receive_updates(self) -> AgreementUpdate:
        """Receive the outstanding gather if it is complete, post the next; never waits.  A failure freezes tuning."""
        update = AgreementUpdate()
        if self.has_left:
            return update
        try:
            words = self._side.receive()
            if words is not None:
                if self._has_received_offers:
                    update.paces = self._member.receive(words)
                else:
                    update.refused = self._member.receive_offers(words)
                    self._has_received_offers = True
            if not self._side.is_busy:
                vector = self._member.next_vector()
                if vector is not None:
                    self._side.post(vector)
        except Exception as error:  # noqa: BLE001  whatever gloo raises, the job goes on without the side channel
            self._side_failed(error)
        return update

    def _side_failed(self, error: Exception) -> None:
        self._member.freeze(f"side group failed: {failure(error)}")
        self._member.close_side_channel()

    def propose(self, decision: int, values: Sequence[int], *, kind: ProposalKind = ProposalKind.KEEP) -> None:
        """Rank 0: ask all ranks to apply `values`, in the order of `spaces`, in each gather until it is applied."""
        self._member.propose(decision, values, kind=kind)

    def withdraw(self) -> None:
        """Rank 0: withdraw the proposal."""
        self._member.withdraw()

    def decide(self, can_apply: Callable[[SwitchProposal], bool]) -> SwitchProposal | None:
        """Launch a vote one boundary before it is due and read it when it is; its result sets when the next is due.

        Return what all ranks must apply now, after which `settle` must be called.  A vote that has not arrived when it
        is due is looked for at each later boundary.  The other ranks may have launched the next one by then; this rank
        then launches that one late, and for no proposal.
        """
        proposal: SwitchProposal | None = None
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

    def _launch(self, can_apply: Callable[[SwitchProposal], bool]) -> None:
        is_late = self._boundary >= self._vote_due
        place = _NO_PLACE if is_late else self._collectives() or 0
        ballot = self._member.ballot(can_apply=not is_late and self._can_apply(can_apply), place=place)
        try:
            self._vote = self._main.post(VoteSubject.VOTE, [*ballot, place])
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._stop(failure(error))

    def _read(self, vote: Frame) -> SwitchProposal | None:
        overdue = self._boundary - self._vote_due
        try:
            rows = self._main.receive(vote, 0.0 if overdue else self._patience(*VOTE_SECONDS))
        except LateError:
            if overdue >= OVERDUE_STEPS and self._main.age_seconds(vote) >= OVERDUE_SECONDS:
                self._stop(f"a vote has not come back from all ranks in {OVERDUE_STEPS} steps")
            return None
        except LeftError as error:
            self._stop(str(error), is_known=True)
            return None
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._stop(failure(error))
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
        """Take this rank's place in the switch that others may be waiting at, and report that it does not switch."""
        self._has_refused = True
        try:
            self._main.post(VoteSubject.SWITCH, [])
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._stop(failure(error))

    def _patience(self, least: float, longest: float) -> float:
        """Return how many seconds to wait for other ranks."""
        return min(max(PATIENCE_STEPS * self._member.step_ns / 1e9, least), longest)

    def _stop(self, reason: str | None, *, is_known: bool = False) -> None:
        """Leave: no frame will reach all ranks any more.  Tell the ranks that still send frames.

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

    def _can_apply(self, can_apply: Callable[[SwitchProposal], bool]) -> bool:
        held = self._member.held
        try:
            return held is not None and can_apply(held)
        except Exception as error:  # noqa: BLE001  the vote must be launched whatever happens
            self._member.freeze(f"{type(error).__name__}: {error}")
            return False

    def gather_for(self, proposal: SwitchProposal, *, closes: bool = False) -> bool:
        """Return whether every rank is at the same point and ready to carry out `proposal`; otherwise none does.

        Waits at most SWITCH_SECONDS.  `closes`: no vote brought the ranks here, and this one is about to close; they
        prove that they closed after the same boundary.
        """
        if self.has_left:
            return False
        if self._is_late and not closes:  # the others were here some steps ago
            if not self._has_refused:
                self._refuse()
            self._has_refused = False
            self._record_missed_switch(proposal)
            return False
        mine = [self._collectives() or 0, self._member.epoch, proposal.digest(self._member.epoch, 0, self._boundary)]
        frame: Frame | None = None
        rows: list[list[int]] | None = None
        try:
            frame = self._main.post(VoteSubject.CLOSE if closes else VoteSubject.SWITCH, mine)
            rows = self._main.receive(frame, self._patience(*SWITCH_SECONDS))
        except LeftError as error:  # all ranks read it in this frame
            self._stop(None if closes else str(error), is_known=True)
            return False
        except LateError:
            pass
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._stop(failure(error))
        is_complete = rows is not None and all(row[: len(mine)] == mine for row in rows)
        try:
            is_on = frame is not None and self._main.verdict(frame, is_complete=is_complete)
        except Exception as error:  # noqa: BLE001  the store is gone, and the job with it
            self._stop(failure(error))
            return False
        if is_on:
            self._missed = 0
            self._switch_began = time.monotonic()
        elif closes:  # the others read that in this frame
            self._stop(None, is_known=True)
        else:
            self._record_missed_switch(proposal)
        return is_on

    def _record_missed_switch(self, proposal: SwitchProposal) -> None:
        self._member.failed(proposal)
        self._count_missed("the ranks did not come to a switch together")

    def settle(self, proposal: SwitchProposal, *, is_done: bool, undo: Callable[[], bool]) -> bool:
        """Return whether every rank carried out `proposal`; if one failed or does not answer, all ranks `undo`."""
        if self._confirm(is_done=is_done):
            self._member.applied(proposal)
            return True
        if not undo():
            self._member.freeze("the values before a failed switch could not be restored")
        self._member.failed(proposal)
        return False

    def _confirm(self, *, is_done: bool) -> bool:
        """Return whether every rank reports `is_done`: the same answer on all ranks.

        A rank that does not answer in time may have failed.  This rank then writes into the job's store that all must
        undo, unless another rank has already read there that all are done.
        """
        seconds = DONE_SECONDS + DONE_RATIO * (time.monotonic() - self._switch_began)
        frame: Frame | None = None
        rows: list[list[int]] | None = None
        try:
            frame = self._main.post(VoteSubject.DONE, [int(is_done)])
            rows = self._main.receive(frame, seconds)
        except LeftError as error:
            self._stop(str(error), is_known=True)
        except Exception as error:  # noqa: BLE001  late, or whatever gloo raises
            self._stop(failure(error))
        are_done = rows is not None and all(row[0] == 1 for row in rows)
        try:
            return frame is not None and self._main.verdict(frame, is_complete=are_done)
        except Exception as error:  # noqa: BLE001  the store is gone, and the job with it
            self._stop(failure(error))
            return are_done

    def start_gather(self, subject: VoteSubject, numbers: Sequence[float]) -> Gather:
        """Send `numbers` to all ranks without waiting; the returned function waits for theirs, at most SWITCH_SECONDS.

        All ranks call it for the same subject, with as many numbers, at the same point between two of their
        collectives.

        For gradients the returned function does not wait: it raises LateError and may be called again.  All ranks give
        up other answers that are late, since they would go on from different ones.  For the same reason all ranks read
        what was sent before one of them left, including ranks that know of it by then.
        """
        sent = [float(self._collectives() or 0), *numbers]
        frames: list[Frame] = []
        try:
            starts = () if self.has_left else range(0, len(sent), BODY_WORDS)
            frames.extend(self._main.post(subject, _packed(sent[i : i + BODY_WORDS])) for i in starts)
        except Exception as error:  # noqa: BLE001  whatever gloo raises
            self._stop(failure(error))
        least, longest = SWITCH_SECONDS
        if subject is VoteSubject.MEMORY:
            least, longest = MEMORY_SECONDS, float("inf")
        seconds = 0.0 if subject is VoteSubject.GRADIENTS else self._patience(least, longest)

        def receive() -> list[list[float]] | None:
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
                self._stop(str(error), is_known=True)
                return None
            except Exception as error:  # noqa: BLE001  whatever gloo raises
                self._stop(failure(error))
                return None
            if subject is not VoteSubject.GRADIENTS and frames and not self._is_valid(frames[-1], is_complete):
                return None
            if len({tuple(answer[:1]) for answer in answers}) > 1 or len(answers[0]) < len(sent):
                return None  # ranks at different places, or this one could not send
            return [answer[1 : len(sent)] for answer in answers]

        return receive

    def _is_valid(self, frame: Frame, is_complete: bool) -> bool:
        """Return whether all ranks use the answers that ended with `frame`; none does if one rank was too late."""
        if self.has_left:
            return is_complete
        try:
            return self._main.verdict(frame, is_complete=is_complete)
        except Exception as error:  # noqa: BLE001  the store is gone, and the job with it
            self._stop(failure(error))
            return False

    def freeze(self, reason: str) -> None:
        """Turn nothing any more: vote "frozen" from now on, until every rank has seen it and all stop voting."""
        self._member.freeze(reason)

    def close(self) -> None:
        """Send the last frame; let what was sent complete, as when all close after the same step; then leave."""
        with contextlib.suppress(Exception):  # whatever gloo raises: no rank is left to tell
            self._main.leave()
        deadline = time.monotonic() + CLOSE_SECONDS
        while not self.has_left and time.monotonic() < deadline:
            self.receive_updates()
            if not self._side.is_busy and not self._member.has_more and self._main.is_settled():
                break
            time.sleep(CLOSE_POLL_SECONDS)
        self.leave()

    def leave(self) -> None:
        """Abandon what was sent and launch nothing more; the other ranks read that in the next frame."""
        self._stop(None, is_known=self.has_left)
        self._side.close()
        self._main.close()


def _packed(numbers: Sequence[float]) -> list[int]:
    return list(struct.unpack(f"={len(numbers)}q", struct.pack(f"={len(numbers)}d", *numbers)))


def _unpacked(words: Sequence[int]) -> list[float]:
    return list(struct.unpack(f"={len(words)}d", struct.pack(f"={len(words)}q", *words)))
