"""Checks whether a model's result depends on how a batch is cut, so that its micro-batch must not be changed.

Hooks on parameters are refused because many are not linear: they clip, or make the optimizer's step in backward.
Some cases do not show in modules: a loss across samples; random numbers, which `MicroBatcher` looks for in the loop.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from pacecar.profiler.ranks.data_parallel import find_ddp, meets_inside
from pacecar.torch_internals import lacking

__all__ = ["inexact"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_DROPOUTS_BY_NAME = ("_DropoutNd", "StochasticDepth", "DropBlock2d")
"""torch's private base, and torchvision's layers: their rate is `p`, too."""

_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def inexact(model: nn.Module) -> str | None:
    """Return which module or setting makes the result depend on the micro-batch, or None."""
    ddp = find_ddp(model)
    lacks = None if ddp is None else lacking("micro_batch", {"DDP": ddp})
    if lacks is not None:
        return lacks
    if ddp is not None and ddp.static_graph:
        return "DDP has static_graph=True, which breaks when gradients are accumulated (pytorch#143580)"
    if meets_inside(model):
        return "ranks wait for each other inside the model (FSDP or tensor parallelism), so none can try a size alone"
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the gradient of {name} has a hook, which would see each micro-batch's part instead of the whole"
    for name, module in model.named_modules():
        if _has_statistics(module):
            return f"{name or 'model'} is {type(module).__name__}: its statistics depend on the micro-batch"
        if _has_spectral_norm(module):
            return f"{name or 'model'} ({type(module).__name__}) has spectral_norm: each micro-batch moves its estimate"
        chance = _dropout(module)
        if chance is not None:
            return f"{name or 'model'} ({type(module).__name__}) has {chance}: other micro-batches draw other numbers"
    return None


def _has_statistics(module: nn.Module) -> bool:
    """Return whether each forward of `module` in training counts: for its result, or for what it keeps."""
    if isinstance(module, _INSTANCE_NORMS):
        return bool(module.track_running_stats)
    return isinstance(module, _BATCH_NORMS) or _is_called(module, "_BatchNorm") or _is_called(module, "_SpectralNorm")


def _has_spectral_norm(module: nn.Module) -> bool:
    """Return whether `torch.nn.utils.spectral_norm` was applied; it leaves no module, but `weight_u`, `weight_orig`."""
    return any(
        name.endswith("_u") and hasattr(module, name.removesuffix("_u") + "_orig")
        for name, _ in module.named_buffers(recurse=False)
    )


def _dropout(module: nn.Module) -> str | None:
    """Return the attribute with which `module` drops at random (dropout, attention_dropout, drop_prob ...), or None.

    Dropout called as a function leaves its rate in some attribute with "drop" in its name in every model we know.
    """
    if isinstance(module, _RANDOM):
        return "random numbers"
    if isinstance(module, _DROPOUTS) or any(_is_called(module, name) for name in _DROPOUTS_BY_NAME):
        return f"p={module.p}" if cast(float, module.p) > 0 else None
    for key, value in vars(module).items():
        if "drop" in key and isinstance(value, float) and value > 0:
            return f"{key}={value}"
    return None


def _is_called(module: nn.Module, base: str) -> bool:
    """Return whether `module` has a base of that name: torch's private ones, which other libraries use."""
    return any(kind.__name__ == base for kind in type(module).__mro__)
