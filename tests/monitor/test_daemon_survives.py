"""A daemon that another user sends impossible records, and a daemon with a thread that stops.

Bad frames lose their own numbers and nothing else.  A daemon without new numbers answers 503 instead of old ones, and
ends for its supervisor.
"""

import json
import math
import os
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from pacecar.monitor.service import EXIT_STALLED
from pacecar.records import JobHello, Vitals
from pacecar.wire import MAGIC, VERSION, encode_frame
from tests.kit.anyrecord import JOB_RECORDS, Rolled, make, mutated
from tests.kit.daemons import DaemonProcess
from tests.kit.net import get
from tests.kit.records import decision, job_hello, step_record
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parents[2]
STRANGER = 61003

pytestmark = pytest.mark.distributed

DAEMON = """
import sys, threading
from pathlib import Path
from pacecar.commands.main import main
from pacecar.monitor import daemon
from pacecar.monitor.export import prometheus
what, flag, *arguments = sys.argv[1:]
publish = prometheus.Exporter.publish
def odd(self, samples):
    if Path(flag).exists():
        if what == "hangs":
            threading.Event().wait()
        raise SystemExit(f"the tick {what}")
    publish(self, samples)
prometheus.Exporter.publish = odd
sys.argv[1:] = arguments
main()
"""


class Process(DaemonProcess):
    """The daemon's command; `what` says what its tick does once `flag` is there."""

    def __init__(self, folder, *, what="works", period_seconds=0.25):
        self.flag = folder / "flag"
        text = (
            f'[daemon]\nport = 0\nsocket = "{folder / "s"}"\nsocket_mode = "666"\nperiod_seconds = {period_seconds}\n'
            f'disable = ["gpu"]\nrecordings = "{folder / "r"}"\n'
        )
        super().__init__(folder, text, command=["-c", DAEMON, what, str(self.flag)])
        self.told("READY=1")

    def ask(self, path, method="GET"):
        answer = get(self.port, path, method)
        return answer.status, answer.headers, answer.text


