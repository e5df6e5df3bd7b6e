"""Pace, ledger and decisions arrive in three libraries' own logs, and the script's own entries are undisturbed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import compatibility
from world import adapters_python, environment

import pacecar
from pacecar.adapters import loggers
from pacecar.adapters.loggers import TensorBoard, Wandb
from pacecar.adapters.metric_log import MetricEntry, MetricLog, event_of
from pacecar.profiler.transport.record_queue import RecordQueue
from pacecar.records import Goodbye, Knobs, StepRecord, Straggler
from pacecar.records.measurements.ledger import LEDGER_HEADINGS, Ledger
from tests.kit.hook_inspection import hook_of
from tests.kit.records import decision, verdict
from tests.kit.waiting import until


def record(step: int, *, seconds: float, step_ns: int = 10_000_000) -> StepRecord:
    """Step `step` of a job that computes for three quarters of its time, at `seconds` on the wall."""
    ledger = Ledger(wall_ns=step_ns, compute_ns=step_ns * 3 // 4, unknown_ns=step_ns - step_ns * 3 // 4)
    wall_ns = step_ns * (step + 1)
    totals = Ledger(wall_ns=wall_ns, compute_ns=wall_ns * 3 // 4, unknown_ns=wall_ns - wall_ns * 3 // 4)
    return StepRecord(
        job="job", rank=0, step=step, ended_wall_ns=int(seconds * 1e9), wall_ns=step_ns, data_wait_ns=None,
        forward_ns=None, backward_ns=None, optimizer_ns=None, micro_batches=None, samples=8, tokens=None, ledger=ledger,
        source="estimate", calibration_age_steps=None, totals=totals, total_steps=step + 1,
        total_samples=8 * (step + 1), total_tokens=None, overhead_ns=0, total_overhead_ns=0, total_windows=0,
        dropped_records=0,
        knobs=Knobs(1, {"bucket_bytes": 4194304}),
    )  # fmt: skip


def test_a_stretch_has_the_mean_of_all_its_steps_also_of_those_whose_records_were_dropped() -> None:
    journal = MetricLog(5.0)
    assert journal.entry_for(record(0, seconds=100.0)) is None, "nothing to compare with yet"
    assert journal.entry_for(record(3, seconds=104.9)) is None
    entry = journal.entry_for(record(500, seconds=105.0))
    assert entry.step == 500
    assert entry.scalars["pacecar/step_seconds"] == pytest.approx(0.01)
    assert entry.scalars["pacecar/share/compute"] == pytest.approx(0.75)
    assert entry.scalars["pacecar/samples_per_second"] == pytest.approx(800)
    assert entry.scalars["pacecar/knob/bucket_bytes"] == 4194304
    assert sum(entry.scalars[f"pacecar/share/{heading}"] for heading in LEDGER_HEADINGS) == pytest.approx(1)


def test_samples_that_were_not_counted_are_missing_and_a_share_of_zero_is_a_measurement() -> None:
    journal = MetricLog(1.0)
    journal.entry_for(msgspec.structs.replace(record(0, seconds=0.0), total_samples=None))
    entry = journal.entry_for(msgspec.structs.replace(record(9, seconds=2.0), total_samples=None))
    assert "pacecar/samples_per_second" not in entry.scalars
    assert entry.scalars["pacecar/share/exposed_communication"] == 0.0


def test_a_clock_that_was_set_back_delays_an_entry_and_breaks_none() -> None:
    journal = MetricLog(1.0)
    journal.entry_for(record(0, seconds=100.0))
    assert journal.entry_for(record(1, seconds=50.0)) is None
    assert journal.entry_for(record(2, seconds=102.0)) is not None


def test_events_say_what_people_look_for_and_other_records_say_nothing() -> None:
    entry = event_of(decision(7, from_value=26214400, to_value=4194304, reason="the model says so"))
    assert entry.event == "trial 7: bucket_bytes 25 MiB -> 4 MiB (the model says so)"
    late = Straggler(
        job="job", late_rank=3, cause="data_wait", phase="data_wait", since_step=1, step=4, wall_ns=0, excess_ns=5,
        evidence="9 of 10 steps",
    )  # fmt: skip
    assert event_of(late).event == "rank 3 is held up by data_wait (9 of 10 steps)"  # type: ignore[union-attr]
    assert event_of(Goodbye(job="job", rank=0, reason="finished", wall_ns=0)) is None


class Kept:
    """A writer that keeps what it gets, and fails while `fails` is positive."""

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.scalars, self.texts = fails, list[tuple[str, int]](), list[str]()

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("the disk is full")
        self.scalars.append((name, step))

    def add_text(self, name: str, text: str, step: int, walltime: float) -> None:
        self.texts.append(text)


def filled(writer: Kept, records: list[Any], **options: Any) -> TensorBoard:
    logger = TensorBoard(writer, period_seconds=1.0, **options)
    for each in records:
        logger.put(each)
    logger.close(5.0)
    return logger


def steps(rank: int, number: int = 9) -> list[StepRecord]:
    return [msgspec.structs.replace(record(step, seconds=float(10 * step)), rank=rank) for step in range(number)]


def test_other_ranks_are_silent_unless_the_caller_has_a_log_for_each() -> None:
    first, second, own = Kept(), Kept(), Kept()
    filled(first, [*steps(0), decision()])
    filled(second, [*steps(1), decision()])
    filled(own, [*steps(1), decision()], every_rank=True)
    assert first.scalars == own.scalars != []
    assert len(first.texts) == len(own.texts) == 1
    assert (second.scalars, second.texts) == ([], [])


@pytest.mark.parametrize(("failures", "is_over"), [(1, False), (4, False), (5, True)])
def test_a_library_may_fail_for_a_while_and_not_for_ever(
    failures: int, is_over: bool, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Kept(fails=failures)
    filled(writer, steps(0))
    assert (writer.scalars == []) is is_over
    said = [line for line in caplog.messages if "TensorBoard" in line]
    assert len(said) == (2 if is_over else 1)
    assert "OSError: the disk is full" in said[0]


class Rows:
    """A wandb run: what is logged with `commit=False` waits for the next row; later values win."""

    def __init__(self) -> None:
        self.rows, self.waiting = list[dict[str, Any]](), dict[str, Any]()

    @property
    def step(self) -> int:
        return len(self.rows)

    def log(self, row: dict[str, Any], *, commit: bool = True) -> None:
        self.waiting |= row
        if commit:
            self.rows.append(self.waiting)
            self.waiting = {}


def test_no_event_is_lost_that_waits_for_the_script_s_next_row_of_wandb() -> None:
    rows = Rows()
    writer = loggers._Wandb(rows, own_rows=False)
    for number in range(3):
        writer.write(MetricEntry(number, 0.0, {}, f"event {number}"))
    rows.log({"mine": 1})
    writer.write(MetricEntry(3, 0.0, {}, "event 3"))
    rows.log({"mine": 2})
    assert [row["pacecar/event"] for row in rows.rows] == ["event 0\nevent 1\nevent 2", "event 3"]
    for number in range(100):
        writer.write(MetricEntry(number, 0.0, {}, f"event {number}"))
    assert len(rows.waiting["pacecar/event"].splitlines()) == loggers.EVENTS_MAX


def test_a_wandb_run_without_steps_gets_events_too() -> None:
    rows = Rows()
    shared = SimpleNamespace(log=rows.log)
    writer = loggers._Wandb(shared, own_rows=False)
    for number in range(2):
        writer.write(MetricEntry(number, 0.0, {}, f"event {number}"))
    assert rows.waiting["pacecar/event"] == "event 0\nevent 1"


@pytest.mark.slow
def test_what_a_logger_takes_of_the_processor_is_charged_to_the_overhead_budget() -> None:
    class Busy(Kept):
        def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
            begun = time.thread_time_ns()
            while time.thread_time_ns() - begun < 2_000_000:
                pass
            super().add_scalar(name, value, step, walltime)

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = Busy()
    logger = TensorBoard(writer, period_seconds=0.0)
    with pacecar.attach(
        model, optimizer, tune="off", loggers=[logger], socket="/nonexistent/s", windows=False, crew=False
    ) as pacer:
        assert pacer.is_active
        records: Any = hook_of(pacer).records
        charge, charged = records.charge, list[int]()
        records.charge = lambda cost_ns: (charged.append(cost_ns), charge(cost_ns))[1]

        def is_charged() -> bool:
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            return max(charged, default=0) >= 2_000_000

        until(is_charged, "nothing was charged")
    assert writer.scalars


@pytest.mark.parametrize("logger", [TensorBoard, Wandb])
def test_what_is_no_writer_is_an_error_where_it_is_given(logger: Any) -> None:
    with pytest.raises(TypeError, match="is needed, not str"):
        logger("runs/x")


class Client:
    """An MLflow client as far as it is called."""

    def __init__(self) -> None:
        self.metrics, self.tags = list[tuple[str, float, int, int]](), dict[str, str]()

    def log_batch(self, run_id: str, *, metrics: list[tuple[str, float, int, int]]) -> None:
        assert run_id == "run"
        self.metrics += metrics

    def set_tag(self, run_id: str, tag: str, text: str) -> None:
        assert run_id == "run"
        self.tags[tag] = text


def test_mlflow_gets_all_metrics_of_an_entry_at_once_in_milliseconds_and_events_as_tags_that_are_not_replaced() -> None:
    client = Client()
    writer = loggers._Mlflow(client, "run", lambda *given: given)
    writer.write(MetricEntry(7, 1.5, {"a": 2.0, "b": 0.0}, None))
    writer.write(MetricEntry(8, 2.5, {}, "first"))
    writer.write(MetricEntry(8, 2.5, {}, "x" * 10_000))
    assert client.metrics == [("a", 2.0, 1500, 7), ("b", 0.0, 1500, 7)]
    assert list(client.tags) == ["pacecar.event.0001", "pacecar.event.0002"]
    assert client.tags["pacecar.event.0001"] == "step 8: first"
    assert len(client.tags["pacecar.event.0002"]) == loggers.TAG_CHARS_MAX


class Hanging(Kept):
    """A writer whose file system has gone away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_called, self.goes_on = threading.Event(), threading.Event()

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        self.is_called.set()
        self.goes_on.wait()


