"""What profiled windows cost on a GPU and what they see."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch

from pacecar.profiler.windows.kineto_window import WindowProfiler
from tests.gpu.conftest import Figures
from tests.gpu.jobs import run, run_json
from tests.gpu.windows_job import resident_bytes, take_window

pytestmark = pytest.mark.gpu

LASTING_RATIO = 1.03
"""By how much launches may be slower than before any window: what the rounds differ among themselves."""


@pytest.fixture
def profiler(is_real: bool) -> Any:
    profiler = WindowProfiler(on_device=is_real)
    profiler.install()
    yield profiler
    profiler.uninstall()


@pytest.mark.exclusive
def test_cost_by_events(profiler: WindowProfiler, device: torch.device, is_real: bool, figures: Figures) -> None:
    """A window sees every kernel that was launched in it, and costs so much for each."""
    counts = (10, 100, 1000, 5000, 20_000) if is_real else (10, 100)
    take_window(profiler, device, 10)
    rows = [take_window(profiler, device, count) for count in counts for _ in range(3)]
    figures(windows=rows)
    largest = rows[-1]
    per_launch = {part: 1e3 * largest[f"{part}_ms"] / largest["launches"] for part in ("work", "close", "read")}
    figures(us_a_launch=per_launch)
    if is_real:  # and the kernel that fills the numbers
        assert [row["kernels"] for row in rows] == [row["launches"] + 1 for row in rows]


@pytest.mark.exclusive
def test_head(profiler: WindowProfiler, device: torch.device, is_real: bool, figures: Figures) -> None:
    """A window that opens while the device is busy loses no kernel at its head."""
    lost = []
    numbers = torch.ones(64, device=device)
    for _ in range(40 if is_real else 5):
        if is_real:
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # a millisecond
        while not profiler.may_open():
            profiler.step_passed()
        profiler.open()
        for _ in range(50):
            numbers.mul_(1.0)
        if is_real:
            torch.cuda.synchronize()
        rows, _ = profiler.close()
        profiler.step_passed()
        lost.append(50 - sum(row.type() == "kernel" and "spin" not in row.name() for row in rows))
    figures(lost_kernels=lost)
    if is_real:
        assert not any(lost)


@pytest.mark.slow
@pytest.mark.exclusive
def test_aftermath(is_real: bool, figures: Figures) -> None:
    """Launches that windows made slower are as fast as before once CUPTI is detached."""
    found = [run_json("tests.gpu.windows_job", "aftermath", seconds=60) for _ in range(3 if is_real else 1)]
    ratios = []
    for one in found:
        before, *others = one["stages"]
        ratios.append({stage["stage"]: stage["median_ms"] / before["median_ms"] for stage in others})
    least = {stage: min(ratio[stage] for ratio in ratios) for stage in ratios[0]}
    figures(
        after_window_ratio=least["after window 1"], detached_ratio=least["detached"], ratios=ratios,
        stages=found[0]["stages"], windows=found[0]["windows"],
    )  # fmt: skip
    assert all(one["is_detached"] is is_real for one in found)
    if is_real:
        assert least["detached"] <= LASTING_RATIO


def test_graphs(figures: Figures) -> None:
    """Windows between replays of a CUDA graph neither crash nor change what it computes."""
    found = run_json("tests.gpu.windows_job", "graphs", seconds=60)
    figures(**found)
    assert found["sum"] == found["expected"]


@pytest.mark.slow
@pytest.mark.exclusive
def test_memory(profiler: WindowProfiler, device: torch.device, is_real: bool, figures: Figures) -> None:
    """A thousand windows do not let the process grow."""
    for _ in range(20):
        take_window(profiler, device, 50)
    before, begun, taken, prices = resident_bytes(), time.monotonic(), 0, []
    while taken < 1000 and time.monotonic() - begun < (30 if is_real else 1):
        window = take_window(profiler, device, 50)
        prices.append(window["open_ms"] + window["close_ms"])
        taken += 1
    growth = (resident_bytes() - before) / 2**20
    figures(
        windows=taken, growth_mib=growth, first_hundred_ms=median(prices[:100]), last_hundred_ms=median(prices[-100:])
    )
    assert growth < 20


@pytest.mark.slow
@pytest.mark.exclusive
def test_soak(is_real: bool, figures: Figures) -> None:
    """Hundreds of windows over a step with a graph and collectives miss no kernel, and the job's profiler sees all."""
    found = run_json("tests.gpu.windows_job", "soak", "--seconds", "10" if is_real else "2", seconds=60)
    figures(**found)
    if is_real:
        assert found["own_kernels"] >= found["fewest_kernels"] == found["most_kernels"]


@pytest.mark.parametrize("level", ["0", "1", "5"])
def test_silent(level: str, is_real: bool, figures: Figures) -> None:
    """A window writes nothing on stderr, whatever KINETO_LOG_LEVEL is."""
    if not is_real and level != "0":
        pytest.skip("one level is enough without a GPU")
    (ended,) = run("tests.gpu.windows_job", "silent", seconds=60, environ={"KINETO_LOG_LEVEL": level})
    figures(exit_code=ended.returncode, stderr=ended.stderr[:1500])
    assert (ended.returncode, ended.stderr) == (0, "")
