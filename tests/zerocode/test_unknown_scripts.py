"""`pacecar run` on scripts that know nothing of it: what they print and how they end is as without it, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.zerocode.scripts import NANOGPT, PLAIN, RESNET, bare_run, command, read_records, run, run_both

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHORT = ("--steps", "10")


def test_a_gpt_script_is_measured_on_both_ranks_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    bare = bare_run(NANOGPT, *SHORT)
    seen = run(NANOGPT, *SHORT, watched=("--job", "gpt", "--run-dir", str(tmp_path)))
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
    bare, seen = run_both(RESNET, "--fork", is_torchrun=False, watched=("--run-dir", str(tmp_path)))
    assert seen.ended == bare.ended
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
        is_torchrun=script is NANOGPT,
        watched=("--tune", "exact", "--run-dir", str(tmp_path)),
        PACECAR_HOOK_WINDOWS="false",  # what windows foretell is not the same twice; on hope a trial always begins
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


MEASURES = "pacecar: measures job nanogpt_like-"


@pytest.mark.parametrize(("end", "code"), [("raise", 1), ("interrupt", -2)])
def test_a_script_that_fails_or_is_interrupted_says_so_in_the_same_words(tmp_path: Path, end: str, code: int) -> None:
    bare, seen = run_both(NANOGPT, *SHORT, "--end", end, ranks=1, watched=("--run-dir", str(tmp_path)))
    assert seen.ended == bare.ended
    assert seen.code == code
    assert [line.startswith(MEASURES) for line in seen.pacecar] == [True]
    assert seen.of(0, "hello")[0]["world_size"] == 1, "what was measured is written at python's exit"


@pytest.mark.parametrize(("end", "code"), [("exit", 3), ("os_exit", 4), ("terminate", -15), ("kill", -9)])
def test_a_script_that_ends_itself_or_is_killed_ends_with_its_own_code(tmp_path: Path, end: str, code: int) -> None:
    whole = bare_run(NANOGPT, *SHORT, ranks=1)
    seen = run(NANOGPT, *SHORT, "--end", end, ranks=1, watched=("--run-dir", str(tmp_path)))
    assert (seen.code, seen.errors) == (code, [])
    assert seen.out, "it ended after most of its lines"
    assert whole.out.startswith(seen.out)
    assert [line.startswith(MEASURES) for line in seen.pacecar] == [True]


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_job_of_two_ranks_that_ends_badly_while_it_is_tuned_ends_in_the_same_way(tmp_path: Path, end: str) -> None:
    arguments = (*SHORT, "--end", end)
    bare, seen = run_both(NANOGPT, *arguments, watched=("--tune", "exact", "--run-dir", str(tmp_path)))
    assert (seen.code, seen.out) == (bare.code, bare.out)
    assert seen.code == 1
    # Which rank's end torchrun saw first, and whether it ended the other, is in its report, and chance.
    assert not [line for line in seen.errors if "/pacecar/" in line]


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SignalException")]
)
def test_a_signal_to_the_whole_job_ends_all_ranks(tmp_path: Path, number: signal.Signals, said: str) -> None:
    """Ctrl-C at a terminal, and a scheduler that cancels the job."""
    jobs = [
        subprocess.Popen(
            command(NANOGPT, "--steps", "500", "--pause", "0.05", ranks=2, watched=watched),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=PLAIN | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        for watched in (None, ("--tune", "exact", "--run-dir", str(tmp_path)))
    ]
    for job in jobs:
        assert job.stdout is not None
        while "iter 10:" not in job.stdout.readline():
            assert job.poll() is None
    begun = time.monotonic()
    for job in jobs:
        os.killpg(job.pid, number)
    for job in jobs:
        _, errors = job.communicate(timeout=60)
        assert said in errors
        assert "/pacecar/" not in errors
    assert time.monotonic() - begun < 45
    assert jobs[0].returncode == jobs[1].returncode


SPAWNED = """
import socket, time, torch, torch.distributed as dist, torch.multiprocessing as mp
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port,), nprocs=2)
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
        PACECAR_HOOK_OVERHEAD_BUDGET="1.0",
    )
    lines = seen.out.splitlines(keepends=True)
    assert "profiled the whole run: True, True\n" in lines
    lines.remove("profiled the whole run: True, True\n")
    assert (seen.code, "".join(lines), seen.errors) == bare.ended
    assert not [step for step in seen.of(0, "step") if step["source"] == "exact"]


