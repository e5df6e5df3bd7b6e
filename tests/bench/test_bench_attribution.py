"""The attribution bench measures what it says: its sums, its ratios, its processes and its artificial trace."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import attribution_figures as figures
from bench import bench_attribution as bench
from bench.attribution_figures import DECODING, HTA, INSIDE, OURS, SMALL, Contestant, Figure, Verdict
from bench.attribution_runs import artificial, trace_events
from tests.analysis.trace.plain_reader import plain_read

seconds = st.floats(0.01, 100.0)


def contestant(name, cpu_s, start_s=0.0, peak_bytes=100, start_bytes=0, **more):
    run = {"cpu_s": cpu_s, "wall_s": cpu_s, "peak_bytes": peak_bytes, "events": 1000, **more}
    small = {"cpu_s": start_s, "wall_s": start_s, "peak_bytes": start_bytes}
    return Contestant(name, [], {"file": [dict(run) for _ in range(3)], SMALL: [dict(small) for _ in range(3)]})


def field(ours_s=1.0, hta_s=20.0, work_s=1.2, limit_s=1.0, start_s=0.0):
    return {
        OURS: contestant(OURS, ours_s, start_s=start_s),
        INSIDE: contestant(INSIDE, ours_s, work_s=work_s),
        DECODING: contestant(DECODING, limit_s, work_s=limit_s),
        HTA: contestant(HTA, hta_s, peak_bytes=399),
    }


@pytest.mark.slow
@given(st.lists(seconds, min_size=1, max_size=9))
def test_a_figure_lies_between_its_lowest_and_highest(values):
    figure = Figure.of(values)
    assert figure.low <= figure.median <= figure.high
    assert {figure.low, figure.high} <= set(values)


@pytest.mark.parametrize(
    ("value", "is_least", "is_met"),
    [(15.0, True, True), (14.99, True, False), (1.3, False, True), (1.31, False, False)],
)
def test_an_aim_is_met_exactly_from_its_bound_on(value, is_least, is_met):
    verdict = Verdict("w", Figure(value, value, value), 15.0 if is_least else 1.3, is_least)
    assert verdict.is_met is is_met
    assert ("NOT met" in verdict.text()) is not is_met


def test_a_figure_without_an_aim_is_neither_met_nor_missed():
    verdict = Verdict("w", Figure(0.0, 0.0, 0.0))
    assert verdict.is_met is None
    assert "met" not in verdict.text()


@pytest.mark.slow
@given(seconds, seconds)
def test_starting_is_left_out_of_the_traces_share_and_of_nothing_else(start_s, trace_s):
    found = figures.costs(contestant(OURS, start_s + trace_s, start_s=start_s), "file")
    assert math.isclose(found["trace_cpu_s"].median, trace_s, rel_tol=1e-6, abs_tol=1e-6)
    assert found["cpu_s"].median == start_s + trace_s
    assert found["start_cpu_s"].median == start_s


def test_a_ratio_is_taken_between_neighbours_so_that_drift_cancels():
    ours, peer = contestant(OURS, 1.0), contestant(HTA, 1.0)
    for turn, (a, b) in enumerate(zip(ours.runs["file"], peer.runs["file"], strict=True)):
        a["cpu_s"], b["cpu_s"] = 1.0 + turn, 20.0 * (1.0 + turn)
    assert figures.ratio(peer, ours, "file", "cpu_s") == Figure(20.0, 20.0, 20.0)


def test_aims_against_hta_hold_on_the_judged_file_only():
    judged = {v.what: v.is_met for v in figures.verdicts(field(), "file", is_judged=True)}
    assert list(judged.values()) == [True, True, False, False, True, None]
    assert [v.is_met for v in figures.verdicts(field(), "file", is_judged=False)] == [None] * 4 + [True, None]


def test_a_peer_that_failed_on_a_file_is_absent_from_its_table_and_verdicts():
    missing = field()
    del missing[HTA].runs["file"]
    assert not any(HTA in verdict.what for verdict in figures.verdicts(missing, "file", is_judged=True))
    assert HTA not in "".join(figures.table(list(missing.values()), "file"))


def test_the_table_shows_zero_and_leaves_missing_empty():
    rows = figures.table(list(field(start_s=0.0).values()), "file")
    (starting,) = [row for row in rows if row.startswith("  of it starting, s")]
    assert starting.count("0.000 (0.000 to 0.000)") == 4
    (own,) = [row for row in rows if row.startswith("CPU by the process itself")]
    assert own.count(" to ") == 2


@pytest.mark.parametrize("gap_us", [0.0, 1.0, -1.0])
def test_results_within_a_microsecond_agree(gap_us):
    (line,) = figures.compared("peer", {"idle_us": 10.0}, {"idle_us": 10.0 + gap_us})
    assert line == f"peer: agrees on idle, within {abs(gap_us):.3f} us"


@pytest.mark.parametrize(("percent", "agrees"), [(14.76, True), (14.79, False)])
def test_overlap_agrees_within_the_decimals_that_are_printed(percent, agrees):
    (line, *_) = figures.compared("peer", {"overlap_percent": 14.7625}, {"overlap_percent": percent})
    assert ("agrees on overlap" in line) is agrees


def test_results_that_differ_are_named_with_the_reason_and_unknown_ones_are_not_compared():
    ours = {"idle_us": 0.0, "span_us": 5000.0, "exposed_us": None}
    theirs = {"idle_us": 2.0, "span_us": 5004.0, "exposed_us": 7.0, "communication_us": 1.0}
    lines = figures.compared("peer", ours, theirs, "of the moon")
    assert lines == ["peer: differs in idle 2.000 us (ours 0.000)", "  because of the moon"]
    assert "not investigated" in figures.compared("peer", ours, theirs)[1]


def test_a_document_of_analyze_is_read_under_the_names_of_the_bench():
    trace = {"span_ns": 10_000, "compute_ns": 4000, "communication_ns": 3000, "exposed_communication_ns": 2000}
    text = json.dumps({"traces": [{**trace, "idle_ns": 0, "events": 7, "overlap_ratio": None}]}).encode()
    said = bench.said(text)
    assert (said["span_us"], said["idle_us"], said["exposed_us"]) == (10.0, 0.0, 2.0)
    assert said["events"] == 7
    assert said["overlap_percent"] is None


def test_a_recorded_result_of_tracelens_serves_where_it_is_not_installed(tmp_path):
    recorded = {"total_time": 7, "total_comm_time": 3, "exposed_comm_time": 2, "idle_time": 0, "err": None}
    path = tmp_path / "some/trace.json.gz"
    entries = [{"file": "some/trace.json.gz", "tracelens_us": recorded}, {"file": "some/other.json.gz"}]
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    said = {"span_us": 7.0, "communication_us": 3.0, "exposed_us": 2.0, "idle_us": 0.0}
    assert bench.recorded_tracelens(path) == said
    assert bench.recorded_tracelens(path.with_name("other.json.gz")) is None
    assert bench.recorded_tracelens(tmp_path / "a/b/trace.json.gz") is None


@pytest.mark.slow
def test_cpu_time_is_that_of_the_process_and_not_of_the_clock():
    idle = bench.run([sys.executable, "-c", "import time; time.sleep(0.4)"])
    busy = bench.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"])
    assert idle["wall_s"] >= 0.4
    assert idle["cpu_s"] < 0.3 <= busy["cpu_s"]


@pytest.mark.slow
def test_peak_memory_is_that_of_the_process_even_when_a_large_one_starts_it():
    ballast = bytes(range(256)) * (1 << 20)  # 256 MB, which a child of this process would seem to have taken
    prove = "from bench.bench_attribution import prove_memory; prove_memory()"
    done = subprocess.run([sys.executable, "-c", prove], cwd=bench.ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, len(ballast)) == (0, "", 1 << 28)


@pytest.mark.slow
def test_a_bench_that_has_grown_large_refuses_to_measure():
    grown = "x = b'1' * (64 << 20); from bench.bench_attribution import prove_memory; prove_memory()"
    done = subprocess.run([sys.executable, "-c", grown], cwd=bench.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "peaks of children would not be theirs" in done.stderr


def test_a_process_that_fails_is_an_error_with_its_last_words():
    with pytest.raises(RuntimeError, match=r"ended with 3: .*no such thing"):
        bench.run([sys.executable, "-c", "import sys; sys.stderr.write('first\\nno such thing'); sys.exit(3)"])


def test_the_bench_takes_part_without_its_peers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert [c.name for c in bench.contestants()] == [OURS, INSIDE, DECODING]
    assert capsys.readouterr().err.count("is left out") == 2


@pytest.mark.slow
@given(st.integers(200, 3000))
def test_an_artificial_trace_has_about_as_many_events_and_is_the_same_each_time(count):
    rows = trace_events(count)
    assert 0.6 * count <= len(rows) <= count
    assert rows == trace_events(count)


@pytest.mark.slow
def test_an_artificial_trace_has_what_torch_writes(tmp_path):
    path = tmp_path / "trace.json.gz"
    artificial(path, 5000)
    trace = plain_read(path)
    assert (trace.rank, trace.world_size, trace.backend) == (0, 8, "nccl")
    assert [mark.number for mark in trace.steps] == [0, 1, 2]
    assert {trace.collectives[i].group_size for i in trace.device.collective if i >= 0} == {8}
    assert (trace.device.launch_ns >= 0).all()
    assert (trace.device.end_ns > trace.device.start_ns).all()
    assert gzip.decompress(path.read_bytes()).startswith(b"{")
