"""What pacecar takes of a training run on a GPU, against its own budget and its own predictions."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import Figures
from tests.gpu.jobs import run_json

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

JOB = "tests.gpu.training_job"
OVERHEAD_BUDGET = 0.01
NOISE = 0.02
"""What two blocks of steps on the same machine differ by."""


@pytest.mark.full
@pytest.mark.exclusive
@pytest.mark.parametrize(
    ("what", "kind", "width", "layers"),
    [
        ("always_on", "bf16", 256, 4),
        ("default", "bf16", 256, 4),
        ("default", "bf16", 1024, 6),
        ("default", "ddp_nccl", 256, 4),
    ],
)
def test_overhead(what: str, kind: str, width: int, layers: int, is_real: bool, figures: Figures) -> None:
    """Blocks of steps with pacecar take at most its budget longer than the blocks around them without."""
    if not is_real and (kind, width) != ("bf16", 256):
        pytest.skip("one size is enough without a GPU")
    size = ("--width", str(width), "--layers", str(layers)) if is_real else ("--width", "32", "--layers", "1")
    blocks = ("--blocks", "11", "--steps", "80") if is_real else ("--blocks", "3", "--steps", "10")
    found = run_json(JOB, kind, "--overhead", what, *size, *blocks, seconds=90)
    figures(**found)
    if is_real:
        assert found["ratio_median"] < OVERHEAD_BUDGET + NOISE


@pytest.mark.exclusive
@pytest.mark.parametrize(("kind", "width", "layers"), [("bf16", 256, 4), ("ddp_nccl", 512, 12)])
def test_prices(kind: str, width: int, layers: int, is_real: bool, figures: Figures) -> None:
    """The first window of a job costs no more than was predicted for it."""
    size = ("--width", str(width), "--layers", str(layers)) if is_real else ("--width", "32", "--layers", "1")
    found = run_json(JOB, kind, "--prices", *size, "--seconds", "20" if is_real else "5", seconds=70)
    figures(**found)
    if is_real:
        assert found["taken"], "no window was earned"
        assert found["taken"][0]["price_ms"] <= found["predicted"][-1]["price_ms"]
