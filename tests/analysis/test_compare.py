"""Two runs on one scale: for one step of one rank, however long somebody left the profiler on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pacecar.analysis.compare import HEADINGS, compare
from pacecar.analysis.document.report import TraceComparison, TraceDocument, TraceReport
from pacecar.analysis.output.comparetext import comparison_text
from pacecar.analysis.reading.parallel_reading import Options, analyze_files
from pacecar.analysis.trace.columns import TraceWarning
from tests.analysis.test_command import as_json, pacecar
from tests.analysis.tracefiles import write_trace

BEFORE, AFTER = "cccc..AAAA", "cccccAAm.."


def reports(folder: Path, drawing: str, steps: int, rank: int = 0, **options: object) -> list[TraceReport]:
    marks = [(len(drawing) * index, len(drawing) * (index + 1)) for index in range(steps)]
    path = write_trace(
        folder / f"{drawing}{steps}.{rank}.json", drawing * max(steps, 1), rank=rank, steps=marks, **options
    )
    return analyze_files([path], Options(window="steps")).traces


def rows(comparison: TraceComparison) -> dict[str, tuple[float, float, float]]:
    return {row.name: (row.before_ns, row.after_ns, row.change_ns) for row in comparison.headings}


def test_every_heading_is_for_one_step_whatever_the_number_of_steps(tmp_path: Path) -> None:
    found, warnings = compare(("a", reports(tmp_path, BEFORE, 2)), ("b", reports(tmp_path, AFTER, 3)))
    assert found.per == "step"
    assert tuple(row.name for row in found.headings) == HEADINGS
    got = rows(found)
    assert got["compute"] == pytest.approx((4e6, 5e6, 1e6))
    assert got["exposed_communication"] == pytest.approx((4e6, 2e6, -2e6))
    assert got["exposed_copy"] == pytest.approx((0, 1e6, 1e6))
    assert got["wall"][0] == pytest.approx(10e6)
    assert [warning.code for warning in warnings] == ["different_step_counts"]
    assert (found.before.steps, found.after.steps) == (2, 3)


def test_the_headings_of_each_side_add_up_to_its_step(tmp_path: Path) -> None:
    found, _ = compare(("a", reports(tmp_path, BEFORE, 2)), ("b", reports(tmp_path, AFTER, 2)))
    got = rows(found)
    for side in range(3):
        assert sum(row[side] for name, row in got.items() if name in HEADINGS[:8]) == pytest.approx(got["wall"][side])


def test_a_run_compared_with_itself_has_not_changed(tmp_path: Path) -> None:
    run = reports(tmp_path, BEFORE, 3)
    found, warnings = compare(("a", run), ("a", run))
    assert warnings == []
    assert {row.change_ns for row in (*found.headings, *found.families, *found.collectives)} == {0}


@pytest.mark.slow
@given(before=st.integers(1, 4), after=st.integers(1, 4))
def test_turning_the_comparison_round_turns_every_sign(tmp_path_factory: pytest.TempPathFactory, before, after) -> None:
    folder = tmp_path_factory.mktemp("round")
    one, two = ("a", reports(folder, BEFORE, before)), ("b", reports(folder, AFTER, after))
    there, back = compare(one, two)[0], compare(two, one)[0]
    assert [row.change_ns for row in there.headings] == pytest.approx([-row.change_ns for row in back.headings])


def test_what_is_on_one_side_only_has_a_change_and_no_ratio(tmp_path: Path) -> None:
    found, _ = compare(("a", reports(tmp_path, "cccc", 2)), ("b", reports(tmp_path, "ccAA", 2)))
    (row,) = found.collectives
    assert (row.before_ns, row.change_ratio) == (0, None)
    assert row.after_ns == pytest.approx(2e6)
    assert row.after_count == pytest.approx(1)


def test_collectives_are_compared_by_size_where_both_sides_have_the_same_and_else_by_operation(tmp_path: Path) -> None:
    run = reports(tmp_path, BEFORE, 2)
    assert compare(("a", run), ("b", run))[0].collectives[0].name == "all_reduce 4000000 B"
    bigger = reports(tmp_path, BEFORE, 2, rank=1)
    for row in bigger[0].collectives:
        row.bytes = 8_000_000
    assert [row.name for row in compare(("a", run), ("b", bigger))[0].collectives] == ["all_reduce"]


def test_without_steps_whole_traces_are_compared_and_it_is_said(tmp_path: Path) -> None:
    found, warnings = compare(("a", reports(tmp_path, BEFORE, 0)), ("b", reports(tmp_path, AFTER, 2)))
    assert found.per == "trace"
    assert found.before.median_step_ns is None
    assert TraceWarning in map(type, warnings)
    assert [warning.code for warning in warnings] == ["compared_without_steps"]


def test_the_pace_is_the_slowest_ranks_median(tmp_path: Path) -> None:
    two = [*reports(tmp_path, "ccAA", 3), *reports(tmp_path, "ccccAA", 3, rank=1)]
    found, warnings = compare(("a", two), ("b", reports(tmp_path, "ccAA", 3)))
    assert found.before.median_step_ns == 6e6
    assert found.after.median_step_ns == 4e6
    assert [warning.code for warning in warnings] == ["different_rank_counts"]


@pytest.mark.slow
def test_the_command_compares_two_folders_of_ranks(tmp_path: Path) -> None:
    for side, drawings in (("before", ("ccAAAA", "ccccAA")), ("after", ("ccAA..", "ccAA.."))):
        (tmp_path / side).mkdir()
        for rank, drawing in enumerate(drawings):
            write_trace(tmp_path / side / f"rank{rank}.json", drawing * 2, rank=rank, steps=[(0, 6), (6, 12)])
    found = as_json("--compare", tmp_path / "before", tmp_path / "after")
    assert [Path(report["file"]).parent.name for report in found["traces"]] == ["before"] * 2 + ["after"] * 2
    assert found["comparison"]["before"]["ranks"] == 2
    assert found["comparison"]["headings"][1]["change_ns"] < 0
    done = pacecar("--compare", tmp_path / "before", tmp_path / "after")
    assert done.returncode == 0
    assert "median step of the slowest rank" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_a_side_that_cannot_be_read_ends_the_comparison(tmp_path: Path) -> None:
    good = write_trace(tmp_path / "a.json", BEFORE, steps=[(0, 10)])
    done = pacecar("--compare", good, tmp_path / "gone.json")
    assert done.returncode == 1
    assert "gone.json: no such file" in done.stderr


def test_the_table_says_the_pace_and_what_moved_it(tmp_path: Path) -> None:
    sides = (reports(tmp_path, BEFORE, 2), reports(tmp_path, AFTER, 2))
    comparison, _ = compare(("before.json", sides[0]), ("after.json", sides[1]))
    console = Console(file=io.StringIO(), width=80, color_system=None, highlight=False, markup=False)
    for part in comparison_text(TraceDocument(traces=[*sides[0], *sides[1]], comparison=comparison), console):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    (row,) = [line for line in text.splitlines() if line.startswith("exposed communication")]
    assert row.split()[-5:] == ["20.0", "%", "-2.00", "-50.0", "%"]
