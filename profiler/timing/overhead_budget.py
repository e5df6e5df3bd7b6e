"""Keeps pacecar's cost within the user's overhead ratio: adds up what it costs and decides when a window may open.

Cost.  It is measured, not assumed: pacecar's own code on the step path; starting, stopping and reading windows; how
much slower a profiled step was than recent unprofiled ones (never a gain: a lucky fast step pays nothing back); the
attach; pacecar's own threads; and on a device the slow-down after a window (`WindowAftermath`).  A window opens only if
all that, plus its predicted price, stays within the user's ratio.  The predicted price is the highest of the last ones,
scaled by micro-batches: a step of one micro-batch leaves an eighth of the rows of a step of eight, and a tuner that has
just merged them wants to see the effect.

Clocks.  Time on the step path is wall time, including our own waits (for the GIL, for another rank that turns a knob),
because the job waits too.  One wait is special: waiting at a switch for the last rank.  The job's next collective would
have waited for that rank anyway, so the job loses at most what the step was longer than usual.  Where much is done at
once (windows, the tuner's gathers), time that the kernel gave to other programs is left out (`preemption`).  The
slow-down of a profiled step is read from the processor clock (`window_schedule`).  Our threads are charged their
processor time, the attach its wall time.

First window.  Until it is taken a ledger is mostly `unknown`, so it comes right after the warm-up and is part of the
cost of attaching, up to EARLY_NS for all ranks together (`early_ns`), unless the job is expected to end soon.

Credit.  A first window that costs more, or the first under settings that were never calibrated, may be taken before the
budget has earned it.  The credit is at most CREDIT_NS, at most what PAYBACK_NS of training earn with what everything
else leaves of the budget, and at most what about a hundred steps earn.  A window predicted to cost more waits until it
is earned, like any other.  So at every step

    cost <= ratio * wall time + cost of the attach with the first window + CREDIT_NS

unless a window turns out more expensive than predicted; such a window is cut off (`window_schedule`).  The tuner asks
for `headroom_ns` before it begins a trial, and windows leave it what it needs to end one (`reserved_ns`).

Debt.  The credit at the start is earned back while the always-on part, which may take most of a small budget, goes on.
After DEBT_NS of training, or as soon as no headroom is left, the budget is strained if everything but the windows takes
more than ALWAYS_ON_SHARE of it.  A strained budget means fewer measured steps and rarer comparisons of ranks.  Windows
do not count, because they use whatever is left and wait by themselves.

A ratio of 1 means no limit, 0 no windows.  All of this is pure: numbers in, a decision out.

Turns.  `WindowTurn` assigns each rank the steps in which it may open a window, round robin, so that ranks never all
profile at once, not even when a tuner requests windows on all of them.  A fixed offset per rank is not enough: windows
delayed by the budget lose it one by one until two ranks coincide.  A step profiled on all ranks costs the job twice:
all ranks are slow, and what they see of each other is the profiler.  So turns are assigned for the whole run, and a
window that is not affordable in its turn waits for the next one.

    step    | 3 4 5 | 6 7 8 | 9 10 11 | 12 13 14 | 15 ...       warm-up 3, three ranks
    rank    |   0   |   1   |    2    |    0     |  1 ...

A turn lasts as long as a window disturbs its rank, TURN_STEPS.  Beyond TURNS_MAX ranks some share a turn, never all.  A
window that the user requested on all ranks (`trace_request`) ignores turns.

Aftermath.  On CUDA the profiled step is not the whole price of a window: CUPTI stays attached after the session (torch
tears it down only with TEARDOWN_CUPTI=1), and host-bound steps stay 10 to 25 % slower (pytorch issue 144455,
docs/measurements/gpu.md).  So `WindowAftermath` compares the steps after each window with the median of those before
it.  One difference is mostly noise, but the signed sum over many windows is not, so the maximum of that sum is charged;
a cost is never taken back, because it is exported as a counter.  A slow-down that lasts longer than AFTERMATH_STEPS
cannot be told from a job that became slower by itself and is not charged.  But if steps are still slower at the end of
the comparison after the first window, before which CUPTI recorded nothing, no further window is taken
(`lasting_ratio`, `window_schedule`).
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
"""The usual step is the median of this many: enough to be stable, few enough to follow the job."""

FIRST_WINDOW_NS = 5_000_000
"""Predicted price before `expect` gives a measured one: start 0.5 ms, 1000 events at 4 us."""

CREDIT_NS = 200_000_000
"""The largest credit for a window or FLOP count beyond the cost of attaching: the start-up debt stated in the docs."""

EARLY_NS = 1_000_000_000
"""The most that the first windows of all ranks together may cost a job as part of the attach: the bound stated in the
docs."""

PAYBACK_NS = 60_000_000_000
"""A credit must be earned back within this much training time."""

PRICES_MAX = 4
"""The most expensive of this many last windows predicts the next."""

PRICE_MARGIN = 1.5
"""Window prices vary by this factor, and a run may end right after one."""

FIXED_SHARE = 0.1
"""The fixed share of a window's price: opening it, and everything else that does not grow with the number of rows."""

