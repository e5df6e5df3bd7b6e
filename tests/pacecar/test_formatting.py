"""Formatted numbers, dates and tables: zero is a measurement, rounding hides nothing, columns stand whatever comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.formatting.dates import day_text, file_stamp, second_text
from pacecar.formatting.quantities import (
    bandwidth,
    duration,
    gibibytes,
    gigabits,
    large_count,
    percent,
    plural,
    short_count,
    short_duration,
    short_percent,
    short_size,
    size_text,
    unit_for,
)
from pacecar.formatting.tables import TextColumn, fact_lines, table_lines


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ns"), (999, "999 ns"), (1_500, "1.5 us"), (2_500_000, "2.50 ms"), (9_999_000_000, "9999.00 ms"),
        (12_345_000_000, "12.345 s"), (None, "-"), (-1_500, "-1.5 us"),
    ],
)  # fmt: skip
def test_a_time_is_written_in_its_own_unit(value: int | None, text: str) -> None:
    assert duration(value) == text


@pytest.mark.slow
@given(st.integers(0, 10**14), st.integers(0, 10**14))
def test_what_is_not_nothing_never_looks_like_nothing(small: int, large: int) -> None:
    text = unit_for([large]).text(small)
    digits = text.split()[0].replace(".", "").strip("0")
    assert (digits == "") == (small == 0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (size_text(None), "-"), (size_text(0), "0 B"), (size_text(25 * 2**20), "25 MiB"), (size_text(1536), "1.5 KiB"),
        (bandwidth(None), "-"), (bandwidth(0.0), "0.0 kB/s"), (bandwidth(32.14e9), "32.1 GB/s"),
        (bandwidth(0.2e9), "200.0 MB/s"), (gigabits(200e9), "200 Gbit/s"), (gigabits(2.5e9), "2.5 Gbit/s"),
        (gibibytes(79.65 * 2**30), "80 GiB"),
    ],
)  # fmt: skip
def test_quantities_are_written_as_the_field_writes_them(text: str, wanted: str) -> None:
    assert text == wanted


def test_shares_and_counts_of_things() -> None:
    assert [percent(None), percent(0.0), percent(0.1234), percent(0.1234, signed=True)] == [
        "-", "0.0 %", "12.3 %", "+12.3 %",
    ]  # fmt: skip
    assert percent(0.00123, digits=2) == "0.12 %"
    assert [large_count(999), large_count(1_234_567), large_count(42_000_000)] == ["999", "1.23 M", "42 M"]
    assert [plural(0, "step"), plural(1, "step"), plural(2, "step")] == ["0 steps", "1 step", "2 steps"]


def test_in_few_cells_what_is_not_known_is_a_dash_and_zero_is_zero() -> None:
    assert [f(None) for f in (short_count, short_size, short_duration, short_percent)] == ["-"] * 4
    assert [f(0) for f in (short_count, short_size, short_duration, short_percent)] == ["0", "0B", "0us", "0%"]
    assert (short_count(1_234_567), short_size(93.8 * 2**30), short_duration(0.0123), short_percent(0.256)) == (
        "1.2M",
        "93.8G",
        "12.3ms",
        "26%",
    )


NOON_NS = 1_764_072_189_999_999_999  # 2025-11-25 12:03:09.999999999 UTC


def test_a_time_is_written_in_utc_and_not_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    assert second_text(NOON_NS) == "2025-11-25 12:03:09 UTC"
    assert day_text(NOON_NS) == "2025-11-25"
    assert file_stamp(NOON_NS) == "20251125T120309Z"
    assert day_text(0) == "1970-01-01"


@pytest.mark.slow
@given(st.integers())
def test_whatever_a_clock_said_it_is_some_text(wall_ns: int) -> None:
    assert second_text(wall_ns).endswith(" UTC") or second_text(wall_ns) == "an unknown time"


def test_what_is_beyond_the_calendar_is_no_date() -> None:
    assert day_text(2**63 * 1000) == second_text(-(2**70)) == "an unknown time"


COLUMNS = (TextColumn("knob", 12), TextColumn("best", 6, is_number=True), TextColumn("why"))


def test_text_stands_at_the_left_numbers_at_the_right_and_the_last_column_has_no_end() -> None:
    assert list(table_lines(COLUMNS, [("micro_batch", "4", "a reason"), ("a" * 13, "1234567", "")])) == [
        "knob            best  why",
        "micro_batch        4  a reason",
        "aaaaaaaaaaa…  12345…",
    ]
    assert list(fact_lines([("key", "abc"), ("versions", "torch 2")])) == ["key       abc", "versions  torch 2"]
    assert list(table_lines(COLUMNS, [("a", "1", "b" * 30)], 24))[1] == "a                  1  b…"


@pytest.mark.slow
@given(st.lists(st.tuples(st.text(), st.text(), st.text())))
def test_every_cell_is_in_its_column_and_printable(rows: list[tuple[str, str, str]]) -> None:
    head, *lines = table_lines(COLUMNS, rows)
    assert head.index("why") == 22
    assert len(lines) == len(rows)
    for line in lines:
        assert line.isprintable()
        assert not line[12:14].strip()
        assert not line[20:22].strip()
