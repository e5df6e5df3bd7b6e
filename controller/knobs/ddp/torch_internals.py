"""Takes the Reducer out of DDP and puts another one in.

A Reducer is built from parameters, a bucket for each, and limits.  Everything used here is probed on a throw-away
Reducer, never assumed from a version; `reducer` decides by the result (docs/decisions/0004-buckets-in-place.md).  These
are functions on a DDP object; they keep no state.  `pacecar.torch_internals` lists the private names and what is off
without them.
"""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pacecar.torch_internals import find, need

from ..actuator import ActuatorError

__all__ = [
    "CAP_ATTRIBUTES",
    "PrivateDdp",
    "ReducerParts",
    "build_by_helper",
    "build_ordered",
    "drop_reducer",
    "initial_first_bytes",
    "parts_of",
    "probe_helper",
    "probe_reducer",
    "recorded_order",
    "register_hook",
    "set_caps",
    "signature_of",
]

CAP_ATTRIBUTES = ("_bucket_config", "bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default")
"""Where DDP keeps its bucket sizes: the first since torch 2.12, the others before (and, unused, after)."""

_REDUCER = "torch.distributed.Reducer"
_LOGGER = "torch.distributed.Logger"
_ASSIGNMENT = "torch.distributed._compute_bucket_assignment_by_size"
_SYNC_BATCH_NORM = "torch.nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle"

MIB = 1 << 20
"""The size of DDP's first bucket by default, in all torch versions so far."""

PrivateDdp = Any
"""A DistributedDataParallel with the private parts that torch does not type."""


@dataclass(frozen=True, slots=True)
class ReducerParts:
    """What a Reducer is built of."""

    parameters: list[nn.Parameter]
    expect_sparse: list[bool]
    names: dict[int, str]


def parts_of(ddp: PrivateDdp) -> ReducerParts:
    """Return what DDP would build a Reducer of now."""
    parameters, expect_sparse = ddp._build_params_for_reducer()
    return ReducerParts(parameters, expect_sparse, ddp._build_debug_param_to_name_mapping(parameters))


def signature_of(parts: ReducerParts) -> tuple[tuple[int, ...], str]:
    """Return what identifies a set of parameters: their identities and shapes."""
    return tuple(id(p) for p in parts.parameters), repr([tuple(p.shape) for p in parts.parameters])


def recorded_order(ddp: PrivateDdp, count: int) -> tuple[int, ...] | None:
    """Return the order in which the first Reducer saw gradients become ready, None before it rebuilt."""
    recorded = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    order = tuple(int(index) for index in re.findall(r"\d+", str(recorded)))
    return order if sorted(order) == list(range(count)) else None


def initial_first_bytes(ddp: PrivateDdp) -> int:
    """Return the size of the first bucket by the sizes that `ddp` holds now."""
    config = getattr(ddp, "_bucket_config", None)
    if config is not None:
        return int(config.first_bucket_bytes_cap)
    is_default = getattr(ddp, "bucket_bytes_cap_default", False)
    return int(find("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES") or MIB if is_default else ddp.bucket_bytes_cap)


def set_caps(ddp: PrivateDdp, cap: int, first: int) -> None:
    """Write the sizes where DDP's own helper looks for them, during its call.

    Before torch 2.12 it knows no first size but its own.
    """
    ddp.bucket_bytes_cap = cap
    if hasattr(ddp, "bucket_bytes_cap_default"):
        ddp.bucket_bytes_cap_default = first < cap
    config = getattr(ddp, "_bucket_config", None)
    if config is not None:
        ddp._bucket_config = type(config)(bucket_bytes_cap=cap, per_bucket_bytes_caps=(), first_bucket_bytes_cap=first)


def drop_reducer(ddp: PrivateDdp) -> None:
    """Take the Reducer out of `ddp` and free its buckets before new ones are made.

    Raises:
        ActuatorError: something else keeps the old Reducer alive, so every switch would leak its buckets.
    """
    reducer: Any = getattr(ddp, "reducer", None)
    if reducer is None:
        return  # an earlier attempt got this far
    reducer._remove_autograd_hooks()
    ddp.logger = None
    del ddp.reducer
    alive = weakref.ref(reducer)
    del reducer
    if alive() is not None:
        _forget_copies(alive)
    if alive() is not None:
        raise ActuatorError("something else holds DDP's Reducer: its buckets would leak at every switch")


def _forget_copies(reducer: weakref.ref[Any]) -> None:
    """Remove `reducer` and its logger from the copies of DDP's attributes that torch.compile made.

    torch.compile(ddp) wraps with functools.wraps, which copies the whole `__dict__` to the wrapper.  Those copies are
    never read; they only keep the first Reducer's buckets.  Finding them costs some 50 ms, once.
    """
    for holder in gc.get_referrers(reducer()):
        if isinstance(holder, dict) and "__wrapped__" in holder and holder.get("reducer") is reducer():
            del holder["reducer"]
            holder.pop("logger", None)


