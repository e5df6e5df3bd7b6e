"""The run folder: readers follow files that are still being written, and `latest` names the newest run."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pacecar.commands.demo.runfolder import RecordTail, make_run_folder, point_latest
from pacecar.records import Goodbye
from pacecar.records.rank_file import LINE_BYTES_MAX
from tests.kit.fake_clock import FakeClock


def line(rank: int) -> bytes:
    return msgspec.json.encode(Goodbye(job="j", rank=rank, reason="ü", wall_ns=0)) + b"\n"


def test_a_line_that_is_not_finished_is_read_when_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    tail = RecordTail(path)
    assert tail.read() == []
    whole = line(0) + line(1)
    seen = []
    with path.open("ab", buffering=0) as stream:
        for i in range(len(whole)):
            stream.write(whole[i : i + 1])
            seen += tail.read()
    assert [record.rank for record in seen if isinstance(record, Goodbye)] == [0, 1]


def test_a_truncated_last_line_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(line(0) + line(1)[:-5])
    tail = RecordTail(path)
    assert len(tail.read()) == 1


def test_lines_that_are_not_records_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    wrong_ledger = b'{"type":"step","ledger":{"wall_ns":5}}\n'
    path.write_bytes(b"nonsense\n" + line(0) + b'{"type":"teapot"}\n\n' + wrong_ledger + b"\xff\xff\n" + line(1))
    tail = RecordTail(path)
    assert len(tail.read()) == 2


def test_a_line_without_end_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(b"x" * (LINE_BYTES_MAX + 10))
    tail = RecordTail(path)
    assert tail.read() == []
    with path.open("ab") as stream:
        stream.write(b"y\n" + line(3))
    assert len(tail.read()) == 1


def test_run_folders_sort_by_time_and_do_not_collide(tmp_path: Path) -> None:
    clock = FakeClock(wall_ns=1_700_000_000 * 10**9)
    first, second = make_run_folder(tmp_path / "new" / "runs", clock), make_run_folder(tmp_path / "new" / "runs", clock)
    assert first != second
    assert first.name.startswith("20231114T221320Z-")
    assert first.is_dir()


def test_latest_follows_and_is_relative(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        point_latest(tmp_path / name)
        assert os.readlink(tmp_path / "latest") == name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "latest"]


def test_a_latest_that_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "a").mkdir()
    point_latest(tmp_path / "a")
    assert not (tmp_path / "latest").is_symlink()
