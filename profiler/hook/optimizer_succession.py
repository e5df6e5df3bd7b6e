"""Decides whose steps end the steps of the measured job when the script makes a new optimizer for the same model.

A script may make a new optimizer each epoch, when it freezes or unfreezes layers, or to restart Adam.  What goes on is
the model, so its parameters are followed and not the optimizer object.  But most optimizers that step beside the
present one must end no step: a discriminator's, a teacher's, the second one of a model whose parameters are split
between two, the one inside a wrapper.

    it updates                               it takes over with
    no parameter of the model                no step
    mostly what the present one updates      its first step, if the loop went round without it before, or if its own
                                             steps counted before; else when the present one has missed SAME_STEPS
    other parameters of the model            the same, but only if what the present one updates is frozen or gone;
                                             else when the present one has missed OTHER_STEPS

A step is only looked at if the model ran forward since the last one, and not inside a step of the present optimizer.
All of this follows from the script's own calls and never from when the garbage collector runs, so ranks that make the
same calls decide alike.

Left out: how steps are heard (`step_hooks`), and updates that none of torch's hooks sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from .step_hooks import weakly

__all__ = ["OTHER_STEPS", "SAME_STEPS", "OptimizerSuccession", "parameters_of", "shares_most"]

SAME_STEPS = 3
"""Steps on the present optimizer's parameters, and none of its own, after which it is over: two may take turns."""

OTHER_STEPS = 128
"""The same for other parameters of the model: a critic may make a hundred steps for each of the generator (WGAN)."""

ROUND_STEPS = 2
"""Steps of the job after which every optimizer that belongs to each iteration of the loop was heard."""

HEARD_MAX = 256
"""Optimizers that are remembered at once; the oldest is forgotten first, and is new if it steps again."""

Relation = Literal["stranger", "same", "other"]


def parameters_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that `optimizer` updates; none where it does not keep them as torch's do."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups if isinstance(group, dict) for parameter in group.get("params", ())}


def shares_most(one: set[int], other: set[int]) -> bool:
    """Return whether at least half of the smaller of two sets of parameters is in both."""
    return 2 * len(one & other) >= min(len(one), len(other)) > 0


class _Heard:
    """An optimizer that made a step; `relation` to the present one, None: not known yet."""

    __slots__ = ("counted", "optimizer", "relation")

    def __init__(self, optimizer: Optimizer, *, counted: bool) -> None:
        self.optimizer = weakly(optimizer)
        self.relation: Relation | None = None
        self.counted = counted
        """Whether the job's steps were its own before, for more than one in a row."""


class OptimizerSuccession:
    """Knows the optimizer whose steps count, at first the one that was attached; keeps none alive."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self.present: Callable[[], Optimizer | None] = weakly(optimizer)
        """Returns the optimizer whose steps count; None where the script has dropped it."""
        self._updated = parameters_of(optimizer)
        self._inside: set[int] = set()
        self._walked_at: int | None = None
        self._heard: dict[int, _Heard] = {id(optimizer): _Heard(optimizer, counted=True)}
        self._since = self._step = self._missed = 0

    def takes_over(self, optimizer: Optimizer, step: int, *, is_update: bool) -> bool:
        """Return whether the step that `optimizer` begins is step number `step` of the job; it is present from then on.

        Not to be called for the present one.  `is_update`: the model ran forward in this step of the job, and no step
        of the present optimizer is under way.
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
            left.counted = step - self._since > 1  # else the two take turns
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
        if updated.isdisjoint(self._inside) and step != self._walked_at:  # a walk a step at most: models may be large
            self._walked_at = step
            self._inside = {id(parameter) for parameter in self._model.parameters()}
        return "stranger" if updated.isdisjoint(self._inside) else "other"

    def _is_over(self) -> bool:
        """Return whether nothing that the present optimizer updates is trained: it is frozen, or not in the model."""
        return not any(p.requires_grad for p in self._model.parameters() if id(p) in self._updated)
