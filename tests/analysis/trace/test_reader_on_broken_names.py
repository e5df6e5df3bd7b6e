"""Text inside a file that looks like its structure: unescaped JSON in a name, a broken last event, a second trace."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pacecar.analysis.trace.reader import read_trace
from tests.analysis.trace.writing import PACKINGS, codes, document, host, kernel

NAMES = (
    '[{"lr": 1}, {"wd": 2}]',
    '[{"a": 1}, {"b": 2}], "c": [{"d": 3}]',
    '{"groups": [{"a": 1}, {"b": 2}]}',
    '{"a": [{"b": 1}], "ratio": 3}',
    'say "hi"',
    '"',
    'x"}]',
    '"}], "traceName": [{"a": "b',
    '"}, {"a": 1}, {"b": "',
)
"""Names as `record_function` gets them; torch 2.13 writes none of their quotes escaped."""

LENGTH = 9


def broken(name, place, events=LENGTH, after=None, is_array=False):
    """Return a trace of kernels in which one more row, at `place`, has `name` unescaped."""
    rows = [json.dumps(kernel(n, 1, "k", n), indent=1) for n in range(events)]
    rows.insert(place, json.dumps(host(3, 1, "QQ", "user_annotation"), indent=1).replace("QQ", name))
    if is_array:
        return ("[" + ",\n".join(rows) + "]").encode()
    return document(rows, after={"traceName": "x", "distributedInfo": {"rank": 3, "world_size": 8}} | (after or {}))


@pytest.mark.parametrize("place", [0, 1, LENGTH - 1, LENGTH])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_with_unescaped_json_costs_its_own_event_alone(read, name, place):
    for is_array in (False, True):
        trace = read(broken(name, place, is_array=is_array))
        assert trace.device.start_ns.tolist() == [n * 1000 for n in range(LENGTH)]
        assert not trace.is_truncated
        if not is_array:
            assert (trace.rank, trace.world_size) == (3, 8)
        lost = codes(trace)
        # Half an event may be JSON by itself; it has no time, and the other half no phase.
        assert lost.get("malformed_event", 0) + lost.get("bad_time", 0) in (1, 2)
        assert set(lost) <= {"malformed_event", "bad_time", "no_phase"}


@pytest.mark.slow
def test_so_does_one_in_each_piece_and_where_pieces_are_cut(read, monkeypatch):
    monkeypatch.setattr("pacecar.analysis.trace.decoding.compressed_source.PIECE_BYTES", 700)
    monkeypatch.setattr("pacecar.analysis.trace.decoding.compressed_source.READ_BYTES", 64)
    for name in NAMES:
        for shift in range(0, 300, 7):
            data = broken(name, 12, events=30).replace(b'"schemaVersion": 1', b'"schemaVersion": 1' + b" " * shift)
            trace = read(data)
            assert trace.device.start_ns.tolist() == [n * 1000 for n in range(30)], (name, shift)
            assert trace.rank == 3
            assert not trace.is_truncated


def test_torch_writes_such_names_and_all_operators_are_read(tmp_path):
    path = tmp_path / "t.json"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(20):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
            if number < len(NAMES):
                with record_function(NAMES[number]):
                    torch.relu(torch.ones(2))
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    names = [trace.names[number] for number in trace.host_rows.name.tolist()]
    assert names.count("aten::mm") == 20
    assert names.count("aten::relu") == len(NAMES)
    assert not trace.is_truncated


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "X", "cat": "python_function", "name": "torch\\cuda\\x.py(3): f", "ts": 1, "dur": 1}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": }',
        '{"ph": "X", "cat": "kernel", "name": "k"',
        '{"ph": "X", "cat": "kernel", "name": "k, "ts": 1}',
        '{"ph": "X", "cat": "kernel", "args": {"all": [{"a": 1}], "bad": \\}}',
        "17",
    ],
)
@pytest.mark.parametrize("size", [0, 2 << 20])
def test_a_broken_last_event_costs_itself_and_no_member_behind_it(read, event, size):
    """Also where the members behind the events are longer than a piece of the file."""
    members = {"deviceProperties": [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}], "notes": "n" * size}
    trace = read(
        document([kernel(1), kernel(2), event], after=members | {"distributedInfo": {"rank": 3, "world_size": 8}})
    )
    assert trace.device.start_ns.tolist() == [1000, 2000]
    assert (trace.rank, trace.world_size, trace.gpus) == (3, 8, ("A", "B"))
    assert not trace.is_truncated
    assert codes(trace)["malformed_event"] == 1


def test_a_cut_inside_the_last_event_is_still_a_cut(read):
    whole = document([kernel(1), kernel(2, grid=[1, 1, 1])])
    for data in (whole[:-5], whole[: whole.rindex(b"]", 0, -5) + 1], whole[whole.index(b"[") : -5]):
        trace = read(data)
        assert trace.is_truncated
        assert codes(trace)["truncated"] == 1


def test_what_follows_the_end_is_said_and_is_no_truncation(read):
    whole = document([kernel(1), kernel(2)])
    array = json.dumps([kernel(1), kernel(2)]).encode()
    for data, words in (
        (whole + b"garbage", "7 bytes follow"),
        (whole + b"\n" + whole, "second trace"),
        (whole + array, "second trace"),
        (array + b"garbage", "7 bytes follow"),
        (array + b"\n" + array, "second trace"),
        (PACKINGS["gzip"](whole) + PACKINGS["gzip"](whole), "second trace"),
    ):
        trace = read(data)
        assert trace.device.start_ns.tolist() == [1000, 2000], data[-20:]
        assert not trace.is_truncated
        assert codes(trace) == {"trailing_data": 1}
        assert words in trace.warnings[0].message


def pair(row):
    """Return the begin and the end of a complete event."""
    end = {key: row[key] for key in ("name", "pid", "tid")} | {"ph": "E", "ts": row["ts"] + row["dur"]}
    return [{key: row[key] for key in row if key != "dur"} | {"ph": "B"}, end]


def test_begins_and_ends_are_read_as_pairs(read):
    """Nested, beside complete events, and at times that a float cannot hold."""
    base = 1694128201436255.5
    rows = [kernel(base + 10 * n, 5.5, "k", n) for n in range(4)]
    outer, inner = host(base, 40.5, "outer"), host(base + 1, 2.5, "inner")
    begin, end = pair(outer)
    paired = read(document([begin, *pair(inner), rows[0], *[half for row in rows[1:] for half in pair(row)], end]))
    complete = read(document([outer, inner, *rows]))
    for side in ("device", "host_rows"):
        for column in ("start_ns", "end_ns", "correlation"):
            assert getattr(getattr(paired, side), column).tolist() == getattr(getattr(complete, side), column).tolist()
    assert codes(paired) == {}
    assert paired.device.end_ns[0] - paired.device.start_ns[0] == 5500


def test_halves_of_pairs_are_counted(read):
    rows = [half for n in range(3) for half in pair(kernel(10 * n, 5, f"k{n}", n))]
    begin_of, end_of = pair(kernel(100, 5, "never ends", 9))[0], pair(kernel(200, 5, "never began", 9))[1]
    nameless = pair(kernel(300, 5, "k3", 3))
    del nameless[1]["name"]
    trace = read(document([*rows, begin_of, end_of, *nameless]))
    assert trace.device.start_ns.tolist() == [0, 10_000, 20_000, 300_000]
    assert codes(trace) == {"unpaired": 2}
    assert "2" in trace.warnings[0].line


def test_rows_without_a_category_are_counted(read):
    rows = [{key: value for key, value in kernel(n).items() if key != "cat"} for n in range(20)]
    assert codes(read(document(rows))) == {"no_category": 20}
    frame = host(0, 9, "PyTorch Profiler (0)", "Trace")
    assert codes(read(document([frame, *rows[:2], kernel(1)]))) == {"no_category": 2}
