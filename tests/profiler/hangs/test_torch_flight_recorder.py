"""Which collectives a rank has begun and not finished, from every flight recorder that torch has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pacecar.analysis.hang.dumps.flight_recorder import read_dump
from pacecar.analysis.hang.judgement import judge
from pacecar.profiler.hangs.torch_flight_recorder import SIZES_MAX, TEXT_MAX, dumps, unfinished, with_calls
from pacecar.records.hangs import GroupState, HangKind, RankAccount
from tests.profiler.hangs.job_flight_recorder import run_groups

RECORDED = Path(__file__).parents[2] / "gpu" / "recorded"

OURS = ""
"""The name of a group that was made beside torch's registry."""


def entry(group="0", seq=1, *, at=0, name="nccl:all_reduce", retired=False, state="started", **more):
    return {
        "profiling_name": name, "collective_seq_id": seq, "process_group": [group, "undefined"], "input_sizes": [[8]],
        "state": state, "retired": retired, "time_created_ns": at,
    } | more  # fmt: skip


def dump(*entries):
    return json.dumps({"version": "2.10", "entries": entries}).encode()


class Torch:
    """The dumps of one torch: by backend, and the default one under None; those it does not have raise."""

    def __init__(self, recorders, *, takes_backend=True):
        self.recorders, self.takes_backend = recorders, takes_backend

    def __call__(self, **arguments):
        if arguments and not self.takes_backend:
            raise TypeError("incompatible function arguments")
        return self.recorders[arguments.get("backend")]


def test_what_nccl_recorded_on_a_gpu_is_read():
    """Torch 2.11 on an H200; then with its third collective under way, as the device had not finished it."""
    recorded = json.loads((RECORDED / "fr_nccl_timed.json").read_text())
    assert "all_reduce #7" in unfinished([json.dumps(recorded).encode()])
    assert "completed" in unfinished([json.dumps(recorded).encode()])
    for entry in recorded["entries"][2:]:
        entry |= {"retired": False, "state": "started" if entry["op_id"] == 3 else "scheduled"}
    for status in recorded["pg_status"].values():
        status |= {"last_started_collective": 3, "last_completed_collective": 2}
    said = unfinished([json.dumps(recorded).encode()])
    assert "_reduce_scatter_base #3 on group 0/default_pg" in said
    assert "started" in said


def test_a_torch_whose_nccl_records_into_a_recorder_of_its_own_is_read():
    """Torch 2.15: `nccl` is `nccl2`, the dump without a backend is gloo's and empty."""
    torch = Torch({None: dump(), "nccl2": dump(entry(seq=41))})
    assert unfinished(dumps(lambda: dump(), torch, ["nccl2"])) == "nccl:all_reduce #41 on group 0, sizes [[8]], started"
    assert unfinished(dumps(lambda: dump(), torch, [])) is None


def test_a_torch_without_a_recorder_for_each_backend_is_read_once():
    torch = Torch({None: dump(entry(seq=7))}, takes_backend=False)
    assert [*dumps(None, torch, ["nccl2", "mpi"])] == [dump(entry(seq=7))]
    assert [*dumps(None, None, ["nccl2"])] == []


def test_a_recorder_that_raises_or_is_malformed_costs_its_own_entries_only():
    def raises():
        raise RuntimeError("nccl dump failed")

    torch = Torch({None: b'{"entries": [{"process_group"', "nccl2": dump(entry(seq=3))})
    said = unfinished(dumps(raises, torch, ["absent", "nccl2"]))
    assert said == "nccl:all_reduce #3 on group 0, sizes [[8]], started"
    assert unfinished([dump({"process_group": []}), b"[]", b"", dump(entry(seq=4))]).startswith("nccl:all_reduce #4 ")


def test_each_group_is_said_by_its_first_unfinished_collective_oldest_group_first():
    said = unfinished([
        dump(entry("0", 40, at=1, retired=True), entry("0", 41, at=9), entry("0", 42, at=10), entry("0", 43, at=11)),
        dump(entry("tp", 7, at=5, name="gloo:all_gather", state="scheduled", process_group=["3", "tp"])),
    ])  # fmt: skip
    assert said == (
        "gloo:all_gather #7 on group 3/tp, sizes [[8]], scheduled; "
        "nccl:all_reduce #41 on group 0, sizes [[8]], started, and 2 more behind it"
    )


def test_where_all_are_finished_the_latest_of_all_recorders_is_said():
    early, late = dump(entry(seq=5, at=50, retired=True)), dump(entry("1", 2, at=60, state="completed"))
    for recorders in ([early, late], [late, early]):
        assert unfinished(recorders) == "nccl:all_reduce #2 on group 1, sizes [[8]], completed"
    assert unfinished([]) is None
    assert unfinished([dump(), b"{}"]) is None


def test_collectives_of_our_own_groups_are_left_out():
    assert unfinished([dump(entry(OURS, 9, at=9), entry("0", 41, at=1))]).startswith("nccl:all_reduce #41 ")
    assert unfinished([dump(entry(OURS, 9))]) is None


def test_a_message_between_two_ranks_is_counted_as_such_and_all_that_is_said_is_bounded():
    said = unfinished([dump(entry(seq=0, name="nccl:send 0->1", is_p2p=True, p2p_seq_id=12))])
    assert said == "nccl:send 0->1 #12 on group 0, sizes [[8]], started"
    coalesced = entry(input_sizes=[[n, n] for n in range(500)])
    assert len(unfinished([dump(coalesced)])) < SIZES_MAX + 60
    assert len(unfinished([dump(*(entry(str(n), at=n) for n in range(50)))])) == TEXT_MAX


def test_a_group_with_a_backend_for_each_kind_of_device_has_two_counts_of_collectives():
    """Rank 3 has called one of gloo's last, and the others have gone on to NCCL's, of which there are many more."""

    def account(rank, *, is_late):
        nccl = [entry(seq=5000, at=50, retired=True)] + ([] if is_late else [entry(seq=5001, at=70)])
        gloo = [entry(seq=10, at=60, name="gloo:all_reduce", retired=True)]
        read = [read_dump(dump(*entries), rank).groups for entries in (nccl, gloo)]
        own = GroupState(name="0", ranks=(0, 1, 2, 3), enqueued=5000, operations=5000)
        return RankAccount(rank=rank, world_size=4, groups=tuple(with_calls([own], read, {"0"})))

    verdict = judge([account(rank, is_late=rank == 3) for rank in range(4)], 4)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (HangKind.NOT_JOINED, (3,), (0, 1, 2))
    assert verdict.summary.startswith("rank 3 finished all_reduce #5000 of group `0` and never joined #5001")


@pytest.mark.distributed
def test_a_real_rank_that_waits_in_one_of_its_groups_names_that_group(tmp_path):
    """Rank 1 joins the collective of the third group only when rank 0 has looked."""
    waiting, after = run_groups(tmp_path)
    assert waiting == "gloo:all_reduce #2 on group 2/tp, sizes [[8]], scheduled"
    assert after == "gloo:all_reduce #1 on group 3, sizes [[4]], completed"
