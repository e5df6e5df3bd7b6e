"""Keeps pacecar's cost within the user's overhead ratio: adds up what it costs and decides when a window may open.

The cost is measured, not assumed.  Everything that pacecar costs the job is added up: its own code on the step path; a
window's start, stop and reading; how much slower the profiled step was than the recent steps that were not profiled
(never counted as a gain: a step that was fast by luck pays nothing back); the attach; pacecar's own threads; and on a
device the slow-down after a window (`WindowAftermath`).  A window opens only while all that, with the predicted price
of the next window, stays within the ratio that the user gave.  That price is the highest of the last ones, per
micro-batch: a step of one micro-batch leaves an eighth of the rows of a step of eight, and a tuner that has just merged
them wants to see the effect.

Which clock: time on the step path is taken from the wall clock, waits of ours included (for python's lock, for another
rank while it turns a knob), because the job waits by that clock.  One wait is different: until the last rank has come
to a switch.  A rank that is late there would be waited for in the job's next collective otherwise, so the job has lost
at most what the step was longer than usual.  What the kernel gave to other programs meanwhile is left out
where much is done at once (windows, the tuner's gathers: `preemption`).  How slow a profiled step was is read from the
processor clock (`window_schedule`).  Threads of ours are charged their processor time, the attach like the step path.

The first window: before it a ledger is mostly `unknown`, so it is taken right after the warm-up and is part of what
the attach costs, up to EARLY_NS for all ranks together (`early_ns`), unless the job is expected to end soon.

Credit: a first window that is dearer than that may be taken before the budget has earned it, and so may the first of a
setting that was never calibrated.  The credit is never more than CREDIT_NS, nor than what PAYBACK_NS of training earn
with what everything else leaves of the budget, nor than what some hundred steps earn.  A window that is predicted to
cost more waits until that is earned, like any other.  So at every step

    cost <= ratio * wall time + what the attach took, with the first window + CREDIT_NS

unless a window turns out more expensive than predicted; such a window is cut off (`window_schedule`).  The tuner asks
for `headroom_ns` before it begins a trial, and windows leave it what it needs to end one (`reserved_ns`).

Ranks take turns, because a tuner's request would otherwise open the windows of all of them at once.

Debt: the credit at the start is earned back while the always-on part goes on, which may take most of a small budget
itself.  After DEBT_NS of training, or as soon as no headroom is left, the budget is strained if everything but the
windows takes more than ALWAYS_ON_SHARE of it.  While it is strained, fewer steps are measured and ranks compare
themselves less often.  Windows are left out, because they always fill what is left: they wait by themselves and need
nothing else to wait.

A ratio of 1 means no limit, of 0 no window.  All of this is pure: numbers in, a yes or no out.

`WindowTurn` assigns the steps at which each rank may open a window, round robin, so that ranks never profile all at
once.

A fixed offset per rank is not enough: windows that the budget delays lose the offset one by one, until those of two
ranks coincide.  A step in which all ranks are profiled costs the job twice: all ranks are slow, and what the ranks see
of each other is the profiler.  So the steps are assigned for the whole run, round after round, and a window that cannot
be afforded in its turn waits for the next.

    step    | 3 4 5 | 6 7 8 | 9 10 11 | 12 13 14 | 15 ...       warm-up 3, three ranks
    rank    |   0   |   1   |    2    |    0     |  1 ...

A turn is as long as a window disturbs its rank, TURN_STEPS.  Beyond TURNS_MAX ranks some share a turn, never all.

A window that was requested on all ranks (`trace_request`) ignores turns.

`WindowAftermath` measures how much slower a device job runs after a profiled window than before it, which is charged
to pacecar.

The obvious price of a window is the profiled step.  On CUDA that is not all: CUPTI stays attached after the session
(torch does not tear it down unless TEARDOWN_CUPTI=1), and steps whose host is the bottleneck stay 10 to 25 % slower
(pytorch issue 144455, docs/measurements/gpu.md).  So the steps after each window are compared with the median of those
before it.

One difference is mostly noise; the signed differences of many windows are not.  So they are summed with their signs,
and what is charged is the maximum that the sum has reached.  A cost is never taken back, because it is exported as a
counter.

A slow-down beyond AFTERMATH_STEPS cannot be told from a job that became slower by itself; it is not charged.  But where
steps are still slower when all of them were compared after the first window, before which CUPTI recorded nothing, no
further window is taken (`lasting_ratio`, `window_schedule`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from statistics import median
from typing import NamedTuple

from .step_sampling import SHARE

__all__ = [
    "AFTERMATH_STEPS",
    "BASELINE_STEPS",
    "EARLY_NS",
    "PRICE_MARGIN",
    "RECENT_STEPS",
    "TURNS_MAX",
    "OverheadBudget",
    "ThreadTime",
    "WindowAftermath",
    "WindowTurn",
    "early_ns",
    "turn_of",
]

RECENT_STEPS = 32
"""Steps whose median is "as usual": long enough to be steady, short enough to follow the job."""

FIRST_WINDOW_NS = 5_000_000
"""Predicted price before `expect` gives a measured one: start 0.5 ms, 1000 events at 4 us."""

CREDIT_NS = 200_000_000
"""The largest credit for a window or a count beyond what the attach took: the start-up debt that the docs state."""

EARLY_NS = 1_000_000_000
"""The most that the first windows of all ranks may cost a job together, as part of the attach: the bound that the docs
state."""

PAYBACK_NS = 60_000_000_000
"""Training time that must suffice to earn a credit back."""

PRICES_MAX = 4
"""The last windows; the most expensive of them predicts the next."""

PRICE_MARGIN = 1.5
"""Prices of windows differ by this factor, and a run may end right after one."""

FIXED_SHARE = 0.1
"""The fixed share of a window's price: opening it, and what does not grow with the rows of forward and backward."""

