"""Decides which optimizer's steps end the job's steps when the script makes a new optimizer for the same model.

A script may make a new optimizer each epoch, when it freezes or unfreezes layers, or to restart Adam.  The model stays,
so its parameters identify the job, not the optimizer object.  But most other optimizers that step must not end a step
of the job: a discriminator's, a teacher's, the second of two that share a model's parameters, the one inside a wrapper.

    the new optimizer updates                it takes over
    no parameter of the model                never
    mostly what the current one updates      with its first step, if the loop went round without it before or its own
                                             steps counted before; else once the current one has missed SAME_STEPS
    other parameters of the model            the same, but only if what the current one updates is frozen or gone;
                                             else once the current one has missed OTHER_STEPS

A step is considered only if the model ran forward since the last one, and not inside a step of the current optimizer.
The decision depends only on the script's own calls, never on when the garbage collector runs, so ranks that make the
same calls decide alike.  Updates that torch's hooks do not see are not considered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from .step_hooks import weakly

__all__ = ["OTHER_STEPS", "SAME_STEPS", "OptimizerSuccession", "parameters_of", "shares_most", "updates_of"]

SAME_STEPS = 3
"""The current optimizer is replaced after this many steps of another on its parameters with none of its own: two
optimizers may take turns."""

OTHER_STEPS = 128
"""The same for other parameters of the model: a critic may take a hundred steps for each generator step (WGAN)."""

ROUND_STEPS = 2
"""After this many steps of the job, every optimizer that runs in each iteration of the loop has been seen."""

HEARD_MAX = 256
"""The most optimizers remembered at once; the oldest is forgotten first and counts as new if it steps again."""

Relation = Literal["stranger", "same", "other"]


def parameters_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that `optimizer` updates; none if it does not store them as torch's do."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups if isinstance(group, dict) for parameter in group.get("params", ())}


STATES_MAX = 16
"""Parameters whose updates are compared: some may have had no gradient in the first step, but not as many."""


def updates_of(optimizer: object) -> int | None:
    """Return how many updates `optimizer` has made, restored ones included; None if it does not count them.

    Most of torch's do, as `state[parameter]["step"]`, a number or a tensor.  One on a device is not read, because that
    would wait for the device.
    """
    states = getattr(optimizer, "state", None)
    if not isinstance(states, Mapping):
        return None
    counts = (state.get("step") for state in islice(states.values(), STATES_MAX) if isinstance(state, Mapping))
    known = [count for count in map(_whole, counts) if count is not None]
    return max(known, default=None)


def _whole(count: object) -> int | None:
    if type(count) is torch.Tensor and count.device.type == "cpu" and count.numel() == 1:
        count = count.item()
    return int(count) if isinstance(count, int | float) and count == int(count) >= 0 else None


def shares_most(one: set[int], other: set[int]) -> bool:
    """Return whether at least half of the smaller of two sets of parameters is in both."""
    return 2 * len(one & other) >= min(len(one), len(other)) > 0


class _Heard:
    """An optimizer that made a step, and its `relation` to the current one (None: not known yet)."""

    __slots__ = ("counted", "optimizer", "relation")

    def __init__(self, optimizer: Optimizer, *, counted: bool) -> None:
        self.optimizer = weakly(optimizer)
        self.relation: Relation | None = None
        self.counted = counted
        """Whether its steps have been the job's steps before, more than one in a row."""


class OptimizerSuccession:
    """Tracks the optimizer whose steps count, initially the attached one; keeps none alive."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self.present: Callable[[], Optimizer | None] = weakly(optimizer)
        """Returns the optimizer whose steps count; None if the script has dropped it."""
        self._updated = parameters_of(optimizer)
        self._inside: set[int] = set()
        self._walked_at: int | None = None
        self._heard: dict[int, _Heard] = {id(optimizer): _Heard(optimizer, counted=True)}
        self._since = self._step = self._missed = 0

    def takes_over(self, optimizer: Optimizer, step: int, *, is_update: bool) -> bool:
        """Return whether the step that `optimizer` begins is step `step` of the job; it is then the current optimizer.

        Call this only for other optimizers than the current one.  `is_update`: the model ran forward in this step of
        the job, and no step of the current optimizer is under way.
        """
        if step != self._step:
            self._step, self._missed = step, 0
        heard = self._heard.get(id(optimizer))
        is_new = heard is None or heard.optimizer() is not optimizer
        if heard is None or is_new:
            heard = self._remember(optimizer)
        if heard.relation is None:
            heard.relation = self._judge(parameters_of(optimizer), step)
        if heard.relation == "stranger" or not is_update:
            return False
        self._missed += 1
        if heard.relation == "same":
            is_next = heard.counted or (is_new and not 0 < step < ROUND_STEPS)
            patience = 1 if is_next else SAME_STEPS
        else:
            is_next = heard.counted or (is_new and step >= ROUND_STEPS)
            patience = 1 if is_next and self._is_over() else OTHER_STEPS
        if self._missed < patience:
            return False
        self._succeed(optimizer, step)
        return True

    def _succeed(self, optimizer: Optimizer, step: int) -> None:
        before = self.present()
        left = None if before is None else self._heard.get(id(before))
        if left is not None:
            left.counted = step - self._since > 1  # otherwise the two take turns
        self.present, self._updated = weakly(optimizer), parameters_of(optimizer)
        self._since, self._missed = step, 0
        for heard in self._heard.values():
            heard.relation = None

    def _remember(self, optimizer: Optimizer) -> _Heard:
        if len(self._heard) >= HEARD_MAX:
            self._heard = {key: heard for key, heard in self._heard.items() if heard.optimizer() is not None}
        if len(self._heard) >= HEARD_MAX:
            del self._heard[next(iter(self._heard))]
        found = self._heard[id(optimizer)] = _Heard(optimizer, counted=False)
        return found

    def _judge(self, updated: set[int], step: int) -> Relation:
        present = self.present()
        if present is not None:  # groups may have been added
            self._updated = parameters_of(present)
        if shares_most(updated, self._updated):
            return "same"
        if updated.isdisjoint(self._inside) and step != self._walked_at:  # at most one walk a step: models may be large
            self._walked_at = step
            self._inside = {id(parameter) for parameter in self._model.parameters()}
        return "stranger" if updated.isdisjoint(self._inside) else "other"

    def _is_over(self) -> bool:
        """Return whether everything the current optimizer updates is frozen or no longer in the model."""
        return not any(p.requires_grad for p in self._model.parameters() if id(p) in self._updated)
