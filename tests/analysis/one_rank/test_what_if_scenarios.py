"""No rung of the ladder promises what a resource that is busy anyway forbids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.analysis.one_rank.what_if_scenarios import what_if
from pacecar.records import LEDGER_HEADINGS, Ledger
from tests.analysis.jobs import BEAT_NS, make_job, play
from tests.analysis.models import analyzed


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    parts = {heading + "_ns": draw(st.integers(0, 10**9)) for heading in LEDGER_HEADINGS}
    overlapped = draw(st.integers(0, parts["compute_ns"]))
    return Ledger(
        wall_ns=sum(parts.values()),
        **parts,
        overlapped_communication_ns=overlapped,
        communication_ns=overlapped + parts["exposed_communication_ns"],
    )


@pytest.mark.slow
@given(ledgers(), st.none() | st.integers(0, 20))
def test_no_rung_is_slower_or_faster_than_the_busy_resource(ledger: Ledger, steps: int | None) -> None:
    for scenario in what_if(ledger, steps, is_pipeline=False):
        count = steps or 1
        assert scenario.step_ns * count <= ledger.wall_ns * (1 + 1e-12) + 1
        assert scenario.step_ns * count >= max(ledger.compute_ns, ledger.communication_ns) * (1 - 1e-12) - 1
        assert scenario.saved_ns >= 0
        assert scenario.speedup >= 1
        assert scenario.note


@pytest.mark.slow
@given(ledgers())
def test_all_is_no_slower_than_each(ledger: Ledger) -> None:
    found = {scenario.name: scenario.step_ns for scenario in what_if(ledger, None, is_pipeline=False)}
    assert all(found["at_most_all"] <= step for step in found.values())


def test_nothing_has_no_ladder() -> None:
    assert what_if(Ledger(wall_ns=0), None, is_pipeline=False) == []


def test_hiding_communication_stops_at_the_link() -> None:
    ledger = Ledger(
        wall_ns=100, compute_ns=40, exposed_communication_ns=60, communication_ns=90, overlapped_communication_ns=30
    )
    hidden = what_if(ledger, None, is_pipeline=False)[0]
    assert (hidden.name, hidden.step_ns) == ("at_most_communication_hidden", pytest.approx(90))
    assert "communication itself binds" in hidden.note


def test_a_straggler_as_fast_as_the_median_saves_its_delay() -> None:
    """Every step of ten beats has three in which two ranks wait for the third, and eight steps are no chance."""
    drawings = play("AAAAAAAA", [[5] * 8, [8] * 8, [5] * 8])
    marks = [(at, at + 10) for at in range(0, 80, 10)]
    job = analyzed(make_job(drawings, steps=marks, world_size=3))
    found = {scenario.name: scenario for scenario in job.what_if}
    assert found["straggler_median"].step_ns == pytest.approx(7 * BEAT_NS, rel=1e-3)
    assert found["communication_hidden"].step_ns == pytest.approx(8 * BEAT_NS, rel=1e-3)
