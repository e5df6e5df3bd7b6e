"""A daemon as a process of its own, or in the test's, or only its inbox."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.samples import Sample

from pacecar.clock import Clock, SystemClock
from pacecar.config import DaemonConfig, OtlpConfig
from pacecar.monitor.daemon import Daemon
from pacecar.monitor.ingest.socket_server import SocketServer
from pacecar.monitor.ingest.unix_socket import UnixSocket
from pacecar.monitor.jobs.state import DaemonState
from tests.kit.net import scraped
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running_daemon(
    folder: Path, collectors: Sequence[Any] | None = None, otlp: OtlpConfig | None = None, **config: Any
) -> Iterator[Daemon]:
    """Run a daemon with socket `s` and recordings `rec` in `folder`; it has ticked."""
    given = {"port": 0, "socket": str(folder / "s"), "recordings": str(folder / "rec"), "jitter_ratio": 0.0}
    daemon = Daemon(DaemonConfig(**(given | {"period_seconds": 0.1} | config)), collectors=collectors, otlp=otlp)
    daemon.start()
    try:
        until(daemon.is_healthy, "the first tick")
        yield daemon
    finally:
        daemon.close()


@contextmanager
def running_inbox(
    path: Path, board: DaemonState | None = None, clock: Clock | None = None, **limits: int
) -> Iterator[SocketServer]:
    """Run a socket server at `path`; without a `board` for 3 jobs and 4 ranks."""
    clock = clock or SystemClock()
    board = board or DaemonState(clock, jobs_max=3, ranks_max=4, job_forget_seconds=900)
    inbox = SocketServer(UnixSocket(path), board, clock, **limits)
    inbox.start()
    try:
        yield inbox
    finally:
        inbox.close()


class DaemonProcess:
    """The command `pacecar daemon` with the configuration `text`, and a service manager that it notifies.

    `command` is what Python runs, `before` is called in the new process.
    """

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        command: Sequence[str] = ("-m", "pacecar"),
        before: Callable[[], None] | None = None,
        **environ: str,
    ) -> None:
        self.path, self.file, self.log = folder / "s", folder / "pacecar.toml", folder / "log"
        self.file.write_text(text)
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(folder / "n"))
        self.manager.settimeout(120)
        given = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command, "daemon", "--config", str(self.file)], stderr=log, cwd=ROOT,
                env=given | {"NOTIFY_SOCKET": str(folder / "n")} | environ, preexec_fn=before,
            )  # fmt: skip

    def told(self, word: str) -> str:
        """Return the next notice that begins with `word`."""
        while not (notice := self.manager.recv(4096).decode()).startswith(word):
            pass
        return notice

    def logged(self) -> str:
        """Return the log so far."""
        return self.log.read_text(errors="replace")

    @property
    def port(self) -> int:
        """The port at which it serves."""
        until(lambda: "/metrics" in self.logged(), "it serves")
        (port,) = set(re.findall(r"https?://127\.0\.0\.1:(\d+)/metrics", self.logged()))
        return int(port)

    def samples(self) -> list[Sample]:
        """Return what it serves."""
        return scraped(self.port)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the one series with these labels; None if there is none, or several."""
        found = [s.value for s in self.samples() if s.name == name and labels.items() <= s.labels.items()]
        return found[0] if len(found) == 1 else None

    def resident_bytes(self) -> int:
        """Return the process's memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self.manager.close()
