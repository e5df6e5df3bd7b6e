"""Trains a small transformer as GPU jobs do, with or without pacecar; prints losses and times as JSON.

torchrun's variables, then    python -m tests.gpu.training_job bf16 --pacecar off --steps 60
python -m tests.gpu.training_job bf16 --overhead always_on --blocks 12    blocks with and without, in turn
python -m tests.gpu.training_job memory --pacecar exact                   micro-batches up to what does not fit
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pacecar
from pacecar.profiler.timing.overhead_budget import OverheadBudget
from pacecar.profiler.windows.window_price import WindowPrice
from tests.kit.hook_inspection import hook_of

KINDS = ("plain", "ddp_gloo", "ddp_nccl", "fsdp2", "bf16", "scaler", "checkpointing", "compile", "memory")
VOCABULARY = 256


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self._is_checkpointed = is_checkpointed

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        y: torch.Tensor = x + self.mlp(x)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_checkpointed:
            y: torch.Tensor = checkpoint(self._run, x, use_reentrant=False)
            return y
        return self._run(x)


class Trainer:
    """A model, its optimizer and its data, on the GPU where there is one."""

    def __init__(self, kind: str, width: int, layers: int, batch: int) -> None:
        self.kind = kind
        self.is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        torch.manual_seed(0)
        blocks = [Block(width, is_checkpointed=kind == "checkpointing") for _ in range(layers)]
        model: nn.Module = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))
        model = model.to(self.device)
        if kind in ("ddp_gloo", "ddp_nccl", "fsdp2"):
            backend = "nccl" if self.is_gpu and kind != "ddp_gloo" else "gloo"
            if self.is_gpu:
                torch.cuda.set_device(self.device)
            dist.init_process_group(backend)
        if kind.startswith("ddp"):
            model = DistributedDataParallel(model, device_ids=[0] if self.is_gpu else None)
        elif kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            mesh = torch.distributed.device_mesh.init_device_mesh(self.device.type, (dist.get_world_size(),))
            for block in model.children():
                if isinstance(block, Block):
                    fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif kind == "compile":
            model = torch.compile(model)  # type: ignore[assignment]
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler(self.device.type) if kind == "scaler" else None
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(rank)
        self.data = [torch.randint(0, VOCABULARY, (batch, 129), generator=generator) for _ in range(16)]
        if self.is_gpu:
            self.data = [batch.pin_memory() for batch in self.data]

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        batch = batch.to(self.device, non_blocking=True)
        dtype = {"bf16": torch.bfloat16, "scaler": torch.float16 if self.is_gpu else torch.bfloat16}.get(self.kind)
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            logits = self.model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def finish(self) -> None:
        """Apply the gradients."""
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, number: int, pacer: Any = None) -> torch.Tensor:
        """Train on a batch, in a loop that knows no micro-batches."""
        batch = self.data[number % len(self.data)]
        for one in [batch] if pacer is None else pacer.data([batch]):
            loss = self.loss(one)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.finish()
        return loss.detach()

    def sync(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def digest(self) -> str:
        """Return a digest of all parameters, to the bit."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            found.update(local.detach().cpu().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]


