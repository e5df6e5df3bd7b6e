"""Every example runs as it stands, by torchrun on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import adapters_python, environment

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "docs" / "examples"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


ELSEWHERE = {"ray_train"}
"""Started by other means than torchrun, and run by the tests of their adapters."""

FOUND = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in ELSEWHERE]


@pytest.mark.parametrize("example", FOUND, ids=lambda path: path.stem)
def test_the_example_runs_and_says_what_it_did(example: Path, tmp_path: Path) -> None:
    torchrun = [adapters_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*torchrun, str(example), "--steps", "20"],
        env=environment(PACECAR_HOOK_SOCKET=str(tmp_path / "none"), PACECAR_HOOK_RUN_DIR=str(tmp_path / "run")),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "knobs at the end {" in done.stdout
    assert "bucket_bytes" in done.stdout or "fsdp_" in done.stdout or "zero_" in done.stdout
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"rank0.jsonl", "rank1.jsonl"}
    assert "Traceback" not in done.stderr
