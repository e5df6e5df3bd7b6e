"""NCCL's log: calls are counted for each communicator and rank, and what cannot be compared is not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar import nccl_debug_log
from pacecar.commands.doctor.facts.log import read_log
from pacecar.nccl_debug_log import (
    FILE_BYTES_MAX,
    SENTENCES_MAX,
    LaunchedCommunicator,
    debug_files,
    is_debug_log,
    launch_words,
    read_launches,
)
from tests.kit.nccl_files import call_line, init_line, split_line, timings_line


def job(calls: Iterable[int], **of: object) -> dict[int, list[str]]:
    """Return the lines of ranks on one communicator, rank -> lines; `calls` has how many each made."""
    return {
        rank: [init_line(rank, when="START"), init_line(rank), *[call_line(rank)] * count]
        for rank, count in enumerate(calls)
    }


def logs(folder: Path, lines: dict[int, list[str]]) -> list[Path]:
    for rank, those in lines.items():
        (folder / f"nccl.{rank}.log").write_text("".join(those))
    return sorted(folder.iterdir())


def only(paths: list[Path]) -> LaunchedCommunicator:
    (communicator,), notes = read_launches(paths)
    assert notes == ()
    return communicator


def test_a_rank_that_launched_fewer_is_named_with_its_last_call_and_the_line(tmp_path: Path) -> None:
    paths = logs(tmp_path, job([3, 3, 2, 3]))
    one = only(paths)
    assert (one.name, one.size, sorted(one.ranks)) == ("0xc1", 4, [0, 1, 2, 3])
    assert list(launch_words([one])) == [
        "NCCL's log: on communicator 0xc1 of 4 ranks others launched 3 collectives, rank 2 (pid 102 on node-a) only 2,"
        f" the last call AllReduce of 1024 elements ({tmp_path}/nccl.2.log:4)"
    ]
    (words,) = launch_words([one], lambda rank: rank.pid - 90)
    assert "rank 2 (pid 102 on node-a), which is rank 12 of the job, only 2" in words


def test_equal_counts_show_nothing_wrong_and_one_rank_alone_is_not_compared(tmp_path: Path) -> None:
    (words,) = launch_words([only(logs(tmp_path, job([2, 2, 2, 2])))])
    assert "cannot see" in words
    assert list(launch_words([only(logs(tmp_path, job([2]))[:1])])) == []
    assert list(launch_words([])) == []


def test_op_counts_are_not_compared(tmp_path: Path) -> None:
    """On one node 2.27 and later log 0 each time, and elsewhere only launches with network traffic count."""
    lines = job([0, 0])
    lines[0] += [call_line(0, op_count=255), call_line(0, op_count=0)]
    lines[1] += [call_line(1, op_count=0), call_line(1, op_count=0)]
    assert {rank: one.calls for rank, one in only(logs(tmp_path, lines)).ranks.items()} == {0: 2, 1: 2}


def test_sends_and_receives_are_the_last_call_but_not_counted(tmp_path: Path) -> None:
    lines = job([1, 1])
    lines[0].append(call_line(0, operation="Send", count=7))
    one = only(logs(tmp_path, lines))
    assert [rank.calls for rank in one.ranks.values()] == [1, 1]
    assert one.ranks[0].last.startswith("Send of 7 elements (")


@pytest.mark.parametrize("word", ["split", "child"])
def test_splits_are_told_apart_by_parent_count_and_color(word: str, tmp_path: Path) -> None:
    """Ranks 0 and 1 are one half, 2 and 3 the other; pointers are a process's own, and equal by chance."""
    lines = job([5, 5, 5, 5])
    for rank, those in lines.items():
        half, comm = rank // 2, f"0x7{rank % 3}"
        those += [split_line(rank % 2, process=rank, comm=comm, color=half, when=when, word=word)
                  for when in ("START", "COMPLETE")]  # fmt: skip
        those += [call_line(rank, comm=comm, ranks=2)] * (8 if rank != 3 else 7)
    communicators, notes = read_launches(logs(tmp_path, lines))
    assert notes == ()
    assert [(one.name, one.size, [r.calls for r in one.ranks.values()]) for one in communicators] == [
        ("0xc1", 4, [5, 5, 5, 5]), ("0xc1 split 0", 2, [8, 8]), ("0xc1 split 1", 2, [8, 7]),
    ]  # fmt: skip


def test_versions_stamps_hosts_and_interleaved_ranks_in_one_file(tmp_path: Path) -> None:
    stamp, path = "[2026-01-01 10:00:00] ", tmp_path / "all"
    lines = [init_line(0, version="2.18", host="node-a"), init_line(1, version="2.27", host="node-b")]
    lines += [stamp + line for line in (call_line(0), call_line(1, host="node-b"), call_line(0))]
    path.write_text("NCCL version 2.27.3+cuda12.9\nprogress: 3 %\n" + "".join(lines))
    one = only([path])
    assert {rank: (said.host, said.calls) for rank, said in one.ranks.items()} == {0: ("node-a", 2), 1: ("node-b", 1)}
    (words,) = launch_words([one])
    assert "of 4 ranks (2 of them have a log here)" in words


def test_calls_that_cannot_be_assigned_are_said(tmp_path: Path) -> None:
    lines = job([2, 2, 2])
    lines[1].append(call_line(1, comm="0xdead"))
    communicators, notes = read_launches(logs(tmp_path, lines))
    assert sorted(communicators[0].ranks) == [0, 2]
    assert notes == ("NCCL's logs: 1 line cut off or into each other: pids 101 are left out",)
    assert read_launches(logs(tmp_path, {rank: [call_line(rank)] for rank in range(3)})) == (
        (),
        ("NCCL's logs: 3 lines of calls, without INIT lines (NCCL_DEBUG_SUBSYS): nothing is compared",),
    )


