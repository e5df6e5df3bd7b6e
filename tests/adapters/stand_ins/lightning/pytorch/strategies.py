"""Wraps the module in DDP, and lets DDP's forward run `training_step`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class SingleDeviceStrategy:
    pass


class DDPStrategy:
    def __init__(self, *, process_group_backend: str = "gloo") -> None:
        if not dist.is_initialized():
            dist.init_process_group(process_group_backend)
        self.root_device = torch.device("cpu")
        self.model: Any = None

    def setup(self, module: Any) -> None:
        self.model = DistributedDataParallel(module)

    def barrier(self) -> None:
        dist.barrier()

    def training_step(self, *args: Any) -> Any:
        output = self.model(*args)
        if not self.model.module.automatic_optimization:
            self.model.require_backward_grad_sync = True
        return output
