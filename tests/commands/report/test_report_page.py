"""The page: it needs nothing but itself, says everything as text, and lets nothing of the records become markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs

from pacecar.commands.report.comparison import compare
from pacecar.commands.report.output.charts import gains
from pacecar.commands.report.output.html import comparison_page, report_page
from pacecar.commands.report.output.markdown import comparison_markdown, escaped, report_markdown
from pacecar.commands.report.sections.costs import Prices
from pacecar.formatting.page.document import POLICY
from pacecar.records import HangSuspicion, Rung, Straggler, WhatIf
from pacecar.records.measurements.what_if import Bound
from tests.commands.report.runs import (
    MS,
    START_NS,
    append,
    built,
    decision,
    report_of,
    steady,
    tuned,
    untuned,
    verdict,
)
from tests.commands.report.test_report_damage import recording
from tests.kit.axe import violations
from tests.kit.browser import offline_page
from tests.kit.html_reader import Reader, assert_loads_nothing, assert_reachable

EVIL = "<script>alert(1)</script>\"'&|`*_x_`"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every kind of event, whose texts try to inject markup."""
    folder = tuned(tmp_path_factory.mktemp("full") / "run")
    rungs = (
        Rung("at_most_communication_hidden", 70 * MS, 0.3, Bound.COMPUTE),
        Rung("newer_rung", 90 * MS, 0.1, Bound.REST),
    )
    append(
        folder,
        0,
        WhatIf(job="j", of_rank=None, step=199, wall_ns=1, steps=32, pace_ns=100 * MS, source="estimate",
               calibration_age_steps=7, rungs=rungs),
        Straggler(job="j", late_rank=1, cause="link", phase=EVIL, since_step=3, step=9, wall_ns=1, excess_ns=MS,
                  evidence=EVIL),
        HangSuspicion(job="j", rank=0, step=199, phase="backward", wall_ns=1, silent_ns=10**11, last_collective=EVIL,
                      collectives=None, stack=EVIL),
        decision(2, 150, 4, 8, wall_ns=START_NS + 15 * 10**9),
        verdict(2, 160, "barred", wall_ns=START_NS + 16 * 10**9),
        decision(3, 190, 4, 8, wall_ns=START_NS + 17 * 10**9),
    )  # fmt: skip
    (folder / "recordings").mkdir()
    recording(folder / "recordings" / "pacecar-1.recording", other=3)
    (folder / "losses.jsonl").write_text('{"loss": 5}\n{"loss": 2}\n')
    for file in sorted(folder.glob("rank*.jsonl")):
        file.write_bytes(file.read_bytes().replace(b'"framework":"torch 2.13"', b'"framework":"<b>torch</b>"'))
    return folder


def page_of(folder: Path) -> str:
    prices = Prices(per_gpu_hour=2.5, samples_per_epoch=10**6, epochs=100)
    return report_page(report_of(folder, prices=prices))


@pytest.fixture(scope="module")
def page(full: Path) -> str:
    return page_of(full)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> str:
    parent = tmp_path_factory.mktemp("several")
    runs = [untuned(parent / f"{name}<i>", pace=steady(100 * MS, 0.02, n)) for n, name in enumerate("ab")]
    return comparison_page(compare([built(run) for run in runs]))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["page", "comparison"])
def test_nothing_is_loaded_from_anywhere(which: str, request: pytest.FixtureRequest) -> None:
    text: str = request.getfixturevalue(which)
    reader = assert_loads_nothing(text)
    assert reader.scripts == []
    assert reader.policies() == [POLICY]
    assert "default-src 'none'" in POLICY


def test_names_from_records_stay_on_their_line_in_markdown() -> None:
    shown = escaped("a|b\n# H\n&lt;b&gt; ~~x~~ $a$ `q` <i>")
    assert shown == r"a\|b�# H�\&lt;b\&gt; \~\~x\~\~ \$a\$ \`q\` \<i>"


