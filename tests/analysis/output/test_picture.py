"""The picture: area is time, its figures are the ledger's, and no text lies on another."""

from __future__ import annotations

import re
import statistics
import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.analysis.document.report import TraceDocument
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.output.page.picture import picture, write_picture
from pacecar.analysis.output.page.rank_timeline import CHARGED_HEIGHT, LEFT, coverage
from pacecar.analysis.reading.parallel_reading import Analysis, Options, analyze
from pacecar.analysis.trace.reader import read_trace
from pacecar.dashboards.palette import HEADING_COLOURS as DASHBOARD_COLOURS
from pacecar.formatting.ledger_headings import HEADING_COLOURS
from pacecar.formatting.page.svg import RIGHT, WIDTH
from pacecar.ledger.intervals import intervals, union
from pacecar.records import LEDGER_HEADINGS, Ledger
from tests.analysis.page_jobs import straggling
from tests.analysis.trace.traces import trace_file
from tests.analysis.tracefiles import write_trace

COLUMNS = WIDTH - LEFT[True] - RIGHT

SVG = "{http://www.w3.org/2000/svg}"


def analysis_of(path: Path) -> Analysis:
    return analyze([path], Options(keeps_tables=True))


def drawn(path: Path, step: int | None = None) -> tuple[ET.Element, Ledger]:
    analysis = analysis_of(path)
    report = analysis.document.traces[0]
    root = ET.fromstring(picture(analysis, step))
    if report.steps and step is None:
        inner = report.steps[1:-1] or report.steps
        walls = [one.ledger.wall_ns for one in inner]
        return root, inner[walls.index(statistics.median_low(walls))].ledger
    return root, next((one.ledger for one in report.steps if one.step == step), report.ledger)


def areas(root: ET.Element, bottom: float, height: float) -> dict[str, float]:
    """Return each heading's area in the lane that ends at `bottom`, as a share of the lane."""
    found: dict[str, float] = defaultdict(float)
    for path in root.iter(f"{SVG}path"):
        for x, low, end, high in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H", path.get("d", "")):
            if bottom - height - 0.01 <= float(high) and float(low) <= bottom + 0.01:
                found[path.get("class", "")] += (float(end) - float(x)) * (float(low) - float(high))
    return {name: area / (COLUMNS * height) for name, area in found.items()}


def charged_bottom(root: ET.Element) -> float:
    (label,) = [text for text in root.iter(f"{SVG}text") if text.text == "charged to"]
    return float(label.get("y", "")) - 5 + CHARGED_HEIGHT / 2


def agrees(root: ET.Element, ledger: Ledger) -> None:
    shares = areas(root, charged_bottom(root), CHARGED_HEIGHT)
    for heading, part in ledger.parts().items():
        # Heights are written to a hundredth of a pixel, and each of the columns may be off by that.
        assert shares.get(heading, 0) == pytest.approx(part / ledger.wall_ns, abs=0.002), heading


def test_areas_of_the_lane_charged_to_are_the_shares_of_the_ledger(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.json", ("dccc.mm..ccoo", "..AAAAAA....."), steps=[(0, 6), (6, 13)])
    for step in (3, 4):
        agrees(*drawn(path, step))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step"), [("hta_trace_diff_test", 1013), ("hta_nccl_data", 5), ("tl_mi210_gpu_only_trace", None)]
)
def test_areas_are_the_ledgers_however_many_kernels_there_are(name: str, step: int | None) -> None:
    agrees(*drawn(trace_file(name), step))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300)), max_size=30))
def test_coverage_of_any_spans_is_their_length(spans: list[tuple[int, int]]) -> None:
    rows = union(intervals((start, start + length) for start, length in spans))
    window = (0, 2500)
    covered = coverage(rows, window, COLUMNS)
    assert ((covered >= 0) & (covered <= 1)).all()
    assert covered.sum() * 2500 / COLUMNS == pytest.approx(float((rows[:, 1] - rows[:, 0]).sum()), abs=1e-6)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    lanes=st.lists(
        st.text("cAmdo.", min_size=1, max_size=12).filter(lambda t: set(t) & set("cAm")), min_size=1, max_size=3
    )
)
def test_any_trace_with_work_can_be_drawn(tmp_path_factory: pytest.TempPathFactory, lanes: list[str]) -> None:
    path = write_trace(tmp_path_factory.mktemp("drawn") / "a.json", lanes)
    agrees(*drawn(path))


