"""Determines the model FLOPs of a step: the sum over its micro-batches, each input shape counted once.

Counting costs a python call for every operator of a forward, so it is not done at every step.  The shapes of the root
module's inputs are a *signature*: a signature is counted once, and every later forward with it is a look-up.  The
micro-batch knob, a smaller last batch and other sequence lengths make new signatures.

In the one step that counts, the module is called inside `try ... finally`.  Hooks would not do: torch calls no forward
hook when forward ends in KeyboardInterrupt, and a mode that stays on would slow or break whatever runs next.  Nothing
is put on the module for it (`module_calls`).

A forward is not counted while a dispatch mode of the user's is on (the user's FlopCounterMode keeps its figures).  It
is never counted when torch.compile, TorchScript, CUDA graphs or DataParallel run the model, where a mode sees nothing
or does harm.  The reason why a model cannot be counted is logged once, and then there is no figure.

A signature holds shapes and not values: a module whose data decide how much it computes (routing with dropped tokens,
layer drop) is counted as it ran that one time.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..hook.module_calls import CallObserver, is_compiled_in_place, observe_calls
from ..timing.torch_compile import compiled_frames
from .flop_counter import Arithmetic, ForwardCount, ForwardCounter, leave, modes_on, uncountable

__all__ = ["ATTEMPTS_MAX", "SIGNATURES_MAX", "StepFlops", "signature"]

SIGNATURES_MAX = 256
"""The most signatures that are kept, 100 bytes each; the one counted first is dropped first."""

WARMUP_STEPS = 2
"""Steps before the first count: what compiles at its first call has done so by then, and is seen to be compiled."""

ATTEMPTS_MAX = 16
"""Consecutive steps in which counting was due but impossible, before it is given up."""

LISTING_CHECKS = 16
"""The parameters are listed anew at every so many checks.

