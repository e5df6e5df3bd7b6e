"""The ledger holds for every kind of job: real loops on 2 and 4 gloo ranks, judged by the rows that torch recorded."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from pacecar.records import CollectiveWindow, EstimateCheck, Goodbye, JobHello, JobRecord, StepRecord
from tests.kit.ranks import run_ranks
from tests.profiler.kinds.loops import KINDS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

INDUCTOR = [kind for kind in KINDS if kind.endswith("inductor")]
"""Take half a minute of C++ compiler.  To the hook they are like those with aot_eager: it sees the same calls."""

PIPELINES = ["gpipe", "1f1b"]
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))


class Rank:
    """What one rank of one kind of job left behind."""

    def __init__(self, folder, kind, rank):
        self.result = json.loads((folder / f"{kind}-{rank}.json").read_text())
        if "error" in self.result:
            pytest.fail(self.result["error"])
        lines = (folder / kind / f"rank{rank}.jsonl").read_bytes().splitlines()
        self.records = [msgspec.json.decode(line, type=JobRecord) for line in lines]
        self.steps = [r for r in self.records if isinstance(r, StepRecord)]
        self.exact = [r for r in self.steps if r.source == "exact"]


def run(folder, ranks, kinds):
    run_ranks([Path(__file__).parent / "job.py", folder, *kinds], ranks)
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run(tmp_path_factory.mktemp("kinds"), 2, [kind for kind in KINDS if kind not in INDUCTOR])


@pytest.fixture(scope="module")
def two_ranks_with_inductor(tmp_path_factory):
    if not HAS_COMPILER:
        pytest.skip("inductor needs a C++ compiler")
    return run(tmp_path_factory.mktemp("inductor"), 2, INDUCTOR)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return run(tmp_path_factory.mktemp("pipelines"), 4, PIPELINES)


@pytest.fixture(
    params=[
        *(pytest.param((kind, 2), marks=pytest.mark.full if kind in INDUCTOR else ()) for kind in KINDS),
        *(pytest.param((kind, 4), marks=pytest.mark.full) for kind in PIPELINES),
    ],
    ids=str,
)
def job(request):
    kind, ranks = request.param
    if ranks == 4:
        folder = request.getfixturevalue("four_ranks")
    else:
        folder = request.getfixturevalue("two_ranks_with_inductor" if kind in INDUCTOR else "two_ranks")
    return kind, [Rank(folder, kind, rank) for rank in range(ranks)]


def union_ns(spans):
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def window_of(rank, record):
    """Return the window over the step of `record`; each step is in one."""
    end = record.ended_wall_ns
    start = end - record.wall_ns
    return max(rank.result["windows"], key=lambda window: min(end, window["end"]) - max(start, window["start"]))


def bounds_ns(window):
    """Return the least and the most that the recorded gloo rows let communication be in the step.

    A row that was open when the window ended lasted to some instant between its start and that end.
    """
    start, end = window["start"], window["end"]

    def clipped(rows):
        return union_ns([(max(start, a), min(end, b)) for a, b, _ in rows if min(end, b) > max(start, a)])

    return clipped([row for row in window["rows"] if row[2]]), clipped(window["rows"])


def test_losses_and_parameters_are_the_same_to_the_last_bit(job):
    _, ranks = job
    assert [rank.result["is_identical"] for rank in ranks] == [True] * len(ranks)


def test_a_ranks_records_begin_with_its_hello_end_with_its_goodbye_and_none_is_lost(job):
    _, ranks = job
    for number, rank in enumerate(ranks):
        hello, *_, bye = rank.records
        assert isinstance(hello, JobHello)
        assert isinstance(bye, Goodbye)
        assert (hello.rank, hello.world_size, hello.backend) == (number, len(ranks), "gloo")
        assert rank.steps[-1].dropped_records == 0


def test_every_update_is_a_step_whose_ledger_sums_and_whose_phases_fit(job):
    kind, ranks = job
    for rank in ranks:
        assert [r.step for r in rank.steps] == list(range(rank.result["updates"]))
        for record in rank.steps:
            assert sum(record.ledger.parts().values()) == record.wall_ns == record.ledger.wall_ns
            assert record.forward_ns + record.backward_ns + record.optimizer_ns <= record.wall_ns
            assert min(record.forward_ns, record.backward_ns, record.optimizer_ns) > 0
        usual = [r.micro_batches for r in rank.steps[1:]]  # pipelining runs a forward more in the first, for shapes
        if kind == "scaler_that_skips":
            assert sorted(usual) == [1] * (rank.result["steps"] - 4) + [3], (
                "what was skipped belongs to the next update"
            )
        else:
            assert usual == [rank.result["micro_batches"]] * len(usual)


def test_exact_windows_were_taken_and_left_nothing_unknown(job):
    _, ranks = job
    for rank in ranks:
        assert len(rank.exact) == len(rank.result["windows"]) >= 2
        assert all(r.ledger.unknown_ns == 0 for r in rank.exact)
        assert all(r.ledger.compute_ns > 0 for r in rank.exact)
        calibrated = [r for r in rank.steps if r.source == "estimate" and r.calibration_age_steps is not None]
        assert calibrated
        assert all(r.ledger.unknown_ns == 0 for r in calibrated)


def test_each_window_counts_its_collectives_and_all_but_the_first_check_the_estimate(job):
    _, ranks = job
    for rank in ranks:
        sums = [r for r in rank.records if isinstance(r, CollectiveWindow)]
        assert [window.step for window in sums] == [r.step for r in rank.exact]
        for window, record in zip(sums, rank.exact, strict=True):
            assert sum(one.duration_ns for one in window.sums) >= record.ledger.communication_ns > 0
            assert all(one.bytes is None for one in window.sums), "gloo does not say"
        checks = [r.step for r in rank.records if isinstance(r, EstimateCheck)]
        assert checks == [r.step for r in rank.exact][1:]


def test_communication_is_what_the_recorded_rows_say(job):
    _, ranks = job
    for rank in ranks:
        for record in rank.exact:
            low, high = bounds_ns(window_of(rank, record))
            slack = 100_000 + record.wall_ns // 100  # two clocks were read one after the other
            assert low > 0 or high > 0
            assert low - slack <= record.ledger.communication_ns <= high + slack


def starts_within(window):
    """Return how many of the recorded gloo rows began in the step."""
    return sum(window["start"] <= start <= window["end"] for start, _, _ in window["rows"])


def test_a_step_has_as_many_collectives_as_the_users_own_profiler_sees_in_another_run(job):
    """Not as long ones: a rank that is profiled alone comes late, so the others wait for it and it for nobody."""
    _, ranks = job
    for rank in ranks:
        # The middle one: an update after skipped ones has theirs, too; a rank ahead posts a receive in the step before.
        seen = sorted(starts_within(window_of(rank, record)) for record in rank.exact)
        assert seen[(len(seen) - 1) // 2] == round(rank.result["collectives"]) >= 1
