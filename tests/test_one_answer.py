"""One simulated job gets one answer, in one vocabulary, from everything that says who holds it up and what that costs.

The same run goes through the comparison of ranks in the running job, and from there into metrics, page, report and
doctor; and as traces through `pacecar analyze`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pacecar.analysis.all_ranks.rank_comparison import analyze_job
from pacecar.analysis.document.report import TraceJob, TraceReport
from pacecar.analysis.graph.causes import CauseCode
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.reading.parallel_reading import Options, analyze
from pacecar.clock import SystemClock
from pacecar.commands.doctor.facts.run import read_run
from pacecar.commands.report.build import BuildOptions, build_report
from pacecar.commands.report.reading.inputs import find_inputs
from pacecar.formatting.ledger_headings import CAUSE_WORDS, SCENARIO_WORDS
from pacecar.monitor.export.job_samples import job_samples
from pacecar.monitor.http.job_status import job_document
from pacecar.monitor.jobs.cgroup_identity import Residence
from pacecar.monitor.jobs.state import DaemonState
from pacecar.profiler.ranks.exchange.phase_sums_message import RankRange, StepNote, gather_range
from pacecar.profiler.ranks.exchange.totals import LedgerTotals
from pacecar.profiler.ranks.straggler_detector import StragglerDetector
from pacecar.profiler.ranks.what_if import what_if_of
from pacecar.records import Cause, Ledger, Straggler, WhatIf
from pacecar.records.measurements.what_if import AT_MOST, QUESTIONS
from tests.kit.records import START_NS, job_hello, step_record
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, Model, Run, simulate
from tests.kit.simulated_jobs.instructions import Code, Phase
from tests.kit.simulated_jobs.kineto import write_job

RANKS = 4
STEPS = 48
PERIOD = 4

LATE = tuple(range(25, STEPS + 1))
"""The steps with a fault; one that was always there is usual to the running job."""

JOBS: dict[str, tuple[Fault, ...]] = {
    "healthy": (),
    "compute": (Fault(FaultKind.SLOW_COMPUTE, (2,), 0.4, LATE),),
    "data": (Fault(FaultKind.DATA_WAIT, (1,), 60e6, LATE),),
    "optimizer": (Fault(FaultKind.OPTIMIZER_HOST, (3,), 60e6, LATE),),
    "checkpoint": (Fault(FaultKind.CHECKPOINT, (0,), 60e6, LATE),),
}

PHASES = {
    Phase.DATA: "data_wait", Phase.INPUT: "forward", Phase.FORWARD: "forward", Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer", Phase.CHECKPOINT: "checkpoint",
}  # fmt: skip
"""What the hook's timers call each phase; the rest is in none."""


@dataclass(frozen=True)
class Answers:
    """All that is said about one run."""

    live: list[Straggler]
    what_if: WhatIf
    traces: list[TraceReport]
    job: TraceJob


def notes_of(run: Run, rank: int) -> list[StepNote]:
    """Return the steps of a rank as its hook would time them: waiting for gloo is the tail of the backward."""
    times, program = run.times[rank], run.program(rank)
    ends = np.append(times.host_start[1:], times.host_end[-1])
    lasted = (ends - times.host_start).reshape(-1, len(program))
    notes = []
    for step, parts in enumerate(lasted.tolist()):
        phases: Counter[str] = Counter()
        for one, duration in zip(program.instructions, parts, strict=True):
            phase = "backward_tail" if one.code == Code.SYNC else PHASES.get(one.phase)
            if phase is not None:
                phases[phase] += duration
        notes.append(StepNote(step, sum(parts), phases, 0, disturbed=False))
    return notes


