"""`pacecar run` on a script of transformers' Trainer that knows nothing of it: the real one, and a loop like its own.

The library is not what the tests have, and loads for 3 s of CPU: its tests are `full`.  What of it matters here is in
LOOP: batches of an update fetched at once, `no_sync` but for the last, an optimizer around torch's that looks like one
and has none of its hooks, a scheduler, and an evaluation at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.adapters.world import ROOT, adapters_python
from tests.job.autoattach.scripts import TRAINER, Done, run_both
from tests.kit.forking_python import TORCH, forking_python

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": str(ROOT)}

TUNED = {
    "PACECAR_HOOK_WINDOWS": "false", "PACECAR_HOOK_OVERHEAD_BUDGET": "1.0", "PACECAR_TUNE_EXPLORATION_BUDGET": "1.0",
    "PACECAR_TUNE_WARMUP_STEPS": "3", "PACECAR_TUNE_KNOBS": "bucket_bytes,first_bucket_bytes",
    "PACECAR_TUNE_DEAD_BAND": "0.0",
}  # fmt: skip
"""Each step is measured and a trial always begins, so that there is a decision on any machine."""

LIBRARY = (
    *TORCH, "accelerate", "transformers", "transformers.hf_argparser", "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
)  # fmt: skip
"""Loaded before the ranks are forked; deepspeed, which starts a thread, is not."""

LOOP = """
import contextlib, itertools, os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

class AcceleratedOptimizer(torch.optim.Optimizer):
    def __init__(self, optimizer): self.optimizer = optimizer
    param_groups = property(lambda self: self.optimizer.param_groups)
    def step(self, closure=None): self.optimizer.step(closure)
    def zero_grad(self, set_to_none=True): self.optimizer.zero_grad(set_to_none)

class Trainer:
    def __init__(self, model, data, steps, end):
        self.is_ddp = "RANK" in os.environ
        if self.is_ddp:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.is_ddp else 0
        self.model = model
        self.data, self.steps, self.end, self.step = data, steps, end, 0
    def train(self):
        wrapped = nn.parallel.DistributedDataParallel(self.model) if self.is_ddp else self.model
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = AcceleratedOptimizer(inner)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 - step / self.steps)
        sampler = DistributedSampler(self.data) if self.is_ddp else None
        batches = iter(DataLoader(self.data, batch_size=1, sampler=sampler))
        while self.step < self.steps:
            wrapped.train()
            update = list(itertools.islice(batches, 2))
            for at, (inputs, targets) in enumerate(update):
                is_last = at == len(update) - 1
                with contextlib.nullcontext() if is_last or not self.is_ddp else wrapped.no_sync():
                    loss = nn.functional.cross_entropy(wrapped(inputs), targets) / len(update)
                    loss.backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            self.optimizer.step(); self.scheduler.step(); wrapped.zero_grad()
            self.step += 1
            if self.step % 5 == 0 and self.rank == 0:
                print({"loss": float(loss.detach()).hex(), "step": self.step}, flush=True)
            if self.step == self.steps - 2 and self.end == "exit":
                sys.exit(3)
    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        return sum(float(self.model(x).square().mean()) for x, _ in DataLoader(self.data, batch_size=32))

torch.set_num_threads(1)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 256), *(nn.Linear(256, 256) for _ in range(4)), nn.Linear(256, 8))
data = TensorDataset(torch.randn(512, 16), torch.randint(0, 8, (512,)))
trainer = Trainer(model, data, int(sys.argv[sys.argv.index("--steps") + 1]), sys.argv[-1])
trainer.train()
loss = trainer.evaluate()
if trainer.rank == 0:
    print("evaluated", loss.hex(), float(sum(p.detach().double().sum() for p in model.parameters())).hex(), flush=True)
if trainer.is_ddp:
    dist.barrier(); dist.destroy_process_group(); time.sleep(0.1)
"""

REAL = pytest.param("transformers", marks=pytest.mark.full)


def script_of(library: str, folder: Path) -> tuple[Path, str]:
    """Return the script, and the python that runs it."""
    if library == "transformers":
        return TRAINER, forking_python(adapters_python(), LIBRARY)
    script = folder / "loop.py"
    script.write_text(LOOP)
    return script, forking_python()


def lines(done: Done) -> list[str]:
    """Return what the script printed without the line in which Trainer prints its times."""
    return [line for line in done.out.splitlines() if "_runtime" not in line]


SIZES: dict[str, Sequence[str]] = {
    "loop": ("--steps", "90"),
    "transformers": (
        "--steps", "90", "--width", "96", "--layers", "4", "--batch", "1", "--accumulate", "2", "--length", "8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("library", ["loop", REAL])
def test_a_trainer_script_has_its_buckets_tuned_and_prints_and_trains_the_same(tmp_path: Path, library: str) -> None:
    script, python = script_of(library, tmp_path)
    watched = ("--tune", "exact", "--run-dir", str(tmp_path))
    bare, seen = run_both(script, *SIZES[library], watched=watched, python=python, **TUNED, **OFFLINE)
    assert (seen.code, lines(seen), seen.errors) == (0, lines(bare), bare.errors)
    assert len(lines(seen)) > 10, "of two numbers a sum has one order, so the losses are equal to the bit"
    (line,) = seen.pacecar
    assert line.endswith("DistributedDataParallel and AdamW on 2 ranks; mode exact")
    for rank in range(2):
        (hello,) = seen.of(rank, "hello")
        assert (hello["rank"], hello["local_rank"], hello["world_size"]) == (rank, rank, 2)
        steps = seen.of(rank, "step")
        assert 75 < steps[-1]["total_steps"] < 90, "updates, not batches"
        assert {step["micro_batches"] for step in steps[1:]} == {2}
        assert all(sum(v for k, v in step["ledger"].items() if k != "wall_ns") > 0 for step in steps)
    assert [one for one in seen.of(0, "decision") if "bucket" in one["knob"]]
    switches = [[(s["decision"], s["epoch"], s["knobs"]["values"]) for s in seen.of(r, "switch")] for r in range(2)]
    assert switches[0] == switches[1]
    assert switches[0], "a decision is tried"


@pytest.mark.parametrize("library", ["loop", REAL])
def test_a_trainer_script_that_ends_badly_ends_in_the_same_way(tmp_path: Path, library: str) -> None:
    script, python = script_of(library, tmp_path)
    watched = ("--tune", "exact", "--run-dir", str(tmp_path))
    arguments = ("--steps", "10", "--end", "exit")
    bare, seen = run_both(script, *arguments, ranks=1, watched=watched, python=python, **OFFLINE)
    assert (seen.code, lines(seen), seen.errors) == (3, lines(bare), bare.errors)
    (line,) = seen.pacecar
    assert line.endswith("on 1 rank; tunes nothing: one rank has nothing to tune here")
