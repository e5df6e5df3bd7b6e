"""Real gloo jobs of four ranks: windows never all at once, traces that were asked for all at once."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.ranks import finish, start_ranks
from tests.kit.waiting import until

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB = Path(__file__).parents[1] / "jobs" / "small_ddp.py"
WORLD = 4


@contextmanager
def job(folder, *, pause, options, sock, name):
    """Run a job beside what is done here, and let it end then."""
    enough = folder / "enough"
    folder.mkdir(exist_ok=True)
    program = [
        JOB, "--steps", "20", "--until", enough, "--pause", str(pause), "--width", "64", "--run-dir", folder,
        "--options", json.dumps(options),
    ]  # fmt: skip
    ranks = start_ranks(program, WORLD, environ={"PACECAR_HOOK_SOCKET": str(sock), "PACECAR_JOB": name})
    try:
        yield
    finally:
        enough.touch()
        ended = finish(ranks)
    assert [rank.code for rank in ended] == [0] * WORLD, "\n".join(rank.err[-3000:] for rank in ended)


def records(folder, rank):
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


def has_each(folder, text, count):
    """Return whether each rank's log has `text` so often."""
    logs = [folder / f"rank{rank}.jsonl" for rank in range(WORLD)]
    return all(log.exists() and log.read_text().count(text) >= count for log in logs)


def test_no_step_is_profiled_by_two_ranks_whatever_the_budget_puts_off(tmp_path):
    options = {"window_interval_steps": 4, "overhead_budget": 0.2, "windows": True}
    with job(tmp_path, pause=0.0, options=options, sock=tmp_path / "none", name="turns"):
        until(lambda: has_each(tmp_path, '"source":"exact"', 5), "many windows on every rank", 120)
    by_step = collections.Counter()
    taken = []
    for rank in range(WORLD):
        exact = [r["step"] for r in records(tmp_path, rank) if r["type"] == "step" and r["source"] == "exact"]
        by_step.update(exact)
        taken.append(exact)
    assert min(map(len, taken)) >= 5
    assert by_step.most_common(1)[0][1] == 1
    for one, other in itertools.combinations(taken, 2):
        assert min(abs(a - b) for a in one for b in other) >= 2, "nor while another rank pays for reading one"


@pytest.fixture
def daemon(tmp_path):
    path = tmp_path / "s.sock"
    process = subprocess.Popen(
        [sys.executable, "-m", "pacecar", "daemon", "--socket", str(path), "--port", "0", "--disable", "gpu"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(path.exists, "the daemon does not listen")
    yield path, process
    if process.poll() is None:
        process.terminate()
    process.wait(timeout=20)


def asked(sock, *arguments, seconds=90):
    command = [sys.executable, "-m", "pacecar", "trace", "four", "--socket", str(sock), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


def steps_in(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}


@pytest.mark.full
def test_a_trace_that_is_asked_for_holds_the_same_steps_of_all_ranks_with_windows_on(tmp_path, daemon):
    sock, process = daemon
    run = tmp_path / "run"
    options = {"window_interval_steps": 8, "overhead_budget": 0.5}
    with job(run, pause=0.02, options=options, sock=sock, name="four"):
        until(lambda: has_each(run, '"type":"step"', 20), "the job does not train")
        done = asked(sock, "--steps", "4")
        assert done.returncode == 0, done.stderr
        assert "late" not in done.stderr.partition("tracing steps")[0]
        assert "4 traces, 4 of 4 ranks" in done.stdout
        assert "What if" in done.stdout
        files = sorted(run.glob("trace-four-step*-rank*.json.gz"))
        assert len(files) == WORLD
        (steps,) = {frozenset(steps_in(file)) for file in files}
        assert len(steps) == 4
        analysis = subprocess.run(
            [sys.executable, "-m", "pacecar", "analyze", "--json", *map(str, files)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        document = json.loads(analysis.stdout)
        assert len(document["job"]["ranks"]) == WORLD
        assert all(collective["wait_ns"] is not None for collective in document["job"]["collectives"])
        second = asked(sock, "--steps", "2", "--at-step", "1")
        assert second.returncode == 1
        assert "step 1 is too near" in second.stderr

        # The daemon dies while ranks trace: each is answered for, and their traces come all the same.
        command = [sys.executable, "-m", "pacecar", "trace", "four", "--socket", str(sock), "--steps", "30"]
        asking = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        heard = []
        for line in asking.stderr:
            heard.append(line)
            if "tracing steps" in line:
                process.kill()
                break
        rest = asking.communicate(timeout=60)[1]
        assert asking.returncode == 1
        assert rest.count("the daemon hung up") >= 1, "".join(heard) + rest
        until(lambda: len(list(run.glob("trace-four-step*-rank*.json.gz"))) == 2 * WORLD, "a trace is missing")
    assert len(list(run.glob("trace-four-step*-rank*.json.gz"))) == 2 * WORLD
    assert list(run.glob("*.partial*")) == []
