"""The merged trace of several ranks: on corrected clocks, well-formed for viewers, with the critical path drawn."""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.analysis.output.merged_trace import perfetto
from pacecar.analysis.output.merged_trace.path_slices import PATH_PID, PATH_TID
from pacecar.analysis.output.merged_trace.perfetto import write_perfetto
from pacecar.analysis.output.merged_trace.rank_rows import LANES_MAX, nested
from pacecar.analysis.output.merged_trace.trace_events import FIRST_PID
from pacecar.analysis.reading.parallel_reading import Analysis
from pacecar.analysis.trace.reader import read_trace
from tests.analysis.jobs import make_job
from tests.analysis.page_jobs import SLOW_RANK, analysis_of, straggling
from tests.kit.simulated_jobs import Job, Layout, Model, simulate

Event = dict[str, Any]


def events_of(analysis: Analysis, path: Path) -> list[Event]:
    write_perfetto(analysis, path)
    found: list[Event] = json.loads(path.read_bytes(), parse_float=Decimal, parse_int=Decimal)["traceEvents"]
    return found


def ends(event: Event) -> tuple[int, int]:
    return int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000)


@pytest.fixture(scope="module")
def slow() -> Analysis:
    return straggling()


@pytest.fixture(scope="module")
def pipeline() -> Analysis:
    """A job whose path goes from stage to stage, on hosts whose clocks are apart and drift."""
    job = Job(Layout(pipeline=2, data=2, ranks_per_host=2), Model(layers=1, microbatches=4), steps=3, seed=6)
    return analysis_of(simulate(job).traces())


