"""Flight recorder dumps become accounts; what cannot be used is named, and nothing in a file is run."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.analysis.hang.dumps.dump_folder import rank_of, read_folder
from pacecar.analysis.hang.dumps.flight_recorder import DumpError, read_dump
from pacecar.analysis.hang.judgement import judge
from pacecar.records.hangs import CALLS_MAX, HangKind, RankAccount


def entry(number: int, operation: str = "nccl:all_reduce", *, group: str = "1", **fields: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": int(group), "process_group": (group, "dp"), "collective_seq_id": number,
        "p2p_seq_id": 0, "profiling_name": operation, "time_created_ns": 10**18 + number, "input_sizes": [[4, 8]],
        "input_dtypes": ["Float"], "state": "scheduled", "retired": False, "is_p2p": False, **fields,
    }  # fmt: skip


def status(enqueued: object, completed: object) -> dict[str, object]:
    return {
        "last_enqueued_collective": enqueued, "last_started_collective": -1, "last_completed_collective": completed,
    }  # fmt: skip


def dump(*entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}, "1": {"desc": "dp", "ranks": "[1, 3]"}}
    counters = {"0": status(-1, -1), "1": status(7, 5)}
    return {"version": "2.10", "pg_config": config, "pg_status": counters, "entries": list(entries), **fields}


def read(document: object, rank: int = 3) -> RankAccount:
    account = read_dump(pickle.dumps(document, protocol=2), rank)
    assert msgspec.convert(msgspec.to_builtins(account), RankAccount) == account, "every field is in its range"
    return account


def test_a_pickle_and_json_with_numbers_as_text_say_the_same() -> None:
    document = dump(entry(5, state="completed"), entry(6), entry(7))
    texts = {**document, "pg_status": {"0": status("-1", "-1"), "1": status("7", "5")}}
    account = read(document)
    assert read_dump(json.dumps(texts).encode(), 3) == account
    group = account.groups[1]
    assert (account.rank, account.world_size) == (3, 4)
    assert (group.name, group.description, group.ranks) == ("1", "dp", (1, 3))
    assert (group.enqueued, group.started, group.completed) == (7, None, 5)
    assert [(call.number, call.is_finished) for call in group.calls] == [(5, True), (6, False), (7, False)]
    assert (group.calls[0].operation, group.calls[0].sizes, group.calls[0].dtypes) == (
        "nccl:all_reduce", "[[4, 8]]", "Float",
    )  # fmt: skip


def test_zero_is_a_measurement() -> None:
    """-1 is torch's word for a group in which nothing was called yet, which is known: none."""
    group = read(dump()).groups[0]
    assert (group.enqueued, group.completed, group.calls) == (0, 0, ())
    assert read(dump(pg_status={})).groups[0].enqueued is None


def test_a_retired_entry_is_finished_though_gloo_calls_it_scheduled_and_its_counter_is_behind() -> None:
    gloo = dump(entry(6, "gloo:all_reduce", retired=True), entry(7, "gloo:all_reduce"))
    assert read(gloo).groups[1].completed == 6


def test_groups_without_entries_get_their_counters_by_the_order_of_creation() -> None:
    config = {name: {"desc": name, "ranks": "[0]"} for name in ("10", "9", "2")}
    counters = {str(index): status(index + 20, index + 20) for index in range(3)}
    account = read(dump(pg_config=config, pg_status=counters), 0)
    assert [(group.name, group.enqueued) for group in account.groups] == [("2", 20), ("9", 21), ("10", 22)]
    contradicted = dump(entry(3, group="9", pg_id=2), pg_config=config, pg_status=counters)
    counts = {group.name: group.enqueued for group in read(contradicted, 0).groups}
    assert counts == {"2": None, "9": 22, "10": None}


def test_counters_of_a_group_with_sends_are_those_of_its_collectives() -> None:
    send = entry(900, "nccl:send 1->0", is_p2p=True, p2p_seq_id=900, collective_seq_id=26)
    group = read(dump(send, pg_status={"1": status(900, 890)})).groups[1]
    assert (group.enqueued, group.completed) == (26, 26)
    assert (group.calls[0].number, group.calls[0].is_p2p, group.calls[0].is_finished) == (900, True, False)


def test_the_parts_of_a_batch_are_finished_with_it() -> None:
    parts = [entry(1, f"nccl:{what}", is_p2p=True, p2p_seq_id=4) for what in ("send 0->1", "recv 0<-1")]
    whole = entry(2, "nccl:coalesced", is_p2p=True, p2p_seq_id=4)
    assert not any(call.is_finished for call in read(dump(*parts, whole)).groups[1].calls)
    assert all(call.is_finished for call in read(dump(*parts, {**whole, "retired": True})).groups[1].calls)


def test_of_many_calls_those_are_kept_that_began_to_wait_first() -> None:
    calls = read(dump(*(entry(number, retired=number <= 50) for number in range(1, 101)))).groups[1].calls
    assert len(calls) == CALLS_MAX
    assert [call.number for call in calls if not call.is_finished][:2] == [51, 52]
    assert calls[0].is_finished
    finished = read(dump(*(entry(number, retired=True) for number in range(1, 101)))).groups[1].calls
    assert [call.number for call in finished] == list(range(85, 101))


def test_torch_names_peers_by_their_place_in_a_group_whose_ranks_may_have_any_order() -> None:
    config = {"1": {"desc": "pp", "ranks": "[2, 0, 1]"}}
    receive = entry(1, "nccl:recv 2<-0", is_p2p=True, p2p_seq_id=1)
    documents = [dump(*calls, pg_config=config) for calls in ([], [receive], [])]
    verdict = judge([read(document, rank) for rank, document in enumerate(documents)], 3)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (HangKind.NOT_JOINED, (2,), (1,))


