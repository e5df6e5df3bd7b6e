"""What the reader makes of traces that are sound, each in its own way."""

import gzip
import json
import random
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.analysis.trace.columns import NONE, WORKS, CollectiveColumns, HostKind, StepMark
from pacecar.analysis.trace.decoding.events import KNOWN_EVENTS, DigitEvent, TraceEvent
from pacecar.analysis.trace.reader import TraceError, read_trace
from tests.analysis.trace.writing import PACKINGS, codes, document, host, kernel, launch


def shown(trace):
    """Return everything but the file, with words for their numbers, whose order says nothing."""
    rows = []
    for part in (trace.device, trace.host_rows):
        columns = {column: np.asarray(getattr(part, column)).tolist() for column in part.__slots__}
        columns["name"] = [trace.names[number] for number in columns["name"]]
        rows.append(columns)
    return rows, [
        getattr(trace, name) for name in ("threads", "collectives", "start_ns", "end_ns", "events", "warnings")
    ]


@pytest.mark.parametrize("how", PACKINGS)
def test_the_packing_is_told_by_the_bytes_and_not_by_the_suffix(read, how):
    data = document([launch(), kernel(), host()])
    assert shown(read(PACKINGS[how](data), name="t.txt")) == shown(read(data))


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_members_of_a_packed_file_are_one_trace(read, how):
    data = document([launch(), kernel(), host()])
    pack = PACKINGS[how]
    assert shown(read(b"".join(pack(data[at : at + 50]) for at in range(0, len(data), 50)))) == shown(read(data))


def test_a_byte_order_mark_and_spaces_before_the_trace_are_stepped_over(read):
    assert read(b"\xef\xbb\xbf \n" + document([kernel()])).events == 1


def test_an_array_alone_is_a_trace_and_its_bracket_may_be_open(read):
    text = json.dumps([kernel(), kernel(200)]).encode()
    for data in (text, text[:-1], text[:-1] + b",\n", text + b"\n"):
        trace = read(data)
        assert (trace.events, len(trace.device.start_ns), trace.is_truncated) == (2, 2, False)


@pytest.mark.parametrize("where", ["before", "after"])
def test_members_are_read_on_either_side_of_the_events(read, where):
    pg = [{"pg_name": "3", "pg_size": 2, "ranks": [4, 5]}]
    members = {
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8, "pg_config": pg},
        "deviceProperties": [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}],
        "baseTimeNanoseconds": 1711964646000000000,
        "hostname": "node7",
    }
    allreduce = {"Collective name": "allreduce", "Process Group Name": "3", "Process Group Ranks": "[4, ...]"}
    trace = read(document([kernel(name="ncclDevKernel", **allreduce)], **{where: members}))
    assert (trace.rank, trace.world_size, trace.backend, trace.host) == (0, 8, "nccl", "node7")
    assert (trace.gpus, trace.wall_offset_ns) == (("A", "B"), 1711964646000000000)
    assert trace.collectives == (CollectiveColumns(operation="all_reduce", group="3", group_size=2, ranks=(4, 5)),)
    assert trace.warnings == ()


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-34.Jul_15.pt.trace.json.gz", 34),
        ("trace_8_rank_1.json", 1),
        ("worker3_step_12.1694128201557.pt.trace.json", 3),
        ("host_rank0.json", 0),
        ("frank7.json", None),
        ("coworker.json", None),
        ("trace.1694128201557.json", None),
    ],
)
def test_a_rank_from_the_files_name_is_said_to_be_that(read, name, rank):
    trace = read(document([kernel()]), name=name)
    assert trace.rank == rank
    assert codes(trace) == ({} if rank is None else {"rank_from_name": 1})


def test_rank_zero_of_the_header_is_a_rank(read):
    assert read(document([kernel()], {"distributedInfo": {"rank": 0}}), name="rank-7.json").rank == 0


@pytest.mark.slow
@given(
    base=st.sampled_from([0, 4458676524648, 1694128201436255, 1 << 50]),
    times=st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 999), st.integers(0, 10**8), st.integers(0, 999)), min_size=1
    ),
)
def test_every_nanosecond_of_the_digits_is_kept(base, times, tmp_path_factory):
    events = [
        f'{{"ph": "X", "cat": "kernel", "name": "k", "ts": {base + us}.{ns:03}, "dur": {length}.{length_ns:03}}}'
        for us, ns, length, length_ns in times
    ]
    path = tmp_path_factory.mktemp("t") / "t.json"
    path.write_bytes(document(events))
    trace = read_trace(path)
    spans = sorted(((base + a) * 1000 + b, (base + a) * 1000 + b + c * 1000 + d) for a, b, c, d in times)
    found = zip(trace.device.start_ns.tolist(), trace.device.end_ns.tolist(), strict=True)
    assert sorted(found) == spans


