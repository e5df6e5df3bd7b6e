"""The flight recorder: triggers are in the file, callers do not wait, and a bad disk does no harm."""

import errno
import logging
import os
import threading
import time

import pytest
from msgspec import structs

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.recorder import recorder as recorders
from pacecar.monitor.recorder import writer
from pacecar.monitor.recorder.recorder import (
    AFTER_SECONDS,
    INTERVAL_SECONDS,
    TICKS_TOGETHER,
    Around,
    FlightRecorder,
    RecorderLimits,
)
from pacecar.monitor.recorder.triggers import STALL_STEPS, TriggerPace, Triggers
from pacecar.monitor.recorder.writer import RecordingFolder
from pacecar.records import Absent, Goodbye, HangSuspicion, HangVerdict, Ok, Sample, Snapshot
from pacecar.records.hangs import HangKind
from pacecar.records.recording import read_recording
from pacecar.wire import encode_frame, payload_of
from tests.kit.fake_clock import FakeClock
from tests.kit.own_samples import value_of, values_of
from tests.kit.waiting import until

DROPPED = "pacecar_recorder_dropped_total"


def gpu(up=1, xids=0):
    return Ok((Sample("pacecar_gpu_up", ("0",), up), Sample("pacecar_gpu_xid_errors_total", ("0", "79"), xids)))


def snapshot(tick, outcome):
    return Snapshot(tick, tick * NS_PER_SECOND, tick * NS_PER_SECOND, 0, {"gpu": outcome}, {"gpu": 1})


def hang(rank=0, job="run-7", ended=False):
    return HangSuspicion(
        job=job, rank=rank, step=5, phase="backward", wall_ns=1, silent_ns=120 * NS_PER_SECOND, last_collective=None,
        collectives=None, stack=None, ended=ended,
    )  # fmt: skip


# --- what triggers ----------------------------------------------------------------------------------


def test_an_xid_and_a_lost_gpu_trigger_once_and_what_was_before_does_not():
    triggers = Triggers(stall_ns=1)
    said = []
    for tick, outcome in enumerate(
        [gpu(xids=3), gpu(xids=3), gpu(xids=4), gpu(xids=4), Absent("no driver"), gpu(xids=6), gpu(up=0, xids=6),
         gpu(up=0, xids=6), gpu(xids=6), gpu(up=0, xids=6)]
    ):  # fmt: skip
        said += [(tick, trigger.kind) for trigger in triggers.tick(snapshot(tick, outcome))]
    assert said == [(2, "xid"), (5, "xid"), (6, "gpu_lost"), (9, "gpu_lost")]
    assert Triggers(stall_ns=1).tick(snapshot(0, gpu(up=0))) == [], "it was lost before we came"


def test_a_verdict_is_a_trigger_and_the_suspicions_of_its_ranks_are_the_same_hang():
    triggers = Triggers(stall_ns=1)
    said = HangVerdict(
        job="run-7",
        rank=0,
        wall_ns=1,
        kind=HangKind.STOPPED,
        culprits=(1,),
        waiting=(0,),
        waited_ns=1,
        summary="rank 1 is stopped",
    )
    (trigger,) = triggers.hang("run-7", said, 1)
    assert (trigger.kind, trigger.detail) == ("hang", "job run-7 hangs: rank 1 is stopped")
    assert triggers.hang("run-7", hang(0), 1) == []
    assert triggers.hang("run-7", structs.replace(said, ended=True), 1) == []
    assert triggers.hang("run-7", hang(0, ended=True), 1) == []
    assert len(triggers.hang("run-7", said, 1)) == 1, "another one"


@pytest.mark.slow
def test_eight_ranks_that_suspect_one_hang_are_one_trigger():
    triggers = Triggers(stall_ns=1)
    assert [len(triggers.hang("run-7", hang(rank), 1)) for rank in range(8)] == [1] + [0] * 7
    for rank in range(8):
        assert triggers.hang("run-7", hang(rank, ended=True), 1) == []
    assert len(triggers.hang("run-7", hang(3), 1)) == 1, "another one"
    triggers.over("run-7")
    assert len(triggers.hang("run-7", hang(3), 1)) == 1
    for number in range(3000):
        triggers.hang(f"job-{number}", hang(), 1)
    assert len(triggers._hanging) <= 1024