HEADROOM_SHARE = 0.1
"""The share of the credit that the tuner may not use: steps whose cost is not added yet may have taken as much."""

FIRST_CREDIT_STEPS = 1000
"""The first window may open on credit if this many steps earn back what it should cost."""

CREDIT_STEPS = 100
"""A calibration of a new setting may be made on credit if this many steps earn it back."""

DEBT_NS = 15_000_000_000
"""Training time after which the start must be earned back even where there is headroom: a budget of 0.01 has
earned 150 ms by then."""

ALWAYS_ON_SHARE = 0.8
"""The share of the budget for everything but windows; above it the budget is strained."""


TURNS_MAX = 8
"""The most turns in a round: a round must end soon, or the last rank has no calibration; a node has eight devices and
shares its processors."""

TURN_STEPS = 3
"""The profiled step and the one in which it is read.  On a device also the step before, in which the device drains; on
gloo also one between them, in which its threads finish what was profiled."""

TRIES = 10
"""A window that could not be afforded is tried again after a tenth of the interval."""

AFTERMATH_STEPS = 16
"""Steps after a window that are compared: as many as fit between the windows of the shortest sensible interval."""

BASELINE_STEPS = AFTERMATH_STEPS // 2
"""Steps at least before the first window of a device job: what comes after it is compared with their median, which two
or three slow first steps among eight do not move far."""

OUTLIER_RATIO = 1.5
"""A step counts as at most this many usual steps: a longer one saved a checkpoint or waited for something else."""

LASTING_RATIO = 0.03
"""A slow-down of the median that ends windows: three times the usual budget, and for as long as the job runs."""

LASTING_QUANTILE = 4
"""Three of four steps must be slower than usual: a median of eight alone is moved by a few odd steps."""


class ThreadTime(NamedTuple):
    """Processor time of the training thread in a profiled step, and on average in the steps before it."""

    spent_ns: int
    usual_ns: int


