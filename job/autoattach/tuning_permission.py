"""Attaches pacecar to a script that does not call it: measures it, and tunes only where no script can be hurt.

A script that calls `pacecar.attach` promises that all ranks attach and make the same steps, and that its model is DDP's
own.  Here nobody promised that.  So a knob is turned only under DistributedDataParallel over all ranks, in its own
class or one that changes nothing of its work, and at boundaries that hold where a rank leaves a step out
(`at_forward`).  Everywhere else the script is measured, and the line on stderr says why no more is done.

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
from .outcome_lines import OutcomeLines
from .rank_gathering import RankGathering
from .stderr_line import keep_quiet

__all__ = ["AttachRequest", "join", "refusal", "wish"]

MODE_VARIABLE = "PACECAR_TUNE_MODE"

AS_NOBODY_ASKED: dict[str, Any] = {"at_forward": True, "meet_seconds": 5.0}
"""Ranks that gathered are in the same step, and meet at its end within moments.  The exception is a rank that counted
its first steps in another way (it left one out); the others wait `meet_seconds` for it, once."""


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
        """Return the request of a rank that only measures, for `reason`."""
        return replace(self, mode="off", reason=reason, gathering=None)


def wish(model: nn.Module, optimizer: Optimizer, *, several: bool) -> AttachRequest:
    """Return what may be attached and how far it may tune; `several`: the loop trains other models too.

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
    """Return the names that a subclass of DDP overrides.

    Not counted are its constructor and its access to the attributes of what it wraps, which many override.
    """
    known = {name for owner in DistributedDataParallel.__mro__[:-1] for name in vars(owner)}
    own = {name for owner in kind.__mro__[: kind.__mro__.index(DistributedDataParallel)] for name in vars(owner)}
    return sorted(name for name in known & own if name == "__call__" or not name.startswith(("__", "_abc_")))


def join(wished: AttachRequest) -> tuple[Pacer, str]:
    """Attach; return the pacer, and the line that says what it does."""
    hello = make_hello(wished.model, job=wished.config.hook.job)
    keep_quiet(hello.rank, wished.config.hook.run_dir)
    config, options = wished.config, AS_NOBODY_ASKED
    outcome_lines = OutcomeLines(config.hook.run_dir)
    pacer = attach(wished.model, wished.optimizer, tune=wished.mode, config=config, loggers=[outcome_lines], **options)
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