@pytest.mark.parametrize("cut", range(1, len(call_line(0)), 7))
def test_lines_that_are_cut_into_each_other_make_no_rank_late(cut: int, tmp_path: Path) -> None:
    lines, outer = job([3, 3, 4]), call_line(0)
    (tmp_path / "shared").write_text("".join(lines[0] + lines[1]) + outer[:cut] + call_line(1) + outer[cut:])
    communicators, _ = read_launches(logs(tmp_path, {2: lines[2]}))
    assert not [words for words in launch_words(communicators) if "only" in words]


def test_a_cut_last_line_does_not_make_a_rank_late(tmp_path: Path) -> None:
    lines = job([3, 3, 3])
    lines[1][-1] = lines[1][-1][:90]
    communicators, notes = read_launches(logs(tmp_path, lines))
    assert sorted(communicators[0].ranks) == [0, 2]
    assert notes == ("NCCL's logs: 1 line cut off or into each other: pids 101 are left out",)
    (words,) = launch_words(communicators)
    assert "cannot see" in words


def test_an_address_that_is_used_again_is_counted_anew(tmp_path: Path) -> None:
    lines = job([3])
    lines[0] += [init_line(0, id="0xc2", when="START"), init_line(0, id="0xc2"), call_line(0)]
    (one,), _ = read_launches(logs(tmp_path, lines))
    assert (one.name, one.ranks[0].calls) == ("0xc2", 1)


def test_communicators_that_cannot_be_told_apart_are_not_compared(tmp_path: Path) -> None:
    """Two processes are both rank 0 of it: two runs' logs, or 2.22, which does not count splits."""
    lines = {0: [init_line(0), call_line(0)], 1: [init_line(0, comm="0x99").replace("node-a:100", "node-a:170")]}
    assert read_launches(logs(tmp_path, lines)) == ((), ())


def test_a_large_log_is_not_counted_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = logs(tmp_path, job([3, 3]))
    os.truncate(paths[0], FILE_BYTES_MAX + 1)
    (one,), notes = read_launches([*paths, tmp_path / "gone"])
    assert sorted(one.ranks) == [1]
    assert notes == (
        f"{paths[0]}: not read: 64 MiB are too many to count calls in", f"{tmp_path}/gone: No such file or directory",
    )  # fmt: skip
    monkeypatch.setattr(nccl_debug_log, "FILES_MAX", 1)
    assert "only the first 1" in read_launches(paths)[1][0]


def test_sentences_are_bounded(tmp_path: Path) -> None:
    lines: dict[int, list[str]] = {0: [], 1: []}
    for number in range(SENTENCES_MAX + 3):
        for rank, those in lines.items():
            those.append(init_line(rank, comm=hex(number + 16), id=hex(number)))
            those += [call_line(rank, comm=hex(number + 16))] * (2 - rank)
    communicators, _ = read_launches(logs(tmp_path, lines))
    assert len(list(launch_words(communicators))) == SENTENCES_MAX


def test_files_follow_the_pattern(tmp_path: Path) -> None:
    for name in ("n.node-a.7", "n.node-b.8", "n.node-a.9", "n.node-a.7x", "100%", "n[1].7", "n.node-a.10"):
        (tmp_path / name).write_text("")
    (tmp_path / "n.node-c.7").mkdir()

    def found(pattern: str, pids: set[int], host: str | None = None) -> list[str]:
        return [path.name for path in debug_files(f"{tmp_path}/{pattern}", pids, host)]

    assert found("n.%h.%p", {7, 8}) == ["n.node-a.7", "n.node-b.8"]
    assert found("n.%h.%p", {7, 8}, "node-a.cluster.example") == ["n.node-a.7"]
    assert found("n[1].%p", {7}) == ["n[1].7"]
    assert found("100%%", set()) == ["100%"]
    assert found("absent.%p", {7}) == []
    assert debug_files("/dev/null", {7}) == []


@pytest.mark.parametrize("version", ["2.22", "2.30"])
def test_the_doctor_reads_the_init_timings_of_each_version(version: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_text(init_line(0) + timings_line(44.5, version=version))
    log, _ = read_log(path)
    assert log.slowest_init is not None
    assert log.slowest_init[1:] == (44.5, "bootstrap")


@pytest.mark.parametrize(
    ("text", "is_log"),
    [("", False), ("loss 3\n" + call_line(0), True), (call_line(0, stamp="[10:00] "), True),
     ('{"entries": []}', False), ("see NCCL INFO\n", False), ("x\nnode:1:2 [0] a.cc:3 NCCL WARN bad\n", True)],
)  # fmt: skip
def test_a_log_is_recognized(text: str, is_log: bool) -> None:
    assert is_debug_log(text.encode()) is is_log


LINES = [line.encode() for line in (init_line(0), init_line(1), call_line(0), split_line(0, process=1))]
CUT = st.tuples(st.sampled_from(LINES), st.integers(0, 160), st.integers(0, 40), st.binary(max_size=6)).map(
    lambda cut: cut[0][: cut[1]] + cut[3] + cut[0][cut[1] + cut[2] :]
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(lines=st.lists(st.one_of(st.sampled_from(LINES), CUT, st.binary(max_size=80)), max_size=15))
def test_any_bytes_are_read(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "log"
    path.write_bytes(b"".join(lines))
    communicators, _ = read_launches([path])
    assert all(one.isprintable() for one in launch_words(communicators))
