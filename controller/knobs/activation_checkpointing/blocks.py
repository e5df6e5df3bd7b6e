"""Finds a model's repeated blocks and has each keep or recompute its activations, without a change of the model.

    wrapped    the script put them into torch's `CheckpointWrapper` (torchtitan, FSDP recipes): they can keep
    plain      the largest list of modules of one class, such as decoder layers: they can be checkpointed

A block is switched around its call (`module_calls`), so no module, attribute, hook or name of the model changes:
`state_dict`, pickle and deepcopy see the script's model.  A wrapped block keeps its activations because its wrapper's
`checkpoint_fn` is replaced for the duration of the call; hooks of the wrapper (FSDP2's) run as ever.  A plain block's
call goes through `torch.utils.checkpoint`, with random numbers restored.

Checkpointing gives the same bits only where a block computes the same twice.  What can be seen without running is
refused here, the rest by `block_probe`:

- compiled modules: their graph contains the checkpoint, or none;
- hooks on modules in a block: checkpointing runs them twice, and they may count or log.  So plain FSDP2 blocks, too;
- a generator in a module: only the default generators are restored in backward;
- wrappers with `REENTRANT` (another graph), `preserve_rng_state=False`, a `context_fn` (selective checkpointing),
  `determinism_check="none"`, a checkpoint function of the script's own, or inside one another;
- FSDP1, whose wrapper is not understood, and models that not all ranks share, such as stages of a pipeline.

DDP is no obstacle, not even with `static_graph`: without reentrant backwards each gradient is still ready once.
Left out: scripts that call `torch.utils.checkpoint` themselves, and Hugging Face's `gradient_checkpointing`, whose
layers decide before torch calls them.  The probe finds such blocks inside a checkpoint, and they stay as they are.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pacecar.profiler.hook.module_calls import Around, CallObserver, is_compiled_in_place, observe_calls
from pacecar.profiler.ranks.data_parallel import find_ddp, find_fsdp, is_fsdp1, is_one_group, uncompiled
from pacecar.profiler.timing.torch_compile import skip_frame
from pacecar.torch_internals import lacking, need

__all__ = ["RepeatedBlock", "Transform", "find_blocks", "refusal_of", "whole_of"]

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps the function whose activations a block keeps or computes again."""

HARMLESS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "early_stop", "debug"}
"""Keywords of torch's checkpoint that are understood; the values of some are refused."""


class RepeatedBlock(ABC):
    """One repeated part of a model.  `module` is what is called, `inner` what computes the activations."""

    is_checkpointed_at_home: bool
    """Whether the script checkpoints it."""

    def __init__(self, name: str, module: nn.Module, inner: nn.Module) -> None:
        self.name = name
        self.module = module
        self.inner = inner
        self._observer: CallObserver | None = None

    def refusal(self) -> str | None:
        """Return why it must stay as the script has it, or None."""
        for name, part in self.inner.named_modules(prefix=self.name):
            if part._forward_hooks or part._forward_pre_hooks:
                return f"{name} has forward hooks, which a checkpoint runs twice"
            if any(isinstance(value, torch.Generator) for value in vars(part).values()):
                return f"{name} has a random generator of its own, which a checkpoint does not restore"
        return None

    def switch(self, *, is_checkpointed: bool) -> None:
        """Keep or recompute activations from the next call on."""
        self.set_around(None if is_checkpointed == self.is_checkpointed_at_home else self._otherwise())

    def set_around(self, around: Around | None) -> None:
        """Run each call through `around`, or as the script has it.

        Raises:
            RuntimeError: this torch's modules cannot be observed.
        """
        if self._observer is not None:
            self._observer.set_around(None)
            self._observer.remove()
            self._observer = None
        if around is not None:
            skip_frame(around)
            self._observer = observe_calls(self.module)
            if self._observer is None:
                raise RuntimeError(f"calls of {self.name} cannot be observed")
            self._observer.set_around(around)

    @abstractmethod
    def _otherwise(self) -> Around:
        """Return what makes it keep its activations if the script checkpoints it, else what checkpoints it."""

    @abstractmethod
    def transformed(self, transform: Transform) -> Around:
        """Return what has the block run as the script has it, with `transform` applied to what computes."""


