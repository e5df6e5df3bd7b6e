"""`pacecar run --tune exact`: which unknown scripts are tuned, which only measured, and no rank waits for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.autoattach.scripts import EACH_STEP, NANOGPT, RESNET, bare_run, run, run_both

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHORT = ("--steps", "10")


@pytest.mark.parametrize(
    "script", [pytest.param(NANOGPT, id="gpt"), pytest.param(RESNET, id="resnet", marks=pytest.mark.full)]
)
def test_exact_tuning_decides_about_buckets_on_all_ranks_alike(tmp_path: Path, script: Path) -> None:
    # Little to compute and much to reduce, so that there is something to win.
    gpt = ("--steps", "160", "--width", "96", "--layers", "2", "--accumulate", "1", "--batch", "1")
    size = gpt if script is NANOGPT else ("--images", "300", "--width", "32", "--batch", "1", "--epochs", "1")
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
        PACECAR_HOOK_OVERHEAD_BUDGET="1.0",  # each step is measured: the decision comes after 45 or 70 on any machine
    )
    assert seen.code == 0, seen.errors
    assert seen.pacecar == [line for line in seen.pacecar if line.endswith("; mode exact")]
    (end,) = seen.end
    assert "; kept " in end
    assert end.endswith(f"; more: pacecar report {tmp_path}")
    decided = [decision for decision in seen.of(0, "decision") if "bucket" in decision["knob"]]
    assert decided, [status["detail"] for status in seen.of(0, "tuner")]
    switches = [[(s["decision"], s["epoch"], s["knobs"]["values"]) for s in seen.of(r, "switch")] for r in range(2)]
    assert switches[0] == switches[1]
    assert switches[0], "a decision is tried"


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
    """While ranks gather, the others wait for it once and briefly; later not at all."""
    arguments = ("--steps", "40", "--skip", skip)
    watched = ("--tune", "exact", "--run-dir", str(tmp_path))
    bare, seen = run_both(NANOGPT, *arguments, is_torchrun=False, watched=watched, **EACH_STEP)
    assert seen.ended == bare.ended
    assert seen.pacecar[0].endswith(said)
    if skip == "21":
        steps = [[(one["step"], one["total_steps"], one["wall_ns"]) for one in seen.of(r, "step")] for r in (0, 1)]
        assert len(steps[0]) == len(steps[1]) + 1, (steps, seen.of(0, "switch"), seen.of(0, "goodbye"))


def test_if_only_one_rank_can_attach_it_does_not_wait_and_nothing_is_tuned(tmp_path: Path) -> None:
    script = tmp_path / "half.py"
    text = NANOGPT.read_text()
    script.write_text(
        "import os, sys\nif os.environ['RANK'] == '1':\n    sys.modules['pacecar.job.attach'] = None\n" + text
    )
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
    watched = ("--tune", "exact", "--run-dir", str(tmp_path))
    bare, seen = run_both(script, is_torchrun=False, watched=watched, **EACH_STEP)
    assert seen.ended == bare.ended == (0, bare.out, bare.errors)
    (line,) = seen.pacecar
    assert line.endswith("on 2 ranks; tunes nothing: the loop trains several models")
    assert [len(seen.of(rank, "step")) for rank in range(2)] == [10, 10]
    assert not seen.of(0, "switch")
