"""The table of torch and Python versions is the one that the committed runs make, and as new as torch itself."""

from __future__ import annotations

import json
import os
import sys
import tomllib
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


def test_every_row_has_a_date_and_cells_of_columns_only() -> None:
    for row in table.rows():
        assert set(row["cells"]) <= set(table.FEATURES), table.file_of(row).name
        assert len(row["date"].split("-")) == 3
        assert json.loads(table.file_of(row).read_text()) == row


def test_the_pythons_that_the_package_names_are_those_that_it_was_run_on() -> None:
    project = tomllib.loads((run.ROOT / "pyproject.toml").read_text())["project"]
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith("Programming Language")]
    worked = [row for row in table.rows() if row["cells"]["attach"] == row["cells"].get("daemon without torch") == "ok"]
    assert named == sorted({".".join(row["python"].split(".")[:2]) for row in worked}), "run `make compatibility`"
    assert project["requires-python"] == f">={named[0]}"


@pytest.mark.slow
def test_a_python_is_meant_by_its_version_its_name_or_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python3.99").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    version = ".".join(str(number) for number in sys.version_info[:3])
    for name in ("3.99", "python3.99", str(tmp_path / "python3.99")):
        assert run.interpreter(name)[1] == version


@pytest.mark.parametrize("exists", [False, True])
def test_a_python_that_does_not_run_ends_it_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    if exists:
        (tmp_path / "python3.99").write_text("#!/bin/sh\necho no such version >&2; echo more >&2; exit 127\n")
        (tmp_path / "python3.99").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    monkeypatch.setattr(sys, "argv", ["run.py", "--torch", "2.13.0", "--python", "3.99"])
    monkeypatch.setattr(run, "run_version", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(SystemExit, match=r"(?i)^python3.99 does not run: .*no such [^\n]*$") as ended:
        run.main()
    assert isinstance(ended.value.code, str), "a message, with exit code 1"


def test_only_warnings_of_our_own_code_are_ours() -> None:
    line = "/tmp/v/lib/python3.14/site-packages/{}/a/b.py:7: {}: old\n  x()\n"
    assert run.deprecated(line.format("torch", "DeprecationWarning")) is None
    assert run.deprecated(line.format("pacecar", "UserWarning")) is None
    for kind in ("DeprecationWarning", "PendingDeprecationWarning", "SyntaxWarning"):
        assert run.deprecated(line.format("pacecar", kind)) == f"pacecar.a.b.py:7: {kind}: old"


def test_a_reason_stands_below_the_table_once(tmp_path: Path) -> None:
    for version in ("2.4.1", "2.15.0"):
        cells = dict.fromkeys(table.FEATURES, "ok") | {"trace": "refused: no such thing"}
        row = {"version": version, "python": "3.12.1", "date": "2026-01-01", "cells": cells, "missing": []}
        table.file_of(row, tmp_path).write_text(json.dumps(row))
    section = table.section(tmp_path)
    assert section.count("no such thing") == 1
    assert section.count("refused (1)") == 2
    assert section.index("| 2.4.1 | 3.12.1 |") < section.index("| 2.15.0 | 3.12.1 |")


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
