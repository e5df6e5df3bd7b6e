"""`pacecar analyze` as people and programs meet it: what is on stdout, what on stderr, and the exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pacecar.commands import analyze
from pacecar.commands.main import _steps
from tests.analysis.trace.traces import each_kind, trace_file
from tests.analysis.tracefiles import write_trace
from tests.kit.forking_python import forking_python
from tests.kit.nccl_files import inspector_line, write_inspector

WANTED = {
    "file", "rank", "world_size", "backend", "span_ns", "compute_ns", "communication_ns",
    "overlapped_communication_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns", "unknown_ns", "steps",
    "collectives", "warnings",
}  # fmt: skip
"""The public fields that each trace has at least."""

OF_THE_COMMAND = (
    "numpy", "rich.console", "rich.table", "pacecar.analysis.reading.parallel_reading",
    "pacecar.analysis.output.text",
    "pacecar.analysis.output.page.picture", "pacecar.analysis.output.merged_trace.perfetto",
    "pacecar.analysis.output.page.page",
    "pacecar.analysis.output.comparetext",
)  # fmt: skip

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "FORCE_COLOR"}}


def command_line(*arguments: object) -> list[str]:
    """Return the command in a process that is forked with all its modules loaded."""
    python = forking_python(modules=("pacecar.commands.main", "pacecar.commands.analyze", *OF_THE_COMMAND))
    return [python, "-m", "pacecar", "analyze", *map(str, arguments)]


def pacecar(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    line = command_line(*arguments)
    return subprocess.run(
        line, capture_output=True, text=True, timeout=120, env={**ENVIRONMENT, **environ}, check=False
    )


def as_json(*arguments: object) -> dict[str, Any]:
    done = pacecar(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    drawing = ("dccccmm...cccc..oo", "...AAAAAA.........")
    return write_trace(tmp_path / "rank1.json.gz", drawing, rank=1, steps=[(0, 9), (9, 18)])


@pytest.mark.slow
def test_json_has_every_public_field_and_nothing_else_is_on_stdout(trace: Path) -> None:
    found = as_json(trace)
    assert found["version"] == 1
    assert found["job"] is None
    (report,) = found["traces"]
    assert set(report) >= WANTED
    assert (report["file"], report["rank"], report["world_size"], report["backend"]) == (str(trace), 1, 2, "nccl")
    assert report["span_ns"] == 13_000_000
    assert report["compute_ns"] == 8_000_000
    assert report["communication_ns"] == 6_000_000
    assert report["overlapped_communication_ns"] == 2_000_000
    assert report["exposed_communication_ns"] == 4_000_000
    assert [step["step"] for step in report["steps"]] == [3, 4]
    assert report["collectives"][0]["operation"] == "all_reduce"


@pytest.mark.slow
def test_json_is_written_without_rich_and_without_processes_torch_or_the_daemons_libraries(trace: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom pacecar.commands.analyze import *\n"
        f"run_analyze(AnalyzeOptions(paths=(Path({str(trace)!r}),), as_json=True))\n"
        "sys.stderr.write(' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stderr.split())
    assert json.loads(done.stdout)["traces"]
    assert not loaded & {"rich", "torch", "distributed", "multiprocessing", "psutil", "prometheus_client", "pynvml"}


@pytest.mark.slow
def test_a_table_says_what_the_trace_is_where_time_went_and_what_it_would_be_worth(trace: Path) -> None:
    done = pacecar(trace)
    assert done.returncode == 0
    assert done.stderr == ""
    for words in ("rank 1 of 2, nccl", "exposed communication", "overlapped by compute", "2 steps", "What if"):
        assert words in done.stdout, words
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "begins"), [("--html", "<!doctype html>"), ("--picture", "<svg"), ("--perfetto", "{")]
)
def test_a_dash_writes_to_standard_output_which_has_nothing_else(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, begins: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = pacecar(trace, option, "-")
    assert (done.returncode, done.stderr) == (0, "")
    pacecar(trace, option, tmp_path / "same")
    assert done.stdout == (tmp_path / "same").read_text()
    assert done.stdout.startswith(begins)
    assert not Path("-").exists()


@pytest.mark.parametrize("options", [["--html", "-", "--picture", "-"], ["--json", "--perfetto", "-"], ["--csv", "-"]])
def test_standard_output_takes_one_document_and_no_folder(trace: Path, options: list[str]) -> None:
    done = pacecar(trace, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert "- is not one" in done.stderr or "standard output takes one" in done.stderr


@pytest.mark.slow
def test_no_color_is_respected_even_where_colour_is_forced(trace: Path) -> None:
    assert "\x1b[38" in pacecar(trace, FORCE_COLOR="1", TERM="xterm-256color").stdout
    plain = pacecar(trace, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1").stdout
    assert "\x1b[38" not in plain


@pytest.mark.slow
def test_steps_are_chosen_by_number_both_ends_included(trace: Path) -> None:
    assert [step["step"] for step in as_json(trace, "--steps", "4:4")["traces"][0]["steps"]] == [4]
    assert [step["step"] for step in as_json(trace, "--steps", "3:")["traces"][0]["steps"]] == [3, 4]
    assert as_json(trace, "--steps", ":3")["traces"][0]["window"] == "steps"


@pytest.mark.parametrize(
    ("text", "steps"),
    [(None, None), ("3:7", (3, 7)), ("5", (5, 5)), ("2:", (2, sys.maxsize)), (":4", (0, 4)), ("0:0", (0, 0))],
)
def test_ranges_of_steps_are_understood(text: str | None, steps: tuple[int, int] | None) -> None:
    assert _steps(text) == steps


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "give traces"),
        (("x.json", "--steps", "7:3"), "--steps 7:3"),
        (("x.json", "--steps", ":"), "--steps :"),
        (("x.json", "--steps", "a:b"), "--steps a:b"),
        (("x.json", "--window", "door"), "door"),
        (("x.json", "--window", "hta", "--steps", "3:4"), "--steps"),
        (("x.json", "--compare", "a", "b"), "--compare"),
        (("--compare", "a", "b", "--picture", "p.svg"), "--picture"),
        (("--compare", "a", "b", "--html", "p.html"), "--html"),
        (("x.json", "--step", "3"), "--picture"),
        (("x.json", "--dask-address", "tcp://a:1"), "--engine dask"),
        (("x.json", "--jobs", "0"), "--jobs"),
        (("x.json", "--cache", "s3://bucket/kept"), "--cache"),
        (("x.json", "--parquet", "s3://bucket/rows"), "--parquet"),
    ],
)
def test_wrong_usage_exits_2_and_names_what_is_wrong(arguments: tuple[str, ...], named: str) -> None:
    done = pacecar(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"", "empty"), (b"hello", ""), (b"{}", ""), (b"\x1f\x8b\x08broken", ""), (b'{"traceEvents": {}}', "")],
)
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_is_no_trace_ends_in_one_line_and_exit_code_1(
    content: bytes, named: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    done = pacecar(path, *options)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"pacecar: {path}: ")
    assert named in line
    assert done.stdout == ""


@pytest.mark.slow
def test_missing_files_and_empty_folders_are_named_and_the_rest_is_shown(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = pacecar(tmp_path / "gone.json", tmp_path / "empty", trace)
    assert done.returncode == 0
    gone, empty = done.stderr.splitlines()
    assert gone == f"pacecar: {tmp_path}/gone.json: no such file or directory"
    assert "no trace in this folder" in empty
    assert "rank 1 of 2" in done.stdout


def test_a_path_behind_a_shut_folder_is_named_and_the_rest_is_shown(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stat, shut = os.stat, tmp_path / "shut"

    def refused(path: str | Path | int, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and Path(path).parent == shut:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    (shut / "run").mkdir(parents=True)
    (shut / "job-pid1.log").touch()
    monkeypatch.setattr(os, "stat", refused)
    paths = (shut / "run", shut, trace)
    assert analyze.run_analyze(analyze.AnalyzeOptions(paths=paths, as_json=True)) == 0
    said = capfd.readouterr()
    assert [report["file"] for report in json.loads(said.out)["traces"]] == [str(trace)]
    assert f"{shut}/run: permission denied" in said.err


def test_json_holds_the_files_that_could_not_be_read_as_warnings_too(trace: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("no trace")
    done = pacecar(bad, trace, tmp_path / "gone.json", "--json")
    assert done.returncode == 0
    warnings = json.loads(done.stdout)["warnings"]
    assert [warning["code"] for warning in warnings] == ["not_found", "unreadable"]
    assert done.stderr.splitlines() == [f"pacecar: {warning['message']}" for warning in warnings]


@pytest.mark.slow
def test_a_trace_that_is_cut_off_is_analysed_as_far_as_it_goes_and_said(tmp_path: Path) -> None:
    whole = write_trace(tmp_path / "whole.json", "cccc..AAAA..cccc", rank=0, steps=[(0, 16)]).read_bytes()
    cut = tmp_path / "cut.json"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    (report,) = as_json(cut)["traces"]
    assert report["is_truncated"]
    assert report["compute_ns"] == 4_000_000
    assert "Warnings" in pacecar(cut).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--json",), ("--perfetto", "out.json"), ("--picture", "out.svg"), ("--html", "out.html")]
)
def test_a_file_whose_name_is_no_text_is_analysed_and_named_as_far_as_it_can_be(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(Path(os.fsdecode(b"rank\xff.json")), "ccAA")
    Path(os.fsdecode(b"bad\xff.json")).write_text("no trace")
    done = pacecar(".", *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("pacecar: bad\N{REPLACEMENT CHARACTER}.json: ")
    assert "rank\N{REPLACEMENT CHARACTER}.json" in done.stdout


@pytest.mark.slow
def test_a_trace_can_come_through_a_pipe(trace: Path) -> None:
    line = command_line("/dev/stdin", "--json")
    done = subprocess.run(line, input=trace.read_bytes(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["traces"][0]["compute_ns"] == 8_000_000


@pytest.mark.slow
def test_a_reader_that_went_away_is_met_without_a_traceback(trace: Path) -> None:
    for options in ((), ("--json",)):
        read_end, write_end = os.pipe()
        os.close(read_end)
        line = command_line(trace, *options)
        try:
            done = subprocess.run(line, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        finally:
            os.close(write_end)
        assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--perfetto", "--picture", "--html"])
def test_an_output_that_cannot_be_written_is_one_line(trace: Path, tmp_path: Path, option: str) -> None:
    done = pacecar(trace, option, tmp_path / "no" / "such" / "out")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "out: cannot be written: no such file or directory" in line


def test_a_picture_of_a_step_that_is_not_there_names_those_that_are(trace: Path, tmp_path: Path) -> None:
    done = pacecar(trace, "--picture", tmp_path / "p.svg", "--step", "9")
    assert done.returncode == 1
    assert f"--step 9: {trace} has steps 3 to 4" in done.stderr


@pytest.mark.slow
def test_a_package_that_is_missing_is_named_with_what_installs_it(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'rich' else real(name, *a)\n"
    )
    done = pacecar(trace, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install 'pacecar[analyze]'" in done.stderr
    assert pacecar(trace, "--json", PYTHONPATH=str(tmp_path)).returncode == 0


def test_long_work_shows_a_bar_on_a_terminal_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(analyze, "SHOW_PROGRESS_SECONDS", 0.0)
    with analyze._progress(False, terminal) as progress:
        assert progress is not None
        progress(50, 100, 1, 3)
        progress(100, 100, 3, 3)
    assert "reading 3 traces, 3 done" in terminal.getvalue()
    with analyze._progress(True, terminal) as quiet, analyze._progress(False, io.StringIO()) as elsewhere:
        assert quiet is None
        assert elsewhere is None


@pytest.mark.slow
def test_names_in_a_trace_cannot_steer_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J[bold]evil[/bold]\x07"
    path = write_trace(tmp_path / "rank0.json", "cccAAA", rank=0, names={"c": evil})
    done = pacecar(path)
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert "[bold]evil[/bold]" in done.stdout


@pytest.mark.parametrize("name", each_kind())
def test_every_real_trace_has_a_table_of_80_columns_whose_shares_are_whole(name: str) -> None:
    from io import StringIO

    from rich.console import Console

    from pacecar.analysis.output.text import document_text
    from pacecar.analysis.reading.parallel_reading import analyze_files

    console = Console(file=StringIO(), width=80, color_system=None, highlight=False, markup=False)
    for part in document_text(analyze_files([trace_file(name)]), console):
        console.print(part)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "Ledger" in text


@pytest.mark.slow
def test_files_of_nccls_inspector_are_a_table_with_and_without_traces(tmp_path: Path) -> None:
    write_inspector(tmp_path / "nccl-inspector-17", [inspector_line()] * 3)
    alone = pacecar(tmp_path)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert "Communicators (NCCL's Inspector)" in alone.stdout
    assert max(map(len, alone.stdout.splitlines())) <= 80
    document = json.loads(pacecar(tmp_path, "--json").stdout)
    assert document["traces"] == []
    assert document["communicators"][0]["bus_bandwidth"] == pytest.approx(25 * 2**20 / 1e-3 * 14 / 8)
    assert pacecar(tmp_path, "--html", tmp_path / "page.html").returncode == 1, "a page needs traces"
    write_trace(tmp_path / "rank0.json", "ccAA")
    both = json.loads(pacecar(tmp_path, "--json").stdout)
    assert (len(both["traces"]), both["communicators"]) == (1, document["communicators"])
    assert pacecar(tmp_path, "--csv", tmp_path / "csv").returncode == 0
    assert (tmp_path / "csv/communicators.csv").read_text().startswith("communicator,name,operation,bytes")
    assert "Ledger" in (text := pacecar(tmp_path).stdout)
    assert "45.9 GB/s" in text
