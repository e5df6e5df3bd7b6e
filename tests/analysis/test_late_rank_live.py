"""A real gloo job with one rank that sleeps: who was late and by how much comes out of its traces."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from pacecar.analysis.all_ranks.rank_comparison import analyze_job
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.trace.reader import read_trace
from tests.kit.ranks import run_ranks

SLEEP_S = 0.05
STEPS = 9

JOB = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

late, sleep, steps, out = sys.argv[1:]
rank, late, steps = int(os.environ["RANK"]), int(late), int(steps)
torch.set_num_threads(1)
dist.init_process_group("gloo")
gradient = torch.ones(4096)
arrivals = []
dist.all_reduce(gradient)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    dist.all_reduce(gradient)  # all set out from here
    for _ in range(steps):
        if rank == late:
            time.sleep(float(sleep))
        gradient.mul_(0.5)
        arrivals.append(time.monotonic_ns())  # one clock for all ranks of a host
        dist.all_reduce(gradient)
profiler.export_chrome_trace(f"{out}/rank{rank}.json")
with open(f"{out}/arrivals{rank}.json", "w") as file:
    json.dump(arrivals, file)
dist.barrier()
os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)
"""


def traced(folder: Path, world: int, late: int) -> list[Path]:
    """Run the job and return its traces, one a rank."""
    script = folder / "job.py"
    script.write_text(JOB)
    run_ranks([script, *map(str, (late, SLEEP_S, STEPS, folder))], world, environ={"GLOO_SOCKET_IFNAME": "lo"})
    return [folder / f"rank{rank}.json" for rank in range(world)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("world", "late"), [(2, 1), (3, 0)])
def test_the_rank_that_slept_is_late_by_its_sleep(tmp_path: Path, world: int, late: int) -> None:
    pytest.importorskip("torch.distributed")
    traces = [read_trace(path) for path in traced(tmp_path, world, late)]
    job = analyze_job(traces, [analyze_trace(trace) for trace in traces])
    assert job.ranks == list(range(world))
    assert {clock.method for clock in job.clocks} == {"same_host"}
    slept = job.instances[-STEPS:]
    assert all(one.ranks == world and one.ranks_missing == 0 for one in slept)
    # How late each was by the job's own clock: a busy machine lets a rank sleep on, or its peers wait.
    told = [json.loads((tmp_path / f"arrivals{rank}.json").read_text()) for rank in job.ranks]
    waits = [[told[late][step] - times[step] for times in told] for step in range(STEPS)]
    last = [step for step in range(STEPS) if sum(wait < 10e6 for wait in waits[step]) == 1]
    assert len(last) >= STEPS / 2
    assert [slept[step].late_rank for step in last] == [late] * len(last)
    assert abs(statistics.median(slept[step].skew_ns - max(waits[step]) for step in last)) <= 2e6
    off = [each.wait_ns - waits[step][each.rank] for step in last for each in slept[step].arrivals if each.rank != late]
    assert len(off) == (world - 1) * len(last)
    assert abs(statistics.median(off)) <= 2e6
    # Another may have come late to the very first one: profilers take their time to begin.
    [worst] = [straggler for straggler in job.stragglers if straggler.rank == late]
    assert worst.late_count >= len(last)
    assert worst.caused_wait_ns >= 0.9 * sum(sum(waits[step]) for step in last)
    # Asleep, it had launched nothing; unless its profiler took longer to begin than all its sleep.
    assert worst.cause == "host_bound" or "older than the traces" in worst.evidence
