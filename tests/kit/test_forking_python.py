"""A forked python does what a fresh one does: each program here runs in both, and both must say and end the same."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.forking_python import forking_python
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 120

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

PRELOADED = ("json.tool", "multiprocessing.spawn", "runpy", "subprocess", "logging", "tempfile")
"""Modules that cost nothing: what is tested is the fork, not torch."""


class Ran(NamedTuple):
    """How a program ended, and what it said."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def forked() -> str:
    return forking_python(sys.executable, PRELOADED)


def run(python: str, *arguments: str | Path, said: str = "", folder: Path | None = None, **environ: str) -> Ran:
    return call(python, [python, *map(str, arguments)], said, folder, **environ)


def call(python: str, command: list[str], said: str = "", folder: Path | None = None, **environ: str) -> Ran:
    """Run the command; what it says is told without addresses, and without which python it was."""
    done = subprocess.run(
        command, input=said, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, cwd=folder,
        env=ENVIRON | environ,
    )  # fmt: skip
    texts = (re.sub("0x[0-9a-f]+", "0x", text) for text in (done.stdout, done.stderr))
    return Ran(done.returncode, *(text.replace(python, "PYTHON").replace(sys.executable, "PYTHON") for text in texts))


def run_same(forked: str, *arguments: str | Path, said: str = "", folder: Path | None = None, **environ: str) -> Ran:
    """Run the program in a fresh python and in a forked one; fails where they differ."""
    fresh = run(sys.executable, *arguments, said=said, folder=folder, **environ)
    assert run(forked, *arguments, said=said, folder=folder, **environ) == fresh
    return fresh


def shell_same(forked: str, line: str, *arguments: str, folder: Path | None = None) -> Ran:
    """Run a line of a shell in which "$0" is a fresh python, and then the forked one; fails where they differ."""
    fresh, other = (call(p, ["sh", "-c", line, p, *arguments], folder=folder) for p in (sys.executable, forked))
    assert other == fresh
    return fresh


