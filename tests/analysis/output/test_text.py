"""The tables of an analysis: what is shown, what is left out, and that they fit."""

from __future__ import annotations

import html
import io

import pytest
from msgspec import structs
from rich.console import Console, RenderableType

from pacecar.analysis.document.report import LateTraceRank, Scenario, StepIncident, StepReport, TraceDocument
from pacecar.analysis.one_rank.kernel_families import kernel_name
from pacecar.analysis.output.jobtext import INCIDENTS_MAX
from pacecar.analysis.output.page.page import analysis_page
from pacecar.analysis.output.tables import job_tables, trace_tables
from pacecar.analysis.output.tables.trace_tables import what_if_table
from pacecar.analysis.output.text import WARNINGS_MAX, document_text, warning_lines
from pacecar.analysis.output.words import shown_ranks
from pacecar.analysis.reading.parallel_reading import Options, analyze_files
from pacecar.analysis.trace.columns import TraceWarning
from pacecar.formatting.terminal_tables import terminal_table
from pacecar.records import Ledger
from tests.analysis.page_jobs import healthy
from tests.analysis.tracefiles import write_trace


def shown(*parts: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def text_of(document: TraceDocument, width: int = 80) -> str:
    return shown(*document_text(document, Console(width=width, color_system=None)), width=width)


def test_a_kernel_is_named_without_its_return_type_and_steers_nothing() -> None:
    assert kernel_name("void at::native::f<4>()") == "at::native::f<4>()"
    assert kernel_name("a\x1b[2Jb\n") == "a\ufffd[2Jb\ufffd"


def test_a_step_that_is_two_things_has_one_column(tmp_path) -> None:
    path = write_trace(tmp_path / "a.json", "cc..ccc.cccccc..cc", steps=[(0, 4), (4, 8), (8, 16), (16, 18)])
    text = text_of(analyze_files([path], Options(window="steps")))
    assert "4 steps" in text
    assert "first/median #3" in text
    assert "slowest #5" in text
    assert "last #6" in text


def test_a_zero_share_of_unknown_is_shown_because_it_says_how_far_to_trust_the_rest(tmp_path) -> None:
    text = text_of(analyze_files([write_trace(tmp_path / "a.json", "ccAAcc")]))
    (line,) = [line for line in text.splitlines() if line.startswith("unknown")]
    assert line.split() == ["unknown", "0.00", "ms", "0.0", "%"]


def test_wide_terminals_see_more_of_the_collectives(tmp_path) -> None:
    found = analyze_files([write_trace(tmp_path / "a.json", "ccAAcc", rank=0)])
    assert "alg bw" not in text_of(found)
    wide = text_of(found, width=160)
    assert "alg bw" in wide
    assert max(map(len, wide.splitlines())) <= 160


@pytest.mark.slow
def test_several_ranks_say_who_was_late_and_what_the_wire_did(tmp_path) -> None:
    files = [
        write_trace(tmp_path / f"rank{rank}.json", drawing, rank=rank, world_size=2, steps=[(0, 20)])
        for rank, drawing in enumerate(("ccAAAAAAAAccccAAAAcc", "ccccccccAAccccccAAcc"))
    ]
    text = text_of(analyze_files(files))
    assert "2 traces, 2 of 2 ranks" in text
    assert "Who holds the job up cannot be told" in text
    assert "2 ranks in 1 step are too few to tell a slow one from chance" in text
    assert "Critical path (20.00 ms" in text
    assert "Collectives, one by one" in text
    (late,) = [line for line in text.splitlines() if line.startswith("all_reduce  0")]
    assert late.split()[5] == "1", "the last rank"
    assert "6.00 ms" in late, "the skew"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_single_steps_that_stand_out_have_a_line_below_the_verdict_and_name_nobody() -> None:
    document = healthy().document
    assert document.job is not None
    document.job.incidents = [
        StepIncident(rank=rank, step=3 if rank else None, cause="host_bound", excess_ns=(9 - rank) * 1_000_000)
        for rank in range(INCIDENTS_MAX + 2)
    ]
    text = text_of(document)
    _, *lines = text[text.index("No rank holds the job up") :].splitlines()[: INCIDENTS_MAX + 2]
    assert lines[0] == "incident  rank 0, once: host-bound, 9.00 ms longer than its peers"
    assert lines[1] == "incident  rank 1, in step 3 only: host-bound, 8.00 ms longer than its peers"
    assert lines[INCIDENTS_MAX] == "incident  2 more: --json has all"


@pytest.mark.slow
def test_of_many_ranks_the_first_are_shown_and_who_has_most_of_the_critical_path(tmp_path) -> None:
    drawings = ["ccAAAAAAcc"] * 19 + ["ccccccAAcc"]
    files = [
        write_trace(tmp_path / f"rank{rank:02}.json", drawing, rank=rank, world_size=20)
        for rank, drawing in enumerate(drawings)
    ]
    text = text_of(analyze_files(files))
    table = text[text.index("Ranks (16 of 20), in ms") : text.index("Wait and wire")].splitlines()[3:]
    assert [line.split()[0] for line in table] == [*map(str, range(15)), "19"]


@pytest.mark.slow
def test_who_arrived_last_decides_neither_which_ranks_are_shown_nor_who_is_named() -> None:
    document = healthy().document
    job = document.job
    assert job is not None
    several = [structs.replace(report, rank=rank) for rank in range(20) for report in document.traces[:1]]
    late = [structs.replace(job.shares[0], rank=rank, caused_wait_ns=rank * 10**9) for rank in range(20)]
    job = structs.replace(job, ranks=list(range(20)), shares=late)
    assert [report.rank for report in shown_ranks(several, job, {}, 4)] == [0, 1, 2, 3]
    assert [report.rank for report in shown_ranks(several, job, {9: 5, 7: 6, 3: 1}, 4)] == [0, 1, 7, 9]
    named = LateTraceRank(
        rank=17, caused_wait_ns=0, late_count=0, collectives=1, cause="compute", excess_ns=1, evidence="", saved_ns=1,
        error_ns=0, since_step=None, kind="stage", ranks=[17, 18],
    )  # fmt: skip
    accused = structs.replace(job, stragglers=[named])
    assert [report.rank for report in shown_ranks(several, accused, {9: 5}, 5)] == [0, 1, 9, 17, 18]
    text = text_of(structs.replace(document, traces=several, job=job))
    assert "No rank holds the job up" in text
    assert "caused" not in text


@pytest.mark.slow
def test_the_terminal_shows_at_any_width_figures_that_the_page_shows_too() -> None:
    analysis = healthy()
    job = analysis.document.job
    assert job is not None
    page = html.unescape(analysis_page(analysis))
    for table in (
        job_tables.critical_table(job, 8),
        trace_tables.collectives_table(job.collectives, 8),
        trace_tables.what_if_table(job.what_if),
    ):
        assert table is not None
        lines = shown(*terminal_table(table, Console(width=80, color_system=None))).splitlines()
        for cells, line in zip(table.rows, lines[3:], strict=True):
            in_line = [cell for column, cell in zip(table.columns, cells, strict=True) if column.shown == "always"]
            assert " ".join(" ".join(in_line).split()) == " ".join(line.split())
            assert all(f">{cell}<" in page for cell in cells)


def test_rungs_that_save_nothing_are_left_out_and_absurd_ones_are_capped() -> None:
    rung = Scenario(name="at_most_data_free", step_ns=1e6, speedup=1.0, saved_ns=0.0, note="")
    assert what_if_table([rung], worth_only=True) is None
    rungs = [rung, Scenario(name="at_most_all", step_ns=1.0, speedup=1e6, saved_ns=1e6, note="")]
    text = shown(*terminal_table(what_if_table(rungs, worth_only=True), Console(width=80)))
    assert "data for free" not in text
    assert "> 100 x" in text


def test_the_same_warning_of_many_files_is_one_line_and_their_number_is_bounded() -> None:
    same = [(f"rank{rank}", [TraceWarning("cut", "the end is missing")]) for rank in range(5)]
    many = [("rank0", [TraceWarning(f"code{index}", "x") for index in range(30)])]
    lines = shown(*warning_lines([*same, *many], True)).splitlines()
    assert lines[2] == "cut: the end is missing (5 files)"
    assert len(lines) == 3 + WARNINGS_MAX
    assert lines[-1].startswith("and 19 more")


def test_steps_of_no_length_divide_nothing(tmp_path) -> None:
    found = analyze_files([write_trace(tmp_path / "a.json", "c")])
    report = found.traces[0]
    report.ledger = Ledger(wall_ns=0)
    report.span_ns = 0
    report.steps = [StepReport(step=1, start_ns=0, ledger=Ledger(wall_ns=0))]
    assert "0 ns" in text_of(found)
