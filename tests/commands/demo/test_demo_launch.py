"""The demo as a user runs it: real daemon, real torchrun, real signals; and nothing is left behind, however it ends.

A run takes a dozen seconds of a core before its first step, so one run, `finished`, is asked by all tests that need
one, and only an ending that needs a process of its own starts another.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pacecar.commands.demo.byte_gpt import GPT, GPTConfig
from pacecar.commands.demo.processes import STOP_FILE, Children, DemoOptions, LaunchError, free_port, survivors
from pacecar.commands.demo.progress import PLAIN_CELLS_MAX
from pacecar.commands.demo.run_demo import REFRESH_SECONDS
from pacecar.commands.demo.train import STOP_CHECK_STEPS, batch_loss
from pacecar.commands.report.output.tables import headline
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.monitor.ingest.unix_socket import NAME_BYTES_MAX
from tests.commands.report.runs import report_of
from tests.kit.forking_python import forking_python
from tests.kit.tools import find_tool

pytestmark = [pytest.mark.distributed]

SMALL = ("--batch", "4", "--micro-batch", "1", "--world-size", "2")
WAIT_SECONDS = 180.0
"""Bounds a test that would hang; nothing is judged by it."""

ENOUGH_STEPS = 600
"""A tuner that has not decided to try anything by then will not."""


def start_demo(run_dir: Path, *arguments: str, python: str | None = None, **environ: str) -> subprocess.Popen[str]:
    """Start a demo; its processes are forks of one that has torch, unless `python` says otherwise."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}
    return subprocess.Popen(
        [python or forking_python(), "-m", "pacecar", "demo", "--run-dir", str(run_dir), "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**base, **environ},
        start_new_session=True,
    )


def wait_for(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not claim():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def the_run(run_dir: Path) -> Path:
    (folder,) = [path for path in run_dir.iterdir() if not path.is_symlink()]
    return folder


def records(run_dir: Path, rank: int, kind: str) -> int:
    return sum(
        path.read_bytes().count(b'{"type":"%b"' % kind.encode()) for path in run_dir.glob(f"2*/rank{rank}.jsonl")
    )


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with tuning on that is told to end, as the demo does when its tuner rests, once a knob was turned."""
    run_dir = tmp_path_factory.mktemp("finished")
    # 36 steps tell the noise before anything is tried, and on a slow machine too all steps are measured.
    short = {"PACECAR_TUNE_WARMUP_STEPS": "4", "PACECAR_HOOK_OVERHEAD_BUDGET": "0.2"}
    demo = start_demo(run_dir, "--steps", "100000", *SMALL, python=sys.executable, **short)
    try:
        wait_for(lambda: records(run_dir, 0, "switch") >= 2 or records(run_dir, 0, "step") >= ENOUGH_STEPS)
        (the_run(run_dir) / STOP_FILE).touch()
        output, _ = demo.communicate(timeout=WAIT_SECONDS)
    finally:
        demo.kill()
    assert demo.returncode == 0, output
    return the_run(run_dir), output


def report_json(folder: Path) -> dict[str, Any]:
    """The document that the demo leaves."""
    document: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return document


@pytest.mark.slow
def test_a_run_ends_with_its_report(finished: tuple[Path, str]) -> None:
    folder, output = finished
    assert os.readlink(folder.parent / "latest") == folder.name
    document = report_json(folder)
    assert document["demo"]["status"] == "finished"
    assert document["demo"]["duration_seconds"] > document["duration_ns"] / 1e9
    assert document["world_size"] == 2
    assert 0.0 < document["overhead"]["ratio"] < 1.0
    assert {rank["steps"] for rank in document["ranks"]} == {document["steps"]}
    assert "Pace and its stability" in output
    assert str(folder / "report.json") in output
    assert survivors(folder.name) == []
    assert not (folder / "daemon.sock").exists()


@pytest.mark.slow
def test_the_demos_figures_and_the_reports_are_the_same_figures(finished: tuple[Path, str]) -> None:
    folder, output = finished
    command = [sys.executable, "-m", "pacecar", "report", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    document = report_json(folder)
    assert document.pop("demo").keys() == {"status", "duration_seconds", "within_budget_after_seconds"}
    assert document == json.loads(done.stdout)
    report = report_of(folder)
    assert " ".join(headline(report).split()) in " ".join(output.split())


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_ends_on_all_ranks_where_they_agreed_to(finished: tuple[Path, str]) -> None:
    steps = report_json(finished[0])["steps"]
    assert steps % STOP_CHECK_STEPS == 0
    assert (finished[0] / "job.log").read_text().count(f"step {steps:5d}  validation") == 1


@pytest.mark.slow
def test_the_model_learns(finished: tuple[Path, str]) -> None:
    found = report_json(finished[0])["losses"]
    assert found["last"] < found["first"]
    assert found["validation_last"] < found["validation_first"]


@pytest.mark.slow
def test_the_overhead_stands_beside_its_budget(finished: tuple[Path, str]) -> None:
    folder, output = finished
    overhead = report_json(folder)["overhead"]
    assert overhead["budget_ratio"] == 0.2
    assert re.search(rf"{overhead['ratio'] * 100:.2f} % of wall time, (within|over) the 20.00 %", output)
    counted = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]
    steps = [record for record in counted if record["type"] == "step"]
    costs = [record["total_overhead_ns"] for record in steps]
    assert costs == sorted(costs), "a counter"
    assert sum(record["overhead_ns"] for record in steps) <= costs[-1]


@pytest.mark.slow
def test_a_log_gets_calm_lines_and_the_trials(finished: tuple[Path, str]) -> None:
    progress = finished[1].partition("Pace and its stability")[0].splitlines()
    lines = [line for line in progress if line[:1].isdigit()]
    assert lines
    assert all(len(line) <= PLAIN_CELLS_MAX for line in lines)
    if report_json(finished[0])["changes"]:
        assert any("trial: micro_batch 1 -> " in line for line in lines)


@pytest.mark.slow
def test_a_report_of_the_latest_run_has_what_the_daemon_saw(finished: tuple[Path, str]) -> None:
    folder, output = finished
    assert f"pacecar report {folder}" in output
    assert len(list(folder.glob("recordings/*.recording"))) == 1
    command = [sys.executable, "-m", "pacecar", "report", str(folder.parent / "latest")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{folder}/report.html\n")
    page = (folder / "report.html").read_text()
    for row in ("host CPU", "host memory in use", "network, sent", "device computes"):
        assert row in page


@pytest.mark.slow
def test_every_switch_was_made_at_the_same_step_on_both_ranks(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    assert report_json(folder)["changes"], f"{ENOUGH_STEPS} steps are enough to begin a trial"
    switches = []
    for rank in range(2):
        told = [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        switches.append([(one["decision"], one["epoch"], one["step"]) for one in told if one["type"] == "switch"])
    assert switches[0] == switches[1]


@pytest.mark.slow
def test_the_last_metrics_are_kept_and_promtool_has_no_complaint(finished: tuple[Path, str]) -> None:
    text = (finished[0] / "metrics.txt").read_text()
    for part in (
        'rank="1",training_job="',
        "pacecar_job_steps_total{",
        "pacecar_job_ledger_seconds_total",
        "pacecar_host_",
    ):
        assert part in text
    promtool = find_tool("promtool")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_larger_micro_batch_learns_the_same_but_for_rounding() -> None:
    """The demo's own model and loss: what turning its knob does to training, without the run around it."""
    torch.set_num_threads(1)
    found = []
    for micro_batch in (1, 8):
        torch.manual_seed(1)
        model = GPT(GPTConfig())
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        text = torch.randint(0, 256, (8, GPTConfig().context + 1), generator=torch.Generator().manual_seed(2))
        batcher = MicroBatcher(None, micro_batch)
        for _ in range(4):
            loss = torch.zeros(())
            for part in batcher.split(text):
                micro_loss = batch_loss(model, part)
                batcher.backward(micro_loss)
                loss += micro_loss.detach() * (len(part) / len(text))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] < 5.5, "and it learns"


@pytest.mark.slow
@pytest.mark.full
def test_tuning_does_not_change_what_is_learnt(finished: tuple[Path, str], tmp_path: Path) -> None:
    """Exact knobs change the order of summation only: the same losses but for rounding."""
    steps = report_json(finished[0])["steps"]
    demo = start_demo(tmp_path, "--steps", str(steps), "--tune", "off", *SMALL)
    output, _ = demo.communicate(timeout=WAIT_SECONDS)
    assert demo.returncode == 0, output
    tuned, plain = losses(finished[0]), losses(the_run(tmp_path))
    assert tuned.keys() == plain.keys()
    for step, loss in plain.items():
        assert tuned[step] == pytest.approx(loss, rel=1e-3), step
    assert report_json(the_run(tmp_path))["changes"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)]
)
def test_a_run_without_its_daemon_goes_on_and_an_interrupted_one_leaves_a_report_and_no_process(
    tmp_path: Path, number: int, code: int
) -> None:
    demo = start_demo(tmp_path, "--steps", "100000", *SMALL)
    try:
        wait_for(lambda: records(tmp_path, 1, "step") > 0)
        folder = the_run(tmp_path)
        assert len(survivors(folder.name)) >= 4, "daemon, torchrun and two workers"
        (daemon,) = [process for process in survivors(folder.name) if "daemon" in process.cmdline()]
        daemon.kill()
        seen = records(tmp_path, 1, "step")
        wait_for(lambda: records(tmp_path, 1, "step") > seen + 1)
        time.sleep(2 * REFRESH_SECONDS)  # the display looks at the daemon as often
        demo.send_signal(number)
        demo.send_signal(number)  # an impatient user
        output, _ = demo.communicate(timeout=WAIT_SECONDS)
    finally:
        demo.kill()
    assert demo.returncode == code, output
    assert "the daemon ended with exit code -9" in output
    assert "Traceback" not in output
    assert survivors(folder.name) == []
    document = report_json(folder)
    assert (document["demo"]["status"], document["steps"] > 0) == ("interrupted", True)


