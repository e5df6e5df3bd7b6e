"""Orders and memory in real jobs: two ranks, a real daemon, the real command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from pacecar.commands.main import cli
from pacecar.config import DaemonConfig
from pacecar.monitor.daemon import Daemon
from pacecar.records import Decision, JobHello, JobRecord, KnobSwitch, TunerOrder, TunerStatus, Verdict
from tests.kit.forking_python import forking_python
from tests.kit.waiting import until

JOB = Path(__file__).parent.parent / "jobs" / "small_ddp.py"
WAIT_SECONDS = 60.0
KEPT_SECONDS_MAX = 240.0

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def start_job(run_dir: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a job of two ranks whose hook keeps measuring steps this short, however busy the machine is."""
    options = {"overhead_budget": 0.5, **options}
    launch = (forking_python(), "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2")
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    settings = ("--run-dir", str(run_dir), "--options", json.dumps(options))
    return subprocess.Popen(
        [*launch, *meet, str(JOB), *arguments, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PACECAR_JOB": "steered"},
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors[-3000:]
    summary: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return summary


def records(folder: Path, rank: int) -> list[JobRecord]:
    decoder = msgspec.json.Decoder(JobRecord)
    path = folder / f"rank{rank}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last may be half written
    return [decoder.decode(line) for line in lines]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(DaemonConfig(port=0, socket=str(tmp_path / "d.sock"), period_seconds=0.2))
    daemon.start()
    yield daemon
    daemon.close()


class Command:
    """`pacecar tune` towards one daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, ["tune", *arguments, "steered", "--socket", str(self.path)])

    def report(self) -> dict[str, Any]:
        said = self("status", "--json")
        assert said.exit_code == 0, said.output
        report: dict[str, Any] = json.loads(said.stdout)
        return report

    def wait_for_knobs(self, job: subprocess.Popen[str]) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_SECONDS
        while job.poll() is None and time.monotonic() < deadline:
            said = self("status", "--json")
            if said.exit_code == 0 and json.loads(said.stdout)["domains"]:
                return self.report()
            time.sleep(0.1)
        pytest.fail("the job has no knobs")


def test_a_person_sets_freezes_resumes_and_rolls_back_and_all_ranks_follow(daemon: Daemon, tmp_path: Path) -> None:
    tune = Command(tmp_path / "d.sock")
    job = start_job(
        tmp_path / "run", "--tune", "exact", "--steps", "100", "--pause", "0.002", "--until", str(tmp_path / "end"),
        socket=str(tmp_path / "d.sock"), bucket_bytes_min=65536, knobs=["bucket_bytes"], warmup_steps=10_000,
    )  # fmt: skip
    try:
        begun = tune.wait_for_knobs(job)
        assert (begun["mode"], begun["knobs"]["bucket_bytes"]) == ("exact", 2**20)

        done = tune("set", "bucket_bytes", "256KiB")
        assert (done.exit_code, done.stdout) == (0, "done: bucket_bytes 0.25 MiB\n"), done.output
        after = tune.report()
        assert (after["knobs"]["bucket_bytes"], after["by_hand"]) == (256 * 1024, ["bucket_bytes"])

        refused = tune("set", "bucket_bytes", "3MiB")
        assert refused.exit_code == 1
        assert "bucket_bytes 3 MiB is not possible here; possible: 0.0625 MiB, 0.125 MiB, 0.25 MiB" in refused.output
        assert "compression is lossy, and this job is tuned in mode exact" in tune("set", "compression", "fp16").output
        assert "it wants a whole number" in tune("set", "micro_batch", "many").output

        assert tune("freeze").stdout.startswith("done: ")
        assert tune.report()["state"] == "frozen"
        assert tune("resume").exit_code == 0
        back = tune("rollback")
        assert back.stdout == "done: bucket_bytes 1 MiB\n", back.output
        text = tune("status").stdout
        assert max(map(len, text.splitlines())) <= 80, text
        assert "rolled back by hand" in text or "rollback by hand" in text, "done, or seen by the tuner a moment later"

        (rank0,) = [r for r in daemon._state.jobs()[0].ranks if r.hello.rank == 0]
        os.kill(rank0.hello.pid, signal.SIGSTOP)
        silent = tune("freeze", "--timeout-seconds", "1")
        os.kill(rank0.hello.pid, signal.SIGCONT)
        assert silent.exit_code == 1
        assert "check that the job is still training" in silent.output
        assert daemon._state.jobs()[0].order_tallies["rollback", "done"] == 1
        (tmp_path / "end").touch()
        finish(job)
    finally:
        (tmp_path / "end").touch()  # the launcher's ranks would train on without it
        with job:  # closes its pipes
            job.kill()
            if job.stderr is not None and not job.stderr.closed:
                sys.stderr.write(job.stderr.read())  # where the test failed
    check_log(tmp_path / "run")


def check_log(folder: Path) -> None:
    logs = [records(folder, rank) for rank in (0, 1)]
    switches = [[(r.step, r.knobs) for r in log if isinstance(r, KnobSwitch)] for log in logs]
    assert switches[0] == switches[1]
    assert [knobs.values["bucket_bytes"] for _, knobs in switches[0]] == [256 * 1024, 2**20]
    orders = [r for r in logs[0] if isinstance(r, TunerOrder)]
    assert [(o.action, o.outcome) for o in orders][:5] == [
        ("set", "done"), ("set", "refused"), ("set", "refused"), ("freeze", "done"), ("resume", "done"),
    ]  # fmt: skip
    assert {o.uid for o in orders} == {os.getuid()}
    assert orders[0].values == {"bucket_bytes": 256 * 1024}


def run_until_kept(folder: Path, options: dict[str, Any]) -> None:
    """Train until a worthwhile trial is kept."""
    end = folder.with_suffix(".end")
    # What many micro-batches cost is slept: two late steps on a busy machine would end the right trial as too slow.
    arguments = (
        "--tune", "exact", "--micro-batch", "1", "--piece-pause", "0.001", "--width", "32", "--steps", "10",
        "--until", str(end),
    )  # fmt: skip
    job = start_job(folder, *arguments, **options)

    def is_kept() -> bool:
        return job.poll() is not None or any(
            isinstance(record, Verdict) and record.outcome == "kept" and (record.measured_gain_ratio or 0) > 0.1
            for record in records(folder, 0)
        )

    try:
        until(is_kept, "no trial was kept", KEPT_SECONDS_MAX, 0.1)
        end.touch()
        finish(job)
    finally:
        end.touch()
        with job:
            job.kill()


@pytest.mark.full
def test_a_run_remembers_and_the_next_one_tries_that_first(tmp_path: Path) -> None:
    """Micro-batches of 1 are slow wherever the tests run; the second run begins with the better ones.

    On a busy machine late steps may end that trial, and a later one is kept.
    """
    knobs_file = tmp_path / "state" / "knobs.json"
    options = {
        "knobs_file": str(knobs_file), "remember": True, "knobs": ["micro_batch"], "exploration_budget": 0.5,
        "windows": False, "crew": False, "socket": str(tmp_path / "none"), "warmup_steps": 4, "false_accept_rate": 0.3,
        "overhead_budget": 1.0,  # all of these short steps are measured
    }  # fmt: skip
    run_until_kept(tmp_path / "first", options)
    said = CliRunner().invoke(cli, ["knobs", "list", "--json", "--file", str(knobs_file)])
    (entry,) = json.loads(said.stdout)
    assert entry["knobs"]["micro_batch"] > 1
    assert entry["gain_ratio"] > 0.1
    assert entry["fingerprint"]["began"] == {"micro_batch": 1}
    run_until_kept(tmp_path / "second", options)
    log = records(tmp_path / "second", 0)
    decision = next(r for r in log if isinstance(r, Decision))
    assert decision.to_value == entry["knobs"]["micro_batch"]
    assert decision.expected_gain_ratio == entry["gain_ratio"]
    assert "it saved" in decision.reason
    assert any(isinstance(r, TunerStatus) and "before trying what is remembered" in r.detail for r in log)
    assert isinstance(log[0], JobHello)
