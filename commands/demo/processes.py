"""Starts the demo's processes, a daemon and a torchrun, and ends all of them however the demo ends.

torchrun starts each worker in its own session, so killing torchrun's process group would leave the workers training
forever.  Every process of a run therefore has the run's name in its environment (PACECAR_JOB), and those that still
have it at the end are killed.  If this process itself is killed, the kernel signals daemon and torchrun
(PR_SET_PDEATHSIG), and torchrun ends its workers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pacecar.monitor.ingest.unix_socket import NAME_BYTES_MAX
from pacecar.records import DumpRequest
from pacecar.safe_files import appending

from ..daemon_client import AskError, converse

__all__ = ["Children", "DemoOptions", "LaunchError", "default_world_size", "free_port", "survivors"]

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"

DAEMON_START_SECONDS_MAX = 60.0
"""A daemon starts in well under a second, except on a loaded machine."""

LOG_BYTES_MAX = 256 * 1024
"""Bytes read from the end of a log."""

LOG_LINES_SHOWN = 20
"""Enough for a traceback and its context."""

TERM_SECONDS_MAX = 8.0
"""Time for a process to end after SIGTERM."""

KILL_SECONDS_MAX = 5.0
"""Time for the kernel to end it after SIGKILL."""

DUMP_SECONDS_MAX = 10.0
"""Writing some megabytes takes a second; the demo must not hang on it."""

JOB_DEFAULTS = {
    # A run of two minutes may spend a larger share on trials than one of days (default 0.01).
    "PACECAR_TUNE_EXPLORATION_BUDGET": "0.1",
    # Enough steps before the first trial to measure their spread (default 10).
    "PACECAR_TUNE_WARMUP_STEPS": "50",
    # The gradients of so small a model fill one bucket, so the gain of another size is below a laptop's noise (default:
    # all knobs).
    "PACECAR_TUNE_KNOBS": "micro_batch",
    # Every demo starts with the same settings.
    "PACECAR_TUNE_REMEMBER": "false",
}
"""Settings for a run of minutes; the user's environment takes precedence."""

STOP_FILE = "stop"
"""The training script ends when this file appears in the run folder."""

RECORDER_SECONDS = "3600"
"""Long enough for a whole demo, within the recorder's memory: the report needs the time before the change too."""

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""

_ROOT_CAUSE = re.compile(
    r"^Root Cause \(first observed failure\):$.*?^ +rank +: (?P<rank>\d+).*?^ +exitcode +: (?P<code>-?\d+)",
    re.MULTILINE | re.DOTALL,
)
"""torch/distributed/elastic/multiprocessing/errors/__init__.py, ChildFailedError.format_msg"""


class LaunchError(RuntimeError):
    """The demo cannot start; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The command's options, parsed."""

    seconds: float | None = None
    steps: int | None = None
    world_size: int | None = None
    tune: str = "exact"
    batch: int | None = None
    micro_batch: int | None = None
    port: int = 9850
    run_dir: Path = Path("runs")
    seed: int = 1


def default_world_size() -> int:
    """Return one rank per GPU, or two without GPUs."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def free_port(wanted: int) -> int:
    """Return `wanted` if it is free, else another free port."""
    for port in (wanted, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise LaunchError(f"no port is free on {HOST}")


def survivors(job: str) -> list[psutil.Process]:
    """Return the other processes with `job` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("PACECAR_JOB") == job:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone, a zombie, or another user's
    return found


