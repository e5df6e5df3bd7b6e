"""Fork a process for each that asks, from one that has modules loaded: `fork_server.py SOCKET PROGRAM MODULE...`.

Says "ready" on stdout and serves until nobody holds the other end of its stdin, the pipe `life` in the socket's folder;
then it removes the folder and kills what still runs.  `forking_python` says what
is asked and why.  Nothing here starts a thread, so what is forked is as good as new.

A child ends without python's finalization, which frees all modules and takes ten times as long as all the rest; where
FORKED_FINALIZES is set it ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import importlib.machinery
import io
import marshal
import os
import random
import select
import selectors
import signal
import site
import socket
import struct
import sys
import threading
import types
from typing import Any, NoReturn

FILES_MAX = 200  # the kernel passes at most 253 at once
HIGH = 700  # above what a child is given


class Asked:
    """One that asked, and the child that was forked for it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return what was asked, and the files that came with it."""
    head, files, _, _ = socket.recv_fds(connection, 4, FILES_MAX)
    size = int.from_bytes(head, "big")
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("half of a request")
        data += more
    return marshal.loads(data), files


def serve(listener: socket.socket, folder: str) -> tuple[Any, list[int]] | None:
    """Return None at the end, in the server; and in each forked child what was asked of it."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, "new")
    selector.register(0, selectors.EVENT_READ, "end")
    running: set[Asked] = set()
    while True:
        for key, _ in selector.select():
            if key.data == "end":
                if not is_over(folder):
                    continue
                for asked in running:
                    os.kill(asked.pid, signal.SIGKILL)
                    os.waitpid(asked.pid, 0)
                return None
            if key.data == "new":
                connection, _ = listener.accept()
                try:
                    request, files = receive(connection)
                except (OSError, ValueError, EOFError, TypeError):
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    enter_namespaces(connection)
                    listener.close()
                    connection.close()
                    for asked in running:
                        asked.connection.close()
                        os.close(asked.pidfd)
                    selector.close()
                    return request, files
                for file in files:
                    os.close(file)
                asked = Asked(connection, pid)
                running.add(asked)
                selector.register(connection, selectors.EVENT_READ, asked)
                selector.register(asked.pidfd, selectors.EVENT_READ, asked)
                continue
            asked = key.data
            if asked not in running:
                continue
            if key.fd == asked.pidfd:
                _, status = os.waitpid(asked.pid, 0)
                with contextlib.suppress(OSError):  # it is gone
                    asked.connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
                forget(selector, running, asked)
                continue
            try:
                passed_on = asked.connection.recv(64)
            except OSError:
                passed_on = b""
            for number in passed_on:
                os.kill(asked.pid, number)
            if not passed_on:  # it was killed
                os.kill(asked.pid, signal.SIGKILL)
                os.waitpid(asked.pid, 0)
                forget(selector, running, asked)


def enter_namespaces(connection: socket.socket) -> None:
    """Take over the asker's network and mounts where they are others, as after `ip netns exec`."""
    asker, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    with contextlib.ExitStack() as opened:
        for kind in ("net", "mnt"):
            its = opened.enter_context(open(f"/proc/{asker}/ns/{kind}", "rb"))
            if os.fstat(its.fileno()).st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino:
                continue
            if ctypes.CDLL(None, use_errno=True).setns(its.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of {asker}")


def forget(selector: selectors.BaseSelector, running: set[Asked], asked: Asked) -> None:
    """Let go of a child that has ended."""
    selector.unregister(asked.connection)
    selector.unregister(asked.pidfd)
    asked.connection.close()
    os.close(asked.pidfd)
    running.discard(asked)


def is_over(folder: str) -> bool:
    """Return whether nobody holds the pipe any more; then the server's folder, and what is in it, is removed.

    Whoever wants the server opens the pipe under the lock of the folder, so nobody can come once this is true: who
    waits for the lock finds the folder gone, and starts a server.
    """
    with contextlib.suppress(OSError), open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if select.select([0], [], [], 0)[0] == []:  # somebody came after the last had gone
            return False
        if os.path.samestat(os.fstat(0), os.stat(f"{folder}/life")):  # no other server has taken this one's place
            for name in os.listdir(folder):
                os.unlink(f"{folder}/{name}")
            os.rmdir(folder)
            os.rmdir(os.path.dirname(folder))  # fails where another server is in it
    return True


def become(request: Any, files: list[int], program: str) -> tuple[list[str], bool]:
    """Take over the asker's files, environment, folder and signals; returns the arguments."""
    arguments, environ, folder, umask, is_unbuffered, numbers, ignored, is_leader = request
    if is_leader:
        os.setsid()
    else:
        os.setpgid(0, 0)  # one that signals its whole group would end the server
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH) for file in files]
    os.closerange(3, HIGH)
    for standard in range(3):
        if standard not in numbers:
            os.close(standard)
    for copy, number in zip(high, numbers, strict=True):
        os.dup2(copy, number, inheritable=True)
        os.close(copy)
    os.environ.clear()
    os.environ.update(environ)
    os.umask(umask)
    os.chdir(folder)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(1, 32):
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif number != signal.SIGPIPE and signal.getsignal(number) is signal.SIG_IGN:  # ignored where the server began
            signal.signal(number, signal.SIG_DFL)
    sys.executable = program
    sys.orig_argv = [program, *arguments]
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    multiprocessing = sys.modules.get("multiprocessing.spawn")
    if multiprocessing is not None:
        multiprocessing.set_executable(program)
    streams(is_unbuffered=is_unbuffered)
    if environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    return arguments


