"""Where do the adapters' jobs run?  With the real libraries or with stand-ins for them, without network or terminal.

The real ones are in the environment that `make adapters` made: some forty packages, whose jobs are left to `make
test-all`.  The stand-ins (`stand_ins/`) make the same calls in the same order, and run with what the tests have.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from pacecar.adapters.shared_attach import TESTED
from tests.kit.forking_python import TORCH, forking_python

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".tools" / "adapters" / "bin" / "python"
STAND_INS = Path(__file__).with_name("stand_ins")

REAL = pytest.param("real", marks=pytest.mark.full)
LIBRARIES = ["stand-in", REAL]
"""For the fixture `jobs`: each job runs with a stand-in for its library, and with the library itself."""

PRELOADED = {
    "transformers": ("accelerate", "transformers", "transformers.trainer", "transformers.models.llama.modeling_llama"),
    "accelerate": ("accelerate", "transformers", "transformers.trainer", "transformers.models.llama.modeling_llama"),
    "lightning": ("lightning", "lightning.pytorch", "lightning.pytorch.strategies"),
}
"""What is loaded before the ranks are forked.  The others start threads when they are imported."""


def adapters_python() -> str:
    """Return the interpreter that has the libraries; skips where there is none, fails under CI."""
    if os.access(PYTHON, os.X_OK):
        return str(PYTHON)
    reason = f"{PYTHON} is missing: run `make adapters`"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def python_with(library: str) -> str:
    """Return a python with the real `library`, forked from one that has loaded it where that can be."""
    if library == "torch":
        return forking_python()
    python = adapters_python()
    return forking_python(python, (*TORCH, *PRELOADED[library])) if library in PRELOADED else python


@cache
def _versions() -> TemporaryDirectory[str]:
    """A folder that says that each library is installed, in the last version that was tested."""
    folder = TemporaryDirectory(prefix="stand-ins-")
    for library, (_, (major, minor)) in TESTED.items():
        info = Path(folder.name) / f"{library.replace('-', '_')}-{major}.{minor}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {major}.{minor}\n")
    return folder


def stand_ins() -> str:
    """Return the PYTHONPATH with which `import transformers` and the like finds the stand-ins."""
    return os.pathsep.join([_versions().name, str(STAND_INS), str(ROOT)])


def settings() -> dict[str, str]:
    """Return what keeps libraries off the network and the terminal."""
    return {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PACECAR_TUNE_REMEMBER": "false",
        "PYTHONPATH": str(ROOT),
    }


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a job: nothing of it asks the network, or a terminal."""
    return {**os.environ, **settings(), **more}
