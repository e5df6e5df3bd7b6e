"""Derives what the driver does not report: time by clock event reason, mean power, and totals that never fall.

The driver reports which reasons limit the clocks *now*, but what counts is for how long.  Newer drivers count that time
for some reasons, which is exact; for the others the time between two samples is charged to what the later one saw.  The
label `source` tells them apart.  A driver that numbers its fields differently than its version suggests would hide a
slowdown behind an unrelated number.  So its count is compared with the samples, and dropped if they contradict it.

Power as the driver samples it covers about a quarter of the time on A100 and H100.  The energy counter covers all of
it, so mean power is energy over time.

Prometheus takes a counter that falls for one that restarted.  So a 32-bit counter that wraps would lose the rest of its
round; but to take the zero of a reloaded driver for a wrap would invent four billion bytes.  `GpuCounter` therefore
takes a fall for a wrap only if it crosses from the upper half of the range to the lower half and the driver was not
reloaded; every other fall is a restart.  A driver may also answer 0 once and then continue.  So a fall counts only if
the next reading is below the last total too; until then there is no total.  Some counters with 64 declared bits wrap at
32 (nvml.h says of fields 197 and 198 only that the value can wrap), so both widths are tried.

A counter that wraps more than once between two readings cannot be followed: at 20 GB/s a 32-bit one wraps five times a
second.  So while a link can move a whole round in the time that has passed, `LinkCounter` has no total, until a value
shows that the counter has more bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Sample

__all__ = ["CLOCK_REASONS", "NO_NUMBERS", "ROUND", "ClockEvents", "GpuCounter", "LinkCounter", "MeanPower"]

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

COMPARED_NS = 10 * NS_PER_SECOND
"""How long all samples must agree before they are compared with the driver's count, which may move every second or
two."""

HELD_RATIO_MIN = 0.01
"""Least share of such a time that the driver must count: power capping flickers within milliseconds, and samples may
meet it each time."""

UNSEEN_RATIO_MAX = 0.9
"""Largest share that ten samples can miss: by chance, that happens in one of ten billion such stretches."""

COUNTED_RATIO_MAX = 1.5
"""The counter is read a little before or after the sample, so it may exceed the time that passed."""

ENERGY_WINDOW_NS_MIN = NS_PER_SECOND // 2
"""The counter moves in steps of 20 to 100 ms, at most a fifth of half a second."""


NO_NUMBERS = frozenset({2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1})
"""Answers of a driver that does not know a number.  A real counter with this value is read again a tick later."""

ROUND = 1 << 32
"""The range of a 32-bit counter."""


class _Stretch(NamedTuple):
    """A time in which all samples agreed about a reason: since when, and the driver's count then."""

    is_held: bool
    since_ns: int
    counted_ns: int


class ClockEvents:
    """Time by reason, added up from samples, and the reasons whose driver count is disbelieved."""

    def __init__(self, gpu: str) -> None:
        self.disbelieved: set[str] = set()
        self._gpu = gpu
        self._ns: dict[int, int] = {}
        self._sampled_ns: int | None = None
        self._stretches: dict[int, _Stretch] = {}

    def restart(self) -> None:
        """Trust a new driver again."""
        self.disbelieved.clear()
        self._stretches.clear()

    def update(self, mask: int, supported: int, now_ns: int, counted: Mapping[str, int]) -> Iterator[Sample]:
        """Yield the time of each supported reason that the driver does not count, after `mask` was read.

        `counted` maps reasons to the ns that the driver has counted, read just before.
        """
        elapsed = 0 if self._sampled_ns is None else now_ns - self._sampled_ns
        self._sampled_ns = now_ns
        if elapsed > CHARGED_NS_MAX:
            self._stretches.clear()
        for bit, reason in CLOCK_REASONS.items():
            if not supported & bit:
                continue
            charged = min(elapsed, CHARGED_NS_MAX) if mask & bit else 0
            self._ns[bit] = self._ns.get(bit, 0) + charged
            if reason not in counted:
                yield Sample("pacecar_gpu_clock_event_seconds_total", (self._gpu, reason, "sampled"), self._ns[bit])
            elif self._contradicts(bit, is_held=mask & bit != 0, now_ns=now_ns, counted_ns=counted[reason]):
                self.disbelieved.add(reason)

    def _contradicts(self, bit: int, *, is_held: bool, now_ns: int, counted_ns: int) -> bool:
        """Return whether the driver counted almost nothing while all samples saw the reason, or the reverse."""
        stretch = self._stretches.get(bit)
        if stretch is None or stretch.is_held != is_held:
            self._stretches[bit] = _Stretch(is_held, now_ns, counted_ns)
            return False
        length, gain = now_ns - stretch.since_ns, counted_ns - stretch.counted_ns
        if length < COMPARED_NS:
            return False
        self._stretches[bit] = _Stretch(is_held, now_ns, counted_ns)
        if is_held and gain < length * HELD_RATIO_MIN:
            return True
        return gain > length * (COUNTED_RATIO_MAX if is_held else UNSEEN_RATIO_MAX)


