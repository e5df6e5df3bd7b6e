"""One rank of a job that switches compression and bucket sizes live and compares every gradient with a reference.

Run by test_compression_ranks.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of jobs' options as
the argument; the jobs run one after the other.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel, distributed

from pacecar.clock import SystemClock
from pacecar.config import TuneConfig
from pacecar.controller.consensus.agreement import LocalAgreement
from pacecar.controller.consensus.capabilities import KnobOffer, Offer
from pacecar.controller.consensus.knob_switch import KnobSwitcher
from pacecar.controller.consensus.protocol import ProposalKind, SwitchProposal
from pacecar.controller.knobs.ddp import torch_internals
from pacecar.controller.knobs.ddp.buckets import BucketActuator, FirstBucketActuator
from pacecar.controller.knobs.ddp.comm_hook import Compressor
from pacecar.controller.knobs.ddp.compression import CHOICES, CompressionActuator
from pacecar.controller.knobs.ddp.reducer import DdpReducer
from tests.kit.rank_jobs import run_jobs

KIB = 1024
NONE, BF16, FP16, TOPK = (CHOICES.index(name) for name in ("none", "bf16", "fp16", "topk"))
CONFIG = TuneConfig(
    bucket_bytes_min=16 * KIB, first_bucket_bytes_min=4 * KIB, compression=("bf16", "fp16", "topk"), topk_ratio=0.05
)


class Net(nn.Module):
    """Layers of different sizes; `skip` leaves the last one unused."""

    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, w), nn.Tanh(), nn.Linear(w, 64)) for w in range(32, 224, 32)
        )
        self.last = nn.Linear(64, 64)
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x if self.skip else self.last(x)


def make(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    net: Any = Net(skip=options.get("unused", False))
    if options.get("compiled") == "inside":
        net = torch.compile(net, backend="eager")
    return DistributedDataParallel(
        net,
        gradient_as_bucket_view=options.get("view", False),
        find_unused_parameters=options.get("unused", False),
        static_graph=options.get("static", False),
    )


def train_step(
    ddp: Any, batches: list[torch.Tensor], *, keeps_grads: bool = False, model: Any = None
) -> list[torch.Tensor | None]:
    """One step of SGD without its update; `keeps_grads` zeroes gradients in place, so that they stay views."""
    for p in ddp.parameters():
        if keeps_grads and p.grad is not None:
            p.grad.zero_()
        else:
            p.grad = None
    for index, batch in enumerate(batches):
        with ddp.no_sync() if index < len(batches) - 1 else nullcontext():
            ((ddp if model is None else model)(batch).square().mean() / len(batches)).backward()
    return [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]


def differing(mine: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> int:
    pairs = zip(mine, theirs, strict=True)
    return sum(a is not b and (a is None or b is None or not torch.equal(a, b)) for a, b in pairs)


class Live:
    """A DDP with the three knobs on one Reducer, and the switchboard that turns them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.ddp = make(options)
        self.model = torch.compile(self.ddp, backend="eager") if options.get("compiled") == "outside" else self.ddp
        self.reducer = DdpReducer(self.model)
        self.buckets = BucketActuator(CONFIG, self.reducer)
        self.first = FirstBucketActuator(CONFIG, self.reducer)
        self.compression = CompressionActuator(CONFIG, self.reducer)
        self.rebuilds = 0

    def settle(self) -> dict[str, str | None]:
        actuators = {a.knob: a for a in (self.buckets, self.first, self.compression)}
        refusals = {knob: a.refusal() for knob, a in actuators.items()}
        self.agreement = LocalAgreement()
        offers = (KnobOffer(k, a.value(), a.domain(), None, a.layout()) for k, a in actuators.items())
        self.agreement.offer(Offer(tuple(offers)))
        self.board = KnobSwitcher(actuators, self.agreement, SystemClock())
        return refusals

    def switch(self, bucket: int, compression: int, first: int) -> bool:
        before = self.ddp.reducer
        proposal = SwitchProposal(1, 1, (bucket, compression, first), ProposalKind.TRIAL)
        assert [s.knob for s in self.agreement.spaces] == ["bucket_bytes", "compression", "first_bucket_bytes"]
        del before
        return self.board.carry_out(proposal).is_done


def mean_over_ranks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    out = [t.clone() for t in tensors]
    for t in out:
        dist.all_reduce(t)
        t.div_(dist.get_world_size())
    return out


