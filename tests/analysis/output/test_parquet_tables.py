"""The Parquet files have the document's rows, and the traces' own, with words for numbers and nothing for unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyarrow import parquet

from pacecar.analysis.output.csv_tables import csv_tables
from pacecar.analysis.output.parquet_tables import write_parquet
from pacecar.analysis.reading.parallel_reading import Analysis, Options, analyze
from pacecar.commands.main import cli
from tests.analysis.tracefiles import write_trace
from tests.kit.simulated_jobs import Clocks, Job, Layout, simulate
from tests.kit.simulated_jobs.kineto import write_job

EVENTS = [
    {
        "ph": "X",
        "cat": "kernel",
        "name": "gemm",
        "ts": 10,
        "dur": 5,
        "pid": 0,
        "tid": 7,
        "args": {"device": 0, "stream": 7},
    },
    {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": "Memcpy HtoD",
        "ts": 16,
        "dur": 2,
        "pid": 0,
        "tid": 7,
        "args": {"device": 0},
    },
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Analysis, Path]:
    folder = tmp_path_factory.mktemp("job")
    job = Job(Layout(data=4, ranks_per_host=2), steps=3, seed=3, clocks=Clocks(offset_ns=2_000_000))
    (folder / "traces").mkdir()
    paths = write_job(folder / "traces", simulate(job).traces(), job.layout)
    analysis = analyze(paths, Options(keeps_tables=True, makes_tables=True))
    write_parquet(analysis, folder / "out")
    return analysis, folder / "out"


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return found


@pytest.mark.slow
def test_the_lists_are_those_of_the_csv_files(job: tuple[Analysis, Path]) -> None:
    analysis, folder = job
    tables = csv_tables(analysis.document)
    assert {path.stem for path in folder.glob("*.parquet")} == set(tables)
    for name, rows in tables.items():
        columns = dict.fromkeys(column for row in rows for column in row)
        assert rows_of(folder / f"{name}.parquet") == [{column: row.get(column) for column in columns} for row in rows]


@pytest.mark.slow
def test_the_rows_add_up_to_the_ledger_and_lie_on_one_clock(job: tuple[Analysis, Path]) -> None:
    analysis, folder = job
    assert analysis.times is not None
    together: dict[tuple[str, int], list[int]] = {}
    for report, trace in zip(analysis.document.traces, analysis.tables, strict=True):
        assert trace is not None
        rows = rows_of(folder / "device_rows" / f"rank{report.rank:06}.parquet")
        assert len(rows) == len(trace.device.start_ns)
        assert {row["rank"] for row in rows} == {report.rank}
        busy = sum(row["end_ns"] - row["start_ns"] for row in rows if row["work"] == "compute")
        assert busy == pytest.approx(report.compute_ns, rel=1e-4), (
            "one stream computes; kernels overlap by a microsecond"
        )
        reduced = [row for row in rows if row["collective"] == "all_reduce"]
        assert all(row["bytes"] > 0 and row["name"].startswith("nccl") for row in reduced)
        assert all(row["collective"] is row["bytes"] is None for row in rows if row["work"] == "compute")
        assert {row["step"] for row in rows} >= {step.step for step in report.steps}
        for at, row in enumerate(reduced):
            together.setdefault(("all_reduce", at), []).append(row["end_ns"])
        host = rows_of(folder / "host_rows" / f"rank{report.rank:06}.parquet")
        assert {row["kind"] for row in host} >= {"operator", "launch"}
    apart = [max(ends) - min(ends) for ends in together.values() if len(ends) == 4]
    assert len(apart) > 5
    assert sorted(apart)[len(apart) // 2] < 100_000, "hosts' clocks are 2 ms apart"


def test_what_is_unknown_has_no_value(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": EVENTS}))
    analysis = analyze([tmp_path / "a.json"], Options(keeps_tables=True))
    write_parquet(analysis, tmp_path / "out")
    kernel, copy = rows_of(tmp_path / "out" / "device_rows" / "trace000000.parquet")
    assert (kernel["name"], kernel["work"], kernel["stream"]) == ("gemm", "compute", 7)
    assert (kernel["start_ns"], kernel["end_ns"]) == (10_000, 15_000)
    unknown = ("rank", "launch_latency_ns", "correlation", "grid", "step", "collective", "bytes", "group")
    assert all(kernel[name] is None for name in unknown)
    assert copy["work"] == "copy"


def test_a_second_trace_of_a_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = [write_trace(tmp_path / f"{name}.json", drawing, rank=0) for name, drawing in (("a", "cc"), ("b", "cAcc"))]
    write_parquet(analyze(paths, Options(keeps_tables=True)), tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out" / "device_rows").iterdir())
    assert names == ["rank000000.parquet", "trace000001.parquet"]
    assert [len(rows_of(tmp_path / "out" / "device_rows" / name)) for name in names] == [1, 3]


@pytest.mark.slow
def test_rows_of_an_earlier_run_are_not_left_beside_the_new_ones(tmp_path: Path) -> None:
    paths = [write_trace(tmp_path / f"{rank}.json", "cAcc", rank=rank) for rank in range(3)]
    out = tmp_path / "out"
    write_parquet(analyze(paths, Options(keeps_tables=True)), out)
    (out / "device_rows" / "mine.parquet").write_bytes(b"")
    write_parquet(analyze(paths[:1], Options(keeps_tables=True)), out)
    assert sorted(path.name for path in (out / "device_rows").iterdir()) == ["mine.parquet", "rank000000.parquet"]
    assert [path.name for path in (out / "host_rows").iterdir()] == ["rank000000.parquet"]


@pytest.mark.slow
def test_the_command_writes_it_and_says_where_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": EVENTS}))
    wanted = ["analyze", str(tmp_path / "a.json"), "--json", "--parquet"]
    ran = CliRunner().invoke(cli, [*wanted, str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["traces"][0]["tables"] is not None
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"traces.parquet", "kernels.parquet", "device_rows"}
    (tmp_path / "file").write_text("")
    ran = CliRunner().invoke(cli, [*wanted, str(tmp_path / "file")])
    assert ran.exit_code == 1
    assert "file: cannot be written: file exists" in ran.stderr
    ran = CliRunner().invoke(cli, [*wanted, "-"])
    assert ran.exit_code == 2
    assert "--parquet writes a folder of files: - is not one" in ran.stderr
