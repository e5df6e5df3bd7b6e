"""Tables on a terminal fit, show more if there is room, and have no control characters."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from pacecar.formatting.quantities import unit_for
from pacecar.formatting.tables import Table, TableColumn
from pacecar.formatting.terminal_tables import terminal_table

MS = unit_for([1e6])


def lines_of(table: Table, width: int, encoding: str = "utf-8", marks: list[Text] | None = None) -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, color_system=None, highlight=False, markup=False)
    for line in terminal_table(table, console, marks or []):
        console.print(line)
    stream.seek(0)
    return stream.read().splitlines()


def table_of(name: str = "gemm") -> Table:
    columns = [
        TableColumn.text("kernel", [name, "copy", "all"]),
        TableColumn.time("time", MS, [2e6, 5e5, 2.5e6]),
        TableColumn.count("count", [12345, None, 12345], "wide"),
        TableColumn.lines("launched by", [("aten::mm [2, 3]", "model.py"), (), ()], most=40),
        TableColumn.text("evidence", ["page only", "", ""], "page"),
    ]
    return Table("Kernels", columns, "What it means.", about="2", unit=MS, sums=1)


def test_times_in_the_unit_of_the_title_are_numbers_and_sums_stand_apart() -> None:
    assert lines_of(table_of(), 80) == [
        "Kernels (2), in ms",
        "kernel  time",
        "────────────",
        "gemm    2.00",
        "  aten::mm [2, 3]",
        "  model.py",
        "copy    0.50",
        "",
        "all     2.50",
        "What it means.",
    ]


def test_a_wide_terminal_shows_more_columns_as_far_as_they_fit() -> None:
    assert lines_of(table_of(), 120)[1:4] == [
        "kernel  time   count",
        "────────────────────",
        "gemm    2.00  12 345",
    ]
    assert "count" not in lines_of(table_of("k" * 110), 120)[1]


@pytest.mark.parametrize("width", [24, 40, 80])
def test_the_name_is_cut_and_not_the_figures(width: int) -> None:
    lines = lines_of(table_of("kernel_" * 40), width)
    assert max(map(len, lines)) <= width
    assert lines[3].endswith("…  2.00")


def test_wide_characters_take_the_cells_that_they_have() -> None:
    lines = lines_of(table_of("\N{CJK UNIFIED IDEOGRAPH-6838}" * 40), 40)
    assert lines[3].endswith("…   2.00") or lines[3].endswith("…  2.00")


def test_a_terminal_without_unicode_gets_none() -> None:
    assert all(line.isascii() for line in lines_of(table_of("kernel_" * 40), 40, "ascii"))


def test_what_ends_the_rows_has_its_room() -> None:
    table = Table("Ranks", [TableColumn.text("rank", ["r" * 60, "b"])])
    lines = lines_of(table, 40, marks=[Text("#" * 12), Text("=" * 6)])
    assert lines[3].endswith("…  " + "#" * 12)
    assert len(lines[3]) == 40
    assert lines[4].endswith(" =" + "=" * 5)


def test_what_others_wrote_steers_no_terminal() -> None:
    (text, _), *_ = TableColumn.text("name", ["a\x1b[2Jb\nc"]).cells
    assert text.isprintable()
