"""Runs the checks of this folder on one trace, in the order in which each may rely on those before it.

Left out: what each looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...trace.columns import Trace, TraceWarning
from .clocks import check_clocks
from .counts import check_clock_base, check_collectives, check_ranks
from .kernels import check_kernels
from .marks import check_steps
from .recordings import (
    check_distances,
    check_durations,
    check_ends,
    check_launch_numbers,
    check_processes,
    check_repeats,
)
from .streams import check_streams

__all__ = ["Examined", "examine"]

CHECKS: tuple[Callable[[Trace], tuple[Trace, list[TraceWarning]]], ...] = (
    check_ranks,
    check_collectives,
    check_repeats,
    check_distances,
    check_ends,
    check_durations,
    check_clock_base,  # of the rows that are left
    check_launch_numbers,
    check_processes,
    check_streams,
    check_clocks,
    check_kernels,  # where the launches are cut off, steps go with them
    check_steps,
)


@dataclass(frozen=True, slots=True)
class Examined:
    """A trace without what contradicts the rest; what was found is among its warnings.

    `refusal` says why nothing of it may be analyzed, None where it may.
    """

    trace: Trace
    refusal: TraceWarning | None = None


def examine(trace: Trace) -> Examined:
    """Return what is sound of `trace`."""
    for check in CHECKS:
        trace, found = check(trace)
        if found:
            trace = replace(trace, warnings=(*trace.warnings, *found))
        refusal = next((warning for warning in found if warning.effect == "refused"), None)
        if refusal is not None:
            return Examined(trace, refusal)
    return Examined(trace)
