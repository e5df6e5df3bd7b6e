"""What was read once is not read again, and gives the same document to the byte."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from pacecar.analysis.document.report import TraceDocument
from pacecar.analysis.reading import parallel_reading
from pacecar.analysis.reading.kept_answers import decode_answer, encode_answer
from pacecar.analysis.reading.one_file import FileTask, WorkerAnswer, read_one
from pacecar.analysis.reading.parallel_reading import Options, analyze_files
from pacecar.analysis.trace.columns import Trace
from tests.analysis.test_engine import encoded, ranks
from tests.analysis.tracefiles import write_trace
from tests.kit.simulated_jobs import Job, Layout, simulate
from tests.kit.simulated_jobs.kineto import write_job

__all__ = ["ranks"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are read from now on."""
    names: list[str] = []

    def counting(task: FileTask, progress: Callable[[int, int | None], None] | None = None) -> WorkerAnswer:
        names.append(task.path.name)
        return read_one(task, progress)

    monkeypatch.setattr(parallel_reading, "read_one", counting)
    return names


def test_nothing_is_lost_between_encoding_and_decoding(tmp_path: Path) -> None:
    job = Job(layout=Layout(data=2), steps=2)
    for path in write_job(tmp_path, simulate(job).traces(), job.layout):
        answer = read_one(FileTask(path, "trace", None, True))
        data = encode_answer(answer)
        assert data is not None
        again = decode_answer(data)
        assert again.report == answer.report
        assert answer.table is not None
        assert again.table is not None
        groups = [each.ranks for each in again.table.collectives if each.ranks is not None]
        assert len(groups) > 1
        assert len({id(each) for each in groups}) == len(set(groups))  # one set of ten thousand ranks, not one for each
        for field in fields(Trace):
            here, there = getattr(answer.table, field.name), getattr(again.table, field.name)
            if field.name not in ("device", "host_rows", "syncs"):
                assert here == there
                continue
            for column in fields(here):
                one, other = getattr(here, column.name), getattr(there, column.name)
                assert one.dtype == other.dtype
                assert np.array_equal(one, other)


@pytest.mark.slow
def test_a_second_look_reads_nothing_and_says_the_same(ranks: list[Path], tmp_path: Path, opened: list[str]) -> None:
    options = Options(cache=tmp_path / "kept")
    first = analyze_files(ranks, options)
    assert len(opened) == 3
    second = analyze_files(ranks, options)
    assert len(opened) == 3
    assert first.job is not None
    assert encoded(first) == encoded(second) == encoded(analyze_files(ranks))


@pytest.mark.slow
def test_a_file_that_changed_and_another_question_are_read_anew(
    ranks: list[Path], tmp_path: Path, opened: list[str]
) -> None:
    options = Options(cache=tmp_path / "kept")
    analyze_files(ranks, options)
    opened.clear()
    os.utime(ranks[2], ns=(0, 2))
    analyze_files(ranks, options)
    assert opened == ["rank2.json"]
    opened.clear()
    write_trace(ranks[1], "ccccccc..cc", rank=1, world_size=3, steps=[(0, 11)])
    os.utime(ranks[1], ns=(0, 1))
    changed = analyze_files(ranks, options)
    assert opened == ["rank1.json"]
    assert encoded(changed) == encoded(analyze_files(ranks))
    opened.clear()
    analyze_files(ranks, Options(cache=tmp_path / "kept", window="steps"))
    analyze_files(ranks[:1], options)  # alone, without columns
    assert sorted(opened) == ["rank0.json", "rank0.json", "rank1.json", "rank2.json"]


def test_a_file_that_grows_while_it_is_read_is_read_anew(
    ranks: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ranks[1].read_bytes()
    ranks[1].write_bytes(whole[:-200])

    def slow(task: FileTask, progress: Callable[[int, int | None], None] | None = None) -> WorkerAnswer:
        answer = read_one(task, progress)
        ranks[1].write_bytes(whole)
        return answer

    with monkeypatch.context() as reading:
        reading.setattr(parallel_reading, "read_one", slow)
        analyze_files(ranks[1:2], Options(cache=tmp_path / "kept"))
    again = analyze_files(ranks[1:2], Options(cache=tmp_path / "kept"))
    assert encoded(again) == encoded(analyze_files(ranks[1:2]))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"not zlib", zlib.compress(b"not an answer"), None])
def test_a_damaged_answer_is_read_anew(
    ranks: list[Path], tmp_path: Path, opened: list[str], damage: bytes | None
) -> None:
    options = Options(cache=tmp_path / "kept")
    before = analyze_files(ranks, options)
    opened.clear()
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == 3
    files[0].write_bytes(files[0].read_bytes()[:-20] if damage is None else damage)
    assert encoded(analyze_files(ranks, options)) == encoded(before)
    assert len(opened) == 1


@pytest.mark.slow
def test_another_version_keeps_its_own_answers(ranks: list[Path], tmp_path: Path, opened: list[str]) -> None:
    for version in ("1", "2", "1"):
        analyze_files(ranks, Options(cache=tmp_path / "kept", version=version))
    assert len(opened) == 6


@pytest.mark.slow
def test_what_was_read_before_ctrl_c_is_kept(ranks: list[Path], tmp_path: Path, opened: list[str]) -> None:
    def interrupted(done: int, total: int, files: int, all_files: int) -> None:
        if files == 2 and done < total:
            raise KeyboardInterrupt

    options = Options(cache=tmp_path / "kept")
    sent: list[TraceDocument] = []
    with pytest.raises(KeyboardInterrupt):
        sent.append(analyze_files(ranks, options, interrupted))
    assert sent == []
    opened.clear()
    analyze_files(ranks, options)
    assert len(opened) < 3


@pytest.mark.slow
def test_errors_and_a_folder_that_cannot_be_made_cost_nothing_else(ranks: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    (tmp_path / "file").write_text("")
    options = Options(cache=tmp_path / "file" / "kept")
    found = analyze_files([*ranks, bad], options)
    assert [report.rank for report in found.traces] == [0, 1, 2]
    assert [warning.code for warning in found.warnings][-1] == "not_kept"
    analyze_files([*ranks, bad], Options(cache=tmp_path / "kept"))
    assert len(list((tmp_path / "kept").iterdir())) == 3
