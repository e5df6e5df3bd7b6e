"""What a killed process left is removed by the next one; what a living one holds is not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pacecar.profiler.ranks.cross_rank.temporary_folder import PREFIX, TemporaryFolder, remove_abandoned

HOLDER = """
import sys
from pacecar.profiler.ranks.cross_rank.temporary_folder import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "trace.json").write_text("rows")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_is_private_and_goes_with_what_is_in_it(tmp_path: Path) -> None:
    folder = TemporaryFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "part").write_bytes(b"x")
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        remove_abandoned()
        assert held.parent == tmp_path
        assert (held / "trace.json").exists(), "its process lives"
        process.kill()
    own = TemporaryFolder()
    assert list(tmp_path.iterdir()) == [own.path]
    own.close()


def test_a_folder_that_is_not_locked_yet_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank of this host looks for abandoned folders just then."""
    lock = fcntl.flock

    def look_first(*arguments: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        remove_abandoned()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", look_first)
    folder = TemporaryFolder()
    remove_abandoned()
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.close()


def test_only_folders_of_this_user_and_kind_are_removed(tmp_path: Path) -> None:
    (tmp_path / "another").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").touch()
    kept = {"another", "target", f"{PREFIX}link", f"{PREFIX}file"}
    if os.geteuid() == 0:
        (tmp_path / f"{PREFIX}theirs").mkdir()
        os.chown(tmp_path / f"{PREFIX}theirs", 4321, -1)
        kept.add(f"{PREFIX}theirs")
    (tmp_path / f"{PREFIX}left").mkdir()
    remove_abandoned()
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_without_a_temporary_folder_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    remove_abandoned()
    with pytest.raises(OSError, match="nonexistent"):
        TemporaryFolder()
