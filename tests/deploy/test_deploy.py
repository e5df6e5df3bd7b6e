"""The units of systemd work with its own tools, and the scrape configuration fits them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys

import pytest

from pacecar.config import DaemonConfig, load_config
from pacecar.metrics.catalog import CATALOG
from pacecar.monitor.ingest.unix_socket import BACKLOG
from tests.deploy.readers import DEPLOY, ran

UNIT = DEPLOY / "systemd" / "pacecar.service"
SCRAPE = DEPLOY / "prometheus" / "prometheus.yml"
EXPOSURE_MAX = 2.2
"""systemd's own score, 0 (sealed) to 10 (exposed); above this a line of the sandbox was lost.  0.4 of it is for a call
that could set the clock, if there were a capability for it."""


def systemd(name: str) -> str:
    """Return a program of systemd's; not by find_tool, because a machine without systemd is healthy, under CI too."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: it comes with systemd")
    return found


@pytest.fixture
def analyze() -> str:
    return systemd("systemd-analyze")


def unit_lines() -> list[tuple[str, str]]:
    lines = [line for line in UNIT.read_text(encoding="utf-8").splitlines() if re.match(r"\w+=", line)]
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


@pytest.mark.slow
@pytest.mark.parametrize("has_socket", [False, True])
def test_systemd_accepts_the_unit_alone_and_with_socket_and_drop_in(analyze, has_socket, tmp_path):
    """The program is not installed here; everything else is checked unchanged."""
    units = [UNIT, UNIT.with_suffix(".socket")] if has_socket else [UNIT]
    for unit in units:
        text = unit.read_text(encoding="utf-8").replace("/opt/pacecar/bin/pacecar", f"{sys.executable} -m pacecar")
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    if has_socket:
        (tmp_path / "pacecar.service.d").mkdir()
        shutil.copy(UNIT.with_name("socket-activation.conf"), tmp_path / "pacecar.service.d")
    done = ran(analyze, "verify", *(tmp_path / unit.name for unit in units))
    assert done.returncode == 0, done.stderr
    assert "pacecar." not in done.stderr, "systemd warns: " + done.stderr


def test_the_sandbox_is_tight(analyze):
    done = ran(analyze, "security", "--offline=true", "--no-pager", UNIT)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot judge a unit offline")
    found = re.search(r"Overall exposure level for pacecar\.service: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= EXPOSURE_MAX


@pytest.mark.slow
def test_the_sandbox_lets_the_daemon_ask_for_the_clocks_state_and_not_set_it(analyze):
    """Otherwise the clock's series would be missing under this unit."""

    def calls(words):
        for word in words:
            if word.startswith("@"):
                said = ran(analyze, "syscall-filter", word)
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


def test_no_series_has_a_label_that_prometheus_gives_to_targets_itself():
    """Prometheus would rename a label `job` or `instance` to `exported_...`, which no panel selects."""
    assert not {label for metric in CATALOG for label in metric.labels} & {"job", "instance"}


def test_the_scrape_configuration_names_our_port():
    assert f'"127.0.0.1:{DaemonConfig().port}"' in SCRAPE.read_text(encoding="utf-8")


def test_the_socket_unit_opens_what_the_service_is_told_to_listen_on():
    socket = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "systemd/pacecar.socket").read_text(), re.MULTILINE))
    service = UNIT.read_text()
    assert f"PACECAR_DAEMON_SOCKET={socket['ListenSequentialPacket']}" in service
    drop_in = (DEPLOY / "systemd/socket-activation.conf").read_text()
    assert "\nRuntimeDirectory=\n" in drop_in, "or the socket is removed with the service's folder"
    assert int(socket["Backlog"]) == BACKLOG


def test_systemds_own_tools_make_account_and_folders(tmp_path):
    """In an empty root, as for an image; this machine is unchanged."""
    sysusers, tmpfiles = systemd("systemd-sysusers"), systemd("systemd-tmpfiles")
    if os.geteuid() != 0:
        pytest.skip("folders are given to an account: that needs root")
    (tmp_path / "etc").mkdir()
    done = ran(sysusers, f"--root={tmp_path}", DEPLOY / "systemd/sysusers.conf")
    assert done.returncode == 0, done.stderr
    (account,) = [line for line in (tmp_path / "etc/passwd").read_text().splitlines() if line.startswith("pacecar:")]
    assert account.endswith(":/var/lib/pacecar:/usr/sbin/nologin")
    done = ran(tmpfiles, f"--root={tmp_path}", "--create", DEPLOY / "systemd/tmpfiles.conf")
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "var/lib/pacecar").stat()
    assert (stat.S_IMODE(made.st_mode), made.st_uid) == (0o700, int(account.split(":")[2]))
    assert stat.S_IMODE((tmp_path / "run/pacecar").stat().st_mode) == 0o755
