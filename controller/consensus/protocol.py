"""Implements one rank's side of the protocol with which all ranks turn a knob at the same step, by unanimous vote.

A switch on one rank only kills the job (buckets of different sizes make gloo abort and NCCL hang).  So "everybody
should have received it by now" is not enough, and a message that everybody *has* received it raises the same question
again. The protocol uses two channels:

    side channel   an asynchronous gather on its own group that no rank waits for.  It carries every rank's paces and
                   disturbances to rank 0, and rank 0's proposal to all.  It may be late or break at any moment.
    votes          five numbers of every rank, launched by all ranks at the same boundaries on another group of
                   pacecar's own.  Every rank reads the minimum of each number one step later.

    boundary      0    1    2    3    4    5    6    7    8        PERIOD = 4
    range closed  |                   |                   |        paces of 4 steps, queued for the next gather
    vote                         launch read         launch read   read: all sent the same hash -> all apply right here

A vote is (h, -h, alive, calm, at leisure).  h is the hash of the proposal that the rank holds and can carry out, 0 for
none.  The smallest h equals the largest exactly if all ranks voted the same h.  Every rank knows both, so either all
apply or none does.  `alive` is 0 on a rank that froze.  The first vote whose minimum is 0 freezes every rank, and since
all read it at the same boundary, all stop voting there: a frozen tuner costs nothing and leaves no vote unmatched.

`calm` is 0 on a rank with something under way: a trial, a request, a proposal.  A vote and a gather cost a rank some
300 us, which is worthwhile during a trial and a waste for the rest of the run.  A calm rank's vote proposes the
interval to the next one: CALM_PERIOD steps, or fewer if CALM_NS pass first.  If the minimum is not 0, it is the number
of steps to the next vote and the number of paces in the range; otherwise that is PERIOD.

`at leisure` is 1 on a rank whose steps are so long that a vote at every second one costs next to nothing, and whose
side channel keeps up.  If that holds on all ranks and something is under way, the next vote comes LEISURE_PERIOD steps
later. A request then takes effect after 3 to 5 steps instead of 5 to 8, and a trial of a worse setting ends that much
sooner.

Gathers are numbered.  The n-th gather carries the n-th range on every rank, however late that rank is, so no rank ever
compares different steps.  At most one is out at a time; QUEUE_MAX waiting ranges mean that the side channel is too
late.

Pure: no torch, no clock.  `rank_agreement` runs it on process groups; the tests run it through every order of events.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ..knobs.batch.share_plan import RankWork
from ..observation import KnobSpace
from .capabilities import Offer, decode_offer, encode_offer, live_knobs, space_hash

__all__ = [
    "CALM_NS",
    "CALM_PERIOD",
    "KNOBS_MAX",
    "LEISURE_PERIOD",
    "LONG_STEP_NS",
    "PERIOD",
    "AgreementUpdate",
    "JobPace",
    "ProposalKind",
    "ProtocolMember",
    "SwitchProposal",
]

PERIOD = 4
"""Steps between votes.  A switch takes effect 5 to 8 steps after it is requested; one small gather in 4 steps."""

CALM_PERIOD = 16
"""Most steps between votes while no rank has anything under way; a request made then waits that long, once."""

CALM_NS = 1_600_000_000
"""One vote and gather in this time cost 0.02 % of it; with long steps they come after 8 or 4 of them."""

LONG_STEP_NS = 30_000_000
"""For steps at least this long, a vote and a gather cost 0.5 % of the two steps that they take, during trials."""

LEISURE_PERIOD = 2
"""Steps between votes while something is under way and steps are long: one boundary to launch, one to read."""

KNOBS_MAX = 15
"""Most knobs in a proposal (all there are); the gather's vector has a fixed length."""

QUEUE_MAX = 16
"""Closed ranges that may wait for the side channel (some 60 steps or more) before it counts as broken."""

LEISURE_QUEUE_MAX = 1
"""With more waiting ranges the side channel does not keep up with a vote at every second step."""

VERSION = 9
_HEAD = 10
_FLAG_FROZEN, _FLAG_PROPOSAL, _FLAG_REHEARSAL, _FLAG_TRIAL = 1, 2, 4, 8
_WORK_WORDS = 3
REPORT_WORDS = _HEAD + 2 * CALM_PERIOD + KNOBS_MAX + _WORK_WORDS

_DISTURBANCE_SHIFT = 8
DISTURBANCE_MAX = 255
"""The flags' word holds the flags in its lowest byte and the disturbance in the next."""

_SWITCHES_SHIFT = 16
SWITCHES_MAX = 254
NO_LIMIT = 255
"""The third byte of the flags' word: how many switches a rank can afford, or this."""

