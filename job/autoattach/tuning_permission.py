"""Attaches pacecar to a script that does not call it: measures it, and tunes only where no script can be harmed.

A script that calls `pacecar.attach` promises that all ranks attach and make the same steps, and that its model is DDP's
own.  Here there is no such promise.  So a knob is turned only under DistributedDataParallel or FSDP2 over all ranks, of
torch's own class or one that changes nothing of its work, if the loop was seen to call it, directly or through an
object around it, and at boundaries that hold even if a rank skips a step (`at_forward`).  Everywhere else the script is
measured, and the line on stderr says why no more is done.

Without PACECAR_TUNE_MODE the mode is "off", whatever a configuration file says: that file is for scripts that ask.

Attaching a tuner is a collective: ranks meet and make a group.  A rank that does not come (its python has no pacecar,
it trains something else) would delay the others as long as they are willing to wait.  A script that asked for nothing
must not wait.  So each rank adds itself to a counter in the job's store (`RankGathering`), and when rank 0 sees that
all are there it names a step a few steps ahead.  Ranks under DDP are never a whole step apart, so each reads that
number before it gets there.  A store may outlive its ranks; hence `life` in the keys (`profiler.transport.rendezvous`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pacecar.config import Config, load_config
from pacecar.formatting.quantities import plural
from pacecar.profiler.hook.identity import make_hello
from pacecar.profiler.hook.optimizer_succession import parameters_of
from pacecar.profiler.ranks.data_parallel import (
    find_ddp,
    find_fsdp,
    fsdp_groups,
    is_fsdp,
    spans_all_ranks,
    tensor_parallel_ranks,
    uncompiled,
    wrapper_of_others,
    wrappers_in,
)
from pacecar.profiler.transport.rendezvous import life
from pacecar.torch_internals import lacking, need

from ..attach import Pacer, attach
from .dataloader_waits import time_waits
from .stderr_lines import OutcomeLines, keep_quiet

__all__ = ["LEAD_STEPS", "STEPS_MAX", "AttachRequest", "RankGathering", "join", "make_request", "refusal"]

MODE_VARIABLE = "PACECAR_TUNE_MODE"

UNASKED_OPTIONS: dict[str, Any] = {"at_forward": True, "meet_seconds": 5.0}
"""Ranks that gathered are in the same step, and meet at its end within moments.  The exception is a rank that counted
its first steps in another way (it skipped one); the others wait `meet_seconds` for it, once."""


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


def make_request(
    model: nn.Module, optimizer: Optimizer, *, several: bool, is_called: Callable[[nn.Module], bool]
) -> AttachRequest:
    """Return what may be attached and how far it may tune; `several`, `is_called` as in `refusal`.

    Raises:
        ConfigError: file or environment are not valid.
    """
    config = load_config()
    mode = config.tune.mode if MODE_VARIABLE in os.environ else "off"
    request = AttachRequest(model, optimizer, config, mode)
    if mode == "off":
        return request
    reason = refusal(model, optimizer, mode, several=several, is_called=is_called)
    if reason is not None:
        return request.alone(reason)
    store: Any = need("torch.distributed.distributed_c10d._get_default_store")()
    return replace(request, gathering=RankGathering(store, dist.get_rank(), dist.get_world_size(), f"mode-{mode}"))


def refusal(
    model: nn.Module, optimizer: Optimizer, mode: str, *, several: bool, is_called: Callable[[nn.Module], bool]
) -> str | None:
    """Return why nothing is tuned, or None.

    `several`: the loop trains other models too.  `is_called`: whether it was seen to call a module that `model` holds.
    """
    if mode not in ("advise", "exact"):
        return f'mode "{mode}" needs the loss, so the script itself must call pacecar.attach'
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return "one rank has nothing to tune here"
    lacks = lacking("run_gathering")
    if lacks is not None:
        return lacks
    ddp, fsdp = find_ddp(model), find_fsdp(model)
    wrapper = ddp if ddp is not None else fsdp
    if wrapper is None:
        return _unwrapped(model)
    if several:
        return "the loop trains several models"
    name = "DistributedDataParallel" if ddp is not None else "FSDP2"
    if wrapper is not uncompiled(model) and not is_called(wrapper):
        return f"the loop does not call what {type(model).__name__} has under {name}"
    if not parameters_of(optimizer) & {id(parameter) for parameter in wrapper.parameters()}:
        return f"{type(optimizer).__name__} trains nothing that is under {name}"
    if ddp is None:
        return _fsdp_refusal(wrapper)
    if any(is_fsdp(module) for module in wrappers_in(model)):
        return "DistributedDataParallel and FSDP2 are mixed"
    if dist.get_world_size(ddp.process_group) != dist.get_world_size():
        return "DistributedDataParallel spans only a part of the ranks"
    changed = _changed(type(ddp))
    return f"{type(ddp).__name__} has its own {', '.join(changed[:3])}" if changed else None


def _unwrapped(model: nn.Module) -> str:
    """Return why `model` is not a model of DDP or FSDP2 here."""
    inner, others = uncompiled(model), wrapper_of_others(model)
    kind = type(inner).__name__
    if others is not None:
        return f"{others} is not torch's: it reduces gradients in buffers of its own"
    if inner is not model and wrappers_in(inner):
        return f"{type(inner).__name__} is compiled from outside its DistributedDataParallel or FSDP2"
    if any(is_fsdp(module) for module in wrappers_in(inner)):
        return f"only parts of {kind} are under FSDP2"
    ranks = tensor_parallel_ranks(inner)
    if ranks > 1:
        return f"{kind} is tensor-parallel on {ranks} ranks, and not under DistributedDataParallel or FSDP2"
    return f"{kind} is not under DistributedDataParallel or FSDP2"


def _fsdp_refusal(fsdp: nn.Module) -> str | None:
    """Return why FSDP2's knobs are not turned, or None."""
    for module in fsdp.modules():
        for group in fsdp_groups(module) if is_fsdp(module) else ():
            lacks = lacking("run_fsdp", {"FSDPParamGroup": group})
            if lacks is not None:
                return lacks
    return None if spans_all_ranks(fsdp) else "FSDP2 spans only a part of the ranks"


