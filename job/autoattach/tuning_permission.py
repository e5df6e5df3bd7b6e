"""What may pacecar do in a script that does not know it?  Measure; turn knobs only where no script can be hurt.

What a script that calls `pacecar.attach` promises by that (all ranks attach, make the same steps, its model is DDP's
own) nobody promised here.  So a knob is turned only under DistributedDataParallel over all ranks, in its own class or
one that changes nothing of its work, and at boundaries that hold where a rank leaves a step out (`at_forward`).
Everywhere else the script is measured, and the line says why no more is done.

Without PACECAR_TUNE_MODE the mode is "off", whatever a configuration file says: that file is for scripts that ask.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pacecar.config import Config, load_config
from pacecar.controller.knobs.ddp.torch_internals import find_ddp
from pacecar.profiler.hook.job_identity import make_hello
from pacecar.torch_internals import lacking, need

from ..attach import Pacer, attach
from .dataloader_waits import time_waits
from .rank_gathering import RankGathering
from .stderr_line import keep_quiet

__all__ = ["AttachRequest", "join", "refusal", "wish"]

MODE_VARIABLE = "PACECAR_TUNE_MODE"

AS_NOBODY_ASKED: dict[str, Any] = {"at_forward": True, "meet_seconds": 5.0}
"""Ranks that gathered are in the same step, and meet within its last moments; a rank that counted its first steps in
another way (it left one out) is the exception, and this is what the others wait for it, once."""


@dataclass(frozen=True)
class AttachRequest:
    """What is to be attached, and how far it may go; `reason` says why no further."""

    model: nn.Module
    optimizer: Optimizer
    config: Config
    mode: str
    reason: str | None = None
    gathering: RankGathering | None = None

    def alone(self, reason: str) -> AttachRequest:
        """Return the wish of a rank that measures only, for `reason`."""
        return replace(self, mode="off", reason=reason, gathering=None)


def wish(model: nn.Module, optimizer: Optimizer, *, several: bool) -> AttachRequest:
    """Return what may be done; `several`: the loop trains other models too.

    Raises:
        ConfigError: file or environment are not valid.
    """
    config = load_config()
    mode = config.tune.mode if MODE_VARIABLE in os.environ else "off"
    wished = AttachRequest(model, optimizer, config, mode)
    if mode == "off":
        return wished
    reason = refusal(model, mode, several=several)
    if reason is not None:
        return wished.alone(reason)
    store: Any = need("torch.distributed.distributed_c10d._get_default_store")()
    return replace(wished, gathering=RankGathering(store, dist.get_rank(), dist.get_world_size(), f"mode-{mode}"))


def refusal(model: nn.Module, mode: str, *, several: bool) -> str | None:
    """Return why nothing is tuned, or None."""
    if mode not in ("advise", "exact"):
        return f'mode "{mode}" needs to be told the loss, by pacecar.attach in the script'
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return "one rank has nothing to tune here"
    lacks = lacking("run_gathering")
    if lacks is not None:
        return lacks
    ddp = find_ddp(model)
    if ddp is None:
        return f"{type(model).__name__} is not under DistributedDataParallel"
    if several:
        return "the loop trains several models"
    if dist.get_world_size(ddp.process_group) != dist.get_world_size():
        return "DistributedDataParallel spans only a part of the ranks"
    changed = _changed(type(ddp))
    return f"{type(ddp).__name__} has its own {', '.join(changed[:3])}" if changed else None


def _changed(kind: type[DistributedDataParallel]) -> list[str]:
    """Return what a subclass of DDP does in another way than DDP.

    It may have another constructor, and a way to the attributes of what it wraps, as many have.
    """
    known = {name for owner in DistributedDataParallel.__mro__[:-1] for name in vars(owner)}
    own = {name for owner in kind.__mro__[: kind.__mro__.index(DistributedDataParallel)] for name in vars(owner)}
    return sorted(name for name in known & own if name == "__call__" or not name.startswith(("__", "_abc_")))


def join(wished: AttachRequest) -> tuple[Pacer, str]:
    """Attach; return the pacer, and the line that says what it does."""
    hello = make_hello(wished.model, job=wished.config.hook.job)
    keep_quiet(hello.rank, wished.config.hook.run_dir)
    pacer = attach(wished.model, wished.optimizer, tune=wished.mode, config=wished.config, **AS_NOBODY_ASKED)
    if pacer.inert_because is not None:
        return pacer, f"does not attach: {pacer.inert_because}"
    if pacer._hook is not None:
        time_waits(pacer._hook)
    status = None if pacer._tuner is None else pacer._tuner.status
    reason = wished.reason if status is None or status.state != "off" else status.detail
    does = "tunes nothing" if reason is not None or wished.mode == "off" else f"mode {wished.mode}"
    if reason is not None:
        does += f": {reason.removeprefix('not tuning: ')}"
    what = f"{type(wished.model).__name__} and {type(wished.optimizer).__name__}"
    return pacer, f"measures job {hello.job}, {what} on {hello.world_size} ranks; {does}"
