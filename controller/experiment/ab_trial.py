"""Runs one A/B trial of a setting in the running job, from the first request to its end.

To run the new setting for a while and compare with before would charge every change of conditions to the knob.  So the
settings alternate, A B B A A B B A (A: in force before, B: tried), and only neighbours are compared:

    steps   aaaaaaaa ..bbbbbbbbbbbbbbbb ..aaaaaaaaaaaaaaaa ..bbbb     .. settling, charged but not judged
    windows    A1        B1      B2        A2      A3        B3
    pairs      `---------'       `---------'       `---------'

A1 is free: the last steps before B came into force.  A request takes effect some steps later, so the trial looks at the
values that steps really had, and requests the next switch as early as the shortest delay so far allows.  Under the
better-looking setting it requests a little later: there another step costs nothing, and replaces one that could not be
judged.  The trial ends as soon as the result is clear.  Rejecting can be hasty, because it loses only a chance;
accepting cannot (`sequential_test`).

Switches cost pacecar's own time, which has a budget.  A trial stays with A until every rank can pay for going to B and
coming back (`SwitchPrice`), and ends when not even one switch is covered: under B it must be able to return, and under
A the votes of a trial may cost more than the steps earn.  The savings of its pairs are kept for the candidate's next
trial.

Left out: charging the time (the policy does, because it also sees the steps around the trial), and reporting it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ..observation import Observation
from .exploration_budget import TRIAL_SWITCHES
from .sequential_test import SequentialTest, gain_ratio, location, promise, weigh

__all__ = [
    "DROP_RATIO",
    "DROP_STEPS",
    "QUIET_WINDOW_STEPS",
    "SETTLE_STEPS",
    "WINDOW_STEPS",
    "AbTrial",
    "AbortCause",
    "CandidatePrior",
    "IncumbentPace",
    "TrialEnd",
    "refill_steps",
]

PREFETCH_DEFAULT = 2
"""torch's own default, for jobs where prefetching is not a knob."""

REFILL_STEPS_MAX = 16
"""Most settling steps, two windows: longer would cost more than the better measurement is worth."""

WINDOW_STEPS = 8
"""Judged steps of one window: 2-3 are too noisy to judge on, 50 too slow (measured, TUNING)."""

QUIET_WINDOW_STEPS = 4
"""The same in a job whose steps repeat so well that four say as much as eight elsewhere
(`pace_tracker.QUIET_SPREAD`)."""

PART_RATIO = 0.75
"""This share of its judged steps is enough for a stretch's second window if the next switch comes before it is full.

The switch is requested before the stretch is over, and a profiled step after that is not judged.  Without this rule
each window that the hook takes of a new setting would cost the trial a pair.
"""

LINGER_STEPS = 2
"""Further judged steps under the better-looking setting before the other is requested."""

SETTLE_STEPS = 2
"""Steps after a switch that are charged but not judged: a fresh Reducer costs 5 to 50 % in its first two."""

PAIRS_MIN = 2
"""Never accept on one pair: conditions that change at the switch look like a gain; A B B A shows it."""

CAUTION = 1.3
"""Acceptance takes this much more evidence than the rate requires: windows of correlated noise are less exchangeable
than the e-process assumes (simulated with autocorrelation 0.9, two null pairs, all looks: 5.8 % instead of 5 %)."""

PAIRS_MAX = 48
"""Most pairs of a trial.  It goes on only while its candidate looks better, so it costs only the gain forgone in the
steps under the old setting.  Replayed at 5 % noise, ten pairs showed half of the gains of 4 %.
"""

PAIRS_MOST = 192
"""The same for a long job: a gain of 2 % at 10 % step noise takes a hundred pairs (`forecast`)."""

DOUBT_ERRORS = 0.5
HOPE_ERRORS = 1.5
"""Standard errors by which a candidate may be better than it looks before it is given up; HOPE_ERRORS if a forecast
promises a gain: at 10 % noise three pairs contradict a true 4 % one time in five."""

FUTILE_PAIRS = 3
"""From this many new pairs on, a mean gain inside the dead band ends the trial; that misses a true 5 % gain at 5 %
noise in under 1 % of trials."""

