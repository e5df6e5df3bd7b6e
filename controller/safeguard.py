"""Who takes compression back?  A policy around the policy: it sees loss and gradients, the other sees time.

A policy keeps what is faster.  That is no reason to keep what breaks the training, so this one stands before it and has
the last word about the knob "compression": when `divergence` raises the alarm, all ranks turn to "none" as soon as they
agree (5 to 8 steps, like every switch; not a trial, so a freeze keeps it), and the knob is gone from what the policy
sees, as a knob that a rank cannot turn any more.  Its open trial ends, and it goes on with the others.

It is not given back in this run: a second divergence would cost more than compression saves.

Pure but for `signals`, which must not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from pacecar.controller.compression import NONE, choice_of
from pacecar.controller.divergence import Alarm, Divergence, Signals
from pacecar.controller.observation import Facts, KnobSpace, Observation, Policy, Turn
from pacecar.controller.scribe import Record
from pacecar.records import Decision, Verdict

__all__ = ["KNOB", "Safeguard"]

KNOB = "compression"

STEPS_MAX = 256
"""Signals wait for the observation of their step, which says the compression that it ran under, and the other way."""


class Safeguard(Policy):
    """Runs `policy` and takes compression back when `signals` leave their band; see the module's docstring."""

    def __init__(self, policy: Policy, signals: Callable[[], Sequence[Signals]]) -> None:
        self._policy = policy
        self._signals = signals
        self._divergence = Divergence()
        self._waiting: deque[Signals] = deque(maxlen=STEPS_MAX)
        self._choices: dict[int, int] = {}
        self._alarm: Alarm | None = None
        self._job = ""
        self._decision = 0
        self._turned = 0
        self._wanted: Turn | None = None
        self._last: Observation | None = None
        self._is_live = False

    @property
    def alarm(self) -> Alarm | None:
        """Why compression was taken back, or None."""
        return self._alarm

    def begin(self, facts: Facts, spaces: Sequence[KnobSpace], *, mode: Literal["advise", "exact"]) -> None:
        """Learn what can be turned."""
        self._job = facts.job
        self._is_live = mode == "exact" and any(space.knob == KNOB for space in spaces)
        self._policy.begin(facts, spaces, mode=mode)

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Pass on: time is not judged.  Loss and gradients are, as long as steps come."""
        self._policy.hold(reason, is_brief=is_brief)

    def finish(self, reason: str = "the job ended") -> list[Record]:
        """Pass on."""
        return self._policy.finish(reason)

    def advance(self, observations: Sequence[Observation]) -> tuple[Turn | None, list[Record]]:
        """Let the policy judge the steps, unless they show that compression must go."""
        if observations:
            self._last = observations[-1]
        records: list[Record] = []
        if self._is_live and self._alarm is None:
            self._alarm = self._watch(observations)
            if self._alarm is not None:
                records.append(self._verdict(self._alarm))
        if self._alarm is None:
            turn, said = self._policy.advance(observations)
            self._note(said)
            return turn, said
        if observations:
            stripped = [replace(o, values={k: v for k, v in o.values.items() if k != KNOB}) for o in observations]
            turn, said = self._policy.advance(stripped)
            records += said
            self._wish(turn)
        return self._wanted, records

    def _watch(self, observations: Sequence[Observation]) -> Alarm | None:
        """Bring signals and the compression of their step together, in step order."""
        for observation in observations:
            if KNOB in observation.values:
                self._choices[observation.step] = observation.values[KNOB]
        self._waiting.extend(self._signals())
        newest = max(self._choices, default=0)
        while self._waiting and self._waiting[0].step <= newest:
            signals = self._waiting.popleft()
            choice = self._choices.get(signals.step)  # None where a rank did not measure the step
            if choice is None:
                continue
            alarm = self._divergence.observe(signals, choice_of(choice))
            if alarm is not None:
                return alarm
        oldest = self._waiting[0].step if self._waiting else newest
        for step in [step for step in self._choices if step < oldest - STEPS_MAX or step < newest - STEPS_MAX]:
            del self._choices[step]
        return None

    def _wish(self, turn: Turn | None) -> None:
        """Ask for no compression until it is seen, beside whatever the policy wishes meanwhile."""
        assert self._last is not None, "an alarm follows from observations"
        present = self._last.values
        is_back = present.get(KNOB, NONE) == NONE
        if is_back:
            self._wanted = None if turn is None else replace(turn, values={**turn.values, KNOB: NONE})
            return
        # Kept, not tried, so that a freeze does not undo it: a trial that the policy wishes for has to wait.
        others = present if turn is None or turn.is_trial else turn.values
        self._wanted = Turn(self._turned or self._decision, {**others, KNOB: NONE}, is_trial=False)

    def _note(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Decision):
                self._decision = record.decision
                if record.knob == KNOB:
                    self._turned = record.decision

    def _verdict(self, alarm: Alarm) -> Verdict:
        assert self._last is not None, "an alarm follows from observations"
        return Verdict(
            job=self._job,
            decision=self._turned,
            knob=KNOB,
            outcome="rolled_back",
            step=self._last.step,
            wall_ns=self._last.wall_ns,
            measured_gain_ratio=None,
            gain_low=None,
            gain_high=None,
            evidence=None,
            trial_steps=0,
            exploration_ns=0,
            reason=f"taken back: {alarm.reason} (step {alarm.step})",
        )
