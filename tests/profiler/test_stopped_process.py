"""A rank that is stopped is not computing: real jobs of one and two ranks under SIGSTOP, at each moment of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from pacecar.commands.report.build import BuildOptions, build_report
from pacecar.commands.report.comparison import compare
from pacecar.commands.report.output.tables import headline
from pacecar.commands.report.reading.inputs import find_inputs
from pacecar.records import HangSuspicion, JobLedger, JobRecord, ProcessStop, StepRecord
from tests.kit.ranks import run_ranks
from tests.profiler.job_stopped import SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

JOB = Path(__file__).with_name("job_stopped.py")
MOMENTS = ("forward", "backward", "optimizer", "data_wait", "outside", "window forward", "window backward")
NS = 1_000_000_000
SLACK_NS = 3 * NS // 10
"""What a look comes late, and what of the stop belongs to the shell that ends it."""


class Told(NamedTuple):
    moment: str
    step: int
    was_profiled: bool
    wall_ns: int

    @property
    def in_step(self) -> int:
        """The step that it lies in: a step ends with optimizer.step(), and the loop counts when it has a batch."""
        return self.step + (self.moment in ("outside", "data_wait"))


class Ran(NamedTuple):
    folder: Path
    told: list[Told]
    ranks: list[list[JobRecord]]

    def of(self, rank: int, kind: type) -> list[JobRecord]:
        return [record for record in self.ranks[rank] if isinstance(record, kind)]

    def steps(self, rank: int) -> dict[int, StepRecord]:
        return {record.step: record for record in self.ranks[rank] if isinstance(record, StepRecord)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Ran]:
    """Return run(ranks, stopped): a job of so many ranks in which one was stopped at each moment; run once."""
    found: dict[tuple[int, int], Ran] = {}

    def run(ranks: int, stopped: int) -> Ran:
        if (ranks, stopped) not in found:
            folder = tmp_path_factory.mktemp("stopped")
            run_ranks([JOB, folder, str(stopped), *MOMENTS], ranks)
            told = [line.split(",") for line in (folder / "stops").read_text().splitlines()]
            decoder = msgspec.json.Decoder(JobRecord)
            found[ranks, stopped] = Ran(
                folder,
                [Told(moment, int(step), profiled == "1", int(wall)) for moment, step, profiled, wall in told],
                [
                    [decoder.decode(line) for line in (folder / f"rank{rank}.jsonl").read_bytes().splitlines()]
                    for rank in range(ranks)
                ],
            )
        return found[ranks, stopped]

    return run


JOBS = pytest.mark.parametrize(
    ("ranks", "stopped"),
    [pytest.param(1, 0, marks=pytest.mark.full, id="lone"), pytest.param(2, 1, id="rank 1 of 2")],
)


@JOBS
def test_a_stop_is_in_the_ledger_as_such_at_whatever_moment_it_was(
    ran: Callable[[int, int], Ran], ranks: int, stopped: int
) -> None:
    run = ran(ranks, stopped)
    assert [told.moment for told in run.told] == list(MOMENTS)
    assert run.told[-1].was_profiled
    steps = run.steps(stopped)
    for told in run.told:
        step = steps[told.in_step]
        assert step.ledger.stopped_ns >= SECONDS * NS - SLACK_NS, told
        assert step.ledger.wall_ns - step.ledger.stopped_ns < step.ledger.wall_ns // 2, told
        assert step.overhead_ns < step.ledger.wall_ns - step.ledger.stopped_ns + 1, told
        if told.moment.startswith("window"):
            assert step.source == "exact", told
    calm = [step for number, step in steps.items() if all(abs(number - told.step) > 1 for told in run.told)]
    assert sum(step.ledger.stopped_ns for step in calm) < SECONDS * NS, "but for a busy machine nothing else was"


@JOBS
def test_each_stop_is_told_with_its_phase_when_it_was_and_for_how_long(
    ran: Callable[[int, int], Ran], ranks: int, stopped: int
) -> None:
    run = ran(ranks, stopped)
    stops = [record for record in run.of(stopped, ProcessStop) if isinstance(record, ProcessStop)]
    for told in run.told:
        near = [one for one in stops if abs(one.wall_ns - told.wall_ns) < NS]
        (stop,) = [one for one in near if one.stopped_ns >= SECONDS * NS - SLACK_NS]
        assert stop.step == told.in_step
        assert stop.phase == told.moment.removeprefix("window "), told
        assert stop.rank == stopped
        assert stop.cause != "throttled", "a signal, and no quota"


@JOBS
def test_nothing_is_learned_from_a_window_in_which_the_process_was_stopped(
    ran: Callable[[int, int], Ran], ranks: int, stopped: int
) -> None:
    """Else all steps after it would be estimated as stopped, too."""
    run = ran(ranks, stopped)
    last = run.told[-1].step
    after = [step for number, step in run.steps(stopped).items() if number > last + 1]
    assert after
    assert sum(step.ledger.stopped_ns for step in after) < SECONDS * NS / 2


def test_the_rank_that_waits_meanwhile_is_neither_stopped_nor_computing(ran: Callable[[int, int], Ran]) -> None:
    run = ran(2, 1)
    steps = run.steps(0)
    for told in run.told:
        waited = [steps[number] for number in (told.step, told.step + 1, told.step + 2) if number in steps]
        step = max(waited, key=lambda one: one.wall_ns)
        assert step.wall_ns > SECONDS * NS - SLACK_NS, told
        assert step.ledger.compute_ns < step.wall_ns // 2, (told, step.ledger)
        assert step.ledger.stopped_ns < step.wall_ns // 2, (told, step.ledger)


def test_the_ranks_ledger_of_phases_names_it_and_sums_to_the_wall_time(ran: Callable[[int, int], Ran]) -> None:
    ledgers = [record for record in ran(2, 1).of(0, JobLedger) if isinstance(record, JobLedger)]
    assert ledgers
    assert sum(ledgers[-1].total_phases_ns.values()) == ledgers[-1].total_wall_ns
    assert ledgers[-1].total_phases_ns["stopped"] > 4 * SECONDS * NS


def test_a_rank_that_was_stopped_does_not_suspect_itself_when_it_goes_on(ran: Callable[[int, int], Ran]) -> None:
    run = ran(1, 0)
    assert [record for record in run.of(0, HangSuspicion) if isinstance(record, HangSuspicion)] == []


@JOBS
def test_the_report_says_first_that_the_run_hung_when_and_on_whom(
    ran: Callable[[int, int], Ran], ranks: int, stopped: int
) -> None:
    run = ran(ranks, stopped)
    built = build_report(find_inputs(run.folder), BuildOptions())
    said = headline(built.report)
    assert said.startswith(f"The run hung {len(MOMENTS)} times, for 1"), said
    assert f"rank {stopped} was stopped from 20" in said
    assert "rank 0" not in said or stopped == 0
    row = built.report.ranks[stopped]
    assert row.ledger_ns["stopped"] > row.ledger_ns["compute"]
    assert any(f"rank {stopped} was stopped" in warning for warning in compare([built, built]).warnings)
