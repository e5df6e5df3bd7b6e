"""One rank's Tuner and the ranks' rendezvous: no error reaches the job, and nothing is turned unasked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from pacecar.config import TuneConfig
from pacecar.controller.consensus.agreement import LocalAgreement
from pacecar.controller.consensus.protocol import LONG_STEP_NS
from pacecar.controller.experiment.exploration_budget import RESERVED_SWITCHES
from pacecar.controller.guards.node_monitor import NodeMonitor
from pacecar.controller.knobs.actuator import Actuator, ActuatorError, Objection
from pacecar.controller.knobs.ddp.gradient_check import concerns_gradients
from pacecar.controller.observation import Guard, JobFacts, Observation, Policy, Proposal, Record
from pacecar.controller.status_reporter import StatusReporter
from pacecar.controller.tuner import FIRST_WINDOW_BOUNDARIES_MAX, OFFER_BOUNDARY, TunedJob, Tuner
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.profiler.transport.rendezvous import RendezvousError, meet
from pacecar.records import JobRecord, Knobs, KnobSwitch, StepRecord, TunerStatus
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello, step_record


class Dial(Actuator):
    """A knob that remembers how it was turned, and fails when told to."""

    knob = "micro_batch"

    def __init__(self) -> None:
        self.turned: list[int] = []
        self.fails: dict[str, BaseException] = {}
        self.refuses: str | None = None

    def _maybe(self, name: str) -> None:
        if name in self.fails:
            raise self.fails[name]

    def value(self) -> int:
        self._maybe("value")
        return self.turned[-1] if self.turned else 4

    def domain(self) -> tuple[int, ...]:
        return (2, 4, 8)

    def refusal(self) -> str | None:
        self._maybe("refusal")
        return self.refuses

    def apply(self, value: int) -> None:
        self._maybe(f"apply {value}")
        self.turned.append(value)


class Wisher(Policy):
    """A policy that wishes for what it is told to."""

    def __init__(self) -> None:
        self.turn: Proposal | None = None
        self.seen: list[Observation] = []
        self.fails: BaseException | None = None
        self.began = self.finished = 0
        self.holds: list[str | None] = []

    def begin(self, facts: JobFacts, spaces: Sequence[Any], *, turns_knobs: bool) -> None:
        self.began += 1

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        self.holds.append(reason)

    def advance(self, observations: Sequence[Observation]) -> tuple[Proposal | None, list[Any]]:
        assert observations, "a policy is asked about steps"
        if self.fails is not None:
            raise self.fails
        self.seen.extend(observations)
        return self.turn, []

    def finish(self, reason: str = "") -> list[Any]:
        self.finished += 1
        return []


class Finished:
    """A step as the hook tells it."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.step, self.wall_ns, self.disturbed = record.step, record.wall_ns, record.disturbed
        self.source, self.backward, self.pace_ns = record.source, None, record.wall_ns
        self.is_held = False

    def settled(self) -> StepRecord:
        return self.record


