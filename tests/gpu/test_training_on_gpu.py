"""What pacecar changes in a training run on a GPU: nothing in its numbers, little in its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pacecar.records import JobRecord, Verdict
from tests.gpu.conftest import Figures
from tests.gpu.jobs import run_json

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

JOB = "tests.gpu.training_job"
REPRODUCIBLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(
    ("kind", "modes"),
    [
        ("plain", ("windows",)),
        ("ddp_gloo", ("off", "exact")),
        ("ddp_nccl", ("exact",)),
        ("fsdp2", ("exact",)),
        ("bf16", ("windows",)),
        ("scaler", ("windows",)),
        ("checkpointing", ("windows",)),
        ("compile", ("windows",)),
    ],
)
def test_losses(kind: str, modes: tuple[str, ...], is_real: bool, figures: Figures) -> None:
    """Losses and parameters are the same to the bit with and without pacecar."""
    if not is_real and kind in ("compile", "fsdp2", "checkpointing", "scaler"):
        modes, size = modes[:1], ("--steps", "6", "--width", "32", "--layers", "1")
    elif not is_real:
        size = ("--steps", "12", "--width", "32", "--layers", "1")
    else:
        size = ("--steps", "60")
    ranks = 2 if kind == "ddp_gloo" else 1
    found: dict[str, Any] = {
        mode: run_json(JOB, kind, "--pacecar", mode, *size, seconds=80, ranks=ranks, environ=REPRODUCIBLE)
        for mode in ("none", *modes)
    }
    figures(runs=[{"pacecar": mode, **one} for mode, one in found.items()])
    for mode in modes:
        assert found[mode]["inert_because"] is None
        for what in ("losses", "parameters"):
            assert found[mode][what] == found["none"][what], (mode, what)


@pytest.mark.exclusive
def test_memory(tmp_path: Path, is_real: bool, figures: Figures) -> None:
    """A micro-batch that does not fit into memory costs no step, and the job goes on with one that does."""
    size = ("--width", "512", "--layers", "4", "--batch", "512") if is_real else ("--width", "32", "--layers", "1")
    seconds = "25" if is_real else "5"
    found = run_json(
        JOB, "memory", *size, "--micro-batch", "16", "--seconds", seconds, "--steps", "600", "--run-dir", str(tmp_path),
        seconds=90,
    )  # fmt: skip
    decoder = msgspec.json.Decoder(JobRecord)
    records = [decoder.decode(line) for line in (tmp_path / "rank0.jsonl").read_bytes().splitlines()]
    verdicts = [record for record in records if isinstance(record, Verdict)]
    figures(**found, verdicts=[{"outcome": v.outcome, "reason": v.reason} for v in verdicts])
    assert found["steps"] > (10 if is_real else 0)
    if is_real:
        assert any("memory" in verdict.reason for verdict in verdicts), "nothing that does not fit was tried"
