"""The engine, after DeepSpeed 0.19: it counts micro-batches, and its step steps only where they make an update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed import comm


class DeepSpeedZeroOptimizer:
    """Reduces gradients in buckets of `reduce_bucket_size` elements, and steps torch's optimizer once a group."""

    def __init__(self, optimizer: torch.optim.Optimizer, size: int) -> None:
        self.optimizer, self.reduce_bucket_size = optimizer, size
        self.ipg_buckets = {torch.float32: SimpleNamespace(elements=0)}
        self.ready_for_gradients = False

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def reduce_gradients(self) -> None:
        bucket: list[Tensor] = []
        for parameter in reversed(self.parameters):
            if bucket and sum(g.numel() for g in bucket) + parameter.numel() > self.reduce_bucket_size:
                self._reduce(bucket)
                bucket = []
            assert parameter.grad is not None
            bucket.append(parameter.grad)
        self._reduce(bucket)

    def _reduce(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in bucket]) / dist.get_world_size()
        comm.all_reduce(flat)
        for gradient, reduced in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(reduced.view_as(gradient))

    def step(self) -> None:
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = groups
        self.optimizer.zero_grad()


class DeepSpeedEngine(nn.Module):
    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.micro_steps = module, 0
        self.device, self.global_rank = torch.device("cpu"), dist.get_rank()
        self.accumulation, self.clip = config["gradient_accumulation_steps"], config.get("gradient_clipping")
        self.optimizer = DeepSpeedZeroOptimizer(optimizer, config["zero_optimization"]["reduce_bucket_size"])

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def is_gradient_accumulation_boundary(self) -> bool:
        return bool((self.micro_steps + 1) % self.accumulation == 0)

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation).backward()
        if self.is_gradient_accumulation_boundary():
            self.optimizer.reduce_gradients()

    def step(self, lr_kwargs: Any = None) -> None:
        if self.is_gradient_accumulation_boundary():
            self._take_model_step(lr_kwargs)
        self.micro_steps += 1

    def _take_model_step(self, lr_kwargs: Any) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()

    def destroy(self) -> None:
        pass