_OBJECTION_SHIFT = 24
OBJECTION_MAX = 255
"""The fourth byte holds the number of the reason why a rank needs a knob back, 0 for none."""


class ProposalKind(StrEnum):
    """What a proposal is for."""

    REHEARSAL = "rehearsal"
    """Apply the values in force, to prove that it works."""
    TRIAL = "trial"
    """Not proven: a freeze takes it back."""
    KEEP = "keep"
    """These are the values to come back to from now on."""


@dataclass(frozen=True, slots=True)
class SwitchProposal:
    """A switch that ranks vote on: the knobs, in the agreed order, to `values`.  `serial` counts rank 0's proposals."""

    serial: int
    decision: int
    values: tuple[int, ...]
    kind: ProposalKind = ProposalKind.KEEP

    def digest(self, epoch: int, layout: int, place: int = 0) -> int:
        """Return 62 bits, never 0, that identify this proposal under this knob epoch and layout, at this place."""
        text = repr((self.serial, self.decision, self.values, self.kind.value, epoch, layout, place))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2 | 1


_KIND_FLAGS = {ProposalKind.REHEARSAL: _FLAG_REHEARSAL, ProposalKind.TRIAL: _FLAG_TRIAL, ProposalKind.KEEP: 0}


@dataclass(frozen=True, slots=True)
class JobPace:
    """The slowest rank's wall time of one step; `profiled` if any rank profiled it.

    `collection_ns` is the time of long garbage collections on the rank where they took longest.
    """

    step: int
    pace_ns: int
    profiled: bool
    collection_ns: int = 0


@dataclass(slots=True)
class AgreementUpdate:
    """What arrived at one boundary: `refused` (knob -> reason) once, when the knobs are settled; paces after that."""

    refused: dict[str, str] | None = None
    paces: list[JobPace] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Range:
    ordinal: int
    epoch: int
    first_step: int
    paces: tuple[int | None, ...]
    profiled: tuple[bool, ...]
    collections: tuple[int, ...]


