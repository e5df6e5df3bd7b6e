"""One trace at a time, on traces that others recorded: exact figures, HolisticTraceAnalysis's and TraceLens's.

`exact_us` of the manifest was computed apart from this project; the tools' figures were produced by running them.
"""

import gzip
import json
import math
from functools import cache

import numpy as np
import pytest

from pacecar.analysis.one_rank.kernel_families import OTHER, family_of
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.trace.columns import WORKS
from pacecar.analysis.trace.reader import read_trace
from pacecar.analysis.trace.steps import rows_of_hta
from pacecar.ledger.attribution import Work
from pacecar.ledger.intervals import intervals, length, union
from pacecar.records import Ledger
from tests.analysis.trace.traces import manifest, names, trace_file

HTA_KEYS = ("hta_idle_time_us", "hta_compute_time_us", "hta_non_compute_time_us", "hta_kernel_time_us")

WITH_SYNC_ROWS = ("hta_event_sync/", "hta_simple_add/")
CPU_ROW_WITH_STREAM = "hta_triton/"


@cache
def trace_of(name):
    return read_trace(trace_file(name))


def entry_of(name):
    return manifest().get(name) or pytest.skip("no traces here")


def raw_rows(name):
    """Return the complete events of a trace file."""
    data = trace_file(name).read_bytes()
    document = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    return [event for event in document["traceEvents"] if event.get("ph") == "X"]


def picked(prefix):
    return next((name for name in names() if name.startswith(prefix)), "no traces here")


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_the_whole_trace_is_exact_to_the_nanosecond(name):
    exact = entry_of(name)["exact_us"]
    report = analyze_trace(trace_of(name))
    ours = {
        "span": report.span_ns,
        "idle": report.idle_ns,
        "comp": report.compute_ns,
        "comm": report.communication_ns,
        "mem": report.copy_ns,
        "overlap": report.overlapped_communication_ns,
        "exposed": report.exposed_communication_ns,
    }
    if exact:
        assert ours == {key: round(exact[key] * 1000) for key in ours}


@pytest.mark.parametrize("name", names())
def test_ledgers_add_up_and_steps_are_disjoint(name):
    entry_of(name)
    report = analyze_trace(trace_of(name))
    assert sum(report.ledger.parts().values()) == report.span_ns == report.ledger.wall_ns
    assert report.span_ns >= report.idle_ns >= 0
    for step, following in zip(report.steps, report.steps[1:], strict=False):
        assert step.start_ns + step.ledger.wall_ns <= following.start_ns
    marks = {mark.number for mark in trace_of(name).steps}
    assert not marks or {step.step for step in report.steps} == marks
    total = analyze_trace(trace_of(name), window="steps")
    if report.steps:
        assert total.span_ns == sum(step.ledger.wall_ns for step in report.steps)
        assert total.compute_ns == sum(step.ledger.compute_ns for step in report.steps)


@pytest.mark.parametrize("name", names())
def test_ledgers_agree_with_tracelens_where_it_is_right(name):
    """TraceLens rounds nothing, but charges copies and compute that overlap with communication in another order."""
    entry = entry_of(name)
    if not entry["tracelens_agrees_with_exact"]:
        pytest.skip("see the tests that say why")
    report, theirs = analyze_trace(trace_of(name)), entry["tracelens_us"]
    assert report.span_ns / 1000 == pytest.approx(theirs["total_time"], rel=1e-3, abs=1)
    assert report.idle_ns / 1000 == pytest.approx(theirs["idle_time"], rel=1e-3, abs=1)
    assert report.communication_ns / 1000 == pytest.approx(theirs["total_comm_time"], rel=1e-3, abs=1)


def test_tracelens_knows_communication_by_the_word_nccl_alone():
    """73 multimem all-reduces of the B200 trace are compute there, so it exposes a hundredth of the communication."""
    name = picked("tl_b200")
    trace, theirs = trace_of(name), entry_of(name)["tracelens_us"]
    report = analyze_trace(trace)
    mine = trace.device.work == WORKS.index(Work.COMMUNICATION)
    is_nccl = np.array(["nccl" in kernel for kernel in trace.names])[trace.device.name]
    spans = np.stack((trace.device.start_ns, trace.device.end_ns), axis=1)
    assert length(union(spans[mine & is_nccl])) / 1000 == pytest.approx(theirs["total_comm_time"], abs=0.01)
    assert report.communication_ns / 1000 == 2141.501
    assert [(total.operation, total.count) for total in report.collectives] == [("all_reduce", 73), ("all_gather", 1)]


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("kineto_tb")] or ["no traces here"])
def test_tracelens_does_not_know_the_categories_of_torch_1_8(name):
    """There a kernel's category is "Kernel" and a mark is an "Operator"; here both are read."""
    entry = entry_of(name)
    assert entry["tracelens_us"].get("total_time") is None or entry["tracelens_agrees_with_exact"] is None
    report = analyze_trace(trace_of(name))
    assert [step.step for step in report.steps] == [5, 6, 7, 8, 9, 10]
    assert report.span_ns / 1000 == entry["exact_us"]["span"]
    assert report.data_wait_ns > 0


