"""Implements the knobs of a model sharded by FSDP2: prefetching and resharding, by FSDP2's public setters.

FSDP2 gathers each block's parameters before the block runs.  Two settings say when: how many blocks ahead (one by
default), and which blocks keep their parameters from forward to backward (more memory, one gather less each).  Their
value depends on link, memory and block size, so people try them by hand from run to run.  Both only move gathers in
time: every gradient is the same to the last bit.

    frees   gather  forward  free  ...  gather  backward  free
    keeps   gather  forward        ...          backward  free

The blocks that keep theirs are the last ones in forward: backward needs them first, when it has computed nothing yet
that could hide a gather, and frees them first.

A block that keeps its parameters keeps them until its backward.  If none follows (an evaluation, a discarded loss), the
next forward would use them although the optimizer, or a script that evaluates an average of its weights, has changed
them meanwhile; and `parameters()` would give whole tensors instead of shards.  So while blocks keep them, whatever is
still gathered is freed after a forward without gradients, before each forward of the whole, and before the optimizer
steps.

All ranks must gather in one order, so all change at one boundary, as with any knob, and only if the modules are the
same on all (layout).  Blocks are assumed to run in the order in which they are registered, as in every transformer;
otherwise prefetching fetches the wrong ones, which is slower and still correct.

What is kept must fit into memory on every rank: when the knob is offered, and again at each vote to keep more, in
which a rank without room votes no (`is_barred`).  If memory becomes short later (longer sequences, another process),
the rank objects, and all ranks go back.

Refused: FSDP1, which fixes both when it is made, and resharding to a smaller mesh (`reshard_after_forward` a number).
Mixed precision and offload change the numbers or need a restart.  `set_unshard_in_backward(False)` is left alone:
whether backward needs a parameter depends on what autograd saves, which forward may decide anew in each step, and a
wrong answer computes with freed memory.  So is `set_reduce_scatter_max_input_buffers` (torch 2.13, experimental): FSDP2
reads it once, before the first forward.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pacecar.config import TuneConfig
from pacecar.profiler.hook.module_calls import CallObserver, observe_calls
from pacecar.profiler.hook.step_hooks import AnyStepHandle, before_any_step
from pacecar.profiler.ranks.data_parallel import find_fsdp, fsdp_groups, is_fsdp, is_fsdp1, uncompiled
from pacecar.profiler.timing.torch_compile import keep_out
from pacecar.torch_internals import Feature, find, lacking

from ..observation import ShardedBytes
from .actuator import NOTHING_BESIDE, Actuator, ActuatorError, Objection, quarters
from .memory_limit import beyond_memory, computing_device, is_short

__all__ = ["FsdpPrefetchActuator", "ReshardActuator", "fsdp_knobs"]

PREFETCH_MAX = 4
"""Most blocks gathered ahead: each takes memory, and if four blocks cannot hide a gather the link is too slow."""

logger = logging.getLogger(__name__)


def fsdp_knobs(model: nn.Module, config: TuneConfig) -> list[Actuator]:
    """Return the knobs of a model that FSDP shards, including refused ones; none for any other."""
    shards = _Shards(model)
    if not shards.modules and shards.refusal() is None:
        return []
    knobs: list[Actuator] = []
    if "fsdp_prefetch" in config.knobs:
        knobs.append(FsdpPrefetchActuator(shards))
    if "fsdp_reshard" in config.knobs:
        knobs.append(ReshardActuator(shards))
    return knobs


class _Shards:
    """The FSDP2 modules of a model, in registration order, the root (if it is one) first.

    Modules that `fully_shard([a, b])` made one are gathered as one, and the first stands for them.
    """

    def __init__(self, model: nn.Module) -> None:
        whole = find_fsdp(uncompiled(model)) or model  # a list or an object may hide it from `model.modules()`
        self._is_fsdp1 = any(is_fsdp1(module) for module in model.modules())
        self._units = _units(whole)
        self.modules: list[Any] = [sharing[0] for sharing in self._units]
        inner = {id(m) for outer in self.modules for m in outer.modules() if m is not outer}
        self._tops = [module for module in self.modules if id(module) not in inner]
        self.called: list[Any] = [model if top is uncompiled(model) else top for top in self._tops]
        """The modules that are sharded as a whole, as a loop calls them."""
        self._names = {id(module): name for name, module in whole.named_modules()}

    @property
    def blocks(self) -> list[Any]:
        """The modules that are gathered one after the other: all but those that contain others."""
        return [module for module in self.modules if module not in self._tops] or self.modules

    def refusal(self) -> str | None:
        """Return what prevents any knob here, or None."""
        if self._is_fsdp1:
            return "FSDP1 fixes prefetching and resharding when it wraps; fully_shard (FSDP2) can change them"
        for setter in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
            if self.modules and not hasattr(self.modules[0], setter):
                return f"torch {torch.__version__}: FSDP2 has no {setter}"
        return None

    def lacks(self, feature: Feature) -> str | None:
        """Return what this torch's FSDP2 lacks of what `feature` needs, or None."""
        for module in self.modules:
            owners: dict[str, object] = {"FSDPModule": module}
            reason = lacking(feature, owners)
            if reason is not None:
                return reason
            owners["FSDPState"] = module._get_fsdp_state()
            groups = fsdp_groups(module)
            if groups:
                owners["FSDPParamGroup"] = groups[0]
            reason = lacking(feature, owners)
            if reason is not None:
                return reason
        return None

    def layout(self) -> str:
        """Return a hash of the modules' names and sizes."""
        text = repr([(self._names[id(m)], sum(p.numel() for p in m.parameters())) for m in self.modules])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def device(self) -> torch.device | None:
        """Return where parameters are gathered; None without any."""
        return computing_device(self.modules[0])

    def gathered_bytes(self, module: Any) -> int:  # noqa: ANN401  an FSDPModule
        """Return the bytes of what one rank holds when `module` is gathered, without inner FSDP2 modules.

        An upper bound with mixed precision, which gathers fewer, and with tensor parallelism, where a rank gathers its
        part.  A sharded parameter reports the size of the whole.
        """
        sharing = next(unit for unit in self._units if unit[0] is module)
        own = {id(p): p.numel() * p.element_size() for part in sharing for p in _own_parameters(part)}
        return sum(own.values())

    def beyond_memory(self, extra_bytes: int) -> str | None:
        """Return why that many more bytes on each rank do not fit on this device or host, or None; None if unknown."""
        return beyond_memory(self.device(), extra_bytes, "the gathered parameters")


