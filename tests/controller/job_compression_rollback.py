"""One rank of a DDP job under pacecar.attach(tune="lossy") with a scripted policy that wants compression at once.

Run by test_compression_rollback_ranks.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options
as the argument; the jobs run one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.controller import command_handler
from pacecar.controller.knobs.ddp import comm_hook
from pacecar.controller.knobs.ddp.compression import CHOICES
from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Policy, Proposal
from pacecar.job import wiring
from tests.kit.patient_gathers import wait_for_gathers
from tests.kit.rank_jobs import RANK, WORLD, run_jobs

wiring.CLOSE_SECONDS_MAX = 0.2  # no daemon is there to take anything


class Eager(Policy):
    """Keeps the choice `choice` from step `after` on; goes on without the knob when it is gone."""

    def __init__(self, choice: int, after: int, *, is_trial: bool = False) -> None:
        self.choice, self.after, self.is_trial = choice, after, is_trial
        self.lost_at: int | None = None
        self.decisions = 0

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        self.spaces = {s.knob: s for s in spaces}

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        pass

    def advance(self, observations: Sequence[Observation]) -> tuple[Proposal | None, list[Any]]:
        values = dict(observations[-1].values)
        if "compression" not in values:
            self.lost_at = self.lost_at or observations[-1].step
            return None, []
        if observations[-1].step < self.after or values["compression"] == self.choice:
            return None, []
        return Proposal(1, {**values, "compression": self.choice}, is_trial=self.is_trial), []

    def finish(self, reason: str = "") -> list[Any]:
        return []


def uphill(state: Any, bucket: Any) -> Any:
    """A compression that breaks the training: the sign of the gradients is lost."""
    flat = bucket.buffer().neg_().div_(state.ranks)
    return comm_hook._all_reduce(state, flat).then(lambda future: future.value()[0])


def train(options: dict[str, Any], folder: str) -> dict[str, Any]:
    arithmetic = dict(comm_hook._ARITHMETIC)
    if options.get("diverges"):
        comm_hook._ARITHMETIC["bf16"] = uphill
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)], nn.Linear(64, 1))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    policy = Eager(
        CHOICES.index(options.get("choice", "bf16")), options.get("after", 60), is_trial=options.get("trial")
    )
    command_handler.make_policy = lambda _: policy  # type: ignore[assignment,return-value]
    pacer = pacecar.attach(
        ddp, optimizer, tune="lossy", socket=f"{folder}/none.sock", run_dir=folder, windows=False, crew=False,
        job=options["name"], bucket_bytes_min=1024, compression=("bf16", "fp16", "topk"),
        knobs=("compression", "bucket_bytes"), remember=False,
    )  # fmt: skip
    assert pacer.inert_because is None
    generator = torch.Generator().manual_seed(RANK)
    losses, compression, off_by = [], [], 0
    for step in range(options["steps"]):
        x = torch.randn(32, 64, generator=generator)
        y = x[:, :8].sum(1, keepdim=True) + 0.3 * torch.randn(32, 1, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        if options.get("how") == "loss":
            loss.backward()
            pacer.loss(loss)
        elif options.get("how") == "silent":
            loss.backward()
        else:
            pacer.backward(loss)
        before, tuned = pacer.knobs.values.get("compression"), pacer.knobs.epoch
        if options.get("mismatch") and tuned == 1 and RANK == WORLD - 1 and not off_by:
            net[0][0].weight.grad.mul_(1.5)
            off_by = step + 1
        if options.get("freeze_at") == step and RANK == 0:
            pacer._tuner.agreement.freeze("planted")
        optimizer.step()
        losses.append(float(loss.detach()))
        compression.append(before)
    tuner: Any = pacer._tuner
    state, frozen, values = tuner.state, tuner.agreement.frozen, dict(pacer.knobs.values)
    pacer.close()
    dist.barrier()
    comm_hook._ARITHMETIC.update(arithmetic)
    records = [json.loads(line) for line in Path(folder, f"rank{RANK}.jsonl").read_text().splitlines()]
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    low = weights.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    return {
        "on_at": next((i + 1 for i, c in enumerate(compression) if c), None),
        "off_at": next((i + 1 for i in range(1, len(compression)) if compression[i - 1] and not compression[i]), None),
        "losses": [x if math.isfinite(x) else None for x in losses],
        "values": values,
        "state": state,
        "frozen": frozen,
        "lost_at": policy.lost_at,
        "verdicts": [r["reason"] for r in records if r.get("type") == "verdict"],
        "switches": [(r["step"], r["knobs"]["values"]) for r in records if r.get("type") == "switch"],
        "equal": bool(torch.equal(low, weights)),
        "mismatch_at": off_by,
    }


def main(options: dict[str, Any]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return train(options, folder)


if __name__ == "__main__":
    wait_for_gathers()
    run_jobs(main)
