"""Finds out from one iteration of the loop what a process trains with what, and attaches: a state machine.

An iteration lasts from a step of an optimizer to its next one.  The states and transitions:

    first      an optimizer made a step: look for its model                              -> iteration
    iteration  the same optimizer steps again: what stepped and what was called is known
               nothing was called: probe the next level of modules                       -> iteration
               it is known what to attach                                                -> joining
    joining    the optimizer that ends an iteration steps; it may measure only           -> attached
               it may tune, and all ranks are there, or one will never be                -> attached
    attached   other optimizers step, and none of them ends a step of the model's        -> over
    over       for good; also whenever something is unclear, with one line that says why

A script may make a new optimizer for the same model; `profiler.hook.optimizer_succession` decides which follows which.
Of several optimizers that train one model (two kinds of parameters, a wrapper around another), the one that steps last
in an iteration ends pacecar's steps.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from pacecar.formatting.quantities import plural
from pacecar.profiler.hook import single_instance
from pacecar.profiler.hook.identity import WORLD_SIZE
from pacecar.profiler.hook.optimizer_succession import OTHER_STEPS, parameters_of, shares_most
from pacecar.torch_internals import lacking

from ..attach import Pacer
from .dataloader_waits import forget_waits
from .model_finder import ModelProbes, children_of, compiled_functions, inside_of, roots_of
from .stderr_lines import say
from .tuning_permission import AttachRequest, join, make_request

__all__ = ["LoopWatcher", "why_no_rank"]

logger = logging.getLogger(__name__)

ITERATION_STEPS_MAX = 64
"""Steps of optimizers in one iteration of a loop; if no optimizer comes twice in so many, it is not a loop."""

MODULELESS_STEPS_MAX = 8
"""Steps of optimizers that train no module (a temperature, a latent) before the search over all objects ends."""

LEVELS_MAX = 3
"""Levels below the outermost module at which the called model is searched."""

OTHERS_MAX = 2 * OTHER_STEPS
"""Steps of other optimizers, without one of the attached model's, after which its training is over.

