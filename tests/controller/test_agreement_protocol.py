"""The protocol under random orders of events: ranks stay equal, nothing is applied twice, freezing is for all."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.controller.consensus.capabilities import (
    COMPANIONS_MAX,
    DOMAIN_MAX,
    KnobOffer,
    Offer,
    decode_offer,
    encode_offer,
    live_knobs,
)
from pacecar.controller.consensus.protocol import (
    CALM_NS,
    CALM_PERIOD,
    KNOBS_MAX,
    LEISURE_PERIOD,
    LEISURE_QUEUE_MAX,
    LONG_STEP_NS,
    PERIOD,
    QUEUE_MAX,
    REPORT_WORDS,
    ProtocolMember,
    SwitchProposal,
)
from pacecar.controller.consensus.rank_agreement import RankAgreement

RANKS = 3
DOMAIN = tuple(range(8))
NEVER_LONG = (0.0, 0.0, 0.0)


def offer(value: int = 0, domain: tuple[int, ...] = DOMAIN, refusal: str | None = None, layout: str = "") -> Offer:
    return Offer((KnobOffer("bucket_bytes", value, domain, refusal, layout),))


class Job:
    """Ranks that step together; gathers arrive on each rank at random times, votes are a rendezvous."""

    def __init__(
        self,
        seed: int,
        *,
        late: float = 0.5,
        apply_fails: float = 0.0,
        calm: float = 0.0,
        long: Sequence[float] = NEVER_LONG,
        step_ns: int = LONG_STEP_NS,
    ) -> None:
        self.dice = random.Random(seed)
        self.late = late
        self.apply_fails = apply_fails
        self.calm = calm
        self.long = long
        self.step_ns = step_ns
        self.closed = PERIOD  # the boundary of the range closed last
        self.meets_at = [PERIOD] * RANKS
        self.members = [ProtocolMember(rank, RANKS) for rank in range(RANKS)]
        self.values = [[0] for _ in range(RANKS)]
        self.posted: list[list[list[int] | None]] = []  # by gather, by rank
        self.taken = [0] * RANKS
        self.out = [False] * RANKS
        self.is_deaf = [False] * RANKS
        self.boundary = 0
        self.switches: list[tuple[int, int, int]] = []  # boundary, serial, value
        self.votes = 0

    def step(self) -> None:
        self.boundary += 1
        b = self.boundary
        for rank, member in enumerate(self.members):
            member.is_calm = self.dice.random() < self.calm
            member.step_ns = self.step_ns if self.dice.random() < self.long[rank] else 0
            if b == PERIOD:
                member.offer(offer())
            elif b == self.meets_at[rank]:
                steps = range(self.closed + 1, b + 1)
                member.close_range(steps[0], [1000 * rank + step for step in steps], [False] * len(steps))
            self.listen(rank)
        assert len(set(self.meets_at)) == 1, "all ranks meet at the same boundary"
        if b == self.meets_at[0] - 1:
            self.launched = [m.ballot() for m in self.members if not m.has_retired]
            assert len(self.launched) in (0, RANKS), "a vote is launched by all ranks or by none"
            self.votes += bool(self.launched)
        elif b == self.meets_at[0]:
            self.closed = b
            if self.launched:
                self.read()
            self.meets_at = [b + member.period for member in self.members]
        assert len({tuple(v) for v in self.values}) == 1, "two ranks run different values"
        assert len({m.epoch for m in self.members}) == 1

    def listen(self, rank: int) -> None:
        member = self.members[rank]
        if self.is_deaf[rank]:
            return
        if self.out[rank]:
            vectors = self.posted[self.taken[rank]]
            if None not in vectors and self.dice.random() >= self.late:
                self.out[rank] = False
                self.taken[rank] += 1
                heard = [v for v in vectors if v is not None]
                if self.taken[rank] == 1:
                    member.receive_offers(heard)
                else:
                    for pace in member.receive(heard):
                        assert pace.pace_ns == 1000 * (RANKS - 1) + pace.step, "the slowest rank's pace of that step"
        if not self.out[rank]:
            vector = member.next_vector()
            if vector is not None:
                while len(self.posted) <= self.taken[rank]:
                    self.posted.append([None] * RANKS)
                self.posted[self.taken[rank]][rank] = vector
                self.out[rank] = True

    def read(self) -> None:
        lowest = [min(words) for words in zip(*self.launched, strict=True)]
        applied = {m.rank: m.tally(lowest) for m in self.members}
        assert len(set(applied.values())) == 1, "all ranks read the same vote"
        proposal = applied[0]
        if proposal is None:
            return
        worked = [self.dice.random() >= self.apply_fails for _ in self.members]
        for member, value in zip(self.members, self.values, strict=True):
            if all(worked):
                value[0] = proposal.values[0]
                member.applied(proposal)
            else:
                member.failed(proposal)
        if all(worked):
            self.switches.append((self.boundary, proposal.serial, proposal.values[0]))


@pytest.mark.slow
@given(st.integers(0, 10**9), st.floats(0.0, 0.97))
@settings(max_examples=120, deadline=None)
def test_ranks_never_run_different_values_and_nothing_is_applied_twice(seed: int, late: float) -> None:
    job = Job(seed, late=late, apply_fails=0.1)
    for _ in range(160):
        if job.dice.random() < 0.1 and job.members[0].spaces:
            job.members[0].propose(job.boundary, [job.dice.choice(DOMAIN)])
        elif job.dice.random() < 0.02:
            job.members[0].withdraw()
        job.step()
    serials = [serial for _, serial, _ in job.switches]
    assert serials == sorted(set(serials))
    assert all(boundary % PERIOD == 0 for boundary, _, _ in job.switches)


def test_ranks_at_leisure_vote_every_second_step_and_a_wish_is_applied_within_five() -> None:
    job = Job(1, late=0.0, long=(1.0, 1.0, 1.0))
    for _ in range(10 * PERIOD):
        job.step()
    assert 10 * PERIOD // LEISURE_PERIOD - 3 <= job.votes <= 10 * PERIOD // LEISURE_PERIOD
    for value in range(1, 5):
        for _ in range(1 + value % 2):  # wished for where a vote is launched, and where one is read
            job.step()
        wished = job.boundary
        job.switches.clear()
        job.members[0].propose(wished, [value])
        while not job.switches:
            job.step()
        assert job.switches[0][2] == value
        assert job.switches[0][0] - wished <= 2 * LEISURE_PERIOD + 1


def test_one_rank_whose_steps_are_short_keeps_all_from_meeting_at_every_second() -> None:
    job = Job(1, late=0.0, long=(1.0, 0.0, 1.0))
    for _ in range(10 * PERIOD):
        job.step()
    assert job.votes <= 10


def test_ranks_whose_side_road_does_not_keep_up_are_not_at_leisure() -> None:
    member = ProtocolMember(1, RANKS)
    member.step_ns = LONG_STEP_NS
    for index in range(LEISURE_QUEUE_MAX + 1):
        assert member.ballot()[4] == 1
        member.close_range(index * 2, [1, 1], [False, False])
    assert member.ballot()[4] == 0


@pytest.mark.slow
@given(st.integers(0, 10**9), st.floats(0.0, 0.9), st.floats(0.0, 1.0), st.floats(0.5, 1.0), st.integers(0, CALM_NS))
@settings(max_examples=120, deadline=None)
def test_ranks_that_are_calm_or_at_leisure_now_and_then_meet_at_the_same_boundaries_and_never_part(
    seed: int, late: float, calm: float, long: float, step_ns: int
) -> None:
    job = Job(seed, late=late, apply_fails=0.1, calm=calm, long=(long, long, long), step_ns=step_ns)
    for step in range(240):
        if job.members[0].spaces and job.dice.random() < 0.03:
            job.members[0].propose(job.boundary, [job.dice.choice(DOMAIN)])
        if step == 200:
            job.members[job.dice.randrange(RANKS)].freeze("planted")
        job.step()
    assert all(m.has_retired for m in job.members)


def test_ranks_that_are_calm_vote_every_16_steps_and_a_wish_is_applied_within_three_of_these() -> None:
    job = Job(1, late=0.0, calm=1.0)
    for _ in range(10 * CALM_PERIOD):
        job.step()
    assert job.votes <= 3 + 10
    assert all(member.are_all_calm for member in job.members)
    wished = job.boundary
    job.members[0].propose(1, [5])
    while not job.switches:
        job.step()
    assert job.boundary - wished <= 3 * CALM_PERIOD
    assert not any(member.are_all_calm for member in job.members), "a wish was under way"


@pytest.mark.parametrize(
    ("step_ns", "period"), [(LONG_STEP_NS, 16), (CALM_NS // 8, 8), (CALM_NS // 4, 4), (CALM_NS, 4)]
)
def test_calm_ranks_with_long_steps_meet_sooner(step_ns: int, period: int) -> None:
    job = Job(1, late=0.0, calm=1.0, long=(1.0, 1.0, 1.0), step_ns=step_ns)
    for _ in range(10 * CALM_PERIOD):
        job.step()
    assert 10 * CALM_PERIOD // period - 3 <= job.votes <= 10 * CALM_PERIOD // period + 3


@pytest.mark.slow
@given(st.integers(0, 10**9), st.integers(0, RANKS - 1), st.integers(0, 100), st.booleans(), st.floats(0.0, 0.9))
@settings(max_examples=120, deadline=None)
def test_a_freeze_or_a_lost_side_road_anywhere_at_any_step_stops_all_ranks(
    seed: int, rank: int, at: int, is_side: bool, late: float
) -> None:
    job = Job(seed, late=late)
    for step in range(at + 12):
        if job.members[0].spaces and job.dice.random() < 0.3:
            job.members[0].propose(step, [job.dice.choice(DOMAIN)])
        if step == at:
            before = job.boundary
            job.members[rank].freeze("planted")
            if is_side:
                job.is_deaf[rank] = True
                job.members[rank].close_side_channel()
        job.step()
    assert all(m.frozen is not None for m in job.members)
    assert all(m.has_retired for m in job.members)
    # A vote that was launched before the freeze may still be read, on all ranks; none after that.
    assert all(boundary <= before + 1 for boundary, _, _ in job.switches)
    votes = job.votes
    for _ in range(3 * PERIOD):
        job.step()
    assert job.votes == votes, "no vote after all ranks retired"


def test_on_a_prompt_network_a_wish_is_in_force_within_two_periods() -> None:
    job = Job(1, late=0.0)
    while not job.members[0].spaces:
        job.step()
    wished = job.boundary
    job.members[0].propose(7, [3])
    while not job.switches:
        job.step()
    assert job.switches[0][2] == 3
    assert job.switches[0][0] - wished <= 2 * PERIOD + 1


def test_a_side_road_that_is_too_late_freezes() -> None:
    member = ProtocolMember(1, RANKS)
    for index in range(QUEUE_MAX + 1):
        assert member.frozen is None
        member.close_range(index * PERIOD, [1] * PERIOD, [False] * PERIOD)
    assert "late" in str(member.frozen)
    assert member.ballot()[2] == 0
    assert not member.has_more


def heard_by_all(members: list[ProtocolMember]) -> list[list[int]]:
    for member in members:
        member.offer(offer())
    offers = [m.next_vector() or [] for m in members]
    for member in members:
        member.receive_offers(offers)
    return offers


@pytest.mark.parametrize(
    ("word", "reason"),
    [(0, "protocol version"), (1, "gather"), (2, "knob epoch"), (3, "layout"), (5, "count steps differently")],
)
def test_ranks_that_disagree_freeze_and_say_about_what(word: int, reason: str) -> None:
    members = [ProtocolMember(rank, 2) for rank in range(2)]
    heard_by_all(members)
    for member in members:
        member.close_range(5, [10] * PERIOD, [False] * PERIOD)
    vectors = [m.next_vector() or [] for m in members]
    assert [len(v) for v in vectors] == [REPORT_WORDS] * 2
    vectors[1][word] += 1
    assert members[0].receive(vectors) == []
    assert reason in str(members[0].frozen)


def test_a_step_that_one_rank_did_not_measure_has_no_pace_and_a_profiled_one_says_so() -> None:
    members = [ProtocolMember(rank, 2) for rank in range(2)]
    heard_by_all(members)
    members[0].close_range(5, [10, 20, 30, 40], [False, True, False, False])
    members[1].close_range(5, [11, 12, None, 13], [False, False, False, True])
    paces = members[0].receive([m.next_vector() or [] for m in members])
    assert [(p.step, p.pace_ns, p.profiled) for p in paces] == [(5, 11, False), (6, 20, True), (8, 40, True)]


def test_a_zero_pace_is_a_measurement() -> None:
    members = [ProtocolMember(rank, 2) for rank in range(2)]
    heard_by_all(members)
    for member in members:
        member.close_range(5, [0] * PERIOD, [False] * PERIOD)
    assert len(members[0].receive([m.next_vector() or [] for m in members])) == PERIOD


def test_rank_0_takes_a_wish_back_although_the_others_still_hold_it() -> None:
    members = [ProtocolMember(rank, 2) for rank in range(2)]
    heard_by_all(members)
    members[0].propose(1, [5])
    for member in members:
        member.close_range(5, [1] * PERIOD, [False] * PERIOD)
    vectors = [m.next_vector() or [] for m in members]
    for member in members:
        member.receive(vectors)
    assert [m.ballot()[0] != 0 for m in members] == [True, True]
    members[0].withdraw()
    assert [m.ballot()[0] != 0 for m in members] == [False, True]
    lowest = [min(words) for words in zip(*(m.ballot() for m in members), strict=True)]
    assert [m.tally(lowest) for m in members] == [None, None]


def test_the_same_proposal_under_another_epoch_or_layout_has_another_name() -> None:
    proposal = SwitchProposal(1, 2, (3, 4))
    assert len({proposal.digest(0, 9), proposal.digest(1, 9), proposal.digest(0, 8)}) == 3
    assert 0 < proposal.digest(0, 9) < 2**62


# --- offers -------------------------------------------------------------------------------------------


def test_a_knob_is_live_only_if_every_rank_offers_it() -> None:
    spaces, refused = live_knobs([offer(2), offer(2, domain=(0, 2, 3, 99))])
    assert refused == {}
    assert [(s.knob, s.value, s.domain) for s in spaces] == [("bucket_bytes", 2, (0, 2, 3))]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Offer(()), "rank 1 does not have it"),
        (offer(refusal="static graph"), "rank 1: static graph"),
        (offer(layout="x"), "rank 1 has another layout"),
        (offer(value=3), "rank 1 starts at 3, rank 0 at 0"),
        (offer(domain=(0, 77)), "no value but the present 0"),
    ],
)
def test_a_knob_that_one_rank_cannot_turn_is_refused_with_that_rank_s_reason(other: Offer, reason: str) -> None:
    spaces, refused = live_knobs([offer(), other])
    assert spaces == ()
    assert reason in refused["bucket_bytes"]


@pytest.mark.slow
@given(st.integers(0, 2**40), st.sets(st.integers(0, 2**40), max_size=80), st.none() | st.text(max_size=400))
def test_an_offer_crosses_the_wire_and_fits(value: int, domain: set[int], refusal: str | None) -> None:
    sent = offer(value, tuple(sorted(domain | {value})), refusal, "abc")
    got = decode_offer(encode_offer(sent)).knobs[0]
    assert (got.knob, got.value, got.layout) == ("bucket_bytes", value, "abc")
    assert value in got.domain
    assert set(got.domain) <= domain | {value}
    assert (got.refusal is None) == (refusal is None)


def test_as_many_knobs_with_as_many_values_as_there_may_be_fit() -> None:
    domain = tuple(2**40 + i for i in range(DOMAIN_MAX))
    pairs = tuple((one, "checkpointed_blocks", 2**40) for one in domain[:COMPANIONS_MAX])
    knobs = [KnobOffer(f"a_knob_of_a_long_name_{i}", domain[0], domain, None, "x" * 16) for i in range(KNOBS_MAX)]
    knobs[:2] = [msgspec.structs.replace(knob, companions=pairs) for knob in knobs[:2]]
    assert decode_offer(encode_offer(Offer(tuple(knobs)))) == Offer(tuple(knobs))


def test_garbage_is_not_an_offer() -> None:
    with pytest.raises(ValueError, match="not an offer"):
        decode_offer([16, 1, 2, 3])


def test_where_no_vote_is_ever_taken_nothing_is_under_way() -> None:
    assert RankAgreement(0, 2, votes=False).are_all_calm
    assert not RankAgreement(0, 2, votes=True).are_all_calm, "not before the first vote says so"
