"""Users' mistakes end the command with one line and an exit code, not a traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest

from pacecar import __version__
from tests.kit.net import free_port

pytestmark = pytest.mark.slow

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}


def pacecar(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pacecar", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**ENVIRONMENT, **environ},
        check=False,
    )


def test_version_and_help_are_said_on_stdout() -> None:
    assert pacecar("version").stdout == f"pacecar {__version__}\n"
    done = pacecar("--help")
    assert done.returncode == 0
    for command in ("daemon", "sample", "demo", "analyze", "dashboards", "version"):
        assert command in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environ", "named"),
    [
        (("daemon",), {"PACECAR_DAEMON_PROT": "1"}, "PACECAR_DAEMON_PROT: [daemon] has no key 'prot'"),
        (("daemon", "--port", "70000"), {}, "port = 70000"),
        (("daemon", "--log-level", "loud"), {}, "log_level = 'loud'"),
        (("daemon", "--config", "/no/such/file"), {}, "/no/such/file: cannot be read"),
        (("sample",), {"PACECAR_DAEMON_PERIOD_SECONDS": "soon"}, "PACECAR_DAEMON_PERIOD_SECONDS='soon'"),
        (("demo", "--steps", "1", "--seconds", "1"), {}, "--steps or --seconds"),
        (("demo", "--tune", "wildly"), {}, "wildly"),
        (("bogus",), {}, "bogus"),
    ],
)
def test_wrong_usage_exits_2_and_names_what_is_wrong(
    arguments: tuple[str, ...], environ: dict[str, str], named: str
) -> None:
    done = pacecar(*arguments, **environ)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "command", [["tune", "status"], ["tune", "freeze"], ["tune", "set", "micro_batch", "4"], ["trace"]]
)
def test_a_job_whose_name_begins_with_a_dash_is_asked_for_behind_two(command: list[str], tmp_path: Path) -> None:
    options = ["--socket", str(tmp_path / "none")]
    wrong = pacecar(*command, *options, "-c-1234")
    assert wrong.returncode == 2
    assert f"Put a name that begins with a dash behind --: pacecar {' '.join(command[:2])[:5]}" in wrong.stderr.replace(
        "python -m ", ""
    )
    done = pacecar(*command, *options, "--", "-c-1234")
    assert done.returncode == 1
    assert "none" in done.stderr, "it asks for the daemon"


def test_sample_prints_a_snapshot_that_a_program_can_read() -> None:
    done = pacecar("sample", "--json")
    assert done.returncode == 0
    collectors = msgspec.json.decode(done.stdout)["collectors"]
    assert collectors["cpu"]["outcome"] == "ok"
    values = {(s["metric"], *s["labels"].values()): s["value"] for s in collectors["cpu"]["samples"]}
    with Path("/proc/uptime").open() as uptime:
        booted_seconds = float(uptime.read().split()[0])
    assert 0 < values["pacecar_host_cpu_seconds_total", "user"] < booted_seconds * (os.cpu_count() or 1), "in seconds"


def test_sample_names_a_collector_that_does_not_exist() -> None:
    done = pacecar("sample", "--disable", "nosuch")
    assert done.returncode == 1
    assert "nosuch" in done.stderr
    assert "Traceback" not in done.stderr


def test_sample_prints_base_units_for_people() -> None:
    done = pacecar("sample", "--disable", "gpu")
    assert done.returncode == 0
    assert "pacecar_host_memory_size_bytes " in done.stdout
    assert "gpu" not in done.stdout


def test_a_reader_that_went_away_is_met_without_a_traceback() -> None:
    """`pacecar sample | head -1`: the pipe is closed before we write."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pacecar", "sample"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=ENVIRONMENT,
            check=False,
        )
    finally:
        os.close(write_end)
    assert done.stderr == ""


def test_the_daemon_says_which_port_is_taken_and_exits_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = pacecar("daemon", "--port", str(port), "--socket", str(tmp_path / "s"))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.distributed
def test_the_daemon_serves_until_sigterm_with_flags_over_file(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "pacecar.toml"
    file.write_text('[daemon]\nport = 1\ndisable = ["disk"]\n')
    command = [sys.executable, "-m", "pacecar", "daemon", "--config", str(file), "--port", str(port)]
    daemon = subprocess.Popen(
        [*command, "--socket", str(tmp_path / "s")], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    try:
        text = ""
        deadline = time.monotonic() + 20
        while "pacecar_host_memory_size_bytes" not in text and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    text = answer.read().decode()
            except OSError:
                time.sleep(0.1)
        assert "pacecar_host_memory_size_bytes" in text
        assert "pacecar_host_disk_read_bytes_total" not in text
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(10) == 0
        assert not (tmp_path / "s").exists()
    finally:
        daemon.kill()
        daemon.communicate()


def test_dashboards_and_rules_are_exported(tmp_path: Path) -> None:
    done = pacecar("dashboards", "export", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    written = [Path(line) for line in done.stdout.splitlines()]
    assert {path.suffix for path in written} == {".json", ".yml"}
    for path in written:
        text = path.read_text()
        assert json.loads(text)["title"] if path.suffix == ".json" else text.startswith("# Generated")


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    """An interpreter whose finder hides torch acts as one without torch."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a)\n"
    )
    done = pacecar("demo", "--run-dir", str(tmp_path / "runs"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install 'pacecar[torch]'" in done.stderr
    assert not (tmp_path / "runs").exists()