@pytest.mark.parametrize(
    "text", ["1694128201436255.1", '"1694128201436255.123"', "1.694128201436255123e15", "1694128201436255", "12", "0"]
)
def test_a_time_is_its_digits_however_they_are_written(read, text):
    event = json.dumps(kernel(start=-7)).replace("-7", text)
    exact = round(Fraction(text.strip('"')) * 1000)
    assert read(document([event])).device.start_ns.tolist() == [exact]


def test_integer_microseconds_are_told_from_fractions(read):
    assert read(document([kernel(5, 7)])).has_integer_microseconds
    assert not read(document([kernel(5, 7), kernel(6, 7.001)])).has_integer_microseconds


def test_categories_of_every_age_say_where_a_row_ran(read):
    old = [
        kernel(1, cat="Kernel"),
        kernel(2, cat="Memcpy", name="Memcpy HtoD"),
        kernel(3, cat="Memset", name="Memset"),
        host(4, cat="Operator", name="aten::mm"),
        host(5, cat="Runtime", name="cudaLaunchKernel", correlation=1),
        host(6, cat="Operator", name="ProfilerStep#7"),
        host(7, cat="Operator", name="enumerate(DataLoader)#_Single.__next__"),
        host(8, cat="Operator", name="Optimizer.step#SGD.step"),
    ]
    new = [
        kernel(11, cat="kernel"),
        kernel(12, cat="gpu_memcpy"),
        kernel(13, cat="mtia_workloadd"),
        host(14, cat="hip_runtime", name="hipDeviceSynchronize"),
        host(15, cat="privateuse1_runtime", name="npuLaunchKernel"),
        host(16, cat="user_annotation", name="save checkpoint"),
        host(17, cat="user_annotation", name="mine"),
        host(18, cat="user_annotation", name="gloo:all_reduce"),
        host(19, name="c10d::allreduce_"),
        host(20, cat="cuda_driver", name="cuGetProcAddress"),
    ]
    trace = read(document(old + new))
    work = [WORKS[number].value for number in trace.device.work]
    assert work == ["compute", "copy", "copy", "compute", "copy", "other"]
    assert [HostKind(kind).name for kind in trace.host_rows.kind] == [
        *("OPERATOR", "LAUNCH", "ANNOTATION", "LOADER", "OPTIMIZER", "SYNC", "LAUNCH", "CHECKPOINT", "ANNOTATION"),
        *("COLLECTIVE_WORK", "COLLECTIVE_CALL", "RUNTIME"),
    ]
    assert trace.steps == (StepMark(7, 6000, 11000),)


def test_what_is_on_a_device_but_is_no_work_is_left_out(read):
    """HTA and TraceLens count some of these: rows of synchronization, GPU-side step marks, CPU rows with a stream."""
    events = [
        kernel(1, 1),
        kernel(2, 50, cat="cuda_sync", name="Stream Synchronize"),
        kernel(3, 90, cat="gpu_user_annotation", name="ProfilerStep#3"),
        host(4, 90, name="triton_poi_fused_0", stream=7, device=0),
        kernel(5, 90, cat="overhead", name="Buffer Flush"),
        kernel(6, 90, cat="Trace", name="PyTorch Profiler (0)"),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 1, "id": 1},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ]
    trace = read(document(events))
    assert trace.device.start_ns.tolist() == [1000]
    assert trace.steps == ()
    assert (trace.start_ns, trace.end_ns, trace.events) == (1000, 95000, 8)
    assert trace.warnings == ()


def test_a_category_that_nobody_knows_is_said_and_costs_no_other_row(read):
    trace = read(document([kernel(1), kernel(2, cat="quantum_kernel"), kernel(3, cat="quantum_kernel")]))
    assert trace.device.start_ns.tolist() == [1000]
    assert codes(trace) == {"unknown_category": 1}
    assert "quantum_kernel" in trace.warnings[0].message