def test_a_job_stalls_once_and_by_its_own_pace():
    triggers = Triggers(stall_ns=300)
    assert triggers.paces([TriggerPace("a", 299, 1), TriggerPace("slow", 1000, 1000)], 1) == []
    (first,) = triggers.paces([TriggerPace("a", 300, 1), TriggerPace("slow", 19_999, 1000)], 1)
    assert (first.kind, first.subject) == ("stall", "a")
    assert triggers.paces([TriggerPace("a", 9999, 1)], 1) == []
    assert triggers.paces([TriggerPace("a", 5, 1)], 1) == []
    assert len(triggers.paces([TriggerPace("a", 400, 1), TriggerPace("slow", STALL_STEPS * 1000, 1000)], 1)) == 2


# --- the recorder, its thread played by the test -----------------------------------------------------


@pytest.fixture
def clock():
    return FakeClock(monotonic_ns=50 * NS_PER_SECOND)


@pytest.fixture
def make(clock, tmp_path, make_hello):
    made = []

    def make_recorder(**changes):
        limits = RecorderLimits(
            window_ns=120 * NS_PER_SECOND, memory_bytes=10**6, folder=str(tmp_path / "rec"), folder_bytes=10**7,
            stall_ns=300 * NS_PER_SECOND,
        )._replace(**changes)  # fmt: skip
        around = Around((make_hello(),), ())
        made.append(FlightRecorder(clock, limits, host="node-a", version="0.1.0", around=lambda: around))
        made[-1].writer.start()
        return made[-1]

    yield make_recorder
    for one in made:
        one.writer.close(5)


