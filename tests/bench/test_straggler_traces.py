"""Operations of a pipeline become traces in which `pacecar analyze` finds who held the job up, and what that cost.

The job here has a wait that its table does not show, as ByteDance's have: the last stages begin with gradients when all
workers are ready.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.straggler_traces import Operation, Rows, documents
from pacecar.analysis.all_ranks.rank_comparison import analyze_job
from pacecar.analysis.document.report import TraceJob
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.trace.reader import read_trace

pytestmark = pytest.mark.slow

MS = 1_000_000
REPLICAS, STEPS, SPREAD = 4, 12, 0.25


def operations(
    slow: float = 1.0, more: float = 1.0, *, replicas: int = REPLICAS, microbatches: int = 1, spread: float = 0.0
) -> list[Operation]:
    """Return the operations of pipelines of 2 stages that take one microbatch after the other.

    The first stage of the first pipeline takes `slow` times as long as it should, all last stages `more` times.
    Sequences have lengths that vary by `spread` (of the logarithm), or the mean of these.
    """
    random = np.random.default_rng(7)
    found: list[Operation] = []
    for step in range(STEPS):
        noise = random.normal(1, 0.005, (replicas, microbatches, 2, 2))
        lengths = np.exp((spread or SPREAD) * random.normal(0, 1, (replicas, microbatches)))
        if not spread:
            lengths = np.full_like(lengths, lengths.mean() if microbatches > 1 else 1.0)
        rows: dict[tuple[int, int], list[tuple[str, float, float]]] = {}
        ready = np.zeros((replicas, 2))
        for replica in range(replicas):
            first = rows[replica, 0] = [("params-all-gather", 0.0, 10.0)]
            last = rows[replica, 1] = [("params-all-gather", 0.0, 10.0)]
            done, free = 10.0, 10.0
            for length, its in zip(lengths[replica], noise[replica], strict=True):
                forward, backward = 100 * length * its[:, 0], 200 * length * its[:, 1]
                forward *= (slow if replica == 0 else 1.0, more)
                backward *= (slow if replica == 0 else 1.0, more)
                sent = done + forward[0]
                turned = sent + 1 + forward[1]
                back = turned + backward[1]
                first += [
                    ("forward-compute", done, sent), ("forward-send", sent, sent + 1),
                    ("backward-recv", sent + 1, back + 1), ("backward-compute", back + 1, back + 1 + backward[0]),
                ]  # fmt: skip
                last += [
                    ("forward-recv", free, sent + 1), ("forward-compute", sent + 1, turned),
                    ("backward-compute", turned, back), ("backward-send", back, back + 1),
                ]  # fmt: skip
                done, free = back + 1 + backward[0], back + 1
            ready[replica] = done, free
        ready[:, 1] = ready.max()  # which no row says
        reduced = ready.max(axis=0) + 10
        end = reduced.max() + 2
        for (replica, stage), of_rank in rows.items():
            begun = ready[replica, stage]
            of_rank += [
                ("grads-reduce-scatter", begun, reduced[stage]), ("optimizer-clip-main-grad", reduced[stage], end),
                ("optimizer", end, end + 5), ("gc", end + 5, end + 5),
            ]  # fmt: skip
            found += [
                Operation(replica, stage, step, kind, round(a * MS), round(b * MS) - round(a * MS))
                for kind, a, b in of_rank
            ]
    return found


def step_ms(of: list[Operation]) -> float:
    ends = [max(one.start_ns + one.duration_ns for one in of if one.step == step) for step in range(STEPS)]
    return sum(ends) / STEPS / MS


def analyzed(of: list[Operation], folder: Path, rows: Rows = Rows.ALL) -> TraceJob:
    traces = []
    for rank, document in documents(of, rows):
        path = folder / f"rank{rank}.json"
        path.write_text(document, encoding="utf-8")
        traces.append(read_trace(path))
    return analyze_job(traces, [analyze_trace(trace) for trace in traces])


def saved_ms(job: TraceJob, rows: Rows) -> float:
    """Return what the first finding saves a step: the device alone marks no steps."""
    return job.stragglers[0].saved_ns / MS / (1 if rows is Rows.ALL else STEPS)


@pytest.mark.parametrize("rows", Rows)
def test_a_slow_worker_is_named_with_what_it_costs_though_others_waited_unseen(rows: Rows, tmp_path: Path) -> None:
    job = analyzed(operations(3.0), tmp_path, rows)
    true = step_ms(operations(3.0)) - step_ms(operations(1.0))
    assert [(one.ranks, one.cause) for one in job.stragglers] == [([0], "compute")]
    assert saved_ms(job, rows) == pytest.approx(true, rel=0.03)
    assert sum(part.duration_ns for part in job.critical_path) == job.wall_ns


@pytest.mark.parametrize("rows", Rows)
def test_a_last_stage_with_more_work_is_named_as_one(rows: Rows, tmp_path: Path) -> None:
    job = analyzed(operations(1.0, 1.5), tmp_path, rows)
    true = step_ms(operations(1.0, 1.5)) - step_ms(operations(1.0))
    assert [(one.kind, one.ranks, one.cause) for one in job.stragglers] == [("stage", [1, 3, 5, 7], "compute")]
    assert saved_ms(job, rows) == pytest.approx(true, rel=0.03)


def test_sequences_of_different_lengths_are_named_beside_a_last_stage_that_has_more_work(tmp_path: Path) -> None:
    """What even work alone is worth is not the stage's."""
    size = {"replicas": 8, "microbatches": 8}
    job = analyzed(operations(1.0, 1.2, **size, spread=SPREAD), tmp_path)
    as_it_is, even, both = (
        step_ms(operations(1.0, more, **size, spread=spread)) for more, spread in ((1.2, SPREAD), (1.2, 0), (1.0, 0))
    )
    found = {one.kind: one for one in job.stragglers}
    assert sorted(found) == ["imbalance", "stage"]
    assert found["imbalance"].saved_ns / MS == pytest.approx(as_it_is - even, rel=0.1)
    # The measure is the median of the others: of two stages the longest of the other's, where lengths vary.
    assert 0.5 * (even - both) < found["stage"].saved_ns / MS < 1.05 * (even - both)


