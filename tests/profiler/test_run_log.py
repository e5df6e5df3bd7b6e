"""A run folder that cannot be written: one line with the kernel's reason, records wait and are counted."""

import errno
import logging
import os
import shutil
import time

import msgspec
import pytest

from pacecar import safe_files
from pacecar.job.autoattach import stderr_lines
from pacecar.profiler.transport.run_log import RunLog
from pacecar.records import StepRecord
from tests.kit.records import job_hello, step_record
from tests.kit.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def logger(monkeypatch):
    logger = logging.getLogger("pacecar")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    return logger


@pytest.fixture
def run(tmp_path):
    log = RunLog(tmp_path, job_hello(), queue_length_max=8)
    yield log
    log.close(0.0)


def said(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_write_that_fails_is_said_once_by_the_reason_and_what_is_queued_comes_later(
    number, run, tmp_path, monkeypatch, caplog
):
    write, fails = os.write, [True]

    def limited(handle, data):
        if fails:
            if len(data) > 20:
                return write(handle, data[:20])  # a full disk takes a part first
            raise OSError(number, os.strerror(number))
        return write(handle, data)

    monkeypatch.setattr(safe_files.os, "write", limited)
    for step in range(4):
        run.put(step_record(step=step))
    until(lambda: said(caplog))
    time.sleep(0.3)  # it tries again meanwhile
    assert said(caplog) == [f"pacecar cannot write to {tmp_path}/rank0.jsonl: {os.strerror(number)}; it keeps trying"]
    assert (tmp_path / "rank0.jsonl").stat().st_size == 0, "no half line is left behind"
    for step in range(4, 14):
        run.put(step_record(step=step))
    fails.clear()
    run.close(5.0)
    hello, *records = (tmp_path / "rank0.jsonl").read_bytes().splitlines()
    assert b"hello" in hello
    steps = [msgspec.json.decode(line, type=StepRecord).step for line in records]
    assert steps == list(range(14 - len(steps), 14))
    assert run.dropped == 14 - len(steps) > 0


def test_a_folder_that_was_removed_is_made_again_and_its_file_begins_with_the_hello(run, tmp_path, caplog):
    folder = tmp_path / "runs" / "a"
    log = RunLog(folder, job_hello())
    log.put(step_record(step=0))
    until(lambda: (folder / "rank0.jsonl").exists() and (folder / "rank0.jsonl").stat().st_size)
    shutil.rmtree(tmp_path / "runs")
    log.put(step_record(step=1))
    log.close(5.0)
    lines = (folder / "rank0.jsonl").read_bytes().splitlines()
    assert b"hello" in lines[0]
    assert len(lines) == 2
    assert said(caplog) == [f"pacecar cannot write to {folder}/rank0.jsonl: it was removed; it keeps trying"]
    assert log.dropped == 0


def test_an_error_that_a_file_server_keeps_until_the_file_is_closed_is_one_line(run, tmp_path, monkeypatch, caplog):
    run.put(step_record(step=0))
    until(lambda: (tmp_path / "rank0.jsonl").exists() and (tmp_path / "rank0.jsonl").stat().st_size)
    close = os.close

    def late(handle):
        close(handle)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", late)
    run.close(5.0)
    monkeypatch.setattr(os, "close", close)
    assert said(caplog) == [f"pacecar may have lost the end of {tmp_path}/rank0.jsonl: {os.strerror(errno.EDQUOT)}"]


def test_the_script_sees_one_line_of_a_disk_that_is_full_and_no_traceback(tmp_path, logger, capfd):
    for name in ("rank0.jsonl", "rank0.log"):
        (tmp_path / name).symlink_to("/dev/full")
    stderr_lines.keep_quiet(0, str(tmp_path))
    log = RunLog(tmp_path, job_hello())
    log.put(step_record(step=0))
    time.sleep(1.0)
    logger.warning("something else")
    logger.warning("a mistake of ours: %d", "in the format")
    log.close(0.2)
    logger.handlers.pop().close()
    assert capfd.readouterr().err.splitlines() == [
        f"pacecar: cannot write to {tmp_path}/rank0.jsonl: No space left on device; it keeps trying"
    ]


def test_a_log_that_cannot_be_written_is_named_itself_where_the_records_are_not_the_matter(tmp_path, logger, capfd):
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    stderr_lines.keep_quiet(0, str(tmp_path))
    for _ in range(3):
        logger.warning("something else")
    logger.handlers.pop().close()
    assert capfd.readouterr().err.splitlines() == [
        f"pacecar: its log cannot be written to {tmp_path}/rank0.log: No space left on device"
    ]


@pytest.mark.parametrize("left", [b"", b'{"type":"step"}\n', b'{"type":"step"}\n{"type":"st'])
def test_half_a_line_of_an_earlier_attempt_does_not_swallow_the_hello(left, run, tmp_path):
    """The node lost its power while it wrote."""
    file = tmp_path / "rank0.jsonl"
    file.write_bytes(left)
    run.put(step_record())
    run.close(5.0)
    *_, hello, record = file.read_bytes().splitlines()
    assert hello.startswith(b'{"type":"hello"')
    assert msgspec.json.decode(record, type=StepRecord).step == step_record().step
    assert b"\n\n" not in file.read_bytes()