def live_findings(run: Run) -> list[Straggler]:
    """Return what the comparison of ranks in the running job finds."""
    detector = StragglerDetector("j", RANKS)
    notes = [notes_of(run, rank) for rank in range(RANKS)]
    found = []
    for first in range(0, len(notes[0]) - PERIOD + 1, PERIOD):
        rows: list[RankRange] = [gather_range(mine[first : first + PERIOD], number=first // PERIOD) for mine in notes]
        found += detector.judge(rows, START_NS)
    return found


@pytest.fixture(scope="module", params=JOBS)
def answers(request: pytest.FixtureRequest) -> Answers:
    faults = JOBS[request.param]
    run = simulate(Job(Layout(data=RANKS), is_cpu=True, faults=faults, steps=STEPS, seed=7))
    traces = run.traces()
    reports = [analyze_trace(trace) for trace in traces]
    nothing = LedgerTotals(Ledger(wall_ns=0), 0, 0, 0)
    sums = [sum((step.ledger for step in report.steps), Ledger(wall_ns=0)) for report in reports]
    live = live_findings(run)
    what_if = what_if_of(
        [(nothing, LedgerTotals(ledger, STEPS, STEPS, 0)) for ledger in sums],
        job="j", of_rank=None, step=STEPS, wall_ns=START_NS, age_steps=0,
        stragglers=live,
    )  # fmt: skip
    assert what_if is not None
    return Answers(live, what_if, reports, analyze_job(traces, reports))


def culprits(said: Answers) -> list[tuple[int | None, Cause]]:
    return [(one.late_rank, one.cause) for one in said.live]


@pytest.mark.slow
def test_the_running_job_and_the_traces_name_the_same_ranks_for_the_same_causes(answers: Answers) -> None:
    assert [(one.rank, one.cause) for one in answers.job.stragglers] == culprits(answers)
    for live, verdict in zip(answers.live, answers.job.stragglers, strict=True):
        # The running job takes the mean over the late steps, the verdict over all of them.
        assert live.excess_ns * len(LATE) == pytest.approx(verdict.excess_ns * STEPS, rel=0.1)


def test_what_the_simulation_put_in_is_what_all_of_them_say(request: pytest.FixtureRequest, answers: Answers) -> None:
    faults = JOBS[request.node.callspec.params["answers"]]
    assert culprits(answers) == [(fault.ranks[0], Cause(fault.causes[0])) for fault in faults]


def test_metrics_page_report_and_doctor_show_the_ranks_causes_and_figures_of_the_record(
    answers: Answers, tmp_path: Path
) -> None:
    board = DaemonState(SystemClock(), jobs_max=1, ranks_max=RANKS, job_forget_seconds=60)
    hellos = [job_hello(rank, world_size=RANKS) for rank in range(RANKS)]
    records = [*answers.live, answers.what_if]
    for rank, hello in enumerate(hellos):
        mine = [hello, *(step_record(rank, step) for step in range(1, STEPS)), *(records if rank == 0 else [])]
        lines = b"\n".join(map(msgspec.json.encode, mine)) + b"\n"
        (tmp_path / f"rank{rank}.jsonl").write_bytes(lines)
        for record in mine:
            board.record(record, hello=hello, uid=1, owner=rank)
    (view,) = board.jobs()
    page = job_document(view, "j", None, RANKS, lambda hello: Residence())
    series = {
        (one.metric.removeprefix("pacecar_job_"), *one.labels[2:]): one.value for one in job_samples(board.jobs())
    }
    report = build_report(find_inputs(tmp_path), BuildOptions()).report
    doctor, _ = read_run(tmp_path)

    expected = [(one.late_rank, one.cause, one.excess_ns) for one in answers.live]
    assert [(one.rank, one.cause, round(one.excess_seconds * 1e9)) for one in page.stragglers] == expected
    assert [(one.rank, one.cause, one.excess_ns) for one in report.slowdowns] == expected
    assert [(one.late_rank, one.cause, one.excess_ns) for one in doctor.stragglers] == expected
    assert len([labels for labels in series if labels[0] == "straggler_excess_seconds"]) == len(expected)
    for rank, cause, excess_ns in expected:
        assert series["straggler_excess_seconds", str(rank), cause] == excess_ns
        assert series["stragglers_total", cause] == 1
        assert cause in CAUSE_WORDS

    assert page.what_if is not None
    assert report.ladder == doctor.ladder == answers.what_if
    for rung, shown in zip(answers.what_if.rungs, page.what_if.rungs, strict=True):
        assert (shown.scenario, shown.gain_ratio) == (rung.name, rung.gain_ratio)
        assert series["what_if_gain_ratio", rung.name] == rung.gain_ratio
        assert rung.name in SCENARIO_WORDS


def test_no_bound_is_named_like_a_replay_and_no_replay_saves_more_than_its_bound(answers: Answers) -> None:
    replays = {one.name: one for one in answers.job.what_if}
    bounds = {rung.name: rung for rung in answers.what_if.rungs}
    assert set(bounds) == {AT_MOST + question for question in QUESTIONS}
    assert set(QUESTIONS) <= set(replays)
    assert not set(bounds) & set(replays)
    assert {one.name for report in answers.traces for one in report.what_if} <= set(bounds)
    for question in QUESTIONS:
        replay, bound = replays[question], bounds[AT_MOST + question]
        assert replay.saved_ns - replay.error_ns <= answers.what_if.pace_ns - bound.step_ns, question


def test_a_trace_has_bounds_only_where_no_replay_answers(tmp_path: Path) -> None:
    job = Job(Layout(data=2), is_cpu=True, steps=2)
    files = write_job(tmp_path, simulate(job).traces(), job.layout)
    together, alone = analyze(files, Options()).document, analyze(files[:1], Options()).document
    assert together.job.what_if
    assert [report.what_if for report in together.traces] == [[], []]
    assert {one.name.startswith(AT_MOST) for report in alone.traces for one in report.what_if} == {True}


def test_a_trace_of_a_pipeline_has_no_bound_for_communication() -> None:
    run = simulate(Job(Layout(pipeline=2), model=Model(microbatches=2), steps=2))
    found = {one.name for one in analyze_trace(run.trace(0)).what_if}
    assert found == {"at_most_data_free", "at_most_launch_gaps_gone"}


def test_columns_number_the_causes_by_the_same_words() -> None:
    assert {code.word for code in CauseCode} - {"blocked"} == set(Cause) - {Cause.THROTTLED}
