"""Dashboards find a real daemon's series: names, labels and their values match."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pacecar.clock import NS_PER_SECOND
from pacecar.config import DaemonConfig
from pacecar.dashboards.queries import metrics_in
from pacecar.monitor.daemon import Daemon
from pacecar.records import (
    LEDGER_HEADINGS,
    Decision,
    JobHello,
    JobRecord,
    Knobs,
    KnobSwitch,
    Ledger,
    StepRecord,
    TunerOrder,
    TunerStatus,
    Verdict,
)
from pacecar.wire import encode_frame
from tests.dashboards.promql import VARIABLES, check, filled_in
from tests.kit.tools import find_tool

JOB, LAUNCH = VARIABLES["$job"], VARIABLES["$launch"]
WALL_NS = 1_700_000_000 * NS_PER_SECOND
KNOBS = Knobs(1, {"bucket_bytes": 1 << 20, "micro_batch": 4})


def ledger(steps: int) -> Ledger:
    parts = {f"{heading}_ns": 10_000_000 * steps for heading in LEDGER_HEADINGS}
    hidden = 5_000_000 * steps
    return Ledger(
        wall_ns=sum(parts.values()),
        communication_ns=parts["exposed_communication_ns"] + hidden,
        overlapped_communication_ns=hidden,
        **parts,
    )


def records(rank: int) -> Iterator[JobRecord]:
    """What one rank says in a short life: a step, and on rank 0 a trial from decision to verdict."""
    yield JobHello(
        job=JOB, launch=LAUNCH, rank=rank, local_rank=rank, world_size=2, pid=os.getpid(), host="here", device="cpu",
        backend="gloo", framework="torch", pacecar_version="0", started_wall_ns=WALL_NS,
    )  # fmt: skip
    yield StepRecord(
        job=JOB, rank=rank, step=40, ended_wall_ns=WALL_NS, wall_ns=ledger(1).wall_ns, data_wait_ns=1, forward_ns=2,
        backward_ns=3, optimizer_ns=4, micro_batches=4, samples=16, tokens=2048, ledger=ledger(1), source="estimate",
        calibration_age_steps=7, totals=ledger(40), total_steps=40, total_samples=640, total_tokens=81920,
        overhead_ns=100, total_overhead_ns=4000, total_windows=1, dropped_records=2, knobs=KNOBS,
    )  # fmt: skip
    yield KnobSwitch(job=JOB, rank=rank, decision=1, epoch=1, step=40, knobs=KNOBS, duration_ns=5_000_000)
    if rank == 0:
        yield Decision(
            job=JOB, decision=1, kind="trial", knob="micro_batch", from_value=2, to_value=4, step=20, wall_ns=WALL_NS,
            reason="a test", expected_gain_ratio=0.2,
        )  # fmt: skip
        yield Verdict(
            job=JOB, decision=1, knob="micro_batch", outcome="kept", step=40, wall_ns=WALL_NS, measured_gain_ratio=0.21,
            gain_low=0.1, gain_high=0.3, evidence=30.0, trial_steps=20, exploration_ns=-5, reason="a test",
        )  # fmt: skip
        yield TunerOrder(
            job=JOB, action="freeze", outcome="done", uid=0, values={}, step=40, wall_ns=WALL_NS, detail="a test"
        )
        yield TunerStatus(
            job=JOB, rank=0, state="watching", detail="", step=40, wall_ns=WALL_NS, exploration_ns=-5, trials=1
        )


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics text of a daemon on this machine that two ranks have told of a trial."""
    path = str(tmp_path_factory.mktemp("daemon") / "d.sock")
    daemon = Daemon(DaemonConfig(port=0, socket=path, period_seconds=0.1))
    daemon.start()
    hooks = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    try:
        for rank, hook in enumerate(hooks):
            hook.connect(path)
            for record in records(rank):
                hook.send(encode_frame(record))
        text = ""
        for _ in range(100):
            text = scrape(daemon.port)
            if "pacecar_tuner_state{" in text and text.count("pacecar_job_step{") == 2 and "host_cpu_util" in text:
                return text
            time.sleep(0.1)
    finally:
        for hook in hooks:
            hook.close()
        daemon.close()
    pytest.fail("the daemon did not serve what it was told:\n" + text[-2000:])


def test_every_expression_finds_the_series_that_this_machine_serves(served, expressions, tmp_path):
    """An expression all of whose metrics are served is never empty; GPU panels may be, where there is no GPU."""
    promtool = find_tool("promtool")
    families = list(text_string_to_metric_families(served))
    series, names = [], set()
    for family in families:
        for point in family.samples:
            names |= {point.name, family.name}
            labels = {"job": "pacecar", **point.labels, "instance": VARIABLES["$node"]}
            pairs = ", ".join(f'{label}="{value}"' for label, value in labels.items() if '"' not in value)
            growing = f"0+{point.value or 1!r}x40"
            series.append(
                {
                    "series": f"{point.name}{{{pairs}}}",
                    "values": growing if family.type in ("counter", "histogram") else f"{point.value!r}x40",
                }
            )
    asked = {
        where: expression
        for where, expression in expressions.items()
        if {metric.name for metric in metrics_in([expression])} <= names
    }
    assert {"job: Ledger A", "job: Knobs A", "tuning: State of the tuner A", "node: CPU by mode A"} <= set(asked)
    questions = [
        {"expr": f"absent({filled_in(expression)})", "eval_time": "5m", "exp_samples": []}
        for where, expression in asked.items()
        if where not in GOOD_NEWS
    ]
    check(promtool, Path(tmp_path), *questions, series=series)


GOOD_NEWS = {"Collectors that do not read A"}
"""Empty where every collector reads."""


def test_a_rank_that_hung_up_keeps_its_age_and_loses_its_process(tmp_path):
    """For the alert about stalled jobs: an ended job stays for a while without new records."""
    path = str(tmp_path / "d.sock")
    daemon = Daemon(DaemonConfig(port=0, socket=path, period_seconds=0.1))
    daemon.start()
    hook = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def until(has_process: bool) -> None:
        text = ""
        for _ in range(100):
            text = scrape(daemon.port)
            process = f'training_job="{JOB}"' in "".join(
                line for line in text.splitlines() if line.startswith("pacecar_process_info{")
            )
            if "pacecar_job_last_record_age_seconds{" in text and process is has_process:
                return
            time.sleep(0.1)
        pytest.fail(text[-2000:])

    try:
        hook.connect(path)
        for record in records(1):
            hook.send(encode_frame(record))
        until(has_process=True)
        hook.close()
        until(has_process=False)
    finally:
        hook.close()
        daemon.close()
