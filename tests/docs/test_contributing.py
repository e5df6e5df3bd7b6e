"""CONTRIBUTING.md is short, and its recipes name only what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WORDS_MAX = 1000
RECIPES = re.findall(r"^\| an? [^|]+ \| \[`\S+`\]\((\S+)\) \|$", PAGE, re.MULTILINE)


def test_the_page_stays_short() -> None:
    assert len(PAGE.split()) <= WORDS_MAX


@pytest.mark.parametrize("module", RECIPES)
def test_each_linked_docstring_has_a_recipe_and_its_paths_exist(module: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8"))) or ""
    _, begin, recipe = docstring.partition("\n\nTo add a")
    assert begin, f"{module} says how something is added"
    named = re.findall(r"`([\w.-]+/[\w./-]+)`", recipe)
    assert named, f"the recipe of {module} names files"
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_kind_of_part_has_a_recipe() -> None:
    assert len(RECIPES) == len(set(RECIPES)) >= 10
