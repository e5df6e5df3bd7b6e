"""What is kept of bench_tuning reaches the pages, and nothing else on them changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import keep_tuning
from bench.keep_tuning import FIGURES, FITS, figures, put
from tests.controller.measured_curves import SWEEPS

TUNING = SWEEPS.parent / "tuning.md"
POLICIES = SWEEPS.parent / "policies.md"


def test_the_tables_on_the_page_are_those_of_the_kept_files() -> None:
    page = TUNING.read_text()
    assert put(page, FIGURES, figures()) == page


@pytest.mark.parametrize(("page", "place"), [(TUNING, FIGURES), (POLICIES, FITS)])
def test_only_the_place_changes(page: Path, place: object) -> None:
    before = page.read_text()
    after = put(before, place, "| \\1 |")  # type: ignore[arg-type]
    head, _, tail = after.partition("| \\1 |")
    assert before.startswith(head)
    assert before.endswith(tail)
    assert len(tail) > 0
    assert before[len(head) : -len(tail)].startswith("| ")


def test_a_page_without_the_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 places"):
        put("# Nothing\n", FIGURES, "")


def test_a_file_is_kept_under_its_name_and_all_that_is_made_of_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tuning"
    folder.mkdir()
    for page in (TUNING, POLICIES):
        (tmp_path / page.name).write_text(page.read_text())
    monkeypatch.setattr(keep_tuning, "SWEEPS", folder)
    monkeypatch.setattr(keep_tuning, "MEASURED", tmp_path / "curves.json")
    monkeypatch.setattr(keep_tuning, "measured", list)
    monkeypatch.setattr(keep_tuning, "figures", lambda: figures(folder))
    file = tmp_path / "wide-1000-50.json"
    file.write_text((SWEEPS / file.name).read_text())
    keep_tuning.main([str(file)])
    assert json.loads((folder / file.name).read_text())
    page = (tmp_path / "tuning.md").read_text()
    assert "| wide, 1 Gbit/s | 50 |" in page
    assert "| deep, 1 Gbit/s | 80 |" not in page
    assert (tmp_path / "curves.json").exists()
    assert "| deep, 2 ranks, 1 Gbit/s | 0.13 |" not in (tmp_path / "policies.md").read_text()
