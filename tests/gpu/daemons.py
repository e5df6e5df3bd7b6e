"""Starts a daemon and other programs of a test's own, each in a process group that is ended with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.kit.net import scrape
from tests.kit.waiting import until

__all__ = ["RunningDaemon", "parsed", "running", "running_daemon"]

START_SECONDS_MAX = 60.0
END_SECONDS_MAX = 20.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@contextmanager
def running(command: Sequence[str], environ: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` with its output in `log`; at the end of the context it is ended, and killed if need be."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS_MAX)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class RunningDaemon:
    """A daemon that serves."""

    pid: int
    port: int
    socket: Path
    log: Path

    def page(self) -> Series:
        """Scrape the metrics."""
        return parsed(scrape(self.port))

    def scrape_ms(self) -> float:
        """Return how long a scrape takes."""
        begun = time.perf_counter()
        scrape(self.port)
        return (time.perf_counter() - begun) * 1e3

    def cpu_seconds(self) -> float:
        """Return its processor time so far, in steps of 10 ms."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def parsed(page: str) -> Series:
    """Return (metric, labels sorted by name) -> value of a page in Prometheus' text form."""
    return {
        (metric, tuple(sorted(_LABEL.findall(labels)))): float(value)
        for metric, labels, value in _SERIES.findall(page)
    }  # fmt: skip


@contextmanager
def running_daemon(folder: Path, environ: Mapping[str, str], *, period_seconds: float = 1.0) -> Iterator[RunningDaemon]:
    """Run `pacecar daemon` on a port and a socket of its own until the end of the context; its GPU is up."""
    socket, log = folder / "s", folder / "daemon.log"
    command = [sys.executable, "-m", "pacecar", "daemon", "--port", "0", "--socket", str(socket)]
    command += ["--period-seconds", str(period_seconds)]
    environ = {**environ, "PACECAR_DAEMON_RECORDINGS": str(folder / "recordings")}
    with running(command, environ, log) as process:

        def port() -> int | None:
            assert process.poll() is None, log.read_text()[-2000:]
            found = re.search(r"serving http://127\.0\.0\.1:(\d+)/metrics", log.read_text())
            return None if found is None else int(found[1])

        until(port, "the daemon does not serve", START_SECONDS_MAX, 0.05)
        daemon = RunningDaemon(process.pid, port() or 0, socket, log)

        def is_up() -> bool:
            with suppress(AssertionError, OSError):  # 503 until the first tick
                return daemon.page().get(("pacecar_gpu_up", (("gpu", "0"),))) == 1
            return False

        until(is_up, "the daemon has not read the GPU", START_SECONDS_MAX, 0.1)
        yield daemon
