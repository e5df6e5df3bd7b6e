"""Carries out people's orders to the tuner, and remembers for the next run what the policy kept.

    freeze      what is being tried is taken back, and nothing more is tried
    resume      tuning goes on, also of knobs that were set by hand
    set         all ranks turn to that value; the policy starts over around it and leaves the knob alone
    rollback    back to the values that the job began with, then as freeze

An order takes effect like any proposal: on all ranks at one boundary, or on none.  It is done when a step with its
values was seen, and refused when none comes.  What the policy proved is remembered for the next run.  What a person set
was not measured, so it is not remembered, and neither is anything that is proven on top of it.

The tuner asks `pursue` before the policy and shows `review` what the policy proposed.  Pure but for `memory` and an
order's `answer`, which must not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal, Protocol

from pacecar.config import TuneConfig
from pacecar.formatting.dates import day_text
from pacecar.knobs import setting
from pacecar.records import Ledger, TunerStatus, Verdict

from ..memory.knob_store import StoredKnobs
from ..observation import JobFacts, KnobSpace, Observation, Policy, Proposal, Record, RememberedSetting, bounded

__all__ = ["ORDER_STEPS_MAX", "HandOrders", "Order", "OrderError", "OrderMemory"]

ORDER_STEPS_MAX = 128
"""Give an order up after this many steps.  Agreeing takes 4 to 16 steps, and as many until rank 0 sees it, plus
CALM_PERIOD each if the ranks were calm."""

ORDER_SEEN_MIN = 32
"""At least this many observed steps must pass as well: of very short steps only some are observed, a few in a row."""

PACES_MAX = 64
"""Steps whose pace is kept, to be remembered with the knobs."""

PACES_MIN = 8
"""With fewer steps no pace is remembered."""

NOT_BEGUN = "the tuner has not begun: the job's first steps are not over"

Action = Literal["freeze", "resume", "set", "rollback"]


class OrderError(ValueError):
    """The order cannot be carried out; the message is for the person who gave it."""


class OrderMemory(Protocol):
    """Keeps the best knobs of jobs like this one.  No call waits."""

    def recall(self, began: Mapping[str, int]) -> StoredKnobs | None:
        """Return what is known about a job like this one that began with these values."""
        ...

    def keep(self, knobs: Mapping[str, int], gain_ratio: float, pace_ns: int | None, steps: int) -> None:
        """Remember these as the best."""
        ...

    def use(self, entry: StoredKnobs) -> None:
        """Note that `entry` is tried."""
        ...

    def doubt(self, entry: StoredKnobs, why: str) -> None:
        """Note that `entry` did not hold."""
        ...


class Order:
    """A person's order; `answer` is called with "accepted" at most once, and then with "done" or "refused" once."""

    def __init__(
        self,
        action: Action,
        values: Mapping[str, int],
        who: str,
        answer: Callable[[Literal["accepted", "done", "refused"], str], None],
    ) -> None:
        self.action = action
        self.values = dict(values)
        self.who = who
        self.answer = answer
        self.since_step = 0
        self.since_seen = 0
        self.number = 0