HEADROOM_SHARE = 0.1
"""The share of the credit kept from the tuner: steps whose cost is not added yet may have used as much."""

FIRST_CREDIT_STEPS = 1000
"""The first window may open on credit if this many steps earn back what it should cost."""

CREDIT_STEPS = 100
"""A calibration of a new setting may be made on credit if this many steps earn it back."""

DEBT_NS = 15_000_000_000
"""After this much training time the start must be earned back even if there is headroom: a budget of 0.01 has earned
150 ms by then."""

ALWAYS_ON_SHARE = 0.8
"""The share of the budget for everything except windows; above it the budget is strained."""


TURNS_MAX = 8
"""The most turns in a round: a round must be short, or the last rank waits long for its calibration; a node has eight
devices and shares its processors."""

TURN_STEPS = 3
"""The profiled step and the one in which it is read.  On a device also the step before, while the device drains; with
gloo also one in between, while its threads finish what was profiled."""

TRIES = 10
"""A window that was not affordable is tried again after a tenth of the interval."""

AFTERMATH_STEPS = 16
"""Steps compared after a window: as many as fit between windows at the shortest sensible interval."""

BASELINE_STEPS = AFTERMATH_STEPS // 2
"""The least steps before the first window of a device job: later steps are compared with their median, which two or
three slow first steps among eight hardly move."""

OUTLIER_RATIO = 1.5
"""A step counts as at most this many usual steps: a longer one saved a checkpoint, say."""

LASTING_RATIO = 0.03
"""Windows stop if the median step is slower by this ratio: three times the usual budget, for the rest of the job."""

