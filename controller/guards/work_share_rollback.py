"""Takes "work_share" back on all ranks where a rank objects: its loop no longer trains on what it was given.

Pure but for `objections`, which must not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..observation import Observation
from .knob_rollback import KnobRollback

__all__ = ["WorkShareRollback"]


class WorkShareRollback(KnobRollback):
    """`objections` returns, for each rank that objects, the number of the reason."""

    knob = "work_share"
    home = 0

    def __init__(self, objections: Callable[[], Mapping[int, int]]) -> None:
        super().__init__()
        self._objections = objections

    def judgeable(self, step: Observation) -> Observation:
        """Note whether shares are in force."""
        self._is_in_force = step.values.get(self.knob, self.home) != self.home
        return super().judgeable(step)

    def _watch(self) -> None:
        self._heed(self._objections())
