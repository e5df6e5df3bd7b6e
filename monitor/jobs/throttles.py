"""Finds which GPUs hold their clocks down and why, for the jobs that run on them, from the snapshots.

The driver counts for how long each reason held the clocks down, or the collector adds it up from samples; either way it
is a counter, `pacecar_gpu_clock_event_seconds_total`.  A GPU is throttled for a reason that held for HELD_RATIO of the
last WINDOW_SECONDS; ticks are shorter than that, and not every tick reads every counter.  Being idle, and clocks that
somebody set, do not count as throttling.

Pure: snapshots in, `Throttling` records out.  Left out: sending them to the jobs (`ingest/socket_server`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Snapshot, Throttling

__all__ = ["HELD_RATIO", "REASONS", "WINDOW_SECONDS", "Throttles"]

REASONS = frozenset({"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"})
"""Of nvmlClocksEventReason* in nvml.h those that slow down a GPU that has work."""

HELD_RATIO = 0.2
"""Less than that costs a step less than a person would act on."""

WINDOW_SECONDS = 2.0


class Throttles:
    """Takes snapshots in order; keeps the counters of one earlier snapshot and what followed from the two."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], int] = {}
        self._since_ns: int | None = None
        self._held: dict[str, tuple[str, ...]] = {}

    def take(self, snapshot: Snapshot) -> Mapping[str, Throttling]:
        """Return uuid -> what holds the GPU's clocks down; a GPU about which nothing is known is not in it."""
        uuids: dict[str, str] = {}
        counters: dict[tuple[str, str], int] = {}
        for sample in snapshot.samples():
            if sample.metric == "pacecar_gpu_info":
                uuids[sample.labels[0]] = sample.labels[1]
            elif sample.metric == "pacecar_gpu_clock_event_seconds_total" and sample.labels[1] in REASONS:
                counters[sample.labels[0], sample.labels[1]] = int(sample.value)
        since = self._since_ns
        elapsed = None if since is None else snapshot.started_ns - since
        if elapsed is None or elapsed >= WINDOW_SECONDS * NS_PER_SECOND:
            self._held = {} if elapsed is None else _held(self._counters, counters, elapsed)
            self._counters, self._since_ns = counters, snapshot.started_ns
        return {
            uuid: Throttling(device_uuid=uuid, reasons=self._held[gpu])
            for gpu, uuid in uuids.items()
            if gpu in self._held
        }


def _held(
    before: Mapping[tuple[str, str], int], now: Mapping[tuple[str, str], int], elapsed_ns: int
) -> dict[str, tuple[str, ...]]:
    """Return GPU -> the reasons that held for long enough, for each GPU of which some reason was read twice."""
    held: dict[str, tuple[str, ...]] = {}
    for (gpu, reason), value in sorted(now.items()):
        old = before.get((gpu, reason))
        if old is not None:
            is_held = value - old >= HELD_RATIO * elapsed_ns
            held[gpu] = (*held.get(gpu, ()), *([reason] if is_held else []))
    return held
