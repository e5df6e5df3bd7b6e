"""The tables of real traces agree with arithmetic on their JSON, to the nanosecond."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache

import pytest

from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.one_rank.tables.all_tables import tables_of
from pacecar.analysis.trace.reader import read_trace
from tests.analysis.one_rank.tables.brute import around, charged, innermost, read_raw
from tests.analysis.trace.traces import each_kind, names, trace_file

SMALL = (
    "hta_amd_mi250/", "hta_event_sync/", "hta_simple_add/", "hta_triton/", "tl_h100_gaunernst", "tl_inf_vllm",
    "tl_mi300",
)  # fmt: skip
"""Traces in which arithmetic of quadratic cost is done in a moment."""


def of(*prefixes: str) -> list[str]:
    return [name for name in names() if name.startswith(prefixes)] or ["no traces here"]


@cache
def raw_of(name: str):
    return read_raw(trace_file(name))


@cache
def tables_for(name: str):
    trace = read_trace(trace_file(name), details=True)
    report = analyze_trace(trace)
    return report, tables_of(trace, report)[0]


@pytest.mark.parametrize("name", of(*SMALL))
def test_kernels_by_name_are_the_files_rows(name):
    tables, durations = tables_for(name)[1], defaultdict(list)
    for row in raw_of(name).device:
        if row.end > row.start:
            durations[row.name, row.work].append(row.end - row.start)
    assert {(row.name, row.work) for row in tables.kernels} == set(durations)
    for row in tables.kernels:
        its = sorted(durations[row.name, row.work])
        assert (row.count, row.duration_ns, row.min_ns, row.max_ns) == (len(its), sum(its), its[0], its[-1])
        assert row.median_ns == its[(len(its) - 1) // 2]
        assert row.launchers_count >= len(row.launchers) > 0
    assert [row.duration_ns for row in tables.kernels] == sorted((r.duration_ns for r in tables.kernels), reverse=True)


@pytest.mark.parametrize("name", of(*SMALL))
def test_each_instant_is_charged_to_one_kernel_and_all_add_up_to_the_ledger(name):
    report, tables = tables_for(name)
    found = Counter()
    for row in tables.kernels:
        found[row.name] += row.exposed_ns
    assert +found == charged(raw_of(name).device)
    by_kind = Counter()
    for row in tables.kernels:
        by_kind[row.work] += row.exposed_ns
    ledger = report.ledger
    assert by_kind["compute"] == ledger.compute_ns
    assert by_kind["communication"] == ledger.exposed_communication_ns
    assert by_kind["copy"] == ledger.exposed_copy_ns


@pytest.mark.parametrize("name", of(*SMALL))
def test_the_launching_operator_is_the_innermost_one_open_at_the_launch(name):
    raw, tables = raw_of(name), tables_for(name)[1]
    expected = Counter()
    for row in raw.device:
        call = raw.calls.get(row.args.get("correlation"))
        operator = None if call is None else innermost(raw.operators, call.thread, call.start)
        if row.end > row.start:
            expected[row.name, operator.name if operator is not None else None] += row.end - row.start
    found = Counter()
    for row in tables.kernels:
        if row.launchers_count <= len(row.launchers):
            for launcher in row.launchers:
                found[row.name, launcher.operator] += launcher.duration_ns
    listed = {row.name for row in tables.kernels if row.launchers_count <= len(row.launchers)}
    assert listed
    assert found == Counter({key: value for key, value in expected.items() if key[0] in listed})
    device = Counter()
    for row in tables.operators:
        device[row.name] += row.device_ns
    total = Counter()
    for (_, operator), value in expected.items():
        if operator is not None:
            total[operator] += value
    assert +device == +total


@pytest.mark.parametrize("name", of("hta_amd_mi250/", "hta_simple_add/", "tl_h100_gaunernst", "tl_mi300"))
def test_operators_have_the_files_counts_times_and_shapes(name):
    raw, tables = raw_of(name), tables_for(name)[1]
    count, host, own = Counter(), Counter(), Counter()
    for row in raw.operators:
        above = [one for one in around(raw.operators, row.thread, row.start) if one is not row and outside(one, row)]
        count[row.name] += 1
        own[row.name] += row.end - row.start
        if above:
            own[above[-1].name] -= min(row.end, above[-1].end) - row.start
        if row.name not in {one.name for one in above}:
            host[row.name] += row.end - row.start
        elif not any(same_call(one, row) for one in above):
            host[row.name] += row.end - row.start  # the out variant of itself: another line of the table
    found = {"count": Counter(), "host": Counter(), "own": Counter()}
    for row in tables.operators:
        found["count"][row.name] += row.count
        found["own"][row.name] += row.host_self_ns
        found["host"][row.name] += row.host_ns
    assert found == {"count": count, "host": host, "own": own}
    shapes, listed = Counter(), Counter()
    for row in raw.operators:
        dims = row.args.get("Input Dims", [])
        if not any(shape and isinstance(shape[0], list) for shape in dims):
            its = [shape for shape, kind in zip(dims, row.args.get("Input type", []), strict=True) if tensor(kind)]
            shapes[" ".join(map(str, its))] += 1
    for row in tables.operators:
        listed[row.shapes or ""] += row.count
    assert all(listed[text] == times for text, times in shapes.items() if text)


def same_call(one, row) -> bool:
    return one.name == row.name and one.args.get("Input Dims") == row.args.get("Input Dims")


def outside(one, row) -> bool:
    return (one.start, -one.end, one.order) < (row.start, -row.end, row.order) and one.end > one.start


def tensor(kind: str) -> bool:
    return kind.startswith("c10::") or kind[:1].islower()


@pytest.mark.parametrize("name", of("tl_h100_gaunernst", "tl_mi300"))
def test_modules_are_the_classes_around_the_operator(name):
    raw, tables = raw_of(name), tables_for(name)[1]
    expected = Counter()
    for row in raw.operators:
        path = [
            one.name.removeprefix("nn.Module: ").rpartition("_")[0]
            for one in around(raw.modules, row.thread, row.start)
        ]
        expected[row.name, "/".join(path) or None] += 1
    found = Counter()
    for row in tables.operators:
        found[row.name, row.module] += row.count
    assert found == expected
    assert any(module is not None and module.count("/") >= 3 for _, module in found)
    assert all(row.source is None or ".py(" in row.source for row in tables.operators)


@pytest.mark.parametrize("name", of(*SMALL))
def test_launches_are_the_files_calls(name):
    raw, launches = raw_of(name), tables_for(name)[1].launches
    uses = Counter(row.args.get("correlation") for row in raw.device if row.end > row.start)
    rows = [(row, raw.calls[row.args["correlation"]]) for row in raw.device if row.args.get("correlation") in raw.calls]
    rows = [(row, call) for row, call in rows if row.end > row.start]
    single = [(row, call) for row, call in rows if uses[row.args["correlation"]] == 1]
    assert (launches.rows, launches.graph_rows) == (len(rows), len(rows) - len(single))
    delays = sorted(max(row.start - call.end, 0) for row, call in single)
    assert launches.delay.median_ns == delays[(len(delays) - 1) // 2]
    assert (launches.delay.min_ns, launches.delay.max_ns) == (delays[0], delays[-1])
    short = [r.end - r.start for r, call in single if r.work != "copy" and r.end - r.start < call.end - call.start]
    assert (launches.short_kernels, launches.short_kernels_ns) == (len(short), sum(short))
    for queue in launches.queues:
        mine = [(r, c) for r, c in single if (r.args["device"], r.args["stream"]) == (queue.device, queue.stream)]
        waited = sum(max(row.start - call.start, 0) for row, call in mine)
        span = max(max(r.start, c.start) for r, c in mine) - min(min(r.start, c.start) for r, c in mine)
        if all(row.start >= call.start for row, call in mine) and span:
            assert queue.mean == pytest.approx(waited / span), "Little's law"


@pytest.mark.parametrize("name", of("tl_h100_gaunernst", "tl_mi300"))
def test_the_memory_peak_is_the_files(name):
    raw, memory = raw_of(name), tables_for(name)[1].memory
    totals = defaultdict(list)
    for _, args in raw.memory:
        totals[args["Device Type"], args["Device Id"]].append(args)
    assert sorted(row.peak_bytes for row in memory) == sorted(
        max(one["Total Allocated"] for one in its) for its in totals.values()
    )
    for row in memory:
        assert max(point.allocated_bytes for point in row.points) == row.peak_bytes
        assert not row.is_relative
        assert any(row.events == len(its) for its in totals.values())
    assert sum(row.allocated_bytes - row.freed_bytes for row in memory) == sum(args["Bytes"] for _, args in raw.memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", each_kind())
def test_on_every_trace_kernels_and_operators_add_up(name):
    report, tables = tables_for(name)
    busy = report.span_ns - report.idle_ns
    assert sum(row.exposed_ns for row in tables.kernels) == (0 if tables.launches is None else busy)
    for kernel in tables.kernels:
        listed = sum(launcher.duration_ns for launcher in kernel.launchers)
        assert listed == kernel.duration_ns or kernel.launchers_count > len(kernel.launchers)
    own = sum(row.device_ns for row in tables.operators)
    assert own <= sum(row.duration_ns for row in tables.kernels)
    assert sum(row.kernels for row in tables.operators) <= sum(row.count for row in tables.kernels)
    for row in tables.operators:
        assert row.device_total_ns >= row.device_ns
        assert row.host_self_ns >= 0


@pytest.mark.slow
def test_what_the_device_of_the_header_can_do_is_what_ratios_are_of():
    name = of("tl_h100_Qwen")[0]
    rows = tables_for(name)[1].roofline
    by = {row.shapes: row for row in rows}
    row = by["[8944, 1024] [1024, 2816]"]
    assert (row.kind, row.operator, row.arithmetic, row.count, row.launched) == (
        "matmul",
        "aten::mm",
        "bfloat16",
        48,
        48,
    )
    assert row.flops == 2 * 8944 * 1024 * 2816
    assert row.bytes == 2 * (8944 * 1024 + 1024 * 2816 + 8944 * 2816)
    assert row.flops_per_second == pytest.approx(48 * row.flops / row.busy_ns * 1e9)
    assert row.flops_ratio == pytest.approx(row.flops_per_second / 989.5e12)
    assert row.bandwidth_ratio == pytest.approx(48 * row.bytes / row.busy_ns / 3350)
    assert row.roofline_ratio == pytest.approx(row.flops_ratio)
    assert row.bound == "compute"
    attention = by["[16, 16, 559, 64] [16, 16, 559, 64] [16, 16, 559, 64]"]
    assert attention.flops == 2 * 16 * 16 * (559 * 560 // 2) * 128, "causal"


def test_an_unknown_device_has_rates_and_no_ratios():
    name = of("tl_inf_vllm")[0]
    rows = tables_for(name)[1].roofline
    assert rows
    for row in rows:
        assert row.flops_per_second > 0
        assert (row.peak_flops_per_second, row.flops_ratio, row.roofline_ratio, row.bound) == (None, None, None, None)
