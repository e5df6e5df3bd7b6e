"""`pacecar run --tune exact` finds DDP and FSDP2 wherever a trainer keeps them, and explains why it turns nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.autoattach.scripts import Done, run_both

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = '''
import os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
kind, steps = sys.argv[1], int(sys.argv[2])


def net(*sizes):
    return nn.Sequential(*[layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.Tanh())])


class Task(nn.Module):
    """As in timm and open_clip: the loop calls the task, which computes the loss itself."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * self.model(x).square().mean()


class Trainer:
    def __init__(self, model):
        self.model = model


class Hidden(nn.Module):
    """Keeps its model where nn.Module does not look: in an object, inside a list."""

    def __init__(self, model):
        super().__init__()
        self.parts, self.bias = [Trainer(model)], nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (self.parts[0].model(x) + self.bias).square().mean()


class Towers(nn.Module):
    """As in DLRM: the dense towers are under DDP, the table between them is each rank's own."""

    def __init__(self):
        super().__init__()
        self.bottom, self.table, self.top = DDP(net(8, 64, 16)), nn.Embedding(4, 16), DDP(net(32, 256, 256, 1))

    def forward(self, x):
        rows = self.table(torch.full((len(x),), dist.get_rank()))
        return self.top(torch.cat([self.bottom(x), rows], 1)).square().mean()


def sharded(whole, mesh=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(8, 64, 64, 64, 64, 16), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for block in model:
        if isinstance(block, nn.Linear):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh) if whole else model


def tensor_parallel():
    """Divided between two ranks; where there are more, by FSDP2 over the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model, plan = net(8, 64, 16), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    if mesh["dp"].size() == 1:
        return model
    for block in model[::2]:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


class Uncalled(Task):
    def forward(self, x):
        return self.scale * self.model.module(x).square().mean()


model = {
    "task": lambda: Task(DDP(net(8, 256, 256, 16))),
    "hidden": lambda: Hidden(DDP(net(8, 256, 256, 16))),
    "towers": Towers,
    "fsdp": lambda: sharded(True),
    "fsdp inside": lambda: Task(sharded(True)),
    "fsdp in parts": lambda: sharded(False),
    "tensor parallel": tensor_parallel,
    "uncalled": lambda: Uncalled(DDP(net(8, 256, 256, 16))),
}[kind]()
trained = list(model.parameters())
if kind == "hidden":
    trained += list(model.parts[0].model.parameters())
optimizer = torch.optim.SGD(trained, lr=0.01, foreach=False)
for step in range(steps):
    x = torch.full((4, 8), dist.get_rank() + 1.0 + step % 3)
    loss = model(x) if kind not in ("fsdp", "fsdp in parts", "tensor parallel") else model(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    if "FSDP" not in str(type(model)) and "Task" in str(type(model)):
        assert not model._forward_hooks and not model._forward_pre_hooks
if dist.get_rank() == 0:
    print(float(loss).hex(), sorted(vars(model)), flush=True)
dist.barrier(); dist.destroy_process_group(); time.sleep(0.1)
'''

TRYING = {
    "PACECAR_HOOK_WINDOWS": "false",  # what windows foretell is not the same twice; on hope a trial always begins
    "PACECAR_TUNE_EXPLORATION_BUDGET": "1.0",
    "PACECAR_TUNE_WARMUP_STEPS": "3",
    "PACECAR_TUNE_DEAD_BAND": "0.0",
    "PACECAR_HOOK_OVERHEAD_BUDGET": "1.0",
}


def both(tmp_path: Path, kind: str, steps: int, knobs: str, ranks: int = 2) -> Done:
    """Run the script bare and watched; what it prints is the same to the bit."""
    script = tmp_path / "wrapped.py"
    script.write_text(SCRIPT)
    watched = ("--tune", "exact", "--run-dir", str(tmp_path))
    environ = TRYING | {"PACECAR_TUNE_KNOBS": knobs}
    bare, seen = run_both(script, kind, str(steps), is_torchrun=False, ranks=ranks, watched=watched, **environ)
    assert seen.ended == bare.ended == (0, bare.out, bare.errors)
    return seen


def switches(seen: Done, ranks: int = 2) -> list[tuple[int, dict[str, object]]]:
    """Return what was turned, the same on all ranks."""
    turned = [[(s["epoch"], s["knobs"]["values"]) for s in seen.of(rank, "switch")] for rank in range(ranks)]
    assert turned == turned[:1] * ranks
    return turned[0]


@pytest.mark.parametrize(("kind", "name"), [("task", "Task"), ("hidden", "Hidden"), ("towers", "Towers")])
def test_ddp_inside_another_object_is_tuned(tmp_path: Path, kind: str, name: str) -> None:
    seen = both(tmp_path, kind, 120, "bucket_bytes,first_bucket_bytes")
    (line,) = seen.pacecar
    assert f", {name} around DistributedDataParallel and SGD on 2 ranks; mode exact" in line
    assert switches(seen), seen.of(0, "tuner")
    assert seen.of(0, "hello")[0]["parallel"] == {"data": 2}


@pytest.mark.parametrize(("kind", "name"), [("fsdp", "FSDPSequential"), ("fsdp inside", "Task around FSDP2")])
def test_fsdp2_is_tuned_and_its_mesh_says_that_ranks_are_data_parallel(tmp_path: Path, kind: str, name: str) -> None:
    seen = both(tmp_path, kind, 120, "fsdp_prefetch,fsdp_reshard")
    (line,) = seen.pacecar
    assert f", {name} and SGD on 2 ranks; mode exact" in line
    assert switches(seen), seen.of(0, "tuner")
    assert seen.of(0, "hello")[0]["parallel"] == {"data": 2}


def test_fsdp2_over_one_dimension_of_a_mesh_is_tuned_and_the_other_is_tensor_parallel(tmp_path: Path) -> None:
    seen = both(tmp_path, "tensor parallel", 120, "fsdp_prefetch,fsdp_reshard", ranks=4)
    (line,) = seen.pacecar
    assert ", FSDPSequential and SGD on 4 ranks; mode exact" in line
    assert switches(seen, 4), seen.of(0, "tuner")
    assert seen.of(0, "hello")[0]["parallel"] == {"data": 2, "tp": 2}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("uncalled", "the loop does not call what Uncalled has under DistributedDataParallel"),
        ("fsdp in parts", "only parts of Sequential are under FSDP2"),
        (
            "tensor parallel",
            "Sequential is tensor-parallel on 2 ranks, and not under DistributedDataParallel or FSDP2",
        ),
    ],
)
def test_where_ranks_are_not_known_to_be_in_step_nothing_is_turned(tmp_path: Path, kind: str, said: str) -> None:
    seen = both(tmp_path, kind, 12, "bucket_bytes,fsdp_prefetch")
    (line,) = seen.pacecar
    assert line.endswith(f"; tunes nothing: {said}")
    assert not seen.of(0, "switch")
