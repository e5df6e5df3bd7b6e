"""Replaces the Reducer inside the user's DDP object, so that several knobs change together in the running job.

The obvious ways do not work: DistributedDataParallel has no setter, assigning `ddp.bucket_bytes_cap` does nothing, the
C++ Reducer rebuilds its buckets once only and takes one communication hook, once, and wrapping the model again leaves
the script with a `model` that no longer communicates.  So the Reducer is replaced at a step boundary, on all ranks at
the same one.

There are two recipes.  The choice is made before tuning and is part of `layout()`, so it is the same on all ranks:

    ordered   a Reducer whose buckets follow the gradient-ready order that the first Reducer recorded.  The first step
              afterwards already overlaps.
    helper    DDP's own `_ddp_init_helper`.  Used with find_unused_parameters and static_graph, which record no order,
              and if this torch's Reducer takes unknown arguments.  Without unused parameters its first step has one
              bucket and no overlap.

If neither recipe works, the knobs are refused with the reason.  Bucket sizes and compression are separate knobs of this
one Reducer, so that a switch of several rebuilds it once: requests inside `gathered()` are carried out when the
outermost context ends.

Refused: the user's hooks that keep state by bucket (PowerSGD), FSDP, and engines that own their buckets.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from pacecar.config import TuneConfig
from pacecar.controller.restart_advice import engine_advice
from pacecar.profiler.ranks.data_parallel import (
    find_ddp,
    is_fsdp,
    is_fsdp1,
    tensor_parallel_ranks,
    wrapper_of_others,
    wrappers_in,
)
from pacecar.torch_internals import lacking

from ..actuator import Actuator, ActuatorError
from . import torch_internals as private
from .comm_hook import Compressor

__all__ = ["BucketPlan", "DdpReducer", "ReducerActuator"]

Recipe = Literal["ordered", "helper"]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """What the Reducer must be.

    `first_bytes` None: as DDP does it, 1 MiB with the size that it came with if that was the default, else the size of
    all buckets.  `hook` None: no communication hook but the user's, so the arithmetic is DDP's own, bit for bit.
    """

    bucket_bytes: int
    first_bytes: int | None = None
    hook: Compressor | None = None


_in_force: weakref.WeakKeyDictionary[nn.Module, BucketPlan] = weakref.WeakKeyDictionary()
"""What an earlier tuner of this process left in force; DDP itself holds the user's values."""