class Bench(TunedJob):
    """A tuner and everything around it."""

    def __init__(
        self,
        mode: str = "exact",
        *,
        knob: str = "micro_batch",
        gradients: object = None,
        policy: Policy | None = None,
        guards: Sequence[Guard] = (),
        node: NodeMonitor | None = None,
    ) -> None:
        self.leaves_because: str | None = None
        self.dial, self.policy = Dial(), Wisher()
        self.dial.knob = knob
        self.businesses = self.left_out_ns = 0
        self.emitted: list[JobRecord] = []
        self.in_force = Knobs()
        self.windows = 0
        self.exact_step = 9
        self.step = 0
        self.tuner = Tuner(
            self,
            TuneConfig(mode=mode),  # type: ignore[arg-type]
            StatusReporter(job_hello(world_size=1), self.emitted.append, FakeClock()),
            policy=policy or self.policy,
            guards=guards,
            actuators=[self.dial],
            agreement=LocalAgreement(),
            gradients=gradients,  # type: ignore[arg-type]
            node=node,
        )

    def facts(self) -> JobFacts:
        return JobFacts("j", 1)

    def set_knobs(self, knobs: Knobs) -> None:
        self.in_force = knobs

    def request_window(self) -> None:
        self.windows += 1

    def must_leave(self) -> str | None:
        return self.leaves_because

    def begin_vote(self) -> None:
        self.businesses += 1

    def leave_out(self, duration_ns: int) -> None:
        self.left_out_ns += duration_ns

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.tuner.on_boundary(Finished(self.record()))

    def record(self) -> StepRecord:
        return step_record(
            step=self.step, wall_ns=self.step, source="exact" if self.step == self.exact_step else "estimate",
            disturbed=self.step in (9, 10), knobs=self.in_force,
        )  # fmt: skip

    def switches(self) -> list[tuple[int, int, dict[str, Any]]]:
        return [(r.step, r.epoch, r.knobs.values) for r in self.emitted if isinstance(r, KnobSwitch)]

    def states(self) -> list[str]:
        return [r.state for r in self.emitted if isinstance(r, TunerStatus)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_rank_turns_a_knob_at_the_next_boundary_and_says_so(bench: Bench) -> None:
    bench.tuner.start()
    assert bench.in_force == Knobs(0, {"micro_batch": 4})
    bench.run(OFFER_BOUNDARY + 2)
    assert bench.dial.turned == [4], "the rehearsal applied what was in force"
    assert bench.policy.began == 1
    bench.policy.turn = Proposal(1, {"micro_batch": 8})
    bench.run(4)
    assert bench.switches() == [(7, 1, {"micro_batch": 8})]
    assert bench.tuner.knobs == bench.in_force == Knobs(1, {"micro_batch": 8})
    assert bench.windows == 1
    assert [(o.step, o.values["micro_batch"], o.pace_ns, o.profiled) for o in bench.policy.seen][-3:] == [
        (8, 8, 8, False),
        (9, 8, 9, True),
        (10, 8, 10, True),
    ]
    bench.tuner.close()
    bench.tuner.close()
    assert bench.policy.finished == 1


@pytest.mark.parametrize(
    ("mode", "knob", "is_trial", "is_exit", "left"),
    [
        ("exact", "micro_batch", True, False, 4),
        ("exact", "micro_batch", False, False, 8),
        ("exact", "micro_batch", True, True, 8),
        ("lossy", "compression", False, False, 0),
        ("adaptive", "batch_samples", False, False, 4),
    ],
    ids=["tried", "kept", "tried, and the process ends", "lossy", "the global batch"],
)
def test_what_closing_leaves_in_force(mode: str, knob: str, *, is_trial: bool, is_exit: bool, left: int) -> None:
    bench = Bench(mode, knob=knob)
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.policy.turn = Proposal(1, {knob: 8}, is_trial=is_trial)
    bench.run(4)
    assert bench.dial.value() == 8
    bench.tuner.close(is_exit=is_exit)
    assert bench.dial.value() == left
    assert bench.switches()[-1][2] == bench.in_force.values == {knob: left}, "the records say so"


def test_who_must_leave_in_a_trial_says_what_stays_and_what_it_was_before(bench: Bench) -> None:
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.policy.turn = Proposal(1, {"micro_batch": 8}, is_trial=True)
    bench.run(4)
    bench.leaves_because = "planted"
    bench.run(1)
    said = bench.tuner.status
    assert said.detail == "planted; micro_batch stays at 8 on all ranks, unproven (4 before)"
    bench.tuner.close()
    assert bench.dial.value() == 8


def test_a_trial_takes_one_window_and_what_is_kept_another(bench: Bench) -> None:
    """A profiled step cannot be judged: one under each stretch would cost the trial its pairs."""
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    windows = []
    for value in (8, 4, 8):
        bench.policy.turn = Proposal(1, {"micro_batch": value}, is_trial=True)
        bench.run(4)
        windows.append(bench.windows)
    assert windows == [1, 1, 1]
    bench.policy.turn = Proposal(1, {"micro_batch": 8})
    bench.run(4)
    assert bench.windows == 2
    bench.policy.turn = Proposal(2, {"micro_batch": 4}, is_trial=True)
    bench.run(4)
    assert bench.windows == 3
    assert [values["micro_batch"] for _, _, values in bench.switches()] == [8, 4, 8, 4]


def test_what_is_proven_is_kept_before_the_next_trial_begins(bench: Bench) -> None:
    """Else a freeze in that trial would go back to what was in force before the proven change."""
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.policy.turn = Proposal(1, {"micro_batch": 8}, is_trial=True)
    bench.run(2)
    agreement: Any = bench.tuner.agreement
    decide, agreement.decide = agreement.decide, lambda can_apply: None  # the ranks take their time
    bench.policy.turn = Proposal(1, {"micro_batch": 8})
    bench.run(2)
    bench.policy.turn = Proposal(2, {"micro_batch": 2}, is_trial=True)
    bench.run(2)
    agreement.decide = decide
    bench.run(3)
    assert bench.dial.value() == 2
    bench.tuner.agreement.freeze("planted")
    bench.run(2)
    assert bench.dial.value() == 8


def test_the_policy_begins_with_the_exact_step_that_came_before_it(bench: Bench) -> None:
    """The first window is taken in the warm-up; a policy that never saw it could forecast nothing for a long while."""
    bench.exact_step = 2
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 4)
    first = bench.policy.seen[0]
    assert (first.step, first.exact, first.profiled, first.values) == (2, True, True, {"micro_batch": 4})
    steps = [o.step for o in bench.policy.seen]
    assert steps == sorted(set(steps))