class MeanPower:
    """Power over a window, from the energy counter."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._base: tuple[int, int] | None = None
        self._milliwatts: float | None = None

    def update(self, energy_millijoules: int, now_ns: int) -> Iterator[Sample]:
        """Yield the mean power of the last complete window; nothing before the first."""
        if self._base is None:
            self._base = (energy_millijoules, now_ns)
        elapsed = now_ns - self._base[1]
        if elapsed >= ENERGY_WINDOW_NS_MIN:
            self._milliwatts = (energy_millijoules - self._base[0]) * NS_PER_SECOND / elapsed
            self._base = (energy_millijoules, now_ns)
        if self._milliwatts is not None:
            yield Sample("pacecar_gpu_power_mean_watts", (self._gpu,), self._milliwatts)

    def restart(self) -> None:
        """Drop the window: the counter restarted, or was not read for a while."""
        self._base = self._milliwatts = None


class _Counter:
    """A driver's counter that is added up, so that `total` never falls."""

    def __init__(self) -> None:
        self.total = 0
        self._fallen: int | None = None
        """A reading below the last one that is not a wrap; the next one confirms it or not."""
        self._may_be_reloaded = False

    @property
    def has_fallen(self) -> bool:
        """Whether the last reading was an unconfirmed fall."""
        return self._fallen is not None

    def restart(self) -> None:
        """Note that the driver may have been reloaded: a fall before the next value is a restart, not a wrap."""
        self._may_be_reloaded = True


class GpuCounter(_Counter):
    """Adds up a driver's counter.

    With `doubts_zero` a first reading of 0 is held back too, for a counter that is never 0 once a GPU has run (energy).
    """

    def __init__(self, *, doubts_zero: bool = False) -> None:
        super().__init__()
        self._last = 0
        self._doubts_zero = doubts_zero

    def update(self, value: int, bits: int = 64) -> int | None:
        """Return the total after a reading of `value`, from a type with `bits` bits.

        None after a fall, until the next reading confirms it or not.
        """
        fallen, self._fallen = self._fallen, None
        is_doubted, self._doubts_zero = self._doubts_zero and value == 0, False
        if is_doubted:
            return None
        if value >= self._last:
            self.total += value - self._last
        elif self._may_be_reloaded:
            self.total += value
        elif fallen is None or value < fallen:
            self._fallen = value
            return None
        else:
            round_length = _wrapped_at(self._last, fallen, bits)
            self.total += value if round_length is None else value + round_length - self._last
        self._last, self._may_be_reloaded = value, False
        return self.total


class LinkCounter(_Counter):
    """Adds up the bytes that a link moved."""

    def __init__(self) -> None:
        super().__init__()
        self.is_wide = False
        """Whether it has more than 32 bits, so that it does not wrap while the daemon runs."""
        self._last: int | None = None
        self._asked_ns = 0

    def update(self, value: int, asked_ns: int, answered_ns: int, bytes_per_second_max: float | None) -> int | None:
        """Return the total after a reading of `value`; None if it may have wrapped unseen.

        The driver read the counter between `asked_ns` and `answered_ns` (monotonic). `bytes_per_second_max` is the
        link's speed; None: unknown.
        """
        self.is_wide = self.is_wide or value >= ROUND
        last, elapsed_ns_max = self._last, answered_ns - self._asked_ns
        if last is None:
            self._last, self._asked_ns = value, asked_ns
            self.total = value
            return self.total if self.is_wide else None
        moved_max = None if bytes_per_second_max is None else bytes_per_second_max * elapsed_ns_max / NS_PER_SECOND
        round_later = value + ROUND - last
        was_reloaded, self._may_be_reloaded = self._may_be_reloaded, False
        fallen, self._fallen = self._fallen, None
        can_wrap = not was_reloaded and not self.is_wide and fallen is None
        if value >= last:
            self.total += value - last
        elif can_wrap and (moved_max is None or round_later <= moved_max):
            self.total += round_later
        elif was_reloaded or (fallen is not None and value >= fallen):  # no link is that fast: it restarted
            self.total += value
        else:
            self._fallen = value
            return None
        self._last, self._asked_ns = value, asked_ns
        return self.total if self.is_wide or (moved_max is not None and moved_max < ROUND) else None


def _wrapped_at(last: int, value: int, bits: int) -> int | None:
    """Return where a counter wrapped on its way from `last` down to `value`; None: it restarted."""
    for width in sorted({32, bits}):
        half = 1 << (width - 1)
        if width <= bits and value < half <= last < 2 * half:
            return 2 * half
    return None
