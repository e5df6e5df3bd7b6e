"""Finds the wrappers that make a model data-parallel: DistributedDataParallel or FSDP2, at its top or inside it.

In: the module that a loop calls.  Out: its wrappers, and how many ranks each of them spans.

A loop may not call the wrapper itself: trainers keep it in an object of their own (a task, a model with two towers) and
call that.  So the search covers modules and the lists, dicts and trainer objects in their attributes.  It reads
attributes from the objects' own tables, so none of their code runs, and keeps nothing.

Left out: the inside of a module compiled from outside, where calls cannot be observed; FSDP1, which has no knobs;
whether the loop calls the wrapper (`job.autoattach`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.torch_internals import own_has

__all__ = [
    "find_ddp",
    "find_fsdp",
    "fsdp_groups",
    "is_fsdp",
    "is_fsdp1",
    "is_one_group",
    "meets_inside",
    "parallel_of",
    "spans_all_ranks",
    "tensor_parallel_ranks",
    "uncompiled",
    "wrapper_of_others",
    "wrappers_in",
]

HELD_MAX = 2_000
"""At most so many lists, dicts and objects are searched besides modules, the nearest first.  A trainer's object may
hold a whole data set, and 64 modules with one are searched one by one (15 us per object)."""

ENTRIES_MAX = 256
"""Entries of one list or dict that are searched; no trainer keeps more wrapped models in one."""

OBJECTS_MAX = 2
"""Nested objects between one module and the next: a trainer, and a part of it."""

_PLAIN = (str, bytes, int, float, complex, torch.Tensor, torch.device, torch.dtype)
_NO_HOLDERS = (*_PLAIN, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)

_NAMES = ("DistributedDataParallel", "FullyShardedDataParallel")

_OF_TORCH = frozenset(vars(nn.Module()))


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that is `model` or inside it, also under torch.compile; None without one.

    If there are several, it is the one with the most bytes of gradients.
    """
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        return inner
    held = [wrapper for wrapper in wrappers_in(model) if isinstance(wrapper, DistributedDataParallel)]
    return max(held, key=_gradient_bytes) if held else None


def find_fsdp(model: nn.Module) -> nn.Module | None:
    """Return the outermost FSDP2 module that is `model` or inside it; None if there are none or several."""
    held = [wrapper for wrapper in wrappers_in(model) if is_fsdp(wrapper)]
    return held[0] if len(held) == 1 else None