# --- HolisticTraceAnalysis ----------------------------------------------------------------------


def hta_figures(report):
    """Return what HolisticTraceAnalysis prints, in its order, in microseconds."""
    idle, compute, span = report.idle_ns, report.compute_ns, report.span_ns
    return tuple(value / 1000 for value in (idle, compute, span - idle - compute, span))


def figures_of(work, others):
    """Return the same figures of `work` as HolisticTraceAnalysis would make them: compute, and anything else."""
    spans = np.concatenate((work, others))
    busy, compute = length(union(spans)), length(union(work))
    span = int(spans[:, 1].max() - spans[:, 0].min())
    return (span - busy) / 1000, compute / 1000, (busy - compute) / 1000, span / 1000


def kept_spans(trace):
    """Return the rows that HolisticTraceAnalysis counts: compute, and anything else that is work."""
    device, rows = trace.device, rows_of_hta(trace)
    is_compute = device.work == WORKS.index(Work.COMPUTE)
    spans = np.stack((device.start_ns, device.end_ns), axis=1)
    return spans[rows & is_compute], spans[rows & ~is_compute]


@pytest.mark.parametrize("name", names())
def test_window_hta_gives_its_figures_on_whole_microseconds(name):
    entry = entry_of(name)
    if not entry["integer_us_timestamps"] or "hta_idle_time_us" not in entry["hta"]:
        pytest.skip("fractions are rounded there, or it found no kernels")
    if name.startswith(WITH_SYNC_ROWS):
        pytest.skip("see the test of synchronization")
    report = analyze_trace(trace_of(name), window="hta")
    assert hta_figures(report) == tuple(entry["hta"][key] for key in HTA_KEYS)
    assert report.window == "hta"


@pytest.mark.parametrize("prefix", WITH_SYNC_ROWS)
def test_hta_counts_synchronization_as_work(prefix):
    """A `cuda_sync` row is the host waiting; take it for work, and its figures come out."""
    name = picked(prefix)
    entry, trace = entry_of(name), trace_of(name)
    expected = tuple(entry["hta"][key] for key in HTA_KEYS)
    assert hta_figures(analyze_trace(trace, window="hta")) != expected
    compute, others = kept_spans(trace)
    waits = intervals(
        (event["ts"] * 1000, (event["ts"] + event["dur"]) * 1000)
        for event in raw_rows(name)
        if event["cat"] == "cuda_sync" and event["args"]["stream"] >= 0
    )
    assert figures_of(compute, np.concatenate((others, waits))) == expected


