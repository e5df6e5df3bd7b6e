"""The fast reader against the slow one, on traces that others recorded."""

import numpy as np
import pytest

from pacecar.analysis.trace.columns import NONE, SyncRows
from pacecar.analysis.trace.reader import read_trace
from tests.analysis.trace.plain_reader import plain_read
from tests.analysis.trace.traces import each_kind, manifest, trace_file

DEVICE = ("start_ns", "end_ns", "work", "device", "stream", "correlation", "launch_ns")
SYNCS = tuple(SyncRows.__dataclass_fields__)
HOST = ("start_ns", "end_ns", "kind", "correlation")


def table(trace, rows, columns, *texts):
    """Return the rows as sorted tuples; numbers of names and threads as what they stand for."""
    listed = [getattr(rows, column).tolist() for column in columns]
    for column, words in texts:
        listed.append([words[number] for number in getattr(rows, column).tolist()])
    return sorted(zip(*listed, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", each_kind())
def test_every_column_equals_the_plain_readers(name):
    path = trace_file(name)
    fast, plain = read_trace(path), plain_read(path)
    assert table(fast, fast.device, DEVICE, ("name", fast.names), ("grid", (*fast.grids, ()))) == table(
        plain, plain.device, DEVICE, ("name", plain.names), ("grid", (*plain.grids, ()))
    )
    assert table(fast, fast.syncs, SYNCS) == table(plain, plain.syncs, SYNCS)
    threads = (("name", fast.names), ("thread", fast.threads)), (("name", plain.names), ("thread", plain.threads))
    assert table(fast, fast.host_rows, HOST, *threads[0]) == table(plain, plain.host_rows, HOST, *threads[1])
    assert fast.steps == plain.steps
    assert (fast.start_ns, fast.end_ns, fast.events) == (plain.start_ns, plain.end_ns, plain.events)
    assert (fast.world_size, fast.backend, fast.gpus) == (plain.world_size, plain.backend, plain.gpus)
    assert fast.wall_offset_ns == plain.wall_offset_ns
    assert fast.rank == plain.rank or (plain.rank is None and "rank_from_name" in [w.code for w in fast.warnings])
    assert not fast.is_truncated
    assert {warning.code for warning in fast.warnings} <= {"rank_from_name"}
    own_arguments_are_kept(fast, plain)


def own_arguments_are_kept(fast, plain):
    """What a collective's own arguments say is in its metadata."""
    said = {}
    for row in np.flatnonzero(plain.device.collective != NONE):
        said[plain.device.start_ns[row], plain.device.stream[row]] = plain.collectives[plain.device.collective[row]]
    found = 0
    for row in np.flatnonzero(fast.device.collective != NONE):
        key = (fast.device.start_ns[row], fast.device.stream[row])
        if key in said:
            mine = fast.collectives[fast.device.collective[row]]
            for field in ("dtype", "group", "group_size", "ranks", "sequence", "source_rank", "destination_rank"):
                assert getattr(mine, field) == getattr(said[key], field)
            found += 1
    assert found == len(said)


@pytest.mark.parametrize("name", each_kind())
def test_communication_has_an_operation_and_nothing_else_has(name):
    trace = read_trace(trace_file(name))
    rows = trace.device
    has = rows.collective != NONE
    assert np.array_equal(has, rows.work == 1)
    assert sum("nccl" in trace.names[number] for number in rows.name[has]) == manifest()[name]["comm_kernels"]
    assert {trace.collectives[number].operation for number in rows.collective[has]} <= {
        *("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter", "send_recv")
    }
