"""The command, as a user types it: files where they belong, codes that scripts can trust, one line for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.report.runs import MS, steady, tuned, untuned
from tests.kit.forking_python import COMMAND, forking_python


def run(*arguments: str | Path, cwd: Path | None = None, python: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python or forking_python(modules=COMMAND), "-m", "pacecar", "report", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tuned(tmp_path / "runs" / "one")


@pytest.mark.slow
def test_the_page_lies_in_the_run_folder_also_through_latest(folder: Path) -> None:
    latest = folder.parent / "latest"
    latest.symlink_to(folder.name)
    done = run(latest, python=sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder}/report.html\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert not list(folder.glob(".report*")), "nothing half written is left"
    # A second report reads the same run: the page is not a record.
    assert run(latest).returncode == 0


@pytest.mark.slow
def test_json_and_markdown_are_printed_and_nothing_is_written(folder: Path) -> None:
    before = sorted(folder.iterdir())
    said = run(folder, "--json", "--price-per-gpu-hour", "2.5", "--tokens-per-epoch", "1000000")
    document = json.loads(said.stdout)
    assert document["schema_version"] == 1
    assert document["cost"]["epoch_of"] == "1 000 000 tokens"
    assert document["change"]["change_ratio"] == pytest.approx(0.25)
    text = run(folder, "--markdown").stdout
    assert text.startswith("# Run one\n")
    assert sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_output_is_written_where_it_was_asked_for(folder: Path, tmp_path: Path) -> None:
    for name, flags in (("a.html", []), ("a.json", ["--json"]), ("a.md", ["--markdown"])):
        done = run(folder, "--output", tmp_path / name, *flags)
        assert done.stdout == f"{tmp_path / name}\n"
        assert (tmp_path / name).stat().st_size > 500


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--markdown"], ["--json"], []])
def test_a_dash_is_standard_output_for_every_form(folder: Path, tmp_path: Path, flags: list[str]) -> None:
    before = sorted(folder.iterdir())
    done = run(folder, "--output", "-", *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    run(folder, "--output", tmp_path / "same", *flags)
    assert done.stdout == (tmp_path / "same").read_text(), "it has the document and nothing else"
    assert not (tmp_path / "-").exists()
    assert sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_a_damaged_run_is_reported_with_a_code_that_says_so(folder: Path) -> None:
    (folder / "rank1.jsonl").unlink()
    done = run(folder)
    assert done.returncode == 1
    assert f"pacecar: {folder}: one: ranks 1 of 2 left no step here" in done.stderr
    assert "Parts of the run are lost" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_run_in_progress_is_not_damaged(folder: Path) -> None:
    with (folder / "rank0.jsonl").open("ab") as stream:
        stream.write(b'{"type":"step","job":"j","ra')
    done = run(folder)
    assert done.returncode == 0
    assert "the last line is cut off" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give a run folder"),
        (["nowhere"], 1, "nowhere: no such run folder"),
        (["one", "two"], 2, "or --compare with several"),
        (["--compare", "one"], 2, "--compare needs two runs"),
        (["one", "--json", "--markdown"], 2, "not both"),
        (["one", "--epochs", "5"], 2, "--price-per-gpu-hour"),
        (["one", "--samples-per-epoch", "5"], 2, "--price-per-gpu-hour"),
        (["one", "--price-per-gpu-hour", "-1"], 2, "price-per-gpu-hour"),
        (["one", "--price-per-gpu-hour", "nan"], 2, "nan is not a price"),
        (["one", "--price-per-gpu-hour", "inf"], 2, "inf is not a price"),
        (["one", "--price-per-gpu-hour", "1", "--samples-per-epoch", "5", "--tokens-per-epoch", "5"], 2, "not both"),
        (["one", "--output", "no/such/folder/x.html"], 1, "no/such/folder"),
        (["one", "--job", "other"], 1, "no record of job 'other'; there are j"),
        (["one", "--recording", "missing.recording"], 1, "missing.recording: cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_a_code(folder: Path, arguments: list[str], code: int, words: str) -> None:
    done = run(*arguments, cwd=folder.parent)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_runs_are_compared_on_a_page_beside_them(tmp_path: Path) -> None:
    for name, pace in (("a", 100), ("b", 80)):
        untuned(tmp_path / name, pace=steady(pace * MS, 0.01, pace))
    done = run("--compare", "a", "b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "comparison.html\n")
    assert "B against A: faster" in (tmp_path / "comparison.html").read_text()
    document = json.loads(run("--compare", "a", "b", "--json", cwd=tmp_path).stdout)
    assert [row["verdict"] for row in document["rows"] if row["run"] == "b"] == ["faster", "faster"]
    assert len(document["runs"]) == 2


@pytest.mark.slow
def test_neither_torch_nor_numpy_nor_rich_is_loaded(folder: Path) -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom pacecar.commands.main import cli\n"
        f"done = CliRunner().invoke(cli, ['report', {str(folder)!r}])\nassert done.exit_code == 0, done.output\n"
        "assert not {'torch', 'numpy', 'rich'} & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize(("few", "many"), [(3_000, 15_000), (8_000, 80_000)])
def test_a_large_run_takes_bounded_memory(few: int, many: int) -> None:
    """Peak memory of many records is that of few and a little: the bench's own figures, on a small scale.

    A record held as a StepRecord takes some 3 kB, so those of the smaller case would be 36 MB more.
    """
    bench = Path(__file__).resolve().parents[3] / "bench" / "bench_report.py"
    peaks = []
    for records in (few, many):
        done = subprocess.run(
            [sys.executable, str(bench), "--records", str(records)],
            capture_output=True,
            text=True,
            timeout=400,
            check=True,
        )
        page = next(line for line in done.stdout.splitlines() if line.startswith("page"))
        assert page.endswith("exit 0")
        peaks.append(float(page.split(" MB")[0].split()[-1]))
    assert peaks[1] < peaks[0] + 12, peaks


@pytest.mark.slow
def test_a_closed_pipe_causes_no_traceback(folder: Path) -> None:
    command = f"{sys.executable} -m pacecar report {folder} --json | head -c 10"
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
