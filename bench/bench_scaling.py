"""Measures what one real Prometheus needs to scrape 200 simulated daemons of 8-GPU nodes.

Nodes are added in steps, so that the cost of a node is a slope.  Each step reports series, resident memory, processor
time of scraping and rules, and the time of the Fleet dashboard's expressions as Grafana sends them (instant queries for
tables, range queries for graphs).

    make bench-scaling
    make bench-scaling BENCH_FLAGS="--nodes 50,100,200 --seconds 180 --json scaling.json"

Figures, extrapolated to 10 000 GPUs: docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
NODES = ROOT / "bench/scaling_nodes.py"
GENERATED = ROOT / "dashboards/generated"
NODES_PER_PROCESS = 50
RANGE_SECONDS, RANGE_POINTS = 120, 240
"""As many points as a graph of an hour has on a laptop's screen (one every 15 s), over the time that there is data for:
each point looks at as many samples."""

VARIABLES = {"__rate_interval": "1m", "__range": "5m", "__interval": "15s"}

CONFIG = """
global: {{scrape_interval: {interval}s, scrape_timeout: {interval}s, evaluation_interval: {interval}s}}
rule_files: ["{rules}/*.rules.yml"]
scrape_configs:
  - job_name: pacecar
    sample_limit: 20000
    file_sd_configs: [{{files: ["{targets}"], refresh_interval: 5s}}]
"""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def start_nodes(stack: ExitStack, model: Path, count: int, period: float) -> list[int]:
    """Start the processes that simulate `count` nodes and return the ports."""
    ports: list[int] = []
    for first in range(0, count, NODES_PER_PROCESS):
        here = min(NODES_PER_PROCESS, count - first)
        process = subprocess.Popen(
            [sys.executable, str(NODES), "serve", str(model), str(first), str(here), str(period)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(end, process)
        assert process.stdout is not None
        ports += json.loads(process.stdout.readline())
    return ports


def end(process: subprocess.Popen[Any]) -> None:
    """Let a process end by itself, or end it."""
    if process.stdin is not None:
        process.stdin.close()
    else:
        process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


class Prometheus:
    """A real one, with the rules that come with pacecar, and how it is asked."""

    def __init__(self, stack: ExitStack, folder: Path, interval: int, rules: Path) -> None:
        self.targets = folder / "targets.json"
        self.name_targets([])
        config, self._log = folder / "prometheus.yml", folder / "log"
        config.write_text(CONFIG.format(interval=interval, rules=rules, targets=self.targets))
        command = [ROOT / ".tools/bin/prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        command += ["--web.listen-address=127.0.0.1:0", "--log.format=logfmt"]
        with self._log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)
        stack.callback(end, self._process)
        self.process = psutil.Process(self._process.pid)
        self._port = self._wait()

    def name_targets(self, ports: list[int]) -> None:
        """Let it scrape these nodes from now on."""
        rows = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": f"node-{number:04d}", "cluster": "bench"}}
            for number, port in enumerate(ports)
        ]
        new = self.targets.with_suffix(".new")
        new.write_text(json.dumps(rows))
        new.replace(self.targets)

    def ask(self, expression: str, *, over_seconds: int | None = None) -> tuple[float, int]:
        """Return how long the answer took, and how many series it has."""
        now, path = time.time(), "query"
        given: dict[str, object] = {"query": expression, "time": now}
        if over_seconds is not None:
            path = "query_range"
            given = {"query": expression, "start": now - over_seconds, "end": now, "step": over_seconds / RANGE_POINTS}
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(given)}"
        begun = time.perf_counter()
        with urllib.request.urlopen(url, timeout=120) as answer:
            result = json.load(answer)["data"]["result"]
        return time.perf_counter() - begun, len(result)

    def value(self, expression: str) -> float:
        """Return the one value of an expression; NaN without."""
        url = f"http://127.0.0.1:{self._port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=120) as answer:
            result = json.load(answer)["data"]["result"]
        return float(result[0]["value"][1]) if result else float("nan")

    def own(self) -> dict[str, float]:
        """Return its own metrics without labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}

    def _wait(self) -> int:
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            text = self._log.read_text()
            found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', text)
            if found and "Server is ready to receive web requests" in text:
                return int(found[1])
            assert self._process.poll() is None, text
            time.sleep(0.1)
        raise AssertionError(self._log.read_text())


def expressions(dashboard: Path) -> list[tuple[str, bool]]:
    """Return the expressions of a dashboard as Grafana sends them with everything chosen, and whether over time."""
    found = []

    def walk(panels: list[dict[str, Any]]) -> None:
        for panel in panels:
            walk(panel.get("panels", []))
            found.extend((filled(target["expr"]), not target.get("instant")) for target in panel.get("targets", []))

    walk(json.loads(dashboard.read_text())["panels"])
    return found


