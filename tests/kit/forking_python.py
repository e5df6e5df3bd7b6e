"""Run python programs in forks of a process that has torch loaded: `import torch` takes 2.6 s of CPU, a fork 0.02.

`forking_python()` returns the path of a program to be used in place of `sys.executable`.  It asks a server, which it
starts when it is first needed, to fork; the child runs the script, `-m MODULE` or `-c CODE` as python would, with the
asker's arguments, environment, folder, open files and ignored signals, and ends as python does: threads, then atexit.
Signals that the asker gets are passed on, and it ends with the child's exit code or signal.  `sys.executable` in the
child is the same program, so the ranks of torchrun and of multiprocessing's spawn are forked, too.

What differs from a fresh python: modules that the server loaded are there (a script's `import torch` finds them), the
process id is not that of the asker, the parent is the server, the process group is the child's own (what is sent to the
asker's group reaches the child by the asker, and what the child has started by other means not at all), SIGSTOP reaches
the asker alone, limits and user are the server's, and so are namespaces but those of network and mounts, and modules
are not freed at the end unless FORKED_FINALIZES is set. `tests/kit/test_forking_python.py` compares the two.
Where one of these is what a test is about, it starts `sys.executable`.  Options and variables that python or torch read
at their own start make the asker start the real python.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["COMMAND", "TORCH", "forking_python"]

SERVER = Path(__file__).with_name("fork_server.py")
CLIENT = Path(__file__).with_name("fork_client.py")

TORCH = (
    "torch", "torch._dynamo", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.run",
    "torch.nn.parallel.distributed", "torch.utils.data", "pacecar.job.attach", "pacecar.job.tuner_wiring",
)  # fmt: skip
"""What a training script with pacecar attached has loaded after its first step."""

COMMAND = (
    "pacecar.commands.main", "pacecar.commands.report.run_report", "pacecar.dashboards.push",
    "click", "msgspec", "http.client", "http.server", "urllib.request", "ssl", "subprocess", "importlib.resources",
)  # fmt: skip
"""What `pacecar report`, `pacecar dashboards` and the like load: no torch."""


@cache
def forking_python(python: str = sys.executable, modules: tuple[str, ...] = TORCH) -> str:
    """Return the path of a program that runs what `python` would, in a process that has `modules` loaded.

    The processes among which one run of pytest shares its tests have one server: it lives as long as one of those that
    asked for it.  Raises RuntimeError with the server's exit code where it does not start.
    """
    folder = _shared_folder() / hashlib.sha256("\n".join((python, *modules)).encode()).hexdigest()[:16]
    socket, program, life = folder / "socket", folder / "python", folder / "life"
    with _locked(folder):
        owned = _held(life)
        if owned is None:
            for old in (socket, life):
                old.unlink(missing_ok=True)
            head = f"#!{sys.executable} -IS\nSOCKET, PYTHON = {str(socket)!r}, {python!r}\n"
            program.write_text(head + CLIENT.read_text())
            program.chmod(0o755)
            owned = _started([python, str(SERVER), str(socket), str(program), *modules], life)
    atexit.register(os.close, owned)
    return str(program)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and hold its lock; a server that ends removes both under the same lock."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / "lock", "w")  # noqa: SIM115  it is held by the caller
        except FileNotFoundError:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                is_there = os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / "lock"))
            except FileNotFoundError:
                is_there = False
            if is_there:
                yield
                return


@cache
def _shared_folder() -> Path:
    """The folder of this run of pytest, in which each server removes what is its own, and the last one all.

    The path is short: a socket's may have 107 bytes.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return Path(tempfile.mkdtemp(prefix="forking-"))
    folder = Path(tempfile.gettempdir()) / f"forking-{run[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _held(life: Path) -> int | None:
    """Return the open end of a pipe which keeps the server alive, None where there is none."""
    try:
        return os.open(life, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nobody made the pipe (ENOENT), or nobody reads it (ENXIO)
        return None


def _started(command: list[str], life: Path) -> int:
    """Start the server; returns the open end of the pipe that keeps it alive."""
    os.mkfifo(life, 0o600)
    reading = os.open(life, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    owned = _held(life)
    assert owned is not None  # it is read here
    said, says = os.pipe2(os.O_CLOEXEC)
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PACECAR_RUN")}
    # No Popen, which would want to be waited for: the server may outlive this process.
    pid = os.posix_spawn(
        command[0],
        command,
        environ | {"OMP_NUM_THREADS": "1"},
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_DUP2, says, 1)],
        setsid=True,  # Ctrl-C is for the tests
    )
    os.close(reading)
    os.close(says)
    with open(said, "rb") as answer:
        line = answer.readline()
    if line != b"ready\n":
        os.close(owned)
        if line:  # a module that prints: the server would wait for the lock that is held here
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        shutil.rmtree(life.parent, ignore_errors=True)
        raise RuntimeError(f"the fork server did not start: {line!r}, exit code {os.waitstatus_to_exitcode(status)}")
    return owned