def is_gone(pid: int) -> bool:
    """Return whether no such process runs; what has ended and was not yet waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_it_is_a_fork_that_has_the_modules_and_no_other(forked: str) -> None:
    loaded = "import sys, os; print('json.tool' in sys.modules, 'torch' in sys.modules, os.getppid())"
    has, has_torch, parent = run(forked, "-c", loaded).out.split()
    assert (has, has_torch) == ("True", "False")
    assert "fork_server.py" in Path(f"/proc/{parent}/cmdline").read_text()
    assert run(sys.executable, "-c", loaded).out.split()[0] == "False"


ENDS = {
    "well": ("", 0),
    "exit code of more than a byte": ("sys.exit(256 + 7)", 7),
    "exit without a code": ("sys.exit()", 0),
    "exit with a sentence": ("sys.exit('in words')", 1),
    "exception with a cause": ("try: 1 / 0\nexcept ZeroDivisionError as e: raise ValueError('later') from e", 1),
    "exception from a function": ("def f(): raise ValueError('in f')\nf()", 1),
    "Ctrl-C, not caught": ("raise KeyboardInterrupt", -signal.SIGINT),
    "SIGINT to itself": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "os._exit": ("sys.stdout.flush(); os._exit(4)", 4),
    "kill": ("sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "own excepthook": ("sys.excepthook = lambda *e: print('hook', e[0].__name__); 1 / 0", 1),
    "exit with a thread that is waited for": (
        "threading.Thread(target=lambda: (time.sleep(0.05), print('waited'))).start(); sys.exit(5)",
        5,
    ),
    "atexit, in its order and after threads": (
        "atexit.register(print, 'first'); atexit.register(print, 'second')\n"
        "threading.Timer(0.05, print, ('thread',)).start(); 1 / 0",
        1,
    ),
    "atexit that fails": ("atexit.register(lambda: 1 / 0); sys.exit(6)", 6),
    "executor that works on": (
        "import concurrent.futures as c\np = c.ThreadPoolExecutor(1); p.submit(lambda: (time.sleep(0.05), print('p')))",
        0,
    ),
    "no stdout at the end": ("sys.stdout.close()", 0),
}

HEAD = "import atexit, os, signal, sys, threading, time\nprint('begins')\n"


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_with_the_same_code_and_the_same_words(forked: str, tmp_path: Path, end: str) -> None:
    text, code = ENDS[end]
    script = tmp_path / "script.py"
    script.write_text(HEAD + text + "\n")
    done = run_same(forked, script)
    assert done.code == code
    assert done.out.startswith("begins\n")


@pytest.mark.slow
def test_code_that_is_no_python_fails_in_the_same_words(forked: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('a'\n1 +* 2\n")
    for arguments, code in (((script,), 1), (("-c", "1 +* 2"), 1), (("-m", "no_such_module"), 1), (("no.py",), 2)):
        assert run_same(forked, *arguments, folder=tmp_path).code == code


ASKS = """
import os, signal, sys
__main__ = sys.modules["__main__"]
print(sys.argv, __name__, getattr(__main__, "__file__", None), sys.path[0], os.getcwd())
print(sorted(os.environ.items()))
print(oct(os.umask(0)), [n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN])
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(sys.stdin.read(), sys.stdin.encoding, sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through)
print("to stderr", sys.stderr.errors, sys.stderr.line_buffering, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_script_a_module_and_code_see_the_same_world(forked: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "inner" / "__init__.py").write_text("print('package', __name__)\n")
    (tmp_path / "inner" / "__main__.py").write_text(ASKS)
    for arguments in (
        ("asks.py", "-x", "", "two words"),
        (tmp_path / "asks.py",),
        ("-u", "./inner/../asks.py"),
        ("-m", "asks", "-m"),
        ("-m", "inner", "one"),
        ("-c", ASKS, "one", "-c"),
    ):
        done = run_same(forked, *arguments, said="what was said: ä", folder=tmp_path, OWN="is there")
        assert done.code == 0, done.err
        assert "what was said: ä" in done.out
        assert "('OWN', 'is there')" in done.out
    (link := tmp_path / "link.py").symlink_to(tmp_path / "inner" / "__main__.py")
    assert str(tmp_path / "inner") in run_same(forked, link).out, "its own folder is the first of the path"
    said = run_same(forked, "-m", "json.tool", said='{"a": 1}')
    assert said.out == '{\n    "a": 1\n}\n', "a module that the server has runs all the same"


@pytest.mark.slow
def test_streams_that_are_unbuffered_closed_full_or_a_terminal(forked: str) -> None:
    code = "import os, sys; sys.stdout.write('a'); os.write(1, b'b'); print(sys.stdin is None)"
    assert run_same(forked, "-u", "-c", code).out == "abFalse\n"
    assert run_same(forked, "-c", code, PYTHONUNBUFFERED="1").out == "abFalse\n"
    assert shell_same(forked, '"$0" -c "$1" <&-', code).out == "baTrue\n"
    assert shell_same(forked, '"$0" -c "print(1)" >/dev/full 2>/dev/null').code == 120
    code = "import os, sys; print(sys.stdout.isatty(), sys.stdout.line_buffering, os.get_terminal_size(1).columns)"
    said = []
    for python in (sys.executable, forked):
        here, there = pty.openpty()
        subprocess.run([python, "-c", code], stdin=there, stdout=there, stderr=there, check=True, env=ENVIRON)
        said.append(os.read(here, 1000))
        os.close(here)
        os.close(there)
    assert said[0] == said[1]
    assert b"True True" in said[0]


@pytest.fixture
def signal_defaults() -> Iterator[None]:
    """What nohup and a shell's `&` have ignored is ignored by every process below."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_defaults")
def test_ignored_signals_umask_and_inherited_files_are_the_askers(forked: str, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS + "print(os.read(7, 10), os.get_inheritable(7))\n")
    (tmp_path / "file").write_text("of a file")
    done = shell_same(forked, 'trap "" HUP USR1; umask 027; exec "$0" "$@" 7<file', "asks.py", folder=tmp_path)
    assert done.code == 0, done.err
    assert "b'of a file' True" in done.out
    assert "0o27 [1, 10, 13, 25]" in done.out


@pytest.mark.slow
def test_what_was_ignored_where_the_server_began_is_not_ignored_by_a_child() -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as in a shell's background
    try:
        python = forking_python(sys.executable, ("json", "json.tool"))
        quits = "import os, signal; os.kill(os.getpid(), signal.SIGQUIT); print('ignored')"
        assert run(python, "-c", quits).out == "ignored\n"
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        assert run(python, "-c", quits).code == -signal.SIGQUIT
    finally:
        signal.signal(signal.SIGQUIT, before)


WAITS = """
import os, signal, sys, time
def handle(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(9)
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), handle)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.01)
"""


def start(python: str, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Start WAITS; returns the process that asked, and the id of the one that waits."""
    process = subprocess.Popen(
        [python, "-c", WAITS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return process, int(heard(process))


def heard(process: subprocess.Popen[str]) -> str:
    """Return the next line that the process says."""
    return process.stdout.readline()


def assert_terminates(process: subprocess.Popen[str]) -> None:
    """Let its handler of SIGTERM end it."""
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=SECONDS_MAX)[0] == "got SIGTERM\n"
    assert process.returncode == 9


def test_a_signal_that_the_asker_ignores_reaches_a_child_that_wants_it(forked: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process, _ = start(forked, "SIGHUP", "SIGTERM")
        indifferent, _ = start(forked, "SIGTERM")
    finally:
        signal.signal(signal.SIGHUP, before)
    for asker in (process, indifferent):
        asker.send_signal(signal.SIGHUP)
    assert heard(process) == "got SIGHUP\n"  # or the next would come amid this one's handler
    assert_terminates(process)
    assert_terminates(indifferent)


@pytest.mark.slow
@pytest.mark.usefixtures("signal_defaults")
def test_a_signal_that_comes_as_soon_as_the_child_speaks_is_passed_on(forked: str, tmp_path: Path) -> None:
    """On a busy machine the child may be heard of before the asker goes on from asking."""
    text = Path(forked).read_text()
    asked = "sock.sendall(asked)\n"
    assert text.count(asked) == 1
    slow = tmp_path / "python"
    slow.write_text(text.replace(asked, asked + "import time; time.sleep(0.5)\n"))
    slow.chmod(0o755)
    assert_terminates(start(str(slow), "SIGTERM")[0])


@pytest.mark.slow
@pytest.mark.usefixtures("signal_defaults")
def test_signals_to_the_asker_reach_the_child_and_end_both_alike(forked: str) -> None:
    names = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGTERM")
    process, child = start(forked, *names)
    assert child != process.pid
    for name in names[:-1]:
        process.send_signal(getattr(signal, name))
        assert heard(process) == f"got {name}\n"
    assert_terminates(process)
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGINT"):
        ends = []
        for python in (sys.executable, forked):
            process, _ = start(python)
            process.send_signal(getattr(signal, name))
            errors = process.communicate(timeout=SECONDS_MAX)[1]
            ends.append((process.returncode, [line for line in errors.splitlines() if not line.startswith("  ")]))
        assert ends[0] == ends[1]
        assert ends[0][0] == -getattr(signal, name)


def test_who_kills_the_asker_kills_the_child_and_the_askers_own_end_is_that_of_a_child_that_was_killed(
    forked: str,
) -> None:
    (process, child), (other, its_child) = start(forked), start(forked)
    process.kill()
    process.communicate()
    until(lambda: is_gone(child), "the child runs on")
    assert not is_gone(its_child)
    os.kill(its_child, signal.SIGKILL)
    other.communicate(timeout=SECONDS_MAX)
    assert other.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_child_has_a_process_group_of_its_own_so_that_it_cannot_end_the_server(forked: str) -> None:
    groups = "import os; print(os.getpgid(0) == os.getpid(), os.getpgid(0) == os.getpgid(os.getppid()))"
    assert run(forked, "-c", groups).out == "True False\n"
    leads = "import os; print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())"
    assert shell_same(forked, 'setsid --wait "$0" -c "$1"', leads).out == "True True\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
def test_a_child_is_in_the_network_and_mounts_of_its_asker(forked: str) -> None:
    files = "/proc/self/ns/net", "/proc/self/ns/mnt"
    code = f"import os; print(*map(os.readlink, {files}), sep='\\n')"
    command = f'readlink {" ".join(files)} && exec "{forked}" -c "{code}"'
    done = call(forked, ["unshare", "--net", "--mount", "sh", "-c", command])
    asker, child = done.out.split()[:2], done.out.split()[2:]
    assert child == asker
    assert not {os.readlink(file) for file in files} & {*child}


@pytest.mark.slow
def test_a_child_holds_nothing_of_another(forked: str) -> None:
    others = [start(forked)[0] for _ in range(3)]
    run_same(forked, "-c", "import os; print(len(os.listdir('/proc/self/fd')))")
    for process in others:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_output_of_a_descendant_that_lives_on_is_waited_for_as_ever(forked: str) -> None:
    """Who reads a pipe to its end waits for all that hold it: a child of the child, too, but not the server."""
    code = "import subprocess; subprocess.Popen(['sh', '-c', 'sleep 0.3; echo late'])"
    assert run_same(forked, "-c", code).out == "late\n"


SPAWNS = """
import multiprocessing, os, pickle, sys

class Thing:
    def __eq__(self, other): return isinstance(other, Thing)

def work(queue, thing):
    queue.put((type(thing).__module__, os.getpid(), sys.executable, multiprocessing.parent_process().pid))

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing())) == Thing()
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue, Thing()))
        process.start()
        module, pid, executable, parent = queue.get()
        process.join()
        assert parent == os.getpid() and pid != parent and executable == sys.executable
        print(method, module, process.exitcode, flush=True)
    import subprocess
    again = subprocess.run([sys.executable, "-c", "import os, sys; print('again', 'json.tool' in sys.modules)"])
"""


@pytest.mark.slow
def test_main_can_be_pickled_and_what_it_spawns_is_forked_too(forked: str, tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    said = "spawn __mp_main__ 0\nfork __main__ 0\nforkserver __mp_main__ 0\nagain "
    assert run(sys.executable, script) == Ran(0, said + "False\n", "")
    assert run(forked, script) == Ran(0, said + "True\n", "")


@pytest.mark.slow
def test_options_and_variables_that_python_reads_at_its_start_start_a_fresh_one(forked: str) -> None:
    shows = "import sys, warnings; print('json.tool' in sys.modules, sys.flags.optimize, sys.flags.dev_mode)"
    for arguments in (("-O",), ("-X", "dev"), ("-W", "error"), ("-I",), ("-E", "-s")):
        assert run_same(forked, *arguments, "-c", shows).out.startswith("False ")
    for name in ("PYTHONDEVMODE", "PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONOPTIMIZE"):
        value = "error" if name == "PYTHONWARNINGS" else "1"
        assert run_same(forked, "-c", shows, **{name: value}).out.startswith("False ")
    assert run_same(forked, "-c", "print('a')", PYTHONIOENCODING="latin-1:replace", PYTHONUTF8="0").code == 0
    assert run_same(forked, "-", said="print('from stdin')").out == "from stdin\n"
    assert run_same(forked, "-V").out.startswith("Python 3")


@pytest.mark.slow
def test_a_crash_shows_its_traceback_where_that_is_asked_for(forked: str) -> None:
    """The demo asks its processes for it: they would all start the real python."""
    code = "import os, sys; print('json.tool' in sys.modules, flush=True); os.abort()"
    crashed, fresh = (run(python, "-c", code, PYTHONFAULTHANDLER="1") for python in (forked, sys.executable))
    assert (crashed.code, crashed.out) == (fresh.code, "True\n")
    for one in (crashed, fresh):
        assert one.err.startswith("Fatal Python error: Aborted\n")
        assert 'File "<string>", line 1 in <module>' in one.err
    assert run(forked, "-c", "import faulthandler; print(faulthandler.is_enabled())").out == "False\n"


@pytest.mark.slow
def test_the_paths_own_sitecustomize_runs_before_the_script_and_its_failure_is_said(
    forked: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.marked = sys.argv if hasattr(sys, 'argv') else None\n")
    (tmp_path / "beside.py").write_text("WHERE = __file__\n")
    code = "import sys, beside; print(sys.marked is not None, beside.WHERE, sys.modules['sitecustomize'].__file__)"
    assert str(tmp_path / "beside.py") in run_same(forked, "-c", code, PYTHONPATH=str(tmp_path)).out
    for text in ("raise ValueError('theirs')\n", "import no_such_module\n", "1 +* 1\n"):
        (tmp_path / "sitecustomize.py").write_text(text)
        done = run_same(forked, "-c", "print('runs')", PYTHONPATH=str(tmp_path))
        assert (done.code, done.out) == (0, "runs\n")
        assert done.err.startswith("Error in sitecustomize")


@pytest.mark.slow
def test_random_numbers_are_new_in_each_child_and_sources_can_be_read(forked: str, tmp_path: Path) -> None:
    drawn = [run(forked, "-c", "import random; print(random.random())").out for _ in range(2)]
    assert drawn[0] != drawn[1]
    script = tmp_path / "script.py"
    script.write_text("import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getfile(f))\n")
    assert run_same(forked, script).code == 0


@pytest.mark.slow
def test_whole_finalization_where_it_is_asked_for(forked: str) -> None:
    code = "import sys\nclass Last:\n    def __del__(self): print('freed', flush=True)\nlast = Last(); sys.exit(2)"
    assert run(forked, "-c", code).out == ""
    assert run_same(forked, "-c", code, FORKED_FINALIZES="1") == Ran(2, "freed\n", "")


USES = """
import os, subprocess, sys
from tests.kit.forking_python import forking_python
python = forking_python(sys.executable, ("json",))
ask = [python, "-c", "import os; print(os.getppid())"]
for line in sys.stdin:
    print(python, subprocess.run(ask, stdout=subprocess.PIPE, text=True).stdout.strip(), flush=True)
"""
"""Asks for a server, and says, for each line it is told, where that is and its process id."""


@pytest.fixture
def used() -> Iterator[dict[str, str]]:
    """The environment of a process that asks for a server, whose socket needs a folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="short-") as folder:
        yield {"PYTHONPATH": str(ROOT), "TMPDIR": folder}


def use(environ: dict[str, str]) -> subprocess.Popen[str]:
    """Start USES."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", USES], text=True, env=ENVIRON | environ, **pipes)  # type: ignore[call-overload, no-any-return]


def ask(user: subprocess.Popen[str]) -> str:
    """Return what USES says to a line."""
    user.stdin.write("\n")
    user.stdin.flush()
    return heard(user)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "1 / 0"])
