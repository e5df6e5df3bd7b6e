"""A micro-batch that could be larger, for knobs that make room for one."""

from __future__ import annotations

from pacecar.controller.knobs.actuator import Actuator

__all__ = ["LargerSize"]


class LargerSize(Actuator):
    """Is 1 and may be 2."""

    knob = "micro_batch"

    def value(self) -> int:
        return 1

    def domain(self) -> tuple[int, ...]:
        return (1, 2)

    def refusal(self) -> str | None:
        return None

    def apply(self, value: int) -> None:
        """Do nothing."""
