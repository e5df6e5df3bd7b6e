"""The unit and the configuration work with the tools that read them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pacecar.config import DaemonConfig, load_config
from pacecar.metrics.catalog import CATALOG
from tests.kit.tools import find_tool

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "systemd" / "pacecar.service"
SCRAPE = ROOT / "deploy" / "prometheus" / "prometheus.yml"
EXPOSURE_MAX = 2.2
"""systemd's own score, 0 (sealed) to 10 (exposed); above this a line of the sandbox was lost.  0.4 of it is for a call
that could set the clock, if there were a capability for it."""


@pytest.fixture
def analyze() -> str:
    """The path of systemd-analyze; not find_tool, because a machine without systemd is healthy, under CI too."""
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not here: it comes with systemd")
    return found


def unit_lines() -> list[tuple[str, str]]:
    lines = [line for line in UNIT.read_text(encoding="utf-8").splitlines() if re.match(r"\w+=", line)]
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


def test_systemd_accepts_the_unit(analyze, tmp_path):
    # The program is not installed here; everything else is checked unchanged.
    text = UNIT.read_text(encoding="utf-8").replace("/opt/pacecar/bin/pacecar", f"{sys.executable} -m pacecar")
    copy = tmp_path / "pacecar.service"
    copy.write_text(text, encoding="utf-8")
    ran = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "pacecar.service" not in ran.stderr, "systemd warns: " + ran.stderr


def test_the_sandbox_is_tight(analyze):
    ran = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", str(UNIT)], capture_output=True, text=True, check=False
    )
    if "unrecognized option" in ran.stderr:
        pytest.skip("this systemd-analyze cannot judge a unit offline")
    found = re.search(r"Overall exposure level for pacecar\.service: ([\d.]+)", ran.stdout)
    assert found, ran.stdout + ran.stderr
    assert float(found[1]) <= EXPOSURE_MAX


def test_the_sandbox_lets_the_daemon_ask_for_the_clocks_state_and_not_set_it(analyze):
    """Otherwise the clock's series would be missing under this unit."""

    def calls(words):
        for word in words:
            if word.startswith("@"):
                said = subprocess.run([analyze, "syscall-filter", word], capture_output=True, text=True, check=True)
                yield from calls(line.strip() for line in said.stdout.splitlines() if re.match(r" +[@\w]", line))
            else:
                yield word

    allowed = set()
    for words in [value for key, value in unit_lines() if key == "SystemCallFilter"]:
        named = set(calls(words.removeprefix("~").split()))
        allowed = allowed - named if words.startswith("~") else allowed | named
    assert {"adjtimex", "clock_adjtime"} <= allowed
    assert not {"clock_settime", "settimeofday"} & allowed
    assert dict(unit_lines()).get("ProtectClock", "no") == "no"


def test_the_unit_has_no_privilege_and_only_gpu_devices():
    lines = unit_lines()
    settings = dict(lines)
    assert settings["CapabilityBoundingSet"] == ""
    assert settings["NoNewPrivileges"] == "yes"
    assert settings["DynamicUser"] == "yes"
    assert settings["ProtectSystem"] == "strict"
    devices = [value for key, value in lines if key == "DeviceAllow"]
    assert settings["DevicePolicy"] == "closed"
    assert all("nvidia" in device for device in devices)


def test_the_units_settings_are_keys_that_exist():
    """A misspelt variable would end the daemon at each start."""
    environ = dict(value.split("=", 1) for key, value in unit_lines() if key == "Environment")
    config = load_config(environ=environ)
    runtime = dict(unit_lines())["RuntimeDirectory"]
    assert config.daemon.socket == f"/run/{runtime}/pacecar.sock"


def test_a_hook_looks_where_the_unit_listens(monkeypatch):
    """Hooks try the system's socket first; the unit must create exactly that one."""
    import pacecar.config

    listening = dict(value.split("=", 1) for key, value in unit_lines() if key == "Environment")
    monkeypatch.setattr(pacecar.config.Path, "exists", lambda path: True)
    assert pacecar.config.default_socket({}) == listening["PACECAR_DAEMON_SOCKET"]


def test_prometheus_accepts_the_scrape_configuration():
    promtool = str(find_tool("promtool"))
    ran = subprocess.run([promtool, "check", "config", str(SCRAPE)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_series_has_a_label_that_prometheus_gives_to_targets_itself():
    """Prometheus would rename a label `job` or `instance` to `exported_...`, which no panel selects."""
    assert not {label for metric in CATALOG for label in metric.labels} & {"job", "instance"}


def test_the_scrape_configuration_names_our_port():
    assert f'"127.0.0.1:{DaemonConfig().port}"' in SCRAPE.read_text(encoding="utf-8")
