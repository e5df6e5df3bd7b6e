"""A small cluster to look at: three nodes of eight GPUs, two jobs and their troubles; all of it made up.

    node-a, node-b   the job llama-70b-pretrain, which is tuned; GPU 3 of node-b gets too hot
    node-c           the job moe-ablation-17, which is not; GPU 6 loses an NVLink

The daemons, what they serve and Prometheus are real; but the daemons share this one process, so that what each says of
its own CPU time and memory is that of all of them, jobs included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pacecar.config import DaemonConfig
from pacecar.monitor.collectors.daemon_process import DaemonProcessCollector
from pacecar.monitor.daemon import Daemon
from tests.dashboards.lively_job import LivelyJob
from tests.dashboards.lively_node import LivelyNode
from tests.dashboards.store import Prometheus

__all__ = ["BUSY_JOB", "HOT_NODE", "SCRAPE_SECONDS", "cluster"]

SCRAPE_SECONDS = 2
STEP_SECONDS = 0.5
BUSY_JOB, HOT_NODE = "llama-70b-pretrain", "node-b:9850"
NODES = {"node-a": LivelyNode, "node-b": lambda: LivelyNode(hot=3), "node-c": lambda: LivelyNode(torn=6)}


@contextmanager
def cluster(folder: Path, rules: list[Path]) -> Iterator[Prometheus]:
    """Start nodes, jobs and the Prometheus that scrapes them; end them afterwards."""
    with ExitStack() as until:
        daemons = {}
        for name, node in NODES.items():
            config = DaemonConfig(
                port=0,
                socket=str(folder / f"{name}.sock"),
                recordings=str(folder / name),
                period_seconds=SCRAPE_SECONDS,
                jitter_ratio=0.0,
            )
            daemons[name] = Daemon(config, collectors=[node(), DaemonProcessCollector()])
            daemons[name].start()
            until.callback(daemons[name].close)
        sockets = [daemon.socket for daemon in daemons.values()]
        jobs = [
            LivelyJob(BUSY_JOB, sockets[:2], 8, step_ms=480, late_rank=11, is_tuned=True),
            LivelyJob("moe-ablation-17", sockets[2:], 8, step_ms=190, late_rank=None, is_tuned=False),
        ]
        stop = threading.Event()

        def train() -> None:
            due = time.monotonic()
            while not stop.wait(max(0.0, due - time.monotonic())):
                due += STEP_SECONDS  # not from now: a busy machine must not slow the job down
                for job in jobs:
                    job.step()

        thread = threading.Thread(target=train)
        thread.start()
        for job in jobs:
            until.callback(job.close)
        until.callback(thread.join)
        until.callback(stop.set)
        targets = {
            f"127.0.0.1:{daemon.port}": {"instance": f"{name}:9850", "cluster": "west"}
            for name, daemon in daemons.items()
        }
        yield until.enter_context(Prometheus(folder, targets, rules, scrape_seconds=SCRAPE_SECONDS))
