"""Two real ranks with a daemon each, as on two nodes: what disturbs one node holds the job and lets it go again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pacecar.commands.main import cli
from pacecar.config import DaemonConfig
from pacecar.monitor.daemon import Daemon
from pacecar.records import Decision, JobRecord, KnobSwitch, Ok, Outcome, Sample, TunerStatus, Verdict
from tests.kit.forking_python import forking_python
from tests.kit.net import free_port
from tests.kit.waiting import until

JOB = Path(__file__).parent / "jobs" / "small_ddp.py"
WAIT_SECONDS = 120.0
PERIOD_SECONDS = 0.3
ENDLESS = ("--steps", "50", "--until", "/nonexistent/file")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class Planted:
    """A node of which a test says whether it is short of memory; everything else of it is unknown."""

    name = "planted"

    def __init__(self) -> None:
        self.is_short = False
        self._stalled_ns = 0
        self._last_ns = time.monotonic_ns()

    def collect(self) -> Outcome:
        now_ns = time.monotonic_ns()
        self._stalled_ns += (now_ns - self._last_ns) // 2 if self.is_short else 0
        self._last_ns = now_ns
        stalled = Sample("pacecar_host_pressure_stalled_seconds_total", ("memory", "some"), self._stalled_ns)
        return Ok((stalled, Sample("pacecar_host_memory_available_bytes", (), 2**32)))

    def close(self) -> None:
        pass


class Nodes:
    """A daemon for each of two ranks, and the job that runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.planted = [Planted(), Planted()]
        self.daemons = [
            Daemon(
                DaemonConfig(
                    port=0, socket=str(folder / f"{rank}.sock"), period_seconds=PERIOD_SECONDS, jitter_ratio=0
                ),
                collectors=[planted],
            )
            for rank, planted in enumerate(self.planted)
        ]
        self.ranks: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, sockets: Sequence[Path] | None = None, **options: Any) -> None:
        """Start the job, and a daemon for each rank unless the `sockets` of others are given."""
        for daemon in self.daemons if sockets is None else []:
            daemon.start()
        port = free_port()
        for rank in (0, 1):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "PACECAR_JOB": "signalled",
            }  # fmt: skip
            given = options | {"socket": str(self.folder / f"{rank}.sock" if sockets is None else sockets[rank])}
            command = [forking_python(), str(JOB), *arguments, "--options", json.dumps(given)]
            self.ranks.append(
                subprocess.Popen(
                    [*command, "--run-dir", str(self.folder / "run")],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | environment,
                )
            )

    def report(self) -> dict[str, Any] | None:
        command = ["tune", "status", "signalled", "--json", "--socket", str(self.folder / "0.sock")]
        said = CliRunner().invoke(cli, command)
        return json.loads(said.stdout) if said.exit_code == 0 else None

    def wait_for(self, claim: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_SECONDS
        report = None
        while time.monotonic() < deadline:
            for rank in self.ranks:
                if rank.poll() is not None:
                    pytest.fail(f"the job ended before {what}: {rank.communicate()[1][-3000:]}")
            report = self.report()
            if report is not None and claim(report):
                return report
            time.sleep(0.1)
        pytest.fail(f"never {what}: {report}")

    def records(self, rank: int) -> list[JobRecord]:
        decoder = msgspec.json.Decoder(JobRecord)
        lines = (self.folder / "run" / f"rank{rank}.jsonl").read_bytes().split(b"\n")[:-1]
        return [decoder.decode(line) for line in lines]

    def states(self) -> list[str]:
        """Return the states that rank 0 put down so far."""
        return [record.state for record in self.records(0) if isinstance(record, TunerStatus)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()
        for daemon in self.daemons:
            daemon.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


def is_heard(report: dict[str, Any]) -> bool:
    return any("memory" in sentence for sentence in report["node"])


LAPSES_MAX = 5
"""Times that a daemon on a busy machine may say nothing for so long that the hold ends meanwhile."""

ENDED_BEFORE_MAX = 5
"""Trials that may end by themselves before the hold reaches them; on a busy machine one in some does."""


def is_frozen(report: dict[str, Any]) -> bool:
    return bool(report["state"] == "frozen")


def test_what_disturbs_either_node_takes_the_trial_back_on_all_ranks_and_tuning_goes_on(nodes: Nodes) -> None:
    """Micro-batches of 1 are slow wherever the tests run, so that there is always something to try."""
    nodes.start(
        "--tune", "exact", "--micro-batch", "1", "--width", "32", *ENDLESS,
        knobs=["micro_batch"], exploration_budget=0.5, windows=False, crew=False, warmup_steps=4, overhead_budget=1.0,
        false_accept_rate=1e-9,
    )  # fmt: skip
    nodes.wait_for(is_heard, "heard of its node")
    for _ in range(ENDED_BEFORE_MAX):
        nodes.wait_for(lambda report: report["state"] == "trial", "began a trial")
        nodes.planted[1].is_short = True
        held = nodes.wait_for(is_frozen, "was held for the other node")
        if held["changes"][-1]["outcome"] in (None, "abandoned"):
            break
        nodes.planted[1].is_short = False
        nodes.wait_for(lambda report: not is_frozen(report), "went on")
    assert held["detail"] == "rank 1: its node is short of memory"
    assert held["node"][-1] == "holds tuning: rank 1: its node is short of memory"
    nodes.wait_for(lambda report: report["knobs"] == held["began"], "took the trial back")
    for _ in range(LAPSES_MAX):
        states = nodes.states()
        trials = nodes.wait_for(is_frozen, "was still held")["trials"]
        time.sleep(6 * PERIOD_SECONDS)
        still = nodes.wait_for(lambda report: True, "answered")
        if set(nodes.states()[len(states) :]) <= {"frozen"}:
            break
    assert (still["state"], still["trials"], still["knobs"]) == ("frozen", trials, held["began"])
    assert [change["outcome"] for change in still["changes"]][-1] == "abandoned", "voided, not judged"

    nodes.planted[1].is_short = False
    nodes.wait_for(lambda report: report["trials"] > trials, "went on after it")

    nodes.planted[0].is_short = True
    held = nodes.wait_for(is_frozen, "was held for its own node")
    assert held["detail"].startswith("this node is short of memory: tasks waited for it ")

    nodes.daemons[0].close()
    until(lambda: not status(nodes).startswith("frozen"), "a daemon that is gone holds the job", WAIT_SECONDS, 0.1)
    check_logs(nodes)


def check_logs(nodes: Nodes) -> None:
    """Both ranks turned the same; nothing was decided in a hold, and no trial was kept by a verdict inside one."""
    logs = [nodes.records(rank) for rank in (0, 1)]
    switches = [[(r.epoch, r.knobs.values) for r in log if isinstance(r, KnobSwitch)] for log in logs]
    both = min(map(len, switches))
    assert both >= 2
    assert switches[0][:both] == switches[1][:both]
    state = "off"
    for record in logs[0]:
        if isinstance(record, TunerStatus):
            state = record.state
        elif isinstance(record, Decision):
            assert state != "frozen"
        elif isinstance(record, Verdict):
            assert state != "frozen" or record.outcome == "abandoned"


class FakeProc(threading.Thread):
    """A /proc in which some task waits for memory all the time."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        (root / "pressure").mkdir(parents=True)
        self._file, self._over = root / "pressure" / "memory", threading.Event()

    def run(self) -> None:
        while not self._over.wait(PERIOD_SECONDS / 10):
            beside = self._file.with_suffix(".new")
            beside.write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={time.monotonic_ns() // 1000}\n")
            beside.rename(self._file)

    def stop(self) -> None:
        self._over.set()
        self.join()


@pytest.mark.full
def test_a_daemon_that_is_stopped_and_says_nothing_more_is_not_believed_and_heard_again_later(nodes: Nodes) -> None:
    """A real daemon in a process of its own: its socket stays open, and only time tells that its word is old."""
    proc = FakeProc(nodes.folder / "proc")
    proc.start()
    path = nodes.folder / "2.sock"
    settings = {"PROC_ROOT": nodes.folder / "proc", "PERIOD_SECONDS": PERIOD_SECONDS, "PORT": 0, "SOCKET": path}
    environment = {f"PACECAR_DAEMON_{key}": str(value) for key, value in settings.items()}
    log = nodes.folder / "daemon.log"
    with log.open("w") as stream:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "pacecar", "daemon"], env=os.environ | environment, stderr=stream
        )

    def is_as_wanted(is_held: bool) -> bool:
        """Either rank may be the first to hear of their node; the hold then keeps its reason."""
        said = status(nodes)
        return said.startswith("frozen") == is_held and ("node is short of memory" in said) == is_held

    def until_it_is(is_held: bool, what: str) -> None:
        try:
            until(lambda: is_as_wanted(is_held), what, WAIT_SECONDS, 0.05)
        except AssertionError:
            ended = [rank.poll() for rank in nodes.ranks]
            pytest.fail(f"{what}: {status(nodes)!r}; ranks {ended}, daemon {daemon.poll()}: {log.read_text()[-2000:]}")

    try:
        until(path.exists, "the daemon does not listen", WAIT_SECONDS, 0.1)
        nodes.start(
            "--tune", "exact", "--micro-batch", "1", "--width", "32", *ENDLESS, "--pause", "0.005",
            sockets=[path, path],
            knobs=["micro_batch"], windows=False, crew=False, warmup_steps=4, overhead_budget=1.0,
        )  # fmt: skip
        until_it_is(True, "never held")
        daemon.send_signal(signal.SIGSTOP)
        until_it_is(False, "it does not go on without the daemon's word")
        daemon.send_signal(signal.SIGCONT)
        until_it_is(True, "never held again")
    finally:
        daemon.kill()
        daemon.wait()
        proc.stop()


def status(nodes: Nodes) -> str:
    """Return the last state that rank 0 put down, with its detail."""
    if not (nodes.folder / "run" / "rank0.jsonl").exists():
        return ""
    said = [record for record in nodes.records(0) if isinstance(record, TunerStatus)]
    return f"{said[-1].state}: {said[-1].detail}" if said else ""
