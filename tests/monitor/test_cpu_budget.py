"""The daemon stays within its CPU budget, reports it, and does not flap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.sampling.cpu_budget import UP_RATIO, CpuBudget, GlanceControl
from tests.kit.own_samples import value_of, values_of

INTERVAL_NS = 15 * NS_PER_SECOND


class Plant:
    """A daemon that costs `base` of a processor and `each` more for every glance a second."""

    def __init__(self, budget, base, each):
        self.budget, self.base, self.each = budget, base, each
        self.cpu_ns = self.glance_ns = self.now_ns = 0
        self.changes = []
        self.tells = 1.0  # share of what glances cost that they know of
        budget.update(0, 0, 0)

    def run(self, looks):
        for _ in range(looks):
            glances = self.each * self.budget.rate
            self.now_ns += INTERVAL_NS
            self.cpu_ns += int(INTERVAL_NS * (self.base + glances))
            self.glance_ns += int(INTERVAL_NS * glances * self.tells)
            self.changes.append(self.budget.update(self.cpu_ns, self.glance_ns, self.now_ns))
        return self.budget.rate


def test_within_the_budget_nothing_changes():
    plant = Plant(CpuBudget(0.05, 10.0, interval_ns=INTERVAL_NS), base=0.01, each=0.001)
    assert plant.run(20) == 10.0
    assert {change.direction for change in plant.changes} == {None}
    assert plant.changes[0].cpu_ratio == pytest.approx(0.02)


def test_over_the_budget_it_halves_the_rate_until_it_fits():
    plant = Plant(CpuBudget(0.05, 10.0, interval_ns=INTERVAL_NS), base=0.01, each=0.01)
    assert plant.run(10) == 2.5
    assert [change.rate for change in plant.changes[:4]] == [5.0, 2.5, 2.5, 2.5]


def test_when_the_ticks_alone_are_over_it_there_are_no_glances():
    plant = Plant(CpuBudget(0.05, 10.0, interval_ns=INTERVAL_NS), base=0.2, each=0.001)
    assert plant.run(10) == 0.0
    assert plant.changes[-1].cpu_ratio == pytest.approx(0.2)


def test_it_goes_up_again_when_it_fits_and_also_from_none():
    plant = Plant(CpuBudget(0.05, 10.0, interval_ns=INTERVAL_NS), base=0.2, each=0.001)
    plant.run(10)
    plant.base = 0.01
    assert plant.run(10) == 10.0
    assert [change.direction for change in plant.changes[-10:]] == ["up"] * 4 + [None] * 6


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.floats(0.001, 1), st.floats(0, 0.2), st.floats(0, 0.05))
def test_it_settles_under_a_steady_load_at_the_highest_step_that_fits(allowed, base, each):
    plant = Plant(CpuBudget(allowed, 10.0, interval_ns=INTERVAL_NS), base, each)
    rate = plant.run(10)
    assert plant.run(10) == rate
    assert {change.direction for change in plant.changes[-10:]} == {None}
    if rate > 0:
        assert base + each * rate <= allowed * (1 + 1e-6)
    if rate < 10:
        higher = 2 * rate or 1.25
        assert base + each * higher > allowed * UP_RATIO * (1 - 1e-6)


def test_costs_that_no_glance_tells_of_do_not_make_it_flap():
    """Other threads make the calls, so every step up looks free but is not."""
    plant = Plant(CpuBudget(0.05, 10.0, interval_ns=INTERVAL_NS), base=0.01, each=0.006)
    plant.tells = 0.0
    plant.run(500)
    changes = [change.direction for change in plant.changes if change.direction is not None]
    assert len(changes) < 40
    plant.each = 0.001
    assert plant.run(2 * 64) == 10.0


def test_no_glances_wanted_are_never_made():
    plant = Plant(CpuBudget(0.05, 0.0, interval_ns=INTERVAL_NS), base=0.2, each=0.1)
    assert plant.run(3) == 0.0
    assert {change.direction for change in plant.changes} == {None}


def test_it_looks_once_an_interval_only():
    budget = CpuBudget(0.05, 10.0, interval_ns=INTERVAL_NS)
    assert budget.update(0, 0, 0) is None
    assert budget.update(10**12, 0, INTERVAL_NS - 1) is None
    assert budget.update(0, 0, INTERVAL_NS).rate == 10.0
    assert budget.update(0, 0, INTERVAL_NS + NS_PER_SECOND) is None


def test_another_budget_is_in_force_at_once_and_what_was_counted_stays():
    control = GlanceControl(0.05, 10.0, interval_ns=INTERVAL_NS)
    assert "pacecar_daemon_cpu_utilization_ratio" not in {s.metric for s in control.own_samples()}, "before a look"
    control.update(0, 0, 0)
    control.update(INTERVAL_NS // 10, 0, INTERVAL_NS)
    assert control.rate == 5.0
    control.set_limits(0.05, 10.0)
    assert control.rate == 5.0, "the same limits change nothing"
    control.set_limits(0.5, 10.0)
    assert control.rate == value_of(control, "pacecar_daemon_glance_frequency_hertz") == 10.0
    assert value_of(control, "pacecar_daemon_cpu_budget_ratio") == 0.5
    assert value_of(control, "pacecar_daemon_cpu_utilization_ratio") == 0.1
    assert values_of(control, "pacecar_daemon_glance_changes_total") == {"down": 1, "up": 0}
