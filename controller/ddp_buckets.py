"""How large are DDP's gradient buckets?  Change it in the running job, without a new model wrapper.

The obvious ways do not work: DistributedDataParallel has no setter, assigning `ddp.bucket_bytes_cap` does nothing, the
C++ Reducer rebuilds its buckets once only, and wrapping the model again leaves the script with a dead `model`.  So
the Reducer inside the user's own DDP object is replaced at a step boundary, on all ranks at the same one.

Two recipes; which one is used is decided before tuning, is part of `layout()` and so is the same on all ranks:

    ordered   a Reducer whose buckets are laid out in the gradient-ready order that the first Reducer recorded.  The
              first step afterwards already overlaps.
    helper    DDP's own `_ddp_init_helper`.  Used with find_unused_parameters and static_graph, which record no order,
              and where this torch's Reducer takes arguments that we do not know.  Without unused parameters its
              first step has one bucket and no overlap.

Both touch private parts of torch.  What they need is probed on a throw-away Reducer, never assumed from a version;
where something is missing the knob is refused with the reason.  See docs/decisions/0004-buckets-in-place.md.

Left out: per-bucket sizes (bucket_cap_mb_list), hooks that keep state by bucket (PowerSGD), FSDP and engines that own
their buckets: refused.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import re
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import TuneConfig
from pacecar.controller.actuator import ActuatorError

__all__ = ["BucketActuator", "find_ddp"]

BUCKETS_MAX = 64
"""The smallest bucket offered is this fraction of all gradients: more buckets cost latency and win no overlap."""

_ATTRIBUTES = (
    "reducer",
    "logger",
    "process_group",
    "module",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "bucket_bytes_cap",
    "static_graph",
    "_comm_hooks",
    "_ddp_init_helper",
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_get_ddp_logging_data",
)
"""What is used of DistributedDataParallel; present in torch 2.4 to 2.13."""

_CAP_ATTRIBUTES = ("_bucket_config", "bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default")
"""Where DDP keeps its bucket sizes: the first since torch 2.12, the others before (and, unused, after)."""

Recipe = Literal["ordered", "helper"]

_PrivateDdp = Any
"""A DistributedDataParallel with the private parts that torch does not type."""

_c10d: Any = dist
"""torch.distributed with the private names that it does not export."""


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that is `model`, also when torch.compile wraps it, else None."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a Reducer is built of."""

    parameters: list[nn.Parameter]
    expect_sparse: list[bool]
    names: dict[int, str]


