"""Measures the gradient noise scale under DDP: gradient norms before and after the ranks' mean, in every k-th step.

After the step would be too late: clipping and unscaling have changed the gradient by then.  So norms are taken inside
`backward` of the last micro-batch.  Hooks on the parameters see each rank's own gradient just before DDP sends it, and
when backward ends the same tensors hold the mean.  A scaler's factor is in both and cancels.

Each rank sends the others three numbers without waiting.  All ranks read them at the next measurement, in the same
step, so a learning rate that follows from them is the same everywhere.  On CUDA they reach the host only by then; they
are sent at the next measurement and read at the one after.

A measured step costs two passes over the gradients and one tiny gather, the others nothing: the hooks exist for that
backward only.  The first steps are all measured, so that the scale is known before a batch is tried.

Not supported: a single rank (there is no second batch size), FSDP, compressed gradients (their mean is another).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pacecar.controller.foreach_ops import norms_of

from ..actuator import Gather, StartGather
from .gradient_noise_scale import MEASUREMENTS_MIN, GradientNoiseScale

__all__ = ["EVERY_STEPS", "GradientNoiseMeter"]

EVERY_STEPS = 10
"""Steps between measurements: two passes over the gradients take under 1 % of a step, a tenth of that is negligible."""


class GradientNoiseMeter:
    """Measures the noise scale of a model under DDP.  Every rank makes one and runs the same backwards."""

    def __init__(self, ddp: DistributedDataParallel, start_gather: StartGather, every_steps: int = EVERY_STEPS) -> None:
        self._ddp = ddp
        self._start_gather = start_gather
        self._every = every_steps
        self._parameters: list[nn.Parameter] = [p for p in ddp.parameters() if p.requires_grad]
        self._backwards = 0
        self._sent = 0
        self._handles: list[RemovableHandle] = []
        self._squares: list[Tensor] = []
        self._samples = 0
        self._pending: Gather | None = None
        self._copying: tuple[Tensor, torch.cuda.Event] | None = None
        self.scale = GradientNoiseScale()

    @property
    def noise_scale(self) -> float | None:
        """The noise scale in samples, the same on all ranks; None if it is not known."""
        return self.scale.samples

    def begin(self, samples: int) -> None:
        """Add the hooks if this backward is measured, just before it begins; this rank's batch has `samples`."""
        if not getattr(self._ddp, "require_backward_grad_sync", True):
            return
        self._backwards += 1
        if self._sent >= MEASUREMENTS_MIN and self._backwards % self._every:
            return
        self._sent += 1
        self._read()
        self._squares, self._samples = [], samples
        self._handles = [_hooked(p, self._record_square) for p in self._parameters]

    def _record_square(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._squares.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square())

    def end(self) -> None:
        """Send the norms of the backward that just ended: the gradients are now the ranks' mean."""
        if not self._handles:
            return
        self.abandon()
        with torch.no_grad():
            reduced = [p.grad for p in self._parameters if p.grad is not None]
            whole = torch.stack(norms_of(reduced)).float().square().sum() if reduced else None
            device = self._parameters[0].device
            zero = torch.zeros((), device=device)
            own = torch.stack(self._squares).sum() if self._squares else zero
            samples = torch.full((), float(self._samples), device=device)
            numbers_sent = torch.stack([own, zero if whole is None else whole, samples])
        self._send(numbers_sent)

    def abandon(self) -> None:
        """Remove the hooks, also after a backward that failed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _send(self, numbers_sent: Tensor) -> None:
        """Send the numbers to all ranks without waiting; on CUDA only begin to copy them to the host."""
        if not numbers_sent.is_cuda:
            self._pending = self._start_gather(numbers_sent.tolist())
            return
        there = torch.empty(numbers_sent.shape, dtype=numbers_sent.dtype, pin_memory=True).copy_(
            numbers_sent, non_blocking=True
        )
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(numbers_sent.device))
        self._copying = (there, event)

    def _read(self) -> None:
        """Read the last measurement, which was sent at least a step ago, so the wait is short."""
        pending, self._pending = self._pending, None
        answers = None if pending is None else pending()
        if self._copying is not None:
            there, event = self._copying
            self._copying = None
            event.synchronize()
            self._pending = self._start_gather(there.tolist())
        if answers:
            own, whole, samples = (sum(numbers) for numbers in zip(*answers, strict=True))
            ranks = len(answers)
            self.scale.observe(own / ranks, samples / ranks, whole / ranks, samples)


def _hooked(parameter: nn.Parameter, note: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    return handle