class Children:
    """The daemon and the job of one run.  It is a context manager: no process outlives it."""

    def __init__(self, folder: Path, options: DemoOptions, *, environ: Mapping[str, str] = os.environ) -> None:
        self.folder = folder
        self.job = folder.name
        self.options = options
        self.port = options.port
        self.world_size = options.world_size
        self._environ = environ
        self._socket_folder: Path | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._job: subprocess.Popen[bytes] | None = None

    @property
    def metrics_url(self) -> str:
        """The daemon's address."""
        return f"http://{HOST}:{self.port}/metrics"

    def start_daemon(self) -> None:
        """Start the daemon and wait until it answers.

        Raises:
            LaunchError: it did not start; the message has the end of its log.
        """
        self.port = free_port(self.options.port)
        command = [sys.executable, "-m", "pacecar", "daemon", "--host", HOST, "--port", str(self.port)]
        command += ["--socket", str(self._socket())]
        recording = {
            "PACECAR_DAEMON_RECORDINGS": str(self.folder.absolute() / "recordings"),
            "PACECAR_DAEMON_RECORDER_SECONDS": RECORDER_SECONDS,
        }
        self._daemon = self._start(command, "daemon.log", {**recording, **self._environment()})
        deadline = time.monotonic() + DAEMON_START_SECONDS_MAX
        while not _answers(f"http://{HOST}:{self.port}/-/healthy"):
            code = self._daemon.poll()
            if code is not None or time.monotonic() > deadline:
                what = "did not answer in time" if code is None else f"ended with exit code {code}"
                raise LaunchError(f"the daemon {what}; its log ends:\n{self.log_tail('daemon.log')}")
            time.sleep(0.05)

    def start_job(self) -> None:
        """Start torchrun with the training script."""
        options = self.options
        self.world_size = options.world_size or default_world_size()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(self.world_size), "-m", "pacecar.commands.demo.train", "--tune", options.tune]
        command += ["--metrics", str(self.folder / "losses.jsonl"), "--seed", str(options.seed)]
        command += ["--stop-file", str(self.folder / STOP_FILE)]
        for name in ("steps", "seconds", "batch", "micro_batch"):
            value = getattr(options, name)
            if value is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        cores = len(os.sched_getaffinity(0))
        environment = self._environment() | {
            "PACECAR_HOOK_SOCKET": str(self._socket()),
            "PACECAR_HOOK_RUN_DIR": str(self.folder),
            "OMP_NUM_THREADS": str(max(1, cores // self.world_size)),
        }
        self._job = self._start(command, "job.log", {**JOB_DEFAULTS, **environment})

    def finish_job(self) -> None:
        """Ask the job to end soon, as if its time were up.  May be called repeatedly."""
        (self.folder / STOP_FILE).touch()

    def job_exit_code(self) -> int | None:
        """Return the job's exit code, or None while it runs."""
        return self._job.poll() if self._job is not None else None

    def daemon_exit_code(self) -> int | None:
        """Return the daemon's exit code, or None while it runs."""
        return None if self._daemon is None else self._daemon.poll()

    def log_tail(self, name: str) -> str:
        """Return the last lines of a log, with torchrun's report of a failure condensed to one line."""
        try:
            with (self.folder / name).open("rb") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_BYTES_MAX))
                text = stream.read().decode("utf-8", errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join([*_before_torchruns_report(text.splitlines())[-LOG_LINES_SHOWN:], *_first_to_fail(text)])

    def keep_recording(self) -> str | None:
        """Have the daemon write a recording of the run; return its path, or None on failure."""
        if self.daemon_exit_code() is not None:
            return None
        try:
            answer = converse(
                str(self._socket()), DumpRequest(serial=1, note="the demo ended"), timeout_seconds=DUMP_SECONDS_MAX
            )
        except AskError as error:
            logger.debug("no recording: %s", error)
            return None
        return answer.detail if answer.state == "done" else None

    def stop_job(self) -> None:
        """End torchrun by SIGTERM and then SIGKILL, then all remaining processes of the run except the daemon."""
        _end(self._job)
        daemon = self._daemon.pid if self._daemon is not None else None
        _end_all(lambda: [process for process in survivors(self.job) if process.pid != daemon])

    def close(self) -> None:
        """End all processes that were started."""
        try:
            self.stop_job()
        finally:
            _end(self._daemon)
            _end_all(lambda: survivors(self.job))
            if self._socket_folder is not None:
                shutil.rmtree(self._socket_folder, ignore_errors=True)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _environment(self) -> dict[str, str]:
        # With the fault handler, a rank that dies in C++ prints its Python stack.
        return {"PYTHONFAULTHANDLER": "1", **self._environ, "PACECAR_JOB": self.job, "PYTHONUNBUFFERED": "1"}

    def _socket(self) -> Path:
        wanted = self.folder.absolute() / "daemon.sock"
        if len(os.fsencode(wanted)) <= NAME_BYTES_MAX:
            return wanted
        if self._socket_folder is None:
            self._socket_folder = Path(tempfile.mkdtemp(prefix="pacecar-"))
        return self._socket_folder / "daemon.sock"

    def _start(self, command: list[str], log: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with os.fdopen(appending(self.folder / log), "wb") as stream:
            # In its own session: Ctrl-C in the terminal reaches only this process, which then ends them in order.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # safe: no thread runs yet
            )


def _before_torchruns_report(lines: list[str]) -> list[str]:
    """Cut off torchrun's forty lines about itself, which hide the cause."""
    for i, line in enumerate(lines):
        if "torch/distributed/elastic/" in line and line[:1] in {"W", "E"}:
            return lines[:i] or lines
    return lines


def _first_to_fail(text: str) -> list[str]:
    """Return one line about the first rank that failed, from torchrun's report; empty without a report."""
    found = _ROOT_CAUSE.search(text)
    if found is None:
        return []
    rank, code = found["rank"], int(found["code"])
    how = f"was ended by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"ended with {code}"
    return [f"rank {rank} failed first: it {how}"]


def _die_with_parent() -> None:
    # Best effort: without prctl, the demo still ends its processes itself.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True  # an HTTP error is an answer
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """Send SIGTERM and wait; if the process is still there, send SIGKILL and wait."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(TERM_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILL_SECONDS_MAX)


def _end_all(find: Callable[[], list[psutil.Process]]) -> None:
    left = find()
    if not left:
        return
    logger.debug("ending %d processes that outlived their launcher", len(left))
    for process in left:
        _signal(process, signal.SIGTERM)
    _, left = psutil.wait_procs(left, timeout=2.0)
    for process in left:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(left, timeout=KILL_SECONDS_MAX)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
