"""Takes a knob back on all ranks where a rank objects to its value, as its `Objection` says.

Pure but for `objections`, which must not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pacecar.knobs import KnobName

from ..observation import JobFacts, KnobSpace, Observation
from .knob_rollback import KnobRollback

__all__ = ["ObjectionRollback"]


class ObjectionRollback(KnobRollback):
    """Takes `knob` back to its first value; `objections` returns, for each rank that objects, the reason's number."""

    home = 0

    def __init__(self, knob: KnobName, objections: Callable[[], Mapping[int, int]]) -> None:
        super().__init__()
        self.knob = knob
        self._objections = objections

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Learn the first value, and whether the knob can be turned."""
        super().begin(facts, spaces, turns_knobs=turns_knobs)
        self.home = next((space.value for space in spaces if space.knob == self.knob), self.home)

    def judgeable(self, step: Observation) -> Observation:
        """Note whether another value is in force."""
        self._is_in_force = step.values.get(self.knob, self.home) != self.home
        return super().judgeable(step)

    def _watch(self) -> None:
        self._heed(self._objections())