LASTING_QUANTILE = 4
"""Three of four steps must be slower than usual, because a few odd steps move a median of eight."""


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
        self.ratio_max = ratio
        """The allowed cost of pacecar as a ratio of the job's wall time (0..1)."""
        if on_device:
            warmup_steps = max(warmup_steps, BASELINE_STEPS)
        self._turn = turn_of(rank, world_size, warmup_steps=warmup_steps, interval_steps=interval_steps)
        self._interval_steps = interval_steps
        self._early_ns = early_ns(rank, world_size)
        self.may_be_early = False
        """Whether the first window may be part of the cost of attaching; set on the training thread."""
        self._aftermath = WindowAftermath() if on_device else None
        self.wall_ns = 0
        """Wall time of all steps so far."""
        self._cost_ns = 0
        self._charged_ns = 0
        self._charging = threading.Lock()
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)
        self._recent_run: deque[int] = deque(maxlen=RECENT_STEPS)  # the same less the run delay
        self._prices: deque[tuple[int, int]] = deque(maxlen=PRICES_MAX)
        self._micro_batches = 0
        self._windows_ns = self.start_ns = 0
        """The cost of windows, and the cost of the start, which need not be earned back."""
        self._first_window_ns = 0  # the part of the first window that is in `start_ns`
        self._expected_ns = FIRST_WINDOW_NS
        self._requested = False
        self._on_credit = True
        self._last_window: int | None = None
        self.reserved_ns = 0
        """The part of the credit that windows must leave for the tuner to end a trial; set on the training thread."""
        self.windows = 0
        """The number of windows taken."""

    @property
    def cost_ns(self) -> int:
        """The cost of pacecar so far, including slowed steps and its own threads."""
        return self._cost_ns + self._charged_ns

    @property
    def ratio(self) -> float | None:
        """Cost over wall time; None before the first step."""
        return self.cost_ns / self.wall_ns if self.wall_ns else None

    def is_strained(self) -> bool:
        """Return whether pacecar without its windows exceeds its share of the budget; may be called from any thread."""
        headroom_ns = self.headroom_ns(wall_ns=0, cost_ns=0)
        if headroom_ns is None or (headroom_ns > 0 and self.wall_ns < DEBT_NS):
            return False
        always_on_ns = self.cost_ns - self._windows_ns - self._first_window_ns
        return always_on_ns > ALWAYS_ON_SHARE * self.ratio_max * self.wall_ns

    def charge(self, cost_ns: int) -> None:
        """Add a cost measured outside any step, of the attach or a thread of ours; may be called from any thread."""
        with self._charging:
            self._charged_ns += cost_ns

    def charge_start(self, cost_ns: int) -> None:
        """Add the cost of attaching, once."""
        self.start_ns += cost_ns
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
        """Add a finished step and pacecar's own time in it; return that time plus a profiled step's slow-down.

        The slow-down comes from `thread_time` if known, because wall time misleads on a busy machine.  `micro_batches`
        of 0 means unknown.  `slowed_max_ns` is the most that pacecar can have slowed the step (None: unknown); the rest
        is the job's own, such as an evaluation.  `waited_ns` (see the module docstring) is charged as far as it made
        the step longer than usual.  `delay_ns` is the training thread's run delay in the step, which no comparison
        counts, here or in usual steps.
        """
        self.wall_ns += wall_ns
        self._micro_batches = micro_batches
        if profiled:
            own = wall_ns - overhead_ns
            usual = int(median(self._recent)) if self._recent else own
            slowed = own - delay_ns - (int(median(self._recent_run)) if self._recent_run else own - delay_ns)
            if thread_time is not None:  # a step's processor time is at most its wall time
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
        """Add steps that were counted but not measured."""
        self.wall_ns += wall_ns
        self._cost_ns += cost_ns

    def window_taken(self, step: int, price_ns: int) -> None:
        """Record the total cost of the window of `step`, the last one taken, to predict the next."""
        self._prices.append((price_ns, self._micro_batches))
        early_ns = min(price_ns, self._early_ns) if self.may_be_early and not self.windows else 0
        self.start_ns += early_ns
        self._first_window_ns += early_ns
        self._windows_ns += price_ns - early_ns
        if self._aftermath is not None:
            self._aftermath.window(int(median(self._recent)) if self._recent else None)
        self._last_window = step
        self._requested = self._on_credit = False
        self.windows += 1

    def probed(self, price_ns: int) -> None:
        """Record the cost of a slice or of a window that was cut off; the steps' cost already includes it."""
        self._windows_ns += price_ns

    def expect(self, price_ns: int) -> None:
        """Set the predicted price of the first window; until then FIRST_WINDOW_NS is used."""
        self._expected_ns = price_ns

    def forget_prices(self) -> None:
        """Forget the prices of windows, because the job's steps have changed."""
        self._prices.clear()

    @property
    def has_prices(self) -> bool:
        """Whether the price of an earlier window predicts the next one's."""
        return bool(self._prices)

    @property
    def lasting_ratio(self) -> float | None:
        """The ratio by which steps stay slower because of windows; None: not known to be slower."""
        return None if self._aftermath is None else self._aftermath.lasting_ratio

    @property
    def is_unlimited(self) -> bool:
        """Whether the user allows windows at any cost."""
        return self.ratio_max >= 1.0

    @property
    def usual_ns(self) -> int | None:
        """The median of recent steps without pacecar's own time; None before the first."""
        return int(median(self._recent)) if self._recent else None

    @property
    def predicted_ns(self) -> int:
        """The expected cost of the next window."""
        return self._predicted_ns()

    @property
    def earned_in_ns(self) -> int | None:
        """The training time that earns the next window; 0: it is affordable now, None: it never will be."""
        if self._can_pay():
            return 0
        spare = self._spare_ratio()
        if spare <= 0.0:
            return None
        return max(0, round((self.cost_ns + self._predicted_ns() - self._credit_ns()) / spare) - self.wall_ns)

    def request(self, *, on_credit: bool = False) -> None:
        """Request a window before the interval is over; with `on_credit` even before the ratio has earned it."""
        self._requested = True
        self._on_credit = self._on_credit or on_credit

    def can_afford(self, price_ns: int, *, on_credit: bool = False) -> bool:
        """Return whether a cost of `price_ns` stays within the ratio; with `on_credit` even before it is earned."""
        if self.ratio_max >= 1.0 or self.ratio_max <= 0.0:
            return self.ratio_max >= 1.0
        lent_ns = self._first_credit_ns() if on_credit else 0
        return self.cost_ns + price_ns <= self.ratio_max * self.wall_ns + lent_ns

    def headroom_ns(self, *, wall_ns: int, cost_ns: int) -> int | None:
        """Return what may be spent now within the bound of the module docstring; None: no limit.

        `wall_ns` and `cost_ns` are those of steps not added yet.  HEADROOM_SHARE of the credit is kept for always-on
        costs that are not added yet, and at most what PAYBACK_NS earn is lent.
        """
        if not 0.0 < self.ratio_max < 1.0:
            return None
        lent_ns = (1.0 - HEADROOM_SHARE) * min(CREDIT_NS, self.ratio_max * PAYBACK_NS)
        allowed_ns = self.ratio_max * (self.wall_ns + wall_ns) + self.start_ns + lent_ns
        return int(allowed_ns) - self.cost_ns - cost_ns

    def wants_window(self, step: int) -> bool:
        """Return whether `step`, the next one, should be profiled."""
        return self.is_due(step) and self._can_pay()

    def is_due(self, step: int) -> bool:
        """Return whether `step` should be profiled if that is affordable."""
        if not self._turn.is_now(step):
            return False
        return self._requested or self._last_window is None or step - self._last_window >= self._interval_steps

    def next_turn(self, step: int) -> int:
        """Return the first step, from `step` on, that is this rank's turn."""
        return self._turn.next_from(step)

    def next_look(self, step: int) -> int:
        """Return the first step, from `step` on, that can be profiled unless a window is requested earlier."""
        if self._last_window is not None and not self._requested:
            step = max(step, self._last_window + self._interval_steps)
        return self._turn.next_from(step + self._steps_to_earn())

    def _steps_to_earn(self) -> int:
        """Return the least number of steps, at most an interval, until the next window is affordable."""
        if not self._recent or self._can_pay() or not 0.0 < self.ratio_max < 1.0:
            return 0
        missing_ns = self.cost_ns + self._predicted_ns() - self.ratio_max * self.wall_ns - self._credit_ns()
        steps = int(missing_ns / (self.ratio_max * max(1, median(self._recent))))
        return min(max(0, steps), self._interval_steps)

    def _can_pay(self) -> bool:
        if self.ratio_max >= 1.0 or self.ratio_max <= 0.0:
            return self.ratio_max >= 1.0
        if self.may_be_early and not self.windows and self._predicted_ns() <= self._early_ns:
            return True
        return self.cost_ns + self._predicted_ns() <= self.ratio_max * self.wall_ns + self._credit_ns()

    def _credit_ns(self) -> int:
        """Return the credit available now."""
        if not self._on_credit:
            return 0
        return self._limit_credit(CREDIT_STEPS, self._spare_ratio()) if self.windows else self._first_credit_ns()

    def _first_credit_ns(self) -> int:
        """Return the credit before the first window, which includes the cost of attaching.

        The always-on part is most expensive in the first steps and not representative.  So at least the share that
        `step_sampling` leaves for windows counts as left.
        """
        return self.start_ns + self._limit_credit(
            FIRST_CREDIT_STEPS, max(self._spare_ratio(), (1.0 - SHARE) * self.ratio_max)
        )

    def _limit_credit(self, steps: int, ratio: float) -> int:
        """Return what `steps` steps and PAYBACK_NS can earn at `ratio`, at most CREDIT_NS."""
        if not self._recent:
            return 0
        return min(max(0, CREDIT_NS - self.reserved_ns), int(ratio * min(PAYBACK_NS, steps * median(self._recent))))

    def _spare_ratio(self) -> float:
        """Return what the always-on part leaves of the ratio; only this earns a credit back."""
        going_on_ns = self.cost_ns - self._windows_ns - self.start_ns
        return max(0.0, self.ratio_max - going_on_ns / self.wall_ns) if self.wall_ns else self.ratio_max

    def _predicted_ns(self) -> int:
        if not self._prices:
            return self._expected_ns
        return int(PRICE_MARGIN * max(price_ns * self._growth(count) for price_ns, count in self._prices))

    def _growth(self, micro_batches: int) -> float:
        """Return a window's price now relative to its price when a step had `micro_batches`; it grows with the rows."""
        if not micro_batches or not self._micro_batches:
            return 1.0
        return FIXED_SHARE + (1.0 - FIXED_SHARE) * self._micro_batches / micro_batches


