"""A trace on demand: the steps that were asked for and no others, and never a second profiler beside the job's own."""

import gzip
import importlib.util
import json
import logging
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from pacecar.profiler.hook.commands.daemon_messages import MessageRefusal, NotYet
from pacecar.profiler.hook.commands.trace_request import STEPS_MAX, TraceRequests
from pacecar.records import Command
from tests.kit.forking_python import forking_python
from tests.kit.users import STRANGER, as_user, commons, needs_root


class Rested:
    """No windows of the hook's own; `unrest` boundaries after one was closed."""

    def __init__(self):
        self.unrest, self.outlived_by = 0, None

    @property
    def is_settled(self):
        return self.unrest == 0

    def let_pass(self):
        self.unrest -= 1

    def session_ended(self, profile):
        assert profile.kineto_results is not None


class Job:
    """A loop whose steps are a matrix product, and what was answered and marked."""

    def __init__(self, directory):
        self.step, self.said, self.marks, self.windows = 40, [], [], Rested()
        self.tracing = TraceRequests(
            "a job/1",
            2,
            hook=self,
            on_device=False,
            directory=None if directory is None else str(directory),
        )

    @property
    def is_traced(self):
        return self.marks[-1][1]

    @is_traced.setter
    def is_traced(self, is_traced):
        self.marks.append((self.step, is_traced))

    def ask(self, at_step=0, **arguments):
        command = Command(number=1, action="trace", at_step=at_step, arguments=arguments)
        self.tracing.trace(command, lambda state, detail: self.said.append((state, detail)))

    def run(self, steps):
        for _ in range(steps):
            torch.ones(64, 64) @ torch.ones(64, 64)
            self.step += 1
            self.tracing.boundary()

    def written(self):
        """Wait until what was traced is compressed."""
        self.tracing.close()
        return self.said[-1]


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def marks_of(path):
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")]


def test_the_trace_holds_the_steps_that_follow_under_the_jobs_own_numbers(job, tmp_path):
    job.run(1)
    job.ask(steps=3)
    job.run(5)
    _, path = job.written()
    assert [state for state, _ in job.said] == ["accepted", "done"]
    assert job.said[0][1] == f"tracing steps 41 to 43, into {path}"
    assert path == str(tmp_path / "trace-a_job_1-step41-rank2.json.gz")
    assert marks_of(path) == ["ProfilerStep#41", "ProfilerStep#42", "ProfilerStep#43"]
    assert job.marks == [(41, True), (44, False)]


def test_a_job_that_ends_first_leaves_what_there_is(job):
    job.ask(steps=50)
    job.run(2)
    job.tracing.close()
    assert job.said[-1][0] == "done"
    assert len(marks_of(job.said[-1][1])) == 3  # the last one was begun


def test_what_cannot_be_traced_is_refused(job):
    for steps in (0, -3, STEPS_MAX + 1, 10**12, "many"):
        with pytest.raises(MessageRefusal, match="steps must be"):
            job.ask(steps=steps)
    with pytest.raises(MessageRefusal, match="/proc/self/nowhere"):
        job.ask(directory="/proc/self/nowhere")
    with torch.profiler.profile(), pytest.raises(MessageRefusal, match="its own script"):
        job.ask()
    job.ask(steps=2)
    with pytest.raises(MessageRefusal, match="is being taken"):
        job.ask()
    job.run(2)
    assert not torch._C._autograd._profiler_enabled()
    assert job.marks == [(40, True), (42, False)]


def test_a_file_that_cannot_be_written_is_said_and_the_job_goes_on(job, tmp_path):
    job.ask(steps=1, directory=str(tmp_path / "gone"))
    os.rmdir(tmp_path / "gone")
    job.run(2)
    state, detail = job.said[-1]
    assert state == "refused"
    assert "gone" in detail
    assert job.marks[-1][1] is False


def test_a_trace_goes_to_a_url_and_stays_here_if_the_store_does_not_take_it(job, tmp_path):
    """`file://` and `memory://` are stores of fsspec as any other."""
    store = tmp_path / "store"
    store.mkdir()
    job.ask(steps=1, directory=f"file://{store}/")
    job.run(1)
    state, url = job.written()
    assert (state, url) == ("done", f"file://{store}/trace-a_job_1-step40-rank2.json.gz")
    (name,) = os.listdir(store)
    assert marks_of(store / name) == ["ProfilerStep#40"]
    assert os.listdir(tmp_path) == ["store"], "the copy here is gone"
    job.ask(steps=1, directory="nowhere://bucket/run")
    job.run(1)
    state, why = job.written()
    assert state == "refused"
    kept = tmp_path / "trace-a_job_1-step41-rank2.json.gz"
    assert why.startswith("nowhere://bucket/run/trace-a_job_1-step41-rank2.json.gz: Protocol not known")
    assert why.endswith(f"; the trace stays at {kept}")
    assert marks_of(kept) == ["ProfilerStep#41"]


