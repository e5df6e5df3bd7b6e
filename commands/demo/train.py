"""Trains a small byte-level language model with pacecar attached; a script to copy from.

It is an ordinary data-parallel script plus five lines: `attach`, `data`, `microbatches`, `backward` and `count`.  The
micro-batch of 1 is a typical left-over: chosen once to fit a small GPU, and never reconsidered.

    torchrun --nproc-per-node 2 -m pacecar.commands.demo.train --seconds 60 --tune exact

Socket, run folder and job name come from the environment (PACECAR_HOOK_SOCKET, PACECAR_HOOK_RUN_DIR, PACECAR_JOB).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name that everybody knows it by
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import pacecar
from pacecar.safe_files import appending

from .byte_gpt import GPT, GPTConfig
from .training_text import TextWindows, load_corpus

__all__ = ["batch_loss", "main"]

logger = logging.getLogger("pacecar.commands.demo.train")

WARMUP_STEPS = 20
SCHEDULE_STEPS = 4000
"""The end of the cosine, whatever the length of the run: a schedule by the clock would not be reproducible."""

STOP_CHECK_STEPS = 20
"""Steps between agreements whether the time is up: rare enough to be cheap, frequent enough to stop in time."""

VALIDATION_WINDOWS = 32
"""Held-out windows for each rank, as many as in four steps."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings that depend on the device: enough work for it, and an untuned micro-batch."""

    model: GPTConfig
    learning_rate: float
    batch: int
    micro_batch: int


SETTINGS = {
    "cpu": TrainSettings(GPTConfig(), learning_rate=2e-3, batch=8, micro_batch=1),
    "cuda": TrainSettings(
        GPTConfig(context=512, width=768, layers=12, heads=12), learning_rate=3e-4, batch=64, micro_batch=4
    ),
}


def main() -> None:
    """Train until `--steps` or `--seconds` are over."""
    args = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = _join()
    settings = SETTINGS[device.type]
    batch = args.batch or settings.batch
    torch.manual_seed(args.seed)

    corpus = load_corpus()
    windows = TextWindows(corpus.train, settings.model.context)
    sampler: DistributedSampler[Tensor] = DistributedSampler(windows, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(windows, batch_size=batch, sampler=sampler, drop_last=True)
    held_out = TextWindows(corpus.validation, settings.model.context)

    model = GPT(settings.model).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = AdamW(ddp.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimizer, _warmup_then_cosine)
    report = _Report(args.metrics if dist.get_rank() == 0 else None, args.log_every)
    report.begin(model, corpus.files, len(windows), batch)
    report.validation(0, _bits_per_byte(model, held_out, device))

    stop = _Stop(args.steps, args.seconds, args.stop_file, device)
    step = 0
    micro_batch = args.micro_batch or settings.micro_batch
    length = {"expected_seconds": args.seconds if args.steps is None else None, "expected_steps": args.steps}
    with pacecar.attach(ddp, optimizer, tune=args.tune, micro_batch=micro_batch, **length) as pacer:
        for batch_of_text in pacer.data(_epochs(loader, sampler)):
            loss = torch.zeros((), device=device)
            for text in pacer.microbatches(batch_of_text):
                micro_loss = batch_loss(ddp, text.to(device))
                pacer.backward(micro_loss)
                loss += micro_loss.detach() * (len(text) / len(batch_of_text))
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            pacer.count(samples=len(batch_of_text), tokens=len(batch_of_text) * settings.model.context)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            step += 1
            report.step(step, loss, optimizer)
            if stop.is_due(step):
                break
            if step % args.validate_every == 0:
                report.validation(step, _bits_per_byte(model, held_out, device))

    report.validation(step, _bits_per_byte(model, held_out, device))
    report.close()
    # gloo's worker releases the last all_reduce a moment after it is done, and aborts the process if Python exits just
    # then (pytorch issue 190489).
    dist.barrier()
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model with pacecar attached.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="stop after this many steps")
    length.add_argument("--seconds", type=float, default=150.0, help="stop after this many seconds (default 150)")
    parser.add_argument("--stop-file", type=Path, help="stop as soon as this file exists")
    parser.add_argument("--tune", choices=("off", "advise", "exact"), default="exact")
    parser.add_argument("--batch", type=int, help="sequences in a step, on each rank")
    parser.add_argument("--micro-batch", type=int, help="sequences in a forward and backward, on each rank")
    parser.add_argument("--metrics", type=Path, help="write losses to this file, one JSON object per line")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--validate-every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def _join() -> torch.device:
    """Join torchrun's process group: NCCL with one GPU per rank, else gloo."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def _epochs(loader: DataLoader[Tensor], sampler: DistributedSampler[Tensor]) -> Iterator[Tensor]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def batch_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Return the mean loss of predicting each byte of `text` (batch, context + 1) from those before it."""
    text = text.long()
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def _warmup_then_cosine(step: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / (SCHEDULE_STEPS - WARMUP_STEPS))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


@torch.no_grad()
def _bits_per_byte(model: nn.Module, held_out: TextWindows, device: torch.device) -> float:
    """Return the mean over all ranks, each on its own held-out windows; every rank must call this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = [index % len(held_out) for index in range(rank, VALIDATION_WINDOWS * world_size, world_size)]
    nats = batch_loss(model, held_out.batch(mine).to(device))
    dist.all_reduce(nats)
    return nats.item() / world_size / math.log(2.0)


class _Stop:
    """Decides when training ends, at the same step on all ranks: otherwise one would wait for another forever."""

    def __init__(self, steps: int | None, seconds: float, file: Path | None, device: torch.device) -> None:
        self._steps = steps
        self._deadline = time.monotonic() + seconds
        self._file = file
        self._device = device

    def is_due(self, step: int) -> bool:
        if self._steps is not None and (step >= self._steps or self._file is None):
            return step >= self._steps
        if step % STOP_CHECK_STEPS != 0:
            return False
        is_late = self._steps is None and time.monotonic() >= self._deadline
        is_over = is_late or (self._file is not None and self._file.exists())
        anywhere = torch.tensor(float(is_over), device=self._device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        return bool(anywhere.item())


def _new_file(path: Path) -> TextIO:
    handle = appending(path)
    os.ftruncate(handle, 0)
    return os.fdopen(handle, "w", buffering=1)


class _Report:
    """Rank 0's log lines and, with `metrics`, the same as JSON."""

    def __init__(self, metrics: Path | None, every: int) -> None:
        self._is_logging = dist.get_rank() == 0
        self._file = _new_file(metrics) if metrics is not None else None
        self._every = every

    def begin(self, model: nn.Module, files: int, windows: int, batch: int) -> None:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if self._is_logging:
            logger.info(
                "%.2f M parameters, %d source files, %d windows, %d ranks x %d sequences a step",
                parameters / 1e6, files, windows, dist.get_world_size(), batch,
            )  # fmt: skip

    def step(self, step: int, loss: Tensor, optimizer: Optimizer) -> None:
        # .item() waits for a GPU, so only when the value is logged.
        if self._is_logging and (step % self._every == 0 or step == 1):
            value = loss.item()
            logger.info("step %5d  loss %.4f  lr %.2e", step, value, optimizer.param_groups[0]["lr"])
            self._write({"step": step, "loss": value})

    def validation(self, step: int, bits_per_byte: float) -> None:
        if self._is_logging:
            logger.info("step %5d  validation %.3f bits per byte", step, bits_per_byte)
            self._write({"step": step, "validation_bits_per_byte": bits_per_byte})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, float]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