class HandOrders:
    """The orders over a policy, one at a time; `memory` is what earlier runs kept, None for none."""

    _policy: Policy  # from `begin` on

    def __init__(self, config: TuneConfig, *, memory: OrderMemory | None = None) -> None:
        self._config = config
        self._memory = memory
        self._facts = JobFacts(job="", world_size=1)
        self._turns_knobs = True
        self._spaces: tuple[KnobSpace, ...] = ()
        self._kept: dict[str, int] = {}
        self._records: list[Record] = []  # to be passed on with the next ones
        self._status: TunerStatus | None = None
        self._remaining_ratio: float | None = None  # of step time, after all gains that were kept; None: none was
        self._counted: tuple[int, float | None] | None = None
        self._order: Order | None = None
        self._held: tuple[str | None, bool] = (None, False)
        self._frozen: str | None = None  # by whose order
        self._must_request = False  # request the kept values, though the policy may not
        self._last: Observation | None = None
        self._paces: deque[tuple[dict[str, int], int]] = deque(maxlen=PACES_MAX)
        self._remembered: StoredKnobs | None = None
        self._was_changed_by_hand = False
        self.began: dict[str, int] = {}
        self.by_hand: set[str] = set()
        self.over: str | None = NOT_BEGUN
        self.ledger: Ledger | None = None
        self.elapsed_ns = 0
        self.steps = 0

    # --- what the tuner calls -----------------------------------------------------------------------

    def begin(self, policy: Policy, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Begin `policy`; the setting that an earlier run kept is its first candidate."""
        self._policy = policy
        self._facts, self._spaces, self._turns_knobs, self.over = facts, tuple(spaces), turns_knobs, None
        self._kept = {space.knob: space.value for space in spaces}
        self.began = dict(self._kept)
        entry = None if self._memory is None else self._memory.recall(self.began)
        if entry is not None and self._memory is not None:
            possible = self.domains()
            knobs = {k: v for k, v in entry.knobs.items() if v in possible.get(k, ()) and v != self._kept[k]}
            if knobs:
                self._remembered = entry
                self._memory.use(entry)
                facts = replace(facts, remembered=RememberedSetting(knobs, entry.gain_ratio, _origin(entry)))
        self._policy.begin(facts, spaces, turns_knobs=turns_knobs)

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Hold the policy; a freeze that a person ordered lasts longer."""
        self._held = (reason, is_brief)
        self._hold_policy()

    def pursue(self, observations: Sequence[Observation]) -> Proposal | None:
        """Take the steps since the last call; return the proposal of the order under way, if any."""
        for step in observations:
            self._observe(step)
        if self._order is None or self._order.action == "freeze":
            return None
        return self._carry_on(self._order)

    def review(self, proposal: Proposal | None, records: Sequence[Record]) -> Proposal | None:
        """Take what the policy proposed and recorded after the steps of `pursue`; return what is to be proposed."""
        if proposal is not None:
            values = {**self._kept, **{k: v for k, v in proposal.values.items() if k in self._kept}}
            if not proposal.is_trial:
                self._kept = dict(values)
            proposal = replace(proposal, values=values)
        self._keep(records)
        if self._order is not None:
            self._judge(self._order, self._kept)
        if any(isinstance(record, Verdict) and record.outcome == "kept" for record in records):
            self._remember()
        if self._remembered is not None and self._memory is not None:
            disproved = self._policy.disproved()
            if disproved is not None:
                self._memory.doubt(self._remembered, disproved)
        if proposal is None and self._must_request and self._turns_knobs:
            proposal = Proposal(self._policy.number(), dict(self._kept))
        self._must_request = False
        return proposal

    def drain(self) -> list[Record]:
        """Return the policy's records, and those of orders, since the last call."""
        records, self._records = self._records, []
        return records

    def is_calm(self) -> bool:
        """Return whether no order is under way."""
        return self._order is None and not self._must_request

    def finish(self, reason: str) -> None:
        """End the policy, refuse an order under way, and remember what was kept."""
        self._keep(self._policy.finish(reason))
        self.over = reason
        if self._order is not None:
            self._end(self._order, "refused", f"{reason} first")
        self._remember()

    # --- what people ask ----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step that was seen; 0 before the first."""
        return 0 if self._last is None else self._last.step

    def domains(self) -> dict[str, tuple[int, ...]]:
        """Return knob -> possible values, within the user's bounds, of the knobs that all ranks can turn now."""
        spaces = [bounded(space, self._config) for space in self._spaces if space.knob in self._kept]
        return {space.knob: space.domain for space in spaces if space is not None}

    def accept(self, order: Order) -> None:
        """Begin to carry `order` out.

        Raises:
            OrderError: it cannot be carried out; nothing was done, and `answer` was not called.
        """
        self._check(order)
        order.since_step, order.since_seen = self.step, self.steps
        if order.action == "resume":
            self._resume(order)
            return
        self._order = order
        order.answer("accepted", "all ranks turn at one of the next steps")
        if order.action == "freeze":
            self._frozen = f"frozen {order.who}"
            self._hold_policy()
            self._must_request = True
            return
        order.number = self._policy.number()
        self._was_changed_by_hand = True
        self._keep(self._policy.finish(f"{order.action} {order.who}"))
        if self._last is not None:
            values = order.values or self.began
            named = ", ".join(f"{knob} {setting(knob, value)}" for knob, value in sorted(values.items()))
            self._report(f"{order.action} {order.who}: {named}, as soon as all ranks agree", self._last)

    def _check(self, order: Order) -> None:
        if self.over is not None:
            raise OrderError(self.over if self.over is NOT_BEGUN else f"nothing can be turned: {self.over}")
        if not self._turns_knobs:
            raise OrderError("this job is tuned in mode advise: nothing is turned, and nothing is tried")
        if self._order is not None:
            raise OrderError(f"{self._order.action!r} is still being carried out")
        domains = self.domains()
        for knob, value in order.values.items():
            if knob not in domains:
                there = ", ".join(sorted(domains)) or "none"
                raise OrderError(f"{knob} cannot be turned in this job; knobs that can: {there}")
            if value not in domains[knob]:
                allowed = ", ".join(setting(knob, other) for other in domains[knob])
                raise OrderError(f"{knob} {setting(knob, value)} is not possible here; possible: {allowed}")

    # --- orders under way -----------------------------------------------------------------------------

    def _resume(self, order: Order) -> None:
        was, self._frozen = self._frozen, None
        status = self._status
        froze_itself = was is None and self._held[0] is None and status is not None and status.state == "frozen"
        if self.by_hand or froze_itself:
            self.by_hand.clear()
            self._keep(self._policy.finish(f"resumed {order.who}"))
            self._start_over()
        self._hold_policy()
        order.answer("done", "tuning goes on" if was is None else f"it was {was}; tuning goes on")

    def _carry_on(self, order: Order) -> Proposal:
        """Request the order's values until they are seen in force, or it took too long."""
        wanted = {**self._kept, **(order.values if order.action == "set" else self.began)}
        wanted = {knob: value for knob, value in wanted.items() if knob in self._kept}
        end = self._judge(order, wanted)
        if end == "done":
            self._kept = dict(wanted)
            if order.action == "set":
                self.by_hand.update(order.values)
            else:
                self._frozen = f"rolled back {order.who}"
                self.by_hand.clear()
                if self._remembered is not None and self._memory is not None:
                    self._memory.doubt(self._remembered, self._frozen)
        if end is not None:
            self._start_over()
        return Proposal(order.number, wanted if end != "refused" else dict(self._kept))

    def _judge(self, order: Order, wanted: Mapping[str, int]) -> Literal["done", "refused"] | None:
        """End `order` if `wanted` is in force, or will not be."""
        step = self._last
        if step is None or step.step <= order.since_step:
            return None
        lost = sorted(order.values.keys() - step.values.keys())
        if lost:
            return self._end(order, "refused", f"a rank could not apply {', '.join(lost)}, which stays as it was")
        if all(step.values.get(knob) == value for knob, value in wanted.items()):
            named = order.values if order.action == "set" else wanted
            return self._end(order, "done", ", ".join(f"{k} {setting(k, named[k])}" for k in sorted(named)))
        waited, seen = step.step - order.since_step, self.steps - order.since_seen
        if waited > ORDER_STEPS_MAX and seen >= ORDER_SEEN_MIN:
            self._must_request = True
            what = ", ".join(sorted(order.values)) or "what was in force"
            reason = f"one of them cannot take {what} yet, or is silent"
            return self._end(order, "refused", f"the ranks did not switch within {waited} steps: {reason}")
        return None

    def _end(self, order: Order, end: Literal["done", "refused"], detail: str) -> Literal["done", "refused"]:
        self._order = None
        order.answer(end, detail)
        return end

    # --- the policy and memory ------------------------------------------------------------------------

    def _observe(self, step: Observation) -> None:
        self._last = step
        self.steps += 1
        self.elapsed_ns += max(0, step.pace_ns)
        if any(knob not in step.values for knob in self._kept):  # it can no longer be turned
            self._kept = {knob: value for knob, value in self._kept.items() if knob in step.values}
        if not step.profiled:
            self._paces.append((step.values, step.pace_ns))
        if step.exact and step.ledger is not None:
            self.ledger = step.ledger

    def _start_over(self) -> None:
        """Let the policy search from the kept values; it leaves alone what was set by hand."""
        free = [s for s in self._spaces if s.knob in self._kept and s.knob not in self.by_hand]
        spaces = [replace(space, value=self._kept[space.knob]) for space in free]
        self._policy.begin(self._facts, spaces, turns_knobs=self._turns_knobs)
        self._hold_policy()

    def _hold_policy(self) -> None:
        reason, is_brief = self._held if self._frozen is None else (self._frozen, False)
        self._policy.hold(reason, is_brief=is_brief)

    def _keep(self, records: Sequence[Record]) -> None:
        """Keep records for `drain`, and what they say of the policy."""
        self._records += records
        for record in records:
            if isinstance(record, TunerStatus):
                self._status = record
            elif isinstance(record, Verdict) and record.outcome == "kept":
                self._add_gain(record)

    def _add_gain(self, verdict: Verdict) -> None:
        gain, trial = verdict.measured_gain_ratio, (verdict.step, verdict.evidence)
        if gain is None or self._counted == trial:  # one trial may prove several knobs together
            return
        self._counted = trial
        self._remaining_ratio = (1.0 if self._remaining_ratio is None else self._remaining_ratio) * (1 - gain)

    def _report(self, detail: str, step: Observation) -> None:
        spent, before = self._policy.spent_ns, self._status
        status = TunerStatus(
            job=self._facts.job,
            rank=0,
            state="screening",
            detail=detail,
            step=step.step,
            wall_ns=step.wall_ns,
            exploration_ns=round(spent) if spent is not None else 0 if before is None else before.exploration_ns,
            trials=0 if before is None else before.trials,
        )
        self._keep([status])

    def _remember(self) -> None:
        """Remember what was kept, unless a person's order changed values before."""
        remaining, kept = self._remaining_ratio, self._kept
        changed = {knob: value for knob, value in kept.items() if value != self.began.get(knob)}
        if self._memory is None or self._was_changed_by_hand or remaining is None or remaining >= 1 or not changed:
            return
        paces = [pace for values, pace in self._paces if all(values.get(k) == v for k, v in kept.items())]
        pace_ns = round(median(paces)) if len(paces) >= PACES_MIN else None
        self._memory.keep(changed, 1 - remaining, pace_ns, self.steps)


def _origin(entry: StoredKnobs) -> str:
    day = day_text(entry.saved_wall_ns)
    return f"it saved {entry.gain_ratio * 100:.1f} % in {entry.job} on {day}, after {entry.steps} steps"