def build_ordered(ddp: PrivateDdp, parts: ReducerParts, order: tuple[int, ...], cap: int, first: int) -> None:
    """Give `ddp` a Reducer whose buckets follow `order`, laid out just as the Reducer's own rebuild would."""
    parameters: list[Tensor] = list(parts.parameters)
    ordered = [parameters[i] for i in order]
    sparse = [parts.expect_sparse[i] for i in order]
    indices, limits = need(_ASSIGNMENT)(ordered, [first, cap], sparse, list(order))
    options = _reducer_options(ddp, parts, cap, first)
    ddp.reducer = need(_REDUCER)(parameters, indices, limits, ddp.process_group, **options)
    ddp.logger = need(_LOGGER)(ddp.reducer)
    ddp.reducer.set_logger(ddp.logger)
    has_sync_bn = any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())
    ddp.logger.set_construction_data_and_log(
        type(ddp.module).__name__,
        ddp.device_ids or [],
        -1 if ddp.output_device is None else ddp.output_device,
        ddp.broadcast_buffers,
        has_sync_bn,
        ddp.static_graph,
    )
    ddp._passing_sync_batchnorm_handle(ddp.module)
    _begin(ddp)


def build_by_helper(ddp: PrivateDdp, parts: ReducerParts) -> None:
    """Give `ddp` a Reducer by its own helper, with the sizes that were set."""
    ddp._ddp_init_helper(parts.parameters, parts.expect_sparse, parts.names, ddp.static_graph)
    _begin(ddp)


def _begin(ddp: PrivateDdp) -> None:
    """Reset `ddp`'s own flags to those of a new Reducer."""
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()


def register_hook(ddp: PrivateDdp, state: object, hook: Any) -> None:  # noqa: ANN401  any callable that DDP takes
    """Give the new Reducer its communication hook; it takes one, once."""
    ddp.logger._set_comm_hook_name(hook.__qualname__)
    need("torch.distributed._register_comm_hook")(ddp.reducer, state, hook)


def _reducer_options(ddp: PrivateDdp, parts: ReducerParts, cap: int, first: int) -> dict[str, Any]:
    """Return the keyword arguments that this torch's Reducer takes.

    Raises:
        ActuatorError: it takes an unknown argument, or lacks a needed one.
    """
    known: dict[str, Any] = {
        "expect_sparse_gradients": parts.expect_sparse,
        "bucket_bytes_cap": cap,
        "find_unused_parameters": ddp.find_unused_parameters,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "param_to_name_mapping": parts.names,
        "first_bucket_bytes_cap": first,
        "skip_all_reduce_unused_params": getattr(ddp, "skip_all_reduce_unused_params", False),
        "use_python_reducer": False,
        "bucket_bytes_cap_list": [],
        "batched_grad_copy": getattr(ddp, "batched_grad_copy", False),
    }
    text = need(_REDUCER).__init__.__doc__ or ""
    taken = re.findall(r"[(,] *(\w+): ", text.partition("process_group")[2])
    unknown = set(taken) - set(known)
    lacking = {"bucket_bytes_cap", "first_bucket_bytes_cap", "gradient_as_bucket_view"} - set(taken)
    if unknown or lacking:
        raise ActuatorError(f"torch {torch.__version__}: Reducer takes {sorted(unknown)} and lacks {sorted(lacking)}")
    return {name: known[name] for name in taken}


def probe_reducer(ddp: PrivateDdp) -> str | None:
    """Build and drop a Reducer of one small parameter, without communication; return what went wrong, or None."""
    try:
        parameter = nn.Parameter(torch.zeros(1, device=ddp.device))
        parts = ReducerParts([parameter], [False], {0: "probe"})
        indices, limits = need(_ASSIGNMENT)([parameter], [1024, 1024], [False], [0])
        options = _reducer_options(ddp, parts, 1024, 1024)
        reducer = need(_REDUCER)([parameter], indices, limits, ddp.process_group, **options)
        reducer.set_logger(need(_LOGGER)(reducer))
        reducer._remove_autograd_hooks()
        need(_SYNC_BATCH_NORM)
    except Exception as error:  # noqa: BLE001  whatever private API raises means: not this way
        return f"{type(error).__name__}: {error}"
    return None


def probe_helper(ddp: PrivateDdp) -> str | None:
    """Return what is unknown about DDP's own helper, or None."""
    parameters = list(inspect.signature(ddp._ddp_init_helper).parameters)
    if parameters == ["parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"]:
        return None
    return f"torch {torch.__version__}: _ddp_init_helper takes {parameters}, which is not known here"
