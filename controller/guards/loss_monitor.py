"""Reads loss and gradient norm of every step without waiting for the device, for `divergence_detector`.

Reading a loss on a GPU waits for the GPU, which a training loop must not do.  So both numbers are copied to the host
asynchronously with an event behind them, and read some steps later when the event has completed.  At most PENDING_MAX
steps wait; beyond that the oldest are dropped.

The norm is that of a fixed sample of the gradients after the optimizer step, so after clipping: at most SAMPLE_SLICES
slices of SAMPLE_NUMEL values, spread over all parameters, which is enough for the detector.  A slice that is not finite
makes the norm not finite; elsewhere it shows in the next loss.  Every rank holds the same reduced gradients, so only
rank 0 reads them, and nothing is communicated.

Left out: judging (`divergence_detector`), and losses that the script does not report through `pacer.backward(loss)` or
`pacer.loss(value)`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..foreach_ops import norms_of
from .divergence_detector import DivergenceSignals

__all__ = ["PENDING_MAX", "LossMonitor"]

logger = logging.getLogger(__name__)

PENDING_MAX = 64
SAMPLE_SLICES = 16
SAMPLE_NUMEL = 8192
"""At most 128 Ki values: 0.2 to 0.3 ms on a shared CPU core, a launch or two on a GPU."""


class _PendingNumbers:
    """Two numbers of one step on their way to the host."""

    def __init__(self, step: int, loss: Tensor | float | None, norm: Tensor | None, choice: str) -> None:
        self.step = step
        self._choice = choice
        self._loss = _copy_to_host(loss)
        self._norm = _copy_to_host(norm)
        self._event: Any = None
        for tensor in (loss, norm):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(torch.cuda.current_stream(tensor.device))
                break

    @property
    def has_arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def signals(self) -> DivergenceSignals:
        return DivergenceSignals(self.step, _number(self._loss), _number(self._norm), self._choice)


def _copy_to_host(value: Tensor | float | None) -> Tensor | float | None:
    if isinstance(value, Tensor) and value.is_cuda:
        there = torch.empty((), dtype=value.dtype, pin_memory=True)
        return there.copy_(value, non_blocking=True)
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return None  # reading from another kind of device would wait for it
    return value


def _number(value: Tensor | float | None) -> float | None:
    return float(value) if value is not None else None


class LossMonitor:
    """Collects one loss and one norm a step, on the training thread.

    `choice` returns the compression in force on this rank; it is called at the end of a step, before any switch.
    """

    def __init__(self, model: nn.Module, choice: Callable[[], str] = lambda: "none") -> None:
        self._slices = _sample([p for p in model.parameters() if p.requires_grad])
        self._loss: Tensor | float | None = None
        self._pending: deque[_PendingNumbers] = deque(maxlen=PENDING_MAX)
        self._is_broken = False
        self._step = 0
        self._choice = choice

    def loss(self, value: Tensor | float, *, weight: float = 1.0) -> None:
        """Add a loss of this step, or a micro-batch's with its weight; a tensor counts by its mean."""
        if self._is_broken:
            return
        try:
            with torch.no_grad():
                share = (value.detach().mean() if isinstance(value, Tensor) else float(value)) * weight
                self._loss = share if self._loss is None else self._loss + share
        except Exception as error:  # noqa: BLE001  a strange loss must not end a job
            self._give_up(f"a loss ({type(error).__name__}: {error})")

    def boundary(self, step: int | None) -> None:
        """Start copying the numbers of the finished `step` (None: the next), before its gradients are zeroed."""
        loss, self._loss = self._loss, None
        self._step = self._step + 1 if step is None else step
        if self._is_broken:
            return
        try:
            self._pending.append(_PendingNumbers(self._step, loss, self._norm(), self._choice()))
        except Exception as error:  # noqa: BLE001
            self._give_up(f"a gradient ({type(error).__name__}: {error})")

    def _give_up(self, what: str) -> None:
        logger.warning("pacecar: %s could not be read, so compression cannot be watched and is not used", what)
        self._is_broken = True
        self._pending.clear()

    def arrived(self) -> list[DivergenceSignals]:
        """Return what has arrived, in step order; never waits.

        Raises:
            RuntimeError: reading has failed for good, so nothing lossy may stay in force.
        """
        if self._is_broken:
            raise RuntimeError("loss and gradients cannot be read")
        arrived: list[DivergenceSignals] = []
        while self._pending and self._pending[0].has_arrived:
            arrived.append(self._pending.popleft().signals())
        return arrived

    def _norm(self) -> Tensor | None:
        """Return the norm of the sample; None without gradients."""
        with torch.no_grad():
            seen = [g.view(-1)[:count] for p, count in self._slices if (g := p.grad) is not None and _is_plain(g)]
            if not seen:
                return None
            norms = norms_of(seen)
            whole: Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
            return whole


def _is_plain(gradient: Tensor) -> bool:
    return type(gradient) is Tensor and not gradient.is_sparse and gradient.is_contiguous()


def _sample(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, int]]:
    """Return every k-th parameter and how many of its values are read."""
    stride = max(1, -(-len(parameters) // SAMPLE_SLICES))
    return [(p, min(p.numel(), SAMPLE_NUMEL)) for p in parameters[::stride]]
