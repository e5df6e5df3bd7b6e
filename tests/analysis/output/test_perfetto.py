"""The ledger as a trace: slices add up to it exactly, on the original's own time axis, and any reader can open it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pacecar.analysis.output.merged_trace import perfetto
from pacecar.analysis.output.merged_trace.perfetto import write_perfetto
from pacecar.analysis.output.merged_trace.trace_events import FIRST_PID, microseconds
from pacecar.analysis.reading.parallel_reading import Options, analyze
from pacecar.analysis.trace.reader import read_trace
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.records import LEDGER_HEADINGS
from tests.analysis.trace.traces import trace_file
from tests.analysis.tracefiles import START_US, document, write_trace

HEADING_OF = {word: heading for heading, word in HEADING_WORDS.items()}


def written(paths: list[Path], out: Path, **options: Any) -> tuple[dict[str, Any], Any]:
    analysis = analyze(paths, Options(keeps_tables=True, **options))
    write_perfetto(analysis, out)
    data = gzip.decompress(out.read_bytes()) if out.suffix == ".gz" else out.read_bytes()
    return json.loads(data, parse_float=Decimal, parse_int=Decimal), analysis.document


def is_ledger(event: dict[str, Any]) -> bool:
    return event.get("cat") == "ledger" and event["tid"] > 0


def sums(found: dict[str, Any], pid: int) -> dict[str, int]:
    totals: dict[str, Decimal] = defaultdict(Decimal)
    for event in found["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == pid and is_ledger(event):
            totals[HEADING_OF[event["name"]]] += event["dur"]
    return {name: int(total * 1000) for name, total in totals.items()}


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_slices_add_up_to_the_ledger_to_the_nanosecond(tmp_path: Path, name: str) -> None:
    trace = write_trace(tmp_path / "rank3.json", ("dccc.mm..ccoo", "..AAAAAA....."), rank=3, steps=[(0, 6), (6, 13)])
    found, document = written([trace], tmp_path / name)
    (report,) = document.traces
    assert sums(found, FIRST_PID) == {name: part for name, part in report.ledger.parts().items() if part}
    steps = [event for event in found["traceEvents"] if event["ph"] == "X" and event["tid"] == 0]
    assert [(step["name"], int(step["dur"] * 1000)) for step in steps] == [
        (f"step {step.step}", step.ledger.wall_ns) for step in report.steps
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hta_nccl_data", "tl_b200_eager_trace", "hta_cpu_only", "hta_trace_diff_test"])
def test_slices_of_real_traces_add_up_too_and_never_overlap(tmp_path: Path, name: str) -> None:
    found, document = written([trace_file(name)], tmp_path / "out.json")
    assert sums(found, FIRST_PID) == {name: part for name, part in document.traces[0].ledger.parts().items() if part}
    slices = sorted((e["ts"], e["dur"]) for e in found["traceEvents"] if e["ph"] == "X" and e["tid"] > 0)
    assert all(ts + dur <= after for (ts, dur), (after, _) in pairwise(slices))
    assert sum(dur for _, dur in slices) * 1000 == document.traces[0].span_ns


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(lanes=st.lists(st.text("cAmdo.", min_size=1, max_size=12), min_size=1, max_size=3))
def test_slices_of_any_trace_add_up(tmp_path_factory: pytest.TempPathFactory, lanes: list[str]) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    trace = write_trace(folder / "rank0.json", lanes, rank=0)
    assume(analyze([trace]).document.traces)  # a drawing without any work is refused
    found, document = written([trace], folder / "out.json")
    wanted = {name: part for name, part in document.traces[0].ledger.parts().items() if part}
    assert sums(found, FIRST_PID) == wanted


def test_slices_lie_where_the_kernels_of_the_original_lie(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "rank0.json", "cc..AAA", rank=0, offset_beats=5)
    found, _ = written([trace], tmp_path / "out.json")
    (compute,) = [e for e in found["traceEvents"] if e["ph"] == "X" and e["name"] == "compute"]
    assert float(compute["ts"]) == START_US + 5000
    assert found["baseTimeNanoseconds"] == 1_700_000_000_000_000_000, "the original's own, so that viewers align them"


def test_each_rank_is_a_process_of_its_own_that_no_process_of_the_original_is(tmp_path: Path) -> None:
    ranks = [
        write_trace(tmp_path / f"rank{rank}.json", "ccAAA" if rank else "ccccA", rank=rank, steps=[(0, 5)])
        for rank in range(2)
    ]
    found, document = written(ranks, tmp_path / "out.json")
    named = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert named == {
        FIRST_PID: "pacecar ledger, rank 0",
        FIRST_PID + 1: "pacecar ledger, rank 1",
        FIRST_PID - 1: "pacecar critical path of the job",
    }
    assert FIRST_PID > 2**22, "the largest process number that Linux can be told to give"
    for pid, report in zip(named, document.traces, strict=False):
        assert sums(found, pid) == {name: part for name, part in report.ledger.parts().items() if part}


def test_ranks_whose_files_begin_at_different_times_are_laid_on_one_axis(tmp_path: Path) -> None:
    """Torch writes times from a base that is the file's own: the same instant has another number in each."""
    ranks = []
    for rank in range(2):
        found = document("ccAAAcc", rank=rank, offset_beats=2 * rank)
        found["baseTimeNanoseconds"] -= 2_000_000 * rank
        ranks.append(tmp_path / f"rank{rank}.json")
        ranks[-1].write_text(json.dumps(found))
    found, _ = written(ranks, tmp_path / "out.json")
    starts = [
        [e["ts"] for e in found["traceEvents"] if e["ph"] == "X" and e["pid"] == FIRST_PID + rank and is_ledger(e)]
        for rank in range(2)
    ]
    assert starts[0] == starts[1]


def test_counters_show_each_step_and_end_at_zero(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.json", ("ccc...cc....", "..AAA...AA.."), steps=[(0, 6), (6, 12)])
    found, document = written([trace], tmp_path / "out.json")
    ledgers = [e for e in found["traceEvents"] if e["ph"] == "C" and e["name"] == "ledger (ms)"]
    assert [float(e["args"]["compute"]) for e in ledgers[:-1]] == [
        step.ledger.compute_ns / 1e6 for step in document.traces[0].steps
    ]
    assert set(ledgers[-1]["args"].values()) == {0}
    ratios = [float(e["args"]["ratio"]) for e in found["traceEvents"] if e["name"] == "overlap ratio"]
    assert ratios == pytest.approx([step.ledger.overlap_ratio for step in document.traces[0].steps])


def test_our_own_reader_takes_the_file_for_a_trace_without_work(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.json", "ccAA")
    written([trace], tmp_path / "out.json.gz")
    assert len(read_trace(tmp_path / "out.json.gz").device.start_ns) == 0


def test_the_same_analysis_gives_the_same_bytes(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.json", "cc..AAA")
    for name in ("one.json.gz", "two.json.gz"):
        written([trace], tmp_path / name)
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()


def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write_trace(tmp_path / "a.json", "cc..AAA")
    out = tmp_path / "out.json"
    out.write_text("older")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(perfetto, "_counters", fail)
    with pytest.raises(OSError, match="No space left"):
        written([trace], out)
    assert out.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "out.json"]


@given(st.integers(-(10**19), 10**19))
def test_nanoseconds_are_written_as_microseconds_exactly(time_ns: int) -> None:
    assert Decimal(microseconds(time_ns).decode()) * 1000 == time_ns


def test_every_heading_has_a_word_of_its_own() -> None:
    assert set(HEADING_OF.values()) == set(LEDGER_HEADINGS)
