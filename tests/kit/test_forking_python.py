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
    done = subprocess.run(
        [python, *map(str, arguments)],
        input=said, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, cwd=folder,
        env=ENVIRON | environ,
    )  # fmt: skip
    return Ran(done.returncode, neutral(done.stdout, python), neutral(done.stderr, python))


def neutral(text: str, python: str) -> str:
    """Leave out addresses, and which of the two it is."""
    return re.sub("0x[0-9a-f]+", "0x", text).replace(python, "PYTHON").replace(sys.executable, "PYTHON")


def run_same(forked: str, *arguments: str | Path, said: str = "", folder: Path | None = None, **environ: str) -> Ran:
    """Run the program in a fresh python and in a forked one; fails where they differ."""
    fresh = run(sys.executable, *arguments, said=said, folder=folder, **environ)
    assert run(forked, *arguments, said=said, folder=folder, **environ) == fresh
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
    "exit code": ("sys.exit(3)", 3),
    "exit code of more than a byte": ("sys.exit(256 + 7)", 7),
    "exit without a code": ("sys.exit()", 0),
    "exit with a sentence": ("sys.exit('in words')", 1),
    "exception": ("1 / 0", 1),
    "exception with a cause": ("try: 1 / 0\nexcept ZeroDivisionError as e: raise ValueError('later') from e", 1),
    "exception from a function": ("def f(): raise ValueError('in f')\nf()", 1),
    "Ctrl-C, not caught": ("raise KeyboardInterrupt", -signal.SIGINT),
    "SIGINT to itself": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "os._exit": ("sys.stdout.flush(); os._exit(4)", 4),
    "abort": ("sys.stdout.flush(); os.abort()", -signal.SIGABRT),
    "kill": ("sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "term": ("sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "own excepthook": ("sys.excepthook = lambda *e: print('hook', e[0].__name__); 1 / 0", 1),
    "thread that goes on": ("threading.Timer(0.05, lambda: print('thread ended', flush=True)).start()", 0),
    "exit from a thread that is waited for": (
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


def test_code_that_is_no_python_fails_in_the_same_words(forked: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('a'\n1 +* 2\n")
    assert run_same(forked, script).code == 1
    assert run_same(forked, "-c", "1 +* 2").code == 1
    assert run_same(forked, tmp_path / "nowhere.py").code == 2
    assert run_same(forked, "-m", "no_such_module").code == 1


def test_a_reader_of_stdout_that_went_away_gives_pythons_own_exit_code(forked: str) -> None:
    codes = []
    for python in (sys.executable, forked):
        end, begin = os.pipe()
        os.close(end)
        done = subprocess.run(
            [python, "-c", "print('x' * 10)"], stdout=begin, stderr=subprocess.PIPE, check=False, env=ENVIRON
        )
        os.close(begin)
        codes.append((done.returncode, b"BrokenPipeError" in done.stderr))
    assert codes == [(120, True)] * 2


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
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text("")
    said = run_same(forked, "-m", "json.tool", said='{"a": 1}')
    assert said.out == '{\n    "a": 1\n}\n', "a module that the server has runs all the same"


def test_unbuffered_and_closed_streams(forked: str) -> None:
    code = "import os, sys; sys.stdout.write('a'); os.write(1, b'b'); print(sys.stdin is None)"
    assert run_same(forked, "-u", "-c", code).out == "abFalse\n"
    assert run_same(forked, "-c", code).out == "baFalse\n"
    assert run_same(forked, "-c", code, PYTHONUNBUFFERED="1").out == "abFalse\n"
    for python in (sys.executable, forked):
        closed = subprocess.run(
            ["sh", "-c", '"$0" -c "$1" <&-', python, code], capture_output=True, check=True, env=ENVIRON
        )
        assert closed.stdout == b"baTrue\n"


@pytest.fixture
def signal_defaults() -> Iterator[None]:
    """What nohup and a shell's `&` have ignored is ignored by every process below."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_defaults")
def test_ignored_signals_umask_and_inherited_files_are_the_askers(forked: str, tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(ASKS + "print(os.read(int(sys.argv[1]), 10), os.get_inheritable(int(sys.argv[1])))\n")
    said = []
    for python in (sys.executable, forked):
        end, begin = os.pipe()
        os.write(begin, b"by a pipe")
        os.set_inheritable(end, True)
        shell = ["sh", "-c", 'trap "" HUP USR1; umask 027; exec "$0" "$@"', python, str(script), str(end)]
        said.append(subprocess.run(shell, input="", capture_output=True, text=True, close_fds=False, check=False,
                                   env=ENVIRON))  # fmt: skip
        os.close(end)
        os.close(begin)
    assert said[0].stdout == said[1].stdout
    assert (said[0].returncode, said[1].returncode) == (0, 0), said[1].stderr
    assert "b'by a pipe' True" in said[1].stdout
    assert "0o27 [1, 10, 13, 25]" in said[1].stdout


def test_what_was_ignored_where_the_server_began_is_not_ignored_by_a_child() -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as in a shell's background
    try:
        python = forking_python(sys.executable, ("json", "json.tool"))
    finally:
        signal.signal(signal.SIGQUIT, before)
    quits = "import os, signal; os.kill(os.getpid(), signal.SIGQUIT); print('ignored')"
    for ignored in (False, True):
        before = signal.signal(signal.SIGQUIT, signal.SIG_IGN if ignored else signal.SIG_DFL)
        try:
            ended = run(python, "-c", quits)
        finally:
            signal.signal(signal.SIGQUIT, before)
        assert (ended.code, ended.out) == ((0, "ignored\n") if ignored else (-signal.SIGQUIT, ""))


def test_a_terminal_is_one_for_the_child_too(forked: str) -> None:
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
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_signal_that_the_asker_ignores_reaches_a_child_that_wants_it(forked: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process, _ = start(forked, "SIGHUP", "SIGTERM")
        indifferent, _ = start(forked, "SIGTERM")
    finally:
        signal.signal(signal.SIGHUP, before)
    for asker in (process, indifferent):
        asker.send_signal(signal.SIGHUP)
    assert process.stdout is not None
    assert process.stdout.readline() == "got SIGHUP\n"  # or the next would come amid this one's handler
    for asker in (process, indifferent):
        asker.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=SECONDS_MAX)[0] == "got SIGTERM\n"
    assert indifferent.communicate(timeout=SECONDS_MAX)[0] == "got SIGTERM\n"
    assert (process.returncode, indifferent.returncode) == (9, 9)


@pytest.mark.usefixtures("signal_defaults")
def test_a_signal_that_comes_as_soon_as_the_child_speaks_is_passed_on(forked: str, tmp_path: Path) -> None:
    """On a busy machine the child may be heard of before the asker goes on from asking."""
    text = Path(forked).read_text()
    asked = "sock.sendall(asked)\n"
    assert text.count(asked) == 1
    slow = tmp_path / "python"
    slow.write_text(text.replace(asked, asked + "import time; time.sleep(0.5)\n"))
    slow.chmod(0o755)
    process, _ = start(str(slow), "SIGTERM")
    process.send_signal(signal.SIGTERM)  # alone: a second one could come amid the first one's handler
    assert process.communicate(timeout=SECONDS_MAX)[0] == "got SIGTERM\n"
    assert process.returncode == 9


@pytest.mark.usefixtures("signal_defaults")
def test_signals_to_the_asker_reach_the_child_and_end_both_alike(forked: str) -> None:
    names = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGTERM")
    process, child = start(forked, *names)
    assert child != process.pid
    for name in names:
        process.send_signal(getattr(signal, name))
        assert process.stdout is not None
        assert process.stdout.readline() == f"got {name}\n"
    with process:
        assert process.wait(SECONDS_MAX) == 9
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
    process, child = start(forked)
    process.kill()
    process.communicate()
    until(lambda: is_gone(child), "the child runs on")
    process, child = start(forked)
    os.kill(child, signal.SIGKILL)
    process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == -signal.SIGKILL


def test_a_child_has_a_process_group_of_its_own_so_that_it_cannot_end_the_server(forked: str) -> None:
    code = "import os, signal; os.killpg(0, signal.SIGTERM)"
    ended = subprocess.run([forked, "-c", code], start_new_session=True, timeout=SECONDS_MAX, check=False)
    assert ended.returncode == -signal.SIGTERM
    groups = "import os; print(os.getpgid(0) == os.getpid(), os.getpgid(0) == os.getpgid(os.getppid()))"
    assert run(forked, "-c", groups).out == "True False\n"
    leads = "import os; print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())"
    for python in (sys.executable, forked):
        done = subprocess.run([python, "-c", leads], start_new_session=True, stdout=subprocess.PIPE, check=True)
        assert done.stdout == b"True True\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
def test_a_child_is_in_the_network_and_mounts_of_its_asker(forked: str) -> None:
    files = "/proc/self/ns/net", "/proc/self/ns/mnt"
    code = f"import os; print(*map(os.readlink, {files}), sep='\\n')"
    command = f'readlink {" ".join(files)} && exec "{forked}" -c "{code}"'
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", command],
        capture_output=True, text=True, timeout=SECONDS_MAX, check=True,
    )  # fmt: skip
    asker, child = done.stdout.split()[:2], done.stdout.split()[2:]
    assert child == asker
    assert not {os.readlink(file) for file in files} & {*child}


def test_children_run_side_by_side_and_hold_nothing_of_each_other(forked: str) -> None:
    many = [start(forked) for _ in range(5)]
    assert len({child for _, child in many}) == 5
    opened = run(forked, "-c", "import os; print(len(os.listdir('/proc/self/fd')))").out
    assert opened == run(sys.executable, "-c", "import os; print(len(os.listdir('/proc/self/fd')))").out
    for process, _ in many[::2]:
        process.kill()
        process.communicate()
    for process, child in many[1::2]:
        assert not is_gone(child)
        process.terminate()
        process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == -signal.SIGTERM


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


def test_main_can_be_pickled_and_what_it_spawns_is_forked_too(forked: str, tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    fresh, done = run(sys.executable, script), run(forked, script)
    assert done.err == fresh.err == ""
    assert done.out.replace("again True", "again False") == fresh.out
    assert fresh.out.splitlines() == [
        "spawn __mp_main__ 0",
        "fork __main__ 0",
        "forkserver __mp_main__ 0",
        "again False",
    ]
    assert "again True" in done.out


@pytest.mark.slow
def test_options_and_variables_that_python_reads_at_its_start_start_a_fresh_one(forked: str) -> None:
    shows = "import sys, warnings; print('json.tool' in sys.modules, sys.flags.optimize, sys.flags.dev_mode)"
    for arguments in (("-O",), ("-X", "dev"), ("-W", "error"), ("-I",), ("-E", "-s")):
        assert run_same(forked, *arguments, "-c", shows).out.startswith("False ")
    for name, value in (
        ("PYTHONDEVMODE", "1"),
        ("PYTHONWARNINGS", "error"),
        ("PYTHONHASHSEED", "3"),
        ("PYTHONOPTIMIZE", "1"),
    ):
        assert run_same(forked, "-c", shows, **{name: value}).out.startswith("False ")
    assert run_same(forked, "-c", "print('a')", PYTHONIOENCODING="latin-1:replace", PYTHONUTF8="0").code == 0
    assert run_same(forked, "-", said="print('from stdin')").out == "from stdin\n"
    assert run_same(forked, "-V").out.startswith("Python 3")


def test_a_crash_shows_its_traceback_where_that_is_asked_for(forked: str) -> None:
    """The demo asks its processes for it: they would all start the real python."""
    code = "import os, sys; print('json.tool' in sys.modules, flush=True); os.abort()"
    crashed, fresh = (run(python, "-c", code, PYTHONFAULTHANDLER="1") for python in (forked, sys.executable))
    assert (crashed.code, crashed.out) == (fresh.code, "True\n")
    for one in (crashed, fresh):
        assert one.err.startswith("Fatal Python error: Aborted\n")
        assert 'File "<string>", line 1 in <module>' in one.err
    assert run(forked, "-c", "import faulthandler; print(faulthandler.is_enabled())").out == "False\n"


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


def test_random_numbers_are_new_in_each_child_and_sources_can_be_read(forked: str, tmp_path: Path) -> None:
    drawn = [run(forked, "-c", "import random; print(random.random())").out for _ in range(2)]
    assert drawn[0] != drawn[1]
    script = tmp_path / "script.py"
    script.write_text("import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getfile(f))\n")
    assert run_same(forked, script).code == 0


def test_whole_finalization_where_it_is_asked_for(forked: str) -> None:
    code = "import sys\nclass Last:\n    def __del__(self): print('freed', flush=True)\nlast = Last(); sys.exit(2)"
    assert run(forked, "-c", code).out == ""
    assert run_same(forked, "-c", code, FORKED_FINALIZES="1") == Ran(2, "freed\n", "")


@pytest.fixture
def short() -> Iterator[str]:
    """A folder with a short path, which a socket in it needs."""
    with tempfile.TemporaryDirectory(prefix="short-") as folder:
        yield folder


def test_the_server_ends_with_who_started_it(short: str) -> None:
    asks = (
        "import os, subprocess, sys\nfrom tests.kit.forking_python import forking_python\n"
        "python = forking_python(sys.executable, ('json',))\n"
        "waits = subprocess.Popen([python, '-c', 'import os, time; print(os.getpid(), os.getppid(), flush=True);"
        " time.sleep(1000)'], stdout=subprocess.PIPE)\n"
        "print(os.path.dirname(python), waits.stdout.readline().decode(), flush=True)\n{end}\n"
    )
    for end in ("pass", "os._exit(0)", "1 / 0"):
        root = str(Path(__file__).resolve().parents[2])
        done = run(sys.executable, "-c", asks.format(end=end), PYTHONPATH=root, TMPDIR=short)
        folder, child, server = done.out.split()
        until(lambda: is_gone(int(child)) and is_gone(int(server)), "they run on")  # noqa: B023
        assert not Path(folder).parent.exists()


def test_processes_of_one_run_have_one_server_until_the_last_of_them_ends(short: str) -> None:
    asks = (
        "import os, subprocess, sys\nfrom tests.kit.forking_python import forking_python\n"
        "ask = [forking_python(sys.executable, ('json',)), '-c', 'import os; print(os.getppid())']\n"
        "for line in sys.stdin:\n"
        "    print(ask[0], subprocess.run(ask, stdout=subprocess.PIPE, text=True).stdout.strip(), flush=True)\n"
    )
    environ = ENVIRON | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TMPDIR": short}
    environ["PYTEST_XDIST_TESTRUNUID"] = "0123456789abcdef0123"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    users = [subprocess.Popen([sys.executable, "-c", asks], text=True, env=environ, **pipes) for _ in range(3)]
    said = []
    for user in users:
        assert user.stdin is not None
        assert user.stdout is not None
        user.stdin.write("\n")
        user.stdin.flush()
        said.append(user.stdout.readline())  # the others live
    for user in users:
        out, _ = user.communicate("\n")  # those before it have ended
        said.append(out)
    assert len(set(said)) == 1
    program, server = said[0].split()
    until(lambda: is_gone(int(server)), "it runs on")
    assert not Path(program).parent.parent.exists()


def test_a_server_that_is_asked_for_while_it_ends_goes_on(short: str) -> None:
    asks = (
        "import sys\nfrom tests.kit.forking_python import forking_python\n"
        "print(forking_python(sys.executable, ('json',)), flush=True)\nsys.stdin.read()\n"
    )
    environ = ENVIRON | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TMPDIR": short}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    first = subprocess.Popen([sys.executable, "-c", asks], text=True, env=environ, **pipes)
    assert first.stdout is not None
    folder = Path(first.stdout.readline().strip()).parent
    server = run(str(folder / "python"), "-c", "import os; print(os.getppid())").out
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first.communicate()
        waits = re.compile(rf"-> FLOCK .* {int(server)} ")
        until(lambda: waits.search(Path("/proc/locks").read_text()) is not None, "the server does not end")
        life = os.open(folder / "life", os.O_WRONLY | os.O_NONBLOCK)
    assert run(str(folder / "python"), "-c", "import os; print(os.getppid())").out == server
    os.close(life)
    until(lambda: is_gone(int(server)), "it runs on")
    assert not folder.parent.exists()


def test_a_server_whose_modules_print_is_refused(short: str) -> None:
    environ = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TMPDIR": short}
    code = "from tests.kit.forking_python import forking_python\nforking_python(modules=('this',))"
    done = run(sys.executable, "-c", code, **environ)
    assert "RuntimeError: the fork server did not start: b'The Zen of Python" in done.err


def test_a_server_that_cannot_load_its_modules_says_so() -> None:
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