def filled(expression: str) -> str:
    """Put values in the place of Grafana's variables: all of everything."""
    return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda found: VARIABLES.get(found[1], ".*"), expression)


def measure(prometheus: Prometheus, nodes: int, seconds: float, asked: list[tuple[str, bool]]) -> dict[str, Any]:
    """Let it scrape for `seconds` and measure."""
    time.sleep(seconds / 2)
    cpu, begun = sum(prometheus.process.cpu_times()[:2]), time.monotonic()
    time.sleep(seconds / 2)
    share = (sum(prometheus.process.cpu_times()[:2]) - cpu) / (time.monotonic() - begun)
    own = prometheus.own()
    answers = [prometheus.ask(text, over_seconds=RANGE_SECONDS if over else None) for text, over in asked]
    times = [duration for duration, _ in answers]
    return {
        "nodes": nodes,
        "up": prometheus.value("sum(up)"),
        "series_per_node": prometheus.value("max(scrape_samples_scraped)"),
        "scrape_seconds": prometheus.value("quantile(0.5, scrape_duration_seconds)"),
        "head_series": own["prometheus_tsdb_head_series"],
        "resident_bytes": prometheus.process.memory_info().rss,
        "heap_bytes": own["go_memstats_heap_inuse_bytes"],
        "processors": share,
        "queries": len(times),
        "without_data": [text for (text, _), (_, series) in zip(asked, answers, strict=True) if not series],
        "query_seconds_all": sum(times),
        "query_seconds_median": statistics.median(times),
        "query_seconds_slowest": max(times),
        "slowest": asked[times.index(max(times))][0],
    }


def report(steps: list[dict[str, Any]], idle: dict[str, float]) -> None:
    """Print the table and the slopes."""
    say(f"{'nodes':>6}{'up':>5}{'series':>9}{'a node':>8}{'resident':>10}{'heap':>9}{'CPU':>7}{'scrape':>8}"
        f"{'all':>8}{'median':>8}{'slowest':>9}")  # fmt: skip
    for step in steps:
        say(f"{step['nodes']:>6}{step['up']:>5.0f}{step['head_series']:>9.0f}{step['series_per_node']:>8.0f}"
            f"{step['resident_bytes'] / 1e6:>7.0f} MB{step['heap_bytes'] / 1e6:>6.0f} MB{step['processors']:>7.2f}"
            f"{step['scrape_seconds'] * 1e3:>5.0f} ms{step['query_seconds_all']:>6.2f} s"
            f"{step['query_seconds_median'] * 1e3:>5.0f} ms{step['query_seconds_slowest'] * 1e3:>6.0f} ms")  # fmt: skip
    last = steps[-1]
    say(f"{last['queries']} expressions, the slowest: {last['slowest'][:100]}")
    for text in last["without_data"]:
        say(f"without data: {text[:100]}")
    grown = last["head_series"] - idle["head_series"]
    say(f"resident bytes a series: {(last['resident_bytes'] - idle['resident_bytes']) / grown:.0f},"
        f" heap {(last['heap_bytes'] - idle['heap_bytes']) / grown:.0f}")  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--nodes", default="50,100,200", help="the steps")
    arguments.add_argument("--interval", type=int, default=15, help="seconds between two scrapes")
    arguments.add_argument("--seconds", type=float, default=120.0, help="scraping at each step")
    arguments.add_argument("--dashboard", type=Path, default=GENERATED / "fleet.json", help="its rules lie beside it")
    arguments.add_argument("--json", type=Path, help="where the figures go as well")
    given = arguments.parse_args()
    counts = [int(word) for word in given.nodes.split(",")]
    asked = expressions(given.dashboard)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = folder / "model.json"
        subprocess.run([sys.executable, str(NODES), "model", str(model)], check=True)
        say(f"a node serves {len(json.loads(model.read_text()))} series; load {os.getloadavg()[0]:.1f}")
        prometheus = Prometheus(stack, folder, given.interval, given.dashboard.parent)
        ports = start_nodes(stack, model, max(counts), given.interval)
        time.sleep(10)
        own = prometheus.own()
        idle = {
            "resident_bytes": float(prometheus.process.memory_info().rss),
            "heap_bytes": own["go_memstats_heap_inuse_bytes"],
            "head_series": own["prometheus_tsdb_head_series"],
        }
        steps = []
        for count in counts:
            prometheus.name_targets(ports[:count])
            steps.append(measure(prometheus, count, given.seconds, asked))
            say(f"{count} nodes: done")
        report(steps, idle)
    if given.json is not None:
        given.json.write_text(json.dumps({"interval": given.interval, "idle": idle, "steps": steps}, indent=2) + "\n")


if __name__ == "__main__":
    main()
