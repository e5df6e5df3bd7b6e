"""Records when forward, backward and optimizer begin and end, with hooks that do not affect what they compute.

The hooks only observe: nothing is replaced and nothing is stored on the model (`module_calls`).

- Forward: calls of the top-level module, in training with gradients on (evaluation is not a micro-batch).
- Backward begins when the gradient of an output tensor arrives.  There the hook queues a callback of the autograd
  engine, which runs when computing is done, *before* DDP's own callback waits for the all-reduces.  It queues a second
  one, which runs *after* DDP's.  The interval between the two is the exposed tail of communication.
- Optimizer: the step's pre-hook, and its post-hook, which is the step boundary.

Outputs may be a tensor, a tuple, a mapping or a dataclass (transformers' ModelOutput is a mapping).  If no output has a
gradient function, or backward never comes, the phase is absent.  No tensor is kept; a backward that fails half way is
dropped at the next forward.

Between two micro-batches the job evicts all of this from the caches, so a callback costs the memory that it touches:
register_hook takes 2 us in a tight loop and took 50 us in a real step.  The callbacks of a micro-batch therefore only
record times and shapes, and measure and guard themselves inline.  The optimizer's post-hook belongs to
`step_boundary`, which reads what was recorded here.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle, unserializable_hook

from pacecar.ledger.attribution import REST
from pacecar.torch_internals import find, lacking, own_has

from ..timing.cuda_timer import device_timer
from ..timing.failure_guard import FailureGuard
from ..timing.sample_counts import SeenBatches, plus
from ..timing.step_timer import EVENTS_MAX, StepTimer
from ..timing.torch_compile import compiled_frames, is_tracing, keep_out, tell
from .identity import model_device
from .module_calls import CallObserver, first_tensor, hold_class, observe_calls
from .step_hooks import AnyStepHandle, before_step, weakly

__all__ = ["OUTPUTS_MAX", "PhaseHooks", "with_gradient"]

OUTPUTS_MAX = 4
"""The most output tensors watched: the loss may use any of them, and the first gradient to arrive begins backward."""

_INSIDE = (
    "the attached model is compiled from outside, so pacecar cannot tell its forward from its backward: attach what "
    "the loop calls, pacecar.attach(torch.compile(model), ...)"
)

InputKey = tuple[torch.Size, bool]
"""Shape and requires_grad of a forward's only input."""


