"""Real jobs that are tuned beside two busy loops: cost <= budget * wall time + attach + 200 ms at every step.

What the ranks note is the hook's own count (`watch_overhead.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.net import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WATCH = Path(__file__).parent / "watch_overhead.py"
JOBS = Path(__file__).parents[1] / "jobs"
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}

KINDS = {
    "gpt": ("nanogpt_like.py", "--steps", "150", "--width", "32"),
    "resnet": ("resnet_like.py", "--epochs", "4", "--images", "300", "--width", "4", "--workers", "0"),
    "trainer": ("trainer_like.py", "--steps", "150"),
}


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_at_every_step_with_trials_on_a_busy_machine(kind: str, tmp_path: Path) -> None:
    script, *arguments = KINDS[kind]
    command = [sys.executable, "-m", "pacecar", "run", "--tune", "exact", "--run-dir", str(tmp_path), "--"]
    command += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command += [str(free_port()), str(WATCH), str(tmp_path), str(JOBS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=PLAIN, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"bound{rank}.json").read_text())
        assert seen["steps"] > 10
        assert seen["switches"] > 0, "the rehearsal at least"
        assert seen["worst"] <= 1.0, seen
