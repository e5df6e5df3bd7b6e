"""Runs Optuna's tree-structured Parzen estimator (TPE), by Optuna itself: 20 trials of 20 steps, then stop.

The first trial is the setting that the job came with, as a user would enqueue it.  A scale is an integer along its
values (so halving and doubling are equally far), a choice is categorical.  A trial's value is the mean step of its 20
steps after two that settle.  The best single trial wins, however lucky.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna

from pacecar.controller.observation import KnobSpace
from pacecar.knobs import by_name

__all__ = ["TRIALS", "TpeSampler"]

TRIALS = 20


class TpeSampler:
    """See the module's docstring."""

    windows = 1
    window_steps = 20
    settle_steps = 2

    def __init__(self, *, seed: int = 0) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._seed = seed
        self._restart()

    def _restart(self) -> None:
        self._study: Any = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._seed))
        self._spaces: list[KnobSpace] = []
        self._distributions: dict[str, Any] = {}
        self._trial: Any = None
        self._trials = 0
        self._best: tuple[float, dict[str, int]] | None = None

    def begin(self, spaces: Sequence[KnobSpace]) -> None:
        """Start over: lay out the search space and enqueue the present setting."""
        self._restart()
        self._spaces = list(spaces)
        for space in spaces:
            known = by_name.get(space.knob)
            indices = range(len(space.domain))
            self._distributions[space.knob] = (
                optuna.distributions.CategoricalDistribution(list(indices))
                if known is not None and known.kind == "choice"
                else optuna.distributions.IntDistribution(0, indices[-1])
            )
        self._study.enqueue_trial({space.knob: space.domain.index(space.value) for space in spaces})

    @property
    def best(self) -> dict[str, int]:
        """The setting of the best trial."""
        if self._best is None:
            return {space.knob: space.value for space in self._spaces}
        return dict(self._best[1])

    def propose(self) -> dict[str, int] | None:
        """Ask Optuna for the next setting."""
        if self._trials == TRIALS or not self._spaces:
            return None
        self._trials += 1
        self._trial = self._study.ask(self._distributions)
        return {space.knob: space.domain[self._trial.params[space.knob]] for space in self._spaces}

    def tell(self, values: Mapping[str, int], pace_ns: float) -> bool:
        """Tell Optuna the mean step time."""
        self._study.tell(self._trial, pace_ns)
        if self._best is None or pace_ns < self._best[0]:
            self._best = (pace_ns, {space.knob: values[space.knob] for space in self._spaces})
        return True