@pytest.fixture(scope="module")
def merged(pipeline: Analysis, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    return events_of(pipeline, tmp_path_factory.mktemp("merged") / "out.json")


@pytest.mark.slow
def test_slices_of_every_track_nest_and_every_track_has_a_name(merged: list[Event]) -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in merged:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(ends(event))
    named = {(event["pid"], event["tid"]) for event in merged if event["name"] == "thread_name"}
    assert tracks.keys() <= named
    for rows in tracks.values():
        open_ends: list[int] = []
        for start, end in sorted(rows, key=lambda row: (row[0], -row[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_the_path_is_one_track_without_gaps_and_as_long_as_the_job(pipeline: Analysis, merged: list[Event]) -> None:
    path = [ends(event) for event in merged if event["ph"] == "X" and event["pid"] == PATH_PID]
    assert all(before[1] == after[0] for before, after in pairwise(path))
    assert pipeline.document.job is not None
    assert path[-1][1] - path[0][0] == pipeline.document.job.wall_ns
    of_ranks = [ends(e) for e in merged if e["ph"] == "X" and e["tid"] == PATH_TID and e["pid"] >= FIRST_PID]
    assert sorted(of_ranks) == path


def test_an_arrow_leads_wherever_the_path_changes_ranks_and_both_its_ends_are_on_slices(
    pipeline: Analysis, merged: list[Event]
) -> None:
    assert pipeline.times is not None
    hops = sum(a.rank != b.rank for a, b in pairwise(pipeline.times.path()))
    assert hops > 0
    starts = {event["id"]: event for event in merged if event["ph"] == "s"}
    finishes = {event["id"]: event for event in merged if event["ph"] == "f"}
    assert starts.keys() == finishes.keys()
    assert len(starts) == hops
    open_at: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in merged:
        if event["ph"] == "X" and event["tid"] == PATH_TID:
            open_at[event["pid"]].append(ends(event))
    for number, start in starts.items():
        finish = finishes[number]
        assert start["pid"] != finish["pid"]
        assert start["ts"] <= finish["ts"]
        for event in (start, finish):
            at = int(event["ts"] * 1000)
            assert any(low <= at < high for low, high in open_at[event["pid"]])
        assert finish["bp"] == "e"


def test_all_kernels_are_there_and_the_path_lies_on_those_that_it_names(
    pipeline: Analysis, merged: list[Event]
) -> None:
    rows = defaultdict(set)
    for event in merged:
        if event.get("cat") == "rank_device":
            rows[int(event["pid"])].add((event["name"], *ends(event)))
    for place, table in enumerate(pipeline.tables):
        assert table is not None
        assert len(rows[FIRST_PID + place]) == len(table.device.start_ns)
    # The model rounds an offset with its drift, the rows each by itself: a nanosecond apart at most.
    starts = {
        pid: {(name, start + off) for name, start, _ in found for off in (-1, 0, 1)} for pid, found in rows.items()
    }
    path = [e for e in merged if e["ph"] == "X" and e["tid"] == PATH_TID and e["args"].get("cause") == "compute"]
    assert path
    whole = sum((event["name"], ends(event)[0]) in starts[int(event["pid"])] for event in path)
    assert whole > len(path) * 0.9, "a row that is cut where another was waited for begins elsewhere"


def test_ranks_whose_clocks_differ_leave_their_collectives_together(tmp_path: Path) -> None:
    """A rank's clock is two milliseconds ahead; merged, its all-reduces end within a microsecond of the other's."""
    drawings = {0: "ccAAccAA" * 8, 1: "ccAAccAA" * 8}
    traces = make_job(drawings, host={0: "a", 1: "b"}, clock_ns={0: 0, 1: 2_000_000})
    found = events_of(analysis_of(traces), tmp_path / "out.json")
    mine = {rank: [ends(e)[1] for e in found if e.get("cat") == "rank_device" and e["pid"] == FIRST_PID + rank]
            for rank in (0, 1)}  # fmt: skip
    assert len(mine[0]) == 32
    assert np.abs(np.array(mine[0]) - np.array(mine[1])).max() < 1_000


@pytest.mark.slow
def test_the_slow_rank_has_the_path(slow: Analysis, tmp_path: Path) -> None:
    found = events_of(slow, tmp_path / "out.json")
    lasts: dict[int, int] = defaultdict(int)
    for event in found:
        if event["ph"] == "X" and event["tid"] == PATH_TID and event["pid"] >= FIRST_PID:
            lasts[int(event["pid"]) - FIRST_PID] += ends(event)[1] - ends(event)[0]
    assert max(lasts, key=lambda rank: lasts[rank]) == SLOW_RANK


@pytest.mark.slow
def test_of_too_many_rows_the_shortest_are_left_out_and_that_is_said(
    slow: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perfetto, "ROWS_MAX", 40)
    found = events_of(slow, tmp_path / "out.json")
    kept = [e for e in found if e.get("cat") in ("rank_device", "rank_host") and e["pid"] == FIRST_PID]
    table = slow.tables[0]
    assert table is not None
    count = len(table.device.start_ns) + len(table.host_rows.start_ns)
    assert len(kept) == 10
    (label,) = [e["args"]["labels"] for e in found if e["name"] == "process_labels" and e["pid"] == FIRST_PID]
    assert label == f"the {count - 10} shortest of {count} rows are left out"


@pytest.mark.slow
def test_our_own_reader_takes_it_for_a_trace_without_work(slow: Analysis, tmp_path: Path) -> None:
    events_of(slow, tmp_path / "out.json")
    trace = read_trace(tmp_path / "out.json")
    assert len(trace.device.start_ns) == 0
    assert len(trace.host_rows.start_ns) == 0


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=40))
def test_rows_of_one_lane_always_nest(pairs: list[tuple[int, int]]) -> None:
    rows = sorted(((start, start + length) for start, length in pairs), key=lambda row: (row[0], -row[1]))
    start = np.array([row[0] for row in rows], dtype=np.int64)
    end = np.array([row[1] for row in rows], dtype=np.int64)
    lane, cut = nested(start, end)
    assert (cut <= end).all()
    assert ((cut == end) | (lane == LANES_MAX - 1)).all(), "cut is only what no lane takes"
    for each in range(LANES_MAX):
        open_ends: list[int] = []
        for low, high in zip(start[lane == each].tolist(), cut[lane == each].tolist(), strict=True):
            while open_ends and open_ends[-1] <= low:
                open_ends.pop()
            assert not open_ends or high <= open_ends[-1]
            open_ends.append(high)