@pytest.fixture
def start():
    """Start a daemon in a folder that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="pacecar-") as name:
        folder, started = Path(name), []
        folder.chmod(0o755)

        def run(**how):
            started.append(Process(folder, **how))
            return started[-1]

        yield run
        for one in started:
            one.close()


def as_stranger(path, frames, *, job="stranger"):
    """Let another user send a hello and `frames`, and disconnect."""
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            if os.geteuid() == 0:
                os.setgid(STRANGER)
                os.setuid(STRANGER)
            hook = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            hook.settimeout(60)
            hook.connect(str(path))
            hook.send(encode_frame(job_hello(job=job, pid=os.getpid())))
            for frame in frames:
                hook.send(frame)
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def framed(fields):
    payload = msgspec.msgpack.encode(fields)
    return MAGIC + bytes([VERSION, 0]) + len(payload).to_bytes(4, "big") + payload


def vitals(**changes):
    given = {
        "job": "stranger", "rank": 0, "step": 1, "ended_wall_ns": 1, "steps": 1, "wall_ns": 1, "samples": None,
        "tokens": None, "flops": 100, "flops_steps": 1, "flops_wall_ns": 1,
    }  # fmt: skip
    return Vitals(**(given | changes))


IMPOSSIBLE = [
    vitals(peak_flops_per_second=0),
    vitals(peak_flops_per_second=-1),
    vitals(flops=-(2**63), peak_flops_per_second=1),
    vitals(flops=2**64 - 1, peak_flops_per_second=1),
    vitals(flops_wall_ns=-1, peak_flops_per_second=1),
    vitals(wall_ns=2**64 - 1),
    *(decision(job="stranger", expected_gain_ratio=gain) for gain in (math.nan, math.inf, -math.inf, 1e308, 2.0)),
    decision(job="stranger", step=-1),
    step_record(job="stranger", measured_every=0),
    step_record(job="stranger", total_steps=2**63),
]


def test_what_another_user_says_costs_nobody_else_anything(start, hooks):
    daemon = start()
    honest = hooks(daemon.path)
    honest.say(job_hello(job="honest", pid=os.getpid()), step_record(job="honest", total_steps=7))
    until(lambda: daemon.value("pacecar_job_steps_total", training_job="honest") == 7)
    source = Rolled(seed=1)
    odd = [
        framed(mutated(make(kind, source, job="stranger", rank=0), source))
        for kind in (*JOB_RECORDS, JobHello)
        for _ in range(30)
    ]
    before = daemon.value("pacecar_daemon_ticks_total")
    as_stranger(daemon.path, list(map(encode_frame, IMPOSSIBLE)))
    until(lambda: daemon.value("pacecar_inbox_connections") == 1)  # all its frames were read
    assert daemon.value("pacecar_job_mfu_ratio", training_job="stranger") is None
    as_stranger(daemon.path, odd)
    until(lambda: daemon.value("pacecar_inbox_connections") == 1)
    until(lambda: daemon.value("pacecar_daemon_ticks_total") >= before + 3)
    samples = daemon.samples()
    assert [s for s in samples if not math.isfinite(s.value)] == []
    assert daemon.value("pacecar_inbox_frames_refused_total", refusal="malformed") >= len(IMPOSSIBLE)
    assert [s for s in samples if s.name == "pacecar_daemon_faults_total" and s.value] == []
    assert [s for s in samples if s.name == "pacecar_daemon_thread_restarts_total" and s.value] == []
    assert daemon.value("pacecar_job_steps_total", training_job="honest") == 7
    status, _, document = daemon.ask("/api/snapshot")
    assert status == 200
    assert "honest" in {job["job"] for job in json.loads(document)["jobs"]}
    assert "Traceback" not in daemon.log.read_text()
    assert daemon.process.poll() is None


def test_an_impossible_record_that_is_the_last_word_of_its_job_costs_nobody_the_page(start, hooks):
    """Each from its own job: a later record of the same kind would hide its effect."""
    daemon = start()
    honest = hooks(daemon.path)
    honest.say(job_hello(job="honest", pid=os.getpid()), step_record(job="honest", total_steps=7))
    for number, record in enumerate(IMPOSSIBLE):
        said = encode_frame(msgspec.structs.replace(record, job=f"odd-{number}"))
        as_stranger(daemon.path, [said], job=f"odd-{number}")
    until(lambda: daemon.value("pacecar_inbox_connections") == 1, "all of it was read")
    before = daemon.value("pacecar_daemon_ticks_total")
    until(lambda: daemon.value("pacecar_daemon_ticks_total") >= before + 3, "it ticks on")
    assert [s for s in daemon.samples() if not math.isfinite(s.value)] == []
    assert daemon.value("pacecar_job_steps_total", training_job="honest") == 7
    assert daemon.ask("/api/snapshot")[0] == 200
    assert "Traceback" not in daemon.log.read_text()


def test_a_tick_that_hangs_is_503_within_three_periods_and_the_end_of_the_process(start):
    daemon = start(what="hangs", period_seconds=1.0)
    until(lambda: daemon.value("pacecar_daemon_ticks_total") >= 2)
    daemon.flag.touch()
    ages = []

    def is_refused():
        status, _, page = daemon.ask("/metrics")
        if status == 200:
            found = [s for family in parse(page) for s in family.samples]
            ages.extend(s.value for s in found if s.name == "pacecar_daemon_snapshot_age_seconds")
        return status == 503

    until(is_refused)
    assert max(ages) <= 3.1, "no page was older than three periods when it was asked for, by the daemon's own clock"
    for path in ("/metrics", "/api/snapshot", "/api/history", "/api/events", "/-/healthy"):
        for method in ("GET", "HEAD"):
            status, headers, body = daemon.ask(path, method)
            assert (status, int(headers["Retry-After"]) > 0) == (503, True), (path, method)
            assert ("no tick has been published" in body) == (method == "GET")
    assert daemon.ask("/")[0] == 200  # the page for people says itself that it hears nothing
    assert daemon.process.wait(120) == EXIT_STALLED
    log = daemon.log.read_text()
    assert "the thread tick has made no progress" in log
    assert log.count("so that its supervisor restarts it") == 1


def test_a_thread_that_cannot_go_on_ends_the_process(start):
    daemon = start(what="exits")
    until(lambda: daemon.value("pacecar_daemon_ticks_total") >= 2)
    daemon.flag.touch()
    assert daemon.process.wait(120) == EXIT_STALLED
    log = daemon.log.read_text()
    assert "the thread tick failed: started again" in log
    assert "the thread tick has ended" in log


def test_a_process_that_was_stopped_for_a_while_goes_on(start):
    daemon = start()
    ticks = daemon.value("pacecar_daemon_ticks_total")
    daemon.process.send_signal(signal.SIGSTOP)
    time.sleep(4.0)  # longer than numbers may be old
    daemon.process.send_signal(signal.SIGCONT)
    until(lambda: daemon.ask("/-/healthy")[0] == 200)
    assert daemon.value("pacecar_daemon_ticks_total") >= ticks
    assert daemon.process.poll() is None