class OverheadBudget:
    """Adds up wall time and pacecar's cost, and decides when a window may open."""

    def __init__(
        self,
        ratio: float,
        *,
        warmup_steps: int,
        interval_steps: int,
        rank: int = 0,
        world_size: int = 1,
        on_device: bool = False,
    ) -> None:
        self._ratio = ratio
        if on_device:
            warmup_steps = max(warmup_steps, BASELINE_STEPS)
        self._turn = turn_of(rank, world_size, warmup_steps=warmup_steps, interval_steps=interval_steps)
        self._interval_steps = interval_steps
        self._early_ns = early_ns(rank, world_size)
        self.may_be_early = False
        """Whether the first window may be part of what the attach costs; set on the training thread."""
        self._aftermath = WindowAftermath() if on_device else None
        self._wall_ns = 0
        self._cost_ns = 0
        self._charged_ns = 0
        self._charging = threading.Lock()
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)
        self._recent_run: deque[int] = deque(maxlen=RECENT_STEPS)  # the same less the run delay
        self._prices: deque[tuple[int, int]] = deque(maxlen=PRICES_MAX)
        self._micro_batches = 0
        self._windows_ns = self._start_ns = 0
        self._first_window_ns = 0  # the part of the first window that is in `_start_ns`
        self._expected_ns = FIRST_WINDOW_NS
        self._requested = False
        self._on_credit = True
        self._last_window: int | None = None
        self.reserved_ns = 0
        """What windows must leave of the credit: the tuner needs it to end a trial.  Set on the training thread."""
        self.windows = 0

    @property
    def cost_ns(self) -> int:
        """What pacecar cost the job so far, slowed steps and its own threads included."""
        return self._cost_ns + self._charged_ns

    @property
    def ratio(self) -> float | None:
        """Cost over wall time; None before the first step."""
        return self.cost_ns / self._wall_ns if self._wall_ns else None

    def is_strained(self) -> bool:
        """Return whether pacecar without its windows takes more than its share of the budget; from any thread."""
        headroom_ns = self.headroom_ns(wall_ns=0, cost_ns=0)
        if headroom_ns is None or (headroom_ns > 0 and self._wall_ns < DEBT_NS):
            return False
        always_on_ns = self.cost_ns - self._windows_ns - self._first_window_ns
        return always_on_ns > ALWAYS_ON_SHARE * self._ratio * self._wall_ns

    def charge(self, cost_ns: int) -> None:
        """Add a cost that was measured outside any step: the attach itself, a thread of ours; from any thread."""
        with self._charging:
            self._charged_ns += cost_ns

    def charge_start(self, cost_ns: int) -> None:
        """Add what attaching cost, once."""
        self._start_ns += cost_ns
        self.charge(cost_ns)

    def step(
        self,
        wall_ns: int,
        overhead_ns: int,
        *,
        profiled: bool,
        thread_time: ThreadTime | None = None,
        micro_batches: int = 0,
        slowed_max_ns: int | None = None,
        waited_ns: int = 0,
        delay_ns: int = 0,
    ) -> int:
        """Add a finished step and pacecar's own time in it; return that with a profiled step's slow-down added.

        The slow-down is taken from `thread_time` where it is known, because on a busy machine wall time misleads.
        `micro_batches` of 0 means unknown.  `slowed_max_ns` is the most that pacecar can have slowed the step by: the
        rest is the job's own, such as an evaluation in that step; None: unknown.  Of `waited_ns` (module docstring) is
        charged what made the step longer than usual.  `delay_ns` is the training thread's run delay in the step, which
        neither comparison counts, here or in usual steps.
        """
        self._wall_ns += wall_ns
        self._micro_batches = micro_batches
        if profiled:
            own = wall_ns - overhead_ns
            usual = int(median(self._recent)) if self._recent else own
            slowed = own - delay_ns - (int(median(self._recent_run)) if self._recent_run else own - delay_ns)
            if thread_time is not None:  # no step takes more of the processor than it takes time
                slowed = thread_time.spent_ns - min(thread_time.usual_ns, usual)
            if slowed_max_ns is not None:
                slowed = min(slowed, slowed_max_ns)
            overhead_ns = min(wall_ns, overhead_ns + max(0, slowed))
        else:
            own = max(0, wall_ns - overhead_ns)
            if waited_ns:
                usual = int(median(self._recent_run)) if self._recent_run else 0
                waited_ns = min(waited_ns, max(0, own - delay_ns - usual))
                overhead_ns, own = overhead_ns + waited_ns, own - waited_ns
            self._recent.append(own)
            self._recent_run.append(max(0, own - delay_ns))
            if self._aftermath is not None:
                aftermath_ns = self._aftermath.step(own)
                self._cost_ns += aftermath_ns
                self._windows_ns += aftermath_ns
        self._cost_ns += overhead_ns
        return overhead_ns

    def passed(self, wall_ns: int, cost_ns: int) -> None:
        """Add steps that were counted and not measured."""
        self._wall_ns += wall_ns
        self._cost_ns += cost_ns

    def window_taken(self, step: int, price_ns: int) -> None:
        """Record what the window of `step`, the last that was taken, cost in all, to predict the next."""
        self._prices.append((price_ns, self._micro_batches))
        early_ns = min(price_ns, self._early_ns) if self.may_be_early and not self.windows else 0
        self._start_ns += early_ns
        self._first_window_ns += early_ns
        self._windows_ns += price_ns - early_ns
        if self._aftermath is not None:
            self._aftermath.window(int(median(self._recent)) if self._recent else None)
        self._last_window = step
        self._requested = self._on_credit = False
        self.windows += 1

    def probed(self, price_ns: int) -> None:
        """Record what profiling part of a step, or a window that was cut off, cost; the steps' cost has it already."""
        self._windows_ns += price_ns

    def expect(self, price_ns: int) -> None:
        """Set the predicted price of the first window; until then FIRST_WINDOW_NS is used."""
        self._expected_ns = price_ns

    def forget_prices(self) -> None:
        """Forget what windows cost, because the job's steps have changed."""
        self._prices.clear()

    @property
    def has_prices(self) -> bool:
        """Whether a window was taken whose price predicts the next one's."""
        return bool(self._prices)

    @property
    def lasting_ratio(self) -> float | None:
        """By how much steps stay slower for windows' sake; None: they do not, as far as is known."""
        return None if self._aftermath is None else self._aftermath.lasting_ratio

    @property
    def is_unlimited(self) -> bool:
        """Whether the user asked for windows whatever they cost."""
        return self._ratio >= 1.0

    @property
    def usual_ns(self) -> int | None:
        """The median of recent steps without pacecar's own time; None before the first."""
        return int(median(self._recent)) if self._recent else None

    @property
    def predicted_ns(self) -> int:
        """What the next window is expected to cost."""
        return self._predicted_ns()

    @property
    def earned_in_ns(self) -> int | None:
        """How much more training earns the next window; 0: it can be afforded now, None: it never can."""
        if self._can_pay():
            return 0
        spare = self._spare_ratio()
        if spare <= 0.0:
            return None
        return max(0, round((self.cost_ns + self._predicted_ns() - self._credit_ns()) / spare) - self._wall_ns)

    def request(self, *, on_credit: bool = False) -> None:
        """Request a window soon, before the interval is over; `on_credit` also before the ratio has earned it."""
        self._requested = True
        self._on_credit = self._on_credit or on_credit

    def can_afford(self, price_ns: int, *, on_credit: bool = False) -> bool:
        """Return whether something that will cost `price_ns` is within the ratio; `on_credit` before it is earned."""
        if self._ratio >= 1.0 or self._ratio <= 0.0:
            return self._ratio >= 1.0
        lent_ns = self._first_credit_ns() if on_credit else 0
        return self.cost_ns + price_ns <= self._ratio * self._wall_ns + lent_ns

    def headroom_ns(self, *, wall_ns: int, cost_ns: int) -> int | None:
        """Return what may be spent now within the bound of the module's docstring; None: nothing limits it.

        `wall_ns` and `cost_ns` are those of steps that were not added yet.  HEADROOM_SHARE of the credit is left for
        what the always-on part takes until it is seen here, and no more of it is lent than PAYBACK_NS earn.
        """
        if not 0.0 < self._ratio < 1.0:
            return None
        lent_ns = (1.0 - HEADROOM_SHARE) * min(CREDIT_NS, self._ratio * PAYBACK_NS)
        allowed_ns = self._ratio * (self._wall_ns + wall_ns) + self._start_ns + lent_ns
        return int(allowed_ns) - self.cost_ns - cost_ns

    def wants_window(self, step: int) -> bool:
        """Return whether `step`, the next one, should be profiled."""
        return self.is_due(step) and self._can_pay()

    def is_due(self, step: int) -> bool:
        """Return whether `step` should be profiled if that can be afforded."""
        if not self._turn.is_now(step):
            return False
        return self._requested or self._last_window is None or step - self._last_window >= self._interval_steps

    def next_turn(self, step: int) -> int:
        """Return the first step from `step` on that is this rank's turn."""
        return self._turn.next_from(step)

    def next_look(self, step: int) -> int:
        """Return the first step from `step` on that can be profiled at all, unless a window is requested before."""
        if self._last_window is not None and not self._requested:
            step = max(step, self._last_window + self._interval_steps)
        return self._turn.next_from(step + self._steps_to_earn())

    def _steps_to_earn(self) -> int:
        """Return in how many steps at least, up to an interval, the next window can be afforded."""
        if not self._recent or self._can_pay() or not 0.0 < self._ratio < 1.0:
            return 0
        missing_ns = self.cost_ns + self._predicted_ns() - self._ratio * self._wall_ns - self._credit_ns()
        steps = int(missing_ns / (self._ratio * max(1, median(self._recent))))
        return min(max(0, steps), self._interval_steps)

    def _can_pay(self) -> bool:
        if self._ratio >= 1.0 or self._ratio <= 0.0:
            return self._ratio >= 1.0
        if self.may_be_early and not self.windows and self._predicted_ns() <= self._early_ns:
            return True
        return self.cost_ns + self._predicted_ns() <= self._ratio * self._wall_ns + self._credit_ns()

    def _credit_ns(self) -> int:
        """Return the credit available now."""
        if not self._on_credit:
            return 0
        return self._limit_credit(CREDIT_STEPS, self._spare_ratio()) if self.windows else self._first_credit_ns()

    def _first_credit_ns(self) -> int:
        """Return the credit before the first window, which includes whatever the attach has cost.

        The always-on part is most expensive in the first steps and is no guide then.  So at least the share that
        `step_sampling` leaves for windows counts as left.
        """
        return self._start_ns + self._limit_credit(
            FIRST_CREDIT_STEPS, max(self._spare_ratio(), (1.0 - SHARE) * self._ratio)
        )

    def _limit_credit(self, steps: int, ratio: float) -> int:
        """Return the most that `steps` steps and PAYBACK_NS earn at `ratio`, up to CREDIT_NS."""
        if not self._recent:
            return 0
        return min(max(0, CREDIT_NS - self.reserved_ns), int(ratio * min(PAYBACK_NS, steps * median(self._recent))))

    def _spare_ratio(self) -> float:
        """Return what the always-on part leaves of the ratio: only that earns a credit back."""
        going_on_ns = self.cost_ns - self._windows_ns - self._start_ns
        return max(0.0, self._ratio - going_on_ns / self._wall_ns) if self._wall_ns else self._ratio

    def _predicted_ns(self) -> int:
        if not self._prices:
            return self._expected_ns
        return int(PRICE_MARGIN * max(price_ns * self._growth(count) for price_ns, count in self._prices))

    def _growth(self, micro_batches: int) -> float:
        """Return the price of a window now over its price when a step had `micro_batches`: it grows with the rows."""
        if not micro_batches or not self._micro_batches:
            return 1.0
        return FIXED_SHARE + (1.0 - FIXED_SHARE) * self._micro_batches / micro_batches