class BucketActuator:
    """The knob "bucket_bytes": the size to which DDP fills a gradient bucket before it is reduced.

    The value that DDP came with brings its own first bucket back (torch makes it 1 MiB by default); any other value is
    the size of the first bucket too, as with an explicit `bucket_cap_mb`.
    """

    def __init__(self, model: nn.Module, config: TuneConfig) -> None:
        self._model = model
        self._config = config
        self._ddp: _PrivateDdp | None = find_ddp(model)
        ddp = self._ddp
        self._initial = {} if ddp is None else {n: getattr(ddp, n) for n in _CAP_ATTRIBUTES if hasattr(ddp, n)}
        self._value: int | None = self._initial.get("bucket_bytes_cap")
        self._order: tuple[int, ...] | None = None
        self._signature: tuple[tuple[int, ...], str] | None = None
        self._recipe: Recipe | None = None

    @property
    def knob(self) -> str:
        """The knob's name."""
        return "bucket_bytes"

    def value(self) -> int:
        """Return the bucket size in force.

        Raises:
            ActuatorError: the model is not under DistributedDataParallel.
        """
        if self._value is None:
            raise ActuatorError(self._not_ddp())
        return self._value

    def domain(self) -> tuple[int, ...]:
        """Return powers of two from 1/64 of all gradients to all gradients, within bounds, and the present value."""
        total = sum(self.gradient_bytes())
        low = max(self._config.bucket_bytes_min, total // BUCKETS_MAX, 1)
        high = min(self._config.bucket_bytes_max, 1 << max(0, total - 1).bit_length())
        sizes = {1 << e for e in range(low.bit_length() - 1, high.bit_length()) if low <= 1 << e <= high}
        return tuple(sorted(sizes | {self.value()}))

    def gradient_bytes(self) -> tuple[int, ...]:
        """Return the size of each synchronized gradient in the order in which they become ready; () without DDP.

        Before the first Reducer has recorded that order it is the reversed order of registration, as DDP assumes.
        """
        if self._ddp is None:
            return ()
        parameters, _ = self._ddp._build_params_for_reducer()
        order = self._ready_order(len(parameters)) or tuple(reversed(range(len(parameters))))
        return tuple(parameters[i].numel() * parameters[i].element_size() for i in order)

    def refusal(self) -> str | None:
        """Return why the buckets must not be changed here, or None; also decides the recipe."""
        ddp = self._ddp
        if ddp is None:
            return self._not_ddp()
        missing = [name for name in _ATTRIBUTES if not hasattr(ddp, name)]
        if missing:
            return f"torch {torch.__version__} has another DistributedDataParallel inside: no {', '.join(missing)}"
        reason = _unsupported(ddp)
        if reason is not None:
            return reason
        if len(self.domain()) == 1:
            return f"all gradients ({sum(self.gradient_bytes())} bytes) fit in the smallest bucket: nothing to choose"
        return self._choose_recipe(ddp)

    def layout(self) -> str:
        """Return a hash of recipe, parameters and gradient-ready order."""
        if self._ddp is None:
            return "no ddp"
        parameters, sparse = self._ddp._build_params_for_reducer()
        parts = (
            self._recipe,
            self._ready_order(len(parameters)),
            [(tuple(p.shape), str(p.dtype), s) for p, s in zip(parameters, sparse, strict=True)],
            self._ddp.gradient_as_bucket_view,
            self._ddp.find_unused_parameters,
            sorted((k, v) for k, v in self._initial.items() if isinstance(v, int)),
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def apply(self, value: int) -> None:
        """Replace DDP's Reducer by one with buckets of `value` bytes, also when that is the present size.

        Must be called on all ranks at the same step boundary, outside forward and backward.

        Raises:
            ActuatorError: it failed; a new Reducer of the old size is in place (all ranks must then do the same), or,
                when the message says so, none could be built.
        """
        ddp, old = self._ddp, self.value()
        assert ddp is not None, "value() raises without DDP"
        if self._recipe is None:
            raise ActuatorError(self.refusal() or "bucket size was not prepared: refusal() was never asked")
        try:
            self._rebuild(ddp, value)
        except Exception as error:
            try:
                self._rebuild(ddp, old)
            except Exception as second:
                raise ActuatorError(f"buckets of {value} failed ({error}), and so did going back to {old}") from second
            raise ActuatorError(f"buckets of {value} bytes: {type(error).__name__}: {error}") from error
        self._value = value

    def _not_ddp(self) -> str:
        return (
            f"model is {type(self._model).__name__}, not DistributedDataParallel: bucket size is not tuned; wrap it in"
            " torch.nn.parallel.DistributedDataParallel and pass that to attach()"
        )

    def _ready_order(self, count: int) -> tuple[int, ...] | None:
        """Return the recorded gradient-ready order, once there is one; later Reducers keep it."""
        if self._order is None and self._ddp is not None and not self._ddp.find_unused_parameters:
            recorded = self._ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
            order = tuple(int(index) for index in re.findall(r"\d+", str(recorded)))
            if sorted(order) == list(range(count)):
                self._order = order
        return self._order

    def _choose_recipe(self, ddp: _PrivateDdp) -> str | None:
        parts = _parts(ddp)
        self._signature = _signature(parts)
        if ddp.find_unused_parameters or ddp.static_graph:
            recipe: Recipe = "helper"
        elif self._ready_order(len(parts.parameters)) is None:
            return "DDP has not recorded the order of its gradients yet (it does so in the second step)"
        else:
            recipe = "ordered" if _probe_reducer(ddp) is None else "helper"
        if recipe == "helper":
            parameters = list(inspect.signature(ddp._ddp_init_helper).parameters)
            if parameters != ["parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"]:
                return f"torch {torch.__version__}: _ddp_init_helper takes {parameters}, which is not known here"
        self._recipe = recipe
        return None

    def _rebuild(self, ddp: _PrivateDdp, value: int) -> None:
        parts = _parts(ddp)
        if _signature(parts) != self._signature:
            raise ActuatorError("the model's parameters changed since tuning began")
        _drop_reducer(ddp)
        self._set_caps(ddp, value)
        if self._recipe == "ordered" and self._order is not None:
            _build_ordered(ddp, parts, self._order)
        else:
            ddp._ddp_init_helper(parts.parameters, parts.expect_sparse, parts.names, ddp.static_graph)
        ddp._has_rebuilt_buckets = False
        if ddp.static_graph:
            ddp._static_graph_delay_allreduce_enqueued = False
            ddp.reducer._set_static_graph()
            _logger(ddp)._set_static_graph()
        for hook, state in ddp._comm_hooks:
            _logger(ddp)._set_comm_hook_name(hook.__qualname__)
            _c10d._register_comm_hook(ddp.reducer, state, hook)

    def _set_caps(self, ddp: _PrivateDdp, value: int) -> None:
        if value == self._initial["bucket_bytes_cap"]:
            for name, initial in self._initial.items():
                setattr(ddp, name, initial)
            return
        ddp.bucket_bytes_cap = value
        if "bucket_bytes_cap_default" in self._initial:
            ddp.bucket_bytes_cap_default = False
        if "_bucket_config" in self._initial:
            config: Any = self._initial["_bucket_config"]
            ddp._bucket_config = type(config)(
                bucket_bytes_cap=value, per_bucket_bytes_caps=(), first_bucket_bytes_cap=value
            )


def _unsupported(ddp: _PrivateDdp) -> str | None:
    """Return which feature in use does not survive a new Reducer, or None."""
    if dist.get_world_size(ddp.process_group) == 1:
        return "DDP runs on one rank: there is no communication to tune"
    if getattr(ddp, "_use_python_reducer", False):
        return "DDP uses the python reducer (optimize_ddp='python_reducer'): it has no buckets"
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP has mixed_precision=...: its hooks belong to the Reducer"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "DDP has delay_all_reduce_named_params: those hooks cannot be carried over"
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp.parameters()):
        return "the optimizer runs in backward (apply_optimizer_in_backward): its hooks belong to the Reducer"
    if getattr(getattr(ddp, "_join_config", None), "enable", False):
        return "the loop runs inside DDP's join(): a rank may leave at any step"
    if getattr(ddp, "bucket_bytes_cap_list", None):
        return "DDP has bucket_cap_mb_list: every bucket has its own size already"
    for hook, state in ddp._comm_hooks:
        if state is not None and not isinstance(state, dist.ProcessGroup):
            name = getattr(hook, "__qualname__", str(hook))
            return f"communication hook {name} keeps state ({type(state).__name__}) that may depend on the buckets"
    hook_name = ddp._get_ddp_logging_data().get("comm_hook")
    if hook_name and not ddp._comm_hooks:
        return f"built-in communication hook {hook_name} cannot be carried over; use register_comm_hook()"
    return None


def _parts(ddp: _PrivateDdp) -> _Parts:
    parameters, expect_sparse = ddp._build_params_for_reducer()
    return _Parts(parameters, expect_sparse, ddp._build_debug_param_to_name_mapping(parameters))


def _signature(parts: _Parts) -> tuple[tuple[int, ...], str]:
    return tuple(id(p) for p in parts.parameters), repr([tuple(p.shape) for p in parts.parameters])


def _logger(ddp: _PrivateDdp) -> Any:  # noqa: ANN401  torch.distributed.Logger
    assert ddp.logger is not None, "a Reducer was just built with it"
    return ddp.logger


def _drop_reducer(ddp: _PrivateDdp) -> None:
    """Take the Reducer out of `ddp` and let its buckets go before new ones are made.

    Raises:
        ActuatorError: something else keeps the old Reducer alive, so that every switch would leak its buckets.
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
    """Take `reducer` and its logger out of the copies of DDP's attributes that torch.compile made.

    torch.compile(ddp) wraps with functools.wraps, which copies the whole `__dict__` to the wrapper; nobody reads those
    copies, they only keep the first Reducer's buckets.  Looking for them costs some 50 ms, once.
    """
    for holder in gc.get_referrers(reducer()):
        if isinstance(holder, dict) and "__wrapped__" in holder and holder.get("reducer") is reducer():
            del holder["reducer"]
            holder.pop("logger", None)


def _build_ordered(ddp: _PrivateDdp, parts: _Parts, order: tuple[int, ...]) -> None:
    """Give `ddp` a Reducer whose buckets follow `order`, laid out just as the Reducer's own rebuild would."""
    parameters: list[Tensor] = list(parts.parameters)
    cap, first = _caps(ddp)
    ordered = [parameters[i] for i in order]
    sparse = [parts.expect_sparse[i] for i in order]
    indices, limits = _c10d._compute_bucket_assignment_by_size(ordered, [first, cap], sparse, list(order))
    ddp.reducer = _c10d.Reducer(parameters, indices, limits, ddp.process_group, **_reducer_options(ddp, parts))
    ddp.logger = _c10d.Logger(ddp.reducer)
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


def _caps(ddp: _PrivateDdp) -> tuple[int, int]:
    """Return the size of the buckets and of the first one."""
    config = getattr(ddp, "_bucket_config", None)
    if config is not None:
        return config.bucket_bytes_cap, config.first_bucket_bytes_cap
    default = getattr(ddp, "bucket_bytes_cap_default", False)
    return ddp.bucket_bytes_cap, _c10d._DEFAULT_FIRST_BUCKET_BYTES if default else ddp.bucket_bytes_cap


def _reducer_options(ddp: _PrivateDdp, parts: _Parts) -> dict[str, Any]:
    """Return the keyword arguments that this torch's Reducer takes.

    Raises:
        ActuatorError: it takes one that we do not know, or lacks one that we rely on.
    """
    cap, first = _caps(ddp)
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
    text = _c10d.Reducer.__init__.__doc__ or ""
    taken = re.findall(r"[(,] *(\w+): ", text.partition("process_group")[2])
    unknown = set(taken) - set(known)
    lacking = {"bucket_bytes_cap", "first_bucket_bytes_cap", "gradient_as_bucket_view"} - set(taken)
    if unknown or lacking:
        raise ActuatorError(f"torch {torch.__version__}: Reducer takes {sorted(unknown)} and lacks {sorted(lacking)}")
    return {name: known[name] for name in taken}


def _probe_reducer(ddp: _PrivateDdp) -> str | None:
    """Build and drop a Reducer of one small parameter, without communication; return what went wrong, or None."""
    try:
        parameter = nn.Parameter(torch.zeros(1, device=ddp.device))
        parts = _Parts([parameter], [False], {0: "probe"})
        indices, limits = _c10d._compute_bucket_assignment_by_size([parameter], [1024, 1024], [False], [0])
        options = _reducer_options(ddp, parts)
        reducer = _c10d.Reducer([parameter], indices, limits, ddp.process_group, **options)
        reducer.set_logger(_c10d.Logger(reducer))
        reducer._remove_autograd_hooks()
    except Exception as error:  # noqa: BLE001  whatever private API raises means: not this way
        return f"{type(error).__name__}: {error}"
    return None
