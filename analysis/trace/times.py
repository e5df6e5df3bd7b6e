"""Converts trace times from microseconds, as numbers or digits, to exact integers of nanoseconds.

kineto writes microseconds.  As floats they lose nanoseconds: 1694128201436255.123 can hold only quarters of a
microsecond, and 12.001 * 1000 is not 12001.  Integers are exact.  A float is exact if its neighbours are less than a
nanosecond away and its fraction is scaled separately.  All other times are read from their digits.

    integer 1669783687570204     times 1000
    float   4458676524648.797    below FLOAT_EXACT_US: whole part times 1000, plus the fraction times 1000, rounded
    else    1694128201436255.123 its digits

Half nanoseconds round to even.  Left out: what an event is (`events`).
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["FLOAT_EXACT_US", "TIME_MAX_NS", "ImpreciseTimesError", "from_digits", "from_numbers"]

FLOAT_EXACT_US = float(1 << 43)
"""Below this, neighbouring doubles are less than a nanosecond apart (2**(42 - 52) us): 101 days of microseconds."""

TIME_MAX_NS = 1 << 62
"""No real time or duration is longer (146 years), and the sum of two fits into 64 bits."""

Times = tuple[NDArray[np.int64], NDArray[np.bool_] | None]
"""Nanoseconds, and which of them are sound; None if all are."""

_INTEGERS = msgspec.json.Decoder(list[int])
_DOT, _COMMA = 0x2E, 0x2C


class ImpreciseTimesError(Exception):
    """These times are floats that cannot hold their nanoseconds; their digits are needed."""


def from_numbers(values: Sequence[int | float | None]) -> Times:
    """Return microseconds as nanoseconds; None is not sound.  Raises ImpreciseTimesError."""
    if not values:
        return np.empty(0, dtype=np.int64), None
    numbers = np.array(values)  # the dtype shows which types were among the values
    if numbers.dtype == np.int64 and _largest(numbers) < TIME_MAX_NS // 1000:
        return numbers * 1000, None
    if numbers.dtype == np.float64:
        if not _largest(numbers) < FLOAT_EXACT_US:  # or NaN
            raise ImpreciseTimesError
        whole = np.floor(numbers)
        return whole.astype(np.int64) * 1000 + np.rint((numbers - whole) * 1000).astype(np.int64), None
    return _one_by_one([None if value is None else str(value) for value in values])


def from_digits(values: Sequence[bytes | msgspec.Raw]) -> Times:
    """Return microseconds in digits, quoted or not, as nanoseconds; an empty value is not sound."""
    joined = b",".join(values)
    numbers = _decimals(joined) if joined else None
    if numbers is not None:
        return numbers, None
    return _one_by_one([bytes(value).decode("latin-1").strip('"') for value in values])


def _decimals(joined: bytes) -> NDArray[np.int64] | None:
    """Return numbers of at most three decimals (nearly all) in thousandths; None if there is any other number."""
    letters = np.frombuffer(joined, dtype=np.uint8)
    ends = np.append(np.flatnonzero(letters == _COMMA), len(letters))
    dots = np.flatnonzero(letters == _DOT)
    of = np.searchsorted(ends, dots)
    places = np.zeros(len(ends), dtype=np.int64)
    places[of] = ends[of] - dots - 1
    if len(dots) > len(np.unique(of)) or (len(dots) and int(places.max()) > 3):
        return None
    try:
        numbers = np.array(_INTEGERS.decode(b"[" + joined.replace(b".", b"") + b"]"), dtype=np.int64)
    except (msgspec.DecodeError, OverflowError):
        return None
    factors = 10 ** (3 - places)
    if len(numbers) != len(ends) or _largest(numbers * factors.astype(np.float64)) >= TIME_MAX_NS:
        return None
    scaled: NDArray[np.int64] = numbers * factors
    return scaled


def _largest(numbers: NDArray[np.int64] | NDArray[np.float64]) -> int | float:
    top, bottom = numbers.max(), numbers.min()
    return max(float(top), -float(bottom)) if numbers.dtype == np.float64 else max(int(top), -int(bottom))


def _one_by_one(texts: Sequence[str | None]) -> Times:
    exact = [None if text is None else _exact(text) for text in texts]
    sound = np.array([number is not None for number in exact], dtype=np.bool_)
    return np.array([number or 0 for number in exact], dtype=np.int64), None if sound.all() else sound


def _exact(text: str) -> int | None:
    try:
        number = Decimal(text)
        if not number.is_finite() or number.adjusted() > 18:  # keeps `int` from building an integer of a billion digits
            return None
        scaled = int((number * 1000).to_integral_value(ROUND_HALF_EVEN))
    except InvalidOperation:
        return None
    return scaled if abs(scaled) < TIME_MAX_NS else None
