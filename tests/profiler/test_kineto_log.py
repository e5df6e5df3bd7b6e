"""Windows write no line of Kineto's, whatever level the job has, and the job's own sessions write theirs."""

from __future__ import annotations

import os
import subprocess

import pytest

from pacecar.profiler.windows.kineto_log import KINETO_LOG_VARIABLE
from tests.kit.forking_python import forking_python

JOB = f"""
import os, sys, torch, pacecar
from torch.profiler import profile
from tests.kit.hook_inspection import hook_of
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
if sys.argv[1] == "watched":
    settings = dict(overhead_budget=1.0, window_warmup_steps=2, window_interval_steps=3, crew=False)
    settings |= dict(tune="off", job="kineto", socket="/nonexistent/pacecar.sock")
    with pacecar.attach(model, optimizer, **settings) as pacer:
        train(40)
        assert hook_of(pacer).budget.windows > 2
with profile() as own:
    train(1)
print(os.environ.get("{KINETO_LOG_VARIABLE}"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, "0", "5", "6"])
def test_windows_are_silent_and_the_jobs_own_profiler_is_as_loud_as_without_them(level: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != KINETO_LOG_VARIABLE}
    environ |= {} if level is None else {KINETO_LOG_VARIABLE: level}

    def lines(how: str) -> tuple[str, list[str]]:
        ran = subprocess.run(
            [forking_python(), "-c", JOB, how], capture_output=True, text=True, check=True, env=environ
        )
        return ran.stdout, [line.rpartition("] ")[2] for line in ran.stderr.splitlines() if line.startswith("USDT")]

    bare = lines("bare")
    assert lines("watched") == bare
    assert bare[0] == f"{level}\n"
