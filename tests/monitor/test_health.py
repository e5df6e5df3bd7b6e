"""`pacecar health` says by its exit code whether the numbers are fresh, whatever protects the port."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

import pytest
from click.testing import CliRunner, Result

from pacecar.clock import NS_PER_SECOND, SystemClock
from pacecar.commands.main import cli
from pacecar.config import DaemonConfig
from pacecar.monitor.daemon import Daemon
from pacecar.records import HealthRequest
from pacecar.wire import Refusal
from tests.kit.waiting import until


class JumpingClock(SystemClock):
    """The system's clock, until a test lets time pass at once."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.ahead_ns


@pytest.fixture
def start(tmp_path, steady):
    made = []

    def started(clock=None, **changes):
        given = {"port": 0, "socket": str(tmp_path / "s"), "period_seconds": 0.1} | changes
        made.append(Daemon(DaemonConfig(**given), collectors=[steady()], clock=clock))
        made[-1].start()
        until(made[-1].is_healthy, "the first tick")
        return made[-1]

    yield started
    for one in made:
        one.close()


def health(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["health", *arguments])


@pytest.mark.slow
def test_a_daemon_that_ticks_is_healthy(start):
    done = health("--socket", start().socket)
    assert (done.exit_code, done.output) == (0, "ok\n")


@pytest.mark.slow
def test_old_numbers_are_named_and_are_not_healthy(start):
    clock = JumpingClock()
    daemon = start(clock, period_seconds=10.0)

    said: list[Result] = []

    def is_left_behind() -> int:
        clock.ahead_ns += 31 * NS_PER_SECOND  # again, where that met the tick before it began to wait
        said.append(health("--socket", daemon.socket))
        return said[-1].exit_code

    until(is_left_behind, "the numbers are old")
    done = said[-1]
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no tick has been published since" in done.stderr or "hangs" in done.stderr


@pytest.mark.slow
def test_no_daemon_and_one_that_does_not_answer_are_not_healthy(tmp_path):
    done = health("--socket", str(tmp_path / "none"))
    assert done.exit_code == 1
    assert "No such file or directory: is the daemon running" in done.stderr
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "mute"))
        listening.listen()
        done = health("--socket", str(tmp_path / "mute"), "--timeout-seconds", "0.1")
    assert done.exit_code == 1
    assert "does not answer within 0.1 s" in done.stderr


@pytest.mark.slow
def test_a_rank_does_not_ask_for_health(start, hooks, make_hello):
    daemon = start()
    hook = hooks(daemon.socket)
    hook.say(make_hello(pid=os.getpid()), HealthRequest(serial=1))
    until(lambda: daemon._socket_server.refused()[Refusal.MALFORMED] == 1, "the frame is refused")


@pytest.mark.slow
def test_it_needs_no_certificate_and_no_password(start, tmp_path):
    bcrypt = pytest.importorskip("bcrypt", reason="the extra `secure` is not installed")
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not here to make a certificate with")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=elsewhere", "-keyout", "node.key", "-out", "node.crt"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    secret = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
    (tmp_path / "web.yml").write_text(
        "tls_server_config:\n  cert_file: node.crt\n  key_file: node.key\n  client_ca_file: node.crt\n"
        f"  client_auth_type: RequireAndVerifyClientCert\nbasic_auth_users:\n  ann: {secret}\n"
    )
    daemon = start(web_config_file=str(tmp_path / "web.yml"))
    assert daemon.security.context is not None
    assert health("--socket", daemon.socket).exit_code == 0
