"""Records refuse wrong ledgers, and sums are exact."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.records import LEDGER_HEADINGS, Absent, Failed, Knobs, Ledger, Ok, Sample, Snapshot

NANOSECONDS = st.integers(min_value=0, max_value=2**50)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    parts = {f"{heading}_ns": draw(NANOSECONDS) for heading in LEDGER_HEADINGS}
    overlapped = draw(NANOSECONDS)
    return Ledger(
        wall_ns=sum(parts.values()),
        **parts,
        overlapped_communication_ns=overlapped,
        communication_ns=parts["exposed_communication_ns"] + overlapped,
    )


@pytest.mark.slow
@given(ledgers())
def test_the_headings_sum_to_the_wall_time(ledger: Ledger) -> None:
    assert sum(ledger.parts().values()) == ledger.wall_ns
    assert tuple(ledger.parts()) == LEDGER_HEADINGS


@pytest.mark.slow
@given(ledgers(), ledgers(), ledgers())
def test_adding_up_is_exact_and_in_any_order(a: Ledger, b: Ledger, c: Ledger) -> None:
    total = a + b + c
    assert total == c + (b + a)
    assert total.wall_ns == a.wall_ns + b.wall_ns + c.wall_ns
    assert total + Ledger(wall_ns=0) == total


@pytest.mark.slow
@given(ledgers(), st.sampled_from(LEDGER_HEADINGS), st.integers(1, 10**6))
def test_a_heading_off_by_anything_is_refused(ledger: Ledger, heading: str, off_ns: int) -> None:
    fields = msgspec.structs.asdict(ledger)
    for change in (off_ns, -off_ns):
        with pytest.raises(ValueError, match="sum to"):
            Ledger(**{**fields, f"{heading}_ns": fields[f"{heading}_ns"] + change})


def test_a_wait_for_data_that_nobody_could_see_is_no_part_and_no_zero() -> None:
    unseen, seen = Ledger(wall_ns=5, compute_ns=5, data_wait_ns=None), Ledger(wall_ns=3, data_wait_ns=3)
    assert "data_wait" not in unseen.parts()
    assert (unseen + unseen).data_wait_ns is None
    assert (unseen + seen).parts()["data_wait"] == (seen + unseen).parts()["data_wait"] == 3
    assert msgspec.json.decode(msgspec.json.encode(unseen), type=Ledger) == unseen


def test_the_loops_own_host_time_is_a_part_of_the_host_bound() -> None:
    assert (Ledger(wall_ns=5, host_bound_ns=5, loop_host_ns=5) + Ledger(wall_ns=0)).loop_host_ns == 5
    for part in (-1, 6):
        with pytest.raises(ValueError, match="not a part of 5 ns"):
            Ledger(wall_ns=5, host_bound_ns=5, loop_host_ns=part)


def test_a_negative_part_is_refused_even_when_the_sum_is_right() -> None:
    with pytest.raises(ValueError, match="sum to"):
        Ledger(wall_ns=10, compute_ns=11, unknown_ns=-1)
    with pytest.raises(ValueError, match="overlapped communication is -1"):
        Ledger(wall_ns=1, exposed_communication_ns=1, communication_ns=0, overlapped_communication_ns=-1)


def test_a_wrong_ledger_cannot_be_decoded_either() -> None:
    with pytest.raises(msgspec.ValidationError, match="sum to"):
        msgspec.json.decode(b'{"wall_ns": 5, "compute_ns": 4}', type=Ledger)


def test_no_communication_has_no_overlap_ratio_and_none_overlapped_has_zero() -> None:
    assert Ledger(wall_ns=1, compute_ns=1).overlap_ratio is None
    exposed = Ledger(wall_ns=4, exposed_communication_ns=4, communication_ns=4)
    assert exposed.overlap_ratio == 0.0
    half = Ledger(
        wall_ns=4, compute_ns=2, exposed_communication_ns=2, communication_ns=4, overlapped_communication_ns=2
    )
    assert half.overlap_ratio == 0.5


def test_a_snapshot_gives_what_was_read_in_collector_order_also_of_a_failed_collector() -> None:
    one, zero = Sample("pacecar_a", (), 1), Sample("pacecar_b", ("x",), 0)
    outcomes = {"first": Ok((one,)), "second": Absent("no such file"), "third": Failed("half of it", (zero,))}
    snapshot = Snapshot(tick=1, started_ns=0, wall_ns=0, lateness_ns=0, outcomes=outcomes, durations_ns={})
    assert snapshot.samples() == (one, zero)
    assert (list(snapshot.of("pacecar_b")), list(snapshot.of("pacecar_c"))) == ([zero], [])
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot


def test_default_knobs_are_not_shared_between_records() -> None:
    Knobs().values["bucket_bytes"] = 1
    assert Knobs().values == {}
