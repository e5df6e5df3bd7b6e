"""Measures the daemon's CPU time without viewers of its page, with twenty, and with twenty that poll instead.

The daemon runs in its own process and shows the node of `tests/monitor/showcase.py` (eight GPUs, ten ranks in two
jobs); the viewers run here and are not counted.  Rounds alternate, so that load on the machine affects all alike.

    python bench/bench_page.py --seconds 20 --rounds 3
"""

from __future__ import annotations

import argparse
import contextlib
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def no_viewer(port: int, viewers: int):
    yield lambda: 0


@contextlib.contextmanager
def pushed(port: int, viewers: int):
    """Viewers of the stream, read by one thread; yields a count of the bytes."""
    selector, stop, heard = selectors.DefaultSelector(), threading.Event(), [0]
    for _ in range(viewers):
        end = socket.create_connection(("127.0.0.1", port), timeout=30)
        end.sendall(b"GET /api/events HTTP/1.1\r\nHost: a\r\n\r\n")
        selector.register(end, selectors.EVENT_READ)

    def listen() -> None:
        while not stop.is_set():
            for key, _ in selector.select(0.2):
                heard[0] += len(key.fileobj.recv(1 << 20))

    thread = threading.Thread(target=listen)
    thread.start()
    yield lambda: heard[0]
    stop.set()
    thread.join()
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    selector.close()


@contextlib.contextmanager
def polled(port: int, viewers: int):
    """Viewers that ask for the document once a second, as `pacecar top` does."""
    stop, heard = threading.Event(), [0]

    def ask() -> None:
        while not stop.wait(1.0):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/snapshot", timeout=30) as answer:
                heard[0] += len(answer.read())

    threads = [threading.Thread(target=ask) for _ in range(viewers)]
    for thread in threads:
        thread.start()
    yield lambda: heard[0]
    stop.set()
    for thread in threads:
        thread.join()


WAYS = {"no viewer": no_viewer, "pushed": pushed, "polled": polled}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=20.0)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--viewers", type=int, default=20)
    given = arguments.parse_args()
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.monitor.showcase", "--seconds", "3600"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        port = int(child.stdout.readline())
        process = psutil.Process(child.pid)
        time.sleep(5.0)
        figures: dict[str, list[float]] = {name: [] for name in WAYS}
        rates: dict[str, float] = {}
        for _ in range(given.rounds):
            for name, way in WAYS.items():
                with way(port, given.viewers) as count:
                    time.sleep(1.0)
                    before, heard, begun = cpu_seconds(process), count(), time.monotonic()
                    time.sleep(given.seconds)
                    elapsed = time.monotonic() - begun
                    figures[name].append((cpu_seconds(process) - before) / elapsed)
                    rates[name] = (count() - heard) / elapsed
        base = statistics.median(figures["no viewer"])
        sys.stdout.write(
            f"{given.viewers} viewers, {given.rounds} rounds of {given.seconds:g} s; the jobs' own talk included\n"
        )
        for name, shares in figures.items():
            share = statistics.median(shares)
            spread = f"(least {min(shares) * 100:.2f}, most {max(shares) * 100:.2f})"
            against = f"{(share - base) * 1e3:+7.2f} ms/s against none"
            rate = f"{rates[name] / 1e3:8.1f} kB/s"
            sys.stdout.write(f"{name:<10} {share * 100:6.2f} % of a processor {spread}, {against}, {rate}\n")
        sys.stdout.write(f"resident {process.memory_info().rss / 1e6:.1f} MB\n")
    finally:
        child.kill()
        child.wait()


if __name__ == "__main__":
    main()