class DdpReducer:
    """The Reducer of the DistributedDataParallel that is `model`; shared by the knobs that change it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        ddp: private.PrivateDdp | None = find_ddp(model)
        self._lacks = None if ddp is None else lacking("ddp_buckets", {"DDP": ddp})
        if self._lacks is not None:
            ddp = None  # an unknown DDP is treated as none
        self.ddp = ddp
        self._initial = {} if ddp is None else {n: getattr(ddp, n) for n in private.CAP_ATTRIBUTES if hasattr(ddp, n)}
        self._initial_first = None if ddp is None else private.initial_first_bytes(ddp)
        self._plan = None if ddp is None else _in_force.get(ddp) or BucketPlan(ddp.bucket_bytes_cap)
        self._wanted: BucketPlan | None = None
        self._depth = 0
        self._order: tuple[int, ...] | None = None
        self._signature: tuple[tuple[int, ...], str] | None = None
        self.recipe: Recipe | None = None

    @property
    def plan(self) -> BucketPlan:
        """The plan in force.

        Raises:
            ActuatorError: the model is not under DistributedDataParallel.
        """
        if self._plan is None:
            raise ActuatorError(self.not_ddp)
        return self._plan

    @property
    def not_ddp(self) -> str:
        """Why this model's Reducer cannot be replaced: it has no known one."""
        kind, ddp = type(self._model).__name__, "torch.nn.parallel.DistributedDataParallel"
        others, divided = wrapper_of_others(self._model), _divided(self._model)
        return (
            self._lacks
            or engine_advice(kind)
            or (others and f"model is {others}, not torch's: its buckets are its own, and {ddp}'s are what is tuned")
            or (divided and f"model is {divided}, not under DistributedDataParallel: there are no buckets to size")
            or (
                f"model is {kind}, not DistributedDataParallel: bucket size is not tuned; wrap it in {ddp} and pass"
                " that to attach()"
            )
        )

    @property
    def first_bytes(self) -> int:
        """The size of the first bucket in force, pinned or not."""
        plan = self.plan
        return self._sizes(plan)[1] if plan.first_bytes is None else plan.first_bytes

    def gradient_bytes(self) -> tuple[int, ...]:
        """Return the size of each synchronized gradient in the order in which they become ready; () without DDP.

        Until the first Reducer has recorded that order, it is the reversed order of registration, as DDP assumes.
        """
        if self.ddp is None:
            return ()
        parameters, _ = self.ddp._build_params_for_reducer()
        order = self._ready_order(len(parameters)) or tuple(reversed(range(len(parameters))))
        return tuple(parameters[i].numel() * parameters[i].element_size() for i in order)

    @property
    def can_size_first(self) -> bool:
        """Whether the first bucket can have any size: before torch 2.12, DDP's helper knows only its own two."""
        return self.recipe == "ordered" or "_bucket_config" in self._initial

    def pin_first(self) -> None:
        """Give the first bucket its own size, which other knobs do not change.

        Part of the layout: if only some ranks have the knob, none turns any bucket size.
        """
        if self._plan is not None and self._plan.first_bytes is None:
            self._plan = replace(self._plan, first_bytes=self.first_bytes)

    # --- before tuning ----------------------------------------------------------------------------

    def refusal(self) -> str | None:
        """Return why the Reducer must not be replaced here, or None."""
        ddp = self.ddp
        if ddp is None:
            return self.not_ddp
        return _unsupported(ddp)

    def prepare(self) -> str | None:
        """Decide the recipe; return why there is none, or None.  Called after `refusal`."""
        ddp = self.ddp
        assert ddp is not None, "refusal() comes first"
        parts = private.parts_of(ddp)
        self._signature = private.signature_of(parts)
        if ddp.find_unused_parameters or ddp.static_graph:
            recipe: Recipe = "helper"
        elif self._ready_order(len(parts.parameters)) is None:
            return "DDP has not recorded the order of its gradients yet (it does so in the second step)"
        else:
            recipe = "ordered" if private.probe_reducer(ddp) is None else "helper"
        if recipe == "helper":
            reason = private.probe_helper(ddp)
            if reason is not None:
                return reason
        self.recipe = recipe
        return None

    def layout(self) -> str:
        """Return a hash of recipe, parameters and gradient-ready order."""
        ddp = self.ddp
        if ddp is None:
            return "no ddp"
        parameters, sparse = ddp._build_params_for_reducer()
        parts = (
            self.recipe,
            self._ready_order(len(parameters)),
            [(tuple(p.shape), str(p.dtype), s) for p, s in zip(parameters, sparse, strict=True)],
            ddp.gradient_as_bucket_view,
            ddp.find_unused_parameters,
            sorted((k, v) for k, v in self._initial.items() if isinstance(v, int)),
            self.plan.first_bytes,
        )
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    # --- at a step boundary, on all ranks at the same one ----------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold back what is requested inside; carry it out with one new Reducer when the outermost context ends.

        An exception inside discards what was requested.
        """
        self._depth += 1
        try:
            yield
        except BaseException:
            self._wanted = None
            raise
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._carry_out()

    def request(self, **changes: Any) -> None:  # noqa: ANN401  fields of BucketPlan
        """Replace the Reducer by one with `changes` of the plan, even if they change nothing: ranks do it together.

        Must be called on all ranks at the same step boundary, outside forward and backward.

        Raises:
            ActuatorError: it failed.  A new Reducer of the old plan is in place (all ranks must then do the same).
                If the message says so, none could be built.
        """
        self._wanted = replace(self._wanted or self.plan, **changes)
        if self._depth == 0:
            self._carry_out()

    def _carry_out(self) -> None:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return
        ddp, old = self.ddp, self.plan
        assert ddp is not None, "plan raises without DDP"
        if self.recipe is None:
            raise ActuatorError(self.refusal() or self.prepare() or "refusal() was never asked")
        try:
            self._rebuild(ddp, wanted)
        except BaseException as error:
            try:
                self._rebuild(ddp, old)
            except Exception as second:
                raise ActuatorError(f"{_describe(wanted)} failed ({error}), and so did going back") from second
            if not isinstance(error, Exception):  # a signal: the script may yet save its model, or train on
                raise
            raise ActuatorError(f"{_describe(wanted)}: {type(error).__name__}: {error}") from error
        self._plan = wanted

    def _rebuild(self, ddp: private.PrivateDdp, plan: BucketPlan) -> None:
        parts = private.parts_of(ddp)
        if private.signature_of(parts) != self._signature:
            raise ActuatorError("the model's parameters changed since tuning began")
        private.drop_reducer(ddp)
        cap, first = self._sizes(plan)
        if self.recipe == "ordered" and self._order is not None:
            private.build_ordered(ddp, parts, self._order, cap, first)
        elif plan.first_bytes is None and cap == self._initial["bucket_bytes_cap"]:
            private.build_by_helper(ddp, parts)
        else:
            # DDP's helper reads the sizes from DDP, which is pickled and copied with the user's own values.
            private.set_caps(ddp, cap, first)
            try:
                private.build_by_helper(ddp, parts)
            finally:
                for name, initial in self._initial.items():
                    setattr(ddp, name, initial)
        _in_force[ddp] = replace(plan, hook=None)
        for hook, state in ddp._comm_hooks:
            private.register_hook(ddp, state, hook)
        if plan.hook is not None:
            plan.hook.renew()
            private.register_hook(ddp, plan.hook, Compressor.hook)

    def _sizes(self, plan: BucketPlan) -> tuple[int, int]:
        """Return the size of the buckets and of the first one, which is at most the size of the others."""
        cap, first = plan.bucket_bytes, plan.first_bytes
        if first is None and cap == self._initial["bucket_bytes_cap"]:
            first = self._initial_first
        return cap, cap if first is None else min(first, cap)

    def _ready_order(self, count: int) -> tuple[int, ...] | None:
        """Return the recorded gradient-ready order, if there is one; later Reducers keep it."""
        if self._order is None and self.ddp is not None and not self.ddp.find_unused_parameters:
            self._order = private.recorded_order(self.ddp, count)
        return self._order


class ReducerActuator(Actuator):
    """A knob of the one Reducer that several knobs share."""

    def __init__(self, config: TuneConfig, reducer: DdpReducer) -> None:
        self._config = config
        self._reducer = reducer

    def layout(self) -> str:
        """Return a hash of recipe, parameters and gradient-ready order."""
        return self._reducer.layout()

    def gathered(self) -> AbstractContextManager[None]:
        """Return the context that rebuilds the Reducer once for all knobs."""
        return self._reducer.gathered()


def _describe(plan: BucketPlan) -> str:
    return f"buckets of {plan.bucket_bytes} bytes" + ("" if plan.hook is None else " with a communication hook")


def _unsupported(ddp: private.PrivateDdp) -> str | None:
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
    lacks = lacking("compression") if ddp._comm_hooks else None
    if lacks is not None:
        return f"the script's communication hook could not be carried over: {lacks}"
    for hook, state in ddp._comm_hooks:
        if state is not None and not isinstance(state, dist.ProcessGroup):
            name = getattr(hook, "__qualname__", str(hook))
            return f"communication hook {name} keeps state ({type(state).__name__}) that may depend on the buckets"
    hook_name = ddp._get_ddp_logging_data().get("comm_hook")
    if hook_name and not ddp._comm_hooks:
        return f"built-in communication hook {hook_name} cannot be carried over; use register_comm_hook()"
    return None


def _divided(model: nn.Module) -> str | None:
    """Return what divides the parameters of `model` among the ranks, in words; None if nothing does.

    Such ranks hold different parameters, so "wrap the model in DDP" would be wrong advice.
    """
    kind = type(model).__name__
    sharded = [("FSDP2", wrapper) for wrapper in wrappers_in(model) if is_fsdp(wrapper)]
    sharded += [("FSDP1", module) for module in model.modules() if is_fsdp1(module)]
    if sharded:
        name, outermost = sharded[0]
        return f"{kind} ({name})" if outermost is model else f"{kind} around {name}"
    ranks = tensor_parallel_ranks(model)
    return f"{kind}, tensor-parallel on {ranks} ranks" if ranks > 1 else None
