"""Damage: what is sound is kept, what is not is said, and nothing else happens."""

import gzip
import json
import random
import zlib

import pytest

from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.reading.kept_answers import decode_answer, encode_answer
from pacecar.analysis.reading.one_file import WorkerAnswer
from pacecar.analysis.trace.columns import Trace
from pacecar.analysis.trace.decoding.compressed_source import READ_BYTES
from pacecar.analysis.trace.decoding.event_stream import EVENT_BYTES_MAX
from pacecar.analysis.trace.reader import TraceError, read_trace
from tests.analysis.trace.writing import PACKINGS, codes, document, host, kernel, launch
from tests.kit.selection import reduced


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"hello", "not JSON"),
        (b"PK\x03\x04", "not JSON"),
        (b"{", "no JSON either"),
        (b'{"a": 1}', 'without "traceEvents"'),
        (b'{"traceEvents": {"a": 1}}', "no array"),
        (b'{"traceEvents": null}', "no array"),
        (b"\x1f\x8b", "gzip stream ends"),
        (b"\x1f\x8b\x08" + b"\x00" * 7 + b"\xff" * 64, "damaged"),
        (b"\x28\xb5\x2f\xfdgarbage", "zstd stream"),
        (b"3", "not JSON"),
        (b'"traceEvents"', "not JSON"),
        (b"{" * 100_000, "no JSON either"),
    ],
)
def test_what_is_no_trace_is_one_error_with_the_file_and_the_reason(read, data, reason):
    with pytest.raises(TraceError, match=reason) as error:
        read(data, name="what.json")
    assert "what.json" in str(error.value)


def test_a_list_of_something_else_is_no_trace(read):
    for data in (b"[1, 2, 3]", b'["a"]', b"[[[]]]", b'[{"a": 1}, {"b": 2}]'):
        with pytest.raises(TraceError, match="not a trace"):
            read(data)


def test_no_events_are_a_trace_that_says_so(read):
    for data in (b'{"traceEvents": []}', b"[]"):
        trace = read(data)
        assert (trace.events, trace.start_ns, trace.is_truncated) == (0, None, False)
        assert codes(trace) == {"no_events": 1}


@pytest.mark.slow
def test_a_file_cut_anywhere_keeps_every_event_before_the_cut(read):
    events = [kernel(n, 1, "k", n) for n in range(6)]
    data = document(events, after={"traceName": "x"})
    ends = []
    at = 0
    for event in events:
        at = data.index(json.dumps(event, indent=1).encode(), at) + len(json.dumps(event, indent=1))
        ends.append(at)
    for cut in range(data.index(b"[") + 1, len(data)):
        trace = read(data[:cut])
        assert len(trace.device.start_ns) == sum(end <= cut for end in ends), cut
        assert trace.is_truncated
        assert codes(trace)["truncated"] == 1
        assert set(codes(trace)) <= {"truncated", "no_events", "header_unreadable"}