def train(trainer: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """Train some steps; return losses to the bit, and times."""
    told: dict[str, Any] = {"run_dir": options.run_dir} if options.run_dir else {}
    if options.pacecar == "windows":
        told |= {"overhead_budget": 0.9, "window_interval_steps": 10}
    mode = {"windows": "off"}.get(options.pacecar, options.pacecar)
    pacer = None
    if mode != "none":
        pacer = pacecar.attach(trainer.model, trainer.optimizer, tune=mode, scaler=trainer.scaler, **told)
    losses, times = [], []
    for number in range(options.steps):
        begun = time.perf_counter()
        losses.append(trainer.step(number, pacer))
        times.append((time.perf_counter() - begun) * 1e3)
    trainer.sync()
    windows = hook_of(pacer).budget.windows if pacer is not None and pacer.inert_because is None else None
    if pacer is not None:
        pacer.close()
    numbers = torch.stack(losses).cpu()
    said = hashlib.sha256(numbers.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return {
        "losses": said, "parameters": trainer.digest(), "last_loss": float(numbers[-1]), "median_ms": median(times),
        "inert_because": getattr(pacer, "inert_because", None), "windows": windows,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if trainer.is_gpu else None,
    }  # fmt: skip


def overhead(trainer: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """Time blocks of steps without pacecar, and with it attached, in turn."""
    for number in range(20):
        trainer.step(number)
    trainer.sync()
    found: dict[str, list[float]] = {"without": [], "with": []}
    own: list[float] = []
    windows = 0
    told: dict[str, Any] = {"always_on": {"windows": False}, "default": {}}[options.overhead]
    for block in range(options.blocks):
        is_on = block % 2 == 1
        pacer = pacecar.attach(trainer.model, trainer.optimizer, tune="off", **told) if is_on else None
        for number in range(10):  # the first steps of an attachment cost more, by design
            trainer.step(number, pacer)
        trainer.sync()
        begun = time.perf_counter()
        for number in range(options.steps):
            trainer.step(number, pacer)
        trainer.sync()
        found["with" if is_on else "without"].append((time.perf_counter() - begun) * 1e3 / options.steps)
        if pacer is not None:
            if pacer.inert_because is None:
                budget = hook_of(pacer).budget
                own.append(budget.cost_ns / max(1, budget.wall_ns))
                windows += budget.windows
            pacer.close()
    # A block beside the ones around it: what drifts cancels.
    ratios = []
    for i, on in enumerate(found["with"]):
        around = found["without"][i : i + 2]
        ratios.append(on / (sum(around) / len(around)) - 1)
    return {
        "ratio_median": median(ratios), "ratios": ratios, "without_ms": median(found["without"]),
        "with_ms": median(found["with"]), "own_share": own, "windows": windows,
    }  # fmt: skip


def prices(trainer: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """Let the hook predict what a window costs, as it does by itself, and then take windows; return both."""
    predicted: list[dict[str, Any]] = []
    slices: list[dict[str, Any]] = []
    taken: list[dict[str, Any]] = []

    def watched(kind: type, name: str, note: Any) -> None:
        original = getattr(kind, name)

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            result = original(self, *arguments, **named)
            note(self, result, *arguments)
            return result

        setattr(kind, name, call)

    def learned(_: object, __: object, part: str, found: Any, nodes: int | None) -> None:
        slices.append({"part": part, "rows": found.rows, "cpu_ms": found.cpu_ns / 1e6, "end_ms": found.end_ns / 1e6,
                       "nodes": nodes})  # fmt: skip

    def expected(_: object, price_ns: int, shape: Any) -> None:
        predicted.append({"price_ms": price_ns / 1e6, "cpu_ms": shape.cpu_ns / 1e6, "nodes": shape.nodes,
                          "forwards": shape.forwards, "parameters": shape.parameters,
                          **{f"{name}_ms": ns / 1e6 for name, ns in (shape.phases or {}).items()}})  # fmt: skip

    def told(budget: Any, _: object, step: int, price_ns: int) -> None:
        taken.append({"step": step, "price_ms": price_ns / 1e6, "usual_ms": (budget.usual_ns or 0) / 1e6,
                      "rows": hook_of(pacer).windows.row_count, "cost_ms": budget.cost_ns / 1e6})  # fmt: skip

    watched(WindowPrice, "learn", learned)
    watched(WindowPrice, "predict_ns", expected)
    watched(OverheadBudget, "window_taken", told)
    pacer = pacecar.attach(
        trainer.model, trainer.optimizer, tune="off", overhead_budget=0.03, window_interval_steps=30,
        run_dir=options.run_dir or None,
    )  # fmt: skip
    begun, number = time.perf_counter(), 0
    while time.perf_counter() - begun < options.seconds and len(taken) < 6:
        trainer.step(number, pacer)
        number += 1
    trainer.sync()
    budget = hook_of(pacer).budget
    said = {
        "steps": number, "predicted": predicted[:3] + predicted[-3:], "slices": slices, "taken": taken,
        "share": budget.cost_ns / max(1, budget.wall_ns),
    }  # fmt: skip
    pacer.close()
    return said


def memory(trainer: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """Tune the micro-batch where the largest does not fit into the memory that this process may have."""
    if trainer.is_gpu:  # room for a third more than the first micro-batch takes: twice as large does not fit
        trainer.loss(trainer.data[0][: options.micro_batch]).backward()  # type: ignore[no-untyped-call]
        trainer.finish()
        trainer.sync()
        taken = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(trainer.device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.35 * taken / whole)
    pacer = pacecar.attach(
        trainer.model, trainer.optimizer, tune="exact", micro_batch=options.micro_batch, knobs=["micro_batch"],
        warmup_steps=10, overhead_budget=0.2, exploration_budget=0.5, run_dir=options.run_dir or None,
    )  # fmt: skip
    begun, number = time.perf_counter(), 0
    while number < options.steps and time.perf_counter() - begun < options.seconds:
        for batch in pacer.data([trainer.data[number % len(trainer.data)]]):
            pacer.train_batch(batch, trainer.loss)
            trainer.finish()
        number += 1
    trainer.sync()
    knobs = dict(pacer.knobs.values) if hasattr(pacer, "knobs") else {}
    pacer.close()
    return {"steps": number, "knobs": knobs, "peak_mib":
            torch.cuda.max_memory_allocated() / 2**20 if trainer.is_gpu else None}  # fmt: skip


def main() -> None:
    """Run one kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--pacecar", default="none", choices=("none", "off", "exact", "windows"))
    parser.add_argument("--prices", action="store_true")
    parser.add_argument("--overhead", choices=("always_on", "default"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--run-dir", default="")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    trainer = Trainer(options.kind, options.width, options.layers, options.batch)
    act = memory if options.kind == "memory" else prices if options.prices else overhead if options.overhead else train
    print(json.dumps(act(trainer, options)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
        os._exit(0)  # torch aborts or hangs at exit now and then (pytorch issue 190489)


if __name__ == "__main__":
    main()
