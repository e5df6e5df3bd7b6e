"""The whole loop on real processes: a daemon, a two-rank DDP job, and what happens when one of them is killed."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit import waiting
from tests.kit.forking_python import forking_python
from tests.kit.net import free_port, scrape

until = partial(waiting.until, seconds=120.0, look_seconds=0.1)  # a page is read and parsed at each look

JOB = Path(__file__).parent.parent / "jobs" / "small_ddp.py"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def start_daemon(socket_path: Path, port: int) -> subprocess.Popen[bytes]:
    daemon = subprocess.Popen(
        [sys.executable, "-m", "pacecar", "daemon", "--socket", str(socket_path), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: served_text(port) is not None, "the daemon does not answer")
    return daemon


def start_job(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(forking_python(), "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"),
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
        return scrape(port)
    except OSError:
        return None


def series_of(port: int) -> dict[str, dict[str, float]]:
    """Return metric -> rank -> value of the job's series; empty if the endpoint does not answer."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(served_text(port) or ""):
        for series in family.samples:
            if series.labels.get("training_job") == "loop":
                found.setdefault(series.name, {})[series.labels.get("rank", "")] = series.value
    return found


def step_marks(trace: Path) -> list[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")]


def steps_seen(port: int) -> dict[str, float]:
    return series_of(port).get("pacecar_job_steps_total", {})


def seen_of_both(port: int) -> float:
    """Return how many steps the daemon has seen of both ranks."""
    seen = steps_seen(port)
    return min(seen.values()) if len(seen) == 2 else 0


def records_of(folder: Path, rank: int, kind: str) -> list[dict]:
    """Return a rank's records of one type; the last line may be half written."""
    path = folder / f"rank{rank}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for record in map(json.loads, lines) if record["type"] == kind]


def last_step(folder: Path, rank: int) -> int:
    """Return the number of the last step that a rank wrote a record of."""
    return max((record["step"] for record in records_of(folder, rank, "step")), default=-1)


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
    path, port, run, end = tmp_path / "p.sock", free_port(), tmp_path / "run", tmp_path / "end"
    daemon = start_daemon(path, port)
    processes.append(daemon)
    job = start_job(
        *("--steps", "20", "--pause", "0.005", "--until", str(end)),
        *("--run-dir", str(run), "--options", json.dumps({"socket": str(path)})),
    )
    processes.append(job)
    until(lambda: seen_of_both(port) > 20, "not both ranks report")

    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    killed_at = time.monotonic()
    trained = last_step(run, 1)
    until(lambda: last_step(run, 1) > trained + 100, "without a daemon the job does not go on")
    time.sleep(1.0)  # longer than any step
    assert job.poll() is None
    port = free_port()
    daemon = start_daemon(path, port)
    processes.append(daemon)
    away_seconds = time.monotonic() - killed_at
    until(lambda: seen_of_both(port), "not both ranks report to the new daemon")
    first = seen_of_both(port)
    assert first > trained + 100, "totals hold the steps of its absence"
    until(lambda: seen_of_both(port) > first + 10, "they do not go on reporting")
    end.touch()
    done = finish(job)
    # Totals travel in every record, so nothing that happened while no daemon ran is missing from the counters.  Not
    # every step has a record; those after the last one are in the Goodbye.
    trained = len(done["losses"])
    assert first + 10 < min(last_step(run, rank) for rank in range(2)) < trained
    totals = {str(rank): float(trained) for rank in range(2)}
    until(lambda: steps_seen(port) == totals, "the counters are not what the job trained")
    assert max(done["step_seconds"]) < away_seconds, "a send that waits for the daemon would be a step of its absence"


def test_a_tuned_job_turns_its_knobs_on_both_ranks_at_the_same_steps_and_shows_it_on_the_endpoint(
    tmp_path: Path, processes: list[subprocess.Popen]
) -> None:
    path, port = tmp_path / "p.sock", free_port()
    processes.append(start_daemon(path, port))
    run, end = tmp_path / "run", tmp_path / "end"
    options = {"socket": str(path), "exploration_budget": 1.0, "warmup_steps": 5, "overhead_budget": 1.0}
    tuned = start_job(
        *("--steps", "20", "--until", str(end), "--width", "64", "--tune", "exact", "--micro-batch", "1"),
        *("--run-dir", str(run), "--options", json.dumps(options)),
    )
    processes.append(tuned)
    # Micro-batches of one sample leave something to win, so there are trials.
    until(lambda: len(records_of(run, 1, "switch")) >= 2 or tuned.poll() is not None, "no trial began and ended")
    end.touch()
    finish(tuned)
    switches = [
        [(r["decision"], r["epoch"], r["step"], r["knobs"]["values"]) for r in records_of(run, rank, "switch")]
        for rank in range(2)
    ]
    assert switches[0] == switches[1]
    assert len(switches[0]) >= 2
    served = series_of(port)
    assert served["pacecar_knob_epoch"] == {rank: float(len(switches[0])) for rank in ("0", "1")}
    assert sum(served["pacecar_tuner_decisions_total"].values()) >= 1
    assert set(served["pacecar_job_ledger_seconds_total"]) == {"0", "1"}
    assert set(served["pacecar_knob_switches_total"]) == {"0", "1"}


def test_a_trace_on_demand_holds_the_same_steps_of_both_ranks_and_the_losses_stay_the_same_to_the_bit(
    tmp_path: Path, processes: list[subprocess.Popen]
) -> None:
    path, port = tmp_path / "p.sock", free_port()
    processes.append(start_daemon(path, port))
    end = tmp_path / "end"
    options = json.dumps({"socket": str(path)})
    job = start_job("--steps", "20", "--pause", "0.01", "--until", str(end), "--options", options)
    processes.append(job)
    until(lambda: seen_of_both(port) > 5, "not both ranks report")
    for attempt in range(3):  # on a busy machine the order may reach a rank late; it says so, and ends with the others
        asked = subprocess.run(
            [
                *(sys.executable, "-m", "pacecar", "trace", "loop", "--socket", str(path), "--steps", "4"),
                *("--directory", str(tmp_path / f"traces{attempt}"), "--no-analysis"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.returncode == 0, asked.stderr
        marks = [step_marks(Path(line)) for line in asked.stdout.splitlines()]
        assert len(marks) == 2
        assert marks[0][-1] == marks[1][-1]
        if "the order came late" not in asked.stderr:
            break
    end.touch()
    traced = finish(job)
    assert marks[0] == marks[1], asked.stderr
    assert len(marks[0]) == 4
    passes = len(traced["losses"]) // 20
    plain = start_job("--steps", "20", "--passes", str(passes), "--no-pacecar")
    processes.append(plain)
    bare = finish(plain)
    assert (bare["losses"], bare["parameters"]) == (traced["losses"], traced["parameters"])
