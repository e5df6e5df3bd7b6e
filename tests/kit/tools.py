"""Where are the external tools that tests compare with?  Fetched by `make tools`, never installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

__all__ = ["find_tool"]

TOOLS = Path(__file__).resolve().parents[2] / ".tools" / "bin"


def find_tool(name: str) -> Path:
    """Return the path of an external program; skips the test where it cannot be had, and fails it under CI."""
    fetched = TOOLS / name
    if os.access(fetched, os.X_OK):
        return fetched
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    reason = f"{name} is neither in {TOOLS} nor on PATH: run `make tools`"
    if os.environ.get("CI") and shutil.which("apt-get") is not None:
        pytest.fail(reason)
    pytest.skip(reason)