@pytest.mark.parametrize(
    ("subclass", "said"), [("passing", "; mode exact"), ("own", "; tunes nothing: Own has its own forward")]
)
def test_a_subclass_of_ddp_is_tuned_only_if_it_leaves_ddps_work_alone(tmp_path: Path, subclass: str, said: str) -> None:
    bare = bare_run(NANOGPT, *SHORT)  # the subclass changes no number
    watched = ("--tune", "exact", "--run-dir", str(tmp_path))
    seen = run(NANOGPT, *SHORT, "--subclass", subclass, is_torchrun=False, watched=watched)
    assert seen.ended == bare.ended
    (line,) = seen.pacecar
    assert line.endswith(said)
    assert seen.of(1, "step")


@pytest.mark.parametrize(
    ("skip", "said"), [("21", "; mode exact"), ("3", "; tunes nothing: ranks [1] did not attach within 5 s")]
)
def test_a_rank_that_leaves_out_an_optimizer_step_does_not_fall_out_of_step_with_the_votes(
    tmp_path: Path, skip: str, said: str
) -> None:
    """While ranks gather it is waited for, once and not for long; later not at all."""
    arguments = ("--steps", "40", "--skip", skip)
    watched = ("--tune", "exact", "--run-dir", str(tmp_path))
    bare, seen = run_both(NANOGPT, *arguments, is_torchrun=False, watched=watched)
    assert seen.ended == bare.ended
    assert seen.pacecar[0].endswith(said)
    if skip == "21":
        assert len(seen.of(0, "step")) == len(seen.of(1, "step")) + 1


def test_where_only_one_rank_can_attach_nobody_waits_for_the_other_and_nothing_is_tuned(tmp_path: Path) -> None:
    script = tmp_path / "half.py"
    text = NANOGPT.read_text()
    script.write_text("import os, sys\nif os.environ['RANK'] == '1':\n    sys.modules['pacecar.pacer'] = None\n" + text)
    steps = ("--steps", "116", "--accumulate", "1", "--batch", "1")
    bare, seen = run_both(script, *steps, is_torchrun=False, watched=("--tune", "exact", "--run-dir", str(tmp_path)))
    assert (seen.code, seen.out) == (bare.code, bare.out)
    line = seen.pacecar[-1]
    assert line.endswith("tunes nothing: some ranks did not come to attach"), "another line would have been waited for"
    assert not seen.of(1, "step")


MIXED = """
import os, time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
trunk = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
head = nn.Linear(8, 2)
fully_shard(head, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD([{"params": trunk.parameters()}, {"params": head.parameters()}], lr=0.1, foreach=False)
for step in range(12):
    loss = head(trunk(torch.full((4, 8), dist.get_rank() + 1.0))).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
if dist.get_rank() == 0:
    print(float(loss).hex(), flush=True)
dist.barrier(); dist.destroy_process_group(); time.sleep(0.1)
"""


def test_under_mixed_wrappers_it_is_measured_and_nothing_is_tuned(tmp_path: Path) -> None:
    script = tmp_path / "mixed.py"
    script.write_text(MIXED)
    bare, seen = run_both(script, is_torchrun=False, watched=("--tune", "exact", "--run-dir", str(tmp_path)))
    assert seen.ended == bare.ended == (0, bare.out, bare.errors)
    (line,) = seen.pacecar
    assert line.endswith("on 2 ranks; tunes nothing: the loop trains several models")
    assert [len(seen.of(rank, "step")) for rank in range(2)] == [10, 10]
    assert not seen.of(0, "switch")
