"""The budget keeps its ratio whatever windows cost, and lets them open on one grid."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.profiler.timing.overhead_budget import (
    BASELINE_STEPS,
    CREDIT_STEPS,
    FIRST_CREDIT_STEPS,
    FIRST_WINDOW_NS,
    FIXED_SHARE,
    PRICE_MARGIN,
    OverheadBudget,
    ThreadTime,
    turn_of,
)

MS = 1_000_000


def run(budget, steps, *, wall=50 * MS, own=10_000, price=4 * MS, request_at=()):
    taken, profiled = [], False
    for step in range(steps):
        overhead = budget.step(wall + (price if profiled else 0), own + (price if profiled else 0), profiled=profiled)
        if profiled:
            budget.window_taken(step, overhead)
        if step in request_at:
            budget.request()
        profiled = budget.wants_window(step + 1)
        if profiled:
            taken.append(step + 1)
    return taken


def test_windows_come_after_the_warmup_at_the_interval():
    assert run(OverheadBudget(0.5, warmup_steps=3, interval_steps=20), 80) == [3, 23, 43, 63]


def test_a_request_brings_the_next_window_forward_to_the_grid():
    assert run(OverheadBudget(0.5, warmup_steps=3, interval_steps=50), 60, request_at=(11,))[:2] == [3, 13]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.sampled_from([0.002, 0.01, 0.05]))
def test_the_running_ratio_stays_within_the_budget_and_one_window_more(price_ms, ratio):
    budget = OverheadBudget(ratio, warmup_steps=3, interval_steps=10)
    taken = run(budget, 2000, price=price_ms * MS)
    wall = (2000 * 50 + len(taken) * price_ms) * MS
    assert budget.cost_ns <= ratio * wall + price_ms * MS
    assert abs(budget.ratio * wall - budget.cost_ns) <= ratio * price_ms * MS + 1


def test_no_budget_no_window():
    assert run(OverheadBudget(0.0, warmup_steps=1, interval_steps=1), 200) == []


def test_the_slow_down_of_a_profiled_step_is_charged_and_luck_is_not_paid_back():
    budget = OverheadBudget(0.5, warmup_steps=1, interval_steps=10)
    for _ in range(9):
        assert budget.step(100, 2, profiled=False) == 2
    assert budget.step(130, 2, profiled=True) == 2 + 30
    assert budget.step(60, 2, profiled=True) == 2
    assert budget.cost_ns == 9 * 2 + 32 + 2


def test_the_first_window_is_on_credit_and_the_next_waits_until_it_is_earned_back():
    price = 100
    budget = OverheadBudget(0.01, warmup_steps=3, interval_steps=10)
    first, second = run(budget, 700, own=0, price=price * MS)[:2]
    assert first == 3
    assert (second - 1) * 50 * MS * 0.01 >= 2 * (price - 1) * MS, "the first paid back, the second earned"
    assert second * 50 * MS * 0.01 <= (1 + PRICE_MARGIN) * (price + 10) * MS, "and not much later"


def test_a_new_setting_gets_credit_only_if_it_is_soon_earned_back_and_a_known_one_none():
    step, warmup = 50 * MS, 3

    def second_window(price, *, on_credit):
        budget = OverheadBudget(0.01, warmup_steps=warmup, interval_steps=10)
        for number in range(60):
            budget.step(step, price if number == warmup + 1 else 0, profiled=number == warmup)
            if number == warmup + 1:
                budget.window_taken(warmup, price)
            if number == 20:
                budget.request(on_credit=on_credit)
            if number > warmup and budget.wants_window(number + 1):
                return number + 1
        return None

    earned_back = int(0.01 * CREDIT_STEPS * step / (1 + PRICE_MARGIN))  # what was paid and what is to be paid
    assert second_window(earned_back, on_credit=True) == 21
    assert second_window(earned_back, on_credit=False) is None
    assert second_window(4 * earned_back, on_credit=True) is None


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("interval", [1, 10, 50, 200])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 13, 64])
def test_whatever_the_budget_puts_off_no_two_ranks_of_eight_open_windows_at_once(world_size, interval, on_device):
    """Each rank pays another price, and a tuner asks all of them at the same step."""
    disturbed = 3
    taken = [
        run(
            OverheadBudget(
                0.02, warmup_steps=3, interval_steps=interval, rank=rank, world_size=world_size, on_device=on_device
            ),
            600,
            price=(1 + rank) * MS,
            request_at=(100, 101, 250),
        )
        for rank in range(world_size)
    ]
    assert all(taken), "every rank has its turn"
    for one, other in itertools.combinations(range(world_size), 2):
        if one % 8 == other % 8:
            continue
        assert all(abs(a - b) >= disturbed for a in taken[one] for b in taken[other])
    assert max(steps[0] for steps in taken) < (BASELINE_STEPS if on_device else 3) + 8 * disturbed


@pytest.mark.slow
@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 300), st.integers(0, 1000))
def test_the_next_turn_is_the_first_that_is_one(rank, world_size, interval, step):
    turn = turn_of(rank % world_size, world_size, warmup_steps=3, interval_steps=interval)
    following = turn.next_from(step)
    assert following >= step
    assert turn.is_now(following)
    assert not any(turn.is_now(other) for other in range(step, following))


@pytest.mark.slow
def test_the_first_window_waits_where_a_thousand_steps_would_not_earn_it_back():
    slow = run(OverheadBudget(0.002, warmup_steps=3, interval_steps=10), 50, wall=15 * MS, own=0)
    assert slow[:1] == [3]
    quick = run(OverheadBudget(0.002, warmup_steps=3, interval_steps=10), 20_000, wall=1 * MS, own=0)
    assert quick
    assert (quick[0] + FIRST_CREDIT_STEPS) * 1 * MS * 0.002 >= FIRST_WINDOW_NS - MS, "a thousand steps pay the rest"


@pytest.mark.parametrize("ratio", [0.002, 0.01])
def test_a_run_of_sixty_seconds_ends_within_its_budget_though_prices_swing(ratio):
    """Steps of 15 ms, windows of 15 to 30 ms, 12 us of own time a step and a courier that takes 40 us now and then."""
    budget = OverheadBudget(ratio, warmup_steps=3, interval_steps=50)
    wall = 15 * MS
    taken = 0
    is_profiled = False
    for step in range(4000):
        price = (15 + 5 * (step * 7 % 4)) * MS if is_profiled else 0
        overhead = budget.step(wall + price, 12_000 + price, profiled=is_profiled)
        if is_profiled:
            budget.window_taken(step, overhead)
            taken += 1
        if step % 16 == 0:
            budget.charge(40_000)
        is_profiled = budget.wants_window(step + 1)
    assert taken >= 2
    assert budget.ratio <= ratio
    assert budget.next_look(4001) >= 4001


def test_a_look_skips_the_turns_at_which_a_window_cannot_be_paid_yet():
    budget = OverheadBudget(0.01, warmup_steps=3, interval_steps=50)
    for step in range(10):
        budget.step(10 * MS, 0, profiled=step == 3)
    budget.window_taken(3, 4 * MS)
    budget.charge(4 * MS)
    assert budget.next_look(10) >= 53, "an interval after the last one"
    budget.request()
    assert 10 <= budget.next_look(10) <= 10 + 50 + 5


@pytest.mark.parametrize(
    ("ratio", "cost_ms", "owes"), [(0.01, 119, False), (0.01, 121, True), (0.0, 999, False), (1.0, 999, False)]
)
def test_who_takes_too_much_after_fifteen_seconds_has_a_strained_budget_until_it_is_earned(ratio, cost_ms, owes):
    budget = OverheadBudget(ratio, warmup_steps=1, interval_steps=100)
    budget.charge(cost_ms * MS)
    for _ in range(1499):
        budget.step(10 * MS, 0, profiled=False)
        assert not budget.is_strained(), "what is lent at the start may be owed for a while"
    budget.step(10 * MS, 0, profiled=False)
    assert budget.is_strained() is owes
    for _ in range(20):
        budget.step(10 * MS, 0, profiled=False)
    assert not budget.is_strained()


@pytest.mark.parametrize(("cost_ms", "owes"), [(175, False), (190, True)])
def test_a_budget_without_headroom_is_strained_before_fifteen_seconds_have_passed(cost_ms, owes):
    budget = OverheadBudget(0.01, warmup_steps=1, interval_steps=100)
    budget.charge(cost_ms * MS)
    for _ in range(10):
        budget.step(10 * MS, 0, profiled=False)
    assert budget.is_strained() is owes, "what goes on would soon break the bound"
    for _ in range(200):
        budget.step(10 * MS, 0, profiled=False)
    assert not budget.is_strained(), "there is headroom again"


def test_windows_that_fill_the_budget_strain_nobody():
    """They would make the tuner blind: with fewer measured steps its trials take as many times longer."""
    budget = OverheadBudget(0.01, warmup_steps=1, interval_steps=100)
    for step in range(2000):
        price_ms = 10 if step % 100 == 50 else 0
        budget.step(10 * MS, price_ms * MS + MS // 20, profiled=False)
        if price_ms:
            budget.window_taken(step, price_ms * MS)
        assert not budget.is_strained()
    assert budget.ratio > 0.01


def test_a_first_window_that_is_part_of_the_attach_strains_nobody():
    budget = OverheadBudget(0.01, warmup_steps=1, interval_steps=100)
    budget.may_be_early = True
    for step in range(2000):
        price_ms = 400 if step == 3 else 0
        budget.step(10 * MS, price_ms * MS + MS // 20, profiled=False)
        if price_ms:
            budget.window_taken(step, price_ms * MS)
        assert not budget.is_strained()
    assert budget.ratio > 0.01, "it is charged all the same"


def test_what_windows_leave_behind_on_a_device_is_theirs_and_strains_nobody():
    budget = OverheadBudget(0.01, warmup_steps=1, interval_steps=100, on_device=True)
    for step in range(2000):
        budget.step(10 * MS if step % 100 >= 20 else 11 * MS, MS // 20, profiled=False)
        if step % 100 == 0:
            budget.window_taken(step, MS)
        assert not budget.is_strained()
    assert budget.ratio > 0.01, "what they leave behind is charged all the same"


def test_how_slow_a_profiled_step_was_is_asked_of_the_processor_where_it_knows():
    budget = OverheadBudget(0.5, warmup_steps=1, interval_steps=10)
    for _ in range(9):
        budget.step(100, 2, profiled=False)
    busy = ThreadTime(spent_ns=60, usual_ns=50)
    assert budget.step(400, 2, profiled=True, thread_time=busy) == 2 + 10, "others made it so long"
    assert budget.step(60, 2, profiled=True, thread_time=busy) == 2 + 10, "it was no shorter by our doing"
    assert budget.step(400, 2, profiled=True, thread_time=ThreadTime(50, 60)) == 2
    odd = ThreadTime(spent_ns=110, usual_ns=5000)  # an evaluation lay in what is taken for usual
    assert budget.step(400, 2, profiled=True, thread_time=odd) == 2 + 110 - 98


def test_a_window_is_predicted_by_the_micro_batch():
    """One of eight micro-batches was dear; with one of one it pays, with one of eight not yet."""

    def first_after(micro_batches):
        budget = OverheadBudget(0.01, warmup_steps=1, interval_steps=10)
        for step in range(1, 10_000):
            budget.step(
                10 * MS, 80 * MS if step == 1 else 0, profiled=False, micro_batches=8 if step == 1 else micro_batches
            )
            if step == 1:
                budget.window_taken(1, 80 * MS)
            elif budget.wants_window(step + 1):
                return step + 1
        return None

    whole = first_after(8)
    assert whole == pytest.approx((1 + PRICE_MARGIN) * 80 * MS / (0.01 * 10 * MS), rel=0.05)
    share = FIXED_SHARE + (1 - FIXED_SHARE) / 8
    assert first_after(1) == pytest.approx((1 + share * PRICE_MARGIN) * 80 * MS / (0.01 * 10 * MS), rel=0.05)
    assert first_after(0) == whole, "where nobody counts them it is taken to cost as much"


@pytest.mark.parametrize(("own", "is_lent"), [(0, True), (450_000, False)])
def test_nothing_is_lent_to_who_spends_all_of_the_budget_anyway(own, is_lent):
    """Of 0.01 of 50 ms the always-on part leaves all or a tenth: a hundred steps pay 50 ms back, or 5 ms."""
    budget = OverheadBudget(0.01, warmup_steps=3, interval_steps=10)
    for step in range(2000):
        budget.step(50 * MS, own, profiled=False)
        if step == 0:
            budget.window_taken(0, 4 * MS)
    owed = round(budget.ratio_max * 2001 * 50 * MS) - budget.cost_ns
    budget.charge_start(max(0, owed))  # nothing is earned that is not spent
    budget.request(on_credit=True)
    assert any(budget.wants_window(step) for step in range(2001, 2021)) is is_lent


def test_the_attach_is_charged_and_is_nothing_that_goes_on():
    budget = OverheadBudget(0.01, warmup_steps=1, interval_steps=10)
    budget.charge_start(30 * MS)
    for _ in range(100):
        budget.step(50 * MS, 0, profiled=False)
    assert budget.cost_ns == 30 * MS
    assert budget._spare_ratio() == 0.01


def test_of_a_wait_for_other_ranks_is_charged_what_made_the_step_longer():
    """The job's next collective would have waited for the same rank, so most of a wait costs the job nothing."""
    budget = OverheadBudget(0.01, warmup_steps=3, interval_steps=50)
    for _ in range(9):
        budget.step(100 * MS, 0, profiled=False)
    assert budget.step(100 * MS, 0, profiled=False, waited_ns=40 * MS) == 0
    assert budget.step(115 * MS, 0, profiled=False, waited_ns=40 * MS) == 15 * MS
    assert budget.step(300 * MS, 2 * MS, profiled=False, waited_ns=40 * MS) == 42 * MS


def test_what_other_programs_had_makes_no_step_longer_than_usual():
    budget = OverheadBudget(0.01, warmup_steps=3, interval_steps=50)
    for _ in range(9):
        budget.step(100 * MS, 0, profiled=False, delay_ns=60 * MS)
    assert budget.step(250 * MS, 0, profiled=True, delay_ns=210 * MS) == 0
    assert budget.step(250 * MS, 0, profiled=True, delay_ns=180 * MS) == 30 * MS
    assert budget.step(200 * MS, 0, profiled=False, waited_ns=50 * MS, delay_ns=130 * MS) == 30 * MS
