"""Nanoseconds from what a file spells, by whichever way is fast enough to be exact."""

from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.analysis.trace.times import FLOAT_EXACT_US, TIME_MAX_NS, ImpreciseTimesError, from_digits, from_numbers


def exact(text):
    return round(Fraction(text) * 1000)


DECIMALS = st.decimals(-(10**12), 10**15, places=None, allow_nan=False, allow_infinity=False).map(str)
MICROSECONDS = st.builds(
    lambda whole, fraction, places: f"{whole}.{fraction:0{places}}"[: len(str(whole)) + 1 + places].rstrip("."),
    st.integers(0, 1 << 51),
    st.integers(0, 999),
    st.integers(0, 3),
)


@pytest.mark.slow
@given(st.lists(DECIMALS | MICROSECONDS, min_size=1))
def test_digits_are_rounded_once_and_to_even(texts):
    found, sound = from_digits([msgspec.Raw(text.encode()) for text in texts])
    assert sound is None
    assert found.tolist() == [exact(text) for text in texts]


@pytest.mark.slow
@given(st.lists(MICROSECONDS, min_size=1))
def test_numbers_below_the_limit_are_exact_and_above_it_are_refused(texts):
    numbers = [float(text) if "." in text else int(text) for text in texts]
    try:
        found, sound = from_numbers(numbers)
    except ImpreciseTimesError:
        assert any(isinstance(number, float) for number in numbers)
        assert max(numbers) >= FLOAT_EXACT_US
    else:
        assert sound is None
        assert found.tolist() == [exact(text) for text in texts]


@pytest.mark.parametrize(
    "text", ["", "x", "1e400", "NaN", "Infinity", "1e18", "-1e18", "null", "1 2", "0x10", "1" * 5000]
)
def test_what_is_no_time_is_not_sound_and_harms_no_other(text):
    found, sound = from_digits([b"1.5", text.encode(), b"2"])
    assert sound.tolist() == [True, False, True]
    assert found.tolist() == [1500, 0, 2000]
    assert np.abs(found).max() < TIME_MAX_NS


def test_missing_times_are_not_sound():
    assert from_numbers([1, None])[1].tolist() == [True, False]
    assert from_digits([b"", b"1"])[1].tolist() == [False, True]


def test_no_times_are_no_times():
    for read in (from_numbers, from_digits):
        found, sound = read([])
        assert (found.tolist(), sound) == ([], None)
        assert found.dtype == np.int64


def test_zero_is_a_time():
    assert (
        from_numbers([0])[0].tolist() == from_numbers([0.0])[0].tolist() == from_digits([b"0.000"])[0].tolist() == [0]
    )
