"""`pacecar run` measures scripts that do not know of it, and their output is the same as without it, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.autoattach.scripts import EACH_STEP, FRESH, NANOGPT, RESNET, bare_run, read_records, run, run_both

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHORT = ("--steps", "10")


def test_a_gpt_script_is_measured_on_both_ranks_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    """As a user starts it: `pacecar run -- torchrun`, each python a fresh one."""
    bare = bare_run(NANOGPT, *SHORT)
    watched = ("--job", "gpt", "--run-dir", str(tmp_path))
    seen = run(NANOGPT, *SHORT, python=FRESH, watched=watched, **EACH_STEP)
    assert seen.ended == bare.ended == (0, bare.out, [])
    assert seen.pacecar == ["pacecar: measures job gpt, DistributedDataParallel and AdamW on 2 ranks; tunes nothing"]
    for rank in range(2):
        (hello,) = seen.of(rank, "hello")
        assert (hello["job"], hello["rank"], hello["local_rank"], hello["world_size"]) == ("gpt", rank, rank, 2)
        steps = seen.of(rank, "step")
        assert len(steps) == 8, "the second step is the one in which all is clear"
        assert all(step["samples"] == 8 for step in steps[1:])
        assert all(step["ledger"]["wall_ns"] > 0 for step in steps)


def test_a_resnet_script_with_loader_workers_has_its_waits_in_the_ledger(tmp_path: Path) -> None:
    bare, seen = run_both(RESNET, "--fork", is_torchrun=False, watched=("--run-dir", str(tmp_path)), **EACH_STEP)
    assert seen.ended == bare.ended
    assert "child: 7" in seen.out, "it forked before the process group, and the child trained"
    assert len(seen.pacecar) == len(seen.end) == 1
    for rank in range(2):
        assert len(seen.of(rank, "hello")) == 1
        steps = seen.of(rank, "step")
        assert len(steps) == 6
        assert sum(step["ledger"]["data_wait_ns"] for step in steps) > 0
        assert steps[1]["samples"] == 8


SPAWNED = """
import random, time, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
def work(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    temperature = nn.Parameter(torch.ones(1))
    calibration = torch.optim.SGD([temperature], lr=0.1)
    temperature.sum().backward(); calibration.step()
    for step in range(8):
        loss = model(torch.full((2, 4), rank + 1.0)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
    if rank == 0:
        print(float(loss).hex(), flush=True)
    dist.barrier(); dist.destroy_process_group(); time.sleep(0.1)
if __name__ == "__main__":
    mp.spawn(work, (random.randrange(12_000, 32_000),), nprocs=2)
"""


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}], ids=["alone", "slurm task"])
def test_ranks_that_a_script_spawns_itself_are_ranks_of_one_job(tmp_path: Path, environ: dict[str, str]) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    bare, seen = run_both(script, ranks=1, watched=("--run-dir", str(tmp_path)), **environ)
    assert seen.ended == bare.ended == (0, bare.out, bare.errors)
    (line,) = seen.pacecar
    assert line.endswith("DistributedDataParallel and SGD on 2 ranks; tunes nothing")
    hellos = [read_records(tmp_path / f"rank{rank}.jsonl")[0] for rank in range(2)]
    assert [hello["rank"] for hello in hellos] == [0, 1]
    assert hellos[0]["job"] == hellos[1]["job"]


def test_a_script_with_its_own_profiler_keeps_it(tmp_path: Path) -> None:
    bare = bare_run(NANOGPT, *SHORT)
    seen = run(
        NANOGPT,
        *SHORT,
        "--profile",
        is_torchrun=False,
        watched=("--run-dir", str(tmp_path)),
        **EACH_STEP,
    )
    lines = seen.out.splitlines(keepends=True)
    assert "profiled the whole run: True, True\n" in lines
    lines.remove("profiled the whole run: True, True\n")
    assert (seen.code, "".join(lines), seen.errors) == bare.ended
    assert not [step for step in seen.of(0, "step") if step["source"] == "exact"]
