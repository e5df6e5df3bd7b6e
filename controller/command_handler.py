"""Executes people's commands to the tuner on rank 0, and reports the tuner's state to whoever asks.

Whoever asks wants a summary and not the series: what the tuner does now and why, what is in force, what was tried, what
it was expected to save and what it saved, what all of it cost.  All of that passes by as records anyway, so the handler
keeps the last of them and reports them on demand.  Orders go to the `OrderedPolicy`; each ends as a record of its own.

Commands arrive on the training thread, between two steps, so nothing here may wait: no file is touched and no rank
asked.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

from torch import nn

from pacecar.clock import Clock, SystemClock
from pacecar.config import TuneConfig
from pacecar.knobs import allows, by_name, read_setting
from pacecar.profiler.hook.daemon_messages import MessageRefusal
from pacecar.records import (
    Answer,
    Command,
    Decision,
    JobHello,
    JobRecord,
    Knobs,
    KnobValue,
    TunerChange,
    TunerOrder,
    TunerReport,
    TunerStatus,
    Verdict,
)
from pacecar.records.commands import ORDERS, REPORTED_CHANGES_MAX, REPORTED_ORDERS_MAX
from pacecar.records.judged_decision import by_number, pair

from .memory.job_fingerprint import fingerprint
from .memory.store_thread import JobMemory, StoreThread, store_thread_for
from .policy.ordered_policy import Action, Order, OrderedPolicy, OrderError
from .policy.registry import make_policy
from .restart_advice import advise

__all__ = ["CommandHandler", "make_command_handler", "tune_is_off"]

DETAIL_CHARACTERS_MAX = 600
"""Most characters of a reason in a report: the frame has room for 16 such reasons, and a terminal for few."""

Reply = Callable[[Literal["accepted", "done", "refused"], str], None]

_log = logging.getLogger(__name__)


class CommandHandler:
    """Takes the commands called "tune" of one job, on its rank 0.

    `reply` sends an answer without waiting, `emit` a record.  `knobs`, `node` and `refused` are called for each report.
    """

    def __init__(
        self,
        hello: JobHello,
        config: TuneConfig,
        overseer: OrderedPolicy,
        *,
        reply: Callable[[Answer], None],
        emit: Callable[[JobRecord], None],
        clock: Clock,
        keeper: StoreThread | None = None,
    ) -> None:
        self.overseer = overseer
        self._hello = hello
        self._config = config
        self._reply = reply
        self._emit = emit
        self._clock = clock
        self._store_thread = keeper
        self._status: TunerStatus | None = None
        self._decisions: deque[Decision] = deque(maxlen=REPORTED_CHANGES_MAX)
        self._verdicts: deque[Verdict] = deque(maxlen=REPORTED_CHANGES_MAX)
        self._orders: deque[TunerOrder] = deque(maxlen=REPORTED_ORDERS_MAX)
        self._advised: dict[str, Decision] = {}
        self.knobs: Callable[[], Knobs] = Knobs
        self.node: Callable[[], tuple[str, ...]] = tuple
        self.refused: Callable[[], Mapping[str, str]] = dict

    def emit(self, record: JobRecord) -> None:
        """Pass a record of the tuner on, and keep it for reports."""
        match record:
            case TunerStatus():
                self._status = record
            case Decision():
                self._decisions.append(record)
                if record.kind == "advise":
                    self._advised[record.knob] = record
            case Verdict():
                self._verdicts.append(record)
            case TunerOrder():
                self._orders.append(record)
        self._emit(record)

    def act(self, command: Command, reply: Reply) -> None:
        """Execute a command called "tune".

        Raises:
            MessageRefusal: it is not such a command, or it cannot be executed.
        """
        what = command.arguments.get("order")
        if what == "status":
            answer = Answer(
                job=self._hello.job,
                rank=self._hello.rank,
                number=command.number,
                state="done",
                detail="",
                report=self.report(),
            )
            self._reply(answer)
        elif what in ORDERS:
            self._order(what, command, reply)  # type: ignore[arg-type]  # one of ORDERS
        else:
            raise MessageRefusal(f"a tuner takes status, {', '.join(ORDERS)}, not {str(what)[:40]!r}")

    def report(self) -> TunerReport:
        """Return the tuner as it is now."""
        status, overseer, began = self._status, self.overseer, self.overseer.began
        return TunerReport(
            mode=self._config.mode,
            policy=self._config.policy,
            state="off" if status is None else status.state,
            detail="it has said nothing yet" if status is None else status.detail[:DETAIL_CHARACTERS_MAX],
            step=overseer.step,
            knobs=_whole(self.knobs().values),
            began=dict(began),
            domains=overseer.domains(),
            by_hand=tuple(sorted(overseer.by_hand)),
            refused={knob: reason[:DETAIL_CHARACTERS_MAX] for knob, reason in self.refused().items()},
            trials=0 if status is None else status.trials,
            exploration_ns=0 if status is None else status.exploration_ns,
            elapsed_ns=overseer.elapsed_ns,
            budget_ratio=self._config.exploration_budget,
            changes=self._changes(),
            orders=tuple(self._orders),
            advice=tuple(sentence[:DETAIL_CHARACTERS_MAX] for sentence in self.advice()),
            node=tuple(sentence[:DETAIL_CHARACTERS_MAX] for sentence in self.node()),
        )

    def advice(self) -> tuple[str, ...]:
        """Return what would be turned, and what needs a restart, in sentences."""
        return advise(
            mode=self._config.mode,
            ledger=self.overseer.ledger,
            decisions=tuple(self._advised.values()),
            refused=self.refused(),
            backend=self._hello.backend,
            device=self._hello.device,
        )

    def close(self) -> None:
        """Write what is to be remembered, and report what is advised.  Harmless when repeated."""
        if self._store_thread is not None:
            self._store_thread.close()
        sentences = self.advice()
        if self._config.mode == "advise" and sentences and self._status is not None:
            detail = "; ".join(sentences)[:DETAIL_CHARACTERS_MAX]
            if detail != self._status.detail:
                _log.info("pacecar advises: %s", "\n  ".join(sentences))
                self.emit(
                    TunerStatus(
                        job=self._hello.job,
                        rank=self._hello.rank,
                        state="advising",
                        detail=detail,
                        step=self._status.step,
                        wall_ns=self._clock.wall_ns(),
                        exploration_ns=self._status.exploration_ns,
                        trials=self._status.trials,
                    )
                )

    # --- orders ---------------------------------------------------------------------------------------

    def _order(self, action: Action, command: Command, reply: Reply) -> None:
        values: dict[str, int] = {}

        def answer(state: Literal["accepted", "done", "refused"], detail: str) -> None:
            if state != "accepted":
                self._note(action, state, command.uid, values, detail)
            reply(state, detail)

        try:
            if action == "set":
                values.update(self._value(command.arguments))
            who = "by hand" if command.uid is None else f"by hand (uid {command.uid})"
            self.overseer.take(Order(action, values, who, answer))
        except OrderError as error:
            answer("refused", self._because(str(error)))

    def _value(self, arguments: Mapping[str, KnobValue]) -> dict[str, int]:
        knob, text = str(arguments.get("knob", "")), str(arguments.get("value", ""))
        try:
            value = read_setting(knob, text)
        except ValueError as error:
            raise OrderError(str(error)) from error
        if not allows(self._config.mode, knob):
            kind = by_name[knob].knob_class
            raise OrderError(f"{knob} is {kind}, and this job is tuned in mode {self._config.mode}")
        reason = self.refused().get(knob)
        if reason is not None:
            raise OrderError(f"{knob} cannot be turned in this job: {reason}")
        return {knob: value}

    def _because(self, refusal: str) -> str:
        """Return the tuner's own status where it ended before the policy saw a step; else `refusal`."""
        if self.overseer.steps == 0 and self._status is not None and self._status.state in ("off", "frozen"):
            return f"{self._status.state}: {self._status.detail}"
        return refusal

    def _note(
        self,
        action: Action,
        outcome: Literal["done", "refused"],
        uid: int | None,
        values: Mapping[str, int],
        detail: str,
    ) -> None:
        self.emit(
            TunerOrder(
                job=self._hello.job,
                action=action,
                outcome=outcome,
                uid=uid,
                values=dict(values),
                step=self.overseer.step,
                wall_ns=self._clock.wall_ns(),
                detail=detail,
            )
        )

    def _changes(self) -> tuple[TunerChange, ...]:
        judged = pair(by_number(self._decisions), by_number(self._verdicts))
        return tuple(
            TunerChange(
                decision=decision.decision,
                kind=decision.kind,
                knob=decision.knob,
                from_value=int(decision.from_value),
                to_value=int(decision.to_value),
                step=decision.step,
                expected_gain_ratio=decision.expected_gain_ratio,
                measured_gain_ratio=one.measured_gain_ratio,
                outcome=one.outcome,
                reason=one.reason[:DETAIL_CHARACTERS_MAX],
            )
            for one in judged.values()
            if (decision := one.decision) is not None
        )


def make_command_handler(
    model: nn.Module,
    hello: JobHello,
    config: TuneConfig,
    *,
    reply: Callable[[Answer], None],
    emit: Callable[[JobRecord], None],
) -> CommandHandler:
    """Return the command handler of a job's rank 0, with an OrderedPolicy (`overseer`) around the user's policy.

    Only what pacecar's own policy keeps is proven, so only that is remembered.
    """
    clock = SystemClock()
    keeper = store_thread_for(config.knobs_file) if config.remember and config.policy == "pacecar" else None
    memory: JobMemory | None = None
    if keeper is not None:
        keeper.start()
        memory = JobMemory(keeper, fingerprint(model, hello), hello, clock)
    overseer = OrderedPolicy(config, lambda: make_policy(config), memory=memory)
    return CommandHandler(hello, config, overseer, reply=reply, emit=emit, clock=clock, keeper=keeper)


def tune_is_off(command: Command, reply: Reply) -> None:
    """Refuse a command to a job that is not tuned."""
    raise MessageRefusal('this job is not tuned: tune="off"')


def _whole(values: Mapping[str, KnobValue]) -> dict[str, int]:
    return {knob: value for knob, value in values.items() if isinstance(value, int)}
