"""The table of torch versions is the one that the committed runs make, and as new as torch itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import run
import table


def test_the_newest_patch_of_each_minor_is_run_and_the_newest_of_all() -> None:
    available = ["2.3.1", "2.4.0", "2.4.1", "2.6.0", "2.9.0", "2.9.1", "2.13.0", "2.14.1", "2.15.0", "2.16.0", "2.16.1"]
    assert run.chosen(available) == ["2.4.1", "2.6.0", "2.9.1", "2.13.0", "2.14.1", "2.15.0", "2.16.1"]


def test_the_oldest_torch_that_is_run_is_the_oldest_that_is_allowed() -> None:
    run.check_oldest()


def test_every_row_has_a_date_and_a_cell_for_every_column() -> None:
    for row in table.rows():
        differ = sorted(set(row["cells"]) ^ set(table.FEATURES))
        assert not differ, (
            f"ran/{row['version']}.json and the columns of table.py differ in {differ}: run `make compatibility`, or "
            'put "not run: the column is newer than this row" into the row'
        )
        assert len(row["date"].split("-")) == 3


def test_a_reason_stands_below_the_table_once(tmp_path: Path) -> None:
    for version in ("2.4.1", "2.15.0"):
        cells = dict.fromkeys(table.FEATURES, "ok") | {"trace": "refused: no such thing"}
        row = {"version": version, "date": "2026-01-01", "cells": cells, "missing": []}
        (tmp_path / f"{version}.json").write_text(run.json.dumps(row))
    section = table.section(tmp_path)
    assert section.count("no such thing") == 1
    assert section.count("refused (1)") == 2
    assert section.index("| 2.4.1 |") < section.index("| 2.15.0 |")


def test_the_scripts_that_are_run_are_the_readmes() -> None:
    scripts = run.scripts()
    assert "pacecar.attach" in scripts["README script"]
    assert "pacecar" not in scripts["other script under pacecar run"]
    for script in scripts.values():
        compile(script, "train.py", "exec")


@pytest.mark.slow
def test_no_newer_minor_of_torch_is_out_than_the_table_has() -> None:
    try:
        newest = run.on_the_index(seconds=30)[-1]
    except RuntimeError as error:
        pytest.skip(str(error))
    ran = [table.minor(row["version"]) for row in table.rows()]
    assert table.minor(newest) <= max(ran, default=(0, 0)), f"torch {newest} is out: run `make compatibility`"
