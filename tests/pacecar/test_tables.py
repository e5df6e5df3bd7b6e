"""Tables as lines: columns are aligned whatever they contain, and have no control characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pacecar.formatting.tables import TextColumn, fact_lines, table_lines

COLUMNS = (TextColumn("knob", 12), TextColumn("best", 6, is_number=True), TextColumn("why"))


def test_text_stands_at_the_left_numbers_at_the_right_and_the_last_column_has_no_end() -> None:
    assert list(table_lines(COLUMNS, [("micro_batch", "4", "a reason"), ("a" * 13, "1234567", "")])) == [
        "knob            best  why",
        "micro_batch        4  a reason",
        "aaaaaaaaaaa…  12345…",
    ]
    assert list(fact_lines([("key", "abc"), ("versions", "torch 2")])) == ["key       abc", "versions  torch 2"]
    assert list(table_lines(COLUMNS, [("a", "1", "b" * 30)], 24))[1] == "a                  1  b…"


@given(st.lists(st.tuples(st.text(), st.text(), st.text())))
def test_every_cell_is_in_its_column_and_printable(rows: list[tuple[str, str, str]]) -> None:
    head, *lines = table_lines(COLUMNS, rows)
    assert head.index("why") == 22
    assert len(lines) == len(rows)
    for line in lines:
        assert line.isprintable()
        assert not line[12:14].strip()
        assert not line[20:22].strip()