def _units(whole: nn.Module) -> list[list[Any]]:
    """Return the FSDP2 modules in `whole`; those that share a state are together."""
    units: dict[int, tuple[object, list[Any]]] = {}  # the state too, so that its id is not given away
    for module in whole.modules():
        if is_fsdp(module):
            find_state: Callable[[], object] | None = getattr(module, "_get_fsdp_state", None)
            state = module if find_state is None else find_state()
            units.setdefault(id(state), (state, []))[1].append(module)
    return [sharing for _, sharing in units.values()]


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not is_fsdp(child):
            yield from _own_parameters(child)


class FsdpPrefetchActuator(Actuator):
    """The knob "fsdp_prefetch": blocks gathered ahead, in forward and backward; 0 is FSDP2's own rule."""

    knob = "fsdp_prefetch"

    def __init__(self, shards: _Shards) -> None:
        self._shards = shards
        self._value = 0

    def value(self) -> int:
        """Return the number in force."""
        return self._value

    def domain(self) -> tuple[int, ...]:
        """Return 0 to `PREFETCH_MAX`, as far as there are blocks and memory."""
        blocks = self._shards.blocks
        largest = max((self._shards.gathered_bytes(block) for block in blocks), default=0)
        # FSDP2's own rule also holds one block ahead.
        fits = (n for n in range(1, PREFETCH_MAX + 1) if self._shards.beyond_memory((n - 1) * largest) is None)
        return tuple(sorted({0, *(n for n in fits if n < len(blocks))}))

    def refusal(self) -> str | None:
        """Return why it must stay as it is, or None."""
        reason = self._shards.refusal() or self._shards.lacks("fsdp_prefetch")
        if reason is None and any(_prefetches(module) for module in self._shards.modules):
            return "the script sets its own modules to prefetch"
        if reason is None and len(self.domain()) == 1:
            return "there is no second FSDP2 block, or not enough memory, to gather one ahead"
        return reason

    def layout(self) -> str:
        """Return a hash of the modules."""
        return self._shards.layout()

    def apply(self, value: int) -> None:
        """Gather `value` blocks ahead.

        Raises:
            ActuatorError: it could not be set; FSDP2's own rule is in force if possible.
        """
        if not 0 <= value <= PREFETCH_MAX:
            raise ActuatorError(f"fsdp_prefetch {value} is not 0 to {PREFETCH_MAX}")
        try:
            self._set(value)
        except Exception as error:
            self._set(self._value)
            raise ActuatorError(f"FSDP2 refused to prefetch {value} ({type(error).__name__}: {error})") from error
        self._value = value

    def _set(self, ahead: int) -> None:
        blocks = self._shards.blocks
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
            block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, i - ahead) : i])))


