"""Compares the processor time of a daemon's tick between checkouts, also on a busy machine.

`bench_daemon` measures the share of a processor, each contestant alone; under other load ticks are missed, and the
share means little.  Here daemons of several checkouts run at the same time, so that load affects all alike, and the
figure is the processor time per completed tick.

    python bench/bench_ticks.py before=../before now=.             with a scrape every 15 s
    python bench/bench_ticks.py before=../before now=. --beat 1

CPU time is that of the process, including the stand-in driver with eight GPUs, whose calls run in the daemon's threads.
Wake-ups of threads that have ended are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.bench_daemon import ACCEPT, wake_ups  # noqa: E402  needs the root on the path
from tests.kit.net import free_port  # noqa: E402
from tests.monitor.nvml_standin.standin import Control, build, compiler  # noqa: E402

DAEMON = """
import json, sys, time
from pathlib import Path
from pacecar.config import DaemonConfig
from pacecar.monitor import service
from pacecar.monitor.daemon import Daemon
from pacecar.monitor.heap_trimming import HeapTrimming

folder, port, glances = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
sys.setswitchinterval(service.SWITCH_SECONDS)
HeapTrimming().settle()
config = DaemonConfig(port=port, socket=str(folder / "socket"), recordings=str(folder / "recordings"),
                      log_level="error", glances_per_second=glances)
daemon = Daemon(config)
daemon.start()
for _ in sys.stdin:
    own = {}
    for one in daemon._sampler.own_samples():
        own[one.metric] = own.get(one.metric, 0) + one.value
    ticks, missed, glances = (own.get(f"pacecar_{name}_total", 0)
                              for name in ("daemon_ticks", "daemon_ticks_missed", "collector_glances"))
    print(json.dumps([time.process_time_ns(), time.monotonic_ns(), ticks, missed, glances]), flush=True)
"""
"""A daemon that prints its usage for each line on its input.  Not `service`, which ends a daemon whose ticks stopped
for lack of a processor."""

CLIENT = """
import sys, time, urllib.request
url, beat, *accept = sys.argv[1:]
request = urllib.request.Request(url, headers={"Accept": accept[0], "Accept-Encoding": "gzip"})
while True:
    time.sleep(float(beat))
    try:
        urllib.request.urlopen(request, timeout=60).read()
    except OSError:
        pass
"""


class Contestant:
    """The daemon of one checkout, and its scraper."""

    def __init__(self, name: str, tree: Path, driver: Path, options: argparse.Namespace) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        folder, port = Path(self._folder.name), free_port()
        shutil.copy(driver / "libnvidia-ml.so.1", folder)
        self._control = Control(folder / "control")
        environ = {**os.environ, "PYTHONPATH": str(tree), **self._control.environment()}
        command = [sys.executable, "-c", DAEMON, str(folder), str(port), str(options.glances)]
        self._daemon = subprocess.Popen(
            command, env=environ, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        url = f"http://127.0.0.1:{port}/metrics"
        self._client = subprocess.Popen([sys.executable, "-c", CLIENT, url, str(options.beat), ACCEPT["Accept"]])
        self._before = self._state()
        self.rounds: list[dict[str, float]] = []

    def _state(self) -> tuple[int, int, int, int, int, dict[str, int], int]:
        assert self._daemon.stdin is not None, "it was made with a pipe"
        assert self._daemon.stdout is not None, "it was made with a pipe"
        self._daemon.stdin.write("\n")
        self._daemon.stdin.flush()
        cpu, now, ticks, missed, glances = json.loads(self._daemon.stdout.readline())
        return cpu, now, ticks, missed, glances, wake_ups(self._daemon.pid), sum(self._control.calls_in_all()[:-1])

    def begin(self) -> None:
        """Start a round."""
        self._before = self._state()

    def end(self) -> None:
        """Store the figures since `begin`."""
        before, after = self._before, self._state()
        cpu, elapsed, ticks, missed, glances = (after[n] - before[n] for n in range(5))
        wakes = sum(count - before[5].get(thread, 0) for thread, count in after[5].items())
        ticks = max(1, ticks)
        self.rounds.append({
            "CPU of a tick, ms": cpu / 1e6 / ticks,
            "ticks": ticks,
            "missed": missed,
            "CPU, %": 100 * cpu / elapsed,
            "wake-ups a tick": wakes / ticks,
            "glances a tick": glances / ticks,
            "NVML calls a GPU and tick": (after[6] - before[6]) / ticks / self._control.gpus,
        })  # fmt: skip

    def close(self) -> None:
        """End both processes."""
        for process in (self._client, self._daemon):
            process.kill()
            process.wait()
        self._folder.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description="processor time of a tick, checkouts side by side")
    parser.add_argument("trees", nargs="+", metavar="NAME=CHECKOUT")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--beat", type=float, default=15.0, help="seconds between two scrapes")
    parser.add_argument("--glances", type=float, default=10.0, help="glances a second")
    options = parser.parse_args()
    if compiler() is None:
        parser.error("there is no C compiler to build the stand-in GPUs with")
    field: list[Contestant] = []
    driver = tempfile.TemporaryDirectory()
    try:
        build(driver.name)
        for name, _, tree in (each.partition("=") for each in options.trees):
            field.append(Contestant(name, Path(tree).resolve(), Path(driver.name), options))
        time.sleep(max(20.0, 3.5 * options.beat))  # the daemon knows the interval after three scrapes
        for number in range(options.rounds):
            for contestant in field:
                contestant.begin()
            time.sleep(options.seconds)
            for contestant in field:
                contestant.end()
            told = ", ".join(f"{c.name} {c.rounds[-1]['CPU of a tick, ms']:.2f} ms" for c in field)
            sys.stderr.write(f"round {number + 1}: {told}\n")
    finally:
        for contestant in field:
            contestant.close()
        driver.cleanup()
    for contestant in field:
        sys.stdout.write(f"{contestant.name}\n")
        for figure in contestant.rounds[0]:
            values = sorted(round_[figure] for round_ in contestant.rounds)
            middle = statistics.median(values)
            sys.stdout.write(f"    {figure:<28}{middle:9.2f}   ({values[0]:.2f} to {values[-1]:.2f})\n")


if __name__ == "__main__":
    main()
