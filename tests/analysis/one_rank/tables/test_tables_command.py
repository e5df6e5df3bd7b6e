"""`--tables`, `--csv` and the tables of `--compare`, as people and programs meet them."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from pacecar.analysis.document.report_tables import TABLE_NAMES
from pacecar.analysis.output.csv_tables import csv_tables
from pacecar.analysis.reading.parallel_reading import Options, analyze
from pacecar.analysis.trace.columns import NONE
from pacecar.commands.main import cli
from tests.analysis.trace.traces import each_kind, folder, trace_file
from tests.analysis.tracefiles import document, write_trace

MS = 1_000_000


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["analyze", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def job(tmp_path: Path) -> Path:
    for rank, drawing in enumerate(("cccc..AAcc", "cc....AAcc")):
        write_trace(tmp_path / f"rank{rank}.json", drawing, rank=rank, steps=[(0, 10)])
    return tmp_path


def test_the_help_names_every_table():
    text = " ".join(run("--help").split())
    named = re.search(r"some of ([a-z_, ]+)\.", text)
    assert named is not None
    assert named.group(1).replace(" ", "").split(",") == list(TABLE_NAMES)


def test_tables_are_printed_in_place_of_the_ledger(job: Path):
    text = run(job / "rank0.json", "--tables", "launches,kernels")
    assert text.index("Kernels (2), in ms") < text.index("Launches (0 calls")
    assert "Ledger" not in text
    assert re.search(r"ampere_sgemm_128x64_nn\s+2\s+6.00\s+75.0 %\s+6.00\s+6.00", text)
    everything = run(job / "rank0.json", "--tables", "all")
    for title in ("Kernels", "Operators", "Matmul", "Launches", "Memory", "Annotations", "All-to-all"):
        assert title in everything


def test_the_longest_are_those_with_the_most_of_the_time_asked_for(tmp_path: Path):
    drawing = ["cccc....", "AAAAAAA."]
    path = write_trace(tmp_path / "t.json", drawing, rank=0, world_size=2, steps=[(0, 8)])
    total, exposed = (run(path, "--tables", "kernels", "--by", by) for by in ("total", "exposed"))
    assert total.index("nccl") < total.index("ampere")
    assert exposed.index("ampere") < exposed.index("nccl")
    assert "Kernels (2, by exposed time), in ms" in exposed


def test_operators_by_exposed_time_show_it(tmp_path: Path):
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 9, "args": {}}
    number = {"correlation": 1}
    call = {**operator, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 2, "dur": 1, "args": number}
    kernel = {**operator, "cat": "kernel", "name": "sgemm", "tid": 7, "ts": 5, "args": {**number, "stream": 7}}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [operator, call, kernel]}))
    for by, column in (("total", "critical"), ("exposed", "exposed"), ("critical", "critical")):
        assert re.search(rf"self +{column}$", run(path, "--tables", "operators", "--by", by), re.MULTILINE), by


@pytest.mark.parametrize("names", ["kernel", "", "kernels,,memory"])
def test_a_table_that_does_not_exist_is_wrong_usage(job: Path, names: str):
    assert "roofline" in run(job, "--tables", names, code=2)


def test_options_that_contradict_each_other_are_wrong_usage(job: Path):
    assert "--tables" in run(job, "--by", "critical", code=2)
    assert "--tables" in run("--compare", job, job, "--tables", "kernels", code=2)


def test_json_has_the_tables_only_where_they_were_asked_for(job: Path):
    plain = json.loads(run(job, "--json"))
    assert [report["tables"] for report in plain["traces"]] == [None, None]
    full = json.loads(run(job, "--tables", "kernels", "--json"))
    kernels = [report["tables"]["kernels"] for report in full["traces"]]
    assert {row["name"]: row["duration_ns"] for row in kernels[1]}["ampere_sgemm_128x64_nn"] == 4 * MS
    for one, other in zip(plain["traces"], full["traces"], strict=True):
        assert {**one, "tables": None} == {**other, "tables": None}


def test_of_a_job_the_rank_with_most_of_the_critical_path_is_shown(job: Path):
    assert "2 traces; tables of rank 0, which has most of the critical path" in run(job, "--tables", "kernels")


def test_a_compared_kernel_is_new_gone_slower_faster_or_the_same(tmp_path: Path):
    sides = []
    for name, drawing, names in (
        ("before", "ccmAAA..cc", {"c": "old_kernel"}),
        ("after", "ccmAA...cc", {"c": "new_kernel"}),
    ):
        (tmp_path / name).mkdir()
        write_trace(tmp_path / name / "rank0.json", drawing, rank=0, steps=[(0, 10)], names=names)
        sides.append(tmp_path / name)
    found = json.loads(run("--compare", *sides, "--json"))["comparison"]["kernels"]
    by = {row["name"]: (row["status"], row["before_ns"], row["after_ns"]) for row in found}
    assert by["old_kernel"] == ("gone", 4 * MS, 0)
    assert by["new_kernel"] == ("new", 0, 4 * MS)
    assert [by[name] for name in by if "nccl" in name] == [("faster", 3 * MS, 2 * MS)]
    assert [by[name] for name in by if "Memcpy" in name] == [("same", MS, MS)]
    assert [row["name"] for row in found][:2] == ["new_kernel", "old_kernel"], "the greatest change, then the name"
    back = json.loads(run("--compare", *sides[::-1], "--json"))["comparison"]["kernels"]
    assert [row["name"] for row in back] == [row["name"] for row in found]
    text = run("--compare", *sides)
    assert re.search(r"old_kernel\s+4.00\s+2\s+0.00\s+0\s+-4.00\s+gone", text)


def test_csv_holds_the_documents_lists_under_its_names(job: Path, tmp_path: Path):
    out = tmp_path / "deep" / "out"
    found = json.loads(run(job, "--csv", out, "--json"))
    with (out / "kernels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    listed = [(report["file"], row) for report in found["traces"] for row in report["tables"]["kernels"]]
    assert len(rows) == len(listed)
    for line, (name, row) in zip(rows, listed, strict=True):
        assert line["file"] == name
        for field in ("name", "work", "count", "duration_ns", "exposed_ns", "critical_ns"):
            assert line[field] == str(row[field])
    with (out / "steps.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    assert [int(step["ledger.compute_ns"]) for step in steps] == [6 * MS, 4 * MS]
    ledgers = [step["ledger"] for report in found["traces"] for step in report["steps"]]
    for line, ledger in zip(steps, ledgers, strict=True):
        assert {name: line[f"ledger.{name}"] for name in ledger} == {name: str(ns) for name, ns in ledger.items()}
    assert {path.stem for path in out.iterdir()} >= {"traces", "job", "job_shares", "kernel_launchers", "launches"}
    with (out / "traces.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    assert "gpus" in columns
    assert not [name for name in columns if name.startswith(("tables", "warnings", "families"))]
    assert b"\r" not in (out / "traces.csv").read_bytes()


def test_a_folder_that_cannot_be_made_is_one_line(job: Path):
    assert "cannot be written" in run(job, "--csv", job / "rank0.json" / "out", code=1)


def test_an_unknown_is_an_empty_cell_and_zero_is_zero(job: Path):
    rows = csv_tables(analyze([job / "rank0.json"], Options(makes_tables=True)).document)
    (row,) = rows["traces"]
    assert row["checkpoint_ns"] == 0
    assert row["overlap_ratio"] == 0.0
    assert rows["kernels"][0]["critical_ns"] is not None
    assert rows["kernel_launchers"][0]["operator"] is None


def test_names_in_tables_cannot_steer_the_terminal(tmp_path: Path):
    trace = document("cc", names={"c": "evil\x1b[2Jkernel"})
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace))
    assert "\x1b" not in run(path, "--tables", "all")


@pytest.mark.slow
@pytest.mark.parametrize("name", each_kind())
def test_every_real_trace_has_tables_of_80_columns(name):
    text = run(trace_file(name), "--tables", "all")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_the_critical_path_in_tables_is_the_jobs():
    if folder() is None:
        pytest.skip("no traces here")
    files = sorted((folder() / "param_dlrm_8xV100").iterdir())
    document = analyze(files, Options(makes_tables=True)).document
    on_rows = Counter()
    for part in document.job.critical_path:
        if part.family is not None or part.collective is not None:
            on_rows[part.rank] += part.duration_ns
    for report in document.traces:
        assert sum(row.critical_ns for row in report.tables.kernels) == on_rows[report.rank]
        by_operator = sum(row.critical_ns for row in report.tables.operators)
        assert by_operator <= on_rows[report.rank]
    assert sum(on_rows.values()) > 0
    assert [row.rank for row in document.job.all_to_all] == list(range(8))
    for row in document.job.all_to_all:
        assert row.wait_ns + row.wire_ns == pytest.approx(row.duration_ns, rel=1e-4), "one clock and the other"
    assert sum(row.bytes_ratio for row in document.job.all_to_all) == pytest.approx(8)
    assert NONE not in {row.bytes for row in document.job.all_to_all}


def test_a_trace_alone_has_a_critical_path_of_its_own(tmp_path):
    path = write_trace(tmp_path / "t.json", "ccmm..cc", rank=0, steps=[(0, 8)])
    (report,) = analyze([path], Options(makes_tables=True)).document.traces
    assert {row.name[:6]: row.critical_ns for row in report.tables.kernels} == {"ampere": 4 * MS, "Memcpy": 2 * MS}
