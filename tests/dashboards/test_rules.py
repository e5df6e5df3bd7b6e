"""Every alert fires only when it should, with its labels and numbers, in Prometheus' own engine."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pacecar.dashboards.queries import CLUSTER, metrics_in
from pacecar.dashboards.rules.alerts import anchor
from pacecar.dashboards.rules.recording import RECORDED
from pacecar.dashboards.rules.rule_files import ALERTS, render_rules
from tests.dashboards.alert_cases import FIRING, SILENT, Case
from tests.dashboards.conftest import all_panels
from tests.kit.tools import find_tool

ROOT = Path(__file__).resolve().parents[2]
ALL = [alert for group in ALERTS for alert in group.alerts]
BY_NAME = {alert.name: alert for alert in ALL}
NAMES = BY_NAME.keys()


@pytest.fixture
def promtool() -> Path:
    return find_tool("promtool")


@pytest.fixture
def rules(tmp_path: Path) -> list[str]:
    for name, text in render_rules().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return sorted(str(path) for path in tmp_path.glob("*.rules.yml"))


def written(text: str, labels: dict[str, str], shown: str) -> str:
    """Return what Prometheus makes of a template."""

    def value(match: re.Match[str]) -> str:
        found = [labels[name] for name in re.findall(r"\$labels\.(\w+)", match[1]) if name in labels]
        otherwise = match[1].split('"')[1:2]  # the last word of an `or`
        return shown if "$value" in match[1] else "".join((found or otherwise)[:1])

    def optional(match: re.Match[str]) -> str:
        return match[2].replace("{{ . }}", labels[match[1]]) if match[1] in labels else ""

    text = re.sub(r"\{\{ with \$labels\.(\w+) \}\}(.*?)\{\{ end \}\}", optional, text)
    return re.sub(r"\{\{(.*?)\}\}", value, text)


def asked(case: Case) -> dict[str, Any]:
    """The case in the format of promtool's test files."""
    expected = []
    if case.labels is not None:
        alert, given = BY_NAME[case.alert], (case.labels, case.shown)
        notes = {"summary": written(alert.summary, *given), "description": written(alert.description, *given)}
        notes["runbook"] = f"docs/runbook.md#{anchor(case.alert)}"
        expected = [{"exp_labels": case.labels | {"severity": alert.severity}, "exp_annotations": notes}]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}],
    }


def run(promtool: Path, folder: Path, rules: list[str], *tests: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    test = {"rule_files": rules, "evaluation_interval": "1m", "tests": tests}
    file = folder / "cases.yml"
    file.write_text(json.dumps(test), encoding="utf-8")
    return subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)


OWN = re.compile(r"\b\w+:pacecar_\w+:\w+")


def rests_on(expression: str) -> set[str]:
    """Return the recorded series that an expression reads, and those that these read."""
    found, open_ones = set[str](), OWN.findall(expression)
    while open_ones:
        name = open_ones.pop()
        if name not in found:
            found.add(name)
            open_ones += OWN.findall(next(rule.expression for rule in RECORDED if rule.name == name))
    return found


def run_each(promtool: Path, folder: Path, cases: Sequence[Case]) -> subprocess.CompletedProcess[str]:
    """Evaluate only the case's alert and the rules that it reads, since all rules take three times as long."""
    rules = [
        rule for text in render_rules().values() for group in yaml.safe_load(text)["groups"] for rule in group["rules"]
    ]
    files = []
    for alert in ALL:
        wanted = rests_on(alert.expression)
        some = [rule for rule in rules if rule.get("record") in wanted or rule.get("alert") == alert.name]
        file, test = folder / f"{alert.name}.rules.yml", folder / f"{alert.name}.yml"
        file.write_text(json.dumps({"groups": [{"name": "all", "rules": some}]}), encoding="utf-8")
        tests = [asked(case) for case in cases if case.alert == alert.name]
        test.write_text(json.dumps({"rule_files": [str(file)], "evaluation_interval": "1m", "tests": tests}))
        files.append(str(test))
    return subprocess.run([promtool, "test", "rules", *files], capture_output=True, text=True, check=False)


def test_every_alert_has_a_case_that_fires_and_one_that_does_not():
    assert {case.alert for case in FIRING} == NAMES
    assert {case.alert for case in SILENT} == NAMES


def test_texts_name_labels_that_the_alert_has_and_show_a_number_where_the_case_has_one():
    for alert in ALL:
        texts, cases = alert.summary + alert.description, [case for case in FIRING if case.alert == alert.name]
        carried = {label for case in cases for label in case.labels or {}}
        assert {*re.findall(r"\$labels\.(\w+)", texts)} <= carried, alert.name
        assert all(("$value" in texts) == bool(case.shown) for case in cases), alert.name


@pytest.mark.slow
def test_alerts_fire_and_say_what_they_should(promtool, tmp_path):
    ran = run_each(promtool, tmp_path, FIRING)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-6000:]


@pytest.mark.slow
def test_alerts_are_quiet_about_what_only_looks_like_it(promtool, tmp_path):
    ran = run_each(promtool, tmp_path, SILENT)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-6000:]


@pytest.mark.slow
def test_an_alert_that_does_not_fire_would_be_noticed(promtool, rules, tmp_path):
    """Each inverted case must fail, which shows that promtool evaluates them."""
    one = FIRING[0]
    for wrong in (replace(one, at="5m"), replace(one, labels=None), replace(one, shown="7")):
        assert run(promtool, tmp_path, rules, asked(wrong)).returncode != 0


