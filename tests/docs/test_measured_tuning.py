"""The tables of docs/measurements/tuning.md are those that the kept files give: no figure in them is typed in."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.tuning_figures import summary

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measurements"


def test_every_line_that_the_kept_files_give_is_on_the_page() -> None:
    files = sorted((MEASURED / "tuning").glob("*.json"))
    assert files
    given = summary([case for file in files for case in json.loads(file.read_text())])
    lines = (MEASURED / "tuning.md").read_text().splitlines()
    assert [line for line in given.splitlines() if line not in lines] == []