class Gradients:
    """Notes what a GradientCheck is asked for; `late` holds what it finds when it only compares."""

    def __init__(self) -> None:
        self.is_armed = False
        self.armed: list[bool] = []
        self.found: list[str] = []
        self.late: list[str] = []

    def prepare(self, ask: object) -> None:
        self.armed.append(False)

    def arm(self, *, is_on: bool = True) -> None:
        self.armed.append(is_on)

    def check(self, tell: object) -> str | None:
        return self.found.pop() if self.found else None

    def compare(self) -> str | None:
        return self.late.pop() if self.late else None


@pytest.mark.parametrize(("knob", "looks"), [("micro_batch", 0), ("bucket_bytes", 2)])
def test_gradients_are_looked_at_after_a_switch_that_can_mix_buckets_up(knob: str, looks: int) -> None:
    gradients = Gradients()
    b = Bench(knob=knob, gradients=gradients)
    b.tuner.start()
    b.run(OFFER_BOUNDARY + 2)
    assert gradients.armed == [False], "while nothing was changed yet"
    for value in (8, 4):
        b.policy.turn = Proposal(1, {knob: value}, is_trial=True)
        b.run(4)
    assert b.dial.turned == [4, 8, 4]
    assert gradients.armed == [False, *[True] * looks]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_where_gradients_differ_after_a_switch_all_go_back_with_the_vote_that_freezes(
    *, is_late: bool, is_kept: bool
) -> None:
    """Also a rank that finds it only when that vote is read, and where the change was kept in the meantime."""
    gradients = Gradients()
    b = Bench(knob="bucket_bytes", gradients=gradients)
    b.tuner.start()
    b.run(OFFER_BOUNDARY + 2)
    b.policy.turn = Proposal(1, {"bucket_bytes": 8}, is_trial=True)
    b.run(2)
    assert b.dial.value() == 8
    if is_kept:
        b.policy.turn = Proposal(1, {"bucket_bytes": 8})
        b.run(2)
    gradients.is_armed = True
    if is_late:
        gradients.late.append("planted")
        b.tuner.agreement.freeze("another rank found it")
    else:
        gradients.found.append("planted")
    b.run(1)
    assert b.dial.value() == 4
    assert b.tuner.state == "frozen"
    assert gradients.armed[-1] is False


