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


def initialize(*, model: torch.nn.Module, optimizer: Any, config: dict[str, Any]) -> tuple[Any, ...]:
    return DeepSpeedEngine(model, optimizer, config), None, None, None
