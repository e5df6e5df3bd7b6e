"""Puts the tuner's step boundaries at the next training forward, for scripts that may leave out an optimizer step.

Ranks vote and switch at boundaries, so every rank must pass the same ones, at the same places among the job's own
collectives.  The end of `optimizer.step()` is not such a place in every script: a rank that finds its own loss not
finite may leave the step out, and from then on its boundaries are others than those of the other ranks.  DDP and
FSDP2 themselves need all ranks to synchronize gradients equally often.  So a boundary here is the first training
forward after a backward that synchronized, both of the wrapper itself, also where the loop calls an object around it:

    rank 0   forward backward* step   | forward backward* step   |      * synchronized
    rank 1   forward backward* -      | forward backward* step   |

The price: gradients may be cleared by then, so that the comparison after a switch sees nothing (`gradient_check`).
Left out: what is done at a boundary (`tuner`).

`RankDeparture` tells when this rank must leave the agreement without a vote, because ranks no longer come to the same
boundaries.

To freeze, ranks tell each other by a vote, and a vote needs all of them at the same boundary.  Two things end that for
good without anything having failed:

    uneven inputs     under torch's `Join` (DDP's `join`) a rank that ran out of batches passes no boundary any more:
                      it answers DDP's collectives and no vote of ours
    another group     the job destroyed its process group, and may have met anew, with other ranks (elastic restarts
                      inside one process)

Every rank that goes on training sees either at its own next boundary, so each leaves there by itself.  What is in force
stays, on all ranks alike, and nothing is voted for, gathered or compared any more.  To go back from an unproven value
would take all ranks at one boundary, and there is none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import unserializable_hook

from pacecar.profiler.hook.module_calls import CallObserver, observe_calls
from pacecar.profiler.hook.phase_hooks import OUTPUTS_MAX, with_gradient
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.profiler.ranks.data_parallel import find_ddp, find_fsdp, fsdp_groups, is_fsdp, uncompiled
from pacecar.profiler.timing.preemption import Preemption
from pacecar.profiler.timing.torch_compile import keep_out
from pacecar.torch_internals import lacking

from .step_observations import MeasuredSteps

__all__ = [
    "ForwardBoundaries",
    "RankDeparture",
]

logger = logging.getLogger(__name__)


class ForwardBoundaries:
    """Calls `on_boundary` with the step that ended last, at the next forward after a synchronized backward.

    Both are those of the DistributedDataParallel or FSDP2 module that `model` is or holds, of `model` without any.
    `charge` gets the ns that this took, because no other part of a step's record counts them.  What the kernel gave to
    other programs meanwhile is left out (`preemption`), as it is at the hook's own boundaries.
    """

    def __init__(
        self,
        model: nn.Module,
        on_boundary: Callable[[MeasuredSteps | CountedStep | None], None],
        *,
        now_ns: Callable[[], int],
        charge: Callable[[int], None],
        preemption: Preemption,
    ) -> None:
        self._ddp: Any = find_ddp(model)
        fsdp = find_fsdp(uncompiled(model)) if self._ddp is None else None
        self._groups = [] if fsdp is None else [g for m in fsdp.modules() if is_fsdp(m) for g in fsdp_groups(m)]
        wrapper = self._ddp if fsdp is None else fsdp
        self._model = model if wrapper is None or wrapper is uncompiled(model) else wrapper
        self._on_boundary = on_boundary
        self._now_ns = now_ns
        self._charge = charge
        self._preemption = preemption
        self._step: MeasuredSteps | CountedStep | None = None
        self._has_synchronized = False
        self._has_failed = False
        self._pid = os.getpid()
        self._observer: CallObserver | None = None

    def open(self) -> None:
        """Begin; must run before the hook's own hooks, so that a boundary is no part of a forward."""
        kind = ForwardBoundaries
        keep_out(kind._before_forward, kind._after_forward, kind._on_gradient)
        self._observer = observe_calls(self._model, self._before_forward, self._after_forward, is_first=True)

    def step_ended(self, step: MeasuredSteps | CountedStep | None) -> None:
        """Keep `step` for the boundary that follows."""
        self._step = step

    def close(self) -> None:
        """End; no boundary comes any more."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.remove()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._has_synchronized or not (module.training and torch.is_grad_enabled()):
            return
        self._has_synchronized = False
        if os.getpid() != self._pid:  # a forked child takes part in no vote
            return
        begun = self._now_ns()
        self._preemption.begin()
        step, self._step = self._step, None
        try:
            self._on_boundary(step)
        except Exception:  # the job goes on; the next boundary must be reported all the same
            logger.log(logging.DEBUG if self._has_failed else logging.ERROR, "pacecar failed", exc_info=True)
            self._has_failed = True
        self._preemption.end()
        self._charge(self._preemption.own_ns(self._now_ns() - begun))

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if (self._ddp is None and not self._groups) or not (module.training and torch.is_grad_enabled()):
            return
        # DDP decides in forward whether its backward synchronizes, FSDP2 in backward.
        if not getattr(self._ddp, "require_backward_grad_sync", True):
            return
        for count, tensor in enumerate(with_gradient(output), start=1):
            tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            if count == OUTPUTS_MAX:
                break

    @unserializable_hook  # type: ignore[untyped-decorator]  # else torch warns whoever pickles an output
    def _on_gradient(self, gradient: torch.Tensor) -> None:
        if not self._has_synchronized:
            self._has_synchronized = all(group.reduce_grads for group in self._groups)


class RankDeparture:
    """Checks at every boundary whether all ranks still come to the same boundaries."""

    def __init__(self, model: nn.Module) -> None:
        self._ddp = find_ddp(model)
        # Join is recognized by an attribute.  Every rank has the same torch, so all leave at once where it is missing.
        self._lacks = None if self._ddp is None else lacking("agreement", {"DDP": self._ddp})
        self._world = _world()

    def reason(self) -> str | None:
        """Return why this rank must leave now, or None.  Costs two microseconds."""
        if self._lacks is not None:
            return self._lacks
        join: Any = getattr(self._ddp, "_join_config", None)  # set by Join on all that takes part, since torch 1.10
        if getattr(join, "enable", False):
            return "uneven inputs (Join): a rank that runs out of batches cannot vote; knobs stay as they are"
        if _world() is not self._world:
            return "the job's process group was destroyed; knobs stay as they are"
        return None


def _world() -> Any:  # noqa: ANN401  dist.ProcessGroup | None
    return dist.group.WORLD if dist.is_available() else None
