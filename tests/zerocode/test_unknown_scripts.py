"""`pacecar run` on scripts that know nothing of it: what they print and how they end is as without it, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.zerocode.scripts import NANOGPT, PLAIN, RESNET, command, free_port, read_records, run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHORT = ("--steps", "10")


def test_a_gpt_script_is_measured_on_both_ranks_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    bare = run(NANOGPT, *SHORT)
    seen = run(NANOGPT, *SHORT, watched=("--job", "gpt", "--run-dir", str(tmp_path)))
    assert (seen.code, seen.out, seen.errors) == (bare.code, bare.out, bare.errors) == (0, bare.out, [])
    assert seen.pacecar == [
        "pacecar: measures job gpt, DistributedDataParallel and AdamW on 2 ranks; tunes nothing"
    ]  # fmt: skip
    for rank in range(2):
        (hello,) = seen.of(rank, "hello")
        assert (hello["job"], hello["rank"], hello["local_rank"], hello["world_size"]) == ("gpt", rank, rank, 2)
        steps = seen.of(rank, "step")
        assert len(steps) == 8, "the second step is the one in which all is clear"
        assert all(step["samples"] == 8 for step in steps[1:])
        assert all(step["ledger"]["wall_ns"] > 0 for step in steps)


def test_a_resnet_script_with_loader_workers_has_its_waits_in_the_ledger(tmp_path: Path) -> None:
    bare = run(RESNET, "--fork")
    seen = run(RESNET, "--fork", watched=("--run-dir", str(tmp_path)))
    assert (seen.code, seen.out, seen.errors) == (bare.code, bare.out, bare.errors)
    assert "child: 7" in seen.out, "it forked before the process group, and the child trained"
    assert len(seen.pacecar) == 1
    for rank in range(2):
        assert len(seen.of(rank, "hello")) == 1
        steps = seen.of(rank, "step")
        assert len(steps) == 6
        assert sum(step["ledger"]["data_wait_ns"] for step in steps) > 0
        assert steps[1]["samples"] == 8


@pytest.mark.parametrize("script", [NANOGPT, RESNET], ids=["gpt", "resnet"])
def test_exact_tuning_decides_about_buckets_on_all_ranks_alike(tmp_path: Path, script: Path) -> None:
    # Little to compute and much to reduce, so that there is something to win.
    gpt = ("--steps", "200", "--width", "192", "--layers", "4", "--accumulate", "1", "--batch", "1")
    size = gpt if script is NANOGPT else ("--images", "800", "--width", "64", "--batch", "2", "--epochs", "1")
    seen = run(
        script,
        *size,
        watched=("--tune", "exact", "--run-dir", str(tmp_path)),
        PACECAR_TUNE_EXPLORATION_BUDGET="1.0",
        PACECAR_TUNE_WARMUP_STEPS="3",
        PACECAR_TUNE_KNOBS="bucket_bytes,first_bucket_bytes",
        PACECAR_TUNE_DEAD_BAND="0.0",
    )
    assert seen.code == 0, seen.errors
    assert seen.pacecar == [line for line in seen.pacecar if line.endswith("; mode exact")]
    decided = [decision for decision in seen.of(0, "decision") if "bucket" in decision["knob"]]
    assert decided, [status["detail"] for status in seen.of(0, "tuner")]
    switches = [[(s["decision"], s["epoch"], s["knobs"]["values"]) for s in seen.of(r, "switch")] for r in range(2)]
    assert switches[0] == switches[1]
    assert switches[0], "a decision is tried"


@pytest.mark.parametrize(
    ("end", "code"), [("raise", 1), ("exit", 3), ("os_exit", 4), ("interrupt", -2), ("terminate", -15), ("kill", -9)]
)
def test_a_script_that_ends_badly_ends_in_the_same_way(tmp_path: Path, end: str, code: int) -> None:
    arguments = (*SHORT, "--end", end)
    bare = run(NANOGPT, *arguments, ranks=1)
    seen = run(NANOGPT, *arguments, ranks=1, watched=("--run-dir", str(tmp_path)))
    assert (seen.code, seen.out, seen.errors) == (bare.code, bare.out, bare.errors)
    assert seen.code == code
    assert seen.pacecar == [line for line in seen.pacecar if line.startswith("pacecar: measures job nanogpt_like-")]
    assert seen.of(0, "hello")[0]["world_size"] == 1


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_job_of_two_ranks_that_ends_badly_while_it_is_tuned_ends_in_the_same_way(tmp_path: Path, end: str) -> None:
    arguments = (*SHORT, "--end", end)
    bare = run(NANOGPT, *arguments)
    seen = run(NANOGPT, *arguments, watched=("--tune", "exact", "--run-dir", str(tmp_path)))
    assert (seen.code, seen.out) == (bare.code, bare.out)
    assert seen.code == 1
    assert seen.errors == bare.errors


def test_an_interrupt_from_the_keyboard_ends_all_ranks(tmp_path: Path) -> None:
    codes = []
    for watched in (None, ("--tune", "exact", "--run-dir", str(tmp_path))):
        job = subprocess.Popen(
            command(NANOGPT, "--steps", "500", "--pause", "0.05", ranks=2, watched=watched),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=PLAIN | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        assert job.stdout is not None
        while "iter 10:" not in job.stdout.readline():
            assert job.poll() is None
        os.killpg(job.pid, signal.SIGINT)
        begun = time.monotonic()
        _, errors = job.communicate(timeout=60)
        codes.append(job.returncode)
        assert "KeyboardInterrupt" in errors
        assert "/pacecar/" not in errors
        assert time.monotonic() - begun < 45
    assert codes[0] == codes[1]


SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
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
    dist.barrier(); dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, (int(sys.argv[1]),), nprocs=2)
"""


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}], ids=["alone", "slurm task"])
def test_ranks_that_a_script_spawns_itself_are_ranks_of_one_job(tmp_path: Path, environ: dict[str, str]) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    bare = run(script, str(free_port()), ranks=1, **environ)
    seen = run(script, str(free_port()), ranks=1, watched=("--run-dir", str(tmp_path)), **environ)
    assert (seen.code, seen.out, seen.errors) == (bare.code, bare.out, bare.errors)
    (line,) = seen.pacecar
    assert line.endswith("DistributedDataParallel and SGD on 2 ranks; tunes nothing")
    hellos = [read_records(tmp_path / f"rank{rank}.jsonl")[0] for rank in range(2)]
    assert [hello["rank"] for hello in hellos] == [0, 1]
    assert hellos[0]["job"] == hellos[1]["job"]


