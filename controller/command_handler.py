"""Executes people's commands to the tuner on rank 0, and reports the tuner's state.

A report comes from the tuner, its orders, and the records that passed by (`status_reporter`).  Orders go to
`HandOrders`; each ends as a record.

Commands arrive on the training thread between two steps, so nothing here may wait: no rank is asked, and the only files
read are three that the kernel makes from memory (`NodeMonitor.is_crowded`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Literal

from torch import nn

from pacecar.clock import Clock, SystemClock
from pacecar.config import TuneConfig
from pacecar.knobs import allows, by_name, read_setting
from pacecar.profiler.hook.commands.daemon_messages import MessageRefusal, Reply
from pacecar.records import (
    Answer,
    Command,
    JobHello,
    KnobValue,
    TunerOrder,
    TunerReport,
    TunerStatus,
)
from pacecar.records.commands import ORDERS

from .guards.node_monitor import NodeMonitor
from .memory.job_fingerprint import fingerprint
from .memory.store_thread import JobMemory, StoreThread, store_thread_for
from .memory_advice import TrainingMemory
from .observation import Policy
from .policy.hand_orders import Action, HandOrders, Order, OrderError
from .policy.tuning_policy import make_policy
from .restart_advice import advise
from .status_reporter import DETAIL_CHARACTERS_MAX, StatusReporter
from .tuner import Tuner

__all__ = ["CommandHandler", "make_policy_and_orders", "tune_is_off"]

_log = logging.getLogger(__name__)


class CommandHandler:
    """Executes the commands called "tune" of one job, on its rank 0; `reply` sends an answer without waiting.

    `node` describes this rank's node in reports; None if it is not monitored.  `memory` reads what this rank holds.
    """

    def __init__(
        self,
        hello: JobHello,
        config: TuneConfig,
        orders: HandOrders,
        tuner: Tuner,
        reporter: StatusReporter,
        *,
        reply: Callable[[Answer], None],
        node: NodeMonitor | None = None,
        memory: Callable[[], TrainingMemory] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._orders = orders
        self._tuner = tuner
        self._reporter = reporter
        self._hello = hello
        self._config = config
        self._reply = reply
        self._node = node
        self._memory = memory
        self._clock = clock or SystemClock()

    def act(self, command: Command, reply: Reply) -> None:
        """Execute a command called "tune".

        Raises:
            MessageRefusal: the command is unknown or cannot be executed.
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
            self._accept(what, command, reply)  # type: ignore[arg-type]  # one of ORDERS
        else:
            raise MessageRefusal(f"a tuner takes status, {', '.join(ORDERS)}, not {str(what)[:40]!r}")

    def report(self) -> TunerReport:
        """Return the tuner as it is now."""
        status, orders, began = self._reporter.status, self._orders, self._orders.began
        node = () if self._node is None else self._node.describe()
        return TunerReport(
            mode=self._config.mode,
            policy=self._config.policy,
            state="off" if status is None else status.state,
            detail="no status yet" if status is None else status.detail[:DETAIL_CHARACTERS_MAX],
            step=orders.step,
            knobs=_integers(self._tuner.knobs.values),
            began=dict(began),
            domains=orders.domains(),
            by_hand=tuple(sorted(orders.by_hand)),
            refused={knob: reason[:DETAIL_CHARACTERS_MAX] for knob, reason in self._tuner.refused.items()},
            trials=0 if status is None else status.trials,
            exploration_ns=0 if status is None else status.exploration_ns,
            elapsed_ns=orders.elapsed_ns,
            budget_ratio=self._config.exploration_budget,
            changes=self._reporter.changes(),
            orders=self._reporter.orders,
            advice=tuple(sentence[:DETAIL_CHARACTERS_MAX] for sentence in self.advice()),
            node=tuple(sentence[:DETAIL_CHARACTERS_MAX] for sentence in node),
        )

    def advice(self) -> tuple[str, ...]:
        """Return what the tuner would turn, and what needs a restart, in sentences."""
        return advise(
            mode=self._config.mode,
            ledger=self._orders.ledger,
            decisions=tuple(self._reporter.advised.values()),
            refused=self._tuner.refused,
            backend=self._hello.backend,
            device=self._hello.device,
            is_crowded=self._node is not None and self._node.is_crowded(),
            memory=self._held(),
        )

    def _held(self) -> TrainingMemory | None:
        try:
            return None if self._memory is None else self._memory()
        except Exception:  # noqa: BLE001  a model's own tensors or optimizer may raise; the other advice stands
            _log.debug("pacecar: what this rank holds cannot be read", exc_info=True)
            return None

    def close(self) -> None:
        """Report the advice of mode advise.  Harmless when repeated."""
        sentences, status = self.advice(), self._reporter.status
        if self._config.mode == "advise" and sentences and status is not None:
            detail = "; ".join(sentences)[:DETAIL_CHARACTERS_MAX]
            if detail != status.detail:
                _log.info("pacecar advises: %s", "\n  ".join(sentences))
                self._reporter.emit(
                    TunerStatus(
                        job=self._hello.job,
                        rank=self._hello.rank,
                        state="advising",
                        detail=detail,
                        step=status.step,
                        wall_ns=self._clock.wall_ns(),
                        exploration_ns=status.exploration_ns,
                        trials=status.trials,
                    )
                )

    # --- orders ---------------------------------------------------------------------------------------

    def _accept(self, action: Action, command: Command, reply: Reply) -> None:
        values: dict[str, int] = {}

        def answer(state: Literal["accepted", "done", "refused"], detail: str) -> None:
            if state != "accepted":
                self._record(action, state, command.uid, values, detail)
            reply(state, detail)

        try:
            if action == "set":
                values.update(self._value(command.arguments))
            who = "by hand" if command.uid is None else f"by hand (uid {command.uid})"
            self._orders.accept(Order(action, values, who, answer))
        except OrderError as error:
            answer("refused", self._refusal(str(error)))

    def _value(self, arguments: Mapping[str, KnobValue]) -> dict[str, int]:
        knob, text = str(arguments.get("knob", "")), str(arguments.get("value", ""))
        try:
            value = read_setting(knob, text)
        except ValueError as error:
            raise OrderError(str(error)) from error
        if not allows(self._config.mode, knob):
            kind = by_name[knob].knob_class
            raise OrderError(f"{knob} is {kind}, and this job is tuned in mode {self._config.mode}")
        reason = self._tuner.refused.get(knob)
        if reason is not None:
            raise OrderError(f"{knob} cannot be turned in this job: {reason}")
        return {knob: value}

    def _refusal(self, refusal: str) -> str:
        """Return the tuner's own status if it ended before the policy saw a step, else `refusal`."""
        status = self._reporter.status
        if self._orders.steps == 0 and status is not None and status.state in ("off", "frozen"):
            return f"{status.state}: {status.detail}"
        return refusal

    def _record(
        self,
        action: Action,
        outcome: Literal["done", "refused"],
        uid: int | None,
        values: Mapping[str, int],
        detail: str,
    ) -> None:
        self._reporter.emit(
            TunerOrder(
                job=self._hello.job,
                action=action,
                outcome=outcome,
                uid=uid,
                values=dict(values),
                step=self._orders.step,
                wall_ns=self._clock.wall_ns(),
                detail=detail,
            )
        )


def make_policy_and_orders(
    model: nn.Module, hello: JobHello, config: TuneConfig
) -> tuple[Policy, HandOrders, StoreThread | None]:
    """Return the policy of a job's rank 0, people's orders over it, and a started thread that keeps what is proven.

    Only pacecar's own policy proves what it keeps, so only that is remembered; the thread is None for other policies.
    """
    store = store_thread_for(config.knobs_file) if config.remember and config.policy == "pacecar" else None
    memory: JobMemory | None = None
    if store is not None:
        store.start()
        memory = JobMemory(store, fingerprint(model, hello), hello, SystemClock())
    return make_policy(config), HandOrders(config, memory=memory), store


def tune_is_off(command: Command, reply: Reply) -> None:
    """Refuse a command to a job that is not tuned."""
    raise MessageRefusal('this job is not tuned: tune="off"')


def _integers(values: Mapping[str, KnobValue]) -> dict[str, int]:
    return {knob: value for knob, value in values.items() if isinstance(value, int)}
