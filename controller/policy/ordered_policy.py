"""Runs the user's policy under people's orders, after a trial of what an earlier run remembered.

A policy knows nothing of people or of other runs, and should not: it judges steps.  So it runs as a stage under this
one, which is a policy too and looks like one to the tuner:

    trial of the remembered setting (if there is one) -> the user's policy -> ...
        freeze      what is being tried is taken back, and nothing more is tried
        resume      tuning goes on, also of knobs that were set by hand
        set         all ranks turn to that value; the policy begins anew around it and leaves the knob alone
        rollback    back to the values that the job began with, then as freeze

An order is carried out as everything else: by all ranks at one boundary, or by none.  It is done when a step with those
values was seen, and refused when none comes.  What was kept by proof is remembered for the next run.  What a person set
is not, because it was not measured, and neither is anything that is proven on top of it.

Pure but for `memory` and an order's `answer`, which must not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Literal, Protocol

from pacecar.config import TuneConfig
from pacecar.formatting.dates import day_text
from pacecar.knobs import setting
from pacecar.records import Ledger, Verdict

from ..memory.knob_store import StoredKnobs
from ..observation import JobFacts, KnobSpace, Observation, Policy, TuningTurn, bounded
from .decision_records import Record
from .policy_sequence import PolicySequence
from .remembered_setting_trial import RememberedSettingTrial

__all__ = ["ORDER_STEPS_MAX", "Order", "OrderError", "OrderMemory", "OrderedPolicy"]

ORDER_STEPS_MAX = 128
"""Steps after which an order is given up.  It takes 4 to 16 steps to be agreed, and as many until rank 0 sees it; where
the ranks were calm, CALM_PERIOD more each, and it is counted from a step that was seen as long ago."""

ORDER_SEEN_MIN = 32
"""Observed steps that must have passed as well: of steps too short to be measured one by one only some are observed, a
few in a row."""

PACES_MAX = 64
"""Steps whose pace is kept, to be remembered with the knobs."""

PACES_MIN = 8
"""Fewer steps say nothing about a pace."""

NOT_BEGUN = "the tuner has not begun: the job's first steps are not over"

Action = Literal["freeze", "resume", "set", "rollback"]


class OrderError(ValueError):
    """The order cannot be carried out; the message is for whoever gave it."""


class OrderMemory(Protocol):
    """Where the best knobs of jobs like this one are kept.  No call waits."""

    def recall(self, began: Mapping[str, int]) -> StoredKnobs | None:
        """Return what is known of a job like this one that began with these values."""
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


class OrderedPolicy(Policy):
    """Runs what `make` gives, under orders and memory; see the module's docstring."""

    def __init__(self, config: TuneConfig, make: Callable[[], Policy], *, memory: OrderMemory | None = None) -> None:
        self._config = config
        self._make = make
        self._memory = memory
        self._mode: Literal["advise", "exact"] = "exact"
        self._spaces: tuple[KnobSpace, ...] = ()
        self._stages = PolicySequence(config)
        self._order: Order | None = None
        self._held: tuple[str | None, bool] = (None, False)
        self._frozen: str | None = None  # by whose order
        self._must_ask = False  # request the kept values, though the stage may not
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

    # --- the Policy protocol ------------------------------------------------------------------------

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, mode: Literal["advise", "exact"]) -> None:
        """Learn what can be turned; called once, before the first observation."""
        self._mode, self._spaces, self.over = mode, tuple(spaces), None
        self._stages.settle(facts, spaces, mode)
        self.began = self.kept
        entry = None if self._memory is None else self._memory.recall(self.began)
        if entry is not None and self._memory is not None:
            recollection = RememberedSettingTrial(self._config, entry.knobs, entry.gain_ratio, _told(entry))
            self._stages.start(recollection)
            if not recollection.is_over:
                self._remembered = entry
                self._memory.use(entry)
                return
            self._stages.stop("nothing that is remembered is possible here")
        self._stages.start(self._make())

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Pass it on; a freeze that a person ordered lasts longer."""
        self._held = (reason, is_brief)
        self._hold_stage()

    def advance(self, observations: Sequence[Observation]) -> tuple[TuningTurn | None, list[Record]]:
        """Take the steps since the last call; return the requested turn, if any, and records for people."""
        for step in observations:
            self._see(step)
        if self._order is not None and self._order.action != "freeze":
            asked = self._pursue(self._order)
            _, records = self._stages.advance([])
            return asked, records
        turn, records = self._stages.advance(observations)
        if self._order is not None:
            self._judge(self._order, self.kept)
        if any(isinstance(record, Verdict) and record.outcome == "kept" for record in records):
            self._remember()
        stage = self._stages.policy
        if isinstance(stage, RememberedSettingTrial) and stage.is_over:
            self._close_recollection(stage)
        if turn is None and self._must_ask and self._mode == "exact":
            turn = self._turn(self.kept)
        self._must_ask = False
        return turn, records

    def is_calm(self) -> bool:
        """Return what the stage says; False while an order is under way."""
        stage = self._stages.policy
        return self._order is None and not self._must_ask and (stage is None or stage.is_calm())

    def wants_window(self) -> bool:
        """Pass on."""
        stage = self._stages.policy
        return stage is not None and stage.wants_window()

    def finish(self, reason: str = "the job ended") -> list[Record]:
        """End: no more steps will come; close what is open, and remember what was kept."""
        self._stages.stop(reason)
        _, records = self._stages.advance([])
        self.over = reason
        if self._order is not None:
            self._end(self._order, "refused", f"{reason} first")
        self._remember()
        return records

    # --- what people ask ----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step that was seen; 0 before the first."""
        return 0 if self._last is None else self._last.step

    @property
    def kept(self) -> dict[str, int]:
        """The values to come back to."""
        return dict(self._stages.kept)

    def domains(self) -> dict[str, tuple[int, ...]]:
        """Return knob -> possible values, within the user's bounds, of the knobs that all ranks can turn now."""
        spaces = [bounded(space, self._config) for space in self._spaces if space.knob in self._stages.kept]
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
            if isinstance(self._stages.policy, RememberedSettingTrial):
                self._restart(self._frozen)
            self._hold_stage()
            self._must_ask = True
            return
        order.number = self._stages.number()
        self._was_changed_by_hand = True
        self._stages.stop(f"{order.action} {order.who}")
        if self._last is not None:
            values = order.values or self.began
            named = ", ".join(f"{knob} {setting(knob, value)}" for knob, value in sorted(values.items()))
            self._stages.report(f"{order.action} {order.who}: {named}, as soon as all ranks agree", self._last)

    def _check(self, order: Order) -> None:
        if self.over is not None:
            raise OrderError(self.over if self.over is NOT_BEGUN else f"nothing can be turned any more: {self.over}")
        if self._mode == "advise":
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
        said = self._stages.said
        froze_itself = was is None and self._held[0] is None and said is not None and said.state == "frozen"
        if self.by_hand or froze_itself:
            self.by_hand.clear()
            self._restart(f"resumed {order.who}")
        self._hold_stage()
        order.answer("done", "tuning goes on" if was is None else f"it was {was}; tuning goes on")

    def _pursue(self, order: Order) -> TuningTurn:
        """Request the order's values until they are seen in force, or it took too long."""
        wanted = {**self.kept, **(order.values if order.action == "set" else self.began)}
        wanted = {knob: value for knob, value in wanted.items() if knob in self._stages.kept}
        end = self._judge(order, wanted)
        if end == "done":
            self._stages.kept = dict(wanted)
            if order.action == "set":
                self.by_hand.update(order.values)
            else:
                self._frozen = f"rolled back {order.who}"
                self.by_hand.clear()
                if self._remembered is not None and self._memory is not None:
                    self._memory.doubt(self._remembered, self._frozen)
        if end is not None:
            self._restart("")
        return TuningTurn(order.number, wanted if end != "refused" else self.kept)

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
            self._must_ask = True
            return self._end(order, "refused", f"the ranks did not switch within {waited} steps")
        return None

    def _end(self, order: Order, end: Literal["done", "refused"], detail: str) -> Literal["done", "refused"]:
        self._order = None
        order.answer(end, detail)
        return end

    # --- stages and memory ------------------------------------------------------------------------------

    def _see(self, step: Observation) -> None:
        self._last = step
        self.steps += 1
        self.elapsed_ns += max(0, step.pace_ns)
        self._stages.see(step)
        if not step.profiled:
            self._paces.append((step.values, step.pace_ns))
        if step.exact and step.ledger is not None:
            self.ledger = step.ledger

    def _turn(self, values: Mapping[str, int]) -> TuningTurn:
        return TuningTurn(self._stages.number(), dict(values))

    def _restart(self, reason: str) -> None:
        self._stages.stop(reason)
        self._stages.start(self._make(), leave=self.by_hand)
        self._hold_stage()

    def _hold_stage(self) -> None:
        if self._stages.policy is not None:
            reason, is_brief = self._held if self._frozen is None else (self._frozen, False)
            self._stages.policy.hold(reason, is_brief=is_brief)

    def _close_recollection(self, stage: RememberedSettingTrial) -> None:
        entry = self._remembered
        if entry is not None and self._memory is not None and stage.outcome in ("rolled_back", "barred"):
            self._memory.doubt(entry, stage.detail)
        self._restart("")

    def _remember(self) -> None:
        """Remember what was kept, unless a person's order changed values before."""
        remaining, kept = self._stages.remaining, self.kept
        changed = {knob: value for knob, value in kept.items() if value != self.began.get(knob)}
        if self._memory is None or self._was_changed_by_hand or remaining is None or remaining >= 1 or not changed:
            return
        paces = [pace for values, pace in self._paces if all(values.get(k) == v for k, v in kept.items())]
        pace_ns = round(median(paces)) if len(paces) >= PACES_MIN else None
        self._memory.keep(changed, 1 - remaining, pace_ns, self.steps)


def _told(entry: StoredKnobs) -> str:
    day = day_text(entry.saved_wall_ns)
    return f"it saved {entry.gain_ratio * 100:.1f} % in {entry.job} on {day}, after {entry.steps} steps"
