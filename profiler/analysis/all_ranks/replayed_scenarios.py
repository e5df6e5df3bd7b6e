"""Answers what-if questions about a job by replay: data for free, the straggler as its peers, a faster link.

A bound from a ledger can be wrong both ways: what a rank waits for is also what hides behind other waits.  Replay takes
the graph, changes durations and plays the whole job.  Each answer carries the error that it may have: the fixed-lag
replay's of the run itself, and what noise leaves open.  Where the traces leave open what a change would do, it is
played both ways: the answer is the middle, and half of what lies between is added to the error.

Pure: a model in, scenarios out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...causal.all_ranks.job_graph import Scenario as Replay
from ...causal.all_ranks.replay import walls
from ...causal.all_ranks.shared_wire import is_shared, shared_sets, with_work, work_of
from ...causal.model import JobModel
from ...causal.one_rank.causes import Cause
from ...causal.one_rank.rank_graph import RankGraph, RankWeights
from ...causal.verdict.verdict import ERROR_RATIO_MIN
from ..report import Scenario

__all__ = ["replayed"]


def replayed(model: JobModel) -> list[Scenario]:
    """Return the job's what-if scenarios, in times of one step, or of the whole window where no steps are marked."""
    if model.wall_ns <= 0:
        return []
    named = list(_scenarios(model))
    found = iter(walls(model.graph, [replay for _, replays, _ in named for replay in replays]).tolist())
    steps = len(model.steps) or 1
    pace = model.wall_ns / steps
    error = (abs(model.error.ratio) + ERROR_RATIO_MIN) * pace
    answers = []
    for name, replays, note in named:
        each = [max(model.wall_ns - next(found), 0) for _ in replays]
        saved, apart = (max(each) + min(each)) / 2, (max(each) - min(each)) / 2
        open_ns = apart if name != "straggler_median" else sum(one.error_ns for one in model.judgement.findings)
        answers.append(
            Scenario(
                name=name,
                step_ns=pace - saved / steps,
                speedup=pace / max(pace - saved / steps, 1.0),
                saved_ns=saved / steps,
                error_ns=error + open_ns / steps,
                note=f"{note}; by replay, which is {model.error.ratio:+.2%} off for the run as it was",
            )
        )
    return answers


def _scenarios(model: JobModel) -> Iterator[tuple[str, list[Replay], str]]:
    """Give the name of each question, how it is played (all ways that the traces leave open), and what it means."""
    nothing = np.zeros_like(model.graph.wire_ns)
    hidden = [Replay(wire_ns=nothing, scatter_ratio=ratio) for ratio in (1.0, 0.0)]
    yield "communication_hidden", hidden, "collectives take no time once all ranks have come"
    yield "link_twice_as_fast", *_twice_as_fast(model, _Wire(model))
    yield "data_free", [_without(model, (Cause.DATA_WAIT,))], "no waiting for data"
    if len(model.graph.ranks) > 1:
        yield "straggler_median", [model.judgement.mended], _who(model)
    yield "launch_gaps_gone", [_without(model, (Cause.HOST_BOUND,))], "no python between launches"
    ranks = _without(model, (Cause.HOST_BOUND, Cause.DATA_WAIT)).ranks
    everything = [Replay(ranks, nothing, ratio) for ratio in (1.0, 0.0)]
    yield "all", everything, "no communication, data wait or python between launches"


class _Wire:
    """Which collectives are on the wire together (`sets`), and whether they share it, as far as the times tell."""

    def __init__(self, model: JobModel) -> None:
        self.sets = shared_sets(model.graph)
        self.step = model.step_of_collectives()
        told = is_shared(model.graph, self.sets, self.step) if self.sets else False
        self.shared = (True, False) if told is None else (told,)
        self.words = {
            True: ", and those of the same ranks at the same time share it",
            False: ", and those of the same ranks at the same time do not slow each other" if self.sets else "",
            None: "; whether those of the same ranks at the same time share it cannot be told",
        }[told]


def _twice_as_fast(model: JobModel, wire: _Wire) -> tuple[list[Replay], str]:
    """Return the replays and what is assumed.  What ranks leave later than the first may be the wire's, or theirs."""
    return [
        with_work(
            model.graph,
            wire.sets,
            work_of(model.graph, wire.sets, shared=shared) / 2,
            shared=shared,
            scatter_ratio=ratio,
        )
        for shared in wire.shared
        for ratio in (1.0, 0.5)
    ], f"collectives take half the time on the wire{wire.words}"


def _who(model: JobModel) -> str:
    found = model.judgement.findings
    return "nobody is named" if not found else f"{len(found)} named, as their peers"


def _without(model: JobModel, causes: Sequence[Cause]) -> Replay:
    return Replay({place: _zeroed(rank, causes) for place, rank in enumerate(model.graph.ranks)})


def _zeroed(rank: RankGraph, causes: Sequence[Cause]) -> RankWeights:
    weights = rank.weights
    host = np.where(np.isin(rank.events.host.cause, causes), 0, weights.host_ns)
    delay = np.where(np.isin(rank.delay_cause, causes), 0, weights.delay_ns)
    return RankWeights(weights.row_ns, delay, host)