class ProtocolMember:
    """One rank's state.  Every method is called on the training thread, in boundary order; none waits."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.spaces: tuple[KnobSpace, ...] = ()
        self.frozen: str | None = None
        self.has_retired = False
        self.is_calm = False
        """Whether this rank has nothing under way; set by the owner."""
        self.step_ns = 0
        """How long this rank's steps take; set by the owner."""
        self.are_all_calm = False
        """Whether the last vote showed that no rank has anything under way."""
        self.period = PERIOD
        """Steps from the last vote read to the next."""
        self.wanted: SwitchProposal | None = None
        self.disturbance: int | None = None
        """The number of what disturbs this rank's step times, None for nothing; set by the owner."""
        self.disturbed: tuple[tuple[int, int], ...] = ()
        """Ranks with their disturbances, as of the last gather."""
        self.objection: int | None = None
        """The number of the reason why this rank needs a knob back, None for none; set by the owner."""
        self.objections: tuple[tuple[int, int], ...] = ()
        """Ranks with their objections, as of the last gather."""
        self.affordable: int | None = None
        """How many switches this rank can afford, None for no limit; set by the owner."""
        self.affordable_everywhere: int | None = None
        """The smallest such number of any rank, as of the last gather."""
        self.work: RankWork | None = None
        """What a batch costs this rank; set by the owner."""
        self.works: tuple[RankWork, ...] | None = None
        """The same of all ranks, as of the last gather; None if one does not know it."""
        self._layout = 0
        self._offer: Offer | None = None
        self._ranges: deque[_Range] = deque()
        self._ordinal = 0
        self._serial = 0
        self._held: SwitchProposal | None = None
        self._voted: SwitchProposal | None = None
        self._done_serial = 0
        self._side_is_done = False

    # --- what this rank sends on the side channel -------------------------------------------------

    def offer(self, offer: Offer) -> None:
        """Offer what this rank can turn, once, at the same boundary on every rank; the first gather carries it."""
        assert self._ordinal == 0, "an offer is made once, before the first range"
        self._offer = offer

    def close_range(
        self,
        first_step: int,
        paces: Sequence[int | None],
        profiled: Sequence[bool],
        collections: Sequence[int] = (),
    ) -> None:
        """Queue the paces of the steps since the last range; None for a step that was not measured.

        `collections` is the ns of garbage collections in each step; empty for none.
        """
        assert 0 < len(paces) == len(profiled) <= CALM_PERIOD, "a range has the steps between two votes"
        if self._side_is_done or self.has_retired:
            return
        self._ordinal += 1
        self._ranges.append(
            _Range(self._ordinal, self.epoch, first_step, tuple(paces), tuple(profiled), tuple(collections))
        )
        if len(self._ranges) > QUEUE_MAX:
            self.freeze(f"the side group is {QUEUE_MAX} control periods late")
            self.close_side_channel()

    def propose(self, decision: int, values: Sequence[int], *, kind: ProposalKind = ProposalKind.KEEP) -> None:
        """Rank 0: put this to the vote until it is applied, replaced or withdrawn; repeating it changes nothing."""
        assert self.rank == 0, "rank 0 alone proposes"
        wanted = tuple(values)
        present = self.wanted
        if present is not None and (present.decision, present.values, present.kind) == (decision, wanted, kind):
            return
        self._serial += 1
        self.wanted = SwitchProposal(self._serial, decision, wanted, kind)

    def withdraw(self) -> None:
        """Rank 0: stop proposing.  If the others still hold it, rank 0's own vote keeps it from being applied."""
        self.wanted = None

    def next_vector(self) -> list[int] | None:
        """Return what the next gather carries, and take it off the queue; None if there is nothing to send."""
        if self._offer is not None:
            words, self._offer = encode_offer(self._offer), None
            return words
        if not self._ranges or self._side_is_done:
            return None
        return self._encode(self._ranges.popleft())

    @property
    def has_more(self) -> bool:
        """Whether `next_vector` would return something."""
        return self._offer is not None or (bool(self._ranges) and not self._side_is_done)

    def close_side_channel(self) -> None:
        """Stop using the side channel and drop what waits for it."""
        self._side_is_done = True
        self._ranges.clear()
        self._offer = None

    # --- what it receives there --------------------------------------------------------------------

    def receive_offers(self, vectors: Sequence[Sequence[int]]) -> dict[str, str]:
        """Take all ranks' offers from the first gather and set `spaces`; return the reason against each other knob.

        Raises:
            ValueError: a vector is not an offer.
        """
        spaces, refused = live_knobs([decode_offer(words) for words in vectors])
        for space in spaces[KNOBS_MAX:]:
            refused[space.knob] = f"more than {KNOBS_MAX} knobs"
        self.spaces = spaces[:KNOBS_MAX]
        self._layout = space_hash(self.spaces)
        return refused

    def receive(self, vectors: Sequence[Sequence[int]]) -> list[JobPace]:
        """Take the reports of all ranks: keep rank 0's proposal, return the steps that every rank measured.

        Freezes if ranks disagree on version, step, epoch or layout, or if another rank is frozen.
        """
        frozen = [rank for rank, words in enumerate(vectors) if words[4] & _FLAG_FROZEN]
        if frozen:
            self.freeze(f"rank {frozen[0]} froze" if frozen[0] != self.rank else "this rank froze")
            self.close_side_channel()  # every rank reads this in the same gather, so none is left unmatched
            return []
        for index, name in enumerate(("protocol version", "gather", "knob epoch", "layout")):
            seen = sorted({words[index] for words in vectors})
            if len(seen) > 1:
                self.freeze(f"ranks disagree on the {name}: {seen[:4]}")
                return []
        if len({(words[5], words[9]) for words in vectors}) > 1:
            self.freeze(f"ranks count steps differently: {sorted({words[5] for words in vectors})[:4]}")
            return []
        self._held = self._decode_proposal(vectors[0])
        numbers = ((rank, words[4] >> _DISTURBANCE_SHIFT & DISTURBANCE_MAX) for rank, words in enumerate(vectors))
        self.disturbed = tuple((rank, number) for rank, number in numbers if number)
        numbers = ((rank, words[4] >> _OBJECTION_SHIFT & OBJECTION_MAX) for rank, words in enumerate(vectors))
        self.objections = tuple((rank, number) for rank, number in numbers if number)
        fewest = min(words[4] >> _SWITCHES_SHIFT & NO_LIMIT for words in vectors)
        self.affordable_everywhere = None if fewest == NO_LIMIT else fewest
        works = [RankWork(*words[-_WORK_WORDS:]) for words in vectors]
        self.works = tuple(works) if all(work.samples > 0 for work in works) else None
        return _slowest(vectors)

    # --- votes ----------------------------------------------------------------------------------------

    def ballot(self, *, can_apply: bool = True, place: int = 0) -> tuple[int, int, int, int, int]:
        """Return this rank's vote, and remember what it was for.  With `can_apply` False the rank votes for nothing.

        `place` is this rank's position among the job's collectives.  It is hashed too, so ranks at different places do
        not agree.
        """
        held = self._held
        self._voted = None
        if held is not None and self.frozen is None and can_apply and held.serial > self._done_serial:
            is_wanted = self.rank != 0 or (self.wanted is not None and self.wanted.serial == held.serial)
            self._voted = held if is_wanted else None
        digest = 0 if self._voted is None else self._voted.digest(self.epoch, self._layout, place)
        is_calm = self.is_calm and self.frozen is None and self.held is None and self.wanted is None
        calm = next((p for p in (PERIOD, 2 * PERIOD) if p * self.step_ns >= CALM_NS), CALM_PERIOD) if is_calm else 0
        is_at_leisure = self.step_ns >= LONG_STEP_NS and len(self._ranges) <= LEISURE_QUEUE_MAX
        return digest, -digest, int(self.frozen is None), calm, int(is_at_leisure)

    @property
    def held(self) -> SwitchProposal | None:
        """The proposal that rank 0 sent last, unless it was applied or failed."""
        return self._held if self._held is not None and self._held.serial > self._done_serial else None

    def tally(self, lowest: Sequence[int]) -> SwitchProposal | None:
        """Read a vote: return what every rank applies now, None for nothing.

        If any rank voted that it froze, every rank freezes and retires: no vote follows this one.
        """
        least, negated_greatest, alive, calm, at_leisure = lowest
        self.are_all_calm = calm > 0
        self.period = min(calm, CALM_PERIOD) or (LEISURE_PERIOD if at_leisure == 1 else PERIOD)
        voted, self._voted = self._voted, None
        if alive == 0:
            self.freeze("another rank froze")
            self.has_retired = True
            return None
        if least == 0 or least != -negated_greatest:
            return None
        assert voted is not None, "a unanimous vote includes this rank's"
        return voted

    def applied(self, proposal: SwitchProposal) -> None:
        """Record that all ranks carried out `proposal`."""
        self._finish(proposal)
        if proposal.kind is not ProposalKind.REHEARSAL:
            self.epoch += 1

    def failed(self, proposal: SwitchProposal) -> None:
        """Record that some rank could not carry out `proposal`, and that all went back to the previous values."""
        self._finish(proposal)

    def freeze(self, reason: str) -> None:
        """Never turn anything again; the first reason stays.  Votes go on until all ranks know."""
        if self.frozen is None:
            self.frozen = reason

    def _finish(self, proposal: SwitchProposal) -> None:
        self._done_serial = proposal.serial
        if self.wanted is not None and self.wanted.serial <= proposal.serial:
            self.wanted = None

    def _encode(self, closed: _Range) -> list[int]:
        wanted = self.wanted if self.rank == 0 else None
        flags = _FLAG_FROZEN if self.frozen is not None else 0
        if wanted is not None:
            flags |= _FLAG_PROPOSAL | _KIND_FLAGS[wanted.kind]
        flags |= (self.disturbance or 0) << _DISTURBANCE_SHIFT
        switches = NO_LIMIT if self.affordable is None else min(self.affordable, SWITCHES_MAX)
        flags |= switches << _SWITCHES_SHIFT
        flags |= (self.objection or 0) << _OBJECTION_SHIFT
        present = sum(1 << i for i, pace in enumerate(closed.paces) if pace is not None)
        profiled = sum(1 << i for i, flag in enumerate(closed.profiled) if flag)
        head = [VERSION, closed.ordinal, closed.epoch, self._layout, flags, closed.first_step]
        head += [present | profiled << CALM_PERIOD, *((wanted.serial, wanted.decision) if wanted else (0, 0))]
        head += [len(closed.paces)]
        paces = _padded([pace or 0 for pace in closed.paces], CALM_PERIOD)
        values = _padded(wanted.values if wanted else (), KNOBS_MAX)
        work = (0,) * _WORK_WORDS if self.work is None else (self.work.fixed_ns, self.work.sample_ns, self.work.samples)
        return [*head, *paces, *_padded(closed.collections, CALM_PERIOD), *values, *work]

    def _decode_proposal(self, words: Sequence[int]) -> SwitchProposal | None:
        if not words[4] & _FLAG_PROPOSAL:
            return None
        values = tuple(words[_HEAD + 2 * CALM_PERIOD :][: len(self.spaces)])
        kind = next(k for k, flag in _KIND_FLAGS.items() if words[4] & (_FLAG_REHEARSAL | _FLAG_TRIAL) == flag)
        return SwitchProposal(words[7], words[8], values, kind)


def _padded(numbers: Sequence[int], length: int) -> list[int]:
    return [*numbers, *([0] * (length - len(numbers)))]


def _slowest(vectors: Sequence[Sequence[int]]) -> list[JobPace]:
    first_step, steps = vectors[0][5], min(vectors[0][9], CALM_PERIOD)
    everywhere = (1 << CALM_PERIOD) - 1
    profiled = 0
    for words in vectors:
        everywhere &= words[6]
        profiled |= words[6] >> CALM_PERIOD
    return [
        JobPace(
            first_step + i,
            max(words[_HEAD + i] for words in vectors),
            bool(profiled >> i & 1),
            max(words[_HEAD + CALM_PERIOD + i] for words in vectors),
        )
        for i in range(steps)
        if everywhere >> i & 1
    ]
