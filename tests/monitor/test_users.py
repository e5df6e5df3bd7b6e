"""Several real users of one machine: who may speak for a job, change it, or read?  And the daemon as one with nothing.

The daemon runs as its unit has it, as far as that goes without systemd: a user of its own, a read-only root, no
capability, a private /tmp.  The others are users whom the kernel tells apart.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kit.net import scrape, scraped
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parents[2]
DAEMON, OWNER, STRANGER = 61001, 61002, 61003
KEEP = ":".join(
    dict.fromkeys(str(path) for path in (ROOT, sys.prefix, sys.base_prefix, *sys.path) if Path(path).is_dir())
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is not here"),
    pytest.mark.skipif(shutil.which("nsenter") is None, reason="nsenter (util-linux) is not here"),
]

ACT = """
import json, os, socket, sys
from pacecar.records import Goodbye, JobHello, Request
from pacecar.wire import FrameError, decode_frame, encode_frame
what, path = sys.argv[1:]
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.settimeout(30)
try:
    peer.connect(path)
except OSError as error:
    print(error.strerror, flush=True)
    sys.exit()
def hello(**changes):
    given = dict(job="run-7", rank=0, local_rank=0, world_size=2, pid=os.getpid(), host="h", device="cpu",
                 framework="t", pacecar_version="0", started_wall_ns=1)
    return JobHello(**(given | changes))
if what == "train":
    peer.send(encode_frame(hello(launch=os.environ.get("LAUNCH", ""))))
elif what == "lie about pid":
    peer.send(encode_frame(hello(job="mine", pid=int(os.environ["LIE"]))))
elif what == "say goodbye for it":
    peer.send(encode_frame(hello(rank=1)))
    peer.send(encode_frame(Goodbye(job="run-7", rank=0, reason="gone", wall_ns=1)))
elif what == "turn a knob":
    peer.send(encode_frame(Request(serial=1, job="run-7", action="tune", arguments={"micro_batch": 1})))
    answer = decode_frame(peer.recv(65536))
    print(answer.state, answer.detail, flush=True)
    sys.exit()
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder():
    """A runtime directory that stays to be seen in the sandbox, so not below /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="pacecar-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


class Sandboxed:
    """The daemon's process."""

    def __init__(self, folder, *options):
        self.socket = folder / "s"
        self.config = folder.parent / f"{folder.name}.toml"
        command = [
            "unshare",
            "--mount",
            sys.executable,
            str(ROOT / "tests/monitor/sandbox.py"),
            str(DAEMON),
            str(folder),
        ]
        command += [KEEP, sys.executable, "-m", "pacecar", "daemon", "--port", "0", "--socket", str(self.socket)]
        environ = {n: v for n, v in os.environ.items() if not n.startswith(("PACECAR", "NOTIFY", "WATCHDOG"))}
        environ |= {"PYTHONDONTWRITEBYTECODE": "1"} | dict(option.split("=", 1) for option in options)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/metrics", line):
                self.port = int(found[1])
                return
        text = "".join(self.said)
        if re.search(r"unshare: .*not permitted|OSError: \[Errno (1|38)\]", text):
            pytest.skip("this machine lets nobody make mount namespaces: " + text.splitlines()[-1])
        raise AssertionError(text)

    def samples(self):
        return scraped(self.port)

    def refused(self):
        counts = {
            s.labels["refusal"]: s.value for s in self.samples() if s.name == "pacecar_inbox_frames_refused_total"
        }
        return {reason: count for reason, count in counts.items() if count}

    def status(self):
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


@pytest.fixture
def start(folder):
    started = []

    def run(*options):
        started.append(Sandboxed(folder, *options))
        return started[-1]

    yield run
    for daemon in started:
        daemon.process.kill()
        daemon.process.communicate()


@pytest.fixture
def act():
    """Do something as a user, in the daemon's mount namespace, where its runtime directory is."""
    actors = []

    def run(daemon, uid, what, group=None, **environ):
        command = ["nsenter", f"--target={daemon.process.pid}", "--mount", f"--wd={ROOT}"]
        command += ["setpriv", f"--reuid={uid}", f"--regid={group or uid}", "--clear-groups", "--inh-caps=-all"]
        command += [sys.executable, "-c", ACT, what, str(daemon.socket)]
        actor = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        actors.append(actor)
        said = actor.stdout.readline().strip()
        assert said, actor.stderr.read()
        return said

    yield run
    for actor in actors:
        actor.kill()
        actor.communicate()


