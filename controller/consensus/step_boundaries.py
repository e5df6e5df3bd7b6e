"""Decides where step boundaries are in scripts that may skip a step, and when a rank must leave the agreement.

Ranks vote and switch at boundaries, so every rank must pass the same ones, at the same places among the job's own
collectives.  The end of `optimizer.step()` is not such a place in every script: a rank whose loss is not finite may
skip the step, and from then on its boundaries differ.  DDP and FSDP2 themselves need all ranks to synchronize gradients
equally often.  So `ForwardBoundaries` uses the first training forward of the wrapper after a backward that
synchronized, even if the loop calls an object around the wrapper:

    rank 0   forward backward* step   | forward backward* step   |      * synchronized
    rank 1   forward backward* -      | forward backward* step   |

The price: gradients may be cleared by then, and the comparison after a switch sees nothing (`gradient_check`).

`RankDeparture` detects that ranks no longer come to the same boundaries, so that no vote can be held:

    uneven inputs     under torch's `Join` (DDP's `join`) a rank that ran out of batches passes no boundary any more: it
                      answers DDP's collectives and none of pacecar's votes
    another group     the job destroyed its process group, and may have met again with other ranks (elastic restarts
                      inside one process)

Every rank that goes on training sees this at its own next boundary and leaves there.  The values in force stay, the
same on all ranks: going back from an unproven value would need all ranks at one boundary.
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
from pacecar.profiler.hook.step_records import FinishedStep
from pacecar.profiler.ranks.data_parallel import find_ddp, find_fsdp, fsdp_groups, is_fsdp, uncompiled
from pacecar.profiler.timing.preemption import Preemption
from pacecar.profiler.timing.torch_compile import keep_out
from pacecar.torch_internals import lacking

__all__ = ["ForwardBoundaries", "RankDeparture"]

logger = logging.getLogger(__name__)


class ForwardBoundaries:
    """Calls `on_boundary` with the last finished step, at the next forward after a synchronized backward.

    Both are those of the DistributedDataParallel or FSDP2 module that `model` is or holds, else of `model`.  `charge`
    gets the ns that this took, which no other part of a step's record counts.  Time that the kernel gave to other
    programs is left out (`preemption`), as at the hook's own boundaries.
    """

    def __init__(
        self,
        model: nn.Module,
        on_boundary: Callable[[FinishedStep | CountedStep | None], None],
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
        self._step: FinishedStep | CountedStep | None = None
        self._has_synchronized = False
        self._has_failed = False
        self._pid = os.getpid()
        self._observer: CallObserver | None = None

    def open(self) -> None:
        """Begin; must run before the hook's own hooks, so that a forward's time does not include a boundary."""
        kind = ForwardBoundaries
        keep_out(kind._before_forward, kind._after_forward, kind._on_gradient)
        self._observer = observe_calls(self._model, self._before_forward, self._after_forward, is_first=True)

    def step_ended(self, step: FinishedStep | CountedStep | None) -> None:
        """Keep `step` for the boundary that follows."""
        self._step = step

    def close(self) -> None:
        """End: no further boundaries."""
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
        except Exception:  # the job goes on, and the next boundary must still be reported
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

    @unserializable_hook  # type: ignore[untyped-decorator]  # otherwise torch warns when an output is pickled
    def _on_gradient(self, gradient: torch.Tensor) -> None:
        if not self._has_synchronized:
            self._has_synchronized = all(group.reduce_grads for group in self._groups)


class RankDeparture:
    """Checks at every boundary whether all ranks still come to the same boundaries."""

    def __init__(self, model: nn.Module) -> None:
        self._ddp = find_ddp(model)
        # Join is recognized by an attribute.  Every rank has the same torch, so without it all leave at once.
        self._lacks = None if self._ddp is None else lacking("agreement", {"DDP": self._ddp})
        self._world = _world()

    def reason(self) -> str | None:
        """Return why this rank must leave now, or None.  Costs two microseconds."""
        if self._lacks is not None:
            return self._lacks
        join: Any = getattr(
            self._ddp, "_join_config", None
        )  # Join sets it on everything that takes part, since torch 1.10
        if getattr(join, "enable", False):
            return "uneven inputs (Join): a rank that runs out of batches cannot vote; knobs stay as they are"
        if _world() is not self._world:
            return "the job's process group was destroyed; knobs stay as they are"
        return None


def _world() -> Any:  # noqa: ANN401  dist.ProcessGroup | None
    return dist.group.WORLD if dist.is_available() else None
