"""The committed files equal what the catalog generates, and failures are explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pacecar.dashboards import DashboardsError, export, generate
from pacecar.dashboards.reference import reference
from pacecar.dashboards.tidy import tidy
from pacecar.metrics.catalog import CATALOG

ROOT = Path(__file__).resolve().parents[2]
STALE = "run `make dashboards` and commit what it wrote"


@pytest.mark.slow
def test_committed_dashboards_are_the_drawn_ones(tmp_path):
    pytest.importorskip("grafanalib", reason="the extra `dashboards` is not installed")
    drawn = {path.name: path.read_text(encoding="utf-8") for path in generate(tmp_path)}
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "dashboards/generated").iterdir()}
    assert drawn.keys() == committed.keys(), STALE
    for name, text in drawn.items():
        assert text == committed[name], f"{name}: {STALE}"


@pytest.mark.slow
def test_drawing_twice_gives_the_same_bytes(tmp_path):
    pytest.importorskip("grafanalib", reason="the extra `dashboards` is not installed")
    one, two = generate(tmp_path / "one"), generate(tmp_path / "two")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_the_reference_page_is_the_catalog():
    committed = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert committed == reference(), STALE
    assert all(f"`{metric.name}`" in committed for metric in CATALOG)


@pytest.mark.slow
def test_export_needs_no_grafanalib(tmp_path):
    code = (
        "import sys; sys.modules['grafanalib'] = sys.modules['yaml'] = None\n"
        "from pathlib import Path; from pacecar.dashboards import export\n"
        f"print(*[p.name for p in export(Path({str(tmp_path)!r}))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"job.json", "fleet.json", "pacecar.rules.yml", "pacecar-alerts.rules.yml"} <= set(out.stdout.split())
    assert json.loads((tmp_path / "job.json").read_text(encoding="utf-8"))["uid"] == "pacecar-job"


def test_without_grafanalib_the_message_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DashboardsError, match=r"pip install 'pacecar\[dashboards\]'"):
        generate(tmp_path)


@pytest.mark.slow
def test_importing_the_room_does_not_import_grafanalib():
    code = "import sys, pacecar.dashboards, pacecar.dashboards.reference; print('grafanalib' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way", encoding="utf-8")
    with pytest.raises(OSError, match="File exists") as caught:
        export(blocked)
    assert caught.value.filename == str(blocked)


@pytest.mark.slow
def test_outside_a_checkout_nothing_is_written(tmp_path):
    out = subprocess.run(
        [sys.executable, "-m", "pacecar.dashboards"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert out.returncode == 2
    assert "not a checkout of pacecar" in out.stderr
    assert list(tmp_path.iterdir()) == []


def test_alerts_can_lead_to_a_page_of_ones_own(tmp_path):
    export(tmp_path, runbook_url="https://wiki.example.com/pacecar")
    text = (tmp_path / "pacecar-alerts.rules.yml").read_text(encoding="utf-8")
    links = [rule["annotations"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert {"runbook" in link for link in links} == {False}
    assert links[0]["runbook_url"] == "https://wiki.example.com/pacecar#pacecargpuxid"


@pytest.mark.slow
def test_a_page_that_would_break_the_file_is_refused(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "pacecar", "dashboards", "export", str(tmp_path / "new"), "--runbook-url", "x: \"y"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "not an address of a page" in ran.stderr
    assert not (tmp_path / "new").exists()


def test_tidy_leaves_of_a_table_only_what_todays_grafana_reads():
    old = {
        "type": "table", "color": {"mode": "thresholds"}, "columns": [], "fontSize": "100%", "mappings": [],
        "fieldConfig": {"defaults": {"custom": {"displayMode": "auto", "align": "auto"}, "unit": "s"}, "overrides": []},
    }  # fmt: skip
    kept = {"defaults": {"custom": {"align": "auto"}, "unit": "s"}, "overrides": []}
    assert tidy(old) == {"type": "table", "fieldConfig": kept}


def test_tidy_keeps_zero_false_and_empty_lists():
    said = {"a": 0, "b": False, "c": [], "d": {}, "e": None, "f": "", "g": {"h": None, "i": [None, 0]}}
    assert tidy(said) == {"a": 0, "b": False, "c": [], "d": {}, "g": {"i": [0]}}
