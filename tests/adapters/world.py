"""Where do the adapters' jobs run?  In the environment that `make adapters` made, without network or terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".tools" / "adapters" / "bin" / "python"


def adapters_python() -> str:
    """Return the interpreter that has the libraries; skips where there is none, fails under CI."""
    if os.access(PYTHON, os.X_OK):
        return str(PYTHON)
    reason = f"{PYTHON} is missing: run `make adapters`"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a job: nothing of it asks the network, or a terminal."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PACECAR_TUNE_REMEMBER": "false",
        "PYTHONPATH": str(ROOT),
        **more,
    }
