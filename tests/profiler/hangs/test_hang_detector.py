"""Real gloo jobs that stand still: who hangs says where, the others say that they wait, and a stopped one is missed."""

from __future__ import annotations

import os
import signal

import pytest

from pacecar.commands.top.daemon_poller import fetch
from pacecar.config import DaemonConfig
from pacecar.monitor.daemon import Daemon
from tests.kit.waiting import until
from tests.profiler.ranks.job_rank_monitor import SLOW_SECONDS
from tests.profiler.ranks.ranks import run_job

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

S = 1_000_000_000
AMPLE = 0.05
"""Of the budget: a hook that rests, as it must on a busy machine, does not know the phase."""


def test_a_rank_that_hangs_says_where_and_the_others_say_that_they_wait(tmp_path):
    acts = [{"rank": 1, "how": "hang", "from": 40, "until": 41}]
    heard = run_job(tmp_path, acts, world=2, steps=60, hang_seconds=1.0, overhead_budget=AMPLE)
    for rank, phase in ((0, "tail"), (1, "outside")):
        began, ended = (row for row in heard[rank] if row["type"] == "hang" and row["step"] == 40)
        assert (began["rank"], began["phase"], began["ended"]) == (rank, phase, False)
        assert S < began["silent_ns"] <= ended["silent_ns"]
        assert ended["ended"]
        assert ended["silent_ns"] > (SLOW_SECONDS["hang"] - 0.5) * S
        assert "job_rank_monitor.py" in began["stack"] or rank == 0
        assert "gloo:all_reduce" in began["last_collective"]
    counts = [next(row["collectives"] for row in rank if row["type"] == "hang") for rank in heard]
    assert counts[0] > counts[1], "the rank that waits has begun a collective that the other has not"


def test_of_a_stopped_rank_the_others_say_that_they_wait_and_the_daemon_who_says_nothing(tmp_path):
    """A stopped process has no thread that could speak: that it does not is what tells."""
    daemon = Daemon(DaemonConfig(port=0, socket=str(tmp_path / "s"), period_seconds=0.5), collectors=[])
    daemon.start()
    seen = []

    def job():
        jobs = fetch(f"http://127.0.0.1:{daemon.port}").jobs
        return jobs[0] if jobs else None

    def hangs():
        return {hang.rank: (hang.suspected, hang.silent) for hang in job().hangs}

    def stop_one():
        until(lambda: (one := job()) is not None and len(one.ranks) == 3 and min(r.step or 0 for r in one.ranks) > 30)
        pid = int((tmp_path / "job" / "pid1").read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: hangs() == {0: (True, False), 1: (False, True), 2: (True, False)}, "the hang is not told")
            seen.append(hangs())
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: not any(is_suspected for is_suspected, _ in hangs().values()))
        seen.append(hangs())

    try:
        heard = run_job(
            tmp_path / "job",
            world=3,
            hang_seconds=1.0,
            overhead_budget=AMPLE,
            socket=daemon.socket,
            meddle=stop_one,
        )
    finally:
        daemon.close()
    assert seen[1] == {}
    for rank in (0, 2):
        began, ended = [row for row in heard[rank] if row["type"] == "hang"][:2]
        assert (began["phase"], began["ended"], ended["ended"]) == ("tail", False, True)
        assert "gloo:all_reduce" in began["last_collective"]
        assert ended["silent_ns"] > began["silent_ns"] > S
    assert all(rank[-1]["closed"] and rank[-1]["off"] is None for rank in heard)
