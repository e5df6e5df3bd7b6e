"""Compares the norms of the ranks' gradients in the first steps after a switch, to prove that it left them intact.

A switch that was carried out everywhere does not prove that the ranks still mean the same by a bucket; others corrupted
gradients while they resized (horovod#1282).  After an all-reduce every rank holds the same gradient, so the norms of
every parameter's gradient are compared over the ranks in the CHECKS steps after a switch: the first, whose buckets are
new, and the second, in which DDP rebuilds them.  A bucket that two ranks laid out differently, or that one rank did not
reduce, shows in the norms of its parameters.  A switch of the micro-batch alone is not checked: it leaves the Reducer
and its buckets as they are.

Norms are sent at the boundary after their step and compared at the next one.  By then the job's own all-reduce has
brought all ranks past the first, so no rank waits for another.  Comparing at once would make every rank wait for the
slowest, which on a busy machine was most of what a trial cost.  A rank whose answers are late goes on training and
looks for them after each step.  So ranks may find a difference after different steps.

A job whose gradients differ between ranks by design (local SGD, its own hook) is not judged: a check before the first
switch has to find them equal.

Only the first HEAD_NUMEL values of a large gradient are read.  All ranks check at the same boundary and communicate
through the agreement.  An error on one rank becomes part of its answer; the answer must not be missing.

Gradients that are wrong in the same way on all ranks are not detected; the arithmetic is tested instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pacecar.controller.foreach_ops import norms_of

from ..actuator import Gather, StartGather

__all__ = ["CHECKS", "GradientCheck", "concerns_gradients"]

logger = logging.getLogger(__name__)

CHECKS = 2

HEAD_NUMEL = 8192
"""Values read of each gradient.  A bucket goes wrong as a whole, and reading 100 M gradients takes a CPU core 80 ms,
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

    The function that `start_gather` returns raises TimeoutError while the other ranks' numbers are not there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._due = 0
        self._before: Gather | None = None  # what was sent before the first switch
        self._sent: list[Gather] = []  # at earlier boundaries
        self._latest: Gather | None = None  # sent at this boundary
        self._is_meaningful: bool | None = None

    @property
    def is_armed(self) -> bool:
        """Whether gradients are to be sent or compared now: the same on all ranks, unless answers are late."""
        return self._due > 0 or bool(self._sent) or self._latest is not None

    def prepare(self, start_gather: StartGather) -> None:
        """Compare once before anything was changed, on all ranks at the same boundary."""
        if self._is_meaningful is None and self._before is None:
            self._before = start_gather(self._norms_or_failure())
            self._judge_before()

    def _judge_before(self) -> None:
        try:
            difference = None if self._before is None else self._difference(self._before)
        except TimeoutError:
            return  # everything has arrived when all ranks come to the next switch
        self._before, self._is_meaningful = None, difference is None
        if difference is not None:
            logger.info("pacecar: gradients are not compared after switches: %s before the first", difference)

    def arm(self, *, is_on: bool = True) -> None:
        """Compare in the next CHECKS steps, after a switch on all ranks; `is_on` False: stop comparing."""
        if self._before is not None:
            self._judge_before()
        self._due = CHECKS if self._is_meaningful and is_on else 0
        self._drop_pending()

    def check(self, start_gather: StartGather) -> str | None:
        """Send the gradients of the step that ended, if they are due, and compare those of earlier steps.

        All ranks call it after the same steps, and send before they compare, so that a rank that finds a difference
        late sends as often as the others.  Return how the gradients differ, or None.
        """
        if self._latest is not None:
            self._sent.append(self._latest)
            self._latest = None
        if self._due > 0:
            self._due -= 1
            self._latest = start_gather(self._norms_or_failure())
        return self.compare()

    def compare(self) -> str | None:
        """Compare what was sent at earlier boundaries, as far as the answers have arrived."""
        while self._sent:
            try:
                difference = self._difference(self._sent[0])
            except TimeoutError:
                return None
            del self._sent[0]
            if difference is not None:
                self._drop_pending()
                return difference
        return None

    def _drop_pending(self) -> None:
        self._sent.clear()
        self._latest = None

    def _norms_or_failure(self) -> list[float]:
        try:
            norms: list[float] = self._norms().tolist()
        except Exception:  # the others wait for an answer
            logger.exception("pacecar could not read the gradients")
            return [-1.0] * len(self._parameters)
        return norms

    def _difference(self, receive: Gather) -> str | None:
        for name, norms in zip(self._names, zip(*receive() or (), strict=True), strict=False):
            least, most = min(norms), max(norms)
            if least < 0:
                return "a rank cannot read its gradients"
            if most - least > TOLERANCE * most:
                return f"the gradient of {name} has norm {least:.6g} on one rank and {most:.6g} on another"
        return None

    def _norms(self) -> Tensor:
        """Return the norm of every gradient's head, 0 if there is none or it is not finite."""
        norms = torch.zeros(len(self._parameters), dtype=torch.float64)
        with torch.no_grad():
            there = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None and not p.grad.is_sparse]
            if there:
                found = norms_of([_head(gradient) for _, gradient in there])
                norms[[i for i, _ in there]] = torch.stack([n.to(torch.float64) for n in found]).cpu()
        return norms.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _head(gradient: Tensor) -> Tensor:
    return gradient.view(-1)[:HEAD_NUMEL] if gradient.is_contiguous() else gradient
