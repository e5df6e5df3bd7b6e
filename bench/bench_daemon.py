"""What does the daemon cost, and what does one get for it?  Against nvitop-exporter and prometheus-node-exporter.

Each contestant runs alone, in turn, in several rounds, on the same machine with the same 8 stand-in GPUs (node_exporter
has none), reads once a second and is scraped once a second as Prometheus does (OpenMetrics accepted, gzip accepted).
CPU time is the process's own by /proc/PID/stat, which is in steps of 10 ms: --seconds makes it finer.  Latency is taken
afterwards, by scrapes at random moments, so that they also meet the ticks.  A median of rounds, and their spread.

    make bench-daemon                          three rounds
    make bench-daemon BENCH_FLAGS="--rounds 1 --seconds 5"

A bare server stands among them to show what the machine itself, busy as it may be, makes of a latency: a scrape can
hardly be faster than a server that reads nothing and keeps nothing.

The stand-in answers at once, so what a real driver takes is in no figure here; the calls for each GPU are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.monitor.nvml_standin.standin import GPUS, Control, build, compiler  # noqa: E402  needs the root on the path

WARM_SECONDS = 4.0
SCRAPES = 300
SCRAPE_GAP_SECONDS = 0.02
ACCEPT = {
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
BARE_BYTES = 24_000
"""What our page takes compressed."""

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Contestant:
    """One exporter: how it is started at a port, and where it is scraped."""

    name: str
    command: Callable[[int, Path], list[str]]
    has_gpus: bool
    is_exporter: bool = True
    rounds: list[dict[str, float]] = field(default_factory=list)


def pacecar(port: int, folder: Path) -> list[str]:
    code = (
        "import sys; from pacecar.config import DaemonConfig; from pacecar.monitor.service import run;"
        f"sys.exit(run(DaemonConfig(port={port}, socket={str(folder / 'socket')!r}, log_level='warning')))"
    )
    return [sys.executable, "-c", code]


def bare_server(port: int, folder: Path) -> list[str]:
    """Return the command of a server of the standard library that answers with as many bytes and knows nothing."""
    code = (
        "import http.server\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        f"        self.send_response(200); self.end_headers(); self.wfile.write(bytes({BARE_BYTES}))\n"
        "    def log_message(self, *args): pass\n"
        f"http.server.ThreadingHTTPServer(('127.0.0.1', {port}), Handler).serve_forever()\n"
    )
    return [sys.executable, "-c", code]


def contestants() -> Iterator[Contestant]:
    yield Contestant("pacecar", pacecar, has_gpus=True)
    yield Contestant("a bare server", bare_server, has_gpus=False, is_exporter=False)
    nvitop = ROOT / ".tools/nvitop/bin/python"
    if nvitop.exists():
        yield Contestant(
            "nvitop-exporter",
            lambda port, _: [
                str(nvitop),
                "-m",
                "nvitop_exporter",
                "--bind-address",
                "127.0.0.1",
                "--port",
                str(port),
                "--interval",
                "1.0",
            ],
            has_gpus=True,
        )
    else:
        sys.stdout.write(f"nvitop-exporter is left out: {nvitop} is not there, see `make bench-daemon`\n")
    node = ROOT / ".tools/bin/prometheus-node-exporter"
    if node.exists():
        yield Contestant(
            "node_exporter", lambda port, _: [str(node), f"--web.listen-address=127.0.0.1:{port}"], has_gpus=False
        )
    else:
        sys.stdout.write(f"node_exporter is left out: {node} is not there, see `make tools`\n")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scrape(port: int, headers: dict[str, str]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics", headers=headers)
        return connection.getresponse().read()
    finally:
        connection.close()


@contextlib.contextmanager
def running(contestant: Contestant, port: int, folder: Path, environ: dict[str, str]) -> Iterator[int]:
    log = (folder / "log").open("w+")
    process = subprocess.Popen(contestant.command(port, folder), env=environ, stdout=log, stderr=log)
    try:
        limit = time.monotonic() + 30
        while True:
            try:
                scrape(port, {})
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > limit:
                    raise SystemExit(f"{contestant.name} does not serve: {(folder / 'log').read_text()}") from None
                time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def measure(contestant: Contestant, seconds: float, library: Path) -> dict[str, float]:
    """Return the figures of one round."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        shutil.copy(library / "libnvidia-ml.so.1", folder)
        control = Control(folder / "control")
        environ = {**os.environ, **(control.environment() if contestant.has_gpus else {})}
        with running(contestant, port, folder, environ) as pid:
            time.sleep(WARM_SECONDS)
            calls, cpu, begun = sum(control.calls_in_all()[:GPUS]), cpu_seconds(pid), time.monotonic()
            while (left := begun + seconds - time.monotonic()) > 0:
                scrape(port, ACCEPT)
                time.sleep(min(1.0, left))
            elapsed = time.monotonic() - begun
            cpu = cpu_seconds(pid) - cpu
            calls = sum(control.calls_in_all()[:GPUS]) - calls
            series = len(re.findall(rb"^[^#\n]", scrape(port, {}), re.MULTILINE)) if contestant.is_exporter else 0
            latencies = []
            for _ in range(SCRAPES):
                time.sleep(SCRAPE_GAP_SECONDS * 2 * random.random())
                start = time.perf_counter()
                scrape(port, ACCEPT)
                latencies.append(1000 * (time.perf_counter() - start))
            latencies.sort()
            return {
                "CPU, % of one processor": 100 * cpu / elapsed,
                "series": series,
                "CPU for 1000 series, %": 100 * cpu / elapsed / series * 1000 if contestant.is_exporter else 0.0,
                "resident memory, MB": resident_bytes(pid) / 1e6,
                "NVML calls for a GPU each second": calls / GPUS / elapsed if contestant.has_gpus else 0.0,
                "scrape median, ms": latencies[len(latencies) // 2],
                "scrape p99, ms": latencies[int(len(latencies) * 0.99)],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description="the daemon against its peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    if compiler() is None:
        sys.stdout.write("left out: there is no C compiler to build the stand-in GPUs with\n")
        return
    with tempfile.TemporaryDirectory() as name:
        library, field_ = build(Path(name)), list(contestants())
        for number in range(options.rounds):
            for contestant in random.sample(field_, len(field_)):  # no one always runs first
                contestant.rounds.append(measure(contestant, options.seconds, library))
                sys.stderr.write(f"round {number + 1}: {contestant.name}\n")
    sys.stdout.write(f"{options.rounds} rounds of {options.seconds:g} s, {os.cpu_count()} processors\n")
    sys.stdout.write(f"{'median (lowest to highest)':<34}" + "".join(f"{c.name:>28}" for c in field_) + "\n")
    for figure in field_[0].rounds[0]:
        cells = []
        for contestant in field_:
            values = sorted(round_[figure] for round_ in contestant.rounds)
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        sys.stdout.write(f"{figure:<34}" + "".join(f"{cell:>28}" for cell in cells) + "\n")


if __name__ == "__main__":
    main()