def test_the_server_and_its_children_end_with_who_started_it(used: dict[str, str], end: str) -> None:
    waits = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(1000)"
    begin = f"waits = subprocess.Popen([python, '-c', {waits!r}], stdout=subprocess.PIPE)\n"
    says = f"print(os.path.dirname(python), waits.stdout.readline().decode(), flush=True)\n{end}\n"
    folder, child, server = run(sys.executable, "-c", USES + begin + says, **used).out.split()
    until(lambda: is_gone(int(child)) and is_gone(int(server)), "they run on")
    assert not Path(folder).parent.exists()


@pytest.mark.slow
def test_processes_of_one_run_have_one_server_until_the_last_of_them_ends(used: dict[str, str]) -> None:
    users = [use(used | {"PYTEST_XDIST_TESTRUNUID": "0123456789abcdef0123"}) for _ in range(3)]
    said = [ask(user) for user in users]
    said += [user.communicate("\n")[0] for user in users]  # those before it have ended
    assert len(set(said)) == 1
    program, server = said[0].split()
    until(lambda: is_gone(int(server)), "it runs on")
    assert not Path(program).parent.parent.exists()


@pytest.mark.slow
def test_a_server_that_is_asked_for_while_it_ends_goes_on(used: dict[str, str]) -> None:
    first = use(used)
    program, server = ask(first).split()
    folder = Path(program).parent
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first.communicate()
        waits = re.compile(rf"-> FLOCK .* {server} ")
        until(lambda: waits.search(Path("/proc/locks").read_text()) is not None, "the server does not end")
        life = os.open(folder / "life", os.O_WRONLY | os.O_NONBLOCK)
    assert run(program, "-c", "import os; print(os.getppid())").out.strip() == server
    os.close(life)
    until(lambda: is_gone(int(server)), "it runs on")
    assert not folder.parent.exists()


@pytest.mark.slow
def test_a_server_that_cannot_load_its_modules_or_whose_modules_print_is_refused(used: dict[str, str]) -> None:
    code = "from tests.kit.forking_python import forking_python\nforking_python(modules=('this',))"
    done = run(sys.executable, "-c", code, **used)
    assert "RuntimeError: the fork server did not start: b'The Zen of Python" in done.err
    with pytest.raises(RuntimeError, match="the fork server did not start: b'', exit code 1"):
        forking_python(sys.executable, ("no_such_module",))


RANK = """
import os, sys, torch, torch.distributed as dist
assert "pacecar.job.tuner_wiring" in sys.modules
dist.init_process_group("gloo")
total = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(total)
os.write(1, f"{total.tolist()} {torch.get_num_threads()}\\n".encode())  # print may write a line in parts
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_and_its_ranks_are_forked_with_torch_loaded(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    done = run(forking_python(), *launch, "--rdzv-endpoint", "127.0.0.1:0", script, OMP_NUM_THREADS="2")
    assert (done.code, done.out) == (0, "[3.0, 3.0, 3.0] 2\n" * 2), done.err