def early_ns(rank: int, world_size: int) -> int:
    """Return the allowed cost of the first window of `rank` as part of its attach.

    Windows of different turns fall into different steps, each of which delays all ranks, so their costs add up, to at
    most EARLY_NS.  Half of it is for the turn of rank 0, whose ledger the tuner uses.
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
        """Return the first of them that is not before `step`."""
        return self.first if step <= self.first else step + (self.first - step) % self.every


def turn_of(rank: int, world_size: int, *, warmup_steps: int, interval_steps: int) -> WindowTurn:
    """Return the turn of `rank`; all ranks must pass the same arguments except for `rank`."""
    turns = min(world_size, TURNS_MAX)
    retry = max(1, interval_steps // TRIES)
    if turns < 2:
        return WindowTurn(warmup_steps, retry)
    round_steps = TURN_STEPS * turns
    return WindowTurn(warmup_steps + TURN_STEPS * (rank % turns), -(-retry // round_steps) * round_steps)


_log = logging.getLogger(__name__)


class WindowAftermath:
    """Compares the steps after one rank's windows with those before."""

    def __init__(self) -> None:
        self._usual_ns: int | None = None
        self._after: list[int] = []
        self._sum_ns = 0
        self._charged_ns = 0
        self._windows = 0
        self.lasting_ratio: float | None = None
        """The ratio by which steps stay slower after the first window; None: they do not, or it is not known yet."""

    def window(self, usual_ns: int | None) -> None:
        """Start comparing after a window; steps before it took `usual_ns` (None: unknown)."""
        self._usual_ns = usual_ns
        self._after = []
        self._windows += 1

    def step(self, own_ns: int) -> int:
        """Add an unprofiled step, less pacecar's own time in it; return the cost to charge now."""
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
