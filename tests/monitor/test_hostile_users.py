"""One user cannot push another off the node: a real daemon with a limit on its memory, and real users.

Each attack holds what it can get while another user's job comes: that job is on the board with its numbers, what was
there before is right, the host's ticks go on, and neither memory nor log grows with the attack.
"""

import os
import re
import resource
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from pacecar.commands.main import cli
from pacecar.records.recording import read_recording
from tests.kit.daemons import DaemonProcess
from tests.kit.forking_python import forking_python
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parents[2]
HOSTILE, VICTIM = 61021, 61022

LOADED = ("pacecar.records", "pacecar.wire")
"""What a user's process has before it is forked; it becomes the user itself."""

MEMORY_BYTES = 1 << 30
"""Address space: a Python with 20 threads has 400 MB of it before anything is stored."""

RSS_GROWTH_MAX = 32 << 20
"""Of an attack: the page's lines, and what bounded tables take when they are full."""

RECORDER_BYTES = 1_000_000
"""The least that may be configured: some seconds of a flood, or minutes of the host's ticks."""

LINES_MAX = 120
"""In the log for one attack: some kinds of fault, each with its lines a minute."""

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users"),
]


def start(folder):
    text = (
        f'[daemon]\nport = 0\nsocket = "{folder / "s"}"\nsocket_mode = "666"\nperiod_seconds = 0.5\n'
        f'disable = ["gpu"]\nrecordings = "{folder / "recordings"}"\nrecorder_bytes = {RECORDER_BYTES}\n'
    )
    limit = (MEMORY_BYTES, MEMORY_BYTES)
    return DaemonProcess(folder, text, before=lambda: resource.setrlimit(resource.RLIMIT_AS, limit))


class Actors:
    def __init__(self, daemon):
        self.daemon = daemon
        self.started = []

    def be(self, uid, what, *more):
        script = str(ROOT / "tests/monitor/hostile_user.py")
        command = [
            forking_python(modules=LOADED),
            script,
            str(uid),
            what,
            str(self.daemon.path),
            str(self.daemon.port),
            *more,
        ]
        actor = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.started.append(actor)
        assert actor.stdout.readline() == "ready\n"
        return actor

    def end(self):
        for actor in self.started:
            actor.kill()
            actor.communicate()


@pytest.fixture(scope="module")
def daemon():
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="pacecar-test-") as name:
        Path(name).chmod(0o755)
        running = start(Path(name))
        until(running.samples, "it has ticked")  # else `resident_bytes` would count what starting takes
        yield running
        running.close()


@pytest.fixture
def actors(daemon):
    actors = Actors(daemon)
    yield actors
    actors.end()


ATTACKS = [
    "job_names", "departed_job_names", "stragglers", "hangs", "connections", "commands", "dumps", "clients", "viewers",
    *(
        pytest.param(long, marks=pytest.mark.full)
        for long in ("accepts", "knob_names", "departed_ranks", "labels", "decisions")
    ),
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_keeps_no_other_user_off_the_board(daemon, actors, attack):
    lines = daemon.logged().count("\n")
    before = daemon.resident_bytes()
    actors.be(VICTIM, "train", f"before-{attack}")
    actors.be(HOSTILE, attack)
    actors.be(VICTIM, "train", f"after-{attack}")

    def is_there(job):
        return daemon.value("pacecar_job_step", training_job=job) == 41

    until(lambda: is_there(f"after-{attack}"), f"{attack}: the victim's numbers", 20)
    assert is_there(f"before-{attack}"), f"{attack}: what was there before"
    with socket.create_connection(("127.0.0.1", daemon.port), 20) as viewer:
        viewer.sendall(b"GET /api/events HTTP/1.1\r\n\r\n")
        assert viewer.recv(4096).startswith(b"HTTP/1.1 200"), f"{attack}: a new page looks on"
    ticks = daemon.value("pacecar_daemon_ticks_total")
    until(lambda: daemon.value("pacecar_daemon_ticks_total") > ticks, f"{attack}: ticks go on", 20)
    said = daemon.logged().count("\n") - lines
    assert said <= LINES_MAX, f"{attack}: {said} lines in the log"
    grown = daemon.resident_bytes() - before
    assert grown <= RSS_GROWTH_MAX, f"{attack}: grew by {grown / 1e6:.0f} MB"


@pytest.mark.parametrize("attack", ["decisions", "stragglers"])
def test_a_flood_of_records_leaves_the_hosts_ticks_in_the_recorder(daemon, actors, attack):
    actors.be(VICTIM, "train", f"recorded-{attack}")
    until(lambda: daemon.value("pacecar_job_step", training_job=f"recorded-{attack}") == 41, "it was heard", 20)
    before = daemon.value("pacecar_daemon_ticks_total")
    actors.be(HOSTILE, attack)
    dumped = CliRunner().invoke(cli, ["dump", "--socket", str(daemon.path)])
    assert dumped.exit_code == 0, dumped.output
    recording = read_recording(Path(dumped.output.strip()))
    ticks = [tick.tick for tick in recording.ticks()]
    assert ticks, f"{attack}: no tick is left"
    assert ticks[0] <= before, f"{attack}: what was before is gone"
    assert ticks == list(range(ticks[0], ticks[-1] + 1))
    said = {record.job for _, record in recording.records()}
    assert {f"recorded-{attack}", "hostile"} <= said, "each has its share"


def test_what_others_wrote_forges_no_line_of_the_log_and_reaches_no_terminal(daemon, actors):
    actors.be(HOSTILE, "texts")
    until(lambda: daemon.value("pacecar_rank_info", rank="0", host="e\x1b[2Jvil\nWARNING forged\u202e\x9b31m"), "told")
    until(lambda: daemon.logged().count("forged") >= 3, "it is logged")
    said = daemon.logged()
    assert [line for line in said.split("\n") if line and not re.match(r"\d{4}-\d\d-\d\d ", line)] == []
    assert all(one.isprintable() for line in said.split("\n") for one in line)
