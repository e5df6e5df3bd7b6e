"""Compares the cost of the daemon with nvitop-exporter and prometheus-node-exporter.

Each contestant runs alone, in turn, on the same machine with the same stand-in GPUs (none for node_exporter), reads
once a second, and is scraped like by Prometheus (OpenMetrics, gzip): every second, and every 15 s, the usual interval.
pacecar also runs with other numbers of GPUs, and without glances between ticks.  The order changes in each round, so
that load on the machine affects all alike; the result is the median over rounds with its spread.

    make bench-daemon                                              three rounds: an hour and a half
    make bench-daemon BENCH_FLAGS="--rounds 1 --gpus 8 --glances 10"
    make bench-daemon BENCH_FLAGS="--old ../before"                also pacecar from another checkout
    make bench-daemon BENCH_FLAGS="--together"                     all of a round at the same time, on a busy machine
    make bench-daemon BENCH_FLAGS="--call-us 760"                  calls as expensive as a real driver's

CPU time is that of the process in /proc/PID/stat, in steps of 10 ms (a longer --seconds makes it finer), counted after
three scrapes, when the daemon knows the interval.  Wake-ups are the voluntary context switches of all threads.  Latency
is measured afterwards, by scrapes at random moments, so that some meet a tick.  On a busy machine ticks are missed and
CPU time is too low; the missed share is printed.

A bare server shows the latency of the machine itself.

The figures include the calls of the GPU library: each call of the stand-in takes CALL_COST_US of processor time, and
each field of a multi-field call FIELD_COST_NS.  On a real GPU a call took 760 us (docs/measurements/gpu.md).  Calls per
GPU are counted.  No process uses the GPUs: the stand-in's processes do not exist on this machine, and looking for them
made nvitop-exporter look several times as expensive as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.kit.net import free_port  # noqa: E402  needs the root on the path
from tests.monitor.nvml_standin.standin import GPUS, Control, build, compiler  # noqa: E402

WARM_SCRAPES = 4
WARM_SECONDS_MIN = 6.0
SCRAPES = 300
SCRAPE_GAP_SECONDS = 0.02
GLANCES = 10.0
"""Glances a second that are the default."""

CALL_COST_US = 15.0
"""Processor time of a call: NVIDIA's own mock of the library takes 14 to 32 us for those of every tick, pynvml's share
included."""

FIELD_COST_NS = 1_000
"""Of each field of nvmlDeviceGetFieldValues: a call for 110 of them takes 160 us there."""

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
    """One exporter: its command, the number of GPUs it sees, and the interval of scrapes."""

    name: str
    command: Callable[[int, Path], list[str]]
    scrape_seconds: float
    gpus: int = GPUS
    is_exporter: bool = True
    tree: Path | None = None
    """The checkout, if it is pacecar."""

    rounds: list[dict[str, float]] = field(default_factory=list)


def pacecar(port: int, folder: Path, *, glances: float) -> list[str]:
    code = (
        "import sys; from pacecar.config import DaemonConfig; from pacecar.monitor.service import run;"
        f"sys.exit(run(DaemonConfig(port={port}, socket={str(folder / 'socket')!r}, log_level='warning',"
        f" glances_per_second={glances!r})))"
    )
    return [sys.executable, "-c", code]


def bare_server(port: int, folder: Path) -> list[str]:
    """Return the command of a standard library server that answers with as many bytes."""
    code = (
        "import http.server\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        f"        self.send_response(200); self.end_headers(); self.wfile.write(bytes({BARE_BYTES}))\n"
        "    def log_message(self, *args): pass\n"
        f"http.server.ThreadingHTTPServer(('127.0.0.1', {port}), Handler).serve_forever()\n"
    )
    return [sys.executable, "-c", code]


def nvitop_exporter(port: int, folder: Path) -> list[str]:
    python = str(ROOT / ".tools/nvitop/bin/python")
    return [python, "-m", "nvitop_exporter", "--bind-address", "127.0.0.1", "--port", str(port), "--interval", "1.0"]


def node_exporter(port: int, folder: Path) -> list[str]:
    return [str(ROOT / ".tools/bin/prometheus-node-exporter"), f"--web.listen-address=127.0.0.1:{port}"]


def contestants(options: argparse.Namespace) -> Iterator[Contestant]:
    for seconds in options.scrapes:
        for gpus in options.gpus:
            for glances in options.glances:
                name = f"pacecar, {gpus} GPUs" + ("" if glances else ", no glances")
                yield Contestant(name, partial(pacecar, glances=glances), seconds, gpus, tree=ROOT)
                if options.old is not None:
                    yield Contestant(f"old {name}", partial(pacecar, glances=glances), seconds, gpus, tree=options.old)
        if options.no_peers:
            continue
        yield Contestant("a bare server", bare_server, seconds, gpus=0, is_exporter=False)
        for name, command, path, gpus in (
            ("nvitop-exporter", nvitop_exporter, ".tools/nvitop/bin/python", GPUS),
            ("node_exporter", node_exporter, ".tools/bin/prometheus-node-exporter", 0),
        ):
            if (ROOT / path).exists():
                yield Contestant(name, command, seconds, gpus)
            else:
                sys.stdout.write(f"{name} is left out: {path} is not there, see `make bench-daemon`\n")


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
    process = subprocess.Popen(contestant.command(port, folder), env=environ, cwd=folder, stdout=log, stderr=log)
    try:
        limit = time.monotonic() + 60
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


def wake_ups(pid: int) -> dict[str, int]:
    """Return the voluntary context switches of each thread of a process so far."""
    counts = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
            if found is not None:
                counts[task.name] = int(found[1])
    return counts


def ticks(page: bytes) -> tuple[float, float]:
    """Return the made and missed ticks on a daemon's page; zeros for another exporter."""
    names = (b"pacecar_daemon_ticks_total", b"pacecar_daemon_ticks_missed_total")
    found = [re.search(b"^" + name + rb" (\S+)", page, re.MULTILINE) for name in names]
    made, missed = (0.0 if one is None else float(one[1]) for one in found)
    return made, missed