def test_a_nameless_group_is_our_own_and_left_out() -> None:
    assert [group.name for group in read(dump(entry(1, process_group=("", "undefined")))).groups] == ["0", "1"]


def test_texts_and_sizes_are_cut_and_never_fail() -> None:
    bomb: list[Any] = ["x"]
    for _ in range(60):
        bomb = [bomb] * 60  # sixty references: small in the file, beyond any memory as text
    long = entry(
        6, "a\x1b[31m" * 1000, input_sizes=bomb, input_dtypes=["Float" * 500] * 99, process_group=("1", "d" * 999)
    )
    account = read(dump(long, entry(7, input_sizes=[["?", 2**80, -1]], time_created_ns=-5), {"process_group": 3}, 4))
    calls = account.groups[1].calls
    assert "\x1b" not in calls[0].operation
    assert calls[1].sizes == "[[None, None, None]]"
    assert calls[1].created_ns is None
    assert account.problems == ("2 entries could not be read",)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo run > /tmp/never",)


def test_lists_that_hold_each_other_over_and_over_are_never_written_out() -> None:
    bomb: object = "lol"
    for _ in range(40):  # 2**40 of them in some hundred bytes
        bomb = [bomb, bomb]
    fields = ("profiling_name", "input_sizes", "input_dtypes", "state", "process_group", "op_id", "record_id", "pg_id")
    for field in fields:
        assert read(dump(entry(6), entry(7, **{field: bomb}))).groups
    for field in ("pg_config", "pg_status"):
        read(dump(entry(6), **{field: {"1": bomb}}))
    with pytest.raises(DumpError, match="version unknown"):
        read(dump(version=bomb))


@pytest.mark.parametrize("value", [Runs(), Path("x"), {1, 2}, b"bytes"], ids=["call", "class", "set", "bytes"])
def test_no_class_and_no_function_of_a_pickle_is_resolved(value: object) -> None:
    with pytest.raises(DumpError, match="refused: it names "):
        read_dump(pickle.dumps(dump(entry(1, extra=value)), protocol=2), 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated, or not a dump"),
        (b"Fault ranks: [1]\n", "not a dump"),
        (b'{"traceEvents": []}', "neither entries nor pg_status"),
        (b"[1, 2]", "not a dump"),
        (json.dumps(dump(version="3.0")).encode(), "version 3.0 of the format"),
        (pickle.dumps({"entries": []}), "version unknown"),
        (pickle.dumps([1, 2], protocol=2), "not a dump"),
    ],
)
def test_what_is_no_dump_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(DumpError, match=reason):
        read_dump(data, 0)


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from(["json", "pickle"]), st.binary(max_size=4))
def test_a_dump_that_is_cut_or_damaged_is_refused_or_read_but_raises_nothing_else(
    at: int, form: str, junk: bytes
) -> None:
    document = dump(entry(6), entry(7))
    data = json.dumps(document).encode() if form == "json" else pickle.dumps(document, protocol=2)
    at %= len(data)
    for damaged in (data[:at], data[:at] + junk + data[at + len(junk) :]):
        try:
            account = read_dump(damaged, 0)
        except DumpError:
            continue
        assert msgspec.convert(msgspec.to_builtins(account), RankAccount) == account


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("_dump_3", 3), ("nccl_trace_rank_12", 12), ("comm_lib_trace_rank_7", 7), ("fr_rank3.json", 3),
        ("job-2024_rank-05.pkl", 5), ("node2_rank_4_of_8.json", 4), ("17", 17), ("fault_injection.log", None),
        ("trace.json", None), ("notes2024.txt", None), ("dump_1718100000.json", None), ("rank12_local_rank4.json", 12),
    ],
)  # fmt: skip
def test_the_rank_is_in_the_files_name(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


def test_what_cannot_be_used_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    data = pickle.dumps(dump(entry(6)), protocol=2)
    for name in ("_dump_0", "_dump_1", "rank1.json", "_dump_2", "unnumbered"):
        (tmp_path / name).write_bytes(data)
    now = time.time()
    for name, age in (("rank1.json", 60), ("_dump_2", 7200)):
        os.utime(tmp_path / name, (now - age, now - age))
    (tmp_path / "_dump_3").write_bytes(data[:-20])
    (tmp_path / "fault.log").write_text("it hung")
    (tmp_path / "below").mkdir()
    os.mkfifo(tmp_path / "pipe_rank_9")
    found = read_folder(tmp_path)
    assert [account.rank for account in found.accounts] == [0, 1]
    assert (found.world_size, found.files) == (4, 4)
    assert [problem.partition(":")[0] for problem in found.problems] == [
        "_dump_3", "fault.log", "rank1.json", "unnumbered", "_dump_2",
    ]  # fmt: skip
    assert "another dump of rank 1 is newer" in found.problems[2]
    assert "an hour older" in found.problems[4]


def test_a_number_that_is_no_rank_does_not_become_the_size_of_the_job(tmp_path: Path) -> None:
    """Else the judge makes sets of as many ranks."""
    of_all = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 2147483647]"}}
    for name, document in (
        ("_dump_0", dump(entry(6))),
        ("fr_20260611.json", dump(entry(6))),
        ("_dump_1", dump(pg_config=of_all)),
    ):
        (tmp_path / name).write_bytes(pickle.dumps(document, protocol=2))
    found = read_folder(tmp_path)
    assert ([account.rank for account in found.accounts], found.world_size) == ([0], 4)
    assert found.problems == (
        "_dump_1: left out: no job has 2147483648 ranks", "fr_20260611.json: left out: no job has 20260612 ranks",
    )  # fmt: skip
