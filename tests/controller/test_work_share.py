"""Shares of the work: the plan, who computes which sample, and everything that is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from pacecar.controller.forecast.gain_model import GainModel
from pacecar.controller.guards.objection_rollback import ObjectionRollback
from pacecar.controller.knobs.actuator import ActuatorError, Gather, Objection
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.oom_safe_trial import OomSafeTrial
from pacecar.controller.knobs.batch.share_plan import RankWork, longest_ns, plan_shares, shares_text
from pacecar.controller.knobs.batch.work_share import WorkShareActuator
from pacecar.controller.knobs.dataloader.switchable_loader import SwitchableLoader
from pacecar.controller.observation import JobFacts, KnobSpace, Observation
from pacecar.records import Verdict
from tests.controller.loaders import Augmented

EVEN = 4


def test_half_the_speed_gets_half_the_samples() -> None:
    assert plan_shares([RankWork(0, 10, 12), RankWork(0, 20, 12)]) == (16, 8)
    assert shares_text((10, 6)) == "rank 1 does 6 of 16 samples, rank 0 does 10"
    assert shares_text((8, 8)) == "each of 2 ranks does 8 of 16 samples"


def test_a_rank_whose_share_would_be_zero_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="rank 1's share would be zero"):
        plan_shares([RankWork(0, 1, 4), RankWork(1000, 1, 4)])


works = st.builds(RankWork, st.integers(0, 50), st.integers(1, 50), st.just(4))


@pytest.mark.slow
@given(st.lists(works, min_size=2, max_size=3))
def test_no_other_shares_are_faster(ranks: list[RankWork]) -> None:
    total = 4 * len(ranks)
    try:
        shares = plan_shares(ranks)
    except ValueError:
        return
    assert sum(shares) == total
    others = (
        (a, b, total - a - b) if len(ranks) == 3 else (a, total - a)
        for a in range(total + 1)
        for b in (range(total + 1 - a) if len(ranks) == 3 else (0,))
    )
    busy = (max(w.own_ns(n) for w, n in zip(ranks, other, strict=True) if n) for other in others)
    assert longest_ns(ranks, shares) == min(busy)


@pytest.mark.slow
@given(st.lists(st.builds(RankWork, st.integers(0, 50), st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=6))
def test_samples_go_one_by_one_to_the_rank_that_would_then_take_least(ranks: list[RankWork]) -> None:
    shares = [0] * len(ranks)
    for _ in range(sum(work.samples for work in ranks)):
        shares[min(range(len(ranks)), key=lambda rank: ranks[rank].own_ns(shares[rank] + 1))] += 1
    if 0 in shares:
        with pytest.raises(ValueError, match=f"rank {shares.index(0)}'s share would be zero"):
            plan_shares(ranks)
    else:
        assert plan_shares(ranks) == tuple(shares)


def test_the_plan_takes_as_long_for_a_large_batch_as_for_a_small_one() -> None:
    asked = 0

    class Counted(RankWork):
        def own_ns(self, samples: int) -> int:
            nonlocal asked
            asked += 1
            return super().own_ns(samples)

    shares = plan_shares([Counted(10**6, 10**6 + rank, 10**6) for rank in range(8)])
    assert sum(shares) == 8 * 10**6
    assert asked < 100


def knob_of(rank: int, answers: list[list[float]], loader: Any = None, **kwargs: Any) -> WorkShareActuator:
    def start(numbers: Any) -> Gather:
        answers.append(list(numbers))
        return lambda: [answers[-1], *([[0.0, 20.0, EVEN, *answers[-1][3:]]] if rank == 0 else [])]

    model = nn.Linear(1, 1)
    return WorkShareActuator(
        model, MicroBatcher(None), rank, 2, start_gather=start, loader=lambda: loader,
        has_global_batch=kwargs.get("has_global_batch", False), may_redraw=kwargs.get("may_redraw", False),
    )  # fmt: skip


def test_each_step_keeps_its_samples_and_the_weights_sum_to_the_ranks() -> None:
    data = list(range(50))
    samplers = [DistributedSampler(data, 2, rank, seed=5) for rank in range(2)]  # type: ignore[arg-type]
    own = [list(BatchSampler(sampler, EVEN, drop_last=False)) for sampler in samplers]
    seen: list[list[list[int]]] = []
    factors: list[list[float]] = []
    for rank, sampler in enumerate(samplers):
        knob = knob_of(rank, [])
        knob._shares[1] = (6, 2)
        epoch = knob.begin_epoch(sampler)
        seen.append([])
        factors.append([])
        for place, some in enumerate(own[rank]):
            if place == 2:  # as `apply` does it, from the next batch on
                knob._begins.append(((1, place), 1))
            mine = epoch.cut(some)
            epoch.delivered()
            seen[rank].append(mine)
            factors[rank].append(knob.factor(len(mine)))
    for place, (first, second) in enumerate(zip(*seen, strict=True)):
        assert sorted(first + second) == sorted(own[0][place] + own[1][place])
        is_even = place < 2 or len(own[0][place]) < EVEN
        assert (len(first), len(second)) == ((len(own[0][place]),) * 2 if is_even else (6, 2))
        assert factors[0][place] + factors[1][place] == 2


def test_shares_are_computed_once_and_kept_for_the_way_back() -> None:
    answers: list[list[float]] = []
    knob = knob_of(0, answers)
    sampler: Any = DistributedSampler(list(range(64)), 2, 0)  # type: ignore[arg-type]
    epoch = knob.begin_epoch(sampler)
    assert knob.is_barred(1), "nothing is measured yet"
    for some in BatchSampler(sampler, EVEN, drop_last=True):
        epoch.cut(some)
        epoch.delivered()
        knob.factor(EVEN)
        if epoch.drawn == 3:
            break
    for _ in range(20):
        knob.note(EVEN, 10 * EVEN, 0)
    assert not knob.is_barred(1)
    knob.apply(1)
    assert knob._shares[1] == (6, 2) or knob._shares[1] == (5, 3)
    kept = knob._shares[1]
    knob.apply(0)
    knob.apply(1)
    assert knob._shares[1] == kept
    assert len(answers) == 3


def test_shares_can_be_computed_when_the_short_last_batch_of_an_epoch_was_drawn() -> None:
    knob = knob_of(0, [])
    sampler: Any = DistributedSampler(list(range(50)), 2, 0)  # type: ignore[arg-type]
    epoch = knob.begin_epoch(sampler)
    for some in BatchSampler(sampler, EVEN, drop_last=False):
        epoch.cut(some)
    knob.arrived(EVEN, EVEN)
    for _ in range(20):
        knob.note(EVEN, 10 * EVEN, 0)
    knob.apply(1)
    assert knob.value() == 1


class SlicedList(list[int]):
    longest = 0

    def __getitem__(self, at: Any) -> Any:
        some = super().__getitem__(at)
        self.longest = max(self.longest, len(some)) if isinstance(at, slice) else self.longest
        return some


def test_a_batch_costs_the_same_however_long_the_epoch_is() -> None:
    knob = knob_of(0, [])
    epoch = knob.begin_epoch(DistributedSampler(list(range(10_000)), 2, 0))  # type: ignore[arg-type]
    epoch._order = order = SlicedList(range(10_000))
    assert epoch.lists(7, EVEN, 2) == [[56, 58, 60, 62], [57, 59, 61, 63]]
    assert order.longest == 2 * EVEN


def test_a_rank_that_does_not_answer_leaves_the_shares_as_they_are() -> None:
    knob = WorkShareActuator(
        nn.Linear(1, 1), MicroBatcher(None), 0, 2, start_gather=lambda _: lambda: None, loader=lambda: None,
        has_global_batch=False, may_redraw=False,
    )  # fmt: skip
    with pytest.raises(ActuatorError, match="did not answer"):
        knob.apply(1)
    assert knob.value() == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"counts_terms": True}, "mean over counted terms"),
        ({"has_own_weights": True}, "weights of its own"),
        ({"has_weighted": False}, "losses cannot be weighted"),
        ({"batch_samples": None}, "losses cannot be weighted"),
        ({"refused": "the trainer cuts"}, "the trainer cuts"),
    ],
)
def test_loops_whose_mean_would_change_are_refused(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pacecar.controller.knobs.batch import work_share

    monkeypatch.setattr(work_share, "find_ddp", lambda _: SimpleNamespace(process_group=None))
    monkeypatch.setattr(work_share.dist, "get_world_size", lambda _: 2)
    knob = knob_of(0, [])
    for name, value in ({"has_weighted": True, "batch_samples": EVEN} | change).items():
        setattr(knob._batcher, name, value)
    assert reason in str(knob.refusal())


def test_no_ddp_is_refused() -> None:
    assert "DistributedDataParallel" in str(knob_of(0, []).refusal())


class Custom(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda d: DataLoader(d, EVEN, shuffle=True), "RandomSampler; use DataLoader"),
        (lambda d: DataLoader(d, batch_sampler=Custom(RandomSampler(d), EVEN, False)), "Custom; use DataLoader"),
        (lambda d: DataLoader(d, EVEN, sampler=DistributedSampler(d, 3, 0)), "rank 0 of 3"),
        (lambda d: DataLoader(d, 1, sampler=DistributedSampler(d, 2, 0)), "a share would be zero"),
    ],
)
def test_samplers_that_cannot_be_split_are_refused_with_what_to_use(make: Any, reason: str) -> None:
    user = make(torch.arange(40))
    loader = SwitchableLoader(user)
    assert reason in str(knob_of(0, [], loader)._refused_sampler())


@pytest.mark.parametrize("may_redraw", [False, True])
def test_random_augmentation_is_refused_unless_the_user_allows_other_draws(may_redraw: bool) -> None:
    data = Augmented()
    loader = SwitchableLoader(DataLoader(data, EVEN, sampler=DistributedSampler(data, 2, 0)))
    knob = knob_of(0, [], loader, may_redraw=may_redraw)
    knob.arrived(EVEN, EVEN)
    assert knob._refused_sampler() is None
    next(iter(loader))
    assert knob._refused_sampler() == (
        None
        if may_redraw
        else "loading a batch draws random numbers (augmentation), and another rank would draw others"
    )


def test_a_loop_that_reads_ahead_or_changes_its_batches_is_refused() -> None:
    knob = knob_of(0, [])
    knob.arrived(EVEN, EVEN)
    knob.arrived(EVEN, EVEN)
    assert knob.factor(EVEN) == 1.0
    assert "ahead" in str(knob._odd)
    knob = knob_of(0, [])
    knob.arrived(EVEN, EVEN)
    assert knob.factor(3) == 1.0
    assert "3 samples of a batch of 4" in str(knob._odd)


def test_the_forecast_moves_work_to_the_fast_rank_and_back_when_the_slow_one_recovers() -> None:
    def learned(*ranks: RankWork, value: int = 0) -> GainModel:
        model = GainModel(JobFacts("j", 2))
        pace = max(work.own_ns(work.samples) for work in ranks)
        model.learn(Observation(1, 0, {"work_share": value}, pace, works=ranks))
        return model

    slow = learned(RankWork(0, 10, 16), RankWork(0, 20, 16)).expect("work_share", {"work_share": 0}, 1)
    assert slow is not None
    assert slow.gain_ratio == pytest.approx(1 - 220 / 320)
    assert slow.basis == "rank 1 does 10 of 32 samples, rank 0 does 22"
    recovered = learned(RankWork(0, 10, 21), RankWork(0, 10, 11), value=1)
    back = recovered.expect("work_share", {"work_share": 1}, 0)
    assert back is not None
    assert back.gain_ratio == pytest.approx(1 - 160 / 210)
    alike = learned(RankWork(0, 10, 16), RankWork(0, 10, 16)).expect("work_share", {"work_share": 0}, 1)
    assert alike is not None
    assert (alike.gain_ratio, alike.spread_ratio) == (0.0, 0.0)
    broken = learned(RankWork(0, 1, 4), RankWork(900, 1, 4)).expect("work_share", {"work_share": 0}, 1)
    assert broken is not None
    assert "rank 1's share would be zero" in broken.basis


def test_all_ranks_go_back_once_a_loop_no_longer_trains_on_what_it_was_given(caplog: pytest.LogCaptureFixture) -> None:
    knob = knob_of(0, [])
    knob._shares[1] = (6, 2)
    knob.arrived(EVEN, EVEN)
    assert knob.factor(EVEN) == 1.0
    assert knob.objection() is None
    knob._value = 1
    knob.arrived(6, EVEN)
    assert knob.factor(6) == 1.5
    assert knob.objection() is None
    knob.arrived(6, EVEN)
    assert knob.factor(5) == 1.0, "what the loop left out is not known"
    assert knob.objection() is Objection.LOOP
    assert "goes back to equal shares: the loop trains on 5 samples of a batch of 6" in caplog.text
    assert knob.is_barred(1)
    assert not knob.is_barred(0)

    objections = {0: int(Objection.SCRIPT)}
    guard = ObjectionRollback("work_share", lambda: objections)
    guard.begin(JobFacts("j", 2), [KnobSpace("work_share", 0, (0, 1))], turns_knobs=True)
    guard.judgeable(Observation(step=9, wall_ns=9, values={"work_share": 1}, pace_ns=100, profiled=False))
    assert not guard.must_act(), "another knob's"
    objections[1] = int(Objection.LOOP)
    assert guard.must_act()
    proposal, records = guard.take_back(None, [])
    assert proposal is not None
    assert proposal.values == {"work_share": 0}
    assert [record.reason for record in records if isinstance(record, Verdict)] == [
        "taken back: on rank 1 the loop or its sampler no longer does what shares of work need"
    ]


def test_trying_a_larger_micro_batch_is_not_a_weight_of_the_loops_own() -> None:
    knob = knob_of(0, [])
    knob._value = 1
    knob._batcher.samples.turn(2, 1)
    assert knob._batcher.samples.is_unproven
    net = nn.Linear(1, 1)
    OomSafeTrial(net, knob._batcher).train_batch(torch.ones(EVEN, 1), lambda x: net(x).mean())
    assert not knob._batcher.samples.is_unproven
    assert knob.objection() is None


def test_an_order_that_changes_within_an_epoch_is_an_objection_and_this_rank_does_its_even_share() -> None:
    sampler: Any = DistributedSampler(list(range(64)), 2, 0)  # type: ignore[arg-type]
    knob = knob_of(0, [])
    knob._shares[1], knob._value = (6, 2), 1
    knob._begins.append(((1, 0), 1))
    epoch = knob.begin_epoch(sampler)
    own, *_ = BatchSampler(sampler, EVEN, drop_last=True)
    assert len(epoch.cut(own)) == 6
    assert knob.objection() is None
    assert epoch.cut([63, 62, 61, 60]) == [63, 62, 61, 60]
    assert knob.objection() is Objection.LOOP
