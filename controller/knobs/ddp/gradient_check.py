"""Compares the norms of the ranks' gradients in the first steps after a switch, to prove that it left them whole.

That a switch was carried out everywhere does not prove that the ranks still mean the same by a bucket: others corrupted
gradients while they resized (horovod#1282).  After an all-reduce every rank holds the same gradient, whatever it is, so
the norms of every parameter's gradient are compared over the ranks in the CHECKS steps after a switch: the first, whose
buckets are new, and the second, in which DDP rebuilds them.  A bucket that two ranks laid out differently, or that was
not reduced on one of them, shows in the norms of its parameters.

A switch of the micro-batch alone is not checked: it leaves the Reducer and its buckets as they are.

Norms are sent at the boundary after their step and compared at the next one.  By then the job's own all-reduce has
brought all ranks past the first, so no rank waits for another.  To compare them at once would make every rank wait for
the slowest, which on a busy machine was most of what a trial cost.

A job whose gradients differ between ranks by design (local SGD, a hook of its own) is not judged: a check before the
first switch, while nothing was changed yet, has to find them equal.

Of a large gradient the first HEAD_NUMEL values are read.  All ranks check at the same boundary, and tell each other
through the agreement.  What goes wrong on one rank before becomes part of its answer; it must not be missing.

Left out: gradients that are wrong in the same way on all ranks.  The arithmetic is tested, not watched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ..foreach_ops import norms_of

__all__ = ["CHECKS", "GradientCheck", "concerns_gradients"]

logger = logging.getLogger(__name__)

Ask = Callable[[Sequence[float]], list[list[float]] | None]
Tell = Callable[[Sequence[float]], Callable[[], list[list[float]] | None]]

CHECKS = 2

HEAD_NUMEL = 8192
"""Values read of each gradient.  A bucket goes wrong as a whole, and to read 100 M gradients takes a CPU core 80 ms,
their heads 7 ms."""

_WITHOUT_BUCKETS = frozenset({"micro_batch", "micro_tokens"})
"""Knobs that change how often backward runs before the one all-reduce, and not how that is done."""

TOLERANCE = 1e-4
"""Ranks hold the same bits, but other devices may add up a norm, and clip by it, in another order."""


def concerns_gradients(knobs: Iterable[str]) -> bool:
    """Return whether a switch of `knobs` can make the ranks mean different things by a bucket."""
    return not _WITHOUT_BUCKETS.issuperset(knobs)


class GradientCheck:
    """One rank's part, for a `model` whose gradients are reduced over all ranks of the job.

    `ask` returns the numbers of every rank, or None where the ranks cannot be asked any more; `tell` sends this rank's
    and returns what gives those of all.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._due = 0
        self._heard: Callable[[], list[list[float]] | None] | None = None
        self._is_meaningful: bool | None = None

    @property
    def is_armed(self) -> bool:
        """Whether gradients are to be sent or compared at this boundary; the same on all ranks."""
        return self._due > 0 or self._heard is not None

    def prepare(self, ask: Ask) -> None:
        """Compare once while nothing was changed yet, on all ranks at the same boundary."""
        if self._is_meaningful is None:
            difference = self._difference(ask(self._mine()))
            self._is_meaningful = difference is None
            if difference is not None:
                logger.info("pacecar: gradients are not compared after switches: %s before the first", difference)

    def arm(self, *, is_on: bool = True) -> None:
        """Compare in the next CHECKS steps, after a switch on all ranks; `is_on` False: compare no more."""
        self._due = CHECKS if self._is_meaningful and is_on else 0

    def look(self, tell: Tell) -> str | None:
        """Compare what was sent at the last boundary, then send the gradients of the step that ended, if they are due.

        Called on all ranks.  Returns how the gradients differ, or None; the same on every rank.  Then nothing is sent.
        """
        heard, self._heard = self._heard, None
        difference = None if heard is None else self._difference(heard())
        if difference is None and self._due > 0:
            self._due -= 1
            self._heard = tell(self._mine())
        return difference

    def _mine(self) -> list[float]:
        try:
            norms: list[float] = self._norms().tolist()
        except Exception:  # the others wait for an answer whatever happened
            logger.exception("pacecar: gradients could not be looked at")
            norms = [-1.0] * len(self._parameters)
        return norms

    def _difference(self, answers: list[list[float]] | None) -> str | None:
        for name, norms in zip(self._names, zip(*answers or (), strict=True), strict=False):
            least, most = min(norms), max(norms)
            if least < 0:
                return "a rank cannot read its gradients"
            if most - least > TOLERANCE * most:
                return f"the gradient of {name} has norm {least:.6g} on one rank and {most:.6g} on another"
        return None

    def _norms(self) -> Tensor:
        """Return the norm of every gradient's head, 0 where there is none and where it is not finite."""
        norms = torch.zeros(len(self._parameters), dtype=torch.float64)
        with torch.no_grad():
            there = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None and not p.grad.is_sparse]
            if there:
                found = norms_of([_head(gradient) for _, gradient in there])
                norms[[i for i, _ in there]] = torch.stack([n.to(torch.float64) for n in found]).cpu()
        return norms.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _head(gradient: Tensor) -> Tensor:
    return gradient.view(-1)[:HEAD_NUMEL] if gradient.is_contiguous() else gradient
