"""Derives what the driver does not report: time by clock event reason, and mean power from the energy counter.

The driver says which reasons hold the clocks down *now*.  A gauge of that is worthless at the scrape interval: what
counts is for how long.  Newer drivers count that time for some reasons, which is exact; for the others the time between
two samples is charged to what the later one saw.  The label `source` says which it is.  A driver whose fields are
numbered otherwise than its version says would hide a slowdown behind a number that means something else, so its count
is compared with the samples, which go on, and one that contradicts them is not believed.

Power as the driver samples it covers about a quarter of the time on A100 and H100.  The energy counter covers all of
it, so the mean power of a window is energy over time.

`GpuCounter` adds up the driver's counters so that the total never falls, across wraps and restarts.

A counter that falls is read by Prometheus as one that started again, so a counter of 32 bits that wraps loses the rest
of its last round each time, which is most of it.  The other way round is worse: a driver that was reloaded starts at
zero, and to take that for a wrap invents four billion bytes.  So a fall is a wrap only when it crosses from the upper
half of the counter's range to the lower one, and only while the driver was not reloaded; every other fall is a restart.

A driver also answers 0 once and goes on where it was.  So a fall counts only when the next reading is below the last
total too; until then there is no total.

Some counters are declared with 64 bits and wrap at 32 all the same (nvml.h says of fields 197 and 198 only that the
value can wrap), so both widths are tried.

A counter that wraps more than once between two readings is read wrong whatever one does: at 20 GB/s one of 32 bits
wraps five times a second.  So where a link can move a whole round in the time that has passed, there is no total
(`LinkCounter`), until the counter shows by a value that it has more bits.
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
"""How long all samples must agree before the driver's count is compared: some counters move every second or two."""

HELD_RATIO_MIN = 0.01
"""Least share of such a time that a driver counts: power capping goes on and off within milliseconds, and samples may
meet it each time."""

UNSEEN_RATIO_MAX = 0.9
"""Largest share that ten samples can miss: one in ten billion such stretches by chance."""

COUNTED_RATIO_MAX = 1.5
"""No time passes faster than time; the counter is read a little before or after the sample."""

ENERGY_WINDOW_NS_MIN = NS_PER_SECOND // 2
"""The counter moves in steps of 20 to 100 ms; over half a second a step is at most a fifth."""


NO_NUMBERS = frozenset({2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1})
"""What a driver answers that does not know a number.  A counter that is really there is read again a tick later."""

ROUND = 1 << 32
"""What a counter of 32 bits counts before it wraps."""


class _Stretch(NamedTuple):
    """Since when all samples said the same of a reason, and the driver's count at that time."""

    is_held: bool
    since_ns: int
    counted_ns: int


class ClockEvents:
    """Time by reason, added up from samples; and the reasons of which the driver's own count is not believed."""

    def __init__(self, gpu: str) -> None:
        self.disbelieved: set[str] = set()
        self._gpu = gpu
        self._ns: dict[int, int] = {}
        self._sampled_ns: int | None = None
        self._stretches: dict[int, _Stretch] = {}

    def restart(self) -> None:
        """Believe a new driver."""
        self.disbelieved.clear()
        self._stretches.clear()

    def update(self, mask: int, supported: int, now_ns: int, counted: Mapping[str, int]) -> Iterator[Sample]:
        """Yield the time of each supported reason that the driver does not count, after `mask` was read.

        `counted` is the time that the driver counted of a reason, in ns, as read just before.
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
        """Return whether the driver counted nearly nothing while all samples saw the reason, or the reverse."""
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


class GpuCounter:
    """Adds up a driver's counter; `total` never falls.

    With `doubts_zero` a first reading of 0 is held back too: of what is never 0 once a GPU has run, as its energy.
    """

    def __init__(self, *, doubts_zero: bool = False) -> None:
        self.total = 0
        self._last = 0
        self._fallen: int | None = None
        """A reading below `_last`, which the next one confirms or not."""
        self._may_be_anew = False
        self._doubts_zero = doubts_zero

    @property
    def has_fallen(self) -> bool:
        """Whether the last reading was a fall that is not confirmed."""
        return self._fallen is not None

    def update(self, value: int, bits: int = 64) -> int | None:
        """Return the total after the driver's counter was read as `value`, of a type with `bits` bits.

        None for a fall, until the next reading says whether it was one.
        """
        fallen, self._fallen = self._fallen, None
        is_doubted, self._doubts_zero = self._doubts_zero and value == 0, False
        if is_doubted:
            return None
        if value >= self._last:
            self.total += value - self._last
        elif self._may_be_anew:
            self.total += value
        elif fallen is None or value < fallen:
            self._fallen = value
            return None
        else:
            round_length = _wrapped_at(self._last, fallen, bits)
            self.total += value if round_length is None else value + round_length - self._last
        self._last, self._may_be_anew = value, False
        return self.total

    def restart(self) -> None:
        """Note that the driver may have been loaded anew: a fall before the next value is no wrap, and is believed."""
        self._may_be_anew = True


class LinkCounter:
    """Adds up the bytes that a link moved; `total` never falls."""

    def __init__(self) -> None:
        self.total = 0
        self.is_wide = False
        """Whether it has more than 32 bits: then it does not wrap while the daemon runs."""
        self._last: int | None = None
        self._fallen: int | None = None
        """A reading below `_last` that is no wrap, which the next one confirms or not."""
        self._asked_ns = 0
        self._may_be_anew = False

    @property
    def has_fallen(self) -> bool:
        """Whether the last reading was a fall that is not confirmed."""
        return self._fallen is not None

    def update(self, value: int, asked_ns: int, answered_ns: int, bytes_per_second_max: float | None) -> int | None:
        """Return the total after the driver's counter was read as `value`; None where a wrap may have gone unseen.

        The driver was asked at `asked_ns` and had answered by `answered_ns` (monotonic); when in between it read the
        counter is not known.  `bytes_per_second_max` is the most that the link can move; None: not known.
        """
        self.is_wide = self.is_wide or value >= ROUND
        last, elapsed_ns_max = self._last, answered_ns - self._asked_ns
        if last is None:
            self._last, self._asked_ns = value, asked_ns
            self.total = value
            return self.total if self.is_wide else None
        moved_max = None if bytes_per_second_max is None else bytes_per_second_max * elapsed_ns_max / NS_PER_SECOND
        round_later = value + ROUND - last
        anew, self._may_be_anew = self._may_be_anew, False
        fallen, self._fallen = self._fallen, None
        can_wrap = not anew and not self.is_wide and fallen is None
        if value >= last:
            self.total += value - last
        elif can_wrap and (moved_max is None or round_later <= moved_max):
            self.total += round_later
        elif anew or (fallen is not None and value >= fallen):  # no link is that fast: it began again
            self.total += value
        else:
            self._fallen = value
            return None
        self._last, self._asked_ns = value, asked_ns
        return self.total if self.is_wide or (moved_max is not None and moved_max < ROUND) else None

    def restart(self) -> None:
        """Note that the driver may have been loaded anew: a fall before the next value is no wrap."""
        self._may_be_anew = True


def _wrapped_at(last: int, value: int, bits: int) -> int | None:
    """Return where a counter wrapped on its way from `last` down to `value`; None: it started again."""
    for width in sorted({32, bits}):
        half = 1 << (width - 1)
        if width <= bits and value < half <= last < 2 * half:
            return 2 * half
    return None
