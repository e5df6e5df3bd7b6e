"""One rank closes, raises, leaves out a step, never attaches or stops measuring: the others train on, as if alone.

Real ranks; the same jobs without pacecar are what is compared with, to the last bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.net import free_port
from tests.kit.ranks import ROOT, SETTINGS, Ended, finish, start_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB = Path(__file__).with_name("job_uneven.py")

Rank = dict[str, Any]

BASE = {"steps": 60, "tune": "exact", "restless": True, "who": [1], "when": 20, "what": "none"}

JOBS: dict[str, dict[str, Any]] = {
    "closes before the first vote": {"what": "close", "when": 1, "steps": 30},
    "closes when a vote is out": {"what": "close", "when": "voted"},
    "closes in a trial": {"what": "close", "when": "trial"},
    "closes after a switch": {"what": "close", "when": "switched", "who": [0]},
    "closes at rest": {"what": "close", "when": 30, "restless": False, "steps": 50},
    "ends its block by an exception": {"what": "block", "when": "voted"},
    "raises before forward": {"what": "raise", "when": "voted"},
    "leaves out a step": {"what": "skip", "when": 21},
    "leaves out the next one": {"what": "skip", "when": 22},
    "stops measuring": {"what": "off", "when": "trial"},
    "FSDP2 closes in a trial": {"what": "close", "when": "trial", "kind": "fsdp"},
    "accumulates and closes in a trial": {"what": "close", "when": "trial", "kind": "accumulate"},
    "cuts batches and closes in a trial": {"what": "close", "when": "trial", "kind": "micro"},
    "all close in a trial": {"what": "close", "when": "trial", "who": [0, 1]},
    "FSDP2: all close in a trial": {"what": "close", "when": "trial", "kind": "fsdp", "who": [0, 1]},
    "closes in a loop of plain all-reduces": {"what": "close", "when": 20, "kind": "plain", "steps": 40},
    "closes in a loop with all-reduces of its own": {"what": "close", "when": "voted", "kind": "metrics"},
    "never attaches": {"what": "absent", "when": 0, "steps": 30},
}
"""The last leaves the ranks with different numbers of attachments."""

PLANTED = "RuntimeError: planted"
"""The one traceback that a job here asks for."""


def launched(jobs: Sequence[dict[str, Any]], ranks: int, **environ: str) -> list[Ended]:
    """Return how the ranks of one process group ended, which ran `jobs` one after the other."""
    settings = {"PACECAR_HOOK_OVERHEAD_BUDGET": "0.2", **environ}
    return finish(start_ranks([JOB, json.dumps(list(jobs))], ranks, environ=settings), 240)


def heard(ended: Sequence[Ended]) -> list[list[Rank]]:
    """Return for each job what each rank said; fails where one did not exit 0, or said more than calm lines."""
    for rank in ended:
        assert rank.code == 0, rank.err[-3000:]
        assert rank.err.count("Traceback") == rank.err.count(PLANTED), rank.err[-3000:]
    answers = [json.loads(rank.out.strip().splitlines()[-1]) for rank in ended]
    return [list(ranks) for ranks in zip(*answers, strict=True)]


def alone(job: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `job` without pacecar; what nobody does there is left out, so that many are the same."""
    if job["what"] in ("block", "raise", "skip"):
        return {**job, "tune": None}
    return {**BASE, "steps": job["steps"], "kind": job.get("kind", "ddp"), "tune": None}


