"""A trace on demand: the steps that were asked for and no others, and never a second profiler beside the job's own."""

import gzip
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

from pacecar.profiler.orders import Refusal
from pacecar.profiler.tracing import STEPS_MAX, Tracing
from pacecar.records import Command


class Job:
    """A loop whose steps are a matrix product, and what was answered and marked."""

    def __init__(self, directory):
        self.step, self.said, self.marks = 40, [], []
        self.tracing = Tracing(
            "a job/1",
            2,
            on_device=False,
            directory=None if directory is None else str(directory),
            step=lambda: self.step,
            mark=lambda is_traced: self.marks.append((self.step, is_traced)),
        )

    def ask(self, **arguments):
        command = Command(number=1, action="trace", at_step=0, arguments=arguments)
        self.tracing.trace(command, lambda state, detail: self.said.append((state, detail)))

    def run(self, steps):
        for _ in range(steps):
            torch.ones(64, 64) @ torch.ones(64, 64)
            self.step += 1
            self.tracing.boundary()


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
    assert [state for state, _ in job.said] == ["accepted", "done"]
    path = job.said[1][1]
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
    for steps in (0, STEPS_MAX + 1, "many"):
        with pytest.raises(Refusal, match="steps must be"):
            job.ask(steps=steps)
    with pytest.raises(Refusal, match="/proc/self/nowhere"):
        job.ask(directory="/proc/self/nowhere")
    with torch.profiler.profile(), pytest.raises(Refusal, match="its own script"):
        job.ask()
    job.ask(steps=2)
    with pytest.raises(Refusal, match="is being taken"):
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


def test_a_folder_that_all_may_make_is_used_only_if_it_is_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    job = Job(None)
    (tmp_path / f"pacecar-traces-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(Refusal, match="somebody else"):
        job.ask()
    (tmp_path / f"pacecar-traces-{os.getuid()}").unlink()
    job.ask(steps=1)
    job.run(1)
    assert job.said[-1][0] == "done"
    assert (tmp_path / f"pacecar-traces-{os.getuid()}").stat().st_mode & 0o777 == 0o700
