"""One rank of DeepSpeed jobs; run by test_deepspeed.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn
from turning import OPTIONS, RANK, Ear, main

import pacecar.adapters.shared_attach
from pacecar.adapters.deepspeed import attach


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.silu(self.up(x)))
        return out


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), *(Block() for _ in range(4)), nn.Linear(32, 1))


class OwnStep(DeepSpeedEngine):  # type: ignore[misc]
    """An engine with a step of its own."""

    def step(self, lr_kwargs: Any = None) -> None:
        super().step(lr_kwargs)


# On CPUs DeepSpeed compiles an operator for ranks on one machine, two minutes long; without it, it asks gloo.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Seen:
    """What DeepSpeed really did in a step: its collectives, and the most parameters that ZeRO 3 asked for at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.gathered = 0
        name = "_PartitionedParameterCoordinator__all_gather_params"
        gather = getattr(PartitionedParameterCoordinator, name)

        def gathers(coordinator: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            self.gathered = max(self.gathered, len(params))
            return gather(coordinator, params, *args, **kwargs)

        setattr(PartitionedParameterCoordinator, name, gathers)
        for name in ("all_reduce", "reduce", "reduce_scatter_fn", "all_to_all_single", "all_gather_into_tensor"):
            real = getattr(deepspeed.comm, name, None)
            if real is not None:
                setattr(deepspeed.comm, name, self.watch(name, real))

    def watch(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args[0].numel() if args else 0))
            return real(*args, **kwargs)

        return call

    def take(self) -> tuple[int, int]:
        taken = (len(self.calls), self.gathered)
        self.calls, self.gathered = [], 0
        return taken


SEEN = Seen()


def made(stage: int, *, overlap: bool, accumulation: int, own: bool) -> Any:
    torch.manual_seed(0)
    net = Net()
    groups = [  # two groups: torch's optimizer steps twice an update
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in net.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 32768, "allgather_bucket_size": 32768,
            "stage3_prefetch_bucket_size": 8192, "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1000000, "stage3_max_reuse_distance": 0,
        },
    }  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    if own:
        engine.__class__ = OwnStep
    return engine


def train(
    *, stage: int, tune: str | None, overlap: bool = False, steps: int = 50, accumulation: int = 2, own: bool = False,
    version: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    engine = made(stage, overlap=overlap, accumulation=accumulation, own=own)
    ear = Ear()
    pacer = None
    tested = dict(pacecar.adapters.shared_attach.TESTED)
    if version is not None:
        pacecar.adapters.shared_attach.TESTED["deepspeed"] = ((0, 1), (0, 1))
    if tune is not None:
        pacer = attach(engine, tune=tune, **OPTIONS)
        ear.follow(pacer.pacer)
    pacecar.adapters.shared_attach.TESTED.update(tested)
    generator = torch.Generator().manual_seed(RANK)
    data = [torch.randn(4, 16, generator=generator) for _ in range(steps * accumulation)]
    losses, sizes = [], []
    SEEN.take()
    was_on_it = False
    for x in data if pacer is None else pacer.data(data):
        loss = nn.functional.mse_loss(engine(x), x[:, :4].sum(1, keepdim=True))
        engine.backward(loss)
        is_last, size = engine.is_gradient_accumulation_boundary(), engine.optimizer.reduce_bucket_size * 4
        engine.step()
        was_on_it |= "step" in vars(engine) or "_take_model_step" in vars(engine)
        losses.append(loss.item())
        if is_last:
            sizes.append([size, *SEEN.take()])
    advice = () if pacer is None else pacer.advice
    if pacer is not None:
        pacer.close()
    with torch.no_grad():
        stand_in = nn.Linear(1, 1)
        for parameter in stand_in.parameters():
            parameter.zero_()
    if stage == 3:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = torch.cat([p.detach().flatten() for p in engine.module.parameters()]).double().tolist()[::37]
    else:
        weights = torch.cat([p.detach().flatten() for p in engine.module.parameters()]).double().tolist()[::37]
    answer = ear.answer(stand_in) | {
        "history": losses, "weights": weights, "version": deepspeed.__version__, "sizes": sizes, "advice": advice,
        "step_is_its_own": not was_on_it and "MethodReplacement" not in str(vars(type(engine)).get("step")),
    }  # fmt: skip
    engine.destroy()
    return answer


if __name__ == "__main__":
    main({"train": train})
