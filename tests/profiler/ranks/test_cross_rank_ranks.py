"""In a real job whose rank 1 gets slow all ranks record the same steps, and the verdict names it with its cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.ranks import finish, start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

JOB = Path(__file__).with_name("job_cross_rank.py")


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_a_real_job_records_judges_and_cleans_up(tmp_path: Path, kind: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environ = {"PACECAR_HOOK_CROSS_RANK_WINDOWS": "true", "TMPDIR": str(temporary)}
    ended = finish(start_ranks([JOB, kind, tmp_path], 2, environ=environ))
    rows = [[json.loads(line) for line in one.out.splitlines() if line.startswith("{")] for one in ended]
    assert [one.code for one in ended] == [0, 0], ended[0].err + ended[1].err
    told = [row for row in rows[0] if "ended" in row]
    judged = [row for row in told if "all ranks recorded" in row["why"]]
    assert {(row["rank"], row["cause"]) for row in judged} == {(1, "compute")}, told
    # On a busy machine the other rank may wait for a processor for a while, and that is said.
    assert not [row for row in told if row["rank"] != 1 and row["cause"] != "host_bound"]
    recorded = [row["recorded"] for mine in rows for row in mine if "recorded" in row]
    assert len(recorded) == 2
    assert recorded[0][:2] == recorded[1][:2], "the same steps"
    assert all(size < 40 * 1024 for *_, size in recorded)
    steps = set(range(recorded[0][0], recorded[0][1] + 1))
    for *_, left in rows:
        assert steps <= set(left["disturbed"]), "they are no evidence"
        assert left["cost_ns"] > 1_000_000, "charged to the budget"
        assert (left["threads"], left["children"]) == ([], [])
        assert left["closed"] >= 1, "the socket where ranks are asked"
    assert [path.name for path in temporary.iterdir() if path.name.startswith("pacecar")] == []