def test_a_kernel_knows_when_its_launch_began_and_no_other(read):
    events = [kernel(100, correlation=1), kernel(200, correlation=2), kernel(300, correlation=0), launch(95, 2, 1)]
    trace = read(document([*events, launch(97, 2, 0), launch(99, 2, 0), launch(1, 1, NONE)]))
    assert trace.device.launch_ns.tolist() == [95000, NONE, 97000]


def test_zero_is_a_device_a_stream_and_a_time(read):
    trace = read(document([kernel(0, 0, device=0, stream=0)]))
    rows = trace.device
    assert [rows.start_ns[0], rows.end_ns[0], rows.device[0], rows.stream[0]] == [0, 0, 0, 0]
    assert (trace.start_ns, trace.end_ns) == (0, 0)


@pytest.mark.slow
def test_rows_are_sorted_by_start_however_the_file_has_them(read):
    events = [kernel(n, 1, f"k{n}", n) for n in range(1000)] + [launch(n, 1, n) for n in range(1000)]
    random.Random(0).shuffle(events)
    trace = read(document(events))
    assert [trace.names[number] for number in trace.device.name] == [f"k{n}" for n in range(1000)]
    assert trace.device.launch_ns.tolist() == trace.host_rows.start_ns.tolist() == [n * 1000 for n in range(1000)]


@pytest.mark.slow
@pytest.mark.parametrize("how", PACKINGS)
def test_a_trace_of_many_pieces_equals_its_parts(read, how):
    """Events that lie across the ends of pieces, and braces in strings and nested lists where a cut would be wrong."""
    odd = {"Call stack": 'a},{"b": [{},{"', "list": [{"x": 1}, {"y": [{"z": 2}, {"z": 3}]}]}
    events = [kernel(n, 1, f"kernel<{{{n % 10}}}>", n, **odd) for n in range(6_000)]
    trace = read(PACKINGS[how](document(events, after={"deviceProperties": [{"name": "A"}, {"name": "B"}]})))
    assert trace.device.start_ns.tolist() == [n * 1000 for n in range(6_000)]
    assert len(trace.names) == 10
    assert trace.gpus == ("A", "B")
    assert trace.warnings == ()


@pytest.mark.slow
def test_progress_goes_up_to_the_files_size(read):
    data = gzip.compress(document([kernel(n, 1) for n in range(5000)]), 1)
    seen = []
    read(data, progress=lambda done, size: seen.append((done, size)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (len(data), len(data))


def test_an_event_of_odd_types_keeps_its_row(read):
    odd = kernel("100.5", "2", correlation="7", pid="0")
    odd["args"] |= {"stream": "9", "device": None, "Collective name": 5, "external": {}}
    null = {**kernel(300), "args": None, "tid": 3.0}
    trace = read(document([odd, kernel(200), null]))
    rows = trace.device
    assert rows.start_ns.tolist() == [100500, 200000, 300000]
    assert rows.end_ns.tolist() == [102500, 210000, 310000]
    assert rows.stream.tolist()[:2] == [9, 7]
    assert rows.correlation.tolist() == [7, 1, NONE]


def test_the_same_things_are_kept_once(read):
    said = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 4, "Out msg nelems": 4}
    trace = read(document([kernel(n, 1, "ncclKernel", n, **said) for n in range(50)]))
    assert trace.names == ("ncclKernel",)
    assert trace.collectives == (CollectiveColumns(operation="all_reduce", bytes=16, dtype="Float"),)
    assert set(trace.device.collective.tolist()) == {0}


def test_a_missing_file_and_a_folder_are_one_clear_error(tmp_path):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(TraceError, match=str(path)):
            read_trace(path)


@pytest.mark.parametrize("form", [KNOWN_EVENTS, list[TraceEvent], list[DigitEvent]])
def test_the_typed_decoders_take_what_kineto_writes(form):
    """Else everything would be right all the same, and five times slower."""
    said = {"Collective name": "allreduce", "Input Dims": [[3], []], "Process Group Ranks": "[0]", "Seq": 0}
    events = [kernel(1.5, 2, **said), launch(), {"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    decoded = msgspec.json.decode(json.dumps(events), type=form)
    assert [getattr(event, "ph", type(event).__struct_config__.tag) for event in decoded] == ["X", "X", "M"]
    assert decoded[0].args.operation == "allreduce"
