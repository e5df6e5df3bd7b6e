"""Reads loss and gradient norm of every step without waiting for the device, for `divergence_detector`.

Reading a loss on a GPU waits for the GPU, which is what a training loop must not do.  So both numbers are copied to the
host asynchronously, with an event behind them, and read some steps later, when the event says that they are there.  At
most PENDING_MAX steps wait; more than that are dropped, oldest first.

The norm is that of a fixed sample of the gradients as they are when the optimizer has stepped, so after clipping: at
most SAMPLE_SLICES slices of SAMPLE_NUMEL values, spread over all parameters.  The detector needs no more.  A slice that
is not finite makes the norm not finite; what is elsewhere shows in the next loss.  Every rank holds the same
reduced gradients, so rank 0 alone reads them, and nothing is communicated.

Left out: judging (`divergence_detector`), and losses that the script does not report: it does so by
`pacer.backward(loss)` or `pacer.loss(value)`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..knobs.foreach_ops import norms_of
from .divergence_detector import DivergenceSignals

__all__ = ["PENDING_MAX", "LossMonitor"]

logger = logging.getLogger(__name__)

PENDING_MAX = 64
SAMPLE_SLICES = 16
SAMPLE_NUMEL = 8192
"""128 Ki values at most: 0.2 to 0.3 ms on a CPU core that others use too, a launch or two on a GPU."""


class _PendingSignals:
    """Two numbers of one step on their way to the host."""

    def __init__(self, step: int, loss: Tensor | float | None, norm: Tensor | None, choice: str) -> None:
        self.step = step
        self._choice = choice
        self._loss = _toward_host(loss)
        self._norm = _toward_host(norm)
        self._event: Any = None
        for tensor in (loss, norm):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(torch.cuda.current_stream(tensor.device))
                break

    @property
    def is_here(self) -> bool:
        return self._event is None or bool(self._event.query())

    def signals(self) -> DivergenceSignals:
        return DivergenceSignals(self.step, _number(self._loss), _number(self._norm), self._choice)


def _toward_host(value: Tensor | float | None) -> Tensor | float | None:
    if isinstance(value, Tensor) and value.is_cuda:
        there = torch.empty((), dtype=value.dtype, pin_memory=True)
        return there.copy_(value, non_blocking=True)
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return None  # another kind of device: reading it would wait for it
    return value


def _number(value: Tensor | float | None) -> float | None:
    return float(value) if value is not None else None


class LossMonitor:
    """Collects a loss and a norm a step, on the training thread.

    `choice` returns which compression is in force on this rank; it is called at the end of a step, before any switch.
    """

    def __init__(self, model: nn.Module, choice: Callable[[], str] = lambda: "none") -> None:
        self._slices = _sample([p for p in model.parameters() if p.requires_grad])
        self._loss: Tensor | float | None = None
        self._late: deque[_PendingSignals] = deque(maxlen=PENDING_MAX)
        self._is_broken = False
        self._step = 0
        self._choice = choice

    def loss(self, value: Tensor | float, *, weight: float = 1.0) -> None:
        """Take a loss of this step, or a micro-batch's with its weight; those of a step add up.

        A tensor with more than one element is taken by its mean.
        """
        if self._is_broken:
            return
        try:
            with torch.no_grad():
                share = (value.detach().mean() if isinstance(value, Tensor) else float(value)) * weight
                self._loss = share if self._loss is None else self._loss + share
        except Exception as error:  # noqa: BLE001  a strange loss is no reason to end a job
            self._break(f"a loss ({type(error).__name__}: {error})")

    def boundary(self, step: int | None) -> None:
        """Start to copy the numbers of `step` (None: the next), which is done, before its gradients are zeroed."""
        loss, self._loss = self._loss, None
        self._step = self._step + 1 if step is None else step
        if self._is_broken:
            return
        try:
            self._late.append(_PendingSignals(self._step, loss, self._norm(), self._choice()))
        except Exception as error:  # noqa: BLE001
            self._break(f"a gradient ({type(error).__name__}: {error})")

    def _break(self, what: str) -> None:
        logger.warning("pacecar: %s could not be read: compression goes unwatched and is not used", what)
        self._is_broken = True
        self._late.clear()

    @property
    def is_broken(self) -> bool:
        """Whether loss and gradients are not read any more."""
        return self._is_broken

    def arrived(self) -> list[DivergenceSignals]:
        """Return what has arrived, in step order; never waits.

        Raises:
            RuntimeError: loss and gradients are not read any more, so nothing lossy may stay in force.
        """
        if self._is_broken:
            raise RuntimeError("loss and gradients cannot be read")
        arrived: list[DivergenceSignals] = []
        while self._late and self._late[0].is_here:
            arrived.append(self._late.popleft().signals())
        return arrived

    def _norm(self) -> Tensor | None:
        """Return the norm of the sample; None where no gradient is there."""
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