@pytest.mark.slow
def test_a_gzip_cut_anywhere_keeps_what_it_unpacks_to(read):
    data = document([kernel(n, n % 7, f"k{n}", n) for n in range(300)])
    packed = PACKINGS["gzip"](data)
    for cut in range(len(packed) // 3, len(packed), 67):
        unpacked = zlib.decompressobj(31).decompress(packed[:cut])
        trace = read(packed[:cut])
        assert trace.is_truncated
        assert abs(len(trace.device.start_ns) - (unpacked.count(b"},\n{"))) <= 1, cut
        assert "gzip stream ends" in trace.warnings[0].message


@pytest.mark.slow
def test_a_damaged_gzip_keeps_what_came_before_the_damage(read):
    data = document([kernel(n, n % 7, f"k{n}", n) for n in range(3000)])
    packed = bytearray(PACKINGS["gzip"](data))
    middle = len(packed) // 2
    packed[middle : middle + 64] = bytes(64)
    trace = read(bytes(packed))
    assert trace.is_truncated
    assert len(trace.device.start_ns) > 1000
    assert trace.device.start_ns.tolist()[:1000] == [n * 1000 for n in range(1000)]


def test_a_malformed_event_costs_itself_and_no_neighbour(read):
    good = [kernel(n, 1, "k", n) for n in range(8)]
    for bad in (
        '{"ph": "X", "cat": "kernel", name: 3}',
        '{"ph": "X" "cat": "kernel"}',
        '{"ph": "X", "cat": }',
        "17",
        "null",
        '["a"]',
        '{"ph": "X", "deep": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"ph": "X", "huge": -' + "}",
    ):
        trace = read(document([*good[:4], bad, *good[4:]]))
        assert trace.device.start_ns.tolist() == [n * 1000 for n in range(8)], bad[:40]
        assert codes(trace) == {"malformed_event": 1}, bad[:40]
        assert "byte" in trace.warnings[0].message


def test_rates_that_are_no_numbers_cost_nothing(read):
    events = [json.dumps(kernel(n, 1, rate=-7)).replace("-7", word) for n, word in enumerate(("inf", "-nan", "NaN"))]
    trace = read(document([*events, *(json.dumps(kernel(n, 1, rate=float("inf"))) for n in range(3, 6))]))
    assert trace.device.start_ns.tolist() == [n * 1000 for n in range(6)]
    assert trace.warnings == ()


@pytest.mark.parametrize(("group", "read_as"), [("größe", "größe"), ("\ud800", "?")])
def test_a_group_beside_a_broken_event_is_named_as_in_other_traces_and_can_be_written(read, group, read_as):
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
    args = {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float", "Process Group Name": group}
    row = kernel(name=name, **args) | {"tid": group}
    text = json.dumps(row, ensure_ascii=group == "\ud800")
    trace = read(document(['{"ph": "X", "name": oops}', text, kernel(start=200)]))
    assert [each.group for each in trace.collectives] == [read_as]
    answer = WorkerAnswer(report=analyze_trace(trace), table=trace)
    assert decode_answer(encode_answer(answer)).table.collectives == trace.collectives


def test_bytes_that_are_no_text_cost_a_letter_and_not_a_row(read):
    data = document([kernel(1, 1, "gemm"), kernel(2, 1, "gXmm"), kernel(3, 1, "g\nmm")])
    trace = read(data.replace(b"gXmm", b"g\xffmm").replace(b"g\\nmm", b"g\nmm"))
    assert trace.names == ("gemm", "g\ufffdmm", "g\nmm")
    assert trace.device.start_ns.tolist() == [1000, 2000, 3000]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dur": -1}, "negative_duration"),
        ({"dur": -0.5}, "negative_duration"),
        ({"dur": None}, "bad_time"),
        ({"ts": None}, "bad_time"),
        ({"ts": "soon"}, "bad_time"),
        ({"ts": 1e300}, "bad_time"),
        ({"ts": 1 << 62}, "bad_time"),
        ({"ts": -(1 << 63)}, "bad_time"),
        ({"ts": 1 << 64}, "bad_time"),
        ({"ts": [1]}, "bad_time"),
        ({"ts": True}, "bad_time"),
        ({"dur": "NaN"}, "bad_time"),
        ({"dur": "1e400"}, "bad_time"),
    ],
)
def test_a_row_without_a_sound_time_is_left_out_and_counted(read, change, code):
    trace = read(document([kernel(1, 1), {**kernel(2, 1), **change}, kernel(3, 1)]))
    assert trace.device.start_ns.tolist() == [1000, 3000]
    assert (trace.start_ns, trace.end_ns) == (1000, 4000)
    assert codes(trace) == {code: 1}


def test_a_row_that_lacks_its_time_is_left_out_and_counted(read):
    no_time, no_length = kernel(2), kernel(3)
    del no_time["ts"], no_length["dur"]
    trace = read(document([kernel(1), no_time, no_length]))
    assert trace.device.start_ns.tolist() == [1000]
    assert codes(trace) == {"bad_time": 2}


def test_numbers_of_a_million_digits_are_no_times_and_no_ids(read):
    digits = "9" * 1_000_000
    events = [json.dumps(kernel(-7)), json.dumps(kernel(2, correlation=-7)), json.dumps(kernel(3, unused=-7))]
    trace = read(document([event.replace("-7", digits) for event in events] + [kernel(4)]))
    assert trace.device.start_ns.tolist()[-2:] == [3000, 4000]
    assert trace.events + codes(trace).get("malformed_event", 0) == 4


def test_exponents_of_any_size_are_no_times_and_no_ids(read):
    words = ("1e99999999999999999999", "-1e999", "1e-99999999999999999999", "1e999999999999999999")
    events = [json.dumps(kernel(n, correlation=-7, unused=-7)).replace("-7", word) for n, word in enumerate(words)]
    broken = '{"ph": "X", "cat": }'  # so that each way of reading sees them
    for more in ([], [broken]):
        trace = read(document([*events, json.dumps(kernel(-7)).replace("-7", words[0]), *more, kernel(9)]))
        assert trace.device.start_ns.tolist() == [0, 1000, 2000, 3000, 9000]
        assert codes(trace)["bad_time"] == 1


@pytest.mark.slow
def test_an_event_larger_than_any_is_stepped_over(read):
    huge = kernel(2, 1, text="x" * (2 * EVENT_BYTES_MAX + 100))
    trace = read(document([kernel(1, 1), huge, kernel(3, 1), kernel(4, 1), kernel(5, 1)]))
    assert {1000, 4000, 5000} <= set(trace.device.start_ns.tolist())
    assert codes(trace) == {"malformed_event": 1}


@pytest.mark.slow
def test_a_bomb_of_brackets_ends_without_harm(read):
    for bomb in (
        b"[" * 1_500_000,
        b'{"a":' * 300_000,
        b"[{" * 400_000,
        b'"' * 500_000,
        b"},{" * 100_000,
        b'},{"' * 50_000,
    ):
        data = document([kernel(1, 1)])[:-2] + b"," + bomb
        trace = read(data)
        assert trace.device.start_ns.tolist() == [1000]
        assert trace.is_truncated