class Broken(Kept):
    """A writer whose disk is full."""

    def add_scalar(self, *_: Any, **__: Any) -> None:
        raise OSError("planted")

    add_text = add_scalar


class Valued(Kept):
    """Keeps values, too."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        self.values.setdefault(name, []).append((step, value))


class Job(NamedTuple):
    """What three libraries got of one job, and what was said when two others failed."""

    board: Valued
    rows: Rows
    client: Client
    hanging: Hanging
    lines: list[str]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A job that trains until all have a few entries; its script logs rows of its own."""
    board, rows, client, hanging = Valued(), Rows(), Client(), Hanging()
    period = {"period_seconds": 0.02}
    mlflow = loggers._Carrier(loggers._Mlflow(client, "run", lambda *given: given), 0.02, every_rank=False)
    given = [TensorBoard(board, **period), Wandb(rows, **period), RecordQueue(mlflow),
             TensorBoard(Broken(), **period), TensorBoard(hanging, **period)]  # fmt: skip
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pacecar").addHandler(handler)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with pacecar.attach(
            model, optimizer, tune="off", loggers=given, socket="/nonexistent/s", windows=False, crew=False,
            overhead_budget=1.0,
        ):  # fmt: skip
            mine = 0

            def has_all() -> bool:
                nonlocal mine
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                mine += 1
                rows.log({"mine": mine})
                if mine == 5:
                    for logger in given:
                        logger.put(decision(from_value=26214400, to_value=4194304))
                        logger.put(verdict(measured_gain_ratio=0.07))
                has_row = any("pacecar/step_seconds" in row for row in rows.rows)
                enough = has_row and len(board.values.get("pacecar/step_seconds", ())) >= 3 and len(client.metrics) > 0
                events = min(len(board.texts), len(client.tags)) >= 2
                is_over = any("stops writing" in line for line in lines)
                return enough and events and is_over and hanging.is_called.is_set()

            until(has_all, "the libraries never had three entries and both events")
            rows.log({"mine": mine + 1})
    finally:
        logging.getLogger("pacecar").removeHandler(handler)
    yield Job(board, rows, client, hanging, lines)
    hanging.goes_on.set()