Walking a module's tree takes 0.7 ms for a thousand parameters, checking the ones already listed 0.1 ms.
"""

DEPTH_MAX = 4
PARTS_MAX = 256
"""Inputs are a few tensors, nested a little; an input that is a whole data set gets no signature."""

_log = logging.getLogger(__name__)


class StepFlops:
    """Counts the forwards of `model` on the thread that trains; nothing here raises what the model did not raise."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[Hashable, ForwardCount] = {}
        self._flops = 0
        self._forwards = 0
        self._missing = 0
        self._pending: Hashable | None = None
        self._observer: CallObserver | None = None
        self._failed_attempts = 0
        self._trainable: int | None = None
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._checks = 0
        self._usual: tuple[list[tuple[torch.Size, bool]], int] | None = None  # most steps are like the one before
        self.counted = 0
        """Forwards that were counted, and so slowed, since the last `drain`."""
        self.wants_count = False
        """The last step had a forward whose shapes were never counted."""
        self.reason: str | None = None
        """Why there will be no figure any more; None while there may be one."""
        self.arithmetic: Arithmetic | None = None
        """That of the forward counted last."""

    def forward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a forward of the root module in training, before it runs."""
        if self.reason is not None:
            return
        # Most models take one tensor: no recursion for them, this runs at every micro-batch.
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            key: Hashable = (args[0].shape, args[0].requires_grad)
        else:
            try:
                key = signature((args, kwargs))
            except Exception as error:  # noqa: BLE001  inputs are anything; what they raise when read is no failure
                self._give_up(str(error) or type(error).__name__)
                return
        self._look_up(key)

    def take_noted(self, inputs: Sequence[tuple[torch.Size, bool]]) -> int | None:
        """Return as `drain` does, for a step whose forwards each took one tensor of this shape and requires_grad."""
        if self._usual is not None and inputs == self._usual[0] and not self._forwards and self._observer is None:
            return self._usual[1]
        if self.reason is None:
            for key in inputs:
                self._look_up(key)
        is_usual = self._forwards == len(inputs)
        flops = self.drain()
        self._usual = (list(inputs), flops) if is_usual and flops is not None else None
        return flops

    @property
    def is_armed(self) -> bool:
        """Whether `forward_begins` must be called before each forward."""
        return self._observer is not None

    def _look_up(self, key: Hashable) -> None:
        self._forwards += 1
        known = self._known.get(key)
        if known is None:
            self._missing += 1
            self._pending = key
        else:
            self._flops += known.total
            self._pending = None

    def drain(self) -> int | None:
        """Return the FLOPs of the step that ends; None when one of its forwards is unknown or none was seen."""
        flops = self._flops if self._forwards and not self._missing else None
        self.wants_count = self._missing > 0 and self.reason is None
        if self._observer is not None:
            self._failed_attempts = 0 if self.counted else self._failed_attempts + 1
            if self._failed_attempts >= ATTEMPTS_MAX:
                self._give_up("another dispatch mode is on in every forward")
        self.disarm()
        self._flops = self._forwards = self._missing = self.counted = 0
        self._pending = None
        return flops

    def arm(self, step: int) -> None:
        """Have the forwards of `step`, which begins, counted where their shapes are new."""
        if step < WARMUP_STEPS or not self.wants_count or self._observer is not None:
            return
        reason = uncountable() or _not_countable(self._model)
        if reason is not None:
            self._give_up(reason)
            return
        self._observer = observe_calls(self._model)
        if self._observer is None:
            self._give_up("calls of the model cannot be observed")
        else:
            self._observer.set_around(self._count)

    def disarm(self) -> None:
        """Stop counting."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.set_around(None)
            observer.remove()

    def check_parameters(self) -> None:
        """Forget all counts when the set of trained parameters has changed, because then backward has too."""
        if self._checks % LISTING_CHECKS == 0:
            self._parameters = [weakref.ref(parameter) for parameter in self._model.parameters()]
        self._checks += 1
        there = (reference() for reference in self._parameters)
        trainable = sum(parameter.requires_grad for parameter in there if parameter is not None)
        if self._trainable not in (None, trainable):
            self._known.clear()
            self._usual = None
        self._trainable = trainable

    def _count(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Call `forward`, which is the module with its hooks, counted if its shapes are new; return what it returns."""
        key = self._pending
        if key is None or self._observer is None or modes_on():
            return forward(*args, **kwargs)
        counter = ForwardCounter()
        frames = compiled_frames()
        counter.__enter__()
        try:
            out = forward(*args, **kwargs)
        finally:
            leave(counter)
            self.counted += 1
        if compiled_frames() != frames:
            counter.doubt = "torch.compile compiles a part of the model"
        self._learn(key, counter)
        return out

    def _learn(self, key: Hashable, counter: ForwardCounter) -> None:
        self._pending = None
        count = counter.count()
        if count is None:
            self._give_up(counter.doubt or "nothing was counted")
            return
        if len(self._known) >= SIGNATURES_MAX:
            del self._known[next(iter(self._known))]
        self._known[key] = count
        self.arithmetic = count.arithmetic
        self._flops += count.total
        self._missing -= 1

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.wants_count = False
        self._usual = None
        self._known.clear()
        _log.info("pacecar cannot count FLOPs: %s; flops_per_sample or flops_per_token can provide them", reason)


def signature(value: object, depth: int = DEPTH_MAX) -> Hashable:
    """Return the shapes in nested tuples, lists, mappings and dataclasses, with the plain values beside them.

    Raises:
        ValueError: there is something whose shape cannot be told, too deep a nesting or too many parts.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter) or value.is_nested:
            raise ValueError(f"an input is a {type(value).__name__}, whose shape does not tell its work")
        return (value.shape, value.requires_grad)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        # A float differs at each call (a loss weight, a temperature) and does not say how much is computed.
        return float if isinstance(value, float) else value
    if depth == 0:
        raise ValueError("the inputs are nested too deeply for a signature")
    parts: list[tuple[object, object]] | None = None
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if parts is None or len(parts) > PARTS_MAX:
        raise ValueError(f"an input is a {type(value).__name__}, which does not tell its shape")
    return tuple((key, signature(part, depth - 1)) for key, part in parts)


def _not_countable(model: nn.Module) -> str | None:
    """Return why a dispatch mode would see nothing of `model`, or harm it; None when it may look on."""
    if compiled_frames():
        return "torch.compile is in use"
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return "TorchScript runs a part of the model"
        if isinstance(module, nn.DataParallel):
            return "DataParallel runs the model in threads of its own"
        if is_compiled_in_place(module) or hasattr(module, "_torchdynamo_orig_callable"):
            return "torch.compile is in use"
        forward = module.__dict__.get("forward")
        if getattr(forward, "__module__", None) == "torch.cuda.graphs":
            return "a CUDA graph runs a part of the model"
    return None
