"""What NCCL's Inspector wrote stands beside the ledger: of this run, and no other job's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pacecar.commands.main import cli
from tests.commands.report.runs import untuned
from tests.kit.nccl_files import inspector_line, prom_lines, write_inspector

NAME = "Communicators (NCCL's Inspector)"


def report(run: Path, **environ: str) -> Result:
    return CliRunner(env=environ).invoke(cli, ["report", str(run), "--json"])


def operations(done: Result) -> list[str]:
    return [row["operation"] for row in json.loads(done.stdout)["communicators"]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return untuned(tmp_path / "run")


@pytest.mark.slow
def test_files_in_the_run_folder_are_shown_on_the_page_and_in_markdown(run: Path) -> None:
    write_inspector(run / "nccl-inspector-17", [inspector_line(name="<dp>")] * 3)
    (run / "nccl_inspector_metrics_aa.prom").write_text(prom_lines(name="tp", operation="Broadcast"))
    done = report(run)
    assert (done.exit_code, done.stderr) == (0, "")
    assert operations(done) == ["all_reduce", "broadcast"]
    runner = CliRunner()
    text = runner.invoke(cli, ["report", str(run), "--markdown"]).stdout
    assert f"## {NAME}" in text
    assert "45.9 GB/s" in text
    assert runner.invoke(cli, ["report", str(run)]).exit_code == 0
    page = (run / "report.html").read_text()
    assert "<h3>Communicators (NCCL&#39;s Inspector)</h3>" in page, "the table has its title"
    assert "&lt;dp&gt;" in page
    assert "<dp>" not in page


def test_where_the_variable_says_only_the_runs_own_processes_count(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    write_inspector(folder, [inspector_line()], pid=101)
    write_inspector(folder, [inspector_line(operation="Broadcast")], pid=4711)
    write_inspector(folder, [inspector_line(operation="Reduce")], pid=101, host="node-z")
    assert operations(report(run, NCCL_INSPECTOR_DUMP_DIR=str(folder))) == ["all_reduce"]
    assert operations(report(run)) == []


def test_without_its_files_nothing_is_said(run: Path) -> None:
    done = report(run, NCCL_INSPECTOR_DUMP_DIR=str(run / "absent"))
    assert (done.exit_code, done.stderr, operations(done)) == (0, "", [])
    assert NAME not in CliRunner().invoke(cli, ["report", str(run), "--markdown"]).stdout


def test_what_is_left_out_is_a_notice(run: Path) -> None:
    path = write_inspector(run, [inspector_line(), "{}\n"])
    done = report(run)
    assert done.exit_code == 0
    assert f"NCCL's Inspector: {path}:2: left out" in done.stderr