class ReshardActuator(Actuator):
    """The knob "fsdp_reshard": how many blocks free their parameters after forward; the last ones keep them.

    All that the script has free theirs are counted, or all blocks if it has none.  0 keeps all until backward.
    """

    knob = "fsdp_reshard"

    def __init__(self, shards: _Shards) -> None:
        self._shards = shards
        self._home: Sequence[bool] | None = None  # by module; as of the first switch: FSDP2 has found its root by then
        self._value: int | None = None
        self._stale_guards: list[AnyStepHandle | CallObserver] = []
        self._was_short = self._objects = False

    def value(self) -> int:
        """Return the number in force.

        Raises:
            ActuatorError: it cannot be read.
        """
        return sum(self._read()) if self._value is None else self._value

    def domain(self) -> tuple[int, ...]:
        """Return the numbers in quarters of all, as far as memory allows it, and the present one."""
        count, value = len(self._freeable()), self.value()
        # Not by this rank's memory: all ranks need the same numbers.
        return tuple(sorted({value, *(n for n in quarters(count) if self._beyond(n) is None)}))

    def refusal(self) -> str | None:
        """Return why it must stay as it is, or None."""
        reason = self._shards.refusal() or self._shards.lacks("fsdp_reshard")
        if reason is not None:
            return reason
        if not hasattr(self._shards.modules[0], "set_reshard_after_forward"):
            return f"torch {torch.__version__}: FSDP2 has no set_reshard_after_forward"
        if len(self._shards.modules) == 1:
            return "there is one FSDP2 module, which backward needs right after forward"
        if any(_meshes_differ(module) for module in self._shards.modules):
            return "reshard_after_forward is a number: the parameters go to a smaller mesh"
        if any(_is_gathered(module) for module in self._shards.modules):
            return "parameters stay gathered between steps, and would be stale if they were kept after every forward"
        return self._beyond(min(self.value(), len(self._freeable()) - 1)) if len(self.domain()) == 1 else None

    def layout(self) -> str:
        """Return a hash of the modules and of what each does."""
        return f"{self._shards.layout()} {self._read()}"

    def is_barred(self, value: int, beside: Mapping[str, int] = NOTHING_BESIDE) -> bool:
        """Return whether this rank lacks the memory for `value` now: it votes no, and all ranks stay as they are."""
        reason = "memory became short before" if self._objects and value < self.value() else self._beyond(value)
        if reason is not None and not self._was_short:
            logger.warning("pacecar: fsdp_reshard stays at %d: at %d %s", self.value(), value, reason)
        self._was_short = reason is not None
        return reason is not None

    def objection(self) -> Objection | None:
        """Return that memory is short while blocks keep what the script frees, or None."""
        if self._value is None or self._value >= sum(self._read()):
            return None
        device = self._shards.device()
        if not self._objects and device is not None and is_short(device):
            self._objects = True
            logger.warning("pacecar: fsdp_reshard goes back: %s", Objection.ROOM.words)
        return Objection.ROOM if self._objects else None

    def gathers(self) -> ShardedBytes:
        """Return the bytes of all modules when gathered.

        Raises:
            ActuatorError: FSDP2's state cannot be read.
        """
        freeable = self._freeable()
        others = [module for module in self._shards.modules if module not in freeable]
        size, device = self._shards.gathered_bytes, self._shards.device()
        on_host = device is not None and device.type == "cpu"
        return ShardedBytes(tuple(map(size, freeable)), tuple(map(size, others)), on_host=on_host)

    def apply(self, value: int) -> None:
        """Keep or free parameters after forward, from the next one on.

        Raises:
            ActuatorError: it could not be set; the old value is in force again.
        """
        before, count = self.value(), len(self._freeable())
        if not 0 <= value <= count:
            raise ActuatorError(f"fsdp_reshard {value} is not 0 to {count}")
        try:
            self._set(value)
        except Exception as error:
            self._set(before)
            raise ActuatorError(f"FSDP2 refused it ({type(error).__name__}: {error})") from error

    def _freeable(self) -> list[Any]:
        """Return the modules that are counted, in the order of forward."""
        home = self._read()
        if not any(home):  # the script keeps them all; FSDP2's default frees all but the root's
            return list(self._shards.blocks)
        return [module for module, frees in zip(self._shards.modules, home, strict=True) if frees]

    def _set(self, value: int) -> None:
        self._home = self._read()
        freeable = self._freeable()
        freeing = {id(module) for module in freeable[:value]}
        for module in self._shards.modules:
            module.set_reshard_after_forward(id(module) in freeing, recurse=False)
        self._value = value
        while self._stale_guards:
            self._stale_guards.pop().remove()
        kept = freeable[value:]
        if kept and any(self._read()):
            # Before any optimizer's step: a script may make a new one for the same model.
            self._stale_guards = [before_any_step(_freeing(kept)), *self._observers(kept)]

    def _observers(self, kept: Sequence[Any]) -> list[CallObserver]:
        """Return what frees stale parameters of the modules `kept` around each forward of what holds them."""
        observers = []
        for called in self._shards.called:
            inside = {id(module) for module in called.modules()}
            free = _freeing([module for module in kept if id(module) in inside])
            observers.append(observe_calls(called, free, _unless_training(free)))
        return [observer for observer in observers if observer is not None]

    def _read(self) -> Sequence[bool]:
        """Return for each module whether the script has it reshard after forward."""
        if self._home is not None:
            return self._home
        try:
            return [any(group._reshard_after_forward for group in fsdp_groups(m)) for m in self._shards.modules]
        except AttributeError as error:
            raise ActuatorError(f"torch {torch.__version__}: FSDP2's state is not understood ({error})") from error

    def _beyond(self, value: int) -> str | None:
        """Return why memory does not allow keeping what `value` keeps beyond what is kept now, or None."""
        more = self._freeable()[value : self.value()]
        return self._shards.beyond_memory(sum(map(self._shards.gathered_bytes, more))) if more else None


