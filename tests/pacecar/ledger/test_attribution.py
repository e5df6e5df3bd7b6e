"""The ledger of drawn windows: one character is 10 ns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.ledger.attribution import (
    REST,
    LossCause,
    Work,
    attribute,
    attribute_phases,
    attribute_windows,
    charge,
)
from pacecar.ledger.intervals import intervals
from pacecar.records import LEDGER_HEADINGS, Ledger

CELL = 10
LETTERS = {
    "c": "compute_ns",
    "o": "compute_ns",
    "e": "exposed_communication_ns",
    "p": "exposed_copy_ns",
    "d": "data_wait_ns",
    "h": "host_bound_ns",
    "s": "optimizer_host_ns",
    "k": "checkpoint_ns",
    "?": "unknown_ns",
}


def spans(picture, at=0):
    """Each '#' or '=' is a span, so rows have both touching and separate ones."""
    return intervals((at + i * CELL, at + (i + 1) * CELL) for i, c in enumerate(picture) if c != ".")


def drawn(pictures, kind):
    return {kind(name): spans(picture) for name, picture in pictures.items()}


@pytest.mark.parametrize(
    ("work", "causes", "observed", "charged"),
    [
        ({"compute": "####...."}, {}, None, "cccchhhh"),
        ({"compute": "####....", "communication": "..####.."}, {}, None, "ccooeehh"),
        ({"communication": "####....", "copy": "..####.."}, {}, None, "eeeepphh"),
        ({"compute": ".##.", "other": "####"}, {}, None, "?cc?"),
        ({}, {"data_wait": "##..", "optimizer_host": "..##"}, None, "ddss"),
        ({"compute": "##.."}, {"data_wait": "####"}, None, "ccdd"),
        ({}, {"checkpoint": "####", "data_wait": ".##.", "optimizer_host": "####"}, None, "kddk"),
        ({"compute": "..##"}, {}, (20, 40), "??cc"),
        ({}, {"optimizer_host": "####", "host_bound": "#..."}, (20, 40), "h?ss"),
        ({}, {}, (0, 0), "????"),
    ],
)
def test_drawn_windows(work, causes, observed, charged):
    ledger = attribute(drawn(work, Work), (0, len(charged) * CELL), causes=drawn(causes, LossCause), observed=observed)
    expected = dict.fromkeys(LETTERS.values(), 0)
    for letter in charged:
        expected[LETTERS[letter]] += CELL
    assert {name: getattr(ledger, name) for name in expected} == expected
    assert ledger.overlapped_communication_ns == charged.count("o") * CELL
    assert ledger.communication_ns == (charged.count("o") + charged.count("e")) * CELL


def test_overlapping_kernels_of_one_kind_count_once():
    rows = intervals([(0, 100), (20, 50), (40, 120), (120, 130)])
    assert attribute({Work.COMPUTE: rows}, (0, 200)) == Ledger(wall_ns=200, compute_ns=130, host_bound_ns=70)


def test_work_is_clipped_to_the_window():
    rows = intervals([(-50, 10), (90, 400)])
    assert attribute({Work.COMPUTE: rows}, (0, 100)) == Ledger(wall_ns=100, compute_ns=20, host_bound_ns=80)


def test_phases_cut_the_ledger_and_the_first_named_has_the_instant():
    work = drawn({"compute": "###.##.."}, Work)
    phases = {"forward": spans("..##...."), "optimizer": spans("...###..")}
    found = attribute_phases(work, (0, 80), phases)
    assert found["forward"] == Ledger(wall_ns=20, compute_ns=10, host_bound_ns=10)
    assert found["optimizer"] == Ledger(wall_ns=20, compute_ns=20)
    assert found[REST] == Ledger(wall_ns=40, compute_ns=20, host_bound_ns=20)


rows_strategy = st.lists(
    st.tuples(st.integers(-200, 1200), st.integers(0, 300)).map(lambda p: (p[0], p[0] + p[1])), max_size=12
).map(intervals)
work_strategy = st.dictionaries(st.sampled_from(list(Work)), rows_strategy)
cause_strategy = st.dictionaries(st.sampled_from(list(LossCause)), rows_strategy)


def brute_force(work, causes, start, end):
    """One nanosecond at a time, by the words of the priority."""

    def at(rows, instant):
        return any(a <= instant < b for a, b in rows.tolist())

    order = [
        *((work, kind, heading) for kind, heading in (
            (Work.COMPUTE, "compute"), (Work.COMMUNICATION, "exposed_communication"),
            (Work.COPY, "exposed_copy"), (Work.OTHER, "unknown"))),
        *((causes, cause, cause.value) for cause in (
            LossCause.STOPPED, LossCause.DATA_WAIT, LossCause.CHECKPOINT, LossCause.HOOK, LossCause.OPTIMIZER)),
    ]  # fmt: skip
    parts = {}
    for instant in range(start, end):
        heading = next((h for table, key, h in order if key in table and at(table[key], instant)), "host_bound")
        parts[heading] = parts.get(heading, 0) + 1
    return parts


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(work_strategy, cause_strategy)
def test_equals_a_count_of_every_nanosecond(work, causes):
    ledger = attribute(work, (500, 700), causes=causes)
    assert {k: v for k, v in ledger.parts().items() if v} == brute_force(work, causes, 500, 700)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(work_strategy, cause_strategy, st.integers(1, 999), st.randoms(use_true_random=False))
def test_a_split_window_adds_up_and_the_order_of_spans_is_irrelevant(work, causes, cut, random):
    whole = attribute(work, (0, 1000), causes=causes)
    assert whole.wall_ns == sum(whole.parts().values()) == 1000
    assert attribute(work, (0, cut), causes=causes) + attribute(work, (cut, 1000), causes=causes) == whole
    shuffled = {}
    for kind, rows in work.items():
        order = list(range(len(rows)))
        random.shuffle(order)
        shuffled[kind] = rows[np.array(order, dtype=int)]
    assert attribute(shuffled, (0, 1000), causes=causes) == whole


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(work_strategy, st.dictionaries(st.sampled_from(["a", "b", "c"]), rows_strategy))
def test_phases_always_add_up_to_the_window(work, phases):
    total = Ledger(wall_ns=0)
    for ledger in attribute_phases(work, (0, 1000), phases).values():
        total += ledger
    assert total == attribute(work, (0, 1000))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    work_strategy,
    cause_strategy,
    st.lists(st.tuples(st.integers(-100, 1100), st.integers(0, 400)).map(lambda p: (p[0], p[0] + p[1])), max_size=6),
    st.none() | st.tuples(st.integers(0, 500), st.integers(0, 500)).map(lambda p: (p[0], p[0] + p[1])),
)
def test_many_windows_in_one_sweep_are_each_window_alone(work, causes, windows, observed):
    alone = [attribute(work, window, causes=causes, observed=observed or (-100, 1500)) for window in windows]
    assert attribute_windows(work, windows, causes=causes, observed=observed or (-100, 1500)) == alone


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(work_strategy, cause_strategy)
def test_the_timeline_adds_up_to_the_ledger(work, causes):
    times, headings = charge(work, (0, 1000), causes=causes)
    assert (times[0], times[-1]) == (0, 1000)
    assert (np.diff(times) > 0).all()
    assert (headings[1:] != headings[:-1]).all(), "neighbours differ"
    parts = dict.fromkeys(LEDGER_HEADINGS, 0)
    for heading, duration in zip(headings, np.diff(times), strict=True):
        parts[LEDGER_HEADINGS[heading]] += int(duration)
    assert parts == attribute(work, (0, 1000), causes=causes).parts()


def test_no_window_is_no_ledger_and_an_empty_one_is_all_zeros():
    assert attribute_windows({}, []) == []
    assert attribute_windows({Work.COMPUTE: intervals([(0, 9)])}, [(5, 5)]) == [Ledger(wall_ns=0)]
