"""A job of which no rank says anything: what the kernel says of its processes is enough for who is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from pacecar.kernel_files.reader import KernelFiles
from pacecar.monitor.jobs.silent_jobs import LOOK_SECONDS, PAUSE_SECONDS, SILENT_SECONDS, SilentJobs
from pacecar.monitor.jobs.state import DaemonState
from pacecar.records import HangSuspicion
from pacecar.records.hangs import HangKind
from pacecar.records.job_identity import JobKey
from tests.kit.fake_clock import FakeClock
from tests.kit.waiting import until

S = 1_000_000_000


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def processes():
    made = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield made
    for one in made:
        one.kill()
        one.wait()


class Node:
    """The daemon's state, two ranks on this host that have ended a step, and what is reported of their job."""

    def __init__(self, clock, processes, make_hello, make_step):
        self.clock = clock
        self.state = DaemonState(clock, jobs_max=4, ranks_max=8, job_forget_seconds=3600)
        self.hellos = [
            make_hello(rank=rank, world_size=2, pid=process.pid, host="a") for rank, process in enumerate(processes)
        ]
        self.pids = {rank: process.pid for rank, process in enumerate(processes)}
        self.key = JobKey.of(self.hellos[0])
        self.reported = []
        self.make_step = make_step
        for hello in self.hellos:
            self.state.record(hello, hello=hello, uid=1, owner=hello.rank)
            self.step(hello)
        self.jobs = SilentJobs(KernelFiles(), clock, self.members, self.report)

    def members(self):
        return [(self.pids[hello.rank], hello) for hello in self.hellos if hello.rank in self.pids]

    def report(self, job, verdict):
        self.reported.append(verdict)
        self.state.add_verdict(job.key, verdict)

    def step(self, hello):
        record = self.make_step(job=hello.job, rank=hello.rank, wall_ns=S // 10)
        self.state.record(record, hello=hello, uid=1, owner=hello.rank)

    def pass_time(self, seconds):
        """Tick once a second."""
        for _ in range(round(seconds)):
            self.clock.advance(S)
            self.jobs.tick(self.state.silent_jobs())

    @property
    def shown(self):
        (job,) = self.state.jobs()
        return job.health.verdict


@pytest.fixture
def node(clock, processes, make_hello, make_step):
    return Node(clock, processes, make_hello, make_step)


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: f"{process.pid} (sleep) T" in Path(f"/proc/{process.pid}/stat").read_text())


def test_the_rank_that_is_stopped_is_named_within_fifteen_seconds(node, processes):
    stop(processes[1])
    node.pass_time(SILENT_SECONDS + LOOK_SECONDS + 1)
    (verdict,) = node.reported
    assert (verdict.kind, verdict.culprits, verdict.rank) == (HangKind.STOPPED, (1,), None)
    assert f"rank 1 does not run: process {processes[1].pid} is stopped by a signal" in verdict.summary
    assert any(one.startswith("rank 0: asleep") for one in verdict.evidence)
    assert node.shown == verdict
    node.pass_time(20)
    assert len(node.reported) == 1, "it is said once"
    node.step(node.hellos[0])
    node.pass_time(1)
    assert node.reported[1].ended
    assert node.shown is None


def test_a_job_that_is_merely_long_in_a_step_is_not_accused(node):
    node.pass_time(200)
    assert node.reported == []


def test_nothing_is_said_while_a_rank_speaks_or_has_said_it_all(node, processes):
    stop(processes[1])
    for _ in range(30):
        node.pass_time(1)
        node.step(node.hellos[0])
    assert node.reported == []


def test_all_ranks_stopped_are_paused_until_that_lasts_long(node, processes):
    for one in processes:
        stop(one)
    node.pass_time(PAUSE_SECONDS - 2)
    assert node.reported == []
    node.pass_time(2 + LOOK_SECONDS)
    assert [verdict.culprits for verdict in node.reported] == [(0, 1)]


def test_a_rank_that_left_without_a_goodbye_is_gone(node):
    node.state.leave(node.hellos[1], 1)
    del node.pids[1]
    node.pass_time(SILENT_SECONDS + LOOK_SECONDS + 1)
    (verdict,) = node.reported
    assert (verdict.kind, verdict.culprits) == (HangKind.GONE, (1,))


def test_a_process_that_cannot_be_seen_is_not_accused(node, processes):
    stop(processes[1])
    node.pids.clear()
    node.pass_time(60)
    assert node.reported == []


def test_a_suspicion_of_a_rank_does_not_stop_the_daemon_from_looking(node, processes):
    """The rank may be stopped before it has judged."""
    stop(processes[1])
    suspicion = HangSuspicion(
        job=node.hellos[0].job, rank=0, step=7, phase="tail", wall_ns=0, silent_ns=1, last_collective=None,
        collectives=None, stack=None, ended=False,
    )  # fmt: skip
    node.state.record(suspicion, hello=node.hellos[0], uid=1, owner=0)
    node.pass_time(SILENT_SECONDS + LOOK_SECONDS + 1)
    assert [verdict.culprits for verdict in node.reported] == [(1,)]