def is_fsdp(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to `module`; by name, because importing FSDP takes a second."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether `module` is a FullyShardedDataParallel; by name, for the same reason."""
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


def wrapper_of_others(model: nn.Module) -> str | None:
    """Return "megatron's DistributedDataParallel" for another library's class of the same name as torch's, else None.

    Megatron's and Apex's reduce gradients in their own buffers and have no Reducer whose buckets a knob could change.
    """
    kind = type(uncompiled(model))
    if kind.__name__ not in _NAMES or issubclass(kind, DistributedDataParallel):
        return None
    library = kind.__module__.partition(".")[0]
    return None if library == "torch" else f"{library}'s {kind.__name__}"


def wrappers_in(model: nn.Module) -> list[nn.Module]:
    """Return the DistributedDataParallel and FSDP2 modules that are `model` or inside it, the outermost of each branch.

    A wrapper that contains `model`, reached through a trainer's object, does not count.
    """
    found: list[nn.Module] = []
    seen: set[int] = set()
    held_count = 0
    waiting: deque[tuple[Any, int]] = deque([(model, 0)])
    while waiting and held_count < HELD_MAX:
        held, objects = waiting.popleft()
        if id(held) in seen:
            continue
        seen.add(id(held))
        kind = type(held)  # type(), because isinstance asks the object, and proxies answer by importing
        if not issubclass(kind, nn.Module):
            held_count += 1
            waiting.extend((part, objects + _is_object(part)) for part in _parts(held, objects))
        elif issubclass(kind, DistributedDataParallel) or is_fsdp(held):
            if held is model or all(inner is not model for inner in held.modules()):
                found.append(held)
        elif not _is_compiled(held):
            waiting.extend((child, 0) for child in _holders(_children(held).values()))
            own = [part for name, part in vars(held).items() if name not in _OF_TORCH]
            waiting.extend((part, int(_is_object(part))) for part in _holders(own))
    return found


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wraps, or `model` itself."""
    inner: nn.Module | None = _children(model).get("_orig_mod")
    return model if inner is None else inner


def _children(module: nn.Module) -> dict[str, Any]:
    """Return the modules in `module`'s own table; none for TorchScript, whose table is not a dict."""
    children = vars(module).get("_modules")
    return children if isinstance(children, dict) else {}


def _is_compiled(module: nn.Module) -> bool:
    return uncompiled(module) is not module or vars(module).get("_compiled_call_impl") is not None


def _is_object(thing: object) -> bool:
    return not issubclass(type(thing), (nn.Module, list, tuple, dict))


def _parts(held: Any, objects: int) -> list[Any]:  # noqa: ANN401  whatever a module's attribute is
    """Return the parts of a list, a dict or an object that may contain a module."""
    kind = type(held)
    parts: Iterable[Any] = ()
    if issubclass(kind, dict):
        parts = dict.values(held)
    elif issubclass(kind, (list, tuple)):
        parts = list.__iter__(held) if issubclass(kind, list) else tuple.__iter__(held)
    elif objects <= OBJECTS_MAX:
        try:
            parts = object.__getattribute__(held, "__dict__").values()
        except Exception:  # noqa: BLE001  an object without a table of attributes, or with one of its own
            return []
    return _holders(islice(parts, ENTRIES_MAX))


def _holders(parts: Iterable[Any]) -> list[Any]:
    return [part for part in parts if part is not None and not issubclass(type(part), _NO_HOLDERS)]


def _gradient_bytes(ddp: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)


# --- how many ranks -----------------------------------------------------------------------------------


def fsdp_groups(module: Any) -> list[Any]:  # noqa: ANN401  an FSDPModule
    """Return the parameter groups of one module, without those of inner modules (torch 2.6 to 2.13)."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def parallel_of(model: nn.Module) -> dict[str, int]:
    """Return the number of ranks of each kind of parallelism that `model` shows; empty if it shows none.

    "data" counts the ranks of DDP's process group or FSDP2's device mesh; other dimensions of a sharded parameter's
    mesh have the script's names ("tp").
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    ddp = find_ddp(model)
    if ddp is not None:
        return {"data": dist.get_world_size(ddp.process_group)}
    fsdp = find_fsdp(uncompiled(model))
    return {} if fsdp is None else _mesh_sizes(fsdp)


def spans_all_ranks(fsdp: nn.Module) -> bool:
    """Return whether an FSDP2 module's parameters are divided among all ranks of the job."""
    meshes = [mesh for mesh in map(_mesh, fsdp.parameters()) if mesh is not None]
    return bool(meshes) and all(mesh.size() == dist.get_world_size() for mesh in meshes)


def meets_inside(model: nn.Module) -> bool:
    """Return whether ranks wait for each other inside the forward and backward of `model`: its parameters are sharded.

    By FSDP, or as DTensors (tensor parallelism).
    """
    modules = [module for top in (model, *wrappers_in(model)) for module in top.modules()]
    is_sharded = any(is_fsdp(module) or is_fsdp1(module) for module in modules)
    return is_sharded or any(_mesh(parameter) is not None for parameter in model.parameters())


def is_one_group(model: nn.Module, world_size: int) -> bool:
    """Return whether all `world_size` ranks share `model`, as replicas or shards: no other ranks are waited for."""
    return world_size in (math.prod(parallel_of(model).values()), tensor_parallel_ranks(model))


def tensor_parallel_ranks(model: nn.Module) -> int:
    """Return how many ranks share a parameter as DTensors that FSDP2 did not make; 1 without tensor parallelism.

    Each of them computes a part of each layer for the same samples and reduces activations instead of gradients.
    """
    if is_fsdp(model) or wrappers_in(model):
        return 1
    return max((_shards(parameter) for parameter in model.parameters()), default=1)


def _shards(parameter: nn.Parameter) -> int:
    """Return the number of parts that a DTensor is divided into; 1 for any other tensor."""
    mesh, placements = _mesh(parameter), getattr(parameter, "placements", ())
    return 1 if mesh is None else math.prod(mesh.size(at) for at, each in enumerate(placements) if each.is_shard())


def _mesh(parameter: nn.Parameter) -> Any:  # noqa: ANN401  a DeviceMesh, of a DTensor
    return getattr(parameter, "device_mesh", None)


def _mesh_sizes(fsdp: nn.Module) -> dict[str, int]:
    """Return the sizes of the meshes of `fsdp` by purpose; empty if its modules differ."""
    sizes: set[tuple[tuple[str, int], ...]] = set()
    for module in fsdp.modules():
        for group in fsdp_groups(module) if is_fsdp(module) and own_has(module, _STATE) else []:
            if not own_has(group, _MESH_INFO):
                return {}
            data = group.mesh_info.mesh
            whole = next((mesh for mesh in map(_mesh, module.parameters()) if mesh is not None), data)
            names, own = whole.mesh_dim_names or (), data.mesh_dim_names or ()
            others = [(name, whole.size(at)) for at, name in enumerate(names) if name not in own]
            sizes.add((("data", _data_ranks(group.mesh_info)), *(others if whole.size() != data.size() else ())))
    return dict(sizes.pop()) if len(sizes) == 1 else {}


def _data_ranks(mesh_info: Any) -> int:  # noqa: ANN401  of FSDP2
    sizes = [getattr(mesh_info, name, 1) for name in ("shard_mesh_size", "replicate_mesh_size")]
    return int(math.prod(sizes))


_STATE = "torch.distributed.fsdp.FSDPModule._get_fsdp_state"
_MESH_INFO = "torch.distributed.fsdp.FSDPParamGroup.mesh_info"