def test_a_switch_of_several_knobs_concerns_gradients_if_any_of_them_does() -> None:
    assert not concerns_gradients(["micro_batch", "micro_tokens"])
    assert concerns_gradients(["micro_batch", "bucket_bytes"])
    assert concerns_gradients(["compression"])


def test_who_measures_hears_of_a_boundary_that_takes_longer(bench: Bench) -> None:
    bench.tuner.start()
    bench.run(3)
    assert bench.businesses == 3, "alone there is business at each"


def test_off_and_advise_turn_nothing() -> None:
    off, advise = Bench("off"), Bench("advise")
    for b in (off, advise):
        b.policy.turn = Proposal(1, {"micro_batch": 8})
        b.tuner.start()
        b.run(20)
        b.tuner.close()
        assert b.dial.turned == []
        assert b.switches() == []
    assert (off.emitted, off.policy.seen, off.in_force) == ([], [], Knobs())
    assert len(advise.policy.seen) >= 15


def break_policy(b: Bench) -> None:
    b.policy.fails = RuntimeError("planted")


def break_actuator(b: Bench) -> None:
    b.dial.fails["value"] = RuntimeError("planted")


def break_emit(b: Bench) -> None:
    b.tuner._status._emit = break_policy  # type: ignore[assignment]  # raises: a record has no policy
    b.policy.turn = Proposal(1, {"micro_batch": 8})


@pytest.mark.parametrize("sabotage", [break_policy, break_actuator, break_emit])
def test_whatever_raises_freezes_the_tuner_and_stays_out_of_the_job(
    bench: Bench, sabotage: Callable[[Bench], None], caplog: pytest.LogCaptureFixture
) -> None:
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    sabotage(bench)
    with caplog.at_level(logging.ERROR):
        bench.policy.turn = Proposal(1, {"micro_batch": 8})
        bench.run(6)
    assert bench.tuner.state == "frozen"
    assert bench.policy.finished == 1
    assert "training goes on" in caplog.text
    turned = list(bench.dial.turned)
    bench.run(6)
    assert bench.dial.turned == turned
    bench.tuner.close()


def test_a_freeze_takes_a_trial_back_and_leaves_what_was_kept(bench: Bench) -> None:
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.policy.turn = Proposal(1, {"micro_batch": 8}, is_trial=True)
    bench.run(2)
    bench.policy.turn = Proposal(1, {"micro_batch": 8})  # proven: nothing to turn, but nothing to go back to either
    bench.run(2)
    bench.policy.turn = Proposal(2, {"micro_batch": 2}, is_trial=True)
    bench.run(2)
    assert [values["micro_batch"] for _, _, values in bench.switches()] == [8, 2]
    break_policy(bench)
    bench.run(6)
    assert bench.tuner.state == "frozen"
    assert [values["micro_batch"] for _, _, values in bench.switches()] == [8, 2, 8]


def test_a_freeze_that_is_the_end_is_told_where_a_person_had_frozen_tuning_before(bench: Bench) -> None:
    """An order that is given then would wait for ever: the policy must hear that nothing is turned any more."""
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.tuner._status.report("frozen", "frozen by hand", step=bench.step)
    bench.tuner.freeze("the hook turned itself off")
    bench.run(6)
    assert bench.policy.finished == 1
    assert (bench.tuner.state, bench.tuner.status.detail) == ("frozen", "the hook turned itself off")


def test_ctrl_c_is_not_ours(bench: Bench) -> None:
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.policy.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.run(1)


def test_a_value_that_fails_leaves_the_old_one_and_bars_the_knob(bench: Bench) -> None:
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.dial.fails["apply 8"] = ActuatorError("planted")
    bench.policy.turn = Proposal(1, {"micro_batch": 8})
    bench.run(10)
    assert bench.switches() == []
    assert bench.dial.turned == [4, 4], "rehearsed once, put back once, not tried again"
    assert bench.tuner.state == "warming"


