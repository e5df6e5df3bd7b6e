"""`pacecar deploy` prints and exports this version's files, and overwrites only with --force."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pacecar.commands.main import cli
from pacecar.deploy import listing

ROOT = Path(__file__).resolve().parents[2]


def pacecar(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, ["deploy", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_every_file_of_the_folder_is_listed_but_code():
    listed = {path for paths in listing().values() for path in paths}
    there = {str(path.relative_to(ROOT / "deploy")) for path in (ROOT / "deploy").rglob("*")
             if path.is_file() and path.parent != ROOT / "deploy" and "__pycache__" not in path.parts}  # fmt: skip
    assert listed == there
    code, out, _ = pacecar("show")
    assert code == 0
    assert out.split() == [word for topic, paths in listing().items() for word in (topic, *paths)]


@pytest.mark.parametrize("what", ["systemd/pacecar.service", "container/Containerfile", "slurm/job.sbatch"])
def test_one_file_is_printed_as_it_is(what):
    assert pacecar("show", what) == (0, (ROOT / "deploy" / what).read_text(), "")


@pytest.mark.parametrize("what", ["nothing", "../pyproject.toml", "/etc/passwd", "systemd/", ""])
def test_what_there_is_not_is_named_with_what_there_is(what):
    code, out, err = pacecar("show", what)
    assert (code, out) == (2, "")
    assert repr(what) in err
    assert "kubernetes" in err


@pytest.mark.slow
def test_an_export_is_complete_and_can_be_repeated(tmp_path):
    code, out, _ = pacecar("export", str(tmp_path))
    assert code == 0
    written = [Path(line) for line in out.splitlines()]
    assert tmp_path / "deploy/compose/compose.yaml" in written
    # What the compose file names beside itself is there.
    assert (tmp_path / "deploy/compose/../../dashboards/generated/job.json").exists()
    assert (tmp_path / "deploy/slurm/targets.sh").stat().st_mode & 0o111
    assert pacecar("export", str(tmp_path))[0] == 0


def test_a_changed_file_is_not_overwritten_unless_told_and_then_nothing_else_is_written(tmp_path):
    changed = tmp_path / "deploy/systemd/pacecar.service"
    changed.parent.mkdir(parents=True)
    changed.write_text("mine")
    code, out, err = pacecar("export", str(tmp_path))
    assert (code, out) == (1, "")
    assert str(changed) in err
    assert "--force" in err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [changed]
    assert pacecar("export", str(tmp_path), "--force")[0] == 0
    assert changed.read_text() == (ROOT / "deploy/systemd/pacecar.service").read_text()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = pacecar("export", str(tmp_path / "file" / "below"))
    assert code == 1
    assert str(tmp_path / "file") in err
    assert "cannot be written" in err
