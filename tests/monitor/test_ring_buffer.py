"""The recorder's memory: what is younger than the window is there to the last value, and the bytes are bounded."""

import random

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.recorder import ring_buffer as tapes
from pacecar.monitor.recorder.ring_buffer import CHUNK_SECONDS, RingBuffer
from pacecar.records import Absent, Failed, Goodbye, Ok, Sample, Snapshot
from pacecar.records.recording import RecordingEvent, RecordingHeader, parts, read_recording
from pacecar.wire import encode_frame, payload_of

HEADER = RecordingHeader(host="h", pacecar_version="0", written_wall_ns=0, window_ns=0, triggers=())
WALL = 1_700_000_000 * NS_PER_SECOND


def snapshot(tick, samples, **outcomes):
    return Snapshot(
        tick, tick * NS_PER_SECOND, WALL + tick * NS_PER_SECOND, 0, {"a": Ok(tuple(samples)), **outcomes}, {"a": tick}
    )


@pytest.fixture
def read(tmp_path):
    def turn(chunks):
        path = tmp_path / "x.recording"
        path.write_bytes(b"".join(parts(HEADER, [chunk.body for chunk in chunks])))
        return read_recording(path)

    return turn


def test_ticks_of_the_same_series_in_the_same_order_come_back_as_they_were(read):
    chance = random.Random(9)
    tape, taken = RingBuffer(window_ns=10**12, bytes_max=10**9), []
    samples = [Sample("pacecar_host_disk_read_bytes_total", (f"nvme{n}",), n) for n in range(40)]
    for tick in range(35):
        for place in chance.sample(range(40), 5):
            samples[place] = Sample(samples[place].metric, samples[place].labels, chance.choice([0, 1.5, 2**60 + 1]))
        if tick in (15, 16):
            samples[3], samples[4] = samples[4], samples[3]
        twice = [*samples, samples[7]] if tick in (20, 21, 22) else samples
        taken.append({(one.metric, one.labels): one.value for one in samples})
        tape.tick(snapshot(tick, twice), tick * NS_PER_SECOND)
    assert [tick.values for tick in read(tape.seal(35 * NS_PER_SECOND)).ticks()] == taken


def test_a_tick_without_samples_ends_all_series_also_after_one_that_came_twice(read):
    tape, sample = RingBuffer(window_ns=10**12, bytes_max=10**9), Sample("pacecar_host_cpus_online", (), 3)
    for tick, samples in enumerate([[sample, sample], []]):
        tape.tick(snapshot(tick, samples), tick * NS_PER_SECOND)
    assert [tick.values for tick in read(tape.seal(2 * NS_PER_SECOND)).ticks()] == [{(sample.metric, ()): 3}, {}]


def test_ticks_come_back_as_they_were(read):
    chance = random.Random(8)
    tape, taken = RingBuffer(window_ns=10**12, bytes_max=10**9), []
    names = [("pacecar_host_disk_read_bytes_total", (f"nvme{n}",)) for n in range(40)]
    values = {name: 2**53 + n for n, name in enumerate(names)}
    for tick in range(35):
        for name in chance.sample(names, 5):
            values[name] = chance.choice([0, 1.5, 2**60 + 1, chance.randrange(10**9)])
        there = {name: values[name] for name in names if (names.index(name) + tick) % 7}
        taken.append(there)
        samples = [Sample(*name, value) for name, value in there.items()]
        tape.tick(snapshot(tick, samples, b=Failed("x") if tick % 3 else Absent("y")), tick * NS_PER_SECOND)
    back = list(read(tape.seal(35 * NS_PER_SECOND)).ticks())
    assert [tick.values for tick in back] == taken
    assert [tick.tick for tick in back] == list(range(35))
    assert [tick.wall_ns for tick in back] == [WALL + n * NS_PER_SECOND for n in range(35)]
    assert {tick.outcomes["b"] for tick in back} == {("failed", "x"), ("absent", "y")}


@pytest.mark.slow
def test_the_window_is_whole_and_memory_is_flat(read):
    window = 60
    tape = RingBuffer(window_ns=window * NS_PER_SECOND, bytes_max=10**9)
    bye = payload_of(encode_frame(Goodbye(job="j", rank=0, reason="r", wall_ns=1)))
    sizes = []
    for second in range(1000):
        at = second * NS_PER_SECOND
        tape.tick(snapshot(second, [Sample("pacecar_host_load_average", ("1m",), second)]), at)
        tape.glance([Sample("pacecar_gpu_power_watts", ("0",), second)], at + 1)
        tape.record(bye, at + 2)
        tape.event(RecordingEvent(at + 3, "log", str(second)))
        if second % 100 == 99:
            recorded = read(tape.seal(at + 3))
            ticks = [tick.tick for tick in recorded.ticks()]
            assert ticks == list(range(ticks[0], second + 1)), "without a gap"
            assert second - min(window, second) - CHUNK_SECONDS - 1 <= ticks[0] <= max(0, second - window)
            assert [v["pacecar_gpu_power_watts", ("0",)] for _, v in recorded.glances()][-len(ticks) :] == ticks
            assert [int(event.text) for _, event in recorded.events()][-len(ticks) :] == ticks
            assert 0 <= len(list(recorded.records())) - len(ticks) <= 1  # a chunk may begin inside a second
            sizes.append(tape.memory_bytes)
    assert max(sizes[1:]) < 1.3 * min(sizes[1:])
    assert tape.dropped == 0
    assert tape.entries == 4000


def test_over_its_bytes_the_oldest_goes_and_is_counted(read, monkeypatch):
    monkeypatch.setattr(tapes, "CHUNK_OPEN_BYTES", 20_000)
    chance = random.Random(8)
    tape = RingBuffer(window_ns=10**15, bytes_max=200_000)
    for number in range(2000):
        tape.record(b"\xc4\xc8" + chance.randbytes(200), number)
        assert tape.packed_bytes <= 200_000
        assert tape.memory_bytes <= 250_000
    kept = sum(len(chunk.records) for chunk in read(tape.seal(2000)).chunks())
    assert kept + tape.dropped == 2000
    assert 500 < kept < 1200


def test_series_that_come_and_go_do_not_fill_memory(monkeypatch):
    monkeypatch.setattr(tapes, "SERIES_MAX", 100)
    tape = RingBuffer(window_ns=10**15, bytes_max=10**6)
    for tick in range(200):
        tape.tick(snapshot(tick, [Sample("pacecar_gpu_processes", (f"{tick}-{n}",), 1) for n in range(30)]), tick)
        assert len(tape._numbers) <= 130


def test_an_empty_tape(read):
    tape = RingBuffer(window_ns=1, bytes_max=1)
    assert tape.seal(5) == ()
    assert tape.span_ns(5) == 0
    assert list(read(()).ticks()) == []
