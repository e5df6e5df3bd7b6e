"""Reads what training holds in this rank's memory: parameters, gradients, optimizer state and the allocator's counters.

It looks at tensors' sizes; it asks no device and waits for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from pacecar.profiler.ranks.data_parallel import find_ddp, find_fsdp, uncompiled
from pacecar.profiler.utilization.allocator_memory import MemoryMeter, cuda_stats

from .guards.node_monitor import ranks_on_node
from .memory_advice import TrainingMemory

__all__ = ["read_training_memory"]

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The allocator's settings: torch 2.9's name, then the older one, which still works."""


def read_training_memory(
    model: nn.Module, optimizer: Optimizer, device: torch.device, environ: Mapping[str, str] = os.environ
) -> TrainingMemory:
    """Return what this rank holds now; gradients as large as parameters that need them, whether they are there."""
    ddp, fsdp = find_ddp(model), find_fsdp(uncompiled(model))
    ranks = 1 if ddp is None else ddp.process_group.size()
    stats = cuda_stats(device)
    kind = type(optimizer)
    return TrainingMemory(
        parameter_bytes=_local_bytes(model.parameters()),
        gradient_bytes=_local_bytes(p for p in model.parameters() if p.requires_grad),
        optimizer_bytes=_local_bytes(
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ),
        optimizer=f"{kind.__module__.removesuffix('.' + kind.__name__.lower())}.{kind.__qualname__}",
        replicas=ranks,
        shards=1 if fsdp is None else _shards(fsdp),
        node_ranks=ranks_on_node(torch.distributed.get_world_size()) if ranks > 1 or fsdp is not None else 1,
        device_bytes=None if stats is None else int(torch.cuda.get_device_properties(device).total_memory),
        allocator=None if stats is None else MemoryMeter(stats).read(),
        allocator_setting=next((environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)), ""),
    )


def _local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes on this rank; of a DTensor, its shard's.  A tensor counts once."""
    with torch.no_grad():
        local = {id(t): t.to_local() if hasattr(t, "to_local") else t for t in tensors}
    return sum(t.numel() * t.element_size() for t in local.values())


def _shards(fsdp: nn.Module) -> int:
    """Return over how many ranks FSDP2 shards; 1 with more than one mesh or a mesh of two dimensions."""
    meshes = {p.device_mesh for p in fsdp.parameters() if hasattr(p, "device_mesh")}
    return int(meshes.pop().size()) if len(meshes) == 1 and next(iter(meshes)).ndim == 1 else 1
