"""What has axe-core, the usual checker of accessibility, against a page that is open in Chromium?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

__all__ = ["violations"]


def violations(page: Any) -> list[str]:
    """Return a line for each rule of axe's (WCAG and its best practices) that the open `page` breaks, with an element.

    Skips the test where axe is not installed, and fails it under CI.
    """
    if os.environ.get("CI"):
        import axe_playwright_python
    else:
        axe_playwright_python = pytest.importorskip("axe_playwright_python")
    folder = Path(str(axe_playwright_python.__file__)).parent
    page.evaluate((folder / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document)")
    assert len(found["passes"]) > 5, "axe looked at nothing"
    return [f"{one['id']} ({one['impact']}): {one['nodes'][0]['html'][:160]}" for one in found["violations"]]