@pytest.mark.slow
def test_pace_and_the_whole_ledger_arrive_at_rising_steps(job: Job) -> None:
    points = job.board.values["pacecar/step_seconds"]
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(value > 0 for _, value in points)
    seen = [heading for heading in LEDGER_HEADINGS if heading != "data_wait"]  # the job has no loader
    assert "pacecar/share/data_wait" not in job.board.values
    shares = [job.board.values[f"pacecar/share/{heading}"] for heading in seen]
    for parts in zip(*shares, strict=True):
        assert sum(value for _, value in parts) == pytest.approx(1, abs=1e-5)
    names = {name for name, *_ in job.client.metrics}
    assert names == set(job.board.values)
    assert any(names <= set(row) for row in job.rows.rows)


@pytest.mark.slow
def test_a_decision_and_its_verdict_are_events_everywhere(job: Job) -> None:
    decided, judged = "trial 1: bucket_bytes 25 MiB -> 4 MiB", "verdict on 1: bucket_bytes kept"
    waiting = [job.rows.waiting, *job.rows.rows]
    for events in (
        job.board.texts,
        list(job.client.tags.values()),
        [row["pacecar/event"] for row in waiting if "pacecar/event" in row],
    ):
        assert any(decided in event for event in events)
        assert any(judged in event for event in events)