class WrappedBlock(RepeatedBlock):
    """A `CheckpointWrapper`."""

    is_checkpointed_at_home = True

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module, module._checkpoint_wrapped_module)  # type: ignore[arg-type]  # a module

    def refusal(self) -> str | None:
        """Return why it must stay as the script has it, or None."""
        own = vars(self.module).get("checkpoint_fn")
        if not isinstance(own, functools.partial) or own.func is not checkpoint or own.args:
            return f"{self.name} has a checkpoint function of its own"
        how: Mapping[str, Any] = own.keywords
        if how.get("use_reentrant") is not False:
            return f"{self.name} uses the reentrant checkpoint"
        if not how.get("preserve_rng_state", True):
            return f"{self.name} has preserve_rng_state=False: what is computed again may differ"
        if "context_fn" in how:
            return f"{self.name} has a context_fn, which decides by operator what is kept"
        if how.get("determinism_check") == "none":
            return f"{self.name} has determinism_check='none': what is computed again may differ"
        unknown = sorted(how.keys() - HARMLESS)
        if unknown:
            return f"{self.name} is checkpointed with {', '.join(unknown)}, which is not understood"
        if any(_is_wrapper(part) for part in self.inner.modules()):
            return f"{self.name} has a checkpoint inside another"
        return super().refusal()

    def _otherwise(self) -> Around:
        return self._with_function(operator.call)

    def transformed(self, transform: Transform) -> Around:
        """Return what applies `transform` to the wrapped module, inside the checkpoint."""
        own: Callable[..., Any] = vars(self.module)["checkpoint_fn"]
        return self._with_function(lambda run, *args, **kwargs: own(transform(run), *args, **kwargs))

    def _with_function(self, function: Callable[..., Any]) -> Around:
        own = vars(self.module)

        def around(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            before = own["checkpoint_fn"]
            own["checkpoint_fn"] = function
            try:
                return call(*args, **kwargs)
            finally:
                own["checkpoint_fn"] = before

        return around


class PlainBlock(RepeatedBlock):
    """A module that the script does not checkpoint."""

    is_checkpointed_at_home = False

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module, module)

    def _otherwise(self) -> Around:
        return _checkpointed

    def transformed(self, transform: Transform) -> Around:
        """Return what applies `transform` to the call."""
        return lambda call, args, kwargs: transform(call)(*args, **kwargs)


def _checkpointed(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    # Inside torch.func.grad, vjp, jacrev and hessian torch's checkpoint raises.
    if not torch.is_grad_enabled() or not need("torch._C._autograd._saved_tensors_hooks_is_enabled")():
        return call(*args, **kwargs)
    # Not as the checkpoint's keywords, some of which have names of its own.
    run = functools.partial(call, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True)


def whole_of(model: nn.Module) -> nn.Module:
    """Return the wrapper of the data-parallel model that `model` is or holds; `model` itself without one."""
    return find_ddp(model) or find_fsdp(uncompiled(model)) or model


def find_blocks(whole: nn.Module) -> list[RepeatedBlock]:
    """Return the blocks of a model in registration order: all wrapped ones, or else the largest list of plain ones."""
    wrapped: list[RepeatedBlock] = [WrappedBlock(n, m) for n, m in whole.named_modules() if _is_wrapper(m)]
    return wrapped or [PlainBlock(name, module) for name, module in max(_lists(whole), key=_weight, default=())]


def refusal_of(model: nn.Module, blocks: Sequence[RepeatedBlock], world_size: int) -> str | None:
    """Return why no block of `model`, as the loop calls it, can be switched, or None."""
    whole = whole_of(model)
    if len(blocks) < 2:
        return "there is one block, whose activations backward needs right after forward"
    reason = lacking("checkpointed_blocks") or lacking("module_calls", {"module": blocks[0].module})
    if reason is not None:
        return reason
    for name, module in chain(model.named_modules(), whole.named_modules()):  # the wrapper may be hidden in an object
        if is_fsdp1(module):
            return "FSDP1 has a checkpoint logic of its own"
        if is_compiled_in_place(module) or uncompiled(module) is not module:
            return f"{name or 'the model'} is compiled, and what it keeps with it"
    if world_size > 1 and not is_one_group(whole, world_size):
        return "not all ranks are known to share the model (stages of a pipeline?)"
    return next((reason for block in blocks if (reason := block.refusal()) is not None), None)


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether it is torch's CheckpointWrapper, by name: its module imports FSDP, which takes a second."""
    is_named = any(kind.__name__ == "CheckpointWrapper" for kind in type(module).__mro__)
    return is_named and lacking("checkpointed_blocks", {"CheckpointWrapper": module}) is None


def _lists(whole: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the children of each list whose modules are of one class and consist of others."""
    for name, module in whole.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
            is_composite = any(True for _, child in children for _ in child.children())
            if len({type(child) for _, child in children}) == 1 and is_composite:
                yield children


def _weight(children: Sequence[tuple[str, nn.Module]]) -> int:
    return sum(p.numel() for _, child in children for p in child.parameters())
