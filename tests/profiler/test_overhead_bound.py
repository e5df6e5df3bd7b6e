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

from tests.adapters.world import adapters_python
from tests.job.autoattach.scripts import NANOGPT, RESNET, TRAINER
from tests.job.autoattach.test_trainer_script import LOOP, OFFLINE
from tests.kit.net import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.full, pytest.mark.alone]
"""Alone, because its busy loops would slow others."""

WATCH = Path(__file__).parent / "watch_overhead.py"
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}

SIZES = {
    "gpt": ("--steps", "150", "--width", "32"),
    # 1.2 MB of gradients: where all fit in one bucket of the smallest size (64 KiB for the first) nothing is tuned.
    "resnet": ("--epochs", "4", "--images", "300", "--width", "32", "--workers", "0"),
    "loop": ("--steps", "120"),  # its data has 128 updates
    "transformers": ("--steps", "150"),
}


def job_of(kind: str, folder: Path) -> tuple[str, Path, dict[str, str]]:
    """Return the python that runs the job, its script, and its environment."""
    if kind == "transformers":
        return adapters_python(), TRAINER, {**PLAIN, **OFFLINE}
    if kind == "loop":
        script = folder / "loop.py"
        script.write_text(LOOP)
        return sys.executable, script, PLAIN
    return sys.executable, NANOGPT if kind == "gpt" else RESNET, PLAIN


def tuner_said(folder: Path) -> list[str]:
    records = map(json.loads, (folder / "rank0.jsonl").read_text().splitlines())
    return [record["detail"] for record in records if record["type"] == "tuner"]


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("kind", ["gpt", "resnet", "loop", pytest.param("transformers", marks=pytest.mark.full)])
def test_the_bound_holds_at_every_step_with_trials_on_a_busy_machine(kind: str, tmp_path: Path) -> None:
    python, script, environment = job_of(kind, tmp_path)
    command = [sys.executable, "-m", "pacecar", "run", "--tune", "exact", "--run-dir", str(tmp_path), "--"]
    command += [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command += [str(free_port()), str(WATCH), str(tmp_path), str(script), *SIZES[kind]]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"bound{rank}.json").read_text())
        assert seen["steps"] > 10
        assert seen["switches"] > 0, ("the rehearsal at least", tuner_said(tmp_path))
        assert seen["worst"] <= 1.0, seen
