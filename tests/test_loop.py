"""The whole loop on real processes: a daemon, a two-rank DDP job, and what happens when one of them is shot."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.tools import find_tool

JOB = Path(__file__).parent / "jobs" / "small_ddp.py"
WAIT_SECONDS = 60.0

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_daemon(socket_path: Path, port: int) -> subprocess.Popen[bytes]:
    daemon = subprocess.Popen(
        [sys.executable, "-m", "pacecar", "daemon", "--socket", str(socket_path), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: scrape(port) is not None, "the daemon answers")
    return daemon


def start_job(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(JOB), *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PACECAR_JOB": "loop"},
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str]) -> dict[str, list[float]]:
    output, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors[-3000:]
    return json.loads(output.strip().splitlines()[-1])


def served_text(port: int) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def scrape(port: int) -> dict[str, dict[str, float]] | None:
    """Return metric -> rank -> value of the job's series; None when nobody answers."""
    text = served_text(port)
    if text is None:
        return None
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for series in family.samples:
            if series.labels.get("training_job") == "loop":
                found.setdefault(series.name, {})[series.labels.get("rank", "")] = series.value
    return found


def steps_seen(port: int) -> dict[str, float]:
    return (scrape(port) or {}).get("pacecar_job_steps_total", {})


def wait_for(claim: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not claim():
        assert time.monotonic() < deadline, f"waited {WAIT_SECONDS:g} s until {what}"
        time.sleep(0.1)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen]]:
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def test_a_killed_daemon_changes_nothing_for_the_job_and_a_new_one_gets_records_again(
    tmp_path: Path, processes: list[subprocess.Popen]
) -> None:
    path, port = tmp_path / "p.sock", free_port()
    daemon = start_daemon(path, port)
    processes.append(daemon)
    job = start_job("--steps", "400", "--pause", "0.03", "--options", json.dumps({"socket": str(path)}))
    processes.append(job)
    wait_for(lambda: len(steps_seen(port)) == 2 and min(steps_seen(port).values()) > 20, "both ranks report")

    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    killed_at = time.monotonic()
    time.sleep(2.0)
    assert job.poll() is None
    daemon = start_daemon(path, port)
    processes.append(daemon)
    away_seconds = time.monotonic() - killed_at
    wait_for(lambda: len(steps_seen(port)) == 2, "both ranks report to the new daemon")
    first = steps_seen(port)
    wait_for(lambda: all(steps_seen(port).get(rank, 0) > first[rank] + 10 for rank in first), "and go on reporting")
    now = scrape(port)
    assert now is not None
    # Totals travel in every record, so nothing that happened while no daemon ran is missing from the counters.
    missed = away_seconds / 0.2
    assert all(steps > 20 + missed for steps in now["pacecar_job_steps_total"].values())

    paces = sorted(finish(job)["step_seconds"])
    assert paces[-1] < away_seconds, "a send that waits for the daemon would show as one step as long as its absence"
    assert len(paces) == 399


def test_losses_under_a_daemon_with_hook_and_windows_equal_those_without_pacecar_to_the_bit(
    tmp_path: Path, processes: list[subprocess.Popen]
) -> None:
    path, port = tmp_path / "p.sock", free_port()
    processes.append(start_daemon(path, port))
    options = {"socket": str(path), "window_interval_steps": 10, "overhead_budget": 1.0}
    hooked = start_job("--steps", "80", "--options", json.dumps(options))
    plain = start_job("--steps", "80", "--no-pacecar")
    processes += [hooked, plain]
    wait_for(lambda: steps_seen(port), "a rank reports")
    bare, with_hook = finish(plain), finish(hooked)
    assert with_hook["losses"] == bare["losses"]
    assert with_hook["parameters"] == bare["parameters"]


def test_a_tuned_job_turns_its_knobs_on_both_ranks_at_the_same_steps_and_shows_it_on_the_endpoint(
    tmp_path: Path, processes: list[subprocess.Popen]
) -> None:
    path, port = tmp_path / "p.sock", free_port()
    processes.append(start_daemon(path, port))
    # A slow machine measures every second of these short steps otherwise.
    options = {"socket": str(path), "exploration_budget": 1.0, "warmup_steps": 5, "overhead_budget": 0.2}
    tuned = start_job(
        *("--steps", "600", "--width", "256", "--tune", "exact", "--micro-batch", "1"),
        *("--run-dir", str(tmp_path / "run"), "--options", json.dumps(options)),
    )
    processes.append(tuned)
    finish(tuned)
    switches = []
    for rank in range(2):
        lines = (tmp_path / "run" / f"rank{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        switches.append(
            [(r["decision"], r["epoch"], r["step"], r["knobs"]["values"]) for r in records if r["type"] == "switch"]
        )
    assert switches[0] == switches[1]
    assert len(switches[0]) >= 2, "micro-batches of one sample leave something to win, so there are trials"
    served = scrape(port)
    assert served is not None
    assert served["pacecar_knob_epoch"] == {rank: float(len(switches[0])) for rank in ("0", "1")}
    assert sum(served["pacecar_tuner_decisions_total"].values()) >= 1
    assert set(served["pacecar_job_ledger_seconds_total"]) == {"0", "1"}
    assert set(served["pacecar_knob_switches_total"]) == {"0", "1"}
    promtool = find_tool("promtool")
    text = served_text(port) or ""
    assert "pacecar_host_cpu_seconds_total" in text
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_trace_on_demand_holds_the_same_steps_of_both_ranks_and_the_losses_stay_the_same_to_the_bit(
    tmp_path: Path, processes: list[subprocess.Popen]
) -> None:
    path, port = tmp_path / "p.sock", free_port()
    processes.append(start_daemon(path, port))
    job = start_job("--steps", "150", "--pause", "0.03", "--options", json.dumps({"socket": str(path)}))
    plain = start_job("--steps", "150", "--no-pacecar")
    processes += [job, plain]
    wait_for(lambda: len(steps_seen(port)) == 2 and min(steps_seen(port).values()) > 5, "both ranks report")
    asked = subprocess.run(
        [
            *(sys.executable, "-m", "pacecar", "trace", "loop", "--socket", str(path), "--steps", "4"),
            *("--directory", str(tmp_path / "traces"), "--no-analysis"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.returncode == 0, asked.stderr
    files = [Path(line) for line in asked.stdout.splitlines()]
    marks = []
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        marks.append([event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")])
    assert len(marks) == 2
    assert marks[0] == marks[1]
    assert len(marks[0]) == 4
    assert finish(job)["losses"] == finish(plain)["losses"]
