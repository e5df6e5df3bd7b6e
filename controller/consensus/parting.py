"""Tells when this rank must leave the agreement without a vote, because ranks no longer come to the same boundaries.

To freeze, ranks tell each other by a vote, and a vote needs all of them at the same boundary.  Two things end that for
good without anything having failed:

    uneven inputs     under torch's `Join` (DDP's `join`) a rank that ran out of batches passes no boundary any more:
                      it answers DDP's collectives and no vote of ours
    another group     the job destroyed its process group, and may have met anew, with other ranks (elastic restarts
                      inside one process)

Every rank that goes on training sees either at its own next boundary, so each leaves there by itself.  What is in force
stays, on all ranks alike, and nothing is voted for, gathered or compared any more.  To go back from an unproven value
would take all ranks at one boundary, and there is none.

Left out: ranks that make unequal numbers of steps without Join.  DDP hangs there by itself.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from pacecar.torch_internals import lacking

from ..knobs.ddp.torch_internals import find_ddp

__all__ = ["RankDeparture"]


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
