"""Defines the interface that every knob implements: its value, its domain, why it must not be turned, and how it is.

Class, kind and the meaning of values are in `pacecar.knobs`.  Undoing is applying the value before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

__all__ = ["Actuator", "ActuatorError", "Barring", "Gathered"]


class ActuatorError(RuntimeError):
    """A knob could not be turned; the setting before is in force again."""


class Actuator(Protocol):
    """One knob of the running job.  All calls are made on the training thread at a step boundary."""

    @property
    def knob(self) -> str:
        """The knob's name in `Knobs.values`."""
        ...

    def value(self) -> int:
        """Return the value in force."""
        ...

    def domain(self) -> tuple[int, ...]:
        """Return the values that this rank could take, ascending, the present one among them."""
        ...

    def refusal(self) -> str | None:
        """Return why this knob must not be turned here, or None.  Asked once, before tuning begins."""
        ...

    def layout(self) -> str:
        """Return what must be equal on all ranks for a switch to be safe, in a form that can be hashed."""
        ...

    def apply(self, value: int) -> None:
        """Bring the knob to `value`.

        Raises:
            ActuatorError: it could not be done; the old value is in force.
        """
        ...


@runtime_checkable
class Gathered(Protocol):
    """An actuator that shares something costly with others, as the knobs of one DDP Reducer do."""

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context: what is applied inside is carried out at once when the outermost one ends, or raises there.

        Where something raises inside, what was applied there is forgotten.
        """
        ...


@runtime_checkable
class Barring(Protocol):
    """An actuator that learns, on all ranks in the same step, that some of its values cannot be used."""

    def is_barred(self, value: int) -> bool:
        """Return whether `value` must not be asked for again."""
        ...
