"""The committed table matches the committed rows; the adapters' tests check the rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import compatibility

from pacecar.adapters.shared_attach import TESTED, untested

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_committed_page_is_what_the_tests_ran() -> None:
    is_same = compatibility.PAGE.read_text() == compatibility.page()
    assert is_same, "a row was written after the page: run `python tests/adapters/compatibility.py`"


def test_what_is_called_tested_is_what_the_second_environment_installs() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "requirements" / "adapters.txt").read_text().split() if "==" in line
    )
    assert {library: untested(library, pinned[library]) for library in TESTED} == dict.fromkeys(TESTED)


@pytest.mark.parametrize("version", ["4.9.1", "99.0", "5.x", ""])
def test_another_version_is_named_beside_those_that_were_tested(version: str) -> None:
    said = untested("transformers", version)
    assert said is not None
    assert version in said
    assert "5.23" in said


def test_a_library_that_is_not_installed_has_no_version() -> None:
    assert "unknown" in str(untested("transformers")) or untested("transformers") is None
