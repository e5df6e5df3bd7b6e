"""Measures the gradient noise scale under DDP: gradient norms before and after the ranks' mean, in every k-th step.

The obvious place, after the step, is too late: clipping and unscaling have changed the gradient by then.  So they are
taken inside `backward` of the last micro-batch.  Hooks on the parameters see each rank's own gradient just before DDP
sends it, and when backward is over the same tensors hold the mean.  A scaler's factor is in both and cancels.

Each rank sends the others three numbers, which is not waited for.  They are read at the next measurement, by all ranks
in the same step, so that a learning rate that follows from them is the same everywhere.  On CUDA they reach the host
only by then; they are sent at the next measurement and read at the one after.

Costs two passes over the gradients and one tiny gather in a measured step, and nothing in the others: the hooks are
there for that backward only.  The first steps are all measured, so that something is known before a batch is tried.

Left out: one rank alone (there is no second batch size), FSDP, gradients that are compressed (their mean is another).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..foreach_ops import norms_of
from .gradient_noise_scale import MEASUREMENTS_MIN, GradientNoiseScale

__all__ = ["EVERY_STEPS", "GradientNoiseMeter", "Tell"]

EVERY_STEPS = 10
"""Steps between measurements: two passes over the gradients are under 1 % of a step, a tenth of that is nothing."""


Hear = Callable[[], list[list[float]] | None]
Tell = Callable[[Sequence[float]], Hear]


class GradientNoiseMeter:
    """Measures the noise scale of a model under DDP.  Every rank makes one and runs the same backwards.

    `tell` sends numbers to all ranks and returns a function that waits for theirs; it returns None where they cannot be
    had.
    """

    def __init__(self, ddp: DistributedDataParallel, tell: Tell, every_steps: int = EVERY_STEPS) -> None:
        self._ddp = ddp
        self._tell = tell
        self._every = every_steps
        self._parameters: list[nn.Parameter] = [p for p in ddp.parameters() if p.requires_grad]
        self._backwards = 0
        self._sent = 0
        self._handles: list[RemovableHandle] = []
        self._squares: list[Tensor] = []
        self._samples = 0
        self._pending: Hear | None = None
        self._on_its_way: tuple[Tensor, torch.cuda.Event] | None = None
        self.scale = GradientNoiseScale()

    @property
    def noise_scale(self) -> float | None:
        """The noise scale in samples, the same on all ranks; None where it is not known."""
        return self.scale.samples

    def begin(self, samples: int) -> None:
        """Add the hooks, if this backward is measured, just before it begins; this rank's batch has `samples`."""
        if not getattr(self._ddp, "require_backward_grad_sync", True):
            return
        self._backwards += 1
        if self._sent >= MEASUREMENTS_MIN and self._backwards % self._every:
            return
        self._sent += 1
        self._read()
        self._squares, self._samples = [], samples
        self._handles = [_hooked(p, self._note) for p in self._parameters]

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._squares.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square())

    def end(self) -> None:
        """Send the norms of the backward that just ended: the gradients are the ranks' mean now."""
        if not self._handles:
            return
        self._let_go()
        with torch.no_grad():
            reduced = [p.grad for p in self._parameters if p.grad is not None]
            whole = torch.stack(norms_of(reduced)).float().square().sum() if reduced else None
            device = self._parameters[0].device
            zero = torch.zeros((), device=device)
            own = torch.stack(self._squares).sum() if self._squares else zero
            samples = torch.full((), float(self._samples), device=device)
            said = torch.stack([own, zero if whole is None else whole, samples])
        self._send(said)

    def abandon(self) -> None:
        """Remove the hooks after a backward that failed."""
        self._let_go()

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _send(self, said: Tensor) -> None:
        """Send the numbers to all ranks without waiting; on CUDA only begin the copy to the host."""
        if not said.is_cuda:
            self._pending = self._tell(said.tolist())
            return
        there = torch.empty(said.shape, dtype=said.dtype, pin_memory=True).copy_(said, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(said.device))
        self._on_its_way = (there, event)

    def _read(self) -> None:
        """Take the last measurement: it was sent at least a step ago, so hardly anything is waited for."""
        pending, self._pending = self._pending, None
        answers = None if pending is None else pending()
        if self._on_its_way is not None:
            there, event = self._on_its_way
            self._on_its_way = None
            event.synchronize()
            self._pending = self._tell(there.tolist())
        if answers:
            own, whole, samples = (sum(numbers) for numbers in zip(*answers, strict=True))
            ranks = len(answers)
            self.scale.observe(own / ranks, samples / ranks, whole / ranks, samples)


def _hooked(parameter: nn.Parameter, note: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    return handle