@pytest.mark.parametrize("name", ["hta_trace_diff_test", "param_dlrm_8xV100", "hta_cpu_only"])
def test_no_text_lies_on_another_or_outside_the_picture(name: str) -> None:
    has_room(drawn(trace_file(name))[0])


@pytest.mark.slow
def test_no_text_lies_on_another_or_outside_the_picture_of_several_ranks() -> None:
    """It has the longest note."""
    has_room(ET.fromstring(picture(straggling())))


def has_room(root: ET.Element) -> None:
    _, above, width, height = map(float, root.get("viewBox", "").split())
    boxes = []
    for text in root.iter(f"{SVG}text"):
        classes = text.get("class", "").split()
        size = 10 if "name" in classes else 11 if "small" in classes else 15 if "title" in classes else 13
        length = len(text.text or "") * size * 0.56
        x, y = float(text.get("x", "")), float(text.get("y", ""))
        left = x - length if "end" in classes else x - length / 2 if "middle" in classes else x
        boxes.append((left, y - size * 0.8, left + length, y + size * 0.2, text.text))
    for left, top, right, bottom, words in boxes:
        assert left >= 0, words
        assert right <= width, words
        assert above <= top <= bottom <= above + height, words
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a[4], b[4])


def test_the_legend_has_each_heading_with_its_time(tmp_path: Path) -> None:
    root, ledger = drawn(write_trace(tmp_path / "a.json", "cccc..AAm", rank=0))
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "compute: 4.00 ms, 44.4 %" in words
    assert "exposed communication: 2.00 ms, 22.2 %" in words
    assert ledger.compute_ns == 4_000_000


def test_names_from_the_trace_are_text_and_never_markup(tmp_path: Path) -> None:
    evil = '</text><script>alert("1")</script>&\x00\x1b'
    root, _ = drawn(write_trace(tmp_path / "a.json", "cccccc", names={"c": evil}))
    assert not list(root.iter(f"{SVG}script"))
    assert any((text.text or "").startswith("</text><script>") for text in root.iter(f"{SVG}text"))


def test_a_kernel_too_short_for_its_name_has_none(tmp_path: Path) -> None:
    root, _ = drawn(write_trace(tmp_path / "a.json", "c" + "." * 60 + "A" * 60))
    names = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "name"]
    assert names == ["all_reduce"]


def test_the_median_step_is_drawn_unless_another_is_named(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.json", "cc..cccccc..ccc.", rank=2, steps=[(0, 4), (4, 12), (12, 16)])
    assert "Step 4 of rank 2, 8.00 ms" in picture(analysis_of(path)), "not the first or the last"
    assert "Step 3 of rank 2, 4.00 ms" in picture(analysis_of(path), 3)


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.json", "cc")
    with pytest.raises(LookupError, match="has no steps"):
        picture(analysis_of(path), 1)
    nothing = read_trace(write_trace(tmp_path / "empty.json", "d"))
    with pytest.raises(LookupError, match="nothing to draw"):
        picture(Analysis(TraceDocument(traces=[analyze_trace(nothing)], job=None), (nothing,), None))


@pytest.mark.slow
def test_ranks_of_a_job_have_a_lane_each_and_the_critical_path() -> None:
    root = ET.fromstring(picture(straggling()))
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert [word for word in words if (word or "").startswith("rank ")] == [f"rank {rank}" for rank in range(4)]
    assert "critical path" in words
    assert "waiting for another rank" in words
    assert "4 traces" in str(words)


@pytest.mark.slow
def test_the_picture_in_the_documentation_is_what_the_tool_draws(tmp_path: Path) -> None:
    write_picture(analysis_of(trace_file("hta_trace_diff_test")), tmp_path / "step.svg", 1013)
    committed = Path(__file__).parents[3] / "docs/images/step.svg"
    assert (tmp_path / "step.svg").read_text() == committed.read_text()


def test_colours_are_those_of_the_dashboards() -> None:
    assert HEADING_COLOURS == DASHBOARD_COLOURS
    assert tuple(HEADING_COLOURS) == LEDGER_HEADINGS