LEFT = {
    "closes when a vote is out", "closes after a switch", "closes at rest", "ends its block by an exception",
    "leaves out the next one", "accumulates and closes in a trial", "cuts batches and closes in a trial",
    "FSDP2: all close in a trial", "closes in a loop of plain all-reduces",
}  # fmt: skip
"""Jobs that `make test` leaves to `make test-all`: each differs in one thing from one that it runs."""


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Ask about each of these jobs."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.full if name in LEFT else ()) for name in names]
    )


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> dict[str, tuple[list[Rank], list[Rank]]]:
    """Each job tuned and alone, in the same two processes; those of LEFT only if one of them is asked about."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("name") for item in here}
    names = [name for name in JOBS if name not in LEFT or asked & LEFT]
    tuned = [{**BASE, **JOBS[name], "tune": "exact"} for name in names]
    plain = {json.dumps(alone(job)): alone(job) for job in tuned}
    answers = heard(launched([*plain.values(), *tuned], 2))
    of_plain = dict(zip(plain, answers, strict=False))
    return {
        name: (answer, of_plain[json.dumps(alone(job))])
        for name, job, answer in zip(names, tuned, answers[len(plain) :], strict=True)
    }


def same(tuned: Sequence[Rank], alone: Sequence[Rank], job: dict[str, Any]) -> None:
    """Losses and weights are those of the job alone.

    Batches that are cut are summed up in another order, and so are gradients of more than two ranks in other buckets.
    """
    for mine, theirs in zip(tuned, alone, strict=True):
        if job.get("kind") == "micro" or len(tuned) > 2:
            both = [[*rank["losses"], rank["weights"]] for rank in (mine, theirs)]
            left_out = [[at for at, word in enumerate(words) if word == "left out"] for words in both]
            assert left_out[0] == left_out[1], job
            numbers = [[float.fromhex(word) for word in words if word != "left out"] for words in both]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-4), job
        else:
            assert mine["losses"] == theirs["losses"], job
            assert mine["weights"] == theirs["weights"], job


@each(JOBS)
def test_the_job_trains_on_to_the_same_losses(jobs: Any, name: str) -> None:
    same(*jobs[name], JOBS[name])


CLOSES = [name for name in JOBS if JOBS[name]["what"] in ("close", "block") and JOBS[name].get("kind") != "plain"]


@each(CLOSES)
def test_all_ranks_keep_the_same_values_and_each_says_one_line_at_most(jobs: Any, name: str) -> None:
    tuned, _ = jobs[name]
    for rank in {**BASE, **JOBS[name]}["who"]:
        assert tuned[rank]["did_at"] is not None, "the moment has come"
    assert bool(tuned[0]["knobs"]) == (JOBS[name]["when"] != 1), "there was something to turn"
    assert tuned[0]["layout"] == tuned[1]["layout"]
    assert [len(rank["said"]) <= 1 for rank in tuned] == [True, True], [rank["said"] for rank in tuned]
    assert max(rank["slowest"] for rank in tuned) < 20.0


@each([name for name in CLOSES if "who" not in JOBS[name] or len(JOBS[name]["who"]) == 1])
def test_where_one_closes_the_other_says_why_it_tunes_no_more(jobs: Any, name: str) -> None:
    tuned, _ = jobs[name]
    who = {**BASE, **JOBS[name]}["who"][0]
    assert f"rank {who} takes no further part" in tuned[1 - who]["frozen"]
    if JOBS[name]["when"] == "trial":
        for rank in tuned:
            (line,) = rank["said"]
            assert all(f"; {knob} stays at " in line and " before)" in line for knob in rank["knobs"]), line


@each([name for name in CLOSES if JOBS[name].get("who") == [0, 1]])
def test_where_all_close_in_a_trial_after_the_same_step_all_go_back_to_what_is_proven(jobs: Any, name: str) -> None:
    tuned, _ = jobs[name]
    assert len({rank["did_at"] for rank in tuned}) == 1, "after the same step"
    assert [rank["layout"] for rank in tuned] == [rank["proven"] for rank in tuned]
    assert [rank["said"] for rank in tuned] == [[], []]
    assert len({rank["epoch"] for rank in tuned}) == 1


def test_where_the_hook_of_one_rank_turns_itself_off_all_go_back_and_all_say_why(jobs: Any) -> None:
    """No policy judges without the paces of all ranks: a trial would stay in force, and a person's order unanswered."""
    tuned, _ = jobs["stops measuring"]
    assert "hook has turned itself off in this rank" in tuned[1]["frozen"]
    assert tuned[0]["frozen"] in ("rank 1 froze", "another rank froze")
    assert [rank["layout"] for rank in tuned] == [tuned[1]["proven"]] * 2
    assert len({rank["epoch"] for rank in tuned}) == 1


