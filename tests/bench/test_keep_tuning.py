"""What is kept of bench_tuning reaches the page, and nothing else on it changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import keep_tuning
from bench.keep_tuning import FIGURES, figures
from tests.controller.measured_curves import SWEEPS

TUNING = SWEEPS.parent / "tuning.md"


def test_the_tables_on_the_page_are_those_of_the_kept_files() -> None:
    assert FIGURES.findall(TUNING.read_text()) == [figures()]


def test_a_file_is_kept_under_its_name_and_all_that_is_made_of_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tuning"
    folder.mkdir()
    page = tmp_path / "tuning.md"
    page.write_text(TUNING.read_text())
    monkeypatch.setattr(keep_tuning, "SWEEPS", folder)
    monkeypatch.setattr(keep_tuning, "MEASURED", tmp_path / "curves.json")
    monkeypatch.setattr(keep_tuning, "measured", list)
    monkeypatch.setattr(keep_tuning, "figures", lambda: figures(folder))
    file = tmp_path / "wide-1000-50.json"
    file.write_text((SWEEPS / file.name).read_text())
    keep_tuning.main([str(file)])
    assert json.loads((folder / file.name).read_text())
    assert "| wide, 1 Gbit/s | 50 |" in page.read_text()
    assert "| deep, 1 Gbit/s | 80 |" not in page.read_text()
    assert FIGURES.sub("", page.read_text()) == FIGURES.sub("", TUNING.read_text())
    assert (tmp_path / "curves.json").exists()
    page.write_text("# Nothing\n")
    with pytest.raises(ValueError, match="0 places"):
        keep_tuning.main([])
