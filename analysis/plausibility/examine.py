"""Runs all checks on one trace, in an order in which each may rely on those before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..trace.columns import Trace, TraceWarning
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
    check_clock_base,  # of the remaining rows
    check_launch_numbers,
    check_processes,
    check_streams,
    check_clocks,
    check_kernels,  # cuts off steps with their launches
    check_steps,
)


@dataclass(frozen=True, slots=True)
class Examined:
    """A trace without contradictions, and with a warning for each.

    `refusal` says why it must not be analyzed, None if it may.
    """

    trace: Trace
    refusal: TraceWarning | None = None


def examine(trace: Trace) -> Examined:
    """Return the sound part of `trace`."""
    for check in CHECKS:
        trace, found = check(trace)
        if found:
            trace = replace(trace, warnings=(*trace.warnings, *found))
        refusal = next((warning for warning in found if warning.effect == "refused"), None)
        if refusal is not None:
            return Examined(trace, refusal)
    return Examined(trace)