def _freeing(modules: Sequence[Any]) -> Callable[..., None]:
    """Return what frees the parameters that any of `modules` still has gathered; a microsecond if none has."""
    groups = [(module, fsdp_groups(module)) for module in modules]
    graph_task: Callable[[], int] | None = find("torch._C._current_graph_task_id")

    def free(*_: object) -> None:
        if graph_task is not None and graph_task() != -1:
            return  # a checkpoint computes forward again inside backward, which needs and frees them
        for module, own in groups:
            if any(group.is_unsharded for group in own):
                module.reshard()

    keep_out(free)
    return free


def _unless_training(free: Callable[..., None]) -> Callable[..., None]:
    def freed_after(*_: object) -> None:
        if not torch.is_grad_enabled():
            free()

    keep_out(freed_after)
    return freed_after


def _prefetches(module: Any) -> bool:  # noqa: ANN401  an FSDPModule
    state = module._get_fsdp_state()
    return bool(state._states_to_forward_prefetch or state._states_to_backward_prefetch)


def _meshes_differ(module: Any) -> bool:  # noqa: ANN401  an FSDPModule
    return any(
        g.post_forward_mesh_info is not None and g.post_forward_mesh_info != g.mesh_info for g in fsdp_groups(module)
    )


def _is_gathered(module: Any) -> bool:  # noqa: ANN401  an FSDPModule
    return any(group.is_unsharded for group in fsdp_groups(module))
