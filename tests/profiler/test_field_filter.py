"""What a reader would refuse is left out on the job's side, said once, and never an exception."""

import logging
import math

import msgspec
import pytest

from pacecar.profiler.transport.record_queue import FieldFilter, RecordQueue
from pacecar.records import Goodbye, HangSuspicion, JobHello
from pacecar.records.ranges import COUNT_MAX, TEXT_CHARACTERS_MAX
from pacecar.wire import decode_frame, encode_frame
from tests.kit.anyrecord import JOB_RECORDS, Rolled, make
from tests.kit.records import decision, job_hello, step_record, verdict
from tests.kit.waiting import until


def hang(**changes):
    given = {"job": "j", "rank": 0, "step": 1, "phase": "forward", "wall_ns": 1, "silent_ns": 5,
             "last_collective": None, "collectives": None, "stack": None}  # fmt: skip
    return HangSuspicion(**(given | changes))


@pytest.mark.parametrize("kind", JOB_RECORDS, ids=lambda kind: kind.__name__)
def test_a_record_in_order_is_sent_as_it_is(kind):
    sendable, source = FieldFilter("here"), Rolled(seed=3)
    for _ in range(5):
        record = msgspec.convert(make(kind, source), kind)
        assert sendable.make(record) is record


@pytest.mark.parametrize(
    ("record", "field", "becomes"),
    [
        (decision(expected_gain_ratio=math.nan), "expected_gain_ratio", None),
        (decision(expected_gain_ratio=-math.inf), "expected_gain_ratio", None),
        (step_record(samples=-3), "samples", None),
        (step_record(tokens=2**70), "tokens", None),  # MessagePack itself has no such integer
        (hang(collectives=COUNT_MAX + 1), "collectives", None),
        (hang(stack="s" * 9000), "stack", "s" * (TEXT_CHARACTERS_MAX - 3) + "..."),
        (hang(phase="p\udcff"), "phase", "p?"),  # a name of the machine that is no Unicode
    ],
)
def test_what_is_out_of_range_is_left_out_or_cut_and_said_once(caplog, record, field, becomes):
    sendable = FieldFilter("the daemon")
    with caplog.at_level(logging.WARNING):
        sent = [sendable.make(record) for _ in range(3)]
    assert [getattr(one, field) for one in sent] == [becomes] * 3
    assert decode_frame(encode_frame(sent[0])) == msgspec.structs.replace(record, **{field: becomes})
    assert [field in said.getMessage() for said in caplog.records] == [True]


def test_several_fields_of_one_record_are_left_out():
    odd = verdict(
        measured_gain_ratio=math.nan, gain_low=-math.inf, gain_high=math.inf, evidence=math.inf, reason="r" * 9000
    )
    sent = FieldFilter("here").make(odd)
    assert (sent.measured_gain_ratio, sent.gain_low, sent.gain_high, sent.evidence) == (None,) * 4
    assert len(sent.reason) == TEXT_CHARACTERS_MAX


@pytest.mark.parametrize("record", [step_record(overhead_ns=-1), Goodbye(job="j", rank=0, reason="", wall_ns=2**80)])
def test_a_record_that_cannot_be_mended_is_not_sent_and_said_once(caplog, record):
    sendable = FieldFilter("here")
    assert [sendable.make(record) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_the_courier_sends_what_can_be_sent_and_counts_the_rest():
    came = []

    class Carrier:
        destination = "here"

        def deliver(self, record, timeout_seconds):
            came.append(record)

        def listen(self):
            pass

        def close(self):
            pass

    courier = RecordQueue(Carrier())
    for changes in ({"step": 1}, {"step": 9, "overhead_ns": -1}, {"step": 2, "samples": -1}, {"step": 3}):
        courier.put(step_record(**changes))
    until(lambda: len(came) == 3)
    courier.close(5.0)
    assert [(r.step, r.samples) for r in came] == [(1, 16), (2, None), (3, 16)]
    assert courier.dropped == 1


def test_a_hello_is_mended_before_it_is_kept():
    sent = FieldFilter("here").make(job_hello(host="h" * 300, framework="torch\udc80"))
    assert isinstance(sent, JobHello)
    assert (len(sent.host), sent.framework) == (256, "torch?")