@pytest.mark.slow
def test_no_alert_fires_on_a_cluster_where_nothing_is_wrong(promtool, rules, tmp_path):
    """All silent cases' alerts asked of one healthy node with a job that trains."""
    node, job = 'instance="n1:9850", job="pacecar"', 'training_job="llama", rank="0"'
    series = {
        f"pacecar_build_info{{{node}}}": "1x60",
        f'pacecar_gpu_xid_errors_total{{{node}, gpu="0", xid="79"}}': "0x60",
        f'pacecar_gpu_down{{{node}, gpu="0", reason="hung"}}': "0x60",
        f'pacecar_gpu_clock_event_seconds_total{{{node}, gpu="0", reason="sw_power_cap", source="driver"}}': "0+40x60",
        f'pacecar_gpu_nvlink_link_state{{{node}, gpu="0", link="0"}}': "1x60",
        f'pacecar_gpu_nvlink_info{{{node}, gpu="0", link="0"}}': "1x60",
        f"pacecar_host_tcp_segments_sent_total{{{node}}}": "0+60000x60",
        f"pacecar_host_tcp_segments_retransmitted_total{{{node}}}": "0+6x60",
        f"pacecar_job_last_record_age_seconds{{{node}, {job}}}": "1x60",
        f"pacecar_process_info{{{node}, {job}}}": "1x60",
        f"pacecar_job_overhead_seconds_total{{{node}, {job}}}": "0+0.3x60",
        f"pacecar_job_step_wall_seconds_total{{{node}, {job}}}": "0+60x60",
        f"pacecar_job_records_dropped_total{{{node}, {job}}}": "0x60",
        f"pacecar_daemon_cpu_seconds_total{{{node}}}": "0+2x60",
        f"pacecar_daemon_cpu_budget_ratio{{{node}}}": "0.05x60",
    }
    everything = asked(Case("", "", "", series)) | {
        "alert_rule_test": [{"eval_time": "45m", "alertname": name, "exp_alerts": []} for name in sorted(NAMES)]
    }
    ran = run(promtool, tmp_path, rules, everything)
    assert ran.returncode == 0, ran.stdout[-6000:]


@pytest.mark.slow
def test_a_job_that_spans_clusters_of_one_name_is_two_jobs(promtool, rules, tmp_path):
    """The label `cluster` goes through recording rules and alerts, and where it is absent nothing is lost."""
    for cluster in ('cluster="east", ', ""):
        series = {
            f'pacecar_job_pace_seconds{{{cluster}instance="n1", training_job="t"}}': "1x10",
            f'pacecar_job_straggler_excess_seconds{{{cluster}training_job="t", rank="0", cause="link"}}': "0.5x10",
        }
        labels = {"training_job": "t", "rank": "0", "cause": "link"} | ({"cluster": "east"} if cluster else {})
        ran = run(promtool, tmp_path, rules, asked(Case("PacecarStraggler", "", "5m", series, labels, "50%")))
        assert ran.returncode == 0, ran.stdout[-3000:]


def test_promtool_finds_nothing_to_complain_about(promtool, rules):
    ran = subprocess.run([promtool, "check", "rules", *rules], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"SUCCESS: {len(RECORDED)} rules found" in ran.stdout
    assert f"SUCCESS: {len(ALL)} rules found" in ran.stdout


def test_rules_read_only_metrics_of_the_catalog_and_recorded_series():
    recorded = {rule.name for rule in RECORDED}
    for alert in ALL:
        own = set(OWN.findall(alert.expression))
        assert own <= recorded, alert.name
        rest = OWN.sub("", alert.expression)
        assert own or metrics_in([rest]), f"{alert.name} asks for nothing"
    for rule in RECORDED:
        assert re.fullmatch(r"(training_job|instance|instance_(gpu|device|mountpoint)):pacecar_\w+:\w+", rule.name), (
            rule.name
        )
        assert metrics_in([rule.expression]), rule.name
        for group in re.findall(r"by \(([^)]*)\)", rule.expression):
            assert group.startswith(CLUSTER), f"{rule.name} loses the cluster"


def test_every_alert_has_severity_words_with_its_labels_and_a_section_in_the_runbook():
    page = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert sections == [alert.name for alert in ALL], "one section an alert, in the order of the file"
    parts = re.split(r"^### \w+$", page, flags=re.MULTILINE)[1:]
    for alert, part in zip(ALL, parts, strict=True):
        assert "$labels." in alert.summary or "$value" in alert.summary, alert.name
        assert len(alert.description) > 30, alert.name
        for word in ("**Means**", "**Look at**", "**Do**"):
            assert word in part, f"{alert.name}: {word}"


def test_the_documentation_counts_the_alerts():
    assert f"| {len(ALL)} alerts; each has" in (ROOT / "docs/dashboards.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_committed_rules_are_the_rendered_ones_and_plain_yaml():
    for name, text in render_rules().items():
        committed = (ROOT / "dashboards/generated" / name).read_text(encoding="utf-8")
        assert committed == text, f"{name}: run `make dashboards` and commit what it wrote"
        loaded = yaml.safe_load(text)
        assert [set(group) for group in loaded["groups"]] == [{"name", "rules"}] * len(loaded["groups"])


def test_panels_and_rows_that_the_runbook_names_are_there(drawn):
    titles = {panel["title"] for dashboard in drawn.values() for panel in all_panels(dashboard)}
    page = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    looked_at = re.findall(r"\*\*Look at\*\*: (.*?)\n\n", page, re.DOTALL)
    assert len(looked_at) == len(ALL)
    named = {" ".join(name.split()) for part in looked_at for name in re.findall(r'"([^"]+)"', part)}
    assert len(named) > 30
    assert named - titles == {"Targets"}, "Targets is a page of Prometheus"
