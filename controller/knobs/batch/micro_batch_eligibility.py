"""Checks whether a model's result depends on how a batch is cut, so that its micro-batch must not be changed.

Some cases do not show in modules: a functional dropout with a literal rate, a loss across samples.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from pacecar.profiler.ranks.data_parallel import find_ddp
from pacecar.torch_internals import lacking

__all__ = ["inexact"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def inexact(model: nn.Module) -> str | None:
    """Return which module or setting makes the result depend on the micro-batch, or None."""
    ddp = find_ddp(model)
    lacks = None if ddp is None else lacking("micro_batch", {"DDP": ddp})
    if lacks is not None:
        return lacks
    if ddp is not None and ddp.static_graph:
        return "DDP has static_graph=True, which breaks when gradients are accumulated (pytorch#143580)"
    if any("FSDP" in c.__name__ or "FullyShardedDataParallel" in c.__name__ for c in type(model).__mro__):
        return f"model is {type(model).__name__}: accumulation is exact there but not yet supported"
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS) or _is_called(module, "_BatchNorm"):
            return f"{name or 'model'} is {type(module).__name__}: its statistics depend on the micro-batch"
        chance = _dropout(module)
        if chance is not None:
            return f"{name or 'model'} ({type(module).__name__}) has {chance}: other micro-batches draw other numbers"
    return None


def _dropout(module: nn.Module) -> str | None:
    """Return the attribute with which `module` drops at random (dropout, attention_dropout, drop_prob ...), or None.

    Dropout called as a function leaves its rate in some attribute with "drop" in its name in every model we know.
    """
    if isinstance(module, _DROPOUTS) or _is_called(module, "_DropoutNd"):
        return f"p={module.p}" if cast(float, module.p) > 0 else None
    for key, value in vars(module).items():
        if "drop" in key and isinstance(value, float) and value > 0:
            return f"{key}={value}"
    return None


def _is_called(module: nn.Module, base: str) -> bool:
    """Return whether `module` has a base of that name: torch's private ones, which other libraries use."""
    return any(kind.__name__ == base for kind in type(module).__mro__)