def test_without_fsspec_a_url_is_refused_before_anything_is_traced(job, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MessageRefusal, match=r"needs fsspec in the job: pip install 'pacecar\[remote\]'"):
        job.ask(steps=1, directory="s3://bucket/run")
    assert job.marks == []


def test_a_folder_that_all_may_make_is_used_only_if_it_is_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    job = Job(None)
    (tmp_path / f"pacecar-traces-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(MessageRefusal, match="another user"):
        job.ask()
    (tmp_path / f"pacecar-traces-{os.getuid()}").unlink()
    job.ask(steps=1)
    job.run(1)
    assert job.written()[0] == "done"
    assert (tmp_path / f"pacecar-traces-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_rank_that_hears_late_ends_with_the_others_under_their_name_and_says_so(job, tmp_path):
    job.ask(at_step=38, steps=5)
    assert "steps 40 to 42 of 38 to 42: the order came late" in job.said[0][1]
    job.run(3)
    state, path = job.written()
    assert (state, path) == ("done", str(tmp_path / "trace-a_job_1-step38-rank2.json.gz"))
    assert marks_of(path) == ["ProfilerStep#40", "ProfilerStep#41", "ProfilerStep#42"]


def test_a_rank_that_is_too_late_traces_nothing(job):
    with pytest.raises(MessageRefusal, match="steps 35 to 39 were asked for, and this rank is at 40 already"):
        job.ask(at_step=35, steps=5)
    assert not job.tracing.is_tracing
    assert job.marks == []


def test_a_whole_step_lies_between_a_window_of_ours_and_a_trace(job):
    job.windows.unrest = 1
    with pytest.raises(NotYet):
        job.ask(at_step=40, steps=2)
    job.run(1)
    job.ask(at_step=40, steps=2)
    assert "steps 41 to 41" in job.said[0][1]
    job.run(1)
    assert job.written()[0] == "done"


def test_a_record_that_outlived_a_window_would_end_in_the_trace_so_there_is_none(job):
    job.windows.outlived_by = "epoch"
    with pytest.raises(MessageRefusal, match="'epoch' of the job is open"):
        job.ask()
    assert not torch._C._autograd._profiler_enabled()


class Broken:
    """What torch.profiler raises where CUPTI is in trouble."""

    def step(self):
        raise RuntimeError("CUPTI_ERROR_INVALID_OPERATION")

    def stop(self):
        raise RuntimeError("CUPTI_ERROR_INVALID_OPERATION")


@pytest.mark.parametrize("after_steps", [1, 2])
def test_a_profiler_that_fails_is_given_up_and_said(job, after_steps):
    job.ask(steps=2)
    job.tracing._profile.stop()
    job.tracing._profile = Broken()
    job.run(after_steps)
    assert job.said[-1][0] == "refused"
    assert "CUPTI_ERROR" in job.said[-1][1]
    assert job.marks[-1][1] is False
    assert not job.tracing.is_tracing


FULL = """
import ctypes, os, sys
tests, folder = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
for failed in (
    libc.unshare(CLONE_NEWNS),
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
    libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=64k"),
):
    assert not failed, os.strerror(ctypes.get_errno())
sys.path.insert(0, tests)
from test_tracing import Job
job = Job(folder)
job.ask(steps=90)
job.run(90)
print(job.written())
print(os.listdir(folder))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_no_half_file(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [forking_python(), "-c", FULL, Path(__file__).parent, tmp_path],
        capture_output=True, text=True, timeout=120, check=False, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, listed = done.stdout.strip().splitlines()
    assert "refused" in said
    assert "is the disk full" in said
    assert listed == "[]"


CROWDED = """
import threading, torch, pacecar
from pacecar.records import Answer, Command
from tests.kit.hook_inspection import hook_of
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pacer = pacecar.attach(
    model, optimizer, tune="off", job="crowded", overhead_budget=1.0, window_interval_steps=1, run_dir={folder!r},
    socket={folder!r} + "/none",
)
said = []
pacer._run._outbox.put = lambda record: isinstance(record, Answer) and said.append(record)
for step in range(123):
    if step % 6 == 5:
        for thread in threading.enumerate():
            if thread.name == "pacecar-trace":
                thread.join()  # the trace before is compressed
        pacer._run.messages.receive(Command(number=step, action="trace", at_step=step, arguments={{"steps": 3}}))
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
pacer.close()
windows = hook_of(pacer).budget.windows
print([(a.number, a.state) for a in said if a.state != "accepted"], windows)
"""


@pytest.mark.slow
def test_traces_and_windows_in_turn_crash_nothing_and_all_are_taken(tmp_path):
    """A record that begins in one session and ends in the next ends the process: `Optimizer.step` is always open."""
    script = CROWDED.format(folder=str(tmp_path))
    done = subprocess.run([forking_python(), "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    states, _, windows = done.stdout.strip().splitlines()[-1].rpartition("] ")
    assert states.count("'done'") == 20, states
    assert int(windows) > 15
    assert len(list(tmp_path.glob("trace-*.json.gz"))) == states.count("'done'")


OUTLIVES = """
import time, torch, pacecar
from pacecar.records import Answer, Command
from tests.kit.hook_inspection import hook_of
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pacer = pacecar.attach(
    model, optimizer, tune="off", job="outlives", overhead_budget=1.0, window_interval_steps=1, window_warmup_steps=14,
    run_dir={folder!r}, socket={folder!r} + "/none", windows={windows},
)
said, record = [], None
pacer._run._outbox.put = lambda record: isinstance(record, Answer) and said.append(record)
for step in range(24):
    if step in (2, 12):
        time.sleep(0.5)  # the trace before is compressed
        pacer._run.messages.receive(Command(number=step, action="trace", at_step=step + 3, arguments={{"steps": 3}}))
    if step == 6 and {how!r} == "trace" or step == 10 and {how!r} == "own":
        if {how!r} == "own":
            own = torch.profiler.profile()
            own.start()
        record = torch.profiler.record_function("epoch")
        record.__enter__()
        if {how!r} == "own":
            own.stop()
    if step == 16:
        record.__exit__(None, None, None)
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
pacer.close()
print({{a.number: a.detail for a in said}}[12], hook_of(pacer).budget.windows)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "windows"), [("trace", True), ("trace", False), ("own", True)])
def test_a_record_that_is_open_when_a_profiler_ends_ends_in_no_later_session(tmp_path, how, windows):
    """It would end the process in half of the runs, by writing into the first session's freed memory."""
    script = OUTLIVES.format(folder=str(tmp_path), how=how, windows=windows)
    done = subprocess.run([forking_python(), "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    line = done.stdout.strip().splitlines()[-1]
    assert line.startswith("the record 'epoch' of the job is open")
    assert line.endswith(" 0"), "no window"


# --- what strangers put there ---


@needs_root
def test_a_trace_follows_no_link_and_fills_no_file_that_a_stranger_put_there():
    """Also those under the names that torch and we write to at first."""
    with commons() as public:
        precious = public / "roots" / "precious"
        precious.parent.mkdir(mode=0o700)
        precious.write_text("mine")
        name = "trace-a_job_1-step40-rank2.json"
        planted = [
            f"{name}.gz", f"{name}.partial", f"{name}.partial.tmp", f"{name}.gz.partial", f"{name}.gz.gz.partial",
        ]  # fmt: skip

        def plant():
            for one in planted:
                (public / one).symlink_to(precious)

        as_user(STRANGER, plant)
        job = Job(public)
        job.ask(steps=1)
        job.run(1)
        state, path = job.written()
        assert (state, path) == ("done", str(public / f"{name}.gz"))
        assert precious.read_text() == "mine"
        assert os.listdir(precious.parent) == ["precious"]
        trace = Path(path).lstat()
        assert (stat.S_ISREG(trace.st_mode), stat.S_IMODE(trace.st_mode), trace.st_uid) == (True, 0o600, 0)
        assert marks_of(path) == ["ProfilerStep#40"]
        assert set(os.listdir(public)) == {"roots", *planted}, "nothing half written is left"


@needs_root
def test_a_trace_enters_no_folder_over_a_strangers_link_and_takes_no_default_folder_of_his(monkeypatch):
    with commons() as public:
        (public / "roots").mkdir(mode=0o700)
        monkeypatch.setenv("TMPDIR", str(public))
        monkeypatch.setattr(tempfile, "tempdir", None)
        as_user(STRANGER, lambda: (public / "out").symlink_to("roots"))
        default = public / f"pacecar-traces-{os.getuid()}"
        as_user(STRANGER, lambda: default.mkdir())
        for directory in (public / "out", None):
            with pytest.raises(MessageRefusal, match=f"belongs to another user: .*uid {STRANGER}"):
                Job(directory).ask(steps=1)
        assert os.listdir(public / "roots") == []


@pytest.mark.slow
@needs_root
def test_the_log_of_a_script_that_does_not_know_pacecar_goes_through_no_link(monkeypatch, capfd):
    from pacecar.job.autoattach.stderr_lines import keep_quiet

    logger = logging.getLogger("pacecar")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    with commons() as public:
        as_user(STRANGER, lambda: (public / "rank0.log").symlink_to(public / "aim"))
        as_user(STRANGER, lambda: os.mkfifo(public / "rank1.log"))
        # Who opens a pipe to write into it, without a reader, waits for ever.
        reader = os.open(public / "rank1.log", os.O_RDONLY | os.O_NONBLOCK)
        for rank in (0, 1, 2):
            keep_quiet(rank, str(public))
            for _ in range(2):
                logger.warning("from rank %d", rank)
            logger.handlers.pop().close()
        assert not (public / "aim").exists()
        assert os.read(reader, 1) == b""
        os.close(reader)
        assert (public / "rank2.log").read_text().count("from rank 2") == 2
        assert stat.S_IMODE((public / "rank2.log").stat().st_mode) == 0o600
        said = capfd.readouterr().err.splitlines()
        assert [line.split(": ")[1] for line in said] == [
            f"its log cannot be written to {public}/rank{rank}.log" for rank in (0, 1)
        ]