def test_ranks_on_processors_are_priced_and_not_called_gpus(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run")
    for file in folder.glob("rank*.jsonl"):
        file.write_bytes(file.read_bytes().replace(b'"device":"cuda"', b'"device":"cpu"'))
    shown = page_of(folder)
    assert "each rank charged as one, though they ran on processors" in shown
    assert "2 ranks, 20.0 s" in shown


def test_words_of_the_records_are_text_and_never_markup(page: str) -> None:
    assert "<script>" not in page
    assert "<b>torch" not in page
    text = "".join(Reader(page).text)
    assert EVIL in text
    assert "<b>torch</b>" in text


@pytest.mark.parametrize("which", ["page", "comparison"])
def test_what_is_drawn_is_named_and_told_and_what_scrolls_can_be_reached(
    which: str, request: pytest.FixtureRequest
) -> None:
    reader = Reader(request.getfixturevalue(which))
    assert len([tag for tag, _ in reader.tags if tag == "svg"]) >= 2
    assert_reachable(reader)


def test_every_figure_of_the_run_is_on_the_page(page: str) -> None:
    text = "".join(Reader(page).text)
    for words in (
        "Kept: micro_batch 2 → 4", "+25.0 %", "80.00 ms", "coefficient of variation", "barred", "still open",
        "communication fully hidden", "newer_rung", "straggler (slow link)", "suspected hang", "GPU utilization",
        "network, sent", "8 Gbit/s", "a million tokens", "100 epochs", "a step", "300 W", "5 → 2", "0.50 %",
        "within the 1.00 %",
    ):  # fmt: skip
        assert words in text, words


def test_a_change_that_cost_more_than_the_scale_shows_has_its_figure_there(tmp_path: Path) -> None:
    folder = tuned(tmp_path / "run", kept=False)
    append(
        folder, 0, decision(2, 110, 2, 1), structs.replace(verdict(2, 120, "rolled_back"), measured_gain_ratio=-1.66)
    )
    drawn = gains(report_of(folder).changes)
    assert "-166.0 %" in drawn.split("</desc>")[1]


def test_a_page_of_a_minimal_run_has_no_empty_section(tmp_path: Path) -> None:
    text = page_of(untuned(tmp_path / "run", steps=3))
    assert not re.search(r"</h2></section>", text)
    assert "too early to compare" in text


def test_markdown_says_the_same_and_no_cell_breaks_its_table(full: Path) -> None:
    text = report_markdown(report_of(full))
    assert "Kept: micro\\_batch 2 → 4" in text
    assert "<script>" not in text.replace("\\<script>", "")
    widths: list[int] = []
    for line in text.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if cells and widths:
            assert cells == widths[-1], line
        widths = [cells] if cells else []


@pytest.mark.slow
def test_a_comparison_in_markdown_begins_with_its_verdict(tmp_path: Path) -> None:
    runs = [untuned(tmp_path / "a"), untuned(tmp_path / "b", pace=steady(80 * MS))]
    text = comparison_markdown(compare([built(run) for run in runs]))
    assert text.splitlines()[2].startswith("b against a: faster, +25.0 %")


@pytest.mark.slow
def test_a_page_of_many_ranks_and_changes_stays_small(tmp_path: Path) -> None:
    folder = untuned(tmp_path / "run", ranks=300, steps=12)
    for number in range(3000):
        append(folder, 0, decision(number, 5, 2, 4), verdict(number, 6, "rolled_back"))
    text = page_of(folder)
    assert len(text) < 600_000
    assert "100 more ranks are left out here" in text
    assert "The first 2800 are left out here" in text


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_a_browser_without_network_shows_it_and_complains_of_nothing(page: str, tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    with offline_page(file, scheme) as opened:
        dark = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(16, 22, 29)") == (scheme == "dark")
        # Each drawing is as wide as the text and has an area; headings of the ledger have their colours.
        boxes = opened.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)")
        assert len(boxes) >= 5
        assert min(boxes) > 40
        fill = opened.evaluate("getComputedStyle(document.querySelector('rect.compute')).fill")
        assert fill == "rgb(0, 158, 115)"
        assert violations(opened) == []
        # By keyboard: the first stop leads past the links, and the page is not wider than the screen.
        opened.keyboard.press("Tab")
        assert opened.evaluate("document.activeElement.textContent") == "To the figures"
        opened.keyboard.press("Enter")
        assert opened.url.endswith("#content")
        assert opened.evaluate("document.documentElement.scrollWidth") <= 1280
        opened.set_viewport_size({"width": 390, "height": 800})
        assert opened.evaluate("document.documentElement.scrollWidth") <= 390
        assert violations(opened) == []
        assert opened.locator("details").first.get_attribute("open") is None
        opened.locator("summary").first.press("Enter")
        assert opened.locator("details").first.get_attribute("open") is not None
        paper = opened.pdf(print_background=False) if hasattr(opened, "pdf") else b"%PDF"
        assert paper.startswith(b"%PDF")
