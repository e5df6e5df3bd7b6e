"""Defines `Actuator`, the interface of every knob, and what several knobs compute in the same way.

Class, kind and the meaning of a knob's values are in `pacecar.knobs`.  To undo a change, apply the previous value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from types import MappingProxyType

from pacecar.knobs import KnobName

from .batch.share_plan import RankWork

__all__ = [
    "NOTHING_BESIDE",
    "Actuator",
    "ActuatorError",
    "Gather",
    "Objection",
    "StartGather",
    "powers_of_two",
    "quarters",
]

NOTHING_BESIDE: Mapping[str, int] = MappingProxyType({})

Gather = Callable[[], list[list[float]] | None]
"""Waits for the numbers of all ranks and returns them in order of rank; None if they cannot be had."""

StartGather = Callable[[Sequence[float]], Gather]
"""Sends this rank's numbers to all ranks without waiting."""

SHARES = 4
"""What is set for each of many modules is set for quarters of them: one of many gains too little to be proven."""


class ActuatorError(RuntimeError):
    """A knob could not be turned; the previous setting is in force again."""


class Objection(IntEnum):
    """Why a rank needs a knob's first value back; the numbers, 1 to 255, go over the wire."""

    SCRIPT = 1
    MEMORY = 2
    LOOP = 3
    BLOCKS = 4
    ROOM = 5

    @property
    def knob(self) -> KnobName:
        """The knob that goes back."""
        match self:
            case Objection.LOOP:
                return "work_share"
            case Objection.BLOCKS:
                return "checkpointed_blocks"
            case Objection.ROOM:
                return "fsdp_reshard"
            case _:
                return "gc_interval"

    @property
    def words(self) -> str:
        """The reason in words."""
        match self:
            case Objection.SCRIPT:
                return "the script turned the collector off, or changed its thresholds"
            case Objection.MEMORY:
                return "garbage filled the memory between two collections"
            case Objection.LOOP:
                return "the loop or its sampler no longer does what shares of work need"
            case Objection.BLOCKS:
                return "memory gets short, and blocks keep their activations"
            case Objection.ROOM:
                return "memory became short while blocks keep their parameters"


class Actuator(ABC):
    """One knob of the running job.  All calls are made on the training thread at a step boundary."""

    knob: str
    """The knob's name in `pacecar.knobs`."""

    @abstractmethod
    def value(self) -> int:
        """Return the value in force."""

    @abstractmethod
    def domain(self) -> tuple[int, ...]:
        """Return the values that this rank could take, ascending, including the present one."""

    @abstractmethod
    def refusal(self) -> str | None:
        """Return why this knob must not be turned here, or None.  Called once, before tuning begins."""

    def companions(self, value: int) -> tuple[tuple[KnobName, int], ...]:
        """Return the settings of other knobs with each of which `value` may be tried; empty if it may be tried alone.

        For a value that only costs by itself, such as checkpointing that makes room for a larger micro-batch.  It is
        then never tried alone.  Asked once for each value of `domain`, before tuning begins.
        """
        return ()

    @abstractmethod
    def apply(self, value: int) -> None:
        """Set the knob to `value`.

        Raises:
            ActuatorError: it could not be done; the old value is in force.
        """

    def layout(self) -> str:
        """Return what must be equal on all ranks for a safe switch; empty if ranks may differ."""
        return ""

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context that carries out what is applied inside it in one go, when the outermost context ends.

        For knobs that share something costly, such as one DDP Reducer.  An exception inside discards what was applied.
        """
        return nullcontext()

    def on_boundary(self) -> int:
        """Do what is due at every step boundary; return how many ns of it are the job's own work, not pacecar's."""
        return 0

    def objection(self) -> Objection | None:
        """Return why this rank needs the first value back; None while it does not, or has it.  Asked at every vote."""
        return None

    def work(self) -> RankWork | None:
        """Return what a batch costs this rank without waiting for others; None if this knob does not measure it."""
        return None

    def close(self) -> None:  # noqa: B027  most knobs have nothing to undo
        """Undo, on this rank alone, what must not outlive pacecar; may be called again."""

    def is_barred(self, value: int, beside: Mapping[str, int] = NOTHING_BESIDE) -> bool:
        """Return whether `value` turned out to be unusable, which all ranks learn in the same step.

        `beside`: the values that all knobs will have then; without it as they are.
        """
        return False


def powers_of_two(low: int, high: int, present: int) -> tuple[int, ...]:
    """Return the powers of two from `low` to `high`, and `present`, ascending."""
    powers = (1 << exponent for exponent in range(max(low, 1).bit_length() - 1, max(high, 0).bit_length()))
    return tuple(sorted({present, *(power for power in powers if low <= power <= high)}))


def quarters(count: int) -> tuple[int, ...]:
    """Return the shares of `count` in quarters, from 0 to `count`, ascending."""
    return tuple(sorted({count - round(count * share / SHARES) for share in range(SHARES + 1)}))
