"""Makes the knobs of a model under DDP together, because all of them share its one Reducer.

Left out: what each does (`buckets`, `compression`), and whether it may (their refusals).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from pacecar.config import TuneConfig
from pacecar.knobs import allows

from ..actuator import Actuator
from .buckets import BucketActuator, FirstBucketActuator
from .compression import CompressionActuator
from .gradient_check import GradientCheck
from .reducer import DdpReducer
from .torch_internals import find_ddp

__all__ = ["DdpKnobs", "find_ddp"]


class DdpKnobs:
    """The knobs of `model`'s DDP that `config` allows; `has_scaler` as in CompressionActuator."""

    def __init__(self, model: nn.Module, config: TuneConfig, *, has_scaler: bool) -> None:
        self.reducer = DdpReducer(model)
        self.actuators: list[Actuator] = []
        names = [name for name in config.knobs if allows(config.mode, name)]
        if "bucket_bytes" in names:
            self.actuators.append(BucketActuator(model, config, self.reducer))
        if "first_bucket_bytes" in names:
            self.actuators.append(FirstBucketActuator(config, self.reducer))
        if "compression" in names:
            self.actuators.append(CompressionActuator(config, self.reducer, has_scaler=has_scaler))

    def choice(self) -> str:
        """Return the compression in force on this rank."""
        hook = self.reducer.plan.hook
        return "none" if hook is None else hook.choice

    def gradient_check(self) -> GradientCheck | None:
        """Return what compares the ranks' gradients; None where DDP does not reduce over all ranks of the job.

        With several groups of ranks one could find a difference that the others do not see at the same boundary.
        """
        ddp = self.reducer.ddp
        if ddp is None or not dist.is_initialized():
            return None
        ranks = dist.get_world_size(ddp.process_group)
        return GradientCheck(ddp) if 1 < ranks == dist.get_world_size() else None