@pytest.mark.parametrize("when", [pytest.param("trial", id="in a trial"), pytest.param(30, id="before a switch")])
def test_a_rank_that_closes_alone_makes_the_same_updates_as_the_others_at_the_same_rate(when: int | str) -> None:
    """Updates of another size would be fewer, and the others wait for the rest of them for ever."""
    job = {**BASE, "what": "close", "when": when, "kind": "batches", "tune": "adaptive", "steps": 160, "who": [1]}
    ((one, other),) = heard(launched([job], 2))
    assert other["did_at"] is not None, "the moment has come"
    assert len(one["losses"]) == len(other["losses"])
    if when == "trial":
        assert len(one["losses"]) < 160, "two or four batches of the loader made an update"
    assert one["layout"] == other["layout"]
    assert one["weights"] == other["weights"]
    if when == "trial":
        assert "; batch_samples stays at " in other["said"][0]


WHEN = (1, "voted", "trial", "switched", 30)
"""Before the first vote, when one is out, in a trial, after a switch, at any other time."""


def attacks_on(kind: str, ranks: int) -> list[dict[str, Any]]:
    """Return what is tried on jobs of a kind."""
    every, ends = range(ranks), (0, ranks - 1)
    closes = [{"what": "close", "when": "trial", "who": list(every)}]
    if kind != "ddp":
        closes += [{"what": "close", "when": when, "who": [who]} for when in ("trial", "voted", 30) for who in ends]
        closes += [{"what": "off", "when": "trial", "who": [who]} for who in ends]
        return [{**attack, "kind": kind} for attack in closes]
    return [
        *closes,
        *({"what": "close", "when": when, "who": [who]} for when in WHEN for who in every),
        *({"what": "block", "when": when, "who": [who]} for when in ("voted", "trial") for who in every),
        *({"what": "skip", "when": when, "who": [who]} for when in range(20, 24) for who in every),
        *({"what": "raise", "when": "voted", "who": [who]} for who in every),
        *({"what": "off", "when": "trial", "who": [who]} for who in every),
        {"what": "close", "when": "trial", "who": list(range(1, ranks))},
    ]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "accumulate", "micro"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_under_torchrun_each_rank_may_close_or_fail_at_each_moment(ranks: int, kind: str, tmp_path: Path) -> None:
    attacks = attacks_on(kind, ranks)
    options = [{**BASE, **attack, "tune": tune} for tune in (None, "exact") for attack in attacks]
    environ = {**os.environ, **SETTINGS, "PACECAR_HOOK_OVERHEAD_BUDGET": "0.2", "PYTHONPATH": str(ROOT)}
    environ |= {"ANSWERS": str(tmp_path / "rank"), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    ended = subprocess.run(
        [*launcher, "--master-port", str(free_port()), str(JOB), json.dumps(options)],
        env=environ, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    answers = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(ranks)]
    for attack, alone, tuned in zip(
        attacks, zip(*answers, strict=True), list(zip(*answers, strict=True))[len(attacks) :], strict=False
    ):
        same(tuned, alone, attack)
        assert len({str(rank["layout"]) for rank in tuned}) == 1, attack
        assert max(len(rank["said"]) for rank in tuned) <= 1, (attack, [rank["said"] for rank in tuned])
        if attack["what"] == "close" and attack["who"] == list(range(ranks)) and attack["when"] == "trial":
            assert [rank["layout"] for rank in tuned] == [rank["proven"] for rank in tuned], attack


@pytest.mark.full
@pytest.mark.parametrize("who", [0, 1, 2])
def test_of_three_ranks_any_may_not_attach(who: int) -> None:
    options = [{**BASE, "what": "absent", "who": [who], "steps": 30, "tune": tune} for tune in (None, "exact")]
    alone, tuned = heard(launched(options, 3))
    assert [rank["losses"] for rank in tuned] == [rank["losses"] for rank in alone]
