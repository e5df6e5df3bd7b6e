"""Estimates the ledger of a step that was timed but not profiled, from the mix of recent profiled windows.

A host timer is not enough: 40 ms of backward contain compute, hidden and exposed communication, and Python.  But the
mix inside a phase changes slowly, while the phase lengths change from step to step.  So the last exact windows give
each phase's mix, and the phase lengths of a timed step are split in that proportion.  The split is exact: the parts
still sum to the wall time.

A window is one step, and steps differ: another program had the processor, a rank was late.  So a phase's mix is, for
each heading, the median over the last WINDOWS_MAX windows of the setting, which one odd window does not move.  If the
estimates for two windows in a row are off by more than CHANGE_RATIO, the job itself changed, and all earlier windows
are dropped.

On a device the profiled step differs from others: the profiler slows the host, so the device waits for it more often,
while kernels and copies take as long as always.  So if a phase on the device is shorter than in the windows, its
waiting shrinks first and work keeps its length; a longer phase is split in proportion.

Without a calibration only what the timers themselves measure is charged (data wait, checkpoint, pacecar's own time as
host_bound); the rest is unknown.  The mix depends on the knobs, so calibrations are kept by knob values.  A setting
without one uses the latest calibration of another setting and reports its age as usual.

Pure: numbers in, one Ledger out.  `estimate_check` measures the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from msgspec import structs

from pacecar.ledger.attribution import REST
from pacecar.records import LEDGER_HEADINGS, Knobs, KnobValue, Ledger

from ..timing.step_timer import STOPPED

__all__ = [
    "CALIBRATIONS_MAX",
    "CHANGE_RATIO",
    "WINDOWS_MAX",
    "Calibration",
    "Calibrations",
    "capped",
    "estimate",
    "estimate_step",
    "split",
]

CALIBRATIONS_MAX = 64
"""The most settings kept; a tuner tries a few dozen, and the oldest one is the least likely to return."""

WINDOWS_MAX = 5
"""A setting's mix is the median of this many windows.  Replayed on the demo's windows (docs/ledger.md), five have a
median error a sixth lower than one window, a third lower at the 90th percentile; eight are no better than five."""

MEETING_RATIO = 0.1
"""A phase with at least this ratio of exposed communication may contain a wait for a rank; BatchNorm takes less."""

CHANGE_RATIO = 0.1
"""The error that indicates a change of the job: twice the error that an estimate should stay below."""

CHANGE_WINDOWS = 2
"""Windows in a row that must exceed CHANGE_RATIO before older ones are dropped."""

_SHARES = 1_000_000_000
"""Shares of several windows are in billionths, so that weights stay integers."""

_DIRECT = {"data_wait": "data_wait", "checkpoint": "checkpoint", "overhead": "host_bound", STOPPED: "stopped"}
"""Phases that the timers measure directly, and their heading in an uncalibrated estimate."""


_WORK = frozenset({"compute", "exposed_communication", "exposed_copy"})
"""The headings under which a device works; under every other one it waits."""


@dataclass(frozen=True, slots=True)
class _Mix:
    """One phase's ledger without its zeros."""

    wall_ns: int
    headings: tuple[str, ...]
    weights: tuple[int, ...]
    overlapped_ns: int
    work_ns: int
    """The median of what the device, or what stands for it, worked in this phase."""

    @classmethod
    def of(cls, ledgers: Sequence[Ledger]) -> _Mix:
        """Return the mix of a phase that took some time in each of `ledgers`, the newest first."""
        newest = ledgers[0]
        work_ns = int(median(sum(ledger.parts().get(heading, 0) for heading in _WORK) for ledger in ledgers))
        if len(ledgers) > 1:
            shares = {
                heading: int(median(_share(ledger.parts().get(heading, 0), ledger) for ledger in ledgers))
                for heading in LEDGER_HEADINGS
            }
            overlapped = median(_share(ledger.overlapped_communication_ns, ledger) for ledger in ledgers)
            if any(shares.values()):  # three windows with three different headings have no median
                parts = {heading: value for heading, value in shares.items() if value}
                return cls(_SHARES, tuple(parts), tuple(parts.values()), int(overlapped), work_ns)
        parts = {heading: value for heading, value in newest.parts().items() if value}
        return cls(newest.wall_ns, tuple(parts), tuple(parts.values()), newest.overlapped_communication_ns, work_ns)

    def weights_on_device(self, duration: int) -> tuple[int, ...]:
        """Return weights for a phase of `duration` on a device, where work keeps its length and waiting shrinks."""
        whole = sum(self.weights)
        work = sum(weight for heading, weight in zip(self.headings, self.weights, strict=True) if heading in _WORK)
        if not 0 < work < whole:
            return self.weights
        worked = min(duration, max(self.work_ns, duration * work // whole))
        scales = (worked * (whole - work), (duration - worked) * work)
        return tuple(
            weight * scales[heading not in _WORK] for heading, weight in zip(self.headings, self.weights, strict=True)
        )


def _share(part_ns: int, ledger: Ledger) -> int:
    return part_ns * _SHARES // ledger.wall_ns


@dataclass(frozen=True, slots=True)
class Calibration:
    """The contents of each phase in the exact window of step `step`, and in the `earlier` ones, newest first."""

    step: int
    phases: Mapping[str, Ledger]
    earlier: tuple[Mapping[str, Ledger], ...] = ()
    on_device: Calibration | None = None
    """The same for the phases as the device ran them; None if unknown."""
    surprises: int = 0
    """The number of consecutive windows, up to this one, whose estimate was off by more than CHANGE_RATIO."""
    mixes: Mapping[str, _Mix] = field(init=False, repr=False, compare=False)
    """The windows in the form that estimates need, so that an estimate takes microseconds."""

    def __post_init__(self) -> None:
        found: dict[str, list[Ledger]] = {}
        for phases in (self.phases, *self.earlier):
            for name, ledger in phases.items():
                if ledger.wall_ns:
                    found.setdefault(name, []).append(ledger)
        object.__setattr__(self, "mixes", {name: _Mix.of(ledgers) for name, ledgers in found.items()})

    @property
    def windows(self) -> int:
        """The number of exact windows in this calibration."""
        return 1 + len(self.earlier)

    @property
    def meeting_phases(self) -> frozenset[str]:
        """Which of forward and backward had so much exposed communication that the rank may wait for others there."""
        measured = self if self.on_device is None else self.on_device
        ratios = {phase: measured.exposed_ratio(phase) for phase in ("forward", "backward")}
        return frozenset(phase for phase, ratio in ratios.items() if ratio is not None and ratio >= MEETING_RATIO)

    def exposed_ratio(self, phase: str) -> float | None:
        """Return the ratio of exposed communication in `phase` (0..1); None if no window has the phase."""
        mix = self.mixes.get(phase)
        if mix is None:
            return None
        return dict(zip(mix.headings, mix.weights, strict=True)).get("exposed_communication", 0) / sum(mix.weights)

    def after(self, before: Calibration, error_ratio: float | None) -> Calibration:
        """Return this window combined with those of `before`, whose estimate of it was off by `error_ratio`."""
        surprises = before.surprises + 1 if error_ratio is not None and error_ratio > CHANGE_RATIO else 0
        known = (before.phases, *before.earlier)[: WINDOWS_MAX - 1]
        if surprises >= CHANGE_WINDOWS:
            known = known[: CHANGE_WINDOWS - 1]
        on_device = self.on_device
        if on_device is not None and before.on_device is not None:
            on_device = on_device.after(before.on_device, error_ratio)
        return Calibration(self.step, self.phases, known, on_device, surprises)


class Calibrations:
    """The calibrations by knob setting, from its last windows; at most CALIBRATIONS_MAX."""

    def __init__(self) -> None:
        self._by_values: dict[frozenset[tuple[str, KnobValue]], Calibration] = {}
        self._latest: Calibration | None = None

    def add(self, knobs: Knobs, window: Calibration, error_ratio: float | None = None) -> None:
        """Add `window` to the setting `knobs`; the estimate from its earlier windows was off by `error_ratio`."""
        key = frozenset(knobs.values.items())
        before = self._by_values.pop(key, None)
        calibration = window if before is None else window.after(before, error_ratio)
        self._by_values[key] = calibration
        self._latest = calibration
        if len(self._by_values) > CALIBRATIONS_MAX:
            del self._by_values[next(iter(self._by_values))]

    def knows(self, knobs: Knobs) -> bool:
        """Return whether exactly this setting was calibrated."""
        return frozenset(knobs.values.items()) in self._by_values

    def find(self, knobs: Knobs) -> Calibration | None:
        """Return this setting's calibration, or the latest of any setting, or None."""
        return self._by_values.get(frozenset(knobs.values.items()), self._latest)


def split(total: int, weights: Sequence[int]) -> list[int]:
    """Return integers >= 0 in proportion to `weights` that sum to `total` exactly, each less than one off.

    `weights` are >= 0 and not all zero.
    """
    mass = sum(weights)
    assert mass > 0, "all weights are zero"
    if len(weights) == 1:
        return [total]
    parts = [total * weight // mass for weight in weights]
    missing = total - sum(parts)
    for index, weight in enumerate(weights):  # fewer are missing than were rounded down
        if not missing:
            break
        if total * weight % mass:
            parts[index] += 1
            missing -= 1
    return parts


def estimate_step(
    wall_ns: int, phases: Mapping[str, int], device: Mapping[str, int] | None, calibration: Calibration | None
) -> Ledger:
    """Return the ledger of a step of `wall_ns` from its phases on the `device` if known, else from the host's.

    The device's step begins and ends when the device passes the host's boundaries, so a single step may be shorter or
    longer there than on the host; over many steps the lengths are equal.  Its phases are scaled to the host's wall
    time.  A step with a checkpoint or a stop uses the host's phases, because the device's marks do not show these.
    """
    mixes = None if calibration is None else calibration.on_device
    if device is None or mixes is None or not any(device.values()) or {"checkpoint", STOPPED} & phases.keys():
        return estimate(wall_ns, phases, calibration)
    lengths = dict(zip(device, split(wall_ns, list(device.values())), strict=True))
    return estimate(wall_ns, lengths, mixes, on_device=True)


def capped(ledger: Ledger, processor_ns: int) -> Ledger:
    """Return `ledger` with compute limited to `processor_ns`, the processor time of the process in that step.

    A host that does not use its processor does not compute; what it waited for instead (a page, a lock, a file) is
    unknown.  Not for device jobs, where the device computes.
    """
    excess = ledger.compute_ns - processor_ns
    if excess <= 0:
        return ledger
    return structs.replace(ledger, compute_ns=processor_ns, unknown_ns=ledger.unknown_ns + excess)


def estimate(
    wall_ns: int, phases: Mapping[str, int], calibration: Calibration | None, *, on_device: bool = False
) -> Ledger:
    """Return the ledger of a step of `wall_ns` with these phases, measured `on_device` or on the host; it sums exactly.

    `phases` are durations of disjoint intervals inside the step; the remainder is the phase `REST`.  If the timers of a
    disturbed step sum to more than the step, they are scaled down to it, because only their proportion can be right.
    """
    known = {name: duration for name, duration in phases.items() if duration > 0}
    rest = wall_ns - sum(known.values())
    if rest < 0:
        known = dict(zip(known, split(wall_ns, list(known.values())), strict=True))
        rest = 0
    known[REST] = known.get(REST, 0) + rest
    parts = dict.fromkeys(LEDGER_HEADINGS, 0)
    overlapped = loop_host = 0
    mixes = calibration.mixes if calibration is not None else {}
    for name, duration in known.items():
        mix = mixes.get(name)
        if mix is None:
            parts[_DIRECT.get(name, "unknown")] += duration
            continue
        host_before = parts["host_bound"]
        if len(mix.headings) == 1:
            parts[mix.headings[0]] += duration
        else:
            weights = mix.weights_on_device(duration) if on_device else mix.weights
            for heading, share in zip(mix.headings, split(duration, weights), strict=True):
                parts[heading] += share
        if name == REST:
            loop_host = parts["host_bound"] - host_before
        if mix.overlapped_ns:
            overlapped += duration * mix.overlapped_ns // mix.wall_ns
    return Ledger(
        wall_ns=wall_ns,
        compute_ns=parts["compute"],
        exposed_communication_ns=parts["exposed_communication"],
        exposed_copy_ns=parts["exposed_copy"],
        data_wait_ns=parts["data_wait"],
        host_bound_ns=parts["host_bound"],
        optimizer_host_ns=parts["optimizer_host"],
        checkpoint_ns=parts["checkpoint"],
        stopped_ns=parts["stopped"],
        unknown_ns=parts["unknown"],
        communication_ns=parts["exposed_communication"] + overlapped,
        overlapped_communication_ns=overlapped,
        loop_host_ns=loop_host,
    )