def scrape_for(port: int, seconds: float, interval: float) -> None:
    """Scrape at a fixed interval, like Prometheus, for `seconds`."""
    begun = time.monotonic()
    for number in range(int(seconds / interval) + 1):
        time.sleep(max(0.0, begun + number * interval - time.monotonic()))
        scrape(port, ACCEPT)
    time.sleep(max(0.0, begun + seconds - time.monotonic()))


def latencies_ms(port: int) -> list[float]:
    """Return the times of scrapes at random moments, sorted."""
    found = []
    for _ in range(SCRAPES):
        time.sleep(SCRAPE_GAP_SECONDS * 2 * random.random())
        start = time.perf_counter()
        scrape(port, ACCEPT)
        found.append(1000 * (time.perf_counter() - start))
    return sorted(found)


def measure(contestant: Contestant, seconds: float, call_us: float) -> dict[str, float]:
    """Return the figures of one round."""
    with tempfile.TemporaryDirectory() as name:
        folder, port, beat = Path(name), free_port(), contestant.scrape_seconds
        environ = {**os.environ, **({} if contestant.tree is None else {"PYTHONPATH": str(contestant.tree)})}
        environ["STATE_DIRECTORY"] = str(folder)  # else this node's own daemon would miss our stand-in GPUs
        control = None
        if contestant.gpus:
            build(folder, max(GPUS, contestant.gpus))
            control = Control(folder / "control", max(GPUS, contestant.gpus))
            control.page.count, control.page.idle = contestant.gpus, 1
            control.page.cost_ns, control.page.field_cost_ns = round(1000 * call_us), FIELD_COST_NS
            environ |= control.environment()
        with running(contestant, port, folder, environ) as pid:
            scrape_for(port, max(WARM_SECONDS_MIN, (WARM_SCRAPES - 0.5) * beat), beat)
            calls, woken = 0 if control is None else sum(control.calls_in_all()[:-1]), wake_ups(pid)
            made, missed = ticks(scrape(port, {}))
            cpu, begun = cpu_seconds(pid), time.monotonic()
            time.sleep(beat / 2)
            scrape_for(port, seconds - beat / 2, beat)
            elapsed, cpu = time.monotonic() - begun, cpu_seconds(pid) - cpu
            calls = 0 if control is None else sum(control.calls_in_all()[:-1]) - calls
            woken_after = wake_ups(pid)
            wakes = sum(count - woken.get(thread, 0) for thread, count in woken_after.items())  # threads may have ended
            page = scrape(port, {})
            made, missed = (after - before for after, before in zip(ticks(page), (made, missed), strict=True))
            series = len(re.findall(rb"^[^#\n]", page, re.MULTILINE)) if contestant.is_exporter else 0
            latencies = latencies_ms(port)
            return {
                "CPU, % of one processor": 100 * cpu / elapsed,
                "series": series,
                "CPU for 1000 series, %": 100 * cpu / elapsed / series * 1000 if contestant.is_exporter else 0.0,
                "threads": len(woken_after),
                "wake-ups a second": wakes / elapsed,
                "ticks missed, %": 100 * missed / (made + missed) if made else 0.0,
                "resident memory, MB": resident_bytes(pid) / 1e6,
                "NVML calls a GPU and second": calls / contestant.gpus / elapsed if contestant.gpus else 0.0,
                "scrape median, ms": latencies[len(latencies) // 2],
                "scrape p99, ms": latencies[int(len(latencies) * 0.99)],
            }


def show(field_: list[Contestant], seconds: float) -> None:
    """Print the table of the contestants scraped every `seconds`."""
    shown = [contestant for contestant in field_ if contestant.scrape_seconds == seconds and contestant.rounds]
    if not shown:
        return
    figures = list(shown[0].rounds[0])
    sys.stdout.write(f"\nscraped every {seconds:g} s: median (lowest to highest)\n")
    rows = [["", *figures]]
    for contestant in shown:
        row = [contestant.name]
        for figure in figures:
            values = sorted(round_[figure] for round_ in contestant.rounds)
            row.append(f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        rows.append(row)
    for column in zip(*rows, strict=True):
        sys.stdout.write(f"{column[0]:<30}" + "".join(f"{cell:>30}" for cell in column[1:]) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="the daemon against its peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="for which CPU time is counted")
    parser.add_argument("--scrapes", type=float, nargs="+", default=[1.0, 15.0], help="seconds between two scrapes")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 16], help="stand-in GPUs that pacecar runs on")
    parser.add_argument("--glances", type=float, nargs="+", default=[GLANCES, 0.0], help="glances a second")
    parser.add_argument("--call-us", type=float, default=CALL_COST_US, help="processor time of a driver's call")
    parser.add_argument("--old", type=Path, help="another checkout of pacecar, measured in turn with this one")
    parser.add_argument("--together", action="store_true", help="all contestants of a round at the same time")
    parser.add_argument("--no-peers", action="store_true", help="measure pacecar alone")
    options = parser.parse_args()
    if compiler() is None:
        sys.stdout.write("left out: there is no C compiler to build the stand-in GPUs with\n")
        return
    if options.old is not None:
        options.old = options.old.resolve()
    field_ = list(contestants(options))
    for number in range(options.rounds):
        order = random.sample(field_, len(field_))  # a new order in each round
        with ThreadPoolExecutor(len(order) if options.together else 1) as pool:
            found = list(pool.map(lambda one: measure(one, options.seconds, options.call_us), order))
        for contestant, figures in zip(order, found, strict=True):
            contestant.rounds.append(figures)
            cpu = contestant.rounds[-1]["CPU, % of one processor"]
            told = f"round {number + 1}: {contestant.name} scraped every {contestant.scrape_seconds:g} s: {cpu:.2f} %"
            sys.stderr.write(told + "\n")
    facts = f"{os.cpu_count()} processors, {options.call_us:g} us a driver's call"
    sys.stdout.write(f"{options.rounds} rounds of {options.seconds:g} s, {facts}\n")
    for seconds in options.scrapes:
        show(field_, seconds)


if __name__ == "__main__":
    main()
