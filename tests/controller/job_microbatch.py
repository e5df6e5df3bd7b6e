"""One rank of a job whose micro-batch is far too small, under `pacecar.attach`; prints what it saw as JSON.

Run by test_microbatch_ranks.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of
jobs' options as the argument.  `cap` is the largest micro-batch that "fits into memory" on the last rank, `where` what
runs out of it there: forward or backward.

How long a job runs is said in run_on.py; one with `as_long` says its weights where each one before it ended, so that it
can be compared with all.

With `counted` a forward costs what the job says, `sleep_ms` and a little for each sample, and nobody sleeps: what
pacecar sees of the job's pace is then the same on every machine.  Without, a forward sleeps for `sleep_ms`.

`work_ns` is what each step costs this rank itself: what it counted; or else the processor's time it used, and what its
forwards slept.  What others take of the machine is in `step_ns` only.
"""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.records import KnobSwitch, TunerStatus, Verdict
from tests.controller.run_on import RunOn, counted_clock
from tests.kit.fake_clock import FakeClock
from tests.kit.rank_jobs import RANK, WORLD, do_models_agree, records_of, run_jobs

VOCABULARY, WIDTH, POSITIONS = 64, 64, 32

SAMPLE_NS = 100_000
NOISE_RATIO = 0.02
"""Where time is counted: what a sample costs beside what its forward does, and how far a forward is off."""

_run_on = RunOn()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False, is_causal=True)[0]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Full(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("planted: no memory for the backward of this micro-batch")


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", torch.full((POSITIONS, POSITIONS), float("-inf")).triu(1))
        self.cap: int | None = None
        self.where = "forward"
        self.tries: list[int] = []
        self.sleep_seconds = self.slept_seconds = 0.0
        self.clock: FakeClock | None = None
        self.noise = random.Random(RANK)

    def forward(self, ids: Tensor) -> Tensor:
        is_over = self.cap is not None and len(ids) > self.cap
        if is_over:
            self.tries.append(len(ids))
        if is_over and self.where == "forward":
            raise torch.OutOfMemoryError("planted: no memory for a micro-batch of this size")
        if self.clock is not None:
            off = 1 + self.noise.uniform(-NOISE_RATIO, NOISE_RATIO)
            self.clock.advance(round((self.sleep_seconds * 1e9 + len(ids) * SAMPLE_NS) * off))
        else:
            time.sleep(self.sleep_seconds)  # what a forward costs however small it is
            self.slept_seconds += self.sleep_seconds
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x, self.mask)
        if is_over:
            x = Full.apply(x)
        out: Tensor = self.head(x)
        return out


def make_loss(model: nn.Module) -> Any:
    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        ids, labels = part
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    return loss


def some_of(model: nn.Module) -> tuple[Tensor, list[float]]:
    """Return all weights, and enough of them to compare."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, weights.tolist()[::97]


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Gpt(options.get("layers", 2))
    net.sleep_seconds = options.get("sleep_ms", 0) / 1000
    net.clock = counted_clock(is_counted=options.get("counted", False))
    model = DistributedDataParallel(net)
    if RANK == WORLD - 1:
        net.cap, net.where = options.get("cap"), options.get("where", "forward")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = options.get("batch", 32)
    pacer = pacecar.attach(
        model, optimizer, tune=options["tune"], micro_batch=options["micro_batch"], knobs=("micro_batch",),
        remember=False, socket="/nonexistent/pacecar.sock", exploration_budget=options.get("budget", 0.01),
        **({"crew": False, "windows": False} if options.get("counted") else {}),  # these see what things really take
    )  # fmt: skip
    records = records_of(pacer)
    generator = torch.Generator().manual_seed(RANK)
    loss_of = make_loss(model)
    losses: list[float] = []
    weights_after: dict[int, list[float]] = {}
    ends = [time.perf_counter_ns()]
    works = [0]
    begun = time.process_time_ns()
    while not _run_on.is_over(options, len(losses), records):
        text = torch.randint(0, VOCABULARY, (batch, POSITIONS + 1), generator=generator)
        text[:, 1::2] = text[:, :-1:2]  # something to learn
        pair = (text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        if options.get("plain"):
            losses.append(0.0)
            for part in pacer.microbatches(pair):
                loss = loss_of(part)
                pacer.backward(loss)
                losses[-1] += loss.item() * len(part[0]) / batch
        else:
            losses.append(pacer.train_batch(pair, loss_of).item())
        optimizer.step()
        ends.append(time.perf_counter_ns())
        if net.clock is not None:
            works.append(net.clock.monotonic_ns())
        else:
            works.append(time.process_time_ns() - begun + round(net.slept_seconds * 1e9))
        if options.get("as_long") and len(losses) in _run_on.lengths:
            weights_after[len(losses)] = some_of(model)[1]
    knobs, tuner = pacer.knobs.values, pacer._tuner
    frozen = None if tuner is None else tuner.agreement.frozen
    pacer.close()
    weights, some = some_of(model)
    return {
        "losses": losses,
        "step_ns": [b - a for a, b in pairwise(ends)],
        "work_ns": [b - a for a, b in pairwise(works)],
        "knobs": knobs,
        "frozen": frozen,
        "tries": net.tries,
        "switches": [[r.step, r.epoch, r.knobs.values] for r in records if isinstance(r, KnobSwitch)],
        "status": [[r.step, r.state, r.detail] for r in records if isinstance(r, TunerStatus)],
        "verdicts": [[r.knob, r.outcome, r.reason] for r in records if isinstance(r, Verdict)],
        "models_agree": do_models_agree(weights),
        "weights": some,
        "weights_after": weights_after,
    }


if __name__ == "__main__":
    run_jobs(main)
