"""Simulates nodes for bench_scaling: one real daemon of an 8-GPU node as the model, and many exporters of such a page.

    python bench/scaling_nodes.py model FILE
    python bench/scaling_nodes.py serve FILE FIRST COUNT PERIOD      prints the ports, serves until its input ends

The model is a real daemon with real collectors: NVML is the stand-in library (8 GPUs, 18 NVLinks each), /proc and /sys
are those of the recorded machine with eight RDMA adapters, and eight ranks of a tuned job report.  Its samples are
kept. Each simulated node has a real exporter and web server, and serves these samples with growing counters and moving
gauges, so that Prometheus cannot compress constants.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pacecar.config import DaemonConfig  # noqa: E402
from pacecar.metrics.catalog import MetricKind, by_name  # noqa: E402
from pacecar.monitor.daemon import Daemon  # noqa: E402
from pacecar.monitor.export.prometheus import Exporter  # noqa: E402
from pacecar.monitor.http.server import WebServer  # noqa: E402
from pacecar.records import Sample  # noqa: E402
from pacecar.wire import encode_frame  # noqa: E402
from tests.kit.machines import machine as recorded  # noqa: E402
from tests.monitor.nvml_standin.standin import Control, build  # noqa: E402
from tests.monitor.showcase import ShowJob  # noqa: E402
from tests.monitor.testimony import everything  # noqa: E402

GPUS = 8
JOB_NODES = 16
"""Nodes of one job: 128 GPUs."""

MODEL_SECONDS = 25.0
"""Longer than a window and than the slowest question to a GPU but those asked once."""

STILL = ("_info", "_size_bytes", "_limit_watts", "_max_hertz", "_timestamp_seconds", "_start_time_seconds", "_up")
"""Gauges that do not move on a real node."""


def machine(folder: Path) -> Path:
    """Copy the recorded machine and give it eight adapters."""
    copy = recorded("training_host", folder / "machine")
    adapters = copy / "sys/class/infiniband"
    for number in range(2, GPUS):
        shutil.copytree(adapters / "mlx5_0", adapters / f"mlx5_{number}")
    return copy


def model(file: Path) -> None:
    """Run one real daemon and write what it would serve."""
    if "PACECAR_STANDIN" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = build(folder)
            environ = os.environ | Control(library / "control").environment()
            subprocess.run([sys.executable, __file__, "model", str(file)], check=True, env=environ)
        return
    with tempfile.TemporaryDirectory() as folder:
        at = machine(Path(folder))
        config = DaemonConfig(
            port=0, socket=f"{folder}/s", proc_root=str(at / "proc"), sys_root=str(at / "sys"), recordings=folder,
        )  # fmt: skip
        daemon = Daemon(config)
        daemon.start()
        job = ShowJob(f"{folder}/s", name="run-7", ranks=GPUS, is_tuned=False)
        try:
            for record in everything(0):
                job.hooks[0].send(encode_frame(record))
            limit = time.monotonic() + MODEL_SECONDS
            while time.monotonic() < limit:
                job.step()
                time.sleep(0.5)
            snapshot = daemon._state.snapshot()
            assert snapshot is not None
            samples = [
                *snapshot.samples(),
                *daemon._energies.update(snapshot, daemon._state.jobs),
                *daemon._live_samples(),
            ]
        finally:
            job.close()
            daemon.close()
    # Without histograms: a job has one, and each rank some seventy series.
    unique = {(sample.metric, sample.labels): sample.value for sample in samples if isinstance(sample, Sample)}
    file.write_text(json.dumps([[metric, labels, value] for (metric, labels), value in unique.items()]))


class Node:
    """One simulated node."""

    def __init__(self, number: int, rows: list[tuple[str, list[str], float]]) -> None:
        self._chance = random.Random(number)
        self._rows = [(metric, self._labels(number, metric, labels), value) for metric, labels, value in rows]
        self._values = [value for _, _, value in rows]
        self._moves = [self._move(metric, value) for metric, _, value in rows]
        self.exporter = Exporter(list)
        self.server = WebServer("127.0.0.1", 0)
        self.server.bind()
        self.tick()
        self.server.start(self.exporter)

    def _labels(self, number: int, metric: str, labels: list[str]) -> tuple[str, ...]:
        """Give the node its own ranks and GPUs, and the job to sixteen nodes."""
        named = dict(zip(by_name(metric).labels, labels, strict=True))
        if "training_job" in named:
            named["training_job"] = f"job-{number // JOB_NODES}"
        if named.get("rank", "").isdecimal():
            named["rank"] = str(number % JOB_NODES * GPUS + int(named["rank"]))
        for name in ("uuid", "gpu_uuid", "device_uuid"):
            if named.get(name):
                named[name] = f"{named[name]}-{number}"
        return tuple(named.values())

    def _move(self, metric: str, value: float) -> float:
        """Return how much the value moves between two scrapes; 0 for what stays."""
        entry = by_name(metric)
        if entry.kind is MetricKind.COUNTER:
            # Errors mostly stay where they are; a rate is a share of what has been counted, and at least one.
            return 0.0 if value == 0 or "error" in metric else max(1.0, abs(value) * 0.01)
        return 0.0 if metric.endswith(STILL) or (isinstance(value, int) and abs(value) <= 1) else abs(value) * 0.05

    def tick(self) -> None:
        """Publish a new board."""
        draw = self._chance.random
        samples = []
        for at, (metric, labels, value) in enumerate(self._rows):
            move = self._moves[at]
            if move:
                is_counter = by_name(metric).kind is MetricKind.COUNTER
                new = self._values[at] + move * draw() if is_counter else value + move * (2 * draw() - 1)
                self._values[at] = round(new) if isinstance(value, int) else new
            samples.append(Sample(metric, labels, self._values[at]))
        self.exporter.publish(samples)


def serve(file: Path, first: int, count: int, period: float) -> None:
    """Serve `count` nodes until standard input ends."""
    rows = json.loads(file.read_text())
    nodes = [Node(number, rows) for number in range(first, first + count)]
    sys.stdout.write(json.dumps([node.server.port for node in nodes]) + "\n")
    sys.stdout.flush()
    stopping = threading.Event()

    def tick() -> None:
        while True:
            for node in nodes:
                node.tick()
                if stopping.wait(period / count):
                    return

    ticker = threading.Thread(target=tick)
    ticker.start()
    sys.stdin.read()
    stopping.set()
    ticker.join()
    for node in nodes:
        node.server.close()


if __name__ == "__main__":
    what, where, *numbers = sys.argv[1:]
    if what == "model":
        model(Path(where))
    else:
        serve(Path(where), int(numbers[0]), int(numbers[1]), float(numbers[2]))
