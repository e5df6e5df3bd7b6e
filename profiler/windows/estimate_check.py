"""Checks the estimate (`estimate`) against every exact window, before the calibration learns from that window.

The profiled step has timers like any other, so it is estimated with the current calibration as if it had not been
profiled, and both ledgers go into one record.  This cannot show an error shared by all windows: the profiler slows the
operators that it records.  But the undisturbed phases of neighboring steps are known, so that error has a bound: how
much longer than usual the profiled step's phases are (see `EstimateCheck.bias_limit_ratio`).
"""

from __future__ import annotations

from collections import deque
from statistics import median

from pacecar.ledger.attribution import REST
from pacecar.records import EstimateCheck, JobHello, Knobs

from ..timing.step_timer import TimedStep
from .estimate import Calibration, Calibrations, estimate_step
from .window_reader import Measurement

__all__ = ["RECENT_STEPS", "EstimateChecker"]

RECENT_STEPS = 32
"""The usual phases are the median of this many undisturbed steps, as for the usual step in `overhead_budget`."""

USUAL_STEPS_MIN = 4
"""The fewest undisturbed steps whose median is used."""


class EstimateChecker:
    """Adds exact windows to the calibrations, and first compares each with the estimate."""

    def __init__(self, hello: JobHello, calibrations: Calibrations) -> None:
        self._hello = hello
        self._calibrations = calibrations
        self._recent: deque[TimedStep] = deque(maxlen=RECENT_STEPS)
        self._epoch = 0

    def undisturbed(self, timed: TimedStep, knobs: Knobs) -> None:
        """Add a step that was not disturbed by pacecar."""
        if knobs.epoch != self._epoch:
            self._epoch = knobs.epoch
            self._recent.clear()
        self._recent.append(timed)

    def learn(
        self, step: int, knobs: Knobs, timed: TimedStep, measurement: Measurement, wall_ns: int
    ) -> EstimateCheck | None:
        """Add the window of `step`, which ended at `wall_ns`; return the check, None before any calibration."""
        before = self._calibrations.find(knobs)
        check: EstimateCheck | None = None
        on_device = measurement.on_device
        # This step's events are not read yet; the window gives the same lengths.
        device = None if on_device is None else {name: ledger.wall_ns for name, ledger in on_device.items()}
        if before is not None:
            check = EstimateCheck(
                job=self._hello.job,
                rank=self._hello.rank,
                step=step,
                ended_wall_ns=wall_ns,
                exact=measurement.ledger,
                estimate=estimate_step(timed.wall_ns, timed.phases, device, before),
                calibration_age_steps=step - before.step,
                is_own_setting=self._calibrations.knows(knobs),
                windows=before.windows,
                slowdown_ns=self._slowdown_ns(timed, knobs),
            )
        window = Calibration(
            step, measurement.phases, on_device=None if on_device is None else Calibration(step, on_device)
        )
        self._calibrations.add(knobs, window, None if check is None else check.error_ratio)
        return check

    def _slowdown_ns(self, timed: TimedStep, knobs: Knobs) -> int | None:
        """Return how much longer than usual a profiled step's phases are, without pacecar's own."""
        alike = [_phases(step) for step in self._recent if step.micro_batches == timed.micro_batches]
        if knobs.epoch != self._epoch or len(alike) < USUAL_STEPS_MIN:
            return None
        mine = _phases(timed)
        usual = {name: median(phases.get(name, 0) for phases in alike) for name in mine}
        return sum(max(0, round(duration - usual[name])) for name, duration in mine.items())


def _phases(step: TimedStep) -> dict[str, int]:
    phases = {name: duration for name, duration in step.phases.items() if name != "overhead"}
    phases[REST] = max(0, step.wall_ns - sum(step.phases.values()))
    return phases
