"""Answers what-if questions about a job by replay: data for free, the straggler as its peers, a faster link.

A bound from a ledger can be wrong both ways: what a rank waits for is also what hides behind other waits.  Replay takes
the graph, changes durations and plays the whole job.  Each answer carries the error that it may have: the fixed-lag
replay's of the run itself, and what noise leaves open.

Pure: a model in, scenarios out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...causal.all_ranks.job_graph import Scenario as Replay
from ...causal.all_ranks.replay import walls
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
    as_it_was, *found = walls(model.played, [Replay(), *(replay for _, replay, _ in named)]).tolist()
    steps = len(model.steps) or 1
    pace = model.wall_ns / steps
    error = (abs(model.error.ratio) + ERROR_RATIO_MIN) * pace
    of_peers = sum(each.error_ns for each in model.judgement.findings) / steps
    answers = []
    for (name, _, note), wall in zip(named, found, strict=True):
        saved = max(as_it_was - wall, 0)
        answers.append(
            Scenario(
                name=name,
                step_ns=pace - saved / steps,
                speedup=pace / max(pace - saved / steps, 1.0),
                saved_ns=saved / steps,
                error_ns=error + of_peers if name in ("straggler_median", "all") else error,
                note=f"{note}; by replay, which is {model.error.ratio:+.2%} off for the run as it was",
            )
        )
    return answers


def _scenarios(model: JobModel) -> Iterator[tuple[str, Replay, str]]:
    graph = model.played
    nothing = np.zeros_like(graph.wire_ns)
    yield "communication_hidden", Replay(wire_ns=nothing), "collectives take no time once all ranks have come"
    yield "link_twice_as_fast", Replay(wire_ns=graph.wire_ns // 2), "collectives take half the time on the wire"
    yield "data_free", _without(model, (Cause.DATA_WAIT,)), "no waiting for data"
    if len(graph.ranks) > 1:
        yield "straggler_median", model.judgement.mended, _who(model)
    yield "launch_gaps_gone", _without(model, (Cause.HOST_BOUND,)), "no python between launches"
    everything = _without(model, (Cause.HOST_BOUND, Cause.DATA_WAIT), model.judgement.mended)
    peers = ", and who is named as their peers" if model.judgement.findings else ""
    note = f"no communication, data wait or python between launches{peers}"
    yield "all", Replay(everything.ranks, nothing), note


def _who(model: JobModel) -> str:
    found = model.judgement.findings
    return "nobody is named" if not found else f"{len(found)} named, as their peers"


def _without(model: JobModel, causes: Sequence[Cause], now: Replay | None = None) -> Replay:
    changed = {} if now is None else now.ranks
    ranks = enumerate(model.played.ranks)
    return Replay({place: _zeroed(rank, changed.get(place, rank.weights), causes) for place, rank in ranks})


def _zeroed(rank: RankGraph, weights: RankWeights, causes: Sequence[Cause]) -> RankWeights:
    host = np.where(np.isin(rank.events.host.cause, causes), 0, weights.host_ns)
    delay = np.where(np.isin(rank.delay_cause, causes), 0, weights.delay_ns)
    return RankWeights(weights.row_ns, delay, host)