@pytest.mark.slow
def test_a_killed_launcher_takes_its_processes_with_it(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--steps", "100000", *SMALL)
    try:
        wait_for(lambda: any(tmp_path.iterdir()))
        job = the_run(tmp_path).name
        # Daemon, torchrun and two workers, which train: torchrun may leave behind what it is just starting.
        wait_for(lambda: len(survivors(job)) >= 4 and all(records(tmp_path, rank, "hello") for rank in range(2)))
        demo.kill()
        demo.communicate()
        wait_for(lambda: survivors(job) == [])
    finally:
        demo.kill()
        for process in survivors(the_run(tmp_path).name):
            process.kill()


@pytest.mark.slow
def test_failing_job_is_shown(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n    print('planted failure', flush=True)\n    os.abort()\n"
    )
    demo = start_demo(tmp_path / "runs", "--steps", "10", *SMALL, PYTHONPATH=str(site))
    output, _ = demo.communicate(timeout=WAIT_SECONDS)
    assert demo.returncode == 1
    assert "the job ended with exit code" in output
    assert "planted failure" in output
    assert "Fatal Python error: Aborted" in output
    assert output.rstrip().endswith("rank 1 failed first: it was ended by SIGABRT")
    folder = the_run(tmp_path / "runs")
    assert "no step was completed; the logs are in" in output
    assert "failed after" in output
    assert survivors(folder.name) == []


def test_a_taken_port_gives_another_and_a_free_one_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = free_port(port)
        assert other not in (port, 0)
    assert free_port(port) == port


def test_a_daemon_that_cannot_start_is_named_with_its_log(tmp_path: Path) -> None:
    options = DemoOptions(port=0)
    environ = {**os.environ, "PACECAR_DAEMON_PROT": "1"}
    with Children(tmp_path, options, environ=environ) as children, pytest.raises(LaunchError, match="no key 'prot'"):
        children.start_daemon()
    assert survivors(tmp_path.name) == []


def test_a_long_folder_gets_its_socket_elsewhere_and_it_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with Children(folder, DemoOptions(port=0)) as children:
        children.start_daemon()
        (daemon,) = survivors(folder.name)
        socket_path = Path(daemon.cmdline()[-1])
        assert len(str(socket_path)) <= 107
        assert socket_path.is_socket()
    assert not socket_path.parent.exists()
    assert not psutil.pid_exists(daemon.pid)


@pytest.mark.parametrize("length", [NAME_BYTES_MAX, NAME_BYTES_MAX + 1, pytest.param(107, marks=pytest.mark.full)])
def test_a_folder_just_short_or_just_too_long_leaves_the_daemon_a_socket(length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as root:  # tmp_path is too long itself, here and there
        folder = Path(root, "x" * (length - len(f"{root}//daemon.sock")))
        folder.mkdir()
        beside = folder / "daemon.sock"
        assert len(str(beside)) == length
        with Children(folder, DemoOptions(port=0)) as children:
            children.start_daemon()
            assert beside.is_socket() == (length <= NAME_BYTES_MAX)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    demo = start_demo(tmp_path / "file" / "runs", "--steps", "1")
    output, _ = demo.communicate(timeout=WAIT_SECONDS)
    assert demo.returncode == 1
    assert "cannot make a run folder here" in output
    assert "Traceback" not in output
