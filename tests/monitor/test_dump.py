"""`pacecar dump` against a running daemon: permission, contents of the file, and damaged files."""

import json
import os
import time
from contextlib import ExitStack

import pytest
from click.testing import CliRunner

from pacecar.commands.daemon_client import converse
from pacecar.commands.main import cli
from pacecar.config import ConfigError, default_recordings, load_config
from pacecar.monitor.catalog_sample import sample
from pacecar.monitor.ingest import socket_server as inboxes
from pacecar.monitor.ingest.authorization import NOBODY, may_dump
from pacecar.monitor.recorder import recorder as recorders
from pacecar.records import DumpRequest, Ok
from pacecar.records.recording import read_recording
from pacecar.wire import Refusal
from tests.kit.daemons import running_daemon
from tests.kit.own_samples import value_of
from tests.kit.waiting import until
from tests.monitor.testimony import everything


@pytest.fixture
def daemon(tmp_path, steady):
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(running_daemon(tmp_path, [steady()], **changes))


def run(*arguments):
    return CliRunner().invoke(cli, ["dump", *arguments])


@pytest.mark.slow
def test_a_dump_holds_the_job_and_the_ticks(daemon, tmp_path, hooks, make_hello, make_step):
    running = daemon()
    hook = hooks(running.socket)
    step = make_step(rank=1)
    hook.say(make_hello(rank=1, pid=os.getpid()), step, *everything(1))
    limit = time.monotonic() + 10
    while (value_of(running._recorder, "pacecar_recorder_entries_total") < 8) and time.monotonic() < limit:
        time.sleep(0.02)
    done = run("--socket", running.socket, "--note", "try")
    assert done.exit_code == 0, done.output
    path = done.output.strip()
    read = read_recording(path)
    assert [hello.job for hello in read.header.hellos] == ["run-7"]
    assert [sample.metric for sample in read.header.identity] == ["pacecar_rank_info"]
    assert {"request"} <= {trigger.kind for trigger in read.header.triggers}
    assert step in [record for _, record in read.records()]
    assert next(read.ticks()).values == {("pacecar_host_cpus_online", ()): 2}
    shown = run("--show", path)
    assert shown.exit_code == 0
    assert "request: uid" in shown.output
    assert "run-7: 1 ranks; " in shown.output
    facts = json.loads(run("--show", path, "--json").output)
    assert facts["series"] == 1
    assert facts["records_of_jobs"]["run-7"]["StepRecord"] == 1


@pytest.mark.slow
def test_a_damaged_file_is_one_line_and_can_be_salvaged(daemon, tmp_path):
    running = daemon()
    time.sleep(0.3)
    path = run("--socket", running.socket).output.strip()
    cut = tmp_path / "cut.recording"
    with open(path, "rb") as whole:
        cut.write_bytes(whole.read()[:-4])
    shown = run("--show", str(cut))
    assert shown.exit_code == 1
    assert "truncated" in shown.output
    assert shown.output.count("\n") == 1
    assert run("--show", str(cut), "--salvage").exit_code == 0
    assert run("--show", str(tmp_path / "none")).exit_code == 1
    assert run("--json").exit_code == 2
    assert run("--show", str(cut), "--note", "x").exit_code == 2


@pytest.mark.slow
def test_only_root_and_the_daemons_user_may(daemon, monkeypatch):
    assert may_dump(0, 1000)
    assert may_dump(1000, 1000)
    assert not may_dump(1001, 1000)
    assert not may_dump(NOBODY, NOBODY), "in a user namespace that is anybody"
    running = daemon()
    monkeypatch.setattr(inboxes, "may_dump", lambda uid, own: False)
    done = run("--socket", running.socket)
    assert done.exit_code == 1
    assert "only root and the daemon's own user" in done.output


@pytest.mark.slow
def test_without_a_recorder_and_without_a_daemon(daemon, tmp_path):
    running = daemon(recorder=False)
    done = run("--socket", running.socket)
    assert (done.exit_code, "has no recorder" in done.output) == (1, True)
    assert run("--socket", str(tmp_path / "nobody")).exit_code == 1


def test_where_recordings_go(monkeypatch, tmp_path):
    assert default_recordings({"STATE_DIRECTORY": "/var/lib/pacecar:/x"}) == "/var/lib/pacecar/recordings"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_recordings({"XDG_STATE_HOME": "/h/state"}) == "/h/state/pacecar/recordings"
    assert default_recordings({"HOME": "/h"}) == "/h/.local/state/pacecar/recordings"
    file = tmp_path / "p.toml"
    file.write_text("[daemon]\nrecordings_bytes = 1000000\n")
    with pytest.raises(ConfigError, match="recordings_bytes is below recorder_bytes"):
        load_config(file, environ={})


@pytest.mark.slow
def test_a_hook_and_an_endless_note_are_refused(daemon, hooks, make_hello):
    running = daemon()
    hook = hooks(running.socket)
    hook.say(DumpRequest(serial=1, note="x" * 5000), make_hello(pid=os.getpid()), DumpRequest(serial=2))
    limit = time.monotonic() + 10
    while running._socket_server.refused()[Refusal.MALFORMED] < 2:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert value_of(running._recorder, "pacecar_recorder_triggers_total", "request") == 0


@pytest.mark.slow
def test_as_two_real_users(daemon, tmp_path):
    """The socket is reachable for all, but only root and the daemon's user get a recording."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    running = daemon()
    os.chmod(running.socket, 0o666)
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    child = os.fork()
    if child == 0:
        code = 9
        try:
            os.setresuid(12345, 12345, 12345)
            answer = converse(running.socket, DumpRequest(serial=1), timeout_seconds=10)
            code = 0 if answer.state == "refused" and "only root" in answer.detail else 8
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert value_of(running._recorder, "pacecar_recorder_triggers_total", "request") == 0


class FallingGpu:
    """A GPU that is up, is glanced at, and has an Xid error when the test says so."""

    name = "gpu"

    def __init__(self):
        self.xids = 0

    def collect(self):
        return Ok((sample("pacecar_gpu_up", 1, "0"), sample("pacecar_gpu_xid_errors_total", self.xids, "0", "79")))

    def glance(self):
        return [sample("pacecar_gpu_power_watts", 650_000, "0")]

    def close(self):
        """Hold nothing."""


@pytest.mark.slow
def test_an_xid_under_a_running_daemon_leaves_a_file_with_ticks_and_glances(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "AFTER_SECONDS", 0.5)
    gpu = FallingGpu()
    with running_daemon(tmp_path, [gpu]) as running:
        until(lambda: value_of(running._recorder, "pacecar_recorder_entries_total") >= 20, "ticks and glances")
        gpu.xids = 1
        until(lambda: value_of(running._recorder, "pacecar_recorder_files_total") >= 1, "the file")
    (path,) = (tmp_path / "rec").glob("*-xid.recording")
    read = read_recording(path)
    assert [trigger.detail for trigger in read.header.triggers] == ["Xid 79 of GPU 0"]
    series = ("pacecar_gpu_xid_errors_total", ("0", "79"))
    xids = [tick.values[series] for tick in read.ticks() if series in tick.values]  # not where the machine was busy
    assert (xids[0], xids[-1]) == (0, 1)
    assert {value for _, values in read.glances() for value in values.values()} == {650_000}
    assert any(event.text == "Xid 79 of GPU 0" for _, event in read.events())
