"""docs/snapshot.md describes exactly the fields of the public document."""

import re
from pathlib import Path

import msgspec
import pytest

from pacecar.commands.top.screen import HELP
from pacecar.monitor.http.static_files import ASSETS
from pacecar.records import status_document

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {
    "The document": status_document.StatusDocument,
    "daemon": status_document.DaemonStatus,
    "daemon.collectors": status_document.CollectorStatus,
    "daemon.recorder": status_document.RecorderStatus,
    "host": status_document.Host,
    "gpus": status_document.GpuStatus,
    "links": status_document.LinkStatus,
    "jobs": status_document.JobStatus,
    "jobs.ranks": status_document.Rank,
    "jobs.stragglers": status_document.LateRank,
    "jobs.hangs": status_document.HangStatus,
    "jobs.tuner": status_document.TunerView,
    "jobs.moves": status_document.Move,
    "jobs.what_if": status_document.Ladder,
    "jobs.what_if.rungs": status_document.Saving,
}  # fmt: skip


def described():
    text = (ROOT / "docs/snapshot.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {
        title.strip("`"): re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?`) \| \S", body, re.MULTILINE)))
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_the_document_is_described_in_its_order(section):
    assert described()[section] == [field.name for field in msgspec.structs.fields(SECTIONS[section])]


def test_the_version_that_is_described_is_the_one_that_is_served():
    assert f"`version` is {status_document.VERSION}." in (ROOT / "docs/snapshot.md").read_text(encoding="utf-8")


def test_the_page_knows_the_same_version():
    script = (ROOT / "monitor/page/page.js").read_text(encoding="utf-8")
    assert f"const VERSION = {status_document.VERSION};" in script


def test_every_file_of_the_page_is_served_and_has_its_licence():
    folder = ROOT / "monitor/page"
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == {name for name, _ in ASSETS.values()}
    assert "MIT" in (folder / "uplot/LICENSE").read_text(encoding="utf-8")


def test_the_keys_that_are_documented_are_those_of_the_help():
    text = (ROOT / "docs/screens.md").read_text(encoding="utf-8")
    for key in ("PgUp", "Tab", "F3", "F4", "F5", "F6", "F10", "F1", "Enter", "Esc"):
        assert key in text
        assert key in HELP
