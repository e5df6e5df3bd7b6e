"""Stands in for DeepSpeed where it is not installed: an engine with ZeRO 1 that reduces gradients in buckets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from deepspeed import comm
from deepspeed.runtime.engine import DeepSpeedEngine

__all__ = ["comm", "initialize", "ops"]

__version__ = "stand-in"
ops = SimpleNamespace(__compatible_ops__={})


def initialize(
    *, model: torch.nn.Module, optimizer: Any, config: dict[str, Any], training_data: Any = None
) -> tuple[Any, ...]:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    size = config["train_micro_batch_size_per_gpu"]
    loader = None if training_data is None else torch.utils.data.DataLoader(training_data, batch_size=size)
    return DeepSpeedEngine(model, optimizer, config), None, loader, None
