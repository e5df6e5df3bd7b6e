"""A socket that the service manager opened: the next daemon serves hooks that connect while none runs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pacecar.monitor.ingest.unix_socket import UnixSocket, UnixSocketError
from pacecar.monitor.systemd import inherited_socket
from tests.kit.net import free_port, scrape
from tests.monitor.showcase import ShowJob

ROOT = Path(__file__).resolve().parents[2]


def command(path: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "pacecar", "daemon", "--socket", str(path), "--port", str(port), "--disable", "gpu"]


def handed_over(listener: socket.socket, path: Path, port: int) -> subprocess.Popen[str]:
    """Start a daemon as systemd does: the socket is descriptor 3, and LISTEN_PID its own pid."""
    assert listener.fileno() != 3

    def as_three() -> None:
        os.dup2(listener.fileno(), 3)
        os.set_inheritable(3, True)

    script = 'LISTEN_FDS=1 LISTEN_PID=$$ exec "$@"'
    return subprocess.Popen(
        ["sh", "-c", script, "sh", *command(path, port)],
        cwd=ROOT, preexec_fn=as_three, pass_fds=(3,), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def metrics(port: int) -> str:
    try:
        return scrape(port)
    except OSError:
        return ""


def heard(process: subprocess.Popen[str], port: int, words: str) -> None:
    limit = time.monotonic() + 30
    while words not in metrics(port):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit, metrics(port)[-2000:]
        time.sleep(0.1)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, err


def is_listening(path: Path) -> bool:
    """Return whether the kernel lists the Unix socket as listening; its path exists earlier, once it is bound."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
    return any(row[3] == "00010000" and row[7:] == [str(path)] for row in rows)  # __SO_ACCEPTCON (net/unix/af_unix.c)


@pytest.fixture
def job_at():
    """Make jobs, and disconnect them at the end."""
    jobs = []

    def at(path: Path, name: str) -> None:
        jobs.append(ShowJob(path, name=name, ranks=1, is_tuned=False))
        jobs[-1].step()

    yield at
    for job in jobs:
        for hook in job.hooks:
            hook.close()


@pytest.fixture
def listening(tmp_path):
    path = tmp_path / "pacecar.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(16)
    # Above 3, which the children get.
    with socket.socket(fileno=os.dup(listener.detach())) as kept:
        yield kept, path


@pytest.mark.distributed
@pytest.mark.slow
def test_a_hook_that_comes_between_two_daemons_is_heard_by_the_second(listening, job_at):
    listener, path = listening
    port = free_port()
    first = handed_over(listener, path, port)
    try:
        job_at(path, "early")
        heard(first, port, 'training_job="early"')
    finally:
        first.send_signal(signal.SIGTERM)
        code, _ = ended(first)
    assert code == 0
    assert path.is_socket(), "it is systemd's, and stays"
    job_at(path, "between")
    second = handed_over(listener, path, port)
    try:
        heard(second, port, 'training_job="between"')
        assert path.is_socket()
    finally:
        second.kill()
        ended(second)


@pytest.mark.distributed
@pytest.mark.slow
def test_systemds_own_program_hands_over_the_socket(tmp_path, job_at):
    activate = shutil.which("systemd-socket-activate")
    if activate is None:
        pytest.skip("systemd-socket-activate is not here: it comes with systemd")
    path, port = tmp_path / "pacecar.sock", free_port()
    process = subprocess.Popen(
        [activate, "--seqpacket", f"--listen={path}", "-E", f"PYTHONPATH={ROOT}", *command(path, port)],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        limit = time.monotonic() + 20
        while not is_listening(path):
            assert time.monotonic() < limit
            time.sleep(0.05)
        job_at(path, "awaking")  # the daemon is started by this connection
        heard(process, port, 'training_job="awaking"')
    finally:
        process.send_signal(signal.SIGTERM)
        code, err = ended(process)
    assert code == 0, err


@pytest.mark.distributed
def test_another_path_than_the_configured_one_ends_the_daemon_with_both_names(listening, tmp_path):
    listener, path = listening
    code, err = ended(handed_over(listener, tmp_path / "other.sock", free_port()))
    assert code == 1
    assert str(path) in err
    assert str(tmp_path / "other.sock") in err
    assert "Traceback" not in err


def test_a_socket_that_does_not_listen_is_refused(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        bound.bind(str(path))
        with pytest.raises(UnixSocketError, match="does not listen"):
            UnixSocket(path, inherited=bound).open()


@pytest.mark.parametrize(
    "environ",
    [{}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "many", "LISTEN_PID": "1"}],
)
def test_what_is_not_meant_for_this_process_is_left_alone(environ):
    assert inherited_socket(environ) is None


@pytest.mark.slow
def test_what_no_hook_can_use_is_closed_and_named():
    """In a child process, where descriptor 3 can be a TCP socket."""
    code = (
        "import logging, os; logging.basicConfig();"
        "from pacecar.monitor.systemd import inherited_socket;"
        "assert inherited_socket({'LISTEN_FDS': '2', 'LISTEN_PID': str(os.getpid())}) is None"
    )
    with socket.create_server(("127.0.0.1", 0)) as tcp, open(os.devnull) as nothing:

        def give() -> None:
            os.dup2(tcp.fileno(), 3)
            os.dup2(nothing.fileno(), 4)

        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, preexec_fn=give, pass_fds=(3, 4), capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=60,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "which is not used: hooks need one ListenSequentialPacket=" in ran.stderr
    assert "descriptor 4 of LISTEN_FDS is not a socket" in ran.stderr