class PhaseHooks:
    """The hooks on one model and one optimizer.

    Single-tensor inputs are recorded in `inputs`; all others, and all while `tells_inputs`, go to `forward_begins`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        timer: StepTimer,
        guard: FailureGuard,
        *,
        now_ns: Callable[[], int],
        retire: Callable[[], None],
        forward_begins: Callable[[tuple[Any, ...], Mapping[str, Any]], None],
    ) -> None:
        for method in ("register_step_pre_hook", "register_step_post_hook"):
            if not hasattr(optimizer, method):
                raise TypeError(
                    f"{type(optimizer).__name__} has no {method}: pass the torch.optim.Optimizer whose step() ends a "
                    "training step (for a wrapper, the optimizer inside it)"
                )
        self._model = model
        self._optimizer = weakly(optimizer)
        self._timer = timer
        device = timer.device = device_timer(model_device(model))
        self._enter_device = None if device is None else device.enter
        self._enter: Callable[[str], None] | None = self._enter_device
        self._events = timer.events  # bound once, not on every use
        self._guard = guard
        self._now_ns = now_ns
        self._retire = retire
        self._forward_begins = forward_begins
        self._observer: CallObserver | None = None
        self._optimizer_handle: RemovableHandle | AnyStepHandle | None = None
        self._let_go_of_class: Callable[[], None] | None = None
        self.own_ns = 0
        """Time spent in the callbacks since this was last set to 0."""
        self.inputs: list[InputKey] = []
        self.tells_inputs = False
        self.has_looked = False
        """Whether `inputs` lacks a forward since this was last set to False."""
        self.is_resting = False
        """Whether this step is only counted, so that only the hook that ends the step is registered."""
        self._forward_start_ns: int | None = None
        self._backward_start_ns: int | None = None
        self._compute_end_ns: int | None = None
        self.optimizer_start_ns: int | None = None
        """When the optimizer's current step began."""
        self._is_ddp = hasattr(model, "require_backward_grad_sync")
        self._has_tail = True
        # Without the engine's queue the end of backward is not seen, so its beginning is useless.
        sees_backward = lacking("backward") is None
        self._queue_callback: Callable[[Callable[[], None]], None] = find(_QUEUE)
        self._is_direct = sees_backward and _can_watch_directly()
        self._watch = _watch_directly if self._is_direct else _watch_by_register if sees_backward else _watch_nothing
        self._gradient_seen = self._on_gradient
        self._compute_ended = self._on_compute_end
        self._backward_ended = self._on_backward_end
        self.evaluated_ns: int | None = None
        """When a forward in evaluation was last seen; it is not a step, but shows that the job is alive."""
        self.evaluation_start_ns: int | None = None
        """When the first forward of the running evaluation began; later by the checkpoints saved since."""
        self.evaluation_ns = 0
        """How long evaluations lasted, each from its first forward to the next one in training."""
        self.trained_ns: int | None = None
        """When a forward in training was last seen; while steps are only counted, this needs `watch_calls`."""
        self._calls: CallObserver | None = None
        self.forward_samples: int | None = None
        self.looked_elements: int | None = None
        """The elements of the first tensors of forwards that are not in `inputs`; None if there are none."""
        self.guesses_samples = True
        """Whether this step's samples are guessed from forward's input because nothing else counted them."""
        self.once_inputs: int | None = None
        """In a closure called by the optimizer, how many of `inputs` came before its first backward ended."""
        self.batches = SeenBatches()
        """What the loop itself drew from observed loaders."""
        self._waiting_batches = self.batches.waiting
        self.drawn_samples: int | None = None
        """The number of those samples that this step trains on; None: it drew none."""

    def install(self) -> None:
        """Register all hooks."""
        kind = PhaseHooks
        keep_out(kind._before_forward, kind._after_forward, kind._on_gradient, kind._before_optimizer, kind._note_call)
        self._register()

    def _register(self) -> None:
        self._observer = observe_calls(self._model, self._before_forward, self._after_forward)
        optimizer = self._optimizer()
        if optimizer is not None:
            self._optimizer_handle = before_step(optimizer, self._before_optimizer)

    def follow(self, optimizer: Optimizer) -> None:
        """Observe the steps of `optimizer` from now on, instead of those of the previous one."""
        self._optimizer = weakly(optimizer)
        if self._optimizer_handle is not None:
            self._optimizer_handle.remove()
            self._optimizer_handle = None
        if not self.is_resting:
            self._optimizer_handle = before_step(optimizer, self._before_optimizer)

    def watch_calls(self) -> None:
        """Record calls of the model even while steps are only counted, until they are measured; on any thread."""
        if self.is_resting and self._calls is None:
            self._calls = observe_calls(self._model, self._note_call)

    def _note_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and _is_grad_enabled():
            self.trained_ns = self._now_ns()
        else:
            self.evaluated_ns = self._now_ns()

    def rest(self) -> None:
        """Unregister the hooks at a boundary because the next steps are only counted.

        Calling hooks that return at once takes torch longer than counting a step takes pacecar.
        """
        self.is_resting = True
        self._forward_start_ns = None
        if self._let_go_of_class is None:
            self._let_go_of_class = hold_class(self._model)
        self._unregister()

    def resume(self) -> None:
        """Register the hooks again, at a boundary."""
        self._unregister()
        self.is_resting = False
        self.batches.forget()
        self.drawn_samples = None
        self._register()

    def remove(self) -> None:
        """Remove all hooks; never call this inside one of them, as torch is iterating over its table."""
        self._unregister()
        if self._let_go_of_class is not None:
            self._let_go_of_class()
            self._let_go_of_class = None

    def _unregister(self) -> None:
        for handle in (self._observer, self._calls, self._optimizer_handle):
            if handle is not None:
                handle.remove()
        self._observer = self._calls = self._optimizer_handle = None

    @property
    def parameter_count(self) -> int:
        """The number of tensors in the optimizer; 0 if it does not store them as torch's do."""
        groups = getattr(self._optimizer(), "param_groups", ())
        return sum(len(group["params"]) for group in groups if isinstance(group, dict) and "params" in group)

    @property
    def may_have_run(self) -> bool:
        """Whether the model ran forward in the current step, or may have because forward is not observed."""
        return self.is_resting or self.has_looked or bool(self.inputs)

    @property
    def phase(self) -> str | None:
        """The current phase, None between phases; may be read from another thread."""
        if self.optimizer_start_ns is not None:
            return "optimizer"
        if self._compute_end_ns is not None:
            return "tail"
        if self._backward_start_ns is not None:
            return "backward"
        return "forward" if self._forward_start_ns is not None else None

    @property
    def _around(self) -> str:
        """The phase around forward and backward: the optimizer's, when they run in its closure."""
        return REST if self.optimizer_start_ns is None else "optimizer"

    def tell_phases(self, listener: Callable[[str], None] | None) -> None:
        """Call `listener` with each phase that the training thread enters; None removes it.  It must not raise."""
        device = self._enter_device
        if listener is None or device is None:
            self._enter = listener or device
            return

        def both(phase: str) -> None:
            device(phase)
            listener(phase)

        self._enter = both

    def optimizer_ended(self, now_ns: int) -> None:
        """Record the end of the optimizer's step."""
        start, self.optimizer_start_ns = self.optimizer_start_ns, None
        if start is not None:
            self._events.append(("optimizer", start, now_ns))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._guard.is_alive:
            self._retire()
            return
        now = self._now_ns()
        if not (module.training and _is_grad_enabled()):
            self._forward_start_ns = None
            self.evaluated_ns = now
            if self.evaluation_start_ns is None:
                self.evaluation_start_ns = now
            if self._waiting_batches:
                self.batches.evaluate()
            return
        if self.evaluation_start_ns is not None:
            self.evaluation_ns += max(0, now - self.evaluation_start_ns)
            self.evaluation_start_ns = None
        self._forward_start_ns = self.trained_ns = now
        self._backward_start_ns = None
        if self._enter is not None:
            self._enter("forward")
        if self._waiting_batches:
            self.drawn_samples = plus(self.drawn_samples, self.batches.train())
        try:
            if len(args) == 1 and type(args[0]) is torch.Tensor and not kwargs and not self.tells_inputs:
                # Most models take one tensor, whose shape also gives the number of samples.
                self.inputs.append((args[0].shape, args[0].requires_grad))
                if len(self._events) >= EVENTS_MAX:
                    self.absorb()
            else:
                self._look_at(args, kwargs)
        except Exception:  # noqa: BLE001  as in the guard, without its second frame
            self._guard.failed(self._before_forward)
        self.own_ns += self._now_ns() - now

    def _look_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.has_looked = True
        tensor = first_tensor(args or kwargs)
        if tensor is not None:
            self.looked_elements = (self.looked_elements or 0) + tensor.numel()
        if self.guesses_samples and self.once_inputs is None and tensor is not None:
            self.forward_samples = (self.forward_samples or 0) + int(tensor.shape[0])
        self._forward_begins(args, kwargs)
        if len(self._events) >= EVENTS_MAX:
            self.absorb()

    def saw_no_call(self) -> None:
        """Log why a step ended without a call of the model, if the reason is known."""
        if compiled_frames():
            tell(_INSIDE)

    def absorb(self) -> None:
        """Add up what was recorded, so that memory stays bounded in a loop that never ends a step."""
        self.has_looked = True  # this step differs from the last one in any case
        self._timer.absorb()
        del self.inputs[:-EVENTS_MAX]

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        start = self._forward_start_ns
        if start is None or not self._guard.is_alive:
            return
        now = self._now_ns()
        self._forward_start_ns = None
        try:
            self._events.append(("forward", start, now))
            if self._enter is not None:
                self._enter(self._around)
            # Inside no_sync() DDP does not wait, so there is no tail to measure.
            self._has_tail = not self._is_ddp or bool(module.require_backward_grad_sync)
            if type(output) is torch.Tensor:
                node = output.grad_fn  # read once: torch makes a Python object for it each time
                if node is not None and self._is_direct and output._backward_hooks is None:
                    # As in `_watch_directly`, without its frame.
                    hooks: Any = OrderedDict()
                    hooks[_WATCH_KEY] = self._gradient_seen
                    output._backward_hooks = hooks
                    node._register_hook_dict(output)
                elif node is not None:
                    self._watch(output, node, self._gradient_seen)
            else:
                for count, tensor in enumerate(with_gradient(output), start=1):
                    self._watch(tensor, tensor.grad_fn, self._gradient_seen)
                    if count == OUTPUTS_MAX:
                        break
        except Exception:  # noqa: BLE001  as in the guard, without its second frame
            self._guard.failed(self._after_forward)
        self.own_ns += self._now_ns() - now

    @unserializable_hook  # type: ignore[untyped-decorator]  # otherwise torch warns when an output is pickled
    def _on_gradient(self, gradient: torch.Tensor) -> None:
        if is_tracing():  # compiled autograd traces hooks
            return
        if self._backward_start_ns is not None or not self._guard.is_alive:
            return
        now = self._now_ns()
        self._backward_start_ns = now
        self._compute_end_ns = None
        if self._enter is not None:
            self._enter("backward")
        try:
            self._queue_callback(self._compute_ended)
        except Exception:  # noqa: BLE001  as in the guard, without its second frame
            self._guard.failed(self._on_gradient)
        self.own_ns += self._now_ns() - now

    def _on_compute_end(self) -> None:
        now = self._now_ns()
        start = self._backward_start_ns
        if start is None or not self._guard.is_alive:
            return
        try:
            self._events.append(("backward", start, now))
            if self._enter is not None:
                self._enter("backward_tail" if self._has_tail else self._around)
            if self.optimizer_start_ns is not None and self.once_inputs is None:
                self.once_inputs = len(self.inputs)  # the rest is the same batch again, as in LBFGS
            if self._has_tail:
                self._compute_end_ns = now
                self._queue_callback(self._backward_ended)
            else:
                self._backward_start_ns = None
        except Exception:  # noqa: BLE001  as in the guard, without its second frame
            self._guard.failed(self._on_compute_end)
        self.own_ns += self._now_ns() - now

    def _on_backward_end(self) -> None:
        start = self._compute_end_ns
        if start is None:
            return
        now = self._now_ns()
        self._events.append(("backward_tail", start, now))
        if self._enter is not None:
            self._enter(self._around)
        self._backward_start_ns = self._compute_end_ns = None
        self.own_ns += self._now_ns() - now

    def _before_optimizer(self, *_: object) -> None:
        if is_tracing():
            return
        self.optimizer_start_ns = self._now_ns()
        self.once_inputs = None
        if self._enter is not None:
            self._enter("optimizer")


