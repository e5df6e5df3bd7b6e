"""One bar for a ledger and for its headings in seconds, as the daemon's document has them."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("rich", reason="rich is not installed: pip install 'pacecar[top]'")

from rich.console import Console

from pacecar.formatting.ledger_bar import ledger_bar, ledger_legend
from pacecar.records import Ledger

LEDGER = Ledger(wall_ns=400, compute_ns=300, data_wait_ns=75, unknown_ns=25)
SECONDS = {"unknown": 25e-9, "data_wait": 75e-9, "compute": 300e-9}
CONSOLE = Console(file=io.StringIO(), color_system=None)


@pytest.mark.parametrize("width", [1, 7, 80, 201])
def test_seconds_in_any_order_are_drawn_as_the_ledger_is(width: int) -> None:
    assert ledger_bar(SECONDS, width, CONSOLE).plain == ledger_bar(LEDGER, width, CONSOLE).plain


def test_a_legend_names_what_is_there_and_saves_cells_where_it_is_asked_to() -> None:
    (wide,) = ledger_legend(LEDGER, 80, CONSOLE)
    assert wide.plain == "# compute 75.0 %   d data wait 18.8 %   ? unknown 6.2 %"
    (narrow,) = ledger_legend(SECONDS, 80, CONSOLE, is_narrow=True)
    assert narrow.plain == "# compute 75.0%  d data wait 18.8%  ? unknown 6.2%"
    assert [line.plain for line in ledger_legend({}, 80, CONSOLE)] == [""]
