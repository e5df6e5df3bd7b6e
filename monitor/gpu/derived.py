"""Derives what the driver does not report: time by clock event reason, and mean power from the energy counter.

The driver says which reasons hold the clocks down *now*.  A gauge of that is worthless at the scrape interval: what
counts is for how long.  Newer drivers count that time for some reasons (fields 74, 76, 269 to 271), which is exact; for
the others the time between two samples is charged to what the later one saw.  The label `source` says which it is.

Power as the driver samples it covers about a quarter of the time on A100 and H100.  The energy counter covers all of
it, so the mean power of a window is energy over time.
"""

from __future__ import annotations

from collections.abc import Iterator

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Sample

__all__ = ["CLOCK_REASONS", "ClockEvents", "MeanPower"]

CLOCK_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake",
    0x100: "display_clock_setting",
}
"""Bits of nvmlClocksEventReason* in nvml.h."""

CHARGED_NS_MAX = 10 * NS_PER_SECOND
"""The most time charged to one sample: after a longer gap (a hang, a lost GPU) the reasons in between are unknown."""

ENERGY_WINDOW_NS_MIN = NS_PER_SECOND // 2
"""The counter moves in steps of 20 to 100 ms; over half a second a step is at most a fifth."""


class ClockEvents:
    """Time by reason, added up from samples."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._ns: dict[int, int] = {}
        self._sampled_ns: int | None = None

    def take(self, mask: int, supported: int, now_ns: int, counted_by_driver: set[str]) -> Iterator[Sample]:
        """Yield the time of each supported reason that the driver does not count, after `mask` was read."""
        elapsed = 0 if self._sampled_ns is None else now_ns - self._sampled_ns
        self._sampled_ns = now_ns
        for bit, reason in CLOCK_REASONS.items():
            if not supported & bit or reason in counted_by_driver:
                continue
            charged = min(elapsed, CHARGED_NS_MAX) if mask & bit else 0
            self._ns[bit] = self._ns.get(bit, 0) + charged
            yield Sample("pacecar_gpu_clock_event_seconds_total", (self._gpu, reason, "sampled"), self._ns[bit])


class MeanPower:
    """Power over a window, from the energy counter."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._base: tuple[int, int] | None = None
        self._milliwatts: float | None = None

    def take(self, energy_millijoules: int, now_ns: int) -> Iterator[Sample]:
        """Yield the mean power of the last whole window; nothing before there is one."""
        if self._base is None:
            self._base = (energy_millijoules, now_ns)
        elapsed = now_ns - self._base[1]
        if elapsed >= ENERGY_WINDOW_NS_MIN:
            self._milliwatts = (energy_millijoules - self._base[0]) * NS_PER_SECOND / elapsed
            self._base = (energy_millijoules, now_ns)
        if self._milliwatts is not None:
            yield Sample("pacecar_gpu_power_mean_watts", (self._gpu,), self._milliwatts)

    def restart(self) -> None:
        """Forget the window: the counter began anew, or was not read for a while."""
        self._base = self._milliwatts = None
