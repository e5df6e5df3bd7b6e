"""Twenty minutes with GPUs lost and returned, a driver reloaded and a scrape a second: memory and threads stay flat.

    make soak-daemon        PACECAR_SOAK_SECONDS=60 for a short one

The figures of the last tenth may not be above those of the second tenth by more than noise: the first tenth is left out
because caches fill, threads of hung calls come and go, and the interpreter's heap finds its size.
"""

import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.monitor.nvml_standin.standin import GPUS, Control, build, compiler

SECONDS = float(os.environ.get("PACECAR_SOAK_SECONDS", "1200"))
GPU_IS_LOST = 15  # NVML_ERROR_GPU_IS_LOST
RESIDENT_BYTES_MORE = 3_000_000
"""What the last tenth may take more than the second: a leak of 3 kB a tick would be over it in 20 minutes."""

SHOWN = ("resident_memory_bytes", "threads", "open_files", "series", "scrape_seconds")

RUN = """
import sys
from pacecar.config import DaemonConfig
from pacecar.monitor.service import run
sys.exit(run(DaemonConfig(port=0, socket=sys.argv[1])))
"""


def scrape(port):
    """Return {series: value} of what the soak looks at, and how long it took."""
    begun = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        page = answer.read().decode()
    took = time.perf_counter() - begun
    found = dict(re.findall(r"^(pacecar_(?:daemon|gpu_up)\S*) (\S+)$", page, re.MULTILINE))
    return {name: float(value) for name, value in found.items()}, took, len(re.findall(r"^[^#\n]", page, re.MULTILINE))


def trouble(control, second):
    """What happens at that second of the soak: every minute another GPU is lost, hangs or the driver is reloaded."""
    gpu, phase = second // 60 % GPUS, second % 60
    if phase == 10:
        control.page.lost[gpu] = GPU_IS_LOST
    elif phase == 20:
        control.page.lost[gpu] = 0
    elif phase == 30:
        control.page.hang_ms[(gpu + 1) % GPUS] = 8000
    elif phase == 33:
        control.page.hang_ms[(gpu + 1) % GPUS] = 0
    elif phase == 50:
        control.page.driver_life += 1
    elif phase == 55:
        control.xid(gpu, 31)


@pytest.mark.soak
@pytest.mark.skipif(compiler() is None, reason="there is no C compiler to build the stand-in GPUs with")
def test_memory_and_threads_stay_flat_while_gpus_come_and_go(tmp_path):
    folder = build(tmp_path)
    control = Control(folder / "control")
    environ = {**os.environ, **control.environment()}
    log = tmp_path / "log"
    with (
        log.open("w") as out,
        subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "s")], env=environ, stderr=out) as process,
    ):
        try:
            rows = soak(served_at(log), control)
        finally:
            process.terminate()
            process.wait(20)
    report(rows, log.read_text())
    early, late = rows[len(rows) // 10 : len(rows) // 5], rows[-len(rows) // 10 :]
    # Files are counted while other collectors have theirs open, so of those the least is what stays open.
    for figure, typical, more in (
        ("resident_memory_bytes", statistics.median, RESIDENT_BYTES_MORE),
        ("threads", statistics.median, 1),
        ("open_files", min, 1),
    ):
        before, after = (typical(row[figure] for row in part) for part in (early, late))
        assert after <= before + more, f"{figure}: {before} at the start, {after} at the end"
    assert min(row["up"] for row in rows) < GPUS, "the trouble was seen"
    assert rows[-1]["up"] == GPUS, "all GPUs are back"


def served_at(log):
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        if found := re.search(r"http://[^:]+:(\d+)/metrics", log.read_text()):
            return int(found[1])
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def soak(port, control):
    rows = []
    while "pacecar_daemon_resident_memory_bytes" not in scrape(port)[0]:  # before the first tick
        time.sleep(0.1)
    begun = time.monotonic()
    for second in range(int(SECONDS)):
        trouble(control, second)
        values, took, series = scrape(port)
        row = {name.removeprefix("pacecar_daemon_"): value for name, value in values.items()}
        up = sum(value for name, value in values.items() if name.startswith("pacecar_gpu_up"))
        rows.append(row | {"up": up, "scrape_seconds": took, "series": series})
        time.sleep(max(0.0, begun + second + 1 - time.monotonic()))
    for gpu in range(GPUS):
        control.page.lost[gpu] = control.page.hang_ms[gpu] = 0
    limit = time.monotonic() + 180
    while time.monotonic() < limit:
        values, _, _ = scrape(port)
        up = sum(value for name, value in values.items() if name.startswith("pacecar_gpu_up"))
        rows[-1]["up"] = up
        if up == GPUS:
            break
        time.sleep(1)
    return rows


def report(rows, log):
    lines = [
        f"{len(rows)} s of soak; the log has {len(log.splitlines())} lines",
        f"{'':>8}{'resident MB':>14}{'threads':>10}{'files':>8}{'series':>8}{'least up':>9}{'scrape ms':>11}",
    ]
    tenth = max(1, len(rows) // 10)
    for start in range(0, len(rows), tenth):
        part = rows[start : start + tenth]
        middle = {key: statistics.median(row[key] for row in part) for key in SHOWN}
        lines.append(
            f"{start:>6} s{middle['resident_memory_bytes'] / 1e6:>14.1f}{middle['threads']:>10.0f}"
            f"{middle['open_files']:>8.0f}{middle['series']:>8.0f}{min(r['up'] for r in part):>9.0f}"
            f"{1000 * middle['scrape_seconds']:>11.2f}"
        )
    spent = rows[-1]["cpu_seconds_total"] - rows[0]["cpu_seconds_total"]
    lines.append(f"CPU {100 * spent / len(rows):.2f} % of a processor")
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