@pytest.mark.slow
def test_the_rows_of_the_script_are_its_own_and_no_more(job: Job) -> None:
    assert [row["mine"] for row in job.rows.rows] == list(range(1, len(job.rows.rows) + 1))


def test_one_that_raises_costs_two_lines_and_one_that_hangs_is_not_waited_for(job: Job) -> None:
    """`close` returned in the fixture although the writer still hangs."""
    assert not job.hanging.goes_on.is_set()
    assert sum("pacecar could not write to TensorBoard (OSError" in line for line in job.lines) == 1
    assert sum("pacecar stops writing to TensorBoard" in line for line in job.lines) == 1


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the three libraries' own readers found."""
    folder = tmp_path_factory.mktemp("logs")
    done = subprocess.run(
        [adapters_python(), str(Path(__file__).with_name("job_loggers.py")), str(folder)],
        env=environment(WANDB_MODE="offline", WANDB_SILENT="true", MLFLOW_DISABLE_TELEMETRY="true"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer | {"stderr": done.stderr}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("place", ["board", "mlflow"])
def test_the_pace_is_there_at_rising_steps(logged: dict[str, Any], place: str) -> None:
    points = logged["mlflow"] if place == "mlflow" else logged["board"]["pacecar/step_seconds"]
    assert len(points) >= 1
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(0 < value < 10 for _, value in points)


@pytest.mark.slow
@pytest.mark.full
def test_the_ledger_is_there_whole(logged: dict[str, Any]) -> None:
    names = [f"pacecar/share/{heading}" for heading in LEDGER_HEADINGS]
    for parts in zip(*(logged["board"][name] for name in names), strict=True):
        assert sum(value for _, value in parts) == pytest.approx(1, abs=1e-5)
    rows = [row for row in logged["wandb"] if names[0] in row]
    assert rows
    for row in rows:
        assert sum(row[name] for name in names) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
@pytest.mark.full
def test_decisions_and_verdicts_are_events(logged: dict[str, Any]) -> None:
    decided, judged = "trial 1: bucket_bytes 25 MiB -> 4 MiB", "verdict on 1: bucket_bytes kept"
    rows = [row["pacecar/event"] for row in logged["wandb"] if "pacecar/event" in row]
    for events in (logged["board_events"], list(logged["mlflow_events"].values()), rows):
        assert any(decided in event for event in events)
        assert any(judged in event for event in events)


@pytest.mark.slow
@pytest.mark.full
def test_the_script_s_own_rows_keep_their_numbers(logged: dict[str, Any]) -> None:
    mine = [(row["_step"], row["mine"]) for row in logged["wandb"] if "mine" in row]
    assert mine == [(0, 99), (1, 199), (2, 299), (3, 399)]


@pytest.mark.slow
@pytest.mark.full
def test_a_logger_that_raises_or_hangs_costs_two_lines_and_the_wait_of_close(logged: dict[str, Any]) -> None:
    assert logged["stderr"].count("pacecar could not write to TensorBoard (RuntimeError: planted") == 1
    assert logged["stderr"].count("pacecar stops writing to TensorBoard") == 1
    assert "Traceback" not in logged["stderr"]
    assert logged["close_seconds"] < 6, "two seconds for all sinks, and half a second each"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("library", ["tensorboard", "wandb", "mlflow"])
def test_the_table_says_what_ran(logged: dict[str, Any], library: str) -> None:
    answer = {"measured": ["pace", "ledger", "decisions"], "switches": [], "refused": {}}
    compatibility.ran(f"zlogger_{library}", library, logged["versions"][library], "logger", answer)