def test_a_value_outside_the_domain_is_not_applied(bench: Bench) -> None:
    bench.tuner.start()
    bench.policy.turn = Proposal(1, {"micro_batch": 5})
    bench.run(20)
    assert bench.switches() == []


def test_nothing_to_tune_is_said_with_the_reason(bench: Bench) -> None:
    bench.dial.refuses = "the model has BatchNorm"
    bench.tuner.start()
    bench.run(10)
    assert bench.tuner.state == "off"
    detail = [r.detail for r in bench.emitted if isinstance(r, TunerStatus)][-1]
    assert detail == "nothing to tune: micro_batch: the model has BatchNorm"
    assert bench.policy.began == 0


def test_a_boundary_without_a_record_is_a_step_without_an_observation(bench: Bench) -> None:
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.tuner.on_boundary(None)
    bench.step += 1
    bench.run(2)
    assert [o.step for o in bench.policy.seen][-3:] == [6, 8, 9]


# --- guards ------------------------------------------------------------------------------------------


class Objector(Guard):
    """Pauses for `reason`, doubles the pace that the policy sees, and takes back what it turned where `acts`."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.acts = False
        self.asked = 0

    def pause_reason(self, step: int) -> str | None:
        return self.reason

    def must_act(self) -> bool:
        self.asked += 1
        return self.acts

    def is_calm(self) -> bool:
        return not self.acts

    def judgeable(self, step: Observation) -> Observation:
        return replace(step, pace_ns=2 * step.pace_ns)

    def take_back(self, turn: Proposal | None, records: list[Record]) -> tuple[Proposal | None, list[Record]]:
        return (Proposal(1, {"micro_batch": 4}) if self.acts else turn), records


def test_the_policy_is_held_once_for_the_first_guard_that_has_a_reason_and_let_go() -> None:
    first, second = Objector(), Objector("late")
    bench = Bench(guards=[first, second])
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 4)
    first.reason = "hangs"
    bench.run(2)
    first.reason = second.reason = None
    bench.run(2)
    assert bench.policy.holds == ["late", "hangs", None]


def test_every_guard_changes_what_the_policy_sees() -> None:
    bench = Bench(guards=[Objector(), Objector()])
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 4)
    assert [step.pace_ns for step in bench.policy.seen] == [4 * step.step for step in bench.policy.seen] != []


def test_a_guard_takes_back_what_the_policy_requests_even_where_no_step_is_observed() -> None:
    guard = Objector()
    bench = Bench(guards=[guard])
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.policy.turn = Proposal(1, {"micro_batch": 8})
    bench.run(4)
    assert bench.in_force.values == {"micro_batch": 8}
    guard.acts, seen = True, len(bench.policy.seen)
    for _ in range(4):
        bench.tuner.on_boundary(None)
    assert bench.in_force.values == {"micro_batch": 4}
    assert len(bench.policy.seen) <= seen + 1, "the step before"


# --- steps that the hook only counts -------------------------------------------------------------------


def count(bench: Bench, *walls_ns: int, disturbed: bool = False) -> None:
    """End steps that were counted and not measured."""
    for wall_ns in walls_ns:
        bench.step += 1
        bench.tuner.on_boundary(CountedStep(bench.step, 0, wall_ns, 7, bench.in_force, disturbed))


@pytest.fixture
def hearing(bench: Bench) -> Bench:
    """A tuner in something to do, that hears counted steps from 50 ns on; the last measured one took 6."""
    bench.tuner._listener.counted_ns_min = 50
    bench.tuner.start()
    bench.run(OFFER_BOUNDARY + 2)
    bench.tuner._listener._last_ns = 60
    return bench


def test_a_step_that_was_only_counted_has_a_pace_the_settings_in_force_and_nothing_else(hearing: Bench) -> None:
    count(hearing, 70)
    seen = hearing.policy.seen[-1]
    assert (seen.step, seen.pace_ns, seen.wall_ns, seen.values) == (7, 70, 7, {"micro_batch": 4})
    assert (seen.ledger, seen.exact, seen.micro_batches, seen.profiled) == (None, False, None, False)
    count(hearing, 70, disturbed=True)
    assert hearing.policy.seen[-1].profiled
    hearing.was_paused = lambda step: step.step == 9  # type: ignore[method-assign]
    count(hearing, 70, 70)
    assert [o.profiled for o in hearing.policy.seen[-2:]] == [True, False]


def test_too_short_a_step_that_was_only_counted_is_not_heard(hearing: Bench) -> None:
    count(hearing, 49, 50)
    assert [o.step for o in hearing.policy.seen[-2:]] == [6, 8]


def test_one_much_longer_than_the_one_before_is_not_heard_as_it_held_something_else(hearing: Bench) -> None:
    count(hearing, 180, 541, 540)
    assert [o.step for o in hearing.policy.seen[-3:]] == [6, 7, 9]


def test_after_a_switch_a_step_is_as_long_as_it_is(hearing: Bench) -> None:
    """Under 1 sample at a time a step may take six times what it takes under 32."""
    hearing.policy.turn = Proposal(1, {"micro_batch": 8}, is_trial=True)
    count(hearing, 60, 360, 360)
    assert hearing.switches()
    assert [o.pace_ns for o in hearing.policy.seen[-2:]] == [360, 360]
    count(hearing, 1081)
    assert hearing.policy.seen[-1].pace_ns == 360


def test_while_all_are_calm_only_long_counted_steps_are_heard(hearing: Bench) -> None:
    hearing.tuner.agreement.are_all_calm = True  # type: ignore[misc]
    hearing.tuner._listener.switched()
    count(hearing, LONG_STEP_NS - 1)
    assert hearing.policy.seen[-1].step == 6
    hearing.tuner.agreement.are_all_calm = True  # type: ignore[misc]
    count(hearing, LONG_STEP_NS)
    assert hearing.policy.seen[-1].step == 8


def test_what_is_judged_of_a_measured_step_is_its_pace_without_the_measuring(hearing: Bench) -> None:
    hearing.step += 1
    step = Finished(hearing.record())
    step.pace_ns = 5
    hearing.tuner.on_boundary(step)
    assert hearing.policy.seen[-1].pace_ns == 5


# --- meeting ------------------------------------------------------------------------------------------


def come(store: Any, claims: Sequence[str | None], seconds: float) -> list[str]:
    said = ["absent"] * len(claims)
    are_started = threading.Barrier(sum(claim is not None for claim in claims))  # on a busy machine one by one

    def attend(rank: int, claim: str) -> None:
        are_started.wait(30)
        try:
            meet(store, rank, len(claims), claim, name="t", seconds=seconds)
            said[rank] = "go"
        except RendezvousError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=attend, args=(r, c)) for r, c in enumerate(claims) if c is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def test_all_ranks_meet() -> None:
    assert come(dist.HashStore(), ["a"] * 4, 20) == ["go"] * 4


@pytest.mark.slow
def test_one_rank_that_does_not_come_is_named_by_all() -> None:
    said = come(dist.HashStore(), ["a", "a", None], 0.5)
    assert said == ["ranks [2] did not attach within 0.5 s"] * 2 + ["absent"]


@pytest.mark.slow
def test_without_rank_0_the_others_give_up() -> None:
    assert come(dist.HashStore(), [None, "a", "a"], 0.5)[1:] == ["ranks [0] did not attach within 0.5 s"] * 2


def test_ranks_that_want_different_things_do_not_start() -> None:
    assert (
        come(dist.HashStore(), ["mode exact", "mode advise"], 20)
        == ["rank 1 has mode advise, rank 0 has mode exact"] * 2
    )


class Unprofiled(Bench):
    """Its first window comes at step WINDOW, its budget pays for `paid` switches."""

    WINDOW = 30

    def __init__(self, *, paid: int | None) -> None:
        super().__init__()
        self.headroom = paid
        self.reserved: list[int] = []

    def awaits_first_window(self) -> bool:
        return self.step < self.WINDOW

    def spent_ns(self) -> int:
        return 1_000_000

    def headroom_ns(self) -> int | None:
        return None if self.headroom is None else self.headroom * self.tuner._price.price_ns(0)

    def reserve(self, cost_ns: int) -> None:
        self.reserved.append(cost_ns)


def test_the_policy_is_told_what_switches_can_be_paid_for_and_none_before_the_first_window() -> None:
    for paid in (None, 7):
        b = Unprofiled(paid=paid)
        b.tuner.start()
        b.run(40)
        told = {step.step: step.switches for step in b.policy.seen}
        assert {switches for step, switches in told.items() if step < b.WINDOW} == {0}
        assert {switches for step, switches in told.items() if step >= b.WINDOW} == {paid}
        assert b.tuner.state == "warming"


def test_the_first_window_is_waited_for_so_long_and_no_longer() -> None:
    b = Unprofiled(paid=None)
    b.WINDOW = 10**6
    b.tuner.start()
    b.run(FIRST_WINDOW_BOUNDARIES_MAX + 5)
    assert [step.switches for step in b.policy.seen][-6:] == [0, None, None, None, None, None]


def test_windows_leave_what_a_trial_needs_to_end_while_it_is_open() -> None:
    b = Unprofiled(paid=7)
    b.tuner.start()
    b.run(OFFER_BOUNDARY + 2)
    assert set(b.reserved) == {0}
    b.policy.turn = Proposal(1, {"micro_batch": 8}, is_trial=True)
    b.run(4)
    assert b.reserved[-1] == RESERVED_SWITCHES * b.tuner._price.price_ns(0) > 0
    b.policy.turn = Proposal(1, {"micro_batch": 4})
    b.run(4)
    assert b.reserved[-1] == 0


def test_ranks_vote_rarely_while_no_switch_can_be_paid_for() -> None:
    for paid, is_calm in ((0, True), (1, False)):
        b = Unprofiled(paid=paid)
        b.tuner.start()
        b.run(40)
        assert b.tuner.state == "warming"
        assert b.tuner.agreement.are_all_calm is is_calm


class Acting(Dial):
    """A knob that acts at every boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.boundaries = self.closed = 0
        self.objects: Objection | None = None

    def on_boundary(self) -> int:
        self._maybe("on_boundary")
        self.boundaries += 1
        return 5

    def objection(self) -> Objection | None:
        return self.objects

    def close(self) -> None:
        self.closed += 1