def test_a_script_with_its_own_profiler_keeps_it(tmp_path: Path) -> None:
    bare = run(NANOGPT, *SHORT, "--profile")
    seen = run(NANOGPT, *SHORT, "--profile", watched=("--run-dir", str(tmp_path)), PACECAR_HOOK_OVERHEAD_BUDGET="1.0")
    assert (seen.code, seen.out, seen.errors) == (bare.code, bare.out, bare.errors)
    assert "profiled the whole run: True" in seen.out
    assert not [step for step in seen.of(0, "step") if step["source"] == "exact"]


@pytest.mark.parametrize(
    ("subclass", "said"), [("passing", "; mode exact"), ("own", "; tunes nothing: Own has its own forward")]
)
def test_a_subclass_of_ddp_is_tuned_only_if_it_leaves_ddps_work_alone(tmp_path: Path, subclass: str, said: str) -> None:
    arguments = ("--steps", "16", "--subclass", subclass)
    bare = run(NANOGPT, *arguments)
    seen = run(NANOGPT, *arguments, watched=("--tune", "exact", "--run-dir", str(tmp_path)))
    assert (seen.code, seen.out, seen.errors) == (bare.code, bare.out, bare.errors)
    (line,) = seen.pacecar
    assert line.endswith(said)
    assert seen.of(1, "step")


def test_a_rank_that_leaves_out_an_optimizer_step_does_not_fall_out_of_step_with_the_votes(tmp_path: Path) -> None:
    arguments = ("--steps", "60", "--skip", "21")
    bare = run(NANOGPT, *arguments)
    seen = run(NANOGPT, *arguments, watched=("--tune", "exact", "--run-dir", str(tmp_path)))
    assert (seen.code, seen.out, seen.errors) == (bare.code, bare.out, bare.errors)
    assert len(seen.of(0, "step")) == len(seen.of(1, "step")) + 1


def test_where_only_one_rank_can_attach_nobody_waits_for_the_other_and_nothing_is_tuned(tmp_path: Path) -> None:
    script = tmp_path / "half.py"
    text = NANOGPT.read_text()
    script.write_text("import os, sys\nif os.environ['RANK'] == '1':\n    sys.modules['pacecar.pacer'] = None\n" + text)
    begun = time.monotonic()
    bare = run(script, "--steps", "130")
    took = time.monotonic() - begun
    begun = time.monotonic()
    seen = run(script, "--steps", "130", watched=("--tune", "exact", "--run-dir", str(tmp_path)))
    assert (seen.code, seen.out) == (bare.code, bare.out)
    assert time.monotonic() - begun < 3 * took + 15
    assert seen.pacecar[-1].endswith("tunes nothing: some ranks did not come to attach")
    assert not seen.of(1, "step")
