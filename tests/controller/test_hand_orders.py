"""Orders are carried out or refused with a reason, and a remembered setting must prove itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from pacecar.config import TuneConfig
from pacecar.controller.memory.knob_store import Fingerprint, StoredKnobs
from pacecar.controller.observation import KnobSpace, Policy
from pacecar.controller.policy.hand_orders import ORDER_STEPS_MAX, HandOrders, Order, OrderError
from pacecar.controller.policy.tuning_policy import TuningPolicy
from tests.controller.ordered_run import OrderedRun
from tests.controller.plant import BUCKETS, MIB, MICRO_BATCHES, Plant, both_curve, gaussian, link_curve

MICRO = KnobSpace("micro_batch", 4, MICRO_BATCHES)
BUCKET = KnobSpace("bucket_bytes", 32 * MIB, BUCKETS)
BEGAN = {"micro_batch": 4, "bucket_bytes": 32 * MIB}
BEST = {"micro_batch": 32, "bucket_bytes": 4 * MIB}
CONFIG = TuneConfig(exploration_budget=0.05)


def flat(values: dict[str, int], step: int) -> float:
    return 0.2


@dataclass
class Shelf:
    """A memory that knows one entry and says what it was told."""

    entry: StoredKnobs | None = None
    began: dict[str, int] = field(default_factory=dict)
    kept: list[dict[str, int]] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    paces: list[int | None] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    uses: int = 0

    def recall(self, began: Mapping[str, int]) -> StoredKnobs | None:
        self.began = dict(began)
        return self.entry

    def keep(self, knobs: Mapping[str, int], gain_ratio: float, pace_ns: int | None, steps: int) -> None:
        self.kept.append(dict(knobs))
        self.gains.append(gain_ratio)
        self.paces.append(pace_ns)

    def use(self, entry: StoredKnobs) -> None:
        self.uses += 1

    def doubt(self, entry: StoredKnobs, why: str) -> None:
        self.doubts.append(why)


def entry(knobs: dict[str, int], gain: float = 0.3) -> StoredKnobs:
    kind = Fingerprint(
        parameters="0", elements=1, world_size=2, device="cpu", backend="gloo", link="local", torch="2.13", began=BEGAN
    )
    return StoredKnobs(
        key=kind.key, fingerprint=kind, knobs=knobs, gain_ratio=gain, pace_ns=1, steps=900, saved_wall_ns=10**18,
        used_wall_ns=10**18, job="before", pacecar_version="0",
    )  # fmt: skip


class Person:
    """Gives an order at a step, and hears."""

    def __init__(self, *orders: tuple[int, str, dict[str, int]]) -> None:
        self.orders = list(orders)
        self.heard: list[tuple[int, str, str]] = []
        self.refused: list[str] = []

    def __call__(self, step: int, policy: Policy) -> None:
        assert isinstance(policy, OrderedRun)
        for at, action, values in self.orders:
            if at == step:

                def answer(state: str, detail: str, at: int = at) -> None:
                    self.heard.append((at, state, detail))

                try:
                    policy.orders.accept(Order(action, values, "by hand (uid 7)", answer))  # type: ignore[arg-type]
                except OrderError as error:
                    self.refused.append(str(error))

    def ends(self, at: int) -> list[str]:
        return [state for when, state, _ in self.heard if when == at]


def run(
    curve: Callable[[dict[str, int], int], float] = both_curve,
    *orders: tuple[int, str, dict[str, int]],
    steps: int = 600,
    shelf: Shelf | None = None,
    spaces: tuple[KnobSpace, ...] = (MICRO, BUCKET),
    config: TuneConfig = CONFIG,
    **settings: Any,
) -> tuple[Plant, Person]:
    person = Person(*orders)

    def make(config: TuneConfig) -> Policy:
        return OrderedRun(TuningPolicy(config), HandOrders(config, memory=shelf))

    plant = Plant(curve, gaussian(0.01), list(spaces), 3, config, make=make, at=person, **settings)
    return plant.run(steps), person


@pytest.mark.slow
def test_without_orders_and_memory_it_is_the_policy_itself() -> None:
    plant, _ = run(steps=500)
    plain = Plant(both_curve, gaussian(0.01), [MICRO, BUCKET], 3, CONFIG).run(500)
    assert plant.records == plain.records
    assert plant.paces == plain.paces


def test_freeze_takes_the_open_trial_back_and_nothing_is_tried_until_resume() -> None:
    plant, person = run(both_curve, (70, "freeze", {}), (300, "resume", {}))
    assert person.ends(70) == ["accepted", "done"]
    assert plant.verdicts[0].outcome == "abandoned"
    assert "frozen by hand (uid 7)" in plant.verdicts[0].reason
    assert all(values == BEGAN for values in plant.history[100:300])
    assert [d.step for d in plant.decisions if 70 < d.step <= 290] == [], "what is seen lags behind"
    frozen = [s for s in plant.statuses if s.state == "frozen"]
    assert [s.detail for s in frozen] == ["frozen by hand (uid 7)"]
    assert person.ends(300) == ["done"]
    assert any(v.outcome == "kept" for v in plant.verdicts), "and tuning went on"


def test_what_was_kept_stays_when_frozen() -> None:
    plant, _ = run(both_curve, (400, "freeze", {}), steps=700)
    kept = plant.history[399]
    assert kept != BEGAN
    settled = {tuple(sorted(values.items())) for values in plant.history[440:]}
    assert len(settled) == 1


def test_set_turns_all_ranks_to_the_value_and_the_tuner_leaves_that_knob_alone() -> None:
    plant, person = run(both_curve, (70, "set", {"bucket_bytes": 64 * MIB}), steps=900)
    assert person.ends(70) == ["accepted", "done"]
    assert person.heard[-1][2] == "bucket_bytes 64 MiB"
    assert all(values["bucket_bytes"] == 64 * MIB for values in plant.history[110:])
    assert {d.knob for d in plant.decisions if d.step > 110} == {"micro_batch"}
    assert plant.values["micro_batch"] > 4, "the other knob is tuned around it"


def test_resume_gives_a_knob_that_was_set_back_to_the_tuner() -> None:
    plant, _ = run(both_curve, (70, "set", {"bucket_bytes": 64 * MIB}), (400, "resume", {}), steps=1500)
    assert plant.values["bucket_bytes"] < 64 * MIB
    assert "bucket_bytes" in {d.knob for d in plant.decisions if d.step > 400}


def test_every_knob_set_by_hand_leaves_the_policy_watching() -> None:
    plant, person = run(flat, (70, "set", {"bucket_bytes": 64 * MIB}), spaces=(BUCKET,), steps=400)
    assert person.ends(70) == ["accepted", "done"]
    assert plant.values == {"bucket_bytes": 64 * MIB}
    assert plant.statuses[-1].state == "watching"


def test_rollback_goes_back_to_the_beginning_and_freezes() -> None:
    shelf = Shelf()
    plant, person = run(both_curve, (500, "rollback", {}), steps=800, shelf=shelf)
    assert plant.history[499] != BEGAN
    assert person.ends(500) == ["accepted", "done"]
    assert all(values == BEGAN for values in plant.history[540:])
    assert (plant.statuses[-1].state, plant.statuses[-1].detail) == ("frozen", "rolled back by hand (uid 7)")
    assert [d for d in plant.decisions if d.step > 500] == []


@pytest.mark.slow
@pytest.mark.parametrize("order", [("set", {"bucket_bytes": 64 * MIB}), ("freeze", {})])
def test_numbers_of_decisions_trials_and_losses_go_on_over_orders(order: tuple[str, dict[str, int]]) -> None:
    plant, _ = run(both_curve, (150, *order), (500, "resume", {}), steps=1200)
    numbers = [d.decision for d in plant.decisions]
    assert numbers == sorted(set(numbers))
    assert {v.decision for v in plant.verdicts} == set(numbers)
    trials = [s.trials for s in plant.statuses]
    losses = [s.exploration_ns for s in plant.statuses]
    assert trials == sorted(trials)
    assert losses == sorted(losses)
    assert trials[-1] == len(plant.decisions)


@pytest.mark.parametrize(
    ("action", "values", "why"),
    [
        ("set", {"bucket_bytes": 3 * MIB}, r"bucket_bytes 3 MiB is not possible here; possible: 0.25 MiB, .*128 MiB"),
        ("set", {"compression": 1}, "compression cannot be turned in this job; knobs that can: bucket_bytes, micro_b"),
    ],
)
def test_an_impossible_value_is_refused_with_what_is_possible(action: str, values: dict[str, int], why: str) -> None:
    _, person = run(flat, (70, action, values), steps=100)
    with pytest.raises(OrderError, match=why):
        raise OrderError(person.refused[0])
    assert person.heard == []


def test_values_outside_the_users_bounds_are_refused() -> None:
    config = TuneConfig(exploration_budget=0.05, bucket_bytes_max=16 * MIB)
    _, person = run(flat, (70, "set", {"bucket_bytes": 64 * MIB}), steps=100, config=config)
    assert "is not possible here" in person.refused[0]


def test_one_order_at_a_time_and_none_in_advise_mode_or_before_the_tuner_has_begun() -> None:
    _, person = run(flat, (70, "set", {"micro_batch": 8}), (70, "rollback", {}), steps=200)
    assert person.refused == ["'set' is still being carried out"]
    _, person = run(flat, (70, "freeze", {}), steps=100, turns_knobs=False)
    assert person.refused == ["this job is tuned in mode advise: nothing is turned, and nothing is tried"]
    with pytest.raises(OrderError, match="has not begun"):
        HandOrders(CONFIG).accept(Order("freeze", {}, "by hand", lambda state, detail: None))


def test_ranks_that_do_not_turn_refuse_the_order_and_the_old_values_are_asked_for() -> None:
    plant, person = run(flat, (70, "set", {"micro_batch": 8}), steps=400, obey=False)
    assert person.ends(70) == ["accepted", "refused"]
    answer = re.fullmatch(
        r"the ranks did not switch within (\d+) steps: one of them cannot take micro_batch yet, or is silent",
        person.heard[-1][2],
    )
    assert answer is not None
    assert ORDER_STEPS_MAX < int(answer[1]) <= ORDER_STEPS_MAX + 4
    assert plant.values == BEGAN


def test_a_job_that_ends_answers_whoever_waits() -> None:
    _, person = run(flat, (70, "set", {"bucket_bytes": MIB}), steps=72)
    assert person.ends(70) == ["accepted", "refused"]
    assert "the job ended first" in person.heard[-1][2]


# --- memory ---


def test_what_was_kept_is_remembered_with_its_gain_and_its_pace() -> None:
    shelf = Shelf()
    plant, _ = run(steps=900, shelf=shelf)
    assert shelf.began == BEGAN
    assert len(shelf.kept) >= 2, "at each change that was kept, and at the end"
    assert shelf.kept[-1] == {k: v for k, v in plant.values.items() if v != BEGAN[k]}
    true = 1 - both_curve(plant.values, 0) / both_curve(BEGAN, 0)
    assert shelf.gains[-1] == pytest.approx(true, abs=0.06)
    assert shelf.paces[-1] == pytest.approx(both_curve(plant.values, 0) * 1e9, rel=0.05)


@pytest.mark.slow
def test_nothing_is_remembered_where_nothing_was_kept_or_a_person_had_his_hand_in_it() -> None:
    shelf = Shelf()
    run(flat, shelf=shelf)
    assert shelf.kept == []
    run(both_curve, (70, "set", {"bucket_bytes": 64 * MIB}), steps=900, shelf=shelf)
    assert shelf.kept == []


def test_what_is_remembered_is_tried_first_and_all_of_it_at_once() -> None:
    shelf = Shelf(entry(BEST))
    plant, _ = run(steps=600, shelf=shelf)
    first, second = plant.decisions[:2]
    assert {first.knob: first.to_value, second.knob: second.to_value} == BEST
    assert first.expected_gain_ratio == second.expected_gain_ratio == 0.3
    assert "it saved 30.0 % in before on 2001-09-09" in first.reason
    assert [v.outcome for v in plant.verdicts[:2]] == ["kept", "kept"]
    assert plant.verdicts[0].step < 150
    assert (shelf.uses, shelf.doubts) == (1, [])
    assert shelf.kept[-1] == {k: v for k, v in plant.values.items() if v != BEGAN[k]}
    fresh, _ = run(steps=600)
    assert plant.total_seconds < fresh.total_seconds


def test_what_no_longer_holds_is_rolled_back_doubted_and_searched_anew() -> None:
    worse = {"micro_batch": 1, "bucket_bytes": MIB // 4}
    shelf = Shelf(entry(worse))
    plant, _ = run(steps=900, shelf=shelf)
    assert [v.outcome for v in plant.verdicts[:2]] == ["rolled_back", "rolled_back"]
    assert plant.verdicts[0].trial_steps < 40, "clearly bad: dropped at once"
    assert len(shelf.doubts) == 1
    assert "remembered: 30.0 %" in shelf.doubts[0]
    assert shelf.kept[-1]["micro_batch"] > 4, "and what was found instead is remembered"


def test_a_remembered_value_that_is_not_possible_here_is_left_out() -> None:
    shelf = Shelf(entry({"bucket_bytes": 5 * MIB, "compression": 2}))
    plant, _ = run(steps=400, shelf=shelf)
    assert (shelf.uses, shelf.doubts) == (0, [])
    assert plant.decisions[0].decision == 1


def test_a_job_that_ends_in_the_middle_of_the_first_trial_leaves_the_memory_as_it_was() -> None:
    shelf = Shelf(entry(BEST))
    plant, _ = run(steps=64, shelf=shelf)
    assert [v.outcome for v in plant.verdicts] == ["abandoned", "abandoned"]
    assert (shelf.kept, shelf.doubts) == ([], [])


def test_advise_mode_says_what_is_remembered_and_turns_nothing() -> None:
    shelf = Shelf(entry({"bucket_bytes": 4 * MIB}))
    plant, _ = run(steps=300, shelf=shelf, turns_knobs=False)
    assert plant.switches == []
    assert (plant.decisions[0].kind, plant.decisions[0].to_value) == ("advise", 4 * MIB)
    assert plant.statuses[-1].state == "advising"


def test_a_freeze_during_the_first_trial_takes_it_back() -> None:
    shelf = Shelf(entry(BEST))
    plant, person = run(both_curve, (66, "freeze", {}), steps=400, shelf=shelf)
    assert person.ends(66) == ["accepted", "done"]
    assert all(values == BEGAN for values in plant.history[100:])
    assert plant.statuses[-1].state == "frozen"
    assert shelf.doubts == []


def test_a_freeze_before_the_first_trial_leaves_it_for_after_resume() -> None:
    shelf = Shelf(entry(BEST))
    plant, _ = run(both_curve, (20, "freeze", {}), (100, "resume", {}), steps=600, shelf=shelf)
    assert any((s.state, s.detail) == ("frozen", "frozen by hand (uid 7)") for s in plant.statuses)
    assert {d.knob: d.to_value for d in plant.decisions[:2]} == BEST
    assert plant.decisions[0].step > 100
    assert [d.decision for d in plant.decisions[:2]] == [2, 3], "the freeze has a number of its own"


def test_a_flat_remembered_setting_is_not_kept() -> None:
    curve = link_curve(dict.fromkeys(BUCKETS, 200.0))
    shelf = Shelf(entry({"bucket_bytes": 4 * MIB}))
    plant, _ = run(curve, steps=400, shelf=shelf, spaces=(BUCKET,))
    assert plant.verdicts[0].outcome == "rolled_back"
    assert len(shelf.doubts) == 1