_is_grad_enabled = torch.is_grad_enabled
_QUEUE = "torch.autograd.Variable._execution_engine.queue_callback"
_NODE_HOOKS = "torch.autograd.graph.Node._register_hook_dict"
_WATCH_KEY = "pacecar"


def _watch_nothing(tensor: torch.Tensor, node: object, seen: Callable[[torch.Tensor], None]) -> None:
    """Do nothing: backward is not observed."""


def _watch_by_register(tensor: torch.Tensor, node: object, seen: Callable[[torch.Tensor], None]) -> None:
    tensor.register_hook(seen)  # type: ignore[no-untyped-call]


def _watch_directly(tensor: torch.Tensor, node: Any, seen: Callable[[torch.Tensor], None]) -> None:  # noqa: ANN401
    """Do what register_hook does for a tensor without hooks, minus the unused handle; `node` made the tensor."""
    if tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict(((_WATCH_KEY, seen),))
        node._register_hook_dict(tensor)
    else:
        _watch_by_register(tensor, node, seen)


def _can_watch_directly() -> bool:
    """Return whether this torch lets hooks be set directly, beside the user's; tried on a one-element tensor."""
    heard: list[str] = []
    try:
        with torch.enable_grad():
            tensor = torch.ones(1, requires_grad=True) * 1
            if not (find("torch.Tensor._backward_hooks") and own_has(tensor.grad_fn, _NODE_HOOKS)):
                return False
            _watch_directly(tensor, tensor.grad_fn, lambda gradient: heard.append("direct"))
            tensor.register_hook(lambda gradient: heard.append("registered"))  # type: ignore[no-untyped-call]
            tensor.backward()  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001  private API: whatever it raises, use the public one
        return False
    return heard == ["direct", "registered"]


def with_gradient(output: object) -> Iterator[torch.Tensor]:
    """Yield the output's tensors that a backward can start from."""
    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:
            yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from with_gradient(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from with_gradient(part)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from with_gradient(getattr(output, field.name, None))
