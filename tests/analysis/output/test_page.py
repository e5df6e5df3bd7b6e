"""The page of an analysis: its headline is the verdict, what is missing is said, and nothing runs but sorting."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from pacecar.analysis.output.page import rank_timeline
from pacecar.analysis.output.page.page import analysis_page, write_page
from pacecar.analysis.output.page.rank_timeline import CELLS_MAX, draw_ranks
from pacecar.analysis.output.words import shown_rank
from pacecar.analysis.reading.parallel_reading import Analysis, Options, analyze
from pacecar.analysis.trace.columns import TraceWarning
from pacecar.formatting.page.document import POLICY, script_policy
from tests.analysis.jobs import make_job, play
from tests.analysis.page_jobs import SLOW_RANK, analysis_of, healthy, straggling
from tests.analysis.tracefiles import write_trace
from tests.kit.axe import violations
from tests.kit.browser import offline_page
from tests.kit.html_reader import Reader, assert_loads_nothing, assert_reachable

EVIL = "<script>alert(1)</script>\"'&<b>"


@pytest.fixture(scope="module")
def slow() -> Analysis:
    return straggling()


@pytest.fixture(scope="module")
def page(slow: Analysis) -> str:
    return analysis_page(slow)


def text_of(page: str) -> str:
    return "".join(Reader(page).text).replace("\N{NO-BREAK SPACE}", " ")


def lead_of(page: str) -> str:
    (lead,) = re.findall(r'<p class="lead">(.*?)</p>', page)
    return str(lead).replace("&nbsp;", " ")


def test_the_headline_is_who_holds_the_job_up_in_what_and_what_mending_it_saves(slow: Analysis, page: str) -> None:
    assert slow.document.job is not None
    (verdict,) = slow.document.job.stragglers
    assert (verdict.rank, verdict.cause) == (SLOW_RANK, "compute")
    lead = lead_of(page)
    assert lead.startswith(f"Rank {SLOW_RANK} holds the job up, in compute: mending it would save ")
    assert f"{verdict.saved_ns / 1e6:.2f} ms of " in lead
    assert f"with an error of {verdict.error_ns / 1e6:.2f} ms." in lead


def test_waiting_is_a_share_of_the_time_in_collectives_also_where_two_wait_at_a_time(slow: Analysis) -> None:
    job = slow.document.job
    assert job is not None
    shares = [structs.replace(share, wait_ns=90, wire_ns=10, communication_ns=60) for share in job.shares]
    document = structs.replace(slow.document, job=structs.replace(job, shares=shares))
    assert "waiting90.0 %of the time in collectives" in text_of(analysis_page(replace(slow, document=document)))


@pytest.mark.slow
def test_of_a_healthy_job_it_says_nobody() -> None:
    page = analysis_page(healthy())
    assert lead_of(page) == "No rank holds the job up."
    assert "holds the job up, in" not in text_of(page)


@pytest.mark.slow
def test_where_the_model_explains_too_little_it_says_that_it_cannot_be_told() -> None:
    analysis = healthy()
    job = analysis.document.job
    assert job is not None
    job.warnings.append(TraceWarning("replay_not_trusted", "too little"))
    job.unexplained_ratio = 0.66
    words = "Who holds the job up cannot be told: work began for no known reason in 66.0 % of a rank's time."
    assert html.unescape(lead_of(analysis_page(analysis))).replace("\xa0", " ") == words


def test_nothing_is_loaded_and_the_one_script_that_may_run_sorts_tables(page: str) -> None:
    reader = assert_loads_nothing(page)
    (script,) = reader.scripts
    assert reader.policies() == [script_policy(script)]
    assert script_policy(script).startswith(f"{POLICY}; script-src 'sha256-")
    assert "table.sortable" in script


def test_drawings_are_told_and_what_scrolls_can_be_reached(page: str) -> None:
    reader = Reader(page)
    assert len([tag for tag, _ in reader.tags if tag == "svg"]) == 4
    assert_reachable(reader, levels_max=3)
    assert not re.search(r"</h2></section>", page)


def test_every_figure_of_the_verdict_and_of_the_ranks_is_there(slow: Analysis, page: str) -> None:
    job, text = slow.document.job, text_of(page)
    assert job is not None
    assert job.stragglers[0].evidence in text
    for report in slow.document.traces:
        assert f'data-value="{report.compute_ns}"' in page
    for part in (
        "Critical path",
        "all_reduce",
        "arrived last",
        "straggler as fast as the median",
        "one host, one clock",
    ):
        assert part in text, part
    assert sum(part.duration_ns for part in job.critical_path) == job.wall_ns


def test_cells_are_sorted_by_numbers_of_one_unit_and_what_is_missing_has_none() -> None:
    # The second rank's clock is tied to nothing: it has no standard error, and none is drawn as zero.
    traces = make_job({0: "cccc", 1: "cccc"}, host={0: "a", 1: "b"}, steps=[(0, 4)])
    page = analysis_page(analysis_of(traces))
    assert re.search(r"<td>-</td>", page)
    assert "No collective was found in the traces of two ranks." in text_of(page)


def test_the_path_is_a_line_on_the_slow_rank_and_other_ranks_wait(slow: Analysis) -> None:
    drawn = draw_ranks(slow)
    assert drawn is not None
    (line,) = re.findall(r'<path class="path" d="([^"]*)"', drawn.svg)
    assert re.fullmatch(r"M[\d.]+ [\d.]+(H[\d.]+)?((L[\d.]+ [\d.]+)(H[\d.]+)?)*", line)
    labels = re.findall(r'y="([\d.]+)" class="axis end[^"]*">rank (\d)<', drawn.svg)
    middle = {float(y) - 4 - 1: int(rank) for y, rank in labels}
    xs = [float(x) for x in re.findall(r"[MH]([\d.]+)", line)]
    first = float(re.findall(r"M[\d.]+ ([\d.]+)", line)[0])
    assert middle[first] == SLOW_RANK
    assert max(xs) - min(xs) > 800, "it spans the step"
    assert drawn.svg.count('class="waiting"') == 3
    assert ("path", "critical path") in drawn.legend


def test_a_step_that_is_not_there_names_those_that_are(slow: Analysis) -> None:
    with pytest.raises(LookupError, match="--step 99: all ranks together have steps 1 to 6"):
        analysis_page(slow, 99)
    assert "Step 2, " in analysis_page(slow, 2)


def test_without_a_common_step_the_whole_window_is_drawn() -> None:
    drawings = play("AAA", [[3, 4, 3], [4, 3, 4]])
    drawn = draw_ranks(analysis_of(make_job(drawings, host="a")))
    assert drawn is not None
    assert "from first to last work" in drawn.caption


def test_many_ranks_have_a_bounded_drawing_and_the_others_are_counted(
    slow: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_timeline, "LANES_MAX", 2)
    drawn = draw_ranks(slow)
    assert drawn is not None
    assert drawn.svg.count("<rect") == 2
    assert f">rank {SLOW_RANK}<" in drawn.svg, "who is named stays"
    assert "2 ranks with little part in it are left out." in drawn.note


def test_columns_of_all_lanes_are_bounded(slow: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw_ranks(slow)
    monkeypatch.setattr(rank_timeline, "CELLS_MAX", 40)
    drawn = draw_ranks(slow)
    assert whole is not None
    assert drawn is not None
    assert len(drawn.svg) < len(whole.svg)
    # Ten columns a rank, each with at most every heading, of which a piece has some 30 characters.
    assert len(drawn.svg) < 40 * 10 * 30 + 4000
    assert CELLS_MAX == 20_000


def test_a_trace_that_could_not_be_kept_is_read_again_and_said_if_it_cannot(slow: Analysis) -> None:
    with pytest.raises(LookupError, match="cannot be read again"):
        analysis_page(replace(slow, tables=(None,) * 4))


def test_one_trace_has_a_page_of_its_own_and_no_path(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "<b>.json", ("dccc.mm..ccoo", "..AAAAAA....."), rank=3, steps=[(0, 6), (6, 13)],
                       names={"c": EVIL})  # fmt: skip
    analysis = analyze([file], Options(keeps_tables=True, makes_tables=True))
    write_page(analysis, tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    reader = assert_loads_nothing(page)
    assert_reachable(reader, levels_max=3)
    text = text_of(page)
    assert EVIL in text, "names of kernels are text and never markup"
    assert "One trace has no critical path between ranks." in text
    assert "bounds" in text.lower()
    assert lead_of(page).replace("&nbsp;", " ").startswith("10.00 ms, first to last work: compute 50.0 %, ")


@pytest.mark.slow
def test_terminal_and_page_show_the_work_of_the_rank_that_is_named_else_of_the_longest_on_the_path(
    slow: Analysis,
) -> None:
    assert slow.document.job is not None
    report, why = shown_rank(slow.document.traces, slow.document.job)
    assert (report.rank, why) == (SLOW_RANK, "the first that holds the job up")
    document = healthy().document
    job = document.job
    assert job is not None
    sums = Counter[int]()
    for part in job.critical_path:
        sums[part.rank] += part.duration_ns
    report, why = shown_rank(document.traces, job)
    assert (report.rank, why) == (sums.most_common(1)[0][0], "which has most of the critical path")


def test_a_file_without_a_rank_has_its_name_beside_its_bar_and_not_half_of_it(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "MMMMMMMMMMMMMMMM.json", "ccc.mm")
    page = analysis_page(analyze([file], Options(keeps_tables=True)))
    (label,) = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="end">M+…</text>', page)
    assert float(label) >= 11 * 13, "an M of the style's 15 units has 13"


def test_where_no_device_worked_operators_have_no_time_on_one(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    row = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "dur": 10, "args": {}}
    file.write_text(json.dumps({"traceEvents": [{**row, "name": f"aten::{name}", "ts": 1} for name in ("mm", "add")]}))
    text = text_of(analysis_page(analyze([file], Options(keeps_tables=True, makes_tables=True))))
    assert "host self" in text
    assert "device self" not in text


def test_traces_that_are_no_ranks_of_one_job_stand_by_themselves(tmp_path: Path) -> None:
    files = [write_trace(tmp_path / f"{name}.json", "ccc.mm") for name in "ab"]
    page = analysis_page(analyze(files, Options(keeps_tables=True, compares_ranks=False)))
    assert_reachable(assert_loads_nothing(page), levels_max=3)
    assert "a.json: Where the time went" in text_of(page)
    assert "b.json: Where the time went" in text_of(page)


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_without_network_shows_it_and_sorts_its_tables(page: str, tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    with offline_page(file, scheme) as opened:
        boxes = opened.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)")
        assert min(boxes) > 30
        ranks = opened.locator("#ledger table.sortable")
        button = ranks.locator("thead button", has_text="compute")
        place = "tbody tr > :nth-child(1)"
        button.focus()
        opened.keyboard.press("Enter")
        assert ranks.locator(place).first.text_content() == str(SLOW_RANK), "the largest first"
        assert ranks.locator('th[aria-sort="descending"]').count() == 1
        opened.keyboard.press("Enter")
        assert ranks.locator(place).last.text_content() == str(SLOW_RANK)
        for width in (1280, 390):
            opened.set_viewport_size({"width": width, "height": 800})
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
            assert violations(opened) == []
