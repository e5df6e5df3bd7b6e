"""Measures the time for passing a step that was only counted to the tuner, bounded by `tuner_wiring.DECIDE_NS`.

A real tuner of one rank with pacecar's policy gets counted steps: of 120 ms, which are always passed to it, or of 20
ms, which are not.  Its knob changes nothing, so it tries the other two values and then watches.  Between steps, more
bytes are written than a core's caches hold, as in a job.  It prints microseconds per boundary, median and 99th
percentile, in turns; the difference is the cost of passing a step on.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds its own folder only
from pacecar.clock import SystemClock
from pacecar.config import TuneConfig
from pacecar.controller.consensus.agreement import LocalAgreement
from pacecar.controller.knobs.actuator import Actuator
from pacecar.controller.observation import JobFacts
from pacecar.controller.policy.tuning_policy import TuningPolicy
from pacecar.controller.status_reporter import StatusReporter
from pacecar.controller.tuner import TunedJob, Tuner
from pacecar.job.tuner_wiring import DECIDE_NS
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.records import JobHello, Knobs

STEPS = 1500
HEARD_NS, UNHEARD_NS = 120_000_000, 20_000_000
ROUNDS = 3
NOISE = 0.05
EVICTED_BYTES = 4 << 20


class Dial(Actuator):
    """A knob whose values make no difference, so that a trial goes on for long."""

    knob = "micro_batch"

    def __init__(self) -> None:
        self.at = 4

    def value(self) -> int:
        return self.at

    def domain(self) -> tuple[int, ...]:
        return (2, 4, 8)

    def refusal(self) -> str | None:
        return None

    def apply(self, value: int) -> None:
        self.at = value


class Job(TunedJob):
    """One that is never paused."""

    in_force = Knobs()

    def facts(self) -> JobFacts:
        """Return that it has one rank."""
        return JobFacts("bench", 1, batch_samples=32)

    def set_knobs(self, knobs: Knobs) -> None:
        """Keep them."""
        self.in_force = knobs

    def request_window(self) -> None:
        """Do nothing."""


def boundaries(step_ns: int) -> list[float]:
    """Return the microseconds of each boundary where steps take `step_ns`."""
    hello = JobHello(
        job="bench", rank=0, local_rank=0, world_size=1, pid=1, host="h", device="cpu", framework="torch",
        pacecar_version="0", started_wall_ns=0,
    )  # fmt: skip
    job, config = Job(), TuneConfig(mode="exact")
    tuner = Tuner(
        job, config, StatusReporter(hello, lambda record: None, SystemClock()),
        policy=TuningPolicy(config), actuators=[Dial()], agreement=LocalAgreement(),
    )  # fmt: skip
    tuner.start()
    draw, junk, taken, now = random.Random(1), bytearray(EVICTED_BYTES), [], 0
    for number in range(STEPS):
        wall_ns = round(step_ns * draw.lognormvariate(0.0, NOISE))
        step = CountedStep(number, now, now + wall_ns, now + wall_ns, job.in_force)
        now += wall_ns
        junk[:] = bytes(EVICTED_BYTES)
        begun = time.perf_counter_ns()
        tuner.on_boundary(step)
        taken.append((time.perf_counter_ns() - begun) / 1e3)
    tuner.close()
    return taken[STEPS // 10 :]


def main() -> None:
    """Print both, in turns."""
    for name, step_ns in (("heard", HEARD_NS), ("not heard", UNHEARD_NS)) * ROUNDS:
        taken = boundaries(step_ns)
        sys.stdout.write(f"{name:10} median {median(taken):6.1f} us, 99 % {quantiles(taken, n=100)[98]:6.1f} us\n")
    sys.stdout.write(f"allowed for one that is heard: {DECIDE_NS / 1e3:.0f} us\n")


if __name__ == "__main__":
    main()
