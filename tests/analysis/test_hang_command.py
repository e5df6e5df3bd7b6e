"""`pacecar analyze --hang`: what is on stdout, what on stderr, and the exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from pacecar.analysis.hang.document import HangDocument
from pacecar.commands.main import cli
from pacecar.records.hangs import HangKind
from tests.kit.nccl_files import call_line, init_line

ASSUMED = "no dump says how many ranks the job has"
HANG = Path(__file__).parent / "gloo_hangs" / "not_joined"


def analyze(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["analyze", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Dumps of which one is cut, and a file that is none."""
    for path in HANG.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "_dump_3").write_bytes((HANG / "rank0.json").read_bytes()[:100])
    (tmp_path / "slurm-17.out").write_text("\x1b[31mhung\n")
    return tmp_path


def test_the_verdict_is_printed_with_its_evidence_and_the_groups_that_differ() -> None:
    done = analyze("--hang", HANG)
    assert done.exit_code == 0
    assert done.stderr == f"pacecar: {HANG}: no dump says how many ranks the job has: 3 are assumed\n"
    for words in (
        "not joined: rank 2",
        "never joined #7",
        "Evidence",
        "Groups that do not agree",
        "3 dumps of a job of 3",
    ):
        assert words in done.stdout, words
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("dp "))
    assert row[:6] == ["dp", "1", "all_reduce", "#7", "2", "2"]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_logs_of_nccl_beside_the_dumps_are_quoted_and_change_no_verdict(tmp_path: Path) -> None:
    for path in HANG.iterdir():
        shutil.copy(path, tmp_path)
    before = json.loads(analyze("--hang", tmp_path, "--json").stdout)
    for rank, count in enumerate((5, 5, 4)):
        lines = [init_line(rank, ranks=3), *[call_line(rank, ranks=3)] * count]
        (tmp_path / f"nccl.node-a.{100 + rank}.log").write_text("".join(lines))
    done = analyze("--hang", tmp_path, "--json")
    after = json.loads(done.stdout)
    *evidence, last = after["verdict"]["evidence"]
    assert evidence == before["verdict"]["evidence"]
    assert "rank 2 (pid 102 on node-a) only 4, the last call AllReduce of 1024 elements" in last
    for document in (before, after):
        del document["verdict"]["evidence"], document["verdict"]["wall_ns"]
    assert after == before


def test_json_is_the_whole_document_and_nothing_else_is_on_stdout(folder: Path) -> None:
    done = analyze("--hang", folder, "--json")
    assert done.exit_code == 0
    document = msgspec.convert(json.loads(done.stdout), HangDocument)
    assert (document.verdict.kind, document.verdict.culprits, document.verdict.waiting) == (
        HangKind.NOT_JOINED, (2,), (0, 1),
    )  # fmt: skip
    (group,) = document.groups
    assert (group.name, group.description, group.call, group.waiting, group.absent) == (
        "1", "dp", "all_reduce #7", (0, 1), (2,),
    )  # fmt: skip
    assert (group.joined, group.finished) == ((6, 7), (6, 6))
    assert (document.version, document.files, document.world_size) == (1, 3, 3)
    assert [problem.partition(":")[0] for problem in document.problems] == ["_dump_3", "slurm-17.out", ASSUMED]


def test_each_file_that_could_not_be_used_is_a_line_on_stderr(folder: Path) -> None:
    done = analyze("--hang", folder)
    assert done.exit_code == 0
    assert [line.split(": ")[:3] for line in done.stderr.splitlines()] == [
        ["pacecar", str(folder), problem] for problem in ("_dump_3", "slurm-17.out", ASSUMED)
    ]
    assert "3 problems" in done.stdout


def test_of_many_files_that_are_no_dumps_the_first_are_named_and_all_in_the_document(folder: Path) -> None:
    for number in range(100):
        (folder / f"note{number:02}.txt").write_text("a note")
    done = analyze("--hang", folder, "--json")
    lines, document = done.stderr.splitlines(), msgspec.convert(json.loads(done.stdout), HangDocument)
    assert len(document.problems) > 100
    assert len(lines) == 21
    assert lines[-1] == f"pacecar: {folder}: and {len(document.problems) - 20} more problems"


@pytest.mark.parametrize(
    ("made", "reason"), [(None, "no such file or directory"), ("empty", "no flight recorder dump in this folder")]
)
def test_without_a_dump_the_exit_code_is_one_and_stderr_says_why(tmp_path: Path, made: str | None, reason: str) -> None:
    place = tmp_path / "dumps"
    if made is not None:
        place.mkdir()
    for more in ([], ["--json"]):
        done = analyze("--hang", place, *more)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(f"pacecar: {place}: ")
        assert reason in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([HANG, "--hang", HANG], "give traces, or --compare A B, or --hang FOLDER"),
        (["--hang", HANG, "--compare", HANG, HANG], "give traces, or --compare A B, or --hang FOLDER"),
        (["--hang", HANG, "--html", "page.html"], "--hang reads no traces"),
        (["--hang", HANG, "--steps", "1:2"], "--hang reads no traces"),
    ],
)
def test_what_belongs_to_traces_is_refused(arguments: list[object], reason: str) -> None:
    done = analyze(*arguments)
    assert done.exit_code == 2
    assert reason in done.stderr