DROP_RATIO = 1.2
"""A candidate is dropped at once if its first DROP_STEPS steps are all slower than this times the present setting,
unless its pairs look better already: then slow steps are the machine's."""

DROP_RATIO_QUIET = 1.1
QUIET_NOISES = 5.0
"""Less than DROP_RATIO, but not less than DROP_RATIO_QUIET, suffices if it is this many standard deviations of a
step."""

DROP_STEPS = 2
"""Twice as many if the present setting has such steps too (SPIKES_RATIO): two spikes in a row prove nothing."""

SETTLE_RATIO = 1.1
DROP_NOISES = 2.0
"""A settling step must be slower than that by SETTLE_RATIO, and than SETTLE_RATIO by DROP_NOISES standard deviations.
A new Reducer costs up to half of the first step, and a recompilation many times it, but neither more than a tenth of
the second (TUNING)."""

SPIKES_RATIO = 0.03

WORSE_NOISES = 3.0
"""After the first pair, a loss of this many standard deviations of null pairs, and beyond the dead band, ends the
trial."""

WAIT_STEPS_MAX = 64
"""Agreeing on a switch takes 3 to 16 steps; one that has not come after this many will not come."""

TRIAL_STEPS_MAX = 1024
"""Longest trial of 48 pairs, in case no step can be judged (all profiled, say): they need about 900."""

LATENCY_STEPS_MIN = 4
"""Assumed before it was measured: a request takes at least one control period."""

Arm = Literal["A", "B"]


class AbortCause(StrEnum):
    """Why a trial ended."""

    ACCEPTED = "accepted"
    DROPPED = "dropped"
    WORSE = "worse"
    FUTILE = "futile"
    UNDECIDED = "undecided"
    TAKEN_BACK = "taken back"
    NEVER_CAME = "never came"
    ENDLESS = "endless"
    CUT_SHORT = "cut short"


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """How a trial ended.  Without a completed pair `evidence` is None, and `gain_ratio` comes from its steps."""

    cause: AbortCause
    evidence: SequentialTest | None
    gain_ratio: float | None
    detail: str

    def may_gain(self, dead_band: float) -> bool:
        """Return whether the bounds allow a gain: after few noisy pairs a trial may be repeated."""
        return self.evidence is None or self.evidence.gain_high is None or self.evidence.gain_high > dead_band


@dataclass(frozen=True, slots=True, kw_only=True)
class IncumbentPace:
    """The pace under the setting in force, as log paces.

    `opening` holds its last settled steps, `nulls` differences between windows of such steps, `typical` their median,
    `slow_ratio` the share of them that are `DROP_RATIO` slower than typical, and `step_noise` their standard deviation
    (spikes left out).  A window has `window_steps` judged steps, here and in the trial.
    """

    opening: Sequence[float]
    nulls: Sequence[float]
    typical: float
    slow_ratio: float = 0.0
    step_noise: float = 0.0
    window_steps: int = WINDOW_STEPS


@dataclass(frozen=True, slots=True)
class CandidatePrior:
    """What is known about a candidate: savings of earlier pairs (log pace), and whether a gain is forecast."""

    savings: tuple[float, ...] = ()
    is_promising: bool = False


NOTHING_KNOWN = CandidatePrior()


