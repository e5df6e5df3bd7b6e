"""Every example runs unchanged, by torchrun on two ranks: with the libraries, and with their stand-ins.

Each runs twice in one folder, as users do: what the first run left there must not end the second.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import adapters_python, environment, stand_ins

from tests.kit.forking_python import forking_python

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "docs" / "examples"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


ELSEWHERE = {"ray_train"}
"""Started by other means than torchrun, and run by the tests of their adapters."""

FOUND = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in ELSEWHERE]


REAL_ONLY = {"loggers"}
"""No stand-in writes files of TensorBoard, wandb and MLflow; test_loggers stands in for what is called of them."""


PLAIN = {"ddp_loop", "fsdp2_loop"}
"""Of torch alone: these run twice in each `make test`, the others in `make test-all`, with their libraries."""


@pytest.mark.parametrize("example", [path for path in FOUND if path.stem not in REAL_ONLY], ids=lambda path: path.stem)
def test_the_example_runs_with_a_stand_in_for_its_library(example: Path, tmp_path: Path) -> None:
    for _ in range(2 if example.stem in PLAIN else 1):
        run(forking_python(), example, tmp_path, steps=8, PYTHONPATH=stand_ins())


@pytest.mark.full
@pytest.mark.parametrize("example", FOUND, ids=lambda path: path.stem)
def test_the_example_runs_twice_and_says_what_it_did(example: Path, tmp_path: Path) -> None:
    for _ in range(2):
        said = run(adapters_python(), example, tmp_path, steps=20)
        assert "bucket_bytes" in said or "fsdp_" in said or "zero_" in said


def run(python: str, example: Path, folder: Path, *, steps: int, **variables: str) -> str:
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*torchrun, str(example), "--steps", str(steps)],
        env=environment(
            PACECAR_HOOK_SOCKET=str(folder / "none"), PACECAR_HOOK_RUN_DIR=str(folder / "run"), **variables
        ),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "knobs at the end {" in done.stdout
    assert {path.name for path in (folder / "run").iterdir()} == {"rank0.jsonl", "rank1.jsonl"}
    assert "Traceback" not in done.stderr
    return done.stdout
