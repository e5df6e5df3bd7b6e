"""Every generated dashboard is what Grafana's own types say a dashboard is: `tsc` against @grafana/schema.

`make tools` fetches the compiler and the types; tests/dashboards/grafana/types/shape.ts says how they are put together.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tools import TOOLS, find_tool

GENERATED = Path(__file__).resolve().parents[2] / "dashboards" / "generated"
DASHBOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(GENERATED.glob("*.json"))}
PROJECT = Path(__file__).parent / "grafana" / "types"
SOURCE = "import type {{ PacecarDashboard }} from './shape';\nexport const dashboard: PacecarDashboard = {};\n"


def first(kind: str) -> dict[str, Any]:
    """Return a small dashboard of the first panel of that kind that is generated."""
    for dashboard in DASHBOARDS.values():
        for panel in dashboard["panels"]:
            if panel["type"] == kind:
                return copy.deepcopy(dashboard) | {"panels": [copy.deepcopy(panel)]}
    raise AssertionError(f"no panel of the type {kind}")


Mistake = Callable[[dict[str, Any], dict[str, Any]], object]
"""Spoils a dashboard, or its one panel."""

MISTAKES: dict[str, tuple[str, Mistake]] = {
    "steps_that_are_a_string": (
        "timeseries",
        lambda _, p: p["fieldConfig"]["defaults"]["thresholds"].update(steps=""),
    ),
    "a_base_without_a_value": (
        "stat",
        lambda _, p: p["fieldConfig"]["defaults"]["thresholds"]["steps"][0].pop("value"),
    ),
    "an_option_that_is_misspelt": ("timeseries", lambda _, p: p["options"]["legend"].update(displayMod="table")),
    "a_value_that_is_misspelt": ("timeseries", lambda _, p: p["options"]["legend"].update(displayMode="tabel")),
    "a_mode_of_another_panel": ("stat", lambda _, p: p["options"].update(graphMode="bars")),
    "a_style_that_is_misspelt": (
        "timeseries",
        lambda _, p: p["fieldConfig"]["defaults"]["custom"].update(lineWidht=2),
    ),
    "an_override_of_nothing": (
        "barchart",
        lambda _, p: p["fieldConfig"]["overrides"][0]["properties"][0].update(id="colour"),
    ),
    "an_unknown_panel": ("timeseries", lambda _, p: p.update(type="timeserie")),
    "a_target_without_a_query": ("timeseries", lambda _, p: p["targets"][0].pop("expr")),
    "a_number_for_a_unit": ("timeseries", lambda _, p: p["fieldConfig"]["defaults"].update(unit=7)),
    "a_null": ("timeseries", lambda _, p: p["fieldConfig"]["defaults"].update(min=None)),
    "a_field_of_grafana_5": ("timeseries", lambda _, p: p.update(span=9)),
    "a_cursor_that_does_not_exist": ("timeseries", lambda d, _: d.update(graphTooltip=7)),
    "a_variable_without_a_name": ("timeseries", lambda d, _: d["templating"]["list"][1].pop("name")),
}
"""What must not pass: name -> the panel to spoil and how.  The first broke Grafana once; with the second
no threshold is ever reached, since what is not said is below nothing."""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The compiler's errors by file, from one run for dashboards and mistakes, since each run takes seconds."""
    compiler = find_tool("grafana-tsc")
    folder = tmp_path_factory.mktemp("types")
    for name in ("shape.ts", "tsconfig.json"):
        shutil.copy(PROJECT / name, folder)
    (folder / "node_modules").symlink_to(TOOLS.parent / "grafana" / "types" / "node_modules")
    spoilt = {}
    for name, (kind, spoil) in MISTAKES.items():
        spoilt[name] = first(kind)
        spoil(spoilt[name], spoilt[name]["panels"][0])
    for name, dashboard in {**DASHBOARDS, **spoilt}.items():
        text = SOURCE.format(json.dumps(dashboard, indent=2, ensure_ascii=False))
        (folder / f"{name}.ts").write_text(text, encoding="utf-8")
    ran = subprocess.run([compiler, "-p", "."], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    said: dict[str, list[str]] = {}
    for line in ran.stdout.splitlines():
        found = re.match(r"(\w[\w-]*)\.ts\(\d+,\d+\): error", line)
        if found:
            said.setdefault(found[1], []).append(line)
        else:
            assert line.startswith(" "), line  # the second line of a complaint
    return said


@pytest.mark.slow
@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafanas_types_accept_the_dashboard(name: str, complaints: dict[str, list[str]]) -> None:
    assert name not in complaints, "\n".join(complaints[name][:20])


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused(name: str, complaints: dict[str, list[str]]) -> None:
    assert name in complaints


@pytest.mark.slow
def test_the_lock_file_names_no_registry_and_the_versions_are_grafanas(complaints: dict[str, list[str]]) -> None:
    for lock in Path(__file__).parent.glob("grafana/*/package-lock.json"):
        text = lock.read_text(encoding="utf-8")
        assert "://" not in re.sub(r'"(url|funding|homepage)": .*', "", text), lock
        versions = {
            name: entry["version"]
            for name, entry in json.loads(text)["packages"].items()
            if re.fullmatch(r"node_modules/@grafana/(schema|ui|data|runtime|e2e-selectors)", name)
        }
        assert set(versions.values()) == {"13.2.2"}, versions
