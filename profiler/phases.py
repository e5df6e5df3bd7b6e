"""How does the hook see forward, backward and optimizer without touching what they compute?

By hooks that return None, so nothing is replaced:

- forward: pre-hook and hook of the top-level module, in training with gradients on (evaluation is not a micro-batch);
- backward begins when the gradient of an output tensor arrives.  There it queues a callback of the autograd engine,
  which runs when no more is to be computed, *before* DDP's own callback waits for the all-reduces; that one queues
  a second, which runs *after* DDP's.  The stretch between the two is the exposed tail of communication;
- optimizer: step pre-hook and post-hook; the post-hook is the step's boundary.

Outputs may be a tensor, a tuple, a mapping or a dataclass (transformers' ModelOutput is a mapping).  No output with a
gradient function, or a backward that never comes: the phase is absent.  No tensor is kept; a backward that fails
half way is forgotten at the next forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pacecar.profiler.guard import Guard
from pacecar.profiler.loader import guess_samples
from pacecar.profiler.steptimer import StepTimer

__all__ = ["OUTPUTS_MAX", "PhaseHooks"]

OUTPUTS_MAX = 4
"""Output tensors that are watched: the loss may use any of them, and the first gradient to arrive begins backward."""


class PhaseHooks:
    """The hooks on one model and one optimizer; `boundary(now_ns)` is called at the end of each step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        timer: StepTimer,
        guard: Guard,
        *,
        now_ns: Callable[[], int],
        boundary: Callable[[int], None],
        retire: Callable[[], None],
    ) -> None:
        for method in ("register_step_pre_hook", "register_step_post_hook"):
            if not hasattr(optimizer, method):
                raise TypeError(
                    f"{type(optimizer).__name__} has no {method}: pass the torch.optim.Optimizer whose step() ends a "
                    "training step (for a wrapper, the optimizer inside it)"
                )
        self._model = model
        self._optimizer = optimizer
        self._timer = timer
        self._guard = guard
        self._now_ns = now_ns
        self._boundary = boundary
        self._retire = retire
        self._handles: list[RemovableHandle] = []
        self._forward_start_ns: int | None = None
        self._backward_start_ns: int | None = None
        self._compute_end_ns: int | None = None
        self._gradient_seen = guard.wrap(self._on_gradient)
        self._compute_ended = guard.wrap(self._on_compute_end)
        self._backward_ended = guard.wrap(self._on_backward_end)
        self.forward_samples: int | None = None

    def install(self) -> None:
        """Register all hooks."""
        wrap = self._guard.wrap
        self._handles = [
            self._model.register_forward_pre_hook(self._retire_or(wrap(self._before_forward))),
            self._model.register_forward_hook(wrap(self._after_forward)),
            self._optimizer.register_step_pre_hook(wrap(self._before_optimizer)),
            self._optimizer.register_step_post_hook(wrap(self._after_optimizer)),
        ]

    def remove(self) -> None:
        """Remove all hooks; not from inside an optimizer hook, whose table torch is iterating over."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _retire_or(self, pre_hook: Callable[[nn.Module, tuple[Any, ...]], None]) -> Callable[..., None]:
        """Return `pre_hook`, which takes everything away once the guard is dead; torch has copied this table."""

        def before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._guard.is_alive:
                pre_hook(module, args)
            else:
                self._retire()

        return before_forward

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            self._forward_start_ns = None
            return
        now = self._now_ns()
        self._timer.begin(now)
        self._forward_start_ns = now
        self._backward_start_ns = None
        samples = guess_samples(args)
        if samples is not None:
            self.forward_samples = (self.forward_samples or 0) + samples

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._forward_start_ns is None:
            return
        self._timer.add("forward", self._forward_start_ns, self._now_ns())
        self._forward_start_ns = None
        self._timer.micro_batches += 1
        for count, tensor in enumerate(_with_gradient(output), start=1):
            tensor.register_hook(self._gradient_seen)  # type: ignore[no-untyped-call]
            if count == OUTPUTS_MAX:
                break

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        if self._backward_start_ns is not None:
            return
        self._backward_start_ns = self._now_ns()
        self._compute_end_ns = None
        _queue_callback(self._compute_ended)

    def _on_compute_end(self) -> None:
        self._compute_end_ns = self._now_ns()
        _queue_callback(self._backward_ended)

    def _on_backward_end(self) -> None:
        if self._backward_start_ns is None or self._compute_end_ns is None:
            return
        self._timer.add("backward", self._backward_start_ns, self._compute_end_ns)
        self._timer.add("backward_tail", self._compute_end_ns, self._now_ns())
        self._backward_start_ns = self._compute_end_ns = None

    def _before_optimizer(self, *_: object) -> None:
        now = self._now_ns()
        self._timer.begin(now)
        self._timer.optimizer_started(now)

    def _after_optimizer(self, *_: object) -> None:
        now = self._now_ns()
        self._timer.optimizer_ended(now)
        self._boundary(now)


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _with_gradient(output: object) -> Iterator[torch.Tensor]:
    """Yield the output's tensors that backward can come from."""
    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:
            yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _with_gradient(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _with_gradient(part)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _with_gradient(getattr(output, field.name, None))
