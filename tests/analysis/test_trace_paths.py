"""Which files did the user mean?"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.analysis.reading import trace_paths
from pacecar.analysis.reading.trace_paths import find_traces, natural_order


def test_a_folder_means_every_trace_in_it_in_the_order_of_ranks(tmp_path: Path) -> None:
    wanted = ["rank2.json", "rank10.json.gz", "sub/a.pt.trace.json", "sub/b.pt.trace.json.tmp", "zz.JSON.zst"]
    for name in (*wanted, "notes.txt", ".hidden.json", "model.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = find_traces([tmp_path])
    assert [str(path.relative_to(tmp_path)) for path in found.files] == wanted
    assert found.errors == ()


def test_a_file_that_was_named_is_taken_whatever_its_name_and_only_once(tmp_path: Path) -> None:
    odd = tmp_path / "profile.out"
    odd.write_text("{}")
    assert find_traces([odd, tmp_path / "profile.out"]).files == (odd,)


def test_what_leads_to_no_file_is_named_and_the_rest_is_found(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    good = tmp_path / "a.json"
    good.write_text("{}")
    found = find_traces([tmp_path / "gone.json", good, tmp_path / "empty"])
    assert found.files == (good,)
    gone, empty = found.errors
    assert gone == f"{tmp_path}/gone.json: no such file or directory"
    assert empty.startswith(f"{tmp_path}/empty: no trace in this folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    try:
        assert "permission denied" in find_traces([locked]).errors[0]
    finally:
        locked.chmod(0o700)


def test_a_subfolder_that_may_not_be_read_is_said_and_the_rest_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.json").write_text("{}")
    scandir = os.scandir

    def refused(path: str) -> object:
        if str(path).endswith("/b"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    found = find_traces([tmp_path])
    assert [file.parent.name for file in found.files] == ["a", "c"]
    assert found.errors == (f"{tmp_path}/b: permission denied",)
    assert find_traces([tmp_path / "b"]).errors == (f"{tmp_path}/b: permission denied",)


def test_a_folder_that_may_be_listed_but_not_entered_costs_its_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.json").write_text("{}")
    stat = Path.stat

    def refused(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == "b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    found = find_traces([tmp_path])
    assert [file.parent.name for file in found.files] == ["a", "b"], "reading it says why not"
    assert found.errors == ()


def test_more_files_than_any_job_has_are_cut_off_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_paths, "FILES_MAX", 2)
    for rank in range(3):
        (tmp_path / f"{rank}.json").write_text("{}")
    found = find_traces([tmp_path])
    assert len(found.files) == 2
    assert "3 files" in found.errors[0]


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert find_traces([tmp_path]).files == ()


@pytest.mark.slow
@given(st.lists(st.text("ab019._-", min_size=1, max_size=6), max_size=6))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    sorted(map(Path, names), key=natural_order)


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a.json").write_text("{}")
    assert len(find_traces([tmp_path]).files) == 1