def test_hta_counts_a_host_operator_with_a_stream_as_a_kernel():
    """torch.compile's row `triton_poi_fused_...` on the host has a stream; there it is 94 us of compute."""
    name = picked(CPU_ROW_WITH_STREAM)
    entry = entry_of(name)
    assert analyze_trace(trace_of(name)).compute_ns == 1760
    (row,) = (e for e in raw_rows(name) if e["cat"] == "cpu_op" and e.get("args", {}).get("stream", -1) >= 0)
    rounded = math.floor(row["ts"] + row["dur"]) - math.ceil(row["ts"])
    assert rounded == entry["hta"]["hta_compute_time_us"] == 94


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, entry in sorted(manifest().items())
        if not entry["integer_us_timestamps"]
        and "hta_idle_time_us" in entry["hta"]
        and not name.startswith((CPU_ROW_WITH_STREAM, "tl_b200"))
    ]
    or ["no traces here"],
)
def test_hta_rounds_each_kernel_inwards(name):
    """Each start up and each end down to whole microseconds: thousands of kernels lose one each."""
    entry = entry_of(name)
    expected = tuple(entry["hta"][key] for key in HTA_KEYS)
    rounded = []
    for spans in kept_spans(trace_of(name)):
        inwards = np.stack((-(-spans[:, 0] // 1000), spans[:, 1] // 1000), axis=1) * 1000
        rounded.append(inwards)
    assert figures_of(*rounded) == expected
    ours = hta_figures(analyze_trace(trace_of(name), window="hta"))
    assert ours[1] > expected[1], "rounding inwards can only lose"


# --- what else a trace says ---------------------------------------------------------------------


def test_a_cpu_job_with_gloo_has_a_ledger():
    """Rank 34 of 300: ten all-reduces in five pairs, and no operator before the last millisecond."""
    name = picked("hta_cpu_only")
    entry_of(name)
    trace = trace_of(name)
    report = analyze_trace(trace)
    assert (report.rank, report.world_size, report.backend) == (34, 300, "gloo")
    assert report.ledger == Ledger(
        wall_ns=1_264_550_593,
        compute_ns=3_964,
        exposed_communication_ns=1_102_980_645,
        communication_ns=1_102_980_645,
        host_bound_ns=10_623,
        unknown_ns=161_555_361,
    )
    assert report.span_ns - report.idle_ns == report.communication_ns + report.compute_ns
    assert [(total.operation, total.bytes, total.count) for total in report.collectives] == [
        ("all_reduce", 321_271 * 4, 5),
        ("all_reduce", 2_082_411 * 4, 5),
    ]
    assert [step.step for step in report.steps] == [551]


def test_collectives_with_metadata_have_bandwidths():
    name = picked("hta_nccl_data")
    entry_of(name)
    report = analyze_trace(trace_of(name))
    assert sum(total.count for total in report.collectives) == 21
    for total in report.collectives:
        assert total.algorithm_bandwidth == pytest.approx(total.bytes * 1e9 / total.median_ns)
        assert total.bus_bandwidth == pytest.approx(total.algorithm_bandwidth)  # two ranks: 2(n-1)/n is 1
    assert sum(total.exposed_ns for total in report.collectives) == report.exposed_communication_ns


@pytest.mark.parametrize("name", names())
def test_hardly_any_kernel_is_without_a_family(name):
    entry_of(name)
    report = analyze_trace(trace_of(name))
    others = [family for family in report.families if family.family == OTHER and "spin_kernel" not in family.largest]
    assert sum(family.share_ratio for family in others) < 0.002  # spin_kernel is torch.cuda._sleep: truly nothing
    assert sum(family.share_ratio for family in report.families) == pytest.approx(1 if report.families else 0)
    device = trace_of(name).device
    assert sum(family.duration_ns for family in report.families) == int((device.end_ns - device.start_ns).sum())
    kernels = {trace_of(name).names[number] for number in np.unique(device.name).tolist()}
    assert sum(family_of(kernel) == OTHER for kernel in kernels) <= 1


@pytest.mark.parametrize("name", names())
def test_gaps_are_the_idle_time(name):
    entry_of(name)
    report = analyze_trace(trace_of(name))
    if trace_of(name).has_device:
        assert sum(gap.duration_ns for gap in report.gaps) == report.idle_ns


def test_a_part_of_the_steps_is_their_part_of_the_whole():
    name = picked("hta_df_index_resolver")
    entry_of(name)
    whole = analyze_trace(trace_of(name))
    part = analyze_trace(trace_of(name), steps=(3, 4))
    assert [step.step for step in part.steps] == [3, 4]
    assert part.steps == whole.steps[1:3]
    assert part.ledger == whole.steps[1].ledger + whole.steps[2].ledger
    assert part.window == "steps"
    assert sum(family.duration_ns for family in part.families) < sum(family.duration_ns for family in whole.families)


@pytest.mark.parametrize("prefix", ["hta_amd_mi250", "tl_h100_gaunernst", "tl_mi300"])
def test_steps_are_marked_by_the_host_and_not_by_the_devices_copy(prefix):
    """The copy begins with the step's first kernel, later than the step, and a last step often has none."""
    name = picked(prefix)
    entry_of(name)
    rows = [row for row in raw_rows(name) if row["name"].startswith("ProfilerStep#")]
    host, device = ([row for row in rows if row["cat"] == cat] for cat in ("user_annotation", "gpu_user_annotation"))
    assert device
    report = analyze_trace(trace_of(name))
    assert [step.step for step in report.steps] == [int(row["name"].partition("#")[2]) for row in host]
    assert [step.start_ns for step in report.steps] == [round(row["ts"] * 1000) for row in host]
    assert all(row["ts"] > host[0]["ts"] for row in device)