def _changed(kind: type[DistributedDataParallel]) -> list[str]:
    """Return the names that a subclass of DDP overrides.

    Its constructor and its access to attributes of what it wraps do not count; many override them.
    """
    known = {name for owner in DistributedDataParallel.__mro__[:-1] for name in vars(owner)}
    own = {name for owner in kind.__mro__[: kind.__mro__.index(DistributedDataParallel)] for name in vars(owner)}
    return sorted(name for name in known & own if name == "__call__" or not name.startswith(("__", "_abc_")))


def join(request: AttachRequest) -> tuple[Pacer, str]:
    """Attach; return the pacer, and the line that says what it does."""
    hello = make_hello(request.model, job=request.config.hook.job)
    keep_quiet(hello.rank, request.config.hook.run_dir)
    config, options = request.config, UNASKED_OPTIONS
    outcome_lines = OutcomeLines(config.hook.run_dir)
    pacer = attach(
        request.model, request.optimizer, tune=request.mode, config=config, loggers=[outcome_lines], **options
    )
    if pacer.inert_because is not None:
        return pacer, f"does not attach: {pacer.inert_because}"
    if pacer._hook is not None:
        time_waits(pacer._hook)
    status = None if pacer._tuner is None else pacer._tuner.status
    reason = request.reason if status is None or status.state != "off" else status.detail
    does = "tunes nothing" if reason is not None or request.mode == "off" else f"mode {request.mode}"
    if reason is not None:
        does += f": {reason.removeprefix('not tuning: ')}"
    what = f"{_named(request.model)} and {type(request.optimizer).__name__}"
    return pacer, f"measures job {hello.job}, {what} on {plural(hello.world_size, 'rank')}; {does}"


def _named(model: nn.Module) -> str:
    """Return the name of `model`'s class, and what makes it data-parallel if that is inside it."""
    inner = uncompiled(model)
    kind = wrapper_of_others(model) or type(inner).__name__
    if inner is not model:
        kind = f"compiled {kind}"
    held = [module for module in wrappers_in(inner) if module is not inner]
    if not held:
        return kind
    return f"{kind} around {'FSDP2' if is_fsdp(held[0]) else type(held[0]).__name__}"


LEAD_STEPS = 4
"""Steps between rank 0's naming of a step and that step; two would do."""

STEPS_MAX = 100
"""A rank that has not come after this many steps of the others will not come."""

NEVER = "never"


class RankGathering:
    """One rank's part.  `claim` must be equal on all ranks; ranks with another claim count under another key."""

    def __init__(self, store: Any, rank: int, world_size: int, claim: str) -> None:  # noqa: ANN401  dist.Store
        prefix = f"pacecar/run/{life(world_size)}/{claim}"
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._here, self._at = f"{prefix}/here", f"{prefix}/at"
        self._step = 0
        self._named: str | None = None

    def step(self) -> bool | None:
        """Count a step of this rank; return True in the one at which all attach, False if they never will."""
        self._step += 1
        if self._step == 1:
            self._store.add(self._here, 1)
        if self._named is None:
            self._named = self._ask()
        if self._named is None:
            # The others wait longer than rank 0, which decides.
            return False if self._step > STEPS_MAX + 2 * LEAD_STEPS else None
        if self._named == NEVER or int(self._named) < self._step:
            return False
        return True if int(self._named) == self._step else None

    def _ask(self) -> str | None:
        if self._rank != 0:
            return self._store.get(self._at).decode() if self._store.check([self._at]) else None
        is_complete = self._store.add(self._here, 0) >= self._world_size
        if not is_complete and self._step < STEPS_MAX:
            return None
        named = str(self._step + LEAD_STEPS) if is_complete else NEVER
        self._store.set(self._at, named)
        return named