@pytest.mark.parametrize("rows", Rows)
def test_no_rank_is_named_in_a_healthy_job(rows: Rows, tmp_path: Path) -> None:
    job = analyzed(operations(1.0), tmp_path, rows)
    assert job.stragglers == []
    # Without launches the wait that no row shows could be anything.
    assert [one.code for one in job.warnings] == ([] if rows is Rows.ALL else ["nobody_unproven"])


def test_the_device_alone_has_no_launches_and_no_steps_and_messages_on_streams_of_their_own(tmp_path: Path) -> None:
    for rank, document in documents(operations(1.0), Rows.DEVICE):
        path = tmp_path / f"rank{rank}.json"
        path.write_text(document, encoding="utf-8")
        trace = read_trace(path)
        assert (len(trace.host_rows.start_ns), trace.steps) == (0, ())
        assert (trace.device.launch_ns < 0).all()
        assert len(set(trace.device.stream.tolist())) == 3


def test_a_send_and_a_receive_of_the_same_times_are_one_kernel() -> None:
    both = [Operation(0, 0, 0, kind, 5 * MS, MS) for kind in ("forward-send", "backward-recv")]
    table = [
        Operation(0, 0, 0, "forward-compute", 0, 5 * MS), *both, Operation(0, 1, 0, "forward-recv", 0, 6 * MS),
        Operation(0, 1, 0, "backward-send", 0, 6 * MS),
    ]  # fmt: skip
    for _, document in documents(table):
        events = json.loads(document)["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel" and "SendRecv" in event["name"]]
        calls = [event["args"] for event in events if event["name"] == "record_param_comms"]
        assert len(kernels) == 1
        assert sorted(call["Collective name"] for call in calls) == ["recv", "send"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "no operations"),
        ([Operation(0, 0, 3, "tea", 0, 1)], "step 3, stage 0: 'tea' is none of"),
        ([Operation(0, 0, 3, "optimizer", 0, 1), Operation(1, 0, 4, "optimizer", 0, 1)],
         "step 4 is missing on data-parallel rank 0, stage 0"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_written_is_refused(table: list[Operation], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(documents(table))
