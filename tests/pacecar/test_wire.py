"""Messages are decoded as encoded, and anything else is refused with a reason."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.records import Answer, Goodbye, JobHello, JobRecord, Knobs, Ledger, Request, StepRecord
from pacecar.wire import FRAME_BYTES_MAX, VERSION, FrameError, Refusal, decode_frame, encode_frame
from tests.kit.anyrecord import JOB_RECORDS, Drawn, make

KINDS = (*JOB_RECORDS, JobHello, Answer)


@st.composite
def records(draw: st.DrawFn) -> JobRecord | Answer:
    """Any record that a hook may send, in the ranges of its fields."""
    source = Drawn(draw)
    kind = source.pick(KINDS)
    record: JobRecord | Answer = msgspec.convert(make(kind, source), kind)
    return record


def step_record() -> StepRecord:
    ledger = Ledger(wall_ns=7, compute_ns=4, data_wait_ns=3)
    return StepRecord(
        job="j", rank=0, step=3, ended_wall_ns=9, wall_ns=7, data_wait_ns=0, forward_ns=None, backward_ns=None,
        optimizer_ns=1, micro_batches=2, samples=0, tokens=None, ledger=ledger, source="estimate",
        calibration_age_steps=None, totals=ledger, total_steps=1, total_samples=0, total_tokens=None,
        overhead_ns=0, total_overhead_ns=0, total_windows=0, dropped_records=0,
        knobs=Knobs(epoch=1, values={"micro_batch": 2}),
    )  # fmt: skip


@pytest.mark.slow
@given(records())
def test_every_record_survives_the_wire(record: JobRecord | Answer) -> None:
    assert decode_frame(encode_frame(record)) == record


def test_zero_and_missing_stay_different_on_the_wire() -> None:
    record = decode_frame(encode_frame(step_record()))
    assert isinstance(record, StepRecord)
    assert record.data_wait_ns == 0
    assert record.samples == 0
    assert record.forward_ns is None


def test_a_frame_cut_anywhere_is_truncated() -> None:
    frame = encode_frame(step_record())
    for length in range(len(frame)):
        with pytest.raises(FrameError) as caught:
            decode_frame(frame[:length])
        assert caught.value.refusal is Refusal.TRUNCATED, length


def test_a_frame_with_more_than_it_promises_is_malformed() -> None:
    with pytest.raises(FrameError, match="promises") as caught:
        decode_frame(encode_frame(step_record()) + b"\0")
    assert caught.value.refusal is Refusal.MALFORMED


def test_a_record_too_large_is_refused_by_the_sender() -> None:
    with pytest.raises(FrameError, match="Goodbye") as caught:
        encode_frame(Goodbye(job="j", rank=0, reason="x" * FRAME_BYTES_MAX, wall_ns=0))
    assert caught.value.refusal is Refusal.OVERSIZED


def test_a_frame_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    def request(last: int) -> Request:
        arguments: dict[str, int | str] = {chr(97 + n): "x" * (4090 if n < 15 else last) for n in range(16)}
        return Request(serial=0, job="j", action="tune", arguments=arguments)

    overhead = len(encode_frame(request(4000))) - 4000
    fits = request(FRAME_BYTES_MAX - overhead)
    frame = encode_frame(fits)
    assert len(frame) == FRAME_BYTES_MAX
    assert decode_frame(frame) == fits
    with pytest.raises(FrameError) as caught:
        decode_frame(frame + b"\0")
    assert caught.value.refusal is Refusal.OVERSIZED


def test_another_version_is_refused_and_both_versions_named() -> None:
    frame = bytearray(encode_frame(step_record()))
    frame[2] = VERSION + 1
    with pytest.raises(FrameError, match=f"version {VERSION + 1}, this side speaks {VERSION}") as caught:
        decode_frame(bytes(frame))
    assert caught.value.refusal is Refusal.VERSION


def test_what_is_not_ours_is_refused_by_its_magic() -> None:
    with pytest.raises(FrameError) as caught:
        decode_frame(b"GET / HTTP/1.1\r\n\r\n")
    assert caught.value.refusal is Refusal.MAGIC


def test_a_payload_that_is_no_record_is_malformed() -> None:
    good = encode_frame(step_record())
    for payload in (msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"type": "teapot"}), b"\xc1"):
        frame = good[:4] + len(payload).to_bytes(4, "big") + payload
        with pytest.raises(FrameError) as caught:
            decode_frame(frame)
        assert caught.value.refusal is Refusal.MALFORMED


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_never_raises_anything_else(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        decode_frame(garbage)


@pytest.mark.slow
@given(st.data())
def test_a_frame_with_a_flipped_byte_is_refused_or_still_a_record(data: st.DataObject) -> None:
    frame = bytearray(encode_frame(step_record()))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    try:
        record = decode_frame(bytes(frame))
    except FrameError:
        return
    assert isinstance(record, JobRecord)


def test_deep_nesting_is_refused_and_does_not_exhaust_the_stack() -> None:
    payload = b"\x81\xa4type" + b"\x91" * 60_000
    with pytest.raises(FrameError):
        decode_frame(b"PC" + bytes([VERSION, 0]) + len(payload).to_bytes(4, "big") + payload)
