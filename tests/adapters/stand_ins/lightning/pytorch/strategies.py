"""Wraps the module in DDP, and lets DDP's forward run `training_step`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class SingleDeviceStrategy:
    pass


class DDPStrategy:
    def __init__(self, *, process_group_backend: str) -> None:
        self.root_device = torch.device("cpu")
        self.model: Any = None

    def setup(self, module: Any) -> None:
        self.model = DistributedDataParallel(module)

    def training_step(self, *args: Any) -> Any:
        output = self.model(*args)
        if not self.model.module.automatic_optimization:
            self.model.require_backward_grad_sync = True
        return output