class AbTrial:
    """One candidate against the setting in force.

    It takes every step from the request on; `wanted` is what should be in force, and changes as steps are observed.
    `latency_steps` is the shortest delay of a switch so far, None before the first.  `nulls_seen` are null pairs for
    later trials (in this one they would depend on the pairs).  `take_levels` and `take_paces` return the new windows
    and steps under `incumbent`, for the change detector.
    """

    def __init__(
        self,
        incumbent: Mapping[str, int],
        candidate: Mapping[str, int],
        pace: IncumbentPace,
        *,
        dead_band: float,
        false_accept_rate: float,
        latency_steps: int | None = None,
        prior: CandidatePrior = NOTHING_KNOWN,
        pairs_max: int = PAIRS_MAX,
    ) -> None:
        self._values: dict[Arm, dict[str, int]] = {"A": dict(incumbent), "B": dict(candidate)}
        self._settle_steps = max(SETTLE_STEPS, refill_steps(incumbent, candidate))
        self._window_steps = pace.window_steps
        self._opening: deque[float] = deque(pace.opening, maxlen=pace.window_steps)
        self._nulls = tuple(pace.nulls)
        self._typical = pace.typical
        self._dead_band = dead_band
        self._rate = false_accept_rate
        self._drop_steps = DROP_STEPS if pace.slow_ratio < SPIKES_RATIO else 2 * DROP_STEPS
        clear = max(math.log(DROP_RATIO_QUIET), QUIET_NOISES * pace.step_noise)
        self._bar = min(math.log(DROP_RATIO), clear)
        self._settling_bar = math.log(SETTLE_RATIO) + max(self._bar, DROP_NOISES * pace.step_noise)
        self._slow: list[float] = []
        self.latency_steps = latency_steps
        self.pairs_max = min(max(pairs_max, PAIRS_MAX), PAIRS_MOST)
        self._steps_max = TRIAL_STEPS_MAX * self.pairs_max // PAIRS_MAX
        self.steps = 0
        self.evidence: SequentialTest | None = None
        self._wanted: Arm = "B"
        self._asked_step: int | None = None
        self._arm: Arm | None = "A"
        self._arrived = False  # the requested arm has been seen in force
        self._entered_step = 0
        self._stretch: list[float] = []
        self._unpaired: tuple[Arm, float] | None = None
        self._savings: list[float] = list(prior.savings)
        self._new_pairs = 0
        self._errors = HOPE_ERRORS if prior.is_promising else DOUBT_ERRORS
        self._begun = False
        self.nulls_seen: list[float] = []
        self._levels: list[float] = []
        self._paces: list[float] = []

    @property
    def wanted(self) -> dict[str, int]:
        """The values that should be in force as soon as the ranks agree."""
        return dict(self._values[self._wanted])

    @property
    def savings(self) -> tuple[float, ...]:
        """What each pair saved, in log pace."""
        return tuple(self._savings)

    @property
    def mean_saving(self) -> float:
        """Mean saving of the pairs in log pace; raises ZeroDivisionError before the first."""
        return math.fsum(self._savings) / len(self._savings)

    @property
    def error(self) -> float:
        """Standard error of the mean saving; infinity before the first pair."""
        if not self._savings:
            return math.inf
        mean, pairs = self.mean_saving, self.pairs
        scatter = math.fsum((x - mean) ** 2 for x in self._savings) + math.fsum(x * x for x in self._nulls)
        return math.sqrt(scatter / max(1, pairs - 1 + len(self._nulls)) / pairs)

    @property
    def is_screened(self) -> bool:
        """Whether there are pairs enough to compare the candidate with others."""
        return self._new_pairs >= FUTILE_PAIRS

    @property
    def pairs(self) -> int:
        """Completed pairs."""
        return len(self._savings)

    def observe(self, step: Observation) -> TrialEnd | None:
        """Take one step; return the end of the trial if this step ends it."""
        self.steps += 1
        if self._asked_step is None:
            self._asked_step = step.step - 1
        arm = self._arm_of(step)
        if arm != self._arm:
            end = self._switched(arm, step)
            if end is not None:
                return end
        if not self._arrived and step.step - self._asked_step > WAIT_STEPS_MAX:
            return self._end(AbortCause.NEVER_CAME, f"the ranks did not switch within {WAIT_STEPS_MAX} steps")
        if self.steps > self._steps_max:
            return self._end(AbortCause.ENDLESS, f"not decided within {self._steps_max} steps")
        if not step.can_pay_for(1):
            return self.give_up("the overhead budget does not pay for another switch")
        if arm is None or step.profiled:
            return None
        log_pace = math.log(step.pace_ns)
        if not self._begun:
            self._opening.append(log_pace)
            self._paces.append(log_pace)
            return None
        if step.step - self._entered_step >= self._settle_steps:
            self._stretch.append(log_pace)
            return self._drop(arm, log_pace, self._bar) or self._judge(arm, log_pace, step)
        if self._settle_steps == SETTLE_STEPS:  # not while workers start, or empty what was loaded ahead
            return self._drop(arm, log_pace, self._settling_bar)
        return None

    @property
    def looks_better(self) -> bool:
        """Whether the candidate saves time by the pairs so far; True before the first one."""
        return self.evidence is None or self.evidence.gain_ratio > 0

    def take_levels(self) -> list[float]:
        """Return the log paces of windows under `incumbent` since the last call."""
        levels, self._levels = self._levels, []
        return levels

    def take_paces(self) -> list[float]:
        """Return the log paces of judged steps under `incumbent` since the last call."""
        paces, self._paces = self._paces, []
        return paces

    def give_up(self, reason: str) -> TrialEnd:
        """End the trial from outside, for `reason`: the budget is spent, or conditions changed."""
        return self._end(AbortCause.UNDECIDED if self.looks_better else AbortCause.FUTILE, reason)

    def interrupt(self, step: int) -> None:
        """Start the current window again after settling: the steps up to `step` measured nothing."""
        self._stretch, self._slow = [], []
        self._entered_step = step + 1
        if self._asked_step is not None and not self._arrived:
            self._asked_step = step

    def _arm_of(self, step: Observation) -> Arm | None:
        for arm, values in self._values.items():
            if all(step.values.get(knob) == value for knob, value in values.items()):
                return arm
        return None

    def _switched(self, arm: Arm | None, step: Observation) -> TrialEnd | None:
        """Take the first step under other values than in the previous step."""
        assert self._asked_step is not None
        if self._arrived and self._wanted == "B":
            return self._end(AbortCause.TAKEN_BACK, "the ranks took it back by themselves")
        end = None
        window, count = self._window_steps, len(self._stretch)
        if self._arm is not None and count >= (1 + PART_RATIO) * window:  # the last steps are next to the other arm's
            end = self._window(self._arm, location(self._stretch[max(window, count - window) :]))
        self._arm = arm
        self._entered_step = step.step
        self._stretch, self._slow = [], []
        if arm == self._wanted and not self._arrived:
            self._arrived = True
            delay = step.step - self._asked_step
            self.latency_steps = delay if self.latency_steps is None else min(self.latency_steps, delay)
        if arm == "B" and not self._begun:
            self._begun = True
            if len(self._opening) == window:
                self._unpaired = ("A", location(self._opening))
        return end

    def _drop(self, arm: Arm, log_pace: float, bar: float) -> TrialEnd | None:
        """End the trial if the first steps of the candidate are all slower than usual, this one by more than `bar`."""
        if arm == "A" or len(self._stretch) > self._drop_steps or (self._new_pairs and self.looks_better):
            return None
        slower = log_pace - self._usual
        self._slow = [*self._slow, slower] if slower > bar else []
        if len(self._slow) < self._drop_steps:
            return None
        least = math.expm1(min(self._slow))
        return self._end(AbortCause.DROPPED, f"its first {len(self._slow)} steps took over {least:.0%} longer")

    def _judge(self, arm: Arm, log_pace: float, step: Observation) -> TrialEnd | None:
        if arm == "A":
            self._paces.append(log_pace)
        count, window = len(self._stretch), self._window_steps
        end = self._window(arm, location(self._stretch)) if count == window else None
        is_time = arm == self._wanted and count + (self.latency_steps or LATENCY_STEPS_MIN) > self._stay_steps(arm)
        if is_time and (arm == "B" or step.can_pay_for(TRIAL_SWITCHES)):
            self._wanted = "B" if arm == "A" else "A"
            self._asked_step, self._arrived = step.step, False
        if count == 2 * window:
            # Leave the gap of a switch between them, or correlated noise looks smaller than it is in pairs.
            first, last = self._stretch[: window - 1], self._stretch[window - 1 + SETTLE_STEPS :]
            self.nulls_seen.append(location(first) - location(last))
        return end

    def _stay_steps(self, arm: Arm) -> int:
        """Return how many judged steps this stretch should have.

        Before the first pair B may be better, so it gets the longer stretch.
        """
        is_better = arm == "B" if self.evidence is None else self.looks_better == (arm == "B")
        return 2 * self._window_steps + (LINGER_STEPS if is_better else 0)

    @property
    def _usual(self) -> float:
        """The log pace to expect of A: the typical one, or its last window's if the machine became slower."""
        if self._unpaired is not None and self._unpaired[0] == "A":
            return max(self._typical, self._unpaired[1])
        return self._typical

    def _window(self, arm: Arm, level: float) -> TrialEnd | None:
        """Pair the window with the previous one if that was of the other setting and is unpaired."""
        if arm == "A":
            self._levels.append(level)
        before, self._unpaired = self._unpaired, (arm, level)
        if before is None or before[0] == arm:
            return None
        self._unpaired = None
        self._new_pairs += 1
        self._savings.append(before[1] - level if arm == "B" else level - before[1])
        self.evidence = weigh(self._savings, self._nulls, dead_band=0.0, false_accept_rate=self._rate)
        return self._rule(self.evidence)

    def _rule(self, evidence: SequentialTest) -> TrialEnd | None:
        if (
            evidence.pairs >= PAIRS_MIN
            and evidence.e_value >= CAUTION / self._rate
            and evidence.gain_ratio >= self._dead_band
        ):
            return self._end(AbortCause.ACCEPTED, f"{evidence.pairs} pairs")
        noise = math.sqrt(math.fsum(x * x for x in self._nulls) / max(1, len(self._nulls)))
        if (
            evidence.pairs == 1
            and len(self._nulls) > 1
            and self._savings[0] < -max(WORSE_NOISES * noise, -math.log1p(-self._dead_band))
        ):
            return self._end(AbortCause.WORSE, "clear from the first pair")
        if evidence.gain_high is not None and evidence.gain_high < 0:
            return self._end(AbortCause.WORSE, f"{evidence.pairs} pairs")
        band = f"the dead band of {self._dead_band:.1%}"
        if evidence.gain_high is not None and evidence.gain_high < self._dead_band:
            return self._end(AbortCause.FUTILE, f"saves less than {band}")
        if self._new_pairs >= FUTILE_PAIRS and evidence.gain_ratio + self._errors * self.error <= self._dead_band:
            return self._end(AbortCause.FUTILE, f"no more than {band} after {evidence.pairs} pairs")
        most = self.pairs_max
        if self._new_pairs >= FUTILE_PAIRS and evidence.pairs < most and self._hoped() < CAUTION / self._rate:
            return self._end(AbortCause.UNDECIDED, f"{most} pairs would hardly prove it")
        if evidence.pairs >= most:
            return self._end(AbortCause.UNDECIDED, f"not proven within {most} pairs")
        return None

    def _hoped(self) -> float:
        return promise(
            self._savings,
            self._nulls,
            dead_band=0.0,
            pairs_max=self.pairs_max,
            errors=max(1.0, self._errors),
        )

    def _end(self, cause: AbortCause, detail: str) -> TrialEnd:
        measured = None if self.evidence is None else self.evidence.gain_ratio
        if measured is None and self._arm == "B" and self._stretch:
            measured = gain_ratio(self._typical - location(self._stretch))
        elif measured is None and cause is AbortCause.DROPPED:
            measured = gain_ratio(-min(self._slow))
        return TrialEnd(cause, self.evidence, measured, detail)


def refill_steps(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return the number of steps after a switch whose batches were loaded ahead.

    Old and new workers load at once then, so those steps are faster than under either setting and must not be judged.
    """
    flights = [v.get("loader_workers", 0) * v.get("loader_prefetch", PREFETCH_DEFAULT) for v in (before, after)]
    if before.get("work_share") != after.get("work_share"):
        return REFILL_STEPS_MAX // 2 if "loader_workers" not in before else min(REFILL_STEPS_MAX, flights[0])
    same = all(before.get(knob) == after.get(knob) for knob in ("loader_workers", "loader_prefetch"))
    return 0 if same else min(REFILL_STEPS_MAX, sum(flights))
