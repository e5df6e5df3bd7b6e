"""Every command is answered, every order is recorded, and a report fits into 80 columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pacecar.commands.tune_text import WIDTH_MIN, lines
from pacecar.config import TuneConfig
from pacecar.controller.command_handler import DETAIL_CHARACTERS_MAX, CommandHandler, tune_is_off
from pacecar.controller.knobs.ddp.buckets import DdpKnobs
from pacecar.controller.observation import JobFacts, KnobSpace, Observation
from pacecar.controller.policy.hand_orders import HandOrders
from pacecar.controller.policy.tuning_policy import TuningPolicy
from pacecar.controller.restart_advice import advise
from pacecar.controller.status_reporter import StatusReporter
from pacecar.profiler.hook.commands.daemon_messages import MessageRefusal
from pacecar.records import (
    Answer,
    Command,
    Decision,
    JobRecord,
    Knobs,
    Ledger,
    TunerOrder,
    TunerReport,
    TunerStatus,
    Verdict,
)
from pacecar.records.commands import REPORTED_CHANGES_MAX
from pacecar.wire import FRAME_BYTES_MAX, encode_frame
from tests.controller.ordered_run import OrderedRun
from tests.kit import records
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello

MIB = 2**20
HELLO = job_hello(job="job")


class Office:
    """A desk, what left it, and the tuner as it sees it."""

    def __init__(self, **settings: Any) -> None:
        self.config = TuneConfig(**settings)
        self.sent: list[Answer] = []
        self.records: list[JobRecord] = []
        self.said: list[tuple[str, str]] = []
        self.orders_by_hand = HandOrders(self.config)
        self.run = OrderedRun(TuningPolicy(self.config), self.orders_by_hand)
        self.knobs = Knobs(0, {"bucket_bytes": 4 * MIB})
        self.refused: dict[str, str] = {}
        self.reporter = StatusReporter(HELLO, self.records.append, FakeClock())
        tuner: Any = self  # its knobs and what it refused
        self.desk = CommandHandler(
            HELLO, self.config, self.orders_by_hand, tuner, self.reporter, reply=self.sent.append, clock=FakeClock()
        )

    def begin(self) -> Office:
        space = KnobSpace("bucket_bytes", 4 * MIB, (MIB, 2 * MIB, 4 * MIB))
        self.run.begin(JobFacts("job", 2), [space], turns_knobs=self.config.mode != "advise")
        self.refused = {"micro_batch": "the batch size is not known"}
        self.step(1, 4 * MIB)
        return self

    def step(self, number: int, value: int) -> None:
        self.run.advance([Observation(number, number, {"bucket_bytes": value}, 100_000_000)])

    def act(self, order: str, **arguments: Any) -> None:
        command = Command(number=5, action="tune", at_step=0, arguments={"order": order, **arguments}, uid=1000)
        self.desk.act(command, lambda state, detail: self.said.append((state, detail)))

    @property
    def orders(self) -> list[TunerOrder]:
        return [record for record in self.records if isinstance(record, TunerOrder)]


def test_an_order_is_a_record_with_who_gave_it_and_what_became_of_it() -> None:
    office = Office().begin()
    office.act("set", knob="bucket_bytes", value="2MiB")
    assert office.said == [("accepted", "all ranks turn at one of the next steps")]
    assert office.orders == []
    office.step(2, 4 * MIB)
    office.step(3, 2 * MIB)
    assert office.said[-1] == ("done", "bucket_bytes 2 MiB")
    (order,) = office.orders
    assert (order.action, order.outcome, order.uid, order.values) == ("set", "done", 1000, {"bucket_bytes": 2 * MIB})
    assert order.step == 3


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"knob": "bucket_bytes", "value": "3MiB"}, "possible: 1 MiB, 2 MiB, 4 MiB"),
        ({"knob": "bucket_bytes", "value": "large"}, "it wants bytes, as in 4194304 or 4MiB"),
        ({"knob": "bogus", "value": "1"}, "there is no knob 'bogus'"),
        ({"knob": "compression", "value": "fp16"}, "compression is lossy, and this job is tuned in mode exact"),
        ({"knob": "micro_batch", "value": "8"}, "cannot be turned in this job: the batch size is not known"),
        ({"knob": "loader_workers", "value": "8"}, "cannot be turned in this job; knobs that can: bucket_bytes"),
        ({}, "there is no knob ''"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_reason_and_recorded(arguments: dict[str, str], why: str) -> None:
    office = Office().begin()
    office.act("set", **arguments)
    ((state, detail),) = office.said
    assert state == "refused"
    assert why in detail
    assert [(o.action, o.outcome, o.detail) for o in office.orders] == [("set", "refused", detail)]


def test_a_tuner_that_never_began_says_why() -> None:
    office = Office()
    office.act("freeze")
    assert office.said == [("refused", "the tuner has not begun: the job's first steps are not over")]
    off = TunerStatus(
        job="job", rank=0, state="off", detail="nothing to tune: no knobs", step=9, wall_ns=0, exploration_ns=0,
        trials=0,
    )  # fmt: skip
    office.reporter.emit(off)
    office.act("freeze")
    assert office.said[-1] == ("refused", "off: nothing to tune: no knobs")


def test_what_is_no_order_is_refused_with_those_there_are() -> None:
    with pytest.raises(MessageRefusal, match="status, freeze, resume, set, rollback, not 'explode'"):
        Office().begin().act("explode")
    with pytest.raises(MessageRefusal, match='tune="off"'):
        tune_is_off(Command(number=1, action="tune", at_step=0), lambda state, detail: None)


def decision(number: int, **changes: Any) -> Decision:
    given = {"from_value": 4 * MIB, "to_value": 2 * MIB, "step": 10 * number, "reason": "r" * 5000}
    return records.decision(number, **{**given, "expected_gain_ratio": 0.05, **changes})


def verdict(number: int, **changes: Any) -> Verdict:
    given = {"outcome": "rolled_back", "step": 10 * number + 5, "measured_gain_ratio": -0.02, "trial_steps": 9}
    return records.verdict(number, **{**given, "exploration_ns": 5, "reason": "v" * 5000, **changes})


def asked(office: Office) -> TunerReport:
    office.act("status")
    answer = office.sent[-1]
    assert (answer.rank, answer.number, answer.state) == (0, 5, "done")
    assert answer.report is not None
    assert len(encode_frame(answer)) < FRAME_BYTES_MAX // 2
    return answer.report


def test_a_report_has_what_is_in_force_what_was_tried_and_the_bill_and_fits_its_frame() -> None:
    office = Office().begin()
    for number in range(1, 40):
        office.reporter.emit(decision(number))
        office.reporter.emit(verdict(number))
    office.reporter.emit(decision(40))
    office.act("set", knob="bucket_bytes", value="3MiB")
    report = asked(office)
    assert (report.knobs, report.began) == ({"bucket_bytes": 4 * MIB}, {"bucket_bytes": 4 * MIB})
    assert report.domains == {"bucket_bytes": (MIB, 2 * MIB, 4 * MIB)}
    assert len(report.changes) == REPORTED_CHANGES_MAX
    assert [c.outcome for c in report.changes[-2:]] == ["rolled_back", None]
    assert max(len(c.reason) for c in report.changes) == DETAIL_CHARACTERS_MAX
    assert report.elapsed_ns == 100_000_000
    assert report.orders[0].outcome == "refused"
    assert any("micro_batch is not tuned" in sentence for sentence in report.advice)


@pytest.mark.parametrize("width", [20, 80, 200])
def test_a_report_is_read_in_a_terminal_of_any_width(width: int) -> None:
    office = Office().begin()
    office.reporter.emit(decision(1))
    office.reporter.emit(verdict(1))
    office.reporter.emit(decision(2, kind="advise"))
    text = list(lines("job", asked(office), width=width))
    assert max(map(len, text)) <= max(WIDTH_MIN, min(width, 100))
    assert any("+2.0 %" in line and "-5.0 %" in line and line.endswith("rolled back") for line in text)
    assert any(line.startswith("bucket_bytes") and "1 MiB, 2 MiB, 4 MiB" in line for line in text)


def test_zero_is_told_and_what_is_not_known_is_a_dash() -> None:
    office = Office().begin()
    office.reporter.emit(decision(1, expected_gain_ratio=None))
    office.reporter.emit(verdict(1, measured_gain_ratio=0.0))
    (line,) = [line for line in lines("job", asked(office)) if "rolled back" in line]
    assert line.split()[-4:] == ["+0.0", "%", "rolled", "back"] or "-0.0 %" in line
    assert " - " in line


# --- advice ---


def ledger(**parts: int) -> Ledger:
    given = {f"{name}_ns": share for name, share in parts.items()}
    exposed = parts.get("exposed_communication", 0)
    return Ledger(wall_ns=sum(parts.values()), communication_ns=exposed, **given)


def advice(mode: str, *, is_crowded: bool = False, **parts: int) -> tuple[str, ...]:
    return advise(
        mode=mode, ledger=ledger(**parts), decisions=(), refused={}, backend="nccl", device="cuda:0",
        is_crowded=is_crowded,
    )  # fmt: skip


def test_a_heading_over_its_share_is_named_with_the_figure_and_what_helps() -> None:
    (said,) = advice("exact", compute=70, host_bound=30)
    assert "30%" in said
    assert "torch.compile" in said
    assert "needs a restart" in said
    assert advice("exact", compute=97, host_bound=3) == ()
    assert 'tune="lossy"' in advice("exact", compute=60, exposed_communication=40)[0]
    assert 'tune="lossy"' not in advice("lossy", compute=60, exposed_communication=40)[0]


def test_a_job_on_a_crowded_machine_is_told_to_make_room_and_not_to_compile() -> None:
    (said,) = advice("exact", compute=70, host_bound=30, is_crowded=True)
    assert "30%" in said
    assert "torch.compile" not in said
    assert "more wants to run here than there are processors" in said
    assert advice("exact", compute=70, data_wait=30, is_crowded=True) == advice("exact", compute=70, data_wait=30)


def test_memory_that_cannot_be_read_costs_no_other_advice() -> None:
    office = Office().begin()
    before = office.desk.advice()

    def breaks() -> Any:
        raise NotImplementedError("a tensor of another kind")

    office.desk._memory = breaks
    assert office.desk.advice() == before == ("micro_batch is not tuned: the batch size is not known",)


def test_an_engine_that_owns_its_buckets_is_named_with_what_its_configuration_can_change() -> None:
    engine = type("DeepSpeedEngine", (torch.nn.Module,), {})
    for actuator in DdpKnobs(engine(), TuneConfig(), has_scaler=False).actuators:
        assert "zero_bucket_bytes turns" in str(actuator.refusal())
        assert len(str(actuator.refusal())) <= 200, "an offer cuts it there"


def test_advice_comes_first_and_the_last_one_of_a_knob_counts() -> None:
    said = advise(
        mode="advise", ledger=None, refused={"micro_batch": "static graph"}, backend="gloo", device="cpu",
        is_crowded=False,
        decisions=[decision(1, kind="advise", reason="old"), decision(2, kind="advise", reason="new"), decision(3)],
    )  # fmt: skip
    assert said == ("would turn new", "micro_batch is not tuned: static graph")


def test_the_end_of_an_advised_run_is_a_status_that_lists_the_advice_once() -> None:
    office = Office(mode="advise").begin()
    office.reporter.emit(
        TunerStatus(job="job", rank=0, state="advising", detail="x", step=9, wall_ns=0, exploration_ns=0, trials=0)
    )
    office.reporter.emit(decision(1, kind="advise", reason="bucket_bytes 4 MiB -> 2 MiB"))
    office.desk.close()
    office.desk.close()
    statuses = [record for record in office.records if isinstance(record, TunerStatus)]
    assert [s.detail for s in statuses][1:] == [
        "would turn bucket_bytes 4 MiB -> 2 MiB; micro_batch is not tuned: the batch size is not known"
    ]