def test_what_follows_the_trace_is_said(read):
    data = document([kernel(1)], after={"deviceProperties": [{"name": "A"}]})
    assert codes(read(data + b'{"again": 1}')) == {"trailing_data": 1}
    assert codes(read(PACKINGS["gzip"](data) + b"junk!")) == {"trailing_data": 1}
    assert codes(read(PACKINGS["gzip"](data) + bytes(100))) == {}
    assert read(data + b"garbage").gpus == ("A",)


def test_a_broken_member_costs_only_itself(read):
    data = document([kernel(1)], {"distributedInfo": {"rank": 5}, "bad": 1, "baseTimeNanoseconds": 7})
    trace = read(data.replace(b'"bad": 1', b'"bad": nonsense'))
    assert (trace.rank, trace.wall_offset_ns) == (5, 7)
    assert codes(trace) == {"header_unreadable": 1}
    odd = {"distributedInfo": [1], "deviceProperties": 7, "baseTimeNanoseconds": "x", "hostname": {}}
    assert read(document([kernel(1)], odd)).rank is None
    odd = {"distributedInfo": {"rank": -1, "world_size": 1.5, "backend": 3, "pg_config": [1, {"pg_name": []}]}}
    trace = read(document([kernel(1)], odd))
    assert (trace.rank, trace.world_size, trace.backend) == (None, None, None)


def sample():
    """Return a trace with something of everything."""
    said = {"Collective name": "allreduce", "In msg nelems": 9, "dtype": "Float", "Process Group Ranks": "[0, 1]"}
    events = []
    for n in range(10):
        events += [
            host(n * 100, 90, f"aten::op{n % 3}"),
            launch(n * 100 + 5, 3, n),
            kernel(n * 100 + 20.125, 50, "k", n),
        ]
    events += [kernel(900, 40, "ncclDevKernel", 77, **said), host(0, 990, "ProfilerStep#1", "user_annotation")]
    members = {"distributedInfo": {"rank": 1, "world_size": 2}, "deviceProperties": [{"name": "A"}, {"name": "B"}]}
    return document(events, members, {"traceName": "x"})


@pytest.mark.slow
@pytest.mark.parametrize("how", PACKINGS)
def test_whatever_is_broken_gives_a_trace_or_a_trace_error(read, how):
    """Seeded mutations: flipped bytes, deleted and repeated stretches, inserted tokens."""
    whole = PACKINGS[how](sample())
    draw = random.Random(how)
    tokens = [b"{", b"}", b"[", b"]", b'"', b",", b"\\", b"\x00", b"\xff", b"-1", b"1e999", b"null", b'"ts": ', b"},{"]
    outcomes = {"trace": 0, "error": 0}
    for _ in range(reduced(250)):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            match draw.randrange(4):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at : at + draw.randint(1, 60)]
                case 2:
                    data[at:at] = draw.choice(tokens)
                case 3:
                    data[at:at] = data[at : at + draw.randint(1, 200)]
        try:
            trace = read(bytes(data))
        except TraceError:
            outcomes["error"] += 1
        else:
            outcomes["trace"] += 1
            check(trace)
    assert outcomes["trace"] > 0


def check(trace):
    """Assert what holds of every trace."""
    assert isinstance(trace, Trace)
    for rows in (trace.device, trace.host_rows):
        assert len({len(getattr(rows, column)) for column in rows.__slots__}) == 1
        starts, ends = rows.start_ns.tolist(), rows.end_ns.tolist()
        assert starts == sorted(starts)
        assert all(start <= end for start, end in zip(starts, ends, strict=True))
        assert all(0 <= number < len(trace.names) for number in rows.name.tolist())
        assert all(-1 <= number < len(trace.collectives) for number in rows.collective.tolist())
        if starts:
            assert trace.start_ns <= starts[0]
            assert trace.end_ns >= max(ends)
    assert len({warning.code for warning in trace.warnings}) == len(trace.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4_000, pytest.param(20_000, marks=pytest.mark.full)])
def test_damage_gives_the_same_with_and_without_the_fast_inflater(tmp_path, monkeypatch, rows):
    path = tmp_path / "t.json.gz"
    chance = random.Random(5)
    packed = gzip.compress(document([kernel(10 * i, 5, chance.randbytes(24).hex()) for i in range(rows)]), 6)
    assert len(packed) > 1.5 * READ_BYTES, "more than one read"
    places = [chance.randrange(len(packed) // 3, len(packed) - 8) for _ in range(reduced(12))] + [len(packed) - 6]
    kept = set()
    for place in places:
        path.write_bytes(packed[:place] + bytes([packed[place] ^ 0x55]) + packed[place + 1 :])
        fast = read_trace(path)
        with monkeypatch.context() as patch:
            patch.setattr("pacecar.analysis.trace.decoding.compressed_source._FAST", zlib)
            slow = read_trace(path)
        assert fast.warnings == slow.warnings
        assert fast.device.start_ns.tolist() == slow.device.start_ns.tolist()
        kept.add(fast.events)
    assert len(kept) > len(places) // 2, "the damage lies in different places"