def streams(*, is_unbuffered: bool) -> None:
    """Open stdin, stdout and stderr as python does at its start."""
    for name, number, mode, errors in (
        ("stdin", 0, "r", "strict"),
        ("stdout", 1, "w", "strict"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        try:
            raw = io.FileIO(number, mode, closefd=False)
        except OSError:
            setattr(sys, name, None)
            continue
        is_line = number == 2 or raw.isatty()
        if mode == "r":
            stream = io.TextIOWrapper(io.BufferedReader(raw), "utf-8", errors)
        elif is_unbuffered:
            stream = io.TextIOWrapper(raw, "utf-8", errors, write_through=True)  # type: ignore[type-var]
        else:
            stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors, line_buffering=is_line)
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(arguments: list[str], base: list[str]) -> int:
    """Run a script, `-m MODULE` or `-c CODE` as `__main__`; returns the exit code, or less than 0 for SIGINT's end."""
    extra = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*extra, *base]
    importlib.invalidate_caches()
    main = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    try:
        if extra:
            sys.modules.pop("sitecustomize", None)
            site.execsitecustomize()
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, "")
            exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        elif arguments[0] == "-m":
            sys.argv = ["-m", *arguments[2:]]
            sys.path.insert(0, os.getcwd())
            sys.modules.pop(arguments[1], None)  # else runpy warns that it is there already
            importlib.import_module("runpy")._run_module_as_main(arguments[1])
        else:
            script = os.path.join(os.getcwd(), arguments[0])
            sys.argv = list(arguments)
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            main.__file__ = script
            main.__cached__ = None  # type: ignore[attr-defined]
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
            with open(script, "rb") as file:
                code = compile(file.read(), script, "exec", dont_inherit=True)
            exec(code, main.__dict__)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            return ended.code & 0xFF
        if ended.code is not None:
            sys.stderr.write(f"{ended.code}\n")
            return 1
        return 0
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -2 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> NoReturn:
    """End as python does, but for freeing what the modules hold: that is 0.3 s of CPU with torch, and this 0.03."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    except BaseException:  # noqa: BLE001  as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    atexit._run_exitfuncs()
    if not flushed():
        code = 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def flushed() -> bool:
    """Write what stdout and stderr still hold; returns whether it could be written, as Py_FinalizeEx judges that."""
    is_written = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None or getattr(stream, "closed", False):
            continue
        try:
            stream.flush()
        except BaseException as error:  # noqa: BLE001  as the interpreter does
            if stream is sys.stdout:
                with contextlib.suppress(Exception):
                    sys.stderr.write(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
            is_written = False
    return is_written


if __name__ == "__main__":
    _, path, program, *modules = sys.argv
    base = sys.path[1:]
    for name in modules:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    gc.collect()
    gc.disable()
    gc.freeze()  # a child's collector would touch, and so copy, every page
    request = serve(listener, os.path.dirname(path))
    if request is not None:
        arguments = become(*request, program)
        gc.enable()
        code = run(arguments, base)
        del request, arguments
        if os.environ.get("FORKED_FINALIZES") and code >= 0:
            sys.exit(code)
        end(code)
