"""The budget keeps its ratio whatever windows cost, and lets them open on one grid."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.profiler.budget import FIRST_WINDOW_NS, Budget

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
    assert run(Budget(0.5, warmup_steps=3, interval_steps=20), 80) == [3, 23, 43, 63]


def test_a_request_brings_the_next_window_forward_to_the_grid():
    assert run(Budget(0.5, warmup_steps=3, interval_steps=50), 60, request_at=(11,))[:2] == [3, 13]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.sampled_from([0.002, 0.01, 0.05]))
def test_the_running_ratio_stays_within_the_budget_and_one_window_more(price_ms, ratio):
    budget = Budget(ratio, warmup_steps=3, interval_steps=10)
    taken = run(budget, 2000, price=price_ms * MS)
    wall = (2000 * 50 + len(taken) * price_ms) * MS
    assert budget.cost_ns <= ratio * wall + price_ms * MS
    assert budget.ratio is not None
    assert abs(budget.ratio * wall - budget.cost_ns) <= ratio * price_ms * MS + 1


def test_no_budget_no_window():
    assert run(Budget(0.0, warmup_steps=1, interval_steps=1), 200) == []


def test_the_slow_down_of_a_profiled_step_is_charged_and_luck_is_not_paid_back():
    budget = Budget(0.5, warmup_steps=1, interval_steps=10)
    for _ in range(9):
        assert budget.step(100, 2, profiled=False) == 2
    assert budget.step(130, 2, profiled=True) == 2 + 30
    assert budget.step(60, 2, profiled=True) == 2
    assert budget.cost_ns == 9 * 2 + 32 + 2


def test_the_first_window_waits_until_its_predicted_price_fits():
    budget = Budget(0.01, warmup_steps=3, interval_steps=10)
    first = run(budget, 100, own=0)[0]
    assert first * 50 * MS * 0.01 >= FIRST_WINDOW_NS
