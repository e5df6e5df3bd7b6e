"""A whole tuner of one rank on a replayed job, with memory, all guards, stragglers, divergence and orders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pacecar.config import TuneConfig
from pacecar.controller.consensus.agreement import LocalAgreement
from pacecar.controller.guards.compression_rollback import CompressionRollback
from pacecar.controller.guards.divergence_detector import DivergenceSignals
from pacecar.controller.guards.tuning_pause import TuningPause
from pacecar.controller.knobs.batch.gradient_noise_scale import StatisticalPace
from pacecar.controller.observation import JobFacts
from pacecar.controller.policy.hand_orders import HandOrders, Order, OrderError, OrderMemory
from pacecar.controller.policy.tuning_policy import make_policy
from pacecar.controller.status_reporter import StatusReporter
from pacecar.controller.tuner import TunedJob, Tuner
from pacecar.records import JobRecord, Knobs, Straggler
from tests.controller import replay
from tests.controller.test_tuner import Dial, Finished
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello, step_record

__all__ = ["WholeTuner"]


class ReplayedDial(Dial):
    """A knob with the values of a curve."""

    def __init__(self, knob: str, value: int, domain: tuple[int, ...]) -> None:
        super().__init__()
        self.knob, self._domain = knob, domain
        self.turned = [value]

    def domain(self) -> tuple[int, ...]:
        return self._domain


class WholeTuner(TunedJob):
    """Plays `case`; what happens besides is drawn by `seed`.  `records` are all that the tuner emitted."""

    def __init__(self, case: replay.Case, seed: int, *, memory: OrderMemory | None = None, mode: str = "lossy") -> None:
        self.case, self.start = case, case.curves[0]
        self.draw = random.Random(f"{case.name} {seed}")
        self.records: list[JobRecord] = []
        self.answers: list[tuple[str, ...]] = []
        self.in_force = Knobs()
        self.signals: list[DivergenceSignals] = []
        self.diverges_at = self.draw.randrange(100, 3000)
        config = TuneConfig(mode=mode)  # type: ignore[arg-type]
        self.dials = {k: ReplayedDial(k, v, self.start.domains[k]) for k, v in self.start.start.items()}
        self.pause = TuningPause()
        self.orders = HandOrders(config, memory=memory)
        guards = [self.pause, StatisticalPace(lambda: None), CompressionRollback(self._arrived)]
        reporter = StatusReporter(job_hello(world_size=1), self.records.append, FakeClock())
        self.tuner = Tuner(
            self, config, reporter, policy=make_policy(config),
            orders=self.orders, guards=guards, actuators=[*self.dials.values()], agreement=LocalAgreement(),
        )  # fmt: skip

    def facts(self) -> JobFacts:
        at = self.start
        return JobFacts(
            "j", 2, at.gradient_bytes, at.batch_samples, at.start.get("bucket_bytes"), at.first_bucket_bytes
        )

    def set_knobs(self, knobs: Knobs) -> None:
        self.in_force = knobs

    def request_window(self) -> None:
        """Do nothing: windows come as `replay` draws them."""

    def _arrived(self) -> list[DivergenceSignals]:
        arrived, self.signals = self.signals, []
        return arrived

    @property
    def values(self) -> dict[str, int]:
        return {knob: dial.value() for knob, dial in self.dials.items()}

    def order(self, action: str, values: dict[str, int]) -> None:
        try:
            self.orders.accept(Order(action, values, "by hand", lambda *said: self.answers.append(said)))  # type: ignore[arg-type]
        except OrderError as error:
            self.answers.append(("refused", str(error)))

    def _straggle(self, since: int, step: int, *, ended: bool = False) -> None:
        self.pause.put(
            Straggler(
                job="j", late_rank=1, cause="link", phase="backward", since_step=since, step=step, wall_ns=1,
                excess_ns=1, evidence="e", ended=ended,
            )
        )  # fmt: skip

    def run(self, factors: Sequence[float], *, has_orders: bool) -> WholeTuner:
        """Play one step a noise factor, with a straggler and, if `has_orders`, four orders; then close."""
        steps, draw = len(factors), self.draw
        actions = draw.choices(["freeze", "resume", "set", "rollback", "resume"], k=4)
        orders = dict(zip(sorted(draw.sample(range(20, steps), 4)), actions, strict=True)) if has_orders else {}
        late_at = draw.randrange(30, steps)
        part, since, before = -(-steps // len(self.case.curves)), 9, self.values
        self.tuner.start()
        for step in range(1, steps + 1):
            curve, values = self.case.curves[(step - 1) // part], self.values
            since, before = (0 if values != before else since + 1), values
            slow = replay.TRANSIENT[since] if since < len(replay.TRANSIENT) else 1.0
            pace = int(curve.at(values).step_ns * slow * factors[step - 1])
            seen = replay._observe(step, values, pace, curve, since, draw)
            ledger: dict[str, Any] = {} if seen.ledger is None else {"ledger": seen.ledger, "source": "exact"}
            done = Finished(step_record(step=step, wall_ns=pace, knobs=self.in_force, **ledger))
            done.backward, done.disturbed = seen.backward, seen.profiled  # type: ignore[assignment]
            is_lossy = bool(values.get("compression"))
            loss = 2.0 + 0.01 * draw.random() + (50.0 if is_lossy and step >= self.diverges_at else 0.0)
            self.signals.append(DivergenceSignals(step, loss, 1.0, "bf16" if is_lossy else "none"))
            if step in (late_at, late_at + 40):
                self._straggle(late_at, step, ended=step != late_at)
            if step in orders:
                knob, dial = min(self.dials.items())
                self.order(orders[step], {knob: draw.choice(dial.domain())} if orders[step] == "set" else {})
            self.tuner.on_boundary(done)  # type: ignore[arg-type]
        self.tuner.close()
        return self