def test_with_no_right_at_all_the_daemon_does_its_work(start, act):
    daemon = start("PACECAR_DAEMON_SOCKET_MODE=666")
    status = daemon.status()
    assert {int(uid) for uid in status["Uid"].split()} == {DAEMON}
    assert {
        name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    } == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)
    assert status["NoNewPrivs"] == "1"
    inside = ["nsenter", f"--target={daemon.process.pid}", "--mount"]
    for place in ("/etc/x", "/var/tmp/x", "/usr/x", str(ROOT / "x")):  # not even root could
        done = subprocess.run([*inside, "touch", place], capture_output=True, text=True, check=False)
        assert "Read-only file system" in done.stderr, place
    assert act(daemon, OWNER, "train") == "done"

    def works():
        names = {sample.name for sample in daemon.samples()}
        wanted = {"pacecar_rank_info", "pacecar_host_cpu_utilization_ratio", "pacecar_host_memory_available_bytes"}
        return wanted <= names

    until(works, "the host, and a job of another user")
    failed = [
        s.labels["collector"]
        for s in daemon.samples()
        if s.name == "pacecar_collector_outcome" and s.labels["outcome"] == "failed" and s.value
    ]
    assert not failed
    daemon.process.terminate()
    assert daemon.process.wait(30) == 0


def test_a_stranger_speaks_for_no_job_turns_no_knob_and_changes_no_number(start, act):
    daemon = start("PACECAR_DAEMON_SOCKET_MODE=666")
    assert act(daemon, OWNER, "train") == "done"
    until(lambda: any(s.name == "pacecar_rank_info" for s in daemon.samples()), "the job")
    before = [(s.labels, s.value) for s in daemon.samples() if s.name == "pacecar_rank_info"]
    assert act(daemon, STRANGER, "say goodbye for it") == "done"
    until(lambda: daemon.refused() == {"identity": 2}, "the hello, and the goodbye of another rank")
    assert act(daemon, STRANGER, "lie about pid", LIE="1") == "done"
    until(lambda: daemon.refused() == {"identity": 3}, "a pid that is another's")
    assert act(daemon, STRANGER, "turn a knob") == "refused job 'run-7' belongs to another user"
    assert [(s.labels, s.value) for s in daemon.samples() if s.name == "pacecar_rank_info"] == before
    assert act(daemon, OWNER, "turn a knob").startswith("accepted")


def test_a_second_users_job_of_the_same_name_is_seen_at_once_and_both_may_steer_their_own(start, act):
    daemon = start("PACECAR_DAEMON_SOCKET_MODE=666")
    assert act(daemon, OWNER, "train", LAUNCH="3f2a9c01d4e5b678") == "done"
    assert act(daemon, STRANGER, "train", LAUNCH="3a00000000000001") == "done"

    def launches():
        return sorted(s.labels["launch"] for s in daemon.samples() if s.name == "pacecar_rank_info")

    until(lambda: launches() == ["3a00000000000001", "3f2a9c01d4e5b678"], "both jobs")
    assert daemon.refused() == {}
    assert act(daemon, OWNER, "turn a knob").startswith("accepted")
    assert act(daemon, STRANGER, "turn a knob").startswith("accepted")


def test_mode_and_group_of_the_socket_keep_out_who_is_no_member(start, act):
    daemon = start("PACECAR_DAEMON_SOCKET_MODE=0660", f"PACECAR_DAEMON_SOCKET_GROUP={DAEMON}")
    assert act(daemon, STRANGER, "train") == "Permission denied"
    assert act(daemon, OWNER, "train", group=DAEMON) == "done"
    until(lambda: any(s.name == "pacecar_rank_info" for s in daemon.samples()), "the member's job")


def test_without_a_mode_the_socket_is_its_users_own(start, act):
    assert act(start(), STRANGER, "train") == "Permission denied"


def test_a_group_that_cannot_be_had_is_named_and_nothing_is_served(folder):
    done = subprocess.run(
        [sys.executable, "-m", "pacecar", "daemon", "--port", "0", "--socket", str(folder / "s")],
        env=os.environ | {"PACECAR_DAEMON_SOCKET_GROUP": "no-such-group-here"},
        capture_output=True, text=True, cwd=ROOT, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "socket_group: there is no group 'no-such-group-here' here" in done.stderr
    assert list(folder.iterdir()) == []


def test_snapshot_is_json_in_the_sandbox_too(start):
    daemon = start()
    assert json.loads(scrape(daemon.port, "/api/snapshot"))["jobs"] == []