def alternate(options: dict[str, Any]) -> dict[str, Any]:
    """Turn all three knobs again and again; compare each step with a DDP of torch's own that was made so."""
    live = Live(options)
    micro, keeps = options.get("micro", 1), options.get("keeps_grads", False)
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    draw = lambda: [torch.randn(8, 64, generator=generator) for _ in range(micro)]  # noqa: E731
    for _ in range(3):
        train_step(live.ddp, draw(), model=live.model)
    refusals = live.settle()
    if any(refusals.values()):
        return {"refusals": refusals}
    built = []
    build_ordered, by_helper = torch_internals.build_ordered, torch_internals.build_by_helper
    torch_internals.build_ordered = lambda *a: built.append(1) or build_ordered(*a)
    torch_internals.build_by_helper = lambda *a: built.append(1) or by_helper(*a)
    unequal = dict.fromkeys(CHOICES, 0)
    worst = dict.fromkeys(CHOICES, 0.0)
    disagreements = switches = not_once = 0
    sizes = [32 * KIB, 64 * KIB, 128 * KIB]
    for index in range(options.get("rounds", 12)):
        choice = (NONE, BF16, FP16, NONE, TOPK)[index % 5]
        want = (sizes[index % 3], choice, (8 * KIB, 16 * KIB)[index % 2])
        built.clear()
        assert live.switch(*want), "the switch is carried out"
        switches += 1
        not_once += len(built) != 1
        if choice == NONE:
            assert live.reducer.plan.hook is None, "no compression is no hook"
        for _ in range(2):  # fresh buckets, then rebuilt ones
            batches = draw()
            mine = train_step(live.ddp, batches, keeps_grads=keeps, model=live.model)
            dist.barrier()
            theirs = reference(options, live, want, batches, choice)
            unequal[CHOICES[choice]] += differing(mine, theirs)
            for a, b in zip(mine, theirs, strict=True):
                if a is not None and b is not None:
                    error = float((a - b).norm() / b.norm().clamp_min(1e-9))
                    worst[CHOICES[choice]] = max(worst[CHOICES[choice]], error)
            disagreements += ranks_differ(mine)
    torch_internals.build_ordered, torch_internals.build_by_helper = build_ordered, by_helper
    return {
        "refusals": refusals, "recipe": live.reducer.recipe, "unequal": unequal, "worst": worst,
        "disagreements": disagreements, "switches": switches, "not_once": not_once,
    }  # fmt: skip


_references: dict[Any, Any] = {}


def reference(
    options: dict[str, Any], live: Live, want: tuple[int, int, int], batches: list[torch.Tensor], choice: int
) -> list[torch.Tensor | None]:
    """What torch's own DDP of these sizes gives (with torch's own fp16 hook), at its final buckets."""
    key = (json.dumps(options), want[0], want[2], choice == FP16)
    if key not in _references:
        config, create = distributed._BucketCapacityConfig, distributed._BucketCapacityConfig.create
        config.create = lambda **_: config(want[0], (), want[2])
        ddp = make({k: v for k, v in options.items() if k != "compiled"})
        config.create = create
        if choice == FP16:
            ddp.register_comm_hook(None, fp16_compress_hook)
        for _ in range(2):
            train_step(ddp, [torch.ones(8, 64)] * options.get("micro", 1))
        _references[key] = ddp
    ddp = _references[key]
    ddp.module.load_state_dict({k.replace("_orig_mod.", ""): v for k, v in live.ddp.module.state_dict().items()})
    return train_step(ddp, batches, keeps_grads=options.get("keeps_grads", False))


def ranks_differ(gradients: list[torch.Tensor | None]) -> int:
    flat = torch.cat([g.flatten() for g in gradients if g is not None])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return int(not torch.equal(low, high))


def feedback(options: dict[str, Any]) -> dict[str, Any]:
    """Error feedback loses nothing: what was reduced plus what is kept is the sum of the gradients, across buckets."""
    live = Live(options)
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        dense = train_step(live.ddp, [batch])
    live.settle()
    total = [torch.zeros_like(g) for g in dense if g is not None]
    steps = 0
    for index in range(6):
        assert live.switch((32, 64, 128)[index % 3] * KIB, TOPK, 8 * KIB)
        for _ in range(3):
            steps += 1
            for t, g in zip(total, train_step(live.ddp, [batch]), strict=True):
                t += g
    state = live.compression.compressor
    assert isinstance(state, Compressor)
    kept = mean_over_ranks([state.residuals[p] for p in live.ddp.parameters()])
    off = max(
        float((t + k - steps * g).norm() / (steps * g).norm()) for t, k, g in zip(total, kept, dense, strict=True)
    )
    sent, plain = state.sent_bytes, state.dense_bytes
    poisoned = batch.clone()
    poisoned[0, 0] = float("inf")
    seen = train_step(live.ddp, [poisoned])
    finite = all(bool(r.isfinite().all()) for r in state.residuals.values())
    assert live.switch(64 * KIB, NONE, 8 * KIB)
    assert live.switch(64 * KIB, TOPK, 8 * KIB)
    fresh = live.compression.compressor
    return {
        "off": off,
        "sent_ratio": sent / plain,
        "inf_is_seen": not all(bool(g.isfinite().all()) for g in seen if g is not None),
        "residuals_stay_finite": finite,
        "residuals_after_none": len(fresh.residuals),
    }


def main(options: dict[str, Any]) -> dict[str, Any]:
    return feedback(options) if options.get("feedback") else alternate(options)


if __name__ == "__main__":
    run_jobs(main)
