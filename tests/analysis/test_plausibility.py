"""Traces that contradict themselves: what is said, left out, cut, unknown or refused, and what is kept all the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacecar.analysis.plausibility.examine import Examined, examine
from pacecar.analysis.reading.parallel_reading import Options, analyze
from pacecar.analysis.trace.reader import read_trace
from tests.analysis.trace.traces import names, trace_file

Event = dict[str, Any]
STEPS = 6
BASE_US = 10_000.0
HOUR_US = 3600e6


def kernel(start: float, dur: float = 200, number: int = 1, stream: int = 7, **args: object) -> Event:
    where = {"device": 0, "stream": stream, "correlation": number} | args
    return {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": stream, "ts": start, "dur": dur, "args": where}


def call(start: float, dur: float, name: str, category: str = "cuda_runtime", **args: object) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": 9, "ts": start, "dur": dur, "args": args}


def launch(start: float, number: int, name: str = "cudaLaunchKernel") -> Event:
    return call(start, 5, name, correlation=number)


def mark(number: int, start: float, dur: float = 999) -> Event:
    return call(start, dur, f"ProfilerStep#{number}", "user_annotation")


def operator(start: float, dur: float = 50, name: str = "aten::mm") -> Event:
    return call(start, dur, name, "cpu_op")


def loop(steps: int = STEPS, base: float = BASE_US) -> list[Event]:
    """Return steps of 1 ms with 4 kernels of 200 us each, then a synchronization."""
    events: list[Event] = []
    for step in range(steps):
        begin = base + step * 1000
        events.append(mark(step, begin))
        for index in range(4):
            number = 4 * step + index + 1
            events.append(operator(begin + 18 + index * 15, 9))
            events += [launch(begin + 20 + index * 15, number), kernel(begin + 60 + index * 210, 200, number)]
    events.append(call(base + steps * 1000, 5, "cudaDeviceSynchronize", correlation=1000))
    return events


def cpu_loop(steps: int = 5) -> list[Event]:
    events: list[Event] = []
    for step in range(steps):
        events.append(mark(step, BASE_US + step * 1000))
        events += [operator(BASE_US + 20 + step * 1000 + index * 210, 200) for index in range(4)]
    return events


def is_kernel(event: Event) -> bool:
    return event["cat"] == "kernel"


@pytest.fixture
def read(tmp_path: Path):
    """Return a function that analyzes a trace of these events."""

    def read(events: list[Event], **members: object):
        path = tmp_path / "trace.json"
        document = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "traceEvents": events} | members
        path.write_text(json.dumps(document))
        return analyze([path], Options(makes_tables=True)).document

    return read


def effects(report) -> dict[str, str]:
    return {warning.code: warning.effect for warning in report.warnings}


def sound(read, events: list[Event] | None = None):
    """Return the report of the same loop without a fault, for which nothing is said."""
    (report,) = read(loop() if events is None else events).traces
    assert report.warnings == []
    return report


def refusal(document) -> str:
    assert document.traces == []
    (warning,) = document.warnings
    assert warning.effect == "refused"
    return warning.message


def test_a_sound_trace_is_left_as_it_is(tmp_path: Path, read) -> None:
    report = sound(read)
    assert (report.compute_ns, len(report.steps)) == (4_800_000, STEPS)
    trace = read_trace(tmp_path / "trace.json")
    assert examine(trace) == Examined(trace)
    assert examine(trace).trace is trace


@pytest.mark.parametrize("name", names())
def test_traces_that_others_recorded_are_believed(name: str) -> None:
    """None loses a row, a time or a step; what is said of five of them is true."""
    trace = read_trace(trace_file(name))
    examined = examine(trace)
    assert examined.refusal is None
    for rows in ("device", "host_rows", "syncs"):
        assert getattr(examined.trace, rows) is getattr(trace, rows)
    assert (examined.trace.steps, examined.trace.collectives) == (trace.steps, trace.collectives)
    assert examined.trace.is_device_complete
    said = {warning.code for warning in examined.trace.warnings} - {warning.code for warning in trace.warnings}
    assert said <= {"launches_missing", "work_outside_steps"}


# --- launches and kernels -----------------------------------------------------------------------


def test_launches_without_any_kernel_are_not_a_cpu_job(read) -> None:
    events = [event for event in loop() if not is_kernel(event)]
    assert f"{4 * STEPS} launches have no kernel" in refusal(read(events))


def test_a_file_cut_off_before_its_kernels_is_not_a_cpu_job(tmp_path: Path) -> None:
    events = sorted(loop(), key=is_kernel)
    text = json.dumps({"traceEvents": events})
    path = tmp_path / "cut.json"
    path.write_text(text[: text.index('"cat": "kernel"')])
    assert "cut off" in refusal(analyze([path]).document)


def test_copies_alone_do_not_stand_for_lost_kernels(read) -> None:
    copies = [event | {"cat": "gpu_memcpy", "name": "Memcpy HtoD"} for event in loop() if is_kernel(event)]
    events = [event for event in loop() if not is_kernel(event)]
    for copy in copies:
        copy["args"] = copy["args"] | {"correlation": copy["args"]["correlation"] + 500}
    events += [*copies, *(launch(copy["ts"] - 40, copy["args"]["correlation"], "cudaMemcpyAsync") for copy in copies)]
    assert "none of 24 launches" in refusal(read(events))


@pytest.mark.parametrize(("share", "effect"), [(0.004, "said"), (0.05, "unknown"), (0.3, "unknown"), (0.7, "refused")])
def test_a_part_of_the_kernels_lost_makes_idle_time_unknown(read, share: float, effect: str) -> None:
    draw = random.Random(5)
    events = loop(steps=250)
    numbers = [event["args"]["correlation"] for event in events if is_kernel(event)]
    lost = set(draw.sample(numbers[8:-8], round(share * len(numbers))))
    document = read([event for event in events if not is_kernel(event) or event["args"]["correlation"] not in lost])
    if effect == "refused":
        assert f"{len(lost)} of" in refusal(document)
        return
    (report,) = document.traces
    (warning,) = report.warnings
    assert (warning.code, warning.count, warning.effect) == ("kernels_lost", len(lost), effect)
    if effect == "unknown":
        assert report.unknown_ns == report.idle_ns > 0 == report.host_bound_ns
        assert (report.what_if, report.gaps) == ([], [])
    assert sum(report.ledger.parts().values()) == report.span_ns


@pytest.mark.parametrize("end", ["beginning", "end"])
def test_kernels_lost_at_an_end_cut_the_record_there(read, end: str) -> None:
    first, last = (9, 24) if end == "beginning" else (1, 14)
    events = [event for event in loop() if not is_kernel(event) or first <= event["args"]["correlation"] <= last]
    (report,) = read(events).traces
    assert effects(report)[f"kernels_lost_at_{end}"] == "cut"
    assert set(effects(report)) <= {f"kernels_lost_at_{end}", "work_outside_steps"}
    assert [step.step for step in report.steps] == ([2, 3, 4, 5] if end == "beginning" else [0, 1, 2])
    assert all(step.ledger.compute_ns == 800_000 for step in report.steps)


def test_a_single_loss_at_the_end_of_many_is_no_end_of_the_record(read) -> None:
    events = [event for event in loop() if not is_kernel(event) or event["args"]["correlation"] % 3]
    (report,) = read(events).traces
    assert effects(report) == {"kernels_lost": "unknown"}
    assert (report.warnings[0].count, len(report.steps)) == (8, STEPS)


def test_copies_of_no_bytes_captures_and_host_functions_need_no_kernel(read) -> None:
    events = loop() + [launch(BASE_US + 90 + n, 600 + n, "cudaMemsetAsync") for n in range(20)]
    events += [launch(BASE_US + 200, 700, "cudaLaunchHostFunc")]
    events += [call(BASE_US + 300, 2, "cudaStreamBeginCapture_v2"), call(BASE_US + 400, 2, "cudaStreamEndCapture")]
    events += [launch(BASE_US + 310 + n * 6, 800 + n) for n in range(10)]
    assert sound(read, events).compute_ns == 4_800_000


def test_kernels_without_launches_are_a_trace_of_the_device_alone(read) -> None:
    report = sound(read, [event for event in loop() if is_kernel(event)])
    assert (report.compute_ns, report.unknown_ns) == (4_800_000, report.idle_ns)
    (report,) = read([event for event in loop() if is_kernel(event) or event["args"].get("correlation", 99) > 8]).traces
    assert effects(report) == {"launches_missing": "said"}


def test_a_trace_of_the_host_alone_says_so(read) -> None:
    (report,) = read(cpu_loop()).traces
    assert effects(report) == {"host_only": "said"}
    (report,) = read(cpu_loop(), deviceProperties=[]).traces
    assert report.warnings == []
    (report,) = read(cpu_loop(), deviceProperties=[], distributedInfo={"backend": "nccl", "rank": 0}).traces
    assert effects(report) == {"host_only": "said"}


# --- clocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift_us", [-50_000, -700, 900, 50_000, 5e6])
def test_clocks_that_disagree_keep_the_device_and_lose_steps_and_causes(read, shift_us: float) -> None:
    events = [event | {"ts": event["ts"] + shift_us} if is_kernel(event) else event for event in loop()]
    (report,) = read(events).traces
    assert effects(report) == {"clocks_disagree": "unknown"}
    assert (report.compute_ns, report.host_bound_ns, report.steps) == (4_800_000, 0, [])
    assert report.unknown_ns == report.idle_ns > 0


@pytest.mark.parametrize("factor", [1000, 1 / 1000])
@pytest.mark.parametrize("keeps_synchronization", [True, False])
def test_device_times_in_another_unit_are_refused(read, factor: float, keeps_synchronization: bool) -> None:
    events = [event for event in loop() if keeps_synchronization or event["name"] != "cudaDeviceSynchronize"]
    for event in filter(is_kernel, events):
        event.update(ts=event["ts"] * factor, dur=event["dur"] * factor)
    assert "not in the same unit" in refusal(read(events))


def test_clocks_hours_apart_are_refused(read) -> None:
    events = [event | {"ts": event["ts"] + 5 * HOUR_US} if is_kernel(event) else event for event in loop()]
    assert "the device's rows lie 5.0h from the host's" in refusal(read(events))


def test_one_kernel_before_its_launch_costs_its_link(read) -> None:
    events = loop()
    next(event for event in events if event["name"] == "cudaLaunchKernel" and event["ts"] > 12_000)["ts"] += 2000
    (report,) = read(events).traces
    assert effects(report) == {"early_kernels": "unknown"}
    assert len(report.steps) == STEPS
    events = [event | {"ts": event["ts"] - 45} if is_kernel(event) else event for event in loop()]
    (report,) = read(events).traces
    assert effects(report) == {"early_kernels": "said"}
    assert report.warnings[0].count == STEPS


# --- one stream is serial -----------------------------------------------------------------------


def test_durations_in_another_unit_are_refused(read) -> None:
    events = [event | {"dur": event["dur"] * 1000} if is_kernel(event) else event for event in loop()]
    assert "beside later ones of their own stream" in refusal(read(events))


@pytest.mark.parametrize("length_us", [3e6, 1.7e15])
def test_a_kernel_that_outlasts_its_followers_is_left_out(read, length_us: float) -> None:
    events = loop()
    next(event for event in events if is_kernel(event) and event["ts"] > 12_000)["dur"] = length_us
    (report,) = read(events).traces
    assert effects(report)["overlong_rows" if length_us < HOUR_US else "endless_rows"] == "left_out"
    assert report.compute_ns == 4_600_000
    assert report.span_ns < 7_000_000


def test_dependent_launches_and_parallel_branches_of_a_graph_are_no_contradiction(read) -> None:
    touching = [event | {"dur": 211.5} if is_kernel(event) else event for event in loop()]
    assert sound(read, touching).compute_ns > 4_800_000
    branches = [kernel(BASE_US + 960 + n, 25, 900) for n in range(8)]
    events = [*loop(), launch(BASE_US + 950, 900, "cudaGraphLaunch"), *branches]
    assert sound(read, events).compute_ns > 4_800_000


# --- one recording ------------------------------------------------------------------------------


def test_rows_that_occur_twice_count_once(read) -> None:
    once = sound(read)
    (report,) = read([*loop(), *loop()]).traces
    assert effects(report) == {"repeated_rows": "left_out"}
    assert report.warnings[0].count == len(loop())
    assert (report.ledger, report.steps, report.families) == (once.ledger, once.steps, once.families)
    assert report.tables is not None
    assert sum(row.count for row in report.tables.operators) == 4 * STEPS


def test_two_recordings_in_one_file_are_refused(read) -> None:
    assert "more than one recording" in refusal(read([*loop(), *loop(base=BASE_US + 300)]))
    assert "more than one recording" in refusal(read([*loop(), *loop(base=BASE_US + 50_000)]))
    assert "not one recording" in refusal(read([*loop(), *loop(base=BASE_US + 30 * HOUR_US)]))


def test_two_processes_in_one_file_are_said(read) -> None:
    (report,) = read([*cpu_loop(), *(event | {"pid": 10} for event in cpu_loop())], deviceProperties=[]).traces
    assert effects(report)["several_processes"] == "said"


@pytest.mark.parametrize("start", [0, 500 * HOUR_US, -3000 * HOUR_US])
def test_a_row_far_from_all_others_is_left_out(read, start: float) -> None:
    once = sound(read)
    for row in (kernel(start, 10, 77), operator(start, 10), call(start, 10, "cudaMalloc"), mark(99, start, 10)):
        events = [event | {"ts": event["ts"] + 100 * HOUR_US} for event in loop()]
        document = read([*events, row])
        (report,) = document.traces
        assert effects(report) == {"distant_rows": "left_out"}
        assert (report.ledger, len(report.steps)) == (once.ledger, STEPS)


def test_hours_inside_a_row_are_believed(read) -> None:
    """A job that hung for two hours has a row that lasted as long."""
    late = [event | {"ts": event["ts"] + 2 * HOUR_US} for event in loop() if event["ts"] >= 13_000]
    wait = call(12_960, 2 * HOUR_US, "cudaStreamSynchronize", correlation=999)
    report = sound(read, [*(event for event in loop() if event["ts"] < 13_000), wait, *late])
    assert report.span_ns > 7_200_000_000_000


def test_an_operator_that_had_not_ended_is_cut(read) -> None:
    events = [*cpu_loop(), operator(14_950, 1_723_230_573_475_064.0, "aten::linear")]
    (report,) = read(events, deviceProperties=[]).traces
    assert effects(report) == {"unfinished_rows": "cut"}
    assert report.span_ns == 14_999_000 - 10_020_000
    assert report.compute_ns <= report.span_ns


def test_a_step_that_had_not_ended_is_cut(read) -> None:
    once = sound(read)
    events = loop()
    next(event for event in events if event["name"] == f"ProfilerStep#{STEPS - 1}")["dur"] = 1.7e15
    (report,) = read(events).traces
    assert effects(report) == {"unfinished_rows": "cut"}
    assert report.ledger == once.ledger
    assert report.steps[-1].ledger.wall_ns == 1_005_000


def test_launches_that_share_a_number_link_no_kernel(read) -> None:
    events = [*loop(), launch(BASE_US + 5990, 9)]
    (report,) = read(events).traces
    assert effects(report) == {"shared_correlations": "unknown"}
    nested = [*loop(), *(launch(event["ts"] + 1, event["args"]["correlation"], "cuLaunchKernel") | {"dur": 2}
                         for event in loop() if event["name"] == "cudaLaunchKernel")]  # fmt: skip
    assert sound(read, nested).compute_ns == 4_800_000


# --- steps --------------------------------------------------------------------------------------


def test_steps_without_any_work_are_not_used(read) -> None:
    events = [event | {"ts": event["ts"] + 20_000} if event["name"].startswith("Prof") else event for event in loop()]
    (report,) = read(events).traces
    assert effects(report) == {"steps_without_work": "left_out"}
    assert report.steps == []


def test_work_outside_of_the_steps_is_said(read) -> None:
    events = [event for event in loop() if event["name"] not in ("ProfilerStep#0", "ProfilerStep#1")]
    (report,) = read(events).traces
    assert effects(report) == {"work_outside_steps": "said"}
    assert "33.3 %" in report.warnings[0].message


# --- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "world", "left"), [(8, 8, None), (3, 0, None), (0, 1, 1), (7, 8, 8)])
def test_a_rank_outside_of_its_world_is_said(read, rank: int, world: int, left: int | None) -> None:
    (report,) = read(loop(), distributedInfo={"rank": rank, "world_size": world, "backend": "nccl"}).traces
    assert (report.rank, report.world_size) == (rank, left)
    assert effects(report) == ({"rank_out_of_range": "unknown"} if left is None else {})


def test_numbers_of_ranks_that_are_none_are_said(read) -> None:
    (report,) = read(loop(), distributedInfo={"rank": -1, "world_size": "many"}).traces
    assert (report.rank, report.world_size) == (None, None)
    assert "-1" in report.warnings[0].message


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"In msg nelems": -5, "Out msg nelems": -5}, "bytes"),
        ({"In msg nelems": 1 << 60, "Out msg nelems": 4}, "bytes"),
        ({"Group size": 0}, "group_size"),
        ({"Group size": -2}, "group_size"),
        ({"Group size": 16}, "group_size"),
        ({"Process Group Ranks": "[0, 1, 9]"}, None),
        ({"Process Group Ranks": "[0, 0]"}, None),
    ],
)
def test_counts_of_collectives_that_cannot_be_are_unknown(read, said: Event, field: str | None) -> None:
    sane = {"Collective name": "allreduce", "In msg nelems": 9, "Out msg nelems": 9, "dtype": "Float", "Group size": 2}
    ring = [kernel(BASE_US + 900 + 10 * n, 9, 500 + n, 20, **(sane | said)) for n in range(2)]
    events = [*loop(), *(launch(BASE_US + 100 + 9 * n, 500 + n) for n in range(2))]
    events += [*(event | {"name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL"} for event in ring)]
    (report,) = read(events, distributedInfo={"rank": 0, "world_size": 8, "backend": "nccl"}).traces
    assert effects(report) == {"impossible_collective": "unknown"}
    assert report.warnings[0].count == 2
    (total,) = report.collectives
    assert total.duration_ns == 18_000
    for name, value in (("bytes", 36), ("group_size", 2)):
        assert getattr(total, name) == (None if name == field else value)
    if field is not None:
        assert total.bus_bandwidth is None


def test_a_wall_clock_in_the_far_future_is_not_used(tmp_path: Path, read) -> None:
    now_us = 1_700_000_000_000_000
    events = [event | {"ts": event["ts"] + now_us} for event in loop()]
    (report,) = read(events, baseTimeNanoseconds=now_us * 1000).traces
    assert effects(report) == {"impossible_wall_clock": "unknown"}
    assert examine(read_trace(tmp_path / "trace.json")).trace.wall_offset_ns is None
    sound(read, events)


# --- nothing to analyze -------------------------------------------------------------------------


def test_what_holds_no_work_is_refused_with_the_reason(read) -> None:
    bare = [{key: value for key, value in event.items() if key != "cat"} for event in loop()]
    assert (
        f"without a category were left out: torch.profiler gives each of its rows one ({len(bare)} in all)"
        in refusal(read(bare))
    )
    assert "no event" in refusal(read([]))
    assert "no work" in refusal(read([mark(1, 10)]))
    assert "unpaired" not in refusal(read([event | {"ph": "i"} for event in loop()]))


def test_work_that_lasts_no_time_is_refused(read) -> None:
    assert "none of 24 kernels" in refusal(
        read([event | {"dur": 0} if is_kernel(event) else event for event in loop()])
    )
    assert "none of 20 operators" in refusal(read([event | {"dur": 0} for event in cpu_loop()]))


def test_a_refusal_says_what_was_odd_when_the_file_was_read(read) -> None:
    message = refusal(read([event | {"ph": "B"} if is_kernel(event) else event for event in loop()]))
    assert "24 launches have no kernel" in message
    assert "begins without an end" in message


def test_a_file_that_is_refused_costs_itself(tmp_path: Path, read) -> None:
    read([event for event in loop() if not is_kernel(event)])
    (tmp_path / "good.json").write_text(json.dumps({"traceEvents": loop()}))
    document = analyze([tmp_path / "trace.json", tmp_path / "good.json"]).document
    assert [Path(report.file).name for report in document.traces] == ["good.json"]
    assert document.warnings[0].code == "kernels_lost"
    assert "trace.json" in document.warnings[0].message


def test_details_stay_beside_their_rows(tmp_path: Path, read) -> None:
    """Rows that are left out take their details along."""
    events = [
        event | {"args": {"Input Dims": [[number, 3]], "Sequence number": number}}
        if event["cat"] == "cpu_op"
        else event
        for number, event in enumerate(loop())
    ]
    read([*events, *events, operator(BASE_US + 900 * HOUR_US)])
    trace = examine(read_trace(tmp_path / "trace.json", details=True)).trace
    assert trace.details is not None
    rows = np.flatnonzero(trace.details.sequence >= 0)
    shapes = [trace.details.signatures[trace.details.signature[row]].shapes for row in rows.tolist()]
    assert shapes == [b"[[%d, 3]]" % number for number in trace.details.sequence[rows].tolist()]
    assert len(rows) == 4 * STEPS
    assert len(trace.details.flops) == len(trace.host_rows.start_ns)