def acting() -> tuple[Bench, Acting]:
    bench, dial = Bench(), Acting()
    bench.tuner = Tuner(
        bench,
        TuneConfig(),
        StatusReporter(job_hello(world_size=1), bench.emitted.append, FakeClock()),
        policy=bench.policy,
        actuators=[dial],
        agreement=LocalAgreement(),
    )
    bench.tuner.start()
    return bench, dial


def test_a_knob_acts_at_every_boundary_until_pacecar_ends() -> None:
    bench, dial = acting()
    bench.run(3)
    assert (dial.boundaries, dial.closed, bench.left_out_ns) == (3, 0, 15)
    dial.objects = Objection.MEMORY
    bench.run(1)
    assert dict(bench.tuner.agreement.objections) == {0: Objection.MEMORY}
    dial.objects = None
    bench.run(1)
    assert not bench.tuner.agreement.objections
    bench.tuner.close()
    bench.run(1)
    assert (dial.boundaries, dial.closed) == (5, 1)


def test_a_knob_is_closed_where_this_rank_leaves_or_it_raises() -> None:
    bench, dial = acting()
    bench.leaves_because = "planted"
    bench.run(2)
    assert (dial.boundaries, dial.closed) == (0, 1)
    bench, dial = acting()
    dial.fails["on_boundary"] = OSError("planted")
    bench.run(1)
    assert dial.closed == 1
    assert bench.tuner.agreement.frozen == "OSError: planted"