def early_ns(rank: int, world_size: int) -> int:
    """Return what the first window of `rank` may cost as part of its attach.

    Windows of different turns are taken in different steps, each of which all ranks wait for, so their costs add up:
    to EARLY_NS at most.  Half of it is for the turn of rank 0, whose ledger the tuner goes by.
    """
    turns = min(world_size, TURNS_MAX)
    if turns < 2:
        return EARLY_NS
    return EARLY_NS // 2 if rank % turns == 0 else EARLY_NS // 2 // (turns - 1)


class WindowTurn(NamedTuple):
    """The steps `first`, `first + every`, `first + 2 * every`, and so on."""

    first: int
    every: int

    def is_now(self, step: int) -> bool:
        """Return whether `step` is one of them."""
        return step >= self.first and (step - self.first) % self.every == 0

    def next_from(self, step: int) -> int:
        """Return the first of them from `step` on."""
        return self.first if step <= self.first else step + (self.first - step) % self.every


def turn_of(rank: int, world_size: int, *, warmup_steps: int, interval_steps: int) -> WindowTurn:
    """Return the turn of `rank`; the same arguments but for `rank` must be given on all ranks."""
    turns = min(world_size, TURNS_MAX)
    retry = max(1, interval_steps // TRIES)
    if turns < 2:
        return WindowTurn(warmup_steps, retry)
    round_steps = TURN_STEPS * turns
    return WindowTurn(warmup_steps + TURN_STEPS * (rank % turns), -(-retry // round_steps) * round_steps)


_log = logging.getLogger(__name__)


class WindowAftermath:
    """Compares the steps after the windows of one rank with those before."""

    def __init__(self) -> None:
        self._usual_ns: int | None = None
        self._after: list[int] = []
        self._sum_ns = 0
        self._charged_ns = 0
        self._windows = 0
        self.lasting_ratio: float | None = None
        """By how much steps stay slower after the first window; None: they do not, or it is not known yet."""

    def window(self, usual_ns: int | None) -> None:
        """Begin: a window was taken; steps before it took `usual_ns`, None where that is not known."""
        self._usual_ns = usual_ns
        self._after = []
        self._windows += 1

    def step(self, own_ns: int) -> int:
        """Add a step that was not profiled, less pacecar's own time in it; return what is to be charged now."""
        usual = self._usual_ns
        if usual is None:
            return 0
        self._after.append(own_ns)
        if len(self._after) < AFTERMATH_STEPS:
            return 0
        limit = round(usual * OUTLIER_RATIO)
        self._sum_ns += sum(min(own, limit) - usual for own in self._after)
        if self._windows == 1:
            self._judge_what_lasts(usual)
        self._usual_ns = None
        charge, self._charged_ns = max(0, self._sum_ns - self._charged_ns), max(self._charged_ns, self._sum_ns)
        return charge

    def _judge_what_lasts(self, usual: int) -> None:
        late = sorted(self._after[AFTERMATH_STEPS // 2 :])
        ratio = median(late) / max(1, usual) - 1.0
        if ratio > LASTING_RATIO and late[len(late) // LASTING_QUANTILE] > usual:
            self.lasting_ratio = ratio