More than any alternation of a few optimizers, and soon enough to release the model's memory.
"""


class LoopWatcher:
    """Receives every optimizer's steps; `helper_of` names the process that this one is a helper of, if any.

    `is_fork`: this process was forked by one that already had the optimizer hook.
    """

    def __init__(self, helper_of: str | None, *, is_fork: bool = False) -> None:
        self._helper_of = helper_of
        self._is_fork = is_fork
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._is_over = False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._trained: set[int] = set()
        self._moduleless_steps = 0
        self._steps = self._recorded_steps = 0
        self._probed: list[nn.Module] = []
        self._probes: ModelProbes | None = None
        self._level = 0
        self._request: AttachRequest | None = None
        self._chosen: weakref.ref[Optimizer] | None = None
        self._pacer: Pacer | None = None
        self._step = 0
        self._others = 0

    @property
    def unfinished(self) -> str | None:
        """Why nothing is measured if the script ends now; None if something is, or the reason was given."""
        if self._is_over or self._pacer is not None or os.getpid() != self._pid:
            return None
        if self._request is not None:
            return "the script ended before pacecar had attached"
        return f"the script ended after {plural(self._recorded_steps, 'step')}, before its loop had come round"

    def record_step(self, optimizer: Optimizer) -> None:
        """Record that `optimizer` made a step; never raises."""
        if self._is_over or os.getpid() != self._pid or threading.get_ident() != self._thread:
            return
        try:
            if self._pacer is not None:
                self._follow(optimizer)
            elif self._request is not None:
                self._join(optimizer, self._request)
            else:
                self._recorded_steps += 1
                (self._note if self._optimizers else self._begin)(optimizer)
        except Exception as error:
            logger.debug("pacecar: could not attach", exc_info=True)
            self._end(f"does not attach: {type(error).__name__}: {error}")

    def _begin(self, optimizer: Optimizer) -> None:
        reason = why_no_rank(self._helper_of, is_fork=self._is_fork)
        if reason is not None or single_instance.attached:
            self._end(reason or "")
            return
        owners: dict[str, object] = {"module": nn.Identity()}
        lacks = lacking("run_models", owners) or lacking("module_calls", owners)
        if lacks is not None:
            self._end(f"does not attach: {lacks}")
            return
        self._trained = parameters_of(optimizer)
        roots = roots_of(self._trained)
        self._moduleless_steps += not roots
        if roots or self._moduleless_steps >= MODULELESS_STEPS_MAX:
            self._optimizers = [weakref.ref(optimizer)]
            self._probe(roots)

    def _probe(self, modules: list[nn.Module]) -> None:
        if not modules:
            self._end("does not attach: no module that the loop calls holds the optimizer's parameters")
        elif any(compiled_functions(module) for module in modules):
            self._end("does not attach: torch.compile is used on functions; call pacecar.attach in the script")
        else:
            self._probed, self._probes = modules, ModelProbes(modules)
            self._probes.install()

    def _note(self, optimizer: Optimizer) -> None:
        self._steps += 1
        if self._optimizers[0]() is None and shares_most(parameters_of(optimizer), self._trained):
            self._optimizers[0] = weakref.ref(optimizer)  # the script has made a new one in its place
        if optimizer is not self._optimizers[0]():
            if all(optimizer is not known() for known in self._optimizers):
                self._optimizers.append(weakref.ref(optimizer))
            if self._steps > ITERATION_STEPS_MAX:
                self._end(f"does not attach: no optimizer made a second step within {ITERATION_STEPS_MAX} steps")
            return
        if single_instance.attached:
            self._end("")
            return
        parameters = parameters_of(optimizer)
        probes, self._probes = self._probes, None
        assert probes is not None, "installed with the first step"
        probes.remove()
        called = probes.called(parameters)
        self._steps = 0
        if called:
            self._choose(called, parameters, probes, stepped=optimizer)
            return
        self._level += 1
        self._probe(children_of(self._probed, parameters) if self._level < LEVELS_MAX else [])

    def _choose(
        self, called: list[nn.Module], parameters: set[int], probes: ModelProbes, *, stepped: Optimizer
    ) -> None:
        """Choose the called model with most of the parameters, and the last optimizer that trains nothing else."""
        model, self._probed = called[0], []
        owned = {id(parameter) for module in inside_of(model) for parameter in module.parameters(recurse=False)}
        known = [found for found in (reference() for reference in self._optimizers) if found is not None]
        inside = [found for found in known if parameters_of(found) <= owned]
        optimizer = inside[-1] if inside else known[0]
        several = len(called) > 1 or len(inside) < len(known)
        self._chosen = weakref.ref(optimizer)
        self._request = make_request(model, optimizer, several=several, is_called=probes.saw)
        if self._request.gathering is None and stepped is optimizer:
            self._attach(self._request)

    def _join(self, optimizer: Optimizer, request: AttachRequest) -> None:
        """Attach at the end of an iteration: within it, the rest of it would be the first step."""
        is_new = all(optimizer is not known() for known in self._optimizers)
        if is_new and shares_most(parameters_of(optimizer), parameters_of(request.optimizer)):
            self._optimizers.append(weakref.ref(optimizer))
            self._chosen, self._request = self._optimizers[-1], replace(request, optimizer=optimizer)
            request = self._request
        if self._chosen is None or optimizer is not self._chosen():
            self._others += 1
            if self._others >= OTHERS_MAX:
                self._end("does not attach: the script trains something else now")
            return
        self._others = 0
        come = True if request.gathering is None else request.gathering.step()
        if come is not None:
            self._attach(request if come else request.alone("some ranks did not come to attach"))

    def _attach(self, request: AttachRequest) -> None:
        self._request = None
        self._pacer, line = join(request)
        say(line)
        if not self._pacer.is_active:
            self._end("")

    def _follow(self, optimizer: Optimizer) -> None:
        hook = None if self._pacer is None else self._pacer._hook
        if hook is None or not hook.is_alive:  # one that turned itself off ends no steps
            return
        if hook.step != self._step:
            self._step, self._others = hook.step, 0
            return
        self._others += 1
        if self._others >= OTHERS_MAX:
            self._end("detaches: the script trains something else now")

    def _end(self, line: str) -> None:
        """Stop for good, and release everything that belongs to the job."""
        self._is_over = True
        probes, pacer = self._probes, self._pacer
        self._probes = self._pacer = self._request = self._chosen = None
        self._probed, self._optimizers = [], []
        if probes is not None:
            probes.remove()
        forget_waits()
        if pacer is not None:
            pacer.close("the script trains something else now")
        if line:
            say(line)


def why_no_rank(helper_of: str | None, *, is_fork: bool = False, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process is not a rank of a job, or None; "" if no user would expect it to be one."""
    is_up = dist.is_available() and dist.is_initialized()
    # torch.multiprocessing.spawn starts ranks too, from a process that may have been started as one.
    is_child = is_fork or multiprocessing.parent_process() is not None
    if get_worker_info() is not None:
        return ""
    if is_up and (helper_of is None or is_child):
        return None
    if is_up and dist.get_world_size() > 1:
        return f"does not attach: process {helper_of} is this rank, and started this one"
    if helper_of is not None or is_child:
        # One of a script's own processes speaks for all of them.
        is_first = helper_of is None and multiprocessing.current_process().name.endswith("-1")
        return (
            "does not attach: the script trains in processes of its own, without torch.distributed" if is_first else ""
        )
    sizes = [environ[name] for name in WORLD_SIZE if environ.get(name, "").isdigit()]
    if sizes and int(sizes[0]) > 1:
        return f"does not attach: one of {sizes[0]} processes, and torch.distributed is not initialized"
    return None