@pytest.fixture
def run(clock):
    """Let seconds pass, a tick each."""

    def seconds(recorder, count, outcome=None):
        for _ in range(count):
            recorder.overhear_tick(snapshot(clock.monotonic_ns() // NS_PER_SECOND, outcome or gpu()))
            recorder.step()
            clock.advance(NS_PER_SECOND)

    return seconds


def files(tmp_path):
    return sorted((tmp_path / "rec").glob("*.recording"), key=lambda path: int(path.name.split("-")[3]))


def test_the_file_has_what_triggered_what_was_before_and_what_followed(make, run, tmp_path, make_hello):
    recorder = make()
    run(recorder, 30)
    run(recorder, 1, gpu(xids=1))
    recorder.record_rank(hang(), payload_of(encode_frame(hang())), make_hello())
    run(recorder, AFTER_SECONDS, gpu(xids=1))
    assert recorder.writer.files == 0
    run(recorder, 2, gpu(xids=1))
    until(lambda: recorder.writer.files == 1, "the file")
    (path,) = files(tmp_path)
    assert path.name.endswith("-xid.recording")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    read = read_recording(path)
    assert [trigger.kind for trigger in read.header.triggers] == ["xid", "hang"]
    assert [hello.job for hello in read.header.hellos] == ["run-7"]
    xids = [tick.values["pacecar_gpu_xid_errors_total", ("0", "79")] for tick in read.ticks()]
    assert xids[:30] == [0] * 30
    assert xids[30:] == [1] * (len(xids) - 30)
    assert len(xids) - 30 >= AFTER_SECONDS
    assert [record for _, record in read.records()] == [hang()]
    assert [event.kind for _, event in read.events()] == ["trigger xid", "trigger hang"]
    triggers = values_of(recorder, "pacecar_recorder_triggers_total")
    assert (triggers["xid"], triggers["hang"]) == (1, 1)
    assert value_of(recorder, "pacecar_recorder_files_total") == 1
    assert value_of(recorder, "pacecar_recorder_files_bytes") == path.stat().st_size
    assert values_of(recorder, DROPPED) == {"queue": 0, "memory": 0}


def test_a_storm_is_one_file_and_the_next(make, run, tmp_path):
    recorder = make()
    for second in range(AFTER_SECONDS + INTERVAL_SECONDS + 2 * AFTER_SECONDS):
        run(recorder, 1, gpu(xids=second))
        until(lambda: not recorder.writer.is_busy, "the writer")
    until(lambda: recorder.writer.files == 2, "two files")
    first, second = (read_recording(path) for path in files(tmp_path))
    assert len(first.header.triggers) == AFTER_SECONDS + 1
    assert len(second.header.triggers) + second.header.triggers_left_out >= INTERVAL_SECONDS


def test_who_asks_gets_a_file_at_once(make, run, tmp_path):
    recorder = make()
    run(recorder, 3)
    said = []
    recorder.ask(1000, "slow since noon", lambda done, text: said.append((done, text)))
    run(recorder, 1)
    until(lambda: said, "an answer")
    (path,) = files(tmp_path)
    assert said == [(True, str(path))]
    (trigger,) = read_recording(path).header.triggers
    assert (trigger.kind, trigger.detail) == ("request", "uid 1000 asked: slow since noon")
    assert len(list(read_recording(path).ticks())) >= 3


def test_nobody_waits_and_the_queue_is_bounded(make, make_hello):
    recorder = make()
    recorder._queue.entries_max = 100
    begun = time.monotonic()
    for _ in range(500):  # its thread does not come
        recorder.overhear_glance([Sample("pacecar_gpu_power_watts", ("0",), 1)])
    assert time.monotonic() - begun < 2
    assert (recorder._queue.entries, value_of(recorder, DROPPED, "queue")) == (100, 400)
    refused = []
    recorder.ask(0, "", lambda done, text: refused.append((done, text)))
    assert refused == [(False, "the recorder is too busy; try again")]
    recorder.step()
    recorder._queue.bytes_max = 5 * (1000 + recorders.RECORD_BYTES)
    for _ in range(10):
        recorder.record_rank(Goodbye(job="j", rank=0, reason="", wall_ns=1), b"x" * 1000, make_hello())
    assert recorder._queue.entries == 5
    assert value_of(recorder, DROPPED, "queue") == 406


def test_a_disk_that_hangs_costs_nobody_anything_and_no_entry(make, run, tmp_path, monkeypatch):
    recorder = make()
    free, put = threading.Event(), RecordingFolder.put

    def slow(self, *arguments):
        free.wait(20)
        return put(self, *arguments)

    monkeypatch.setattr(RecordingFolder, "put", slow)
    run(recorder, 1, gpu(xids=0))
    run(recorder, AFTER_SECONDS + 2, gpu(xids=1))
    assert recorder.writer.is_busy
    run(recorder, INTERVAL_SECONDS + AFTER_SECONDS, gpu(xids=2))  # goes on, and wants another file
    assert recorder.writer.is_busy
    free.set()
    until(lambda: not recorder.writer.is_busy, "the first file")
    run(recorder, 1, gpu(xids=2))
    until(lambda: recorder.writer.files == 2, "the second")
    later = list(read_recording(files(tmp_path)[1]).ticks())
    assert [tick.tick for tick in later] == list(range(later[0].tick, later[-1].tick + 1)), "no gap while it hung"
    assert values_of(recorder, DROPPED) == {"queue": 0, "memory": 0}


# --- bad disks ---------------------------------------------------------------------------------------


def test_a_full_disk_is_named_once_counted_and_tried_again_with_the_same_chunks(
    make, run, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    put, full = RecordingFolder.put, [True]

    def maybe(self, *arguments):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(self, *arguments)

    monkeypatch.setattr(RecordingFolder, "put", maybe)
    recorder = make()
    run(recorder, 5)
    with caplog.at_level(logging.WARNING, logger="pacecar"):
        run(recorder, AFTER_SECONDS + 2, gpu(xids=1))
        until(lambda: recorder.writer.failures > 5, "several attempts")
    assert sum("No space left" in record.message for record in caplog.records) == 1
    run(recorder, 200, gpu(xids=1))  # what triggered has left the window meanwhile
    full[0] = False
    until(lambda: recorder.writer.files == 1, "the file")
    (path,) = files(tmp_path)
    assert [tick.values["pacecar_gpu_xid_errors_total", ("0", "79")] for tick in read_recording(path).ticks()][:6] == [
        0, 0, 0, 0, 0, 1,
    ]  # fmt: skip
    assert value_of(recorder, "pacecar_recorder_lost_total") == 0


def test_who_asks_is_told_of_a_folder_that_cannot_be_and_it_is_given_up_in_time(
    make, run, tmp_path, clock, monkeypatch
):
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    (tmp_path / "file").write_text("")
    recorder = make(folder=str(tmp_path / "file" / "rec"))
    said = []
    recorder.ask(0, "", lambda done, text: said.append((done, text)))
    run(recorder, 1)
    until(lambda: said, "an answer")
    assert not said[0][0]
    assert "Not a directory" in said[0][1]
    until(lambda: not recorder.writer.is_busy, "a request is not tried again")
    run(recorder, AFTER_SECONDS + 2, gpu(xids=1))
    until(lambda: recorder.writer.failures >= 3, "attempts")
    clock.advance(601 * NS_PER_SECOND)
    until(lambda: recorder.writer.lost == 1, "given up")
    until(lambda: not recorder.writer.is_busy, "ready for the next")


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    shelf = RecordingFolder(tmp_path / "rec", bytes_max=10**6)

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writer.os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        shelf.put([b"abc"], 3, "xid", 0)
    assert list((tmp_path / "rec").iterdir()) == []


def test_rotation_keeps_the_newest_and_touches_nothing_else(tmp_path):
    folder = tmp_path / "rec"
    shelf = RecordingFolder(folder, bytes_max=1000)
    assert shelf.size() == 0
    made = [shelf.put([b"x" * 300], 300, "xid", n * NS_PER_SECOND) for n in range(2)]
    (folder / "notes.txt").write_text("y" * 5000)
    (folder / "pacecar-left.tmp").write_text("half")
    for number, path in enumerate(made):
        os.utime(path, (number, number))
    made.append(shelf.put([b"x" * 300], 300, "xid", 0))
    made.append(shelf.put([b"x" * 300], 300, "gpu_lost", 0))
    assert {path.name for path in folder.iterdir()} == {"notes.txt", *(path.name for path in made[1:])}
    assert shelf.size() == 900


def test_a_folder_that_others_may_write_is_refused(tmp_path):
    folder = tmp_path / "rec"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(OSError, match="others may write"):
        RecordingFolder(folder, bytes_max=1000).put([b"x"], 1, "xid", 0)


# --- with its threads --------------------------------------------------------------------------------


def test_stopping_writes_what_a_trigger_still_wants_and_warnings_are_events(clock, tmp_path):
    limits = RecorderLimits(10**12, 10**6, str(tmp_path / "rec"), 10**7, 10**12)
    recorder = FlightRecorder(clock, limits, host="h", version="0")
    recorder.start()
    logging.getLogger("pacecar.monitor.test").warning("the %s is odd", "fan")
    recorder.overhear_tick(snapshot(1, gpu()))
    recorder.overhear_tick(snapshot(2, gpu(xids=1)))
    recorder.close()
    (path,) = files(tmp_path)
    read = read_recording(path)
    assert len(list(read.ticks())) == 2
    assert "pacecar.monitor.test: the fan is odd" in [event.text for _, event in read.events()]
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"pacecar-recorder", "pacecar-writer"}


def test_ticks_are_taken_several_at_a_time_and_a_request_at_once(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "IDLE_SECONDS", 60)
    limits = RecorderLimits(10**12, 10**6, str(tmp_path / "rec"), 10**7, 10**12)
    recorder = FlightRecorder(clock, limits, host="h", version="0")
    recorder.start()
    try:
        for number in range(2 * TICKS_TOGETHER):
            recorder.overhear_tick(snapshot(number, gpu()))
            if number == TICKS_TOGETHER - 2:
                assert value_of(recorder, "pacecar_recorder_entries_total") == 0
        until(lambda: value_of(recorder, "pacecar_recorder_entries_total") == 2 * TICKS_TOGETHER, "all were taken")
        recorder.overhear_tick(snapshot(number, gpu()))
        said = []
        recorder.ask(1000, "", lambda is_written, words: said.append(is_written))
        until(lambda: said == [True], "the file")
    finally:
        recorder.close()
