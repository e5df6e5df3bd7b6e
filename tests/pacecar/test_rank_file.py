"""A rank's file is read by whole lines, wherever a reader starts and while it grows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pacecar.records import Goodbye
from pacecar.records.rank_file import LINE_BYTES_MAX, NOT_A_RECORD, RankFile, decode, rank_files

LINES = [b"a", b"bb", b"", b"cc\t c", b"  ", b"d"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(b"\n".join(LINES) + b"\nhalf")
    return path


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 1000])
def test_lines_are_the_same_in_pieces_of_any_size_and_blank_ones_are_only_counted(path: Path, piece_bytes: int) -> None:
    file = RankFile(path, piece_bytes=piece_bytes)
    assert list(file.lines()) == [(1, b"a"), (2, b"bb"), (4, b"cc\t c"), (6, b"d")]
    assert (file.number, file.rest) == (6, b"half")
    with path.open("ab") as stream:
        stream.write(b" now\ne")
    assert list(file.lines()) == [(7, b"half now")]
    assert list(file.lines()) == []


@pytest.mark.parametrize("start", range(20))
def test_from_a_place_on_there_are_the_lines_that_begin_there_or_later(path: Path, start: int) -> None:
    begins = [(sum(len(line) + 1 for line in LINES[:n]), line) for n, line in enumerate(LINES) if line.strip()]
    assert [line for _, line in RankFile(path, start=start).lines()] == [line for at, line in begins if at >= start]


def test_nothing_is_read_beyond_the_end_that_is_asked_for(path: Path) -> None:
    file = RankFile(path)
    assert list(file.lines(4)) == [(1, b"a")]
    assert file.rest == b"bb"
    assert list(file.lines(5)) == [(2, b"bb")]


def test_a_line_that_is_too_long_is_said_once_and_skipped_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(b"a\n" + b"x" * (3 * LINE_BYTES_MAX) + b"\nb\n")
    assert list(RankFile(path).lines()) == [(1, b"a"), (2, None), (3, b"b")]
    path.write_bytes(b"x" * (3 * LINE_BYTES_MAX) + b"\nb\n")
    assert list(RankFile(path, start=5).lines()) == [(1, b"b")], "it began before"


def test_files_are_those_of_ranks_in_the_order_of_ranks(tmp_path: Path) -> None:
    for name in ("rank10.jsonl", "rank2.jsonl", "rank02.jsonl", "rank0.jsonl.gz", "xrank1.jsonl", "losses.jsonl"):
        (tmp_path / name).touch()
    assert list(rank_files(tmp_path).items()) == [(n, tmp_path / f"rank{n}.jsonl") for n in (2, 10)]


def test_what_is_no_record_is_refused_by_one_of_the_named_errors() -> None:
    said = Goodbye(job="j", rank=0, reason="ü", wall_ns=0)
    assert decode(msgspec.json.encode(said)) == said
    wrong_ledger = b'{"type":"step","ledger":{"wall_ns":5}}'
    for line in (b"", b"nonsense", b'{"type":"teapot"}', wrong_ledger, b"\xff\xff", b"[" * 100_000):
        with pytest.raises(NOT_A_RECORD):
            decode(line)
