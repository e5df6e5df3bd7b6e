"""Run python programs in forks of a process that has torch loaded: `import torch` takes 2.6 s of CPU, a fork 0.02.

`forking_python()` returns the path of a program to be used in place of `sys.executable`.  It asks a server, which it
starts when it is first needed, to fork; the child runs the script, `-m MODULE` or `-c CODE` as python would, with the
asker's arguments, environment, folder, open files and ignored signals, and ends as python does: threads, then atexit.
Signals that the asker gets are passed on, and it ends with the child's exit code or signal.  `sys.executable` in the
child is the same program, so the ranks of torchrun and of multiprocessing's spawn are forked, too.

What differs from a fresh python: modules that the server loaded are there (a script's `import torch` finds them), the
process id is not that of the asker, the parent is the server, the process group is the child's own (what is sent to the
asker's group reaches the child by the asker, and what the child has started by other means not at all), SIGSTOP reaches
the asker alone, namespaces, limits and user are the server's, and modules are not freed at the end unless
FORKED_FINALIZES is set.  `tests/kit/test_forking_python.py` compares the two.
Where one of these is what a test is about, it starts `sys.executable`.  Options and variables that python or torch read
at their own start make the asker start the real python.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
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
    "pacecar.commands.main", "pacecar.commands.report.run", "pacecar.dashboards.push",
    "click", "msgspec", "http.client", "http.server", "urllib.request", "ssl", "subprocess", "importlib.resources",
)  # fmt: skip
"""What `pacecar report`, `pacecar dashboards` and the like load: no torch."""


@cache
def forking_python(python: str = sys.executable, modules: tuple[str, ...] = TORCH) -> str:
    """Return the path of a program that runs what `python` would, in a process that has `modules` loaded.

    The server lives as long as this process.
    """
    folder = Path(tempfile.mkdtemp(prefix="forking-"))  # short: a socket's path may have 107 bytes
    socket, program = folder / "socket", folder / "python"
    head = f"#!{sys.executable} -IS\nSOCKET, PYTHON = {str(socket)!r}, {python!r}\n"
    program.write_text(head + CLIENT.read_text())
    program.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PACECAR_RUN")}
    server = subprocess.Popen(
        [python, str(SERVER), str(socket), str(program), *modules],
        env=environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # closed when this process ends, whatever its end
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the tests
    )
    assert server.stdin is not None
    assert server.stdout is not None
    said = server.stdout.readline()
    if said != b"ready\n":
        server.kill()
        server.stdin.close()
        server.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(f"the fork server did not start: {said!r}, exit code {server.wait()}")

    def end(owner: int = os.getpid()) -> None:
        if os.getpid() != owner:  # a child that was forked by a test
            return
        with contextlib.suppress(OSError):
            server.stdin.close()  # type: ignore[union-attr]
        server.wait(30)
        server.stdout.close()  # type: ignore[union-attr]
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return str(program)
