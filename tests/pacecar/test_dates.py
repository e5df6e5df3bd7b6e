"""Times are in UTC, whatever the machine's time zone, and invalid times do not raise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.formatting.dates import day_text, file_stamp, second_text

NOON_NS = 1_764_072_189_999_999_999  # 2025-11-25 12:03:09.999999999 UTC


def test_a_time_is_written_in_utc_and_not_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    assert second_text(NOON_NS) == "2025-11-25 12:03:09 UTC"
    assert day_text(NOON_NS) == "2025-11-25"
    assert file_stamp(NOON_NS) == "20251125T120309Z"
    assert day_text(0) == "1970-01-01"


@given(st.integers())
def test_whatever_a_clock_said_it_is_some_text(wall_ns: int) -> None:
    assert second_text(wall_ns).endswith(" UTC") or second_text(wall_ns) == "an unknown time"


def test_what_is_beyond_the_calendar_is_no_date() -> None:
    assert day_text(2**63 * 1000) == second_text(-(2**70)) == "an unknown time"
