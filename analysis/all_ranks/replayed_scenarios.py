"""Answers what-if questions about a job by replay: data for free, the straggler as its peers, a faster link, buckets.

A ledger alone can be wrong either way, because one wait can hide behind another.  Replay changes durations in the graph
and plays the whole job.  Each answer has an error: that of the fixed-lag replay of the run itself, and the uncertainty
from noise.  If the traces leave open what a change would do, it is played both ways: the answer is the middle, and half
of the difference is added to the error.

Pure: a model and what its collectives are in, scenarios out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from pacecar.formatting.quantities import plural

from ..document.report import Scenario
from ..graph.bucket_sizes import Buckets, buckets_of, latency_of, merged
from ..graph.causes import CauseCode
from ..graph.job_graph import ReplayScenario as Replay
from ..graph.rank_graph import RankGraph, RankWeights
from ..graph.replay import walls
from ..graph.shared_wire import is_shared, shared_sets, with_work, work_of
from ..trace.columns import NONE, CollectiveColumns
from ..verdict.verdict import ERROR_RATIO_MIN
from .causal_model import JobModel

__all__ = ["replayed"]


MAY_COST = frozenset({"buckets_twice_as_large"})
"""Changes that may make a job slower; if any other does, that is the replay's error."""

OF_PEERS = frozenset({"straggler_median", "all"})
"""Changes that contain others, whose errors are added."""

DDP_FORWARD = "DistributedDataParallel.forward"


def replayed(model: JobModel, collectives: Sequence[CollectiveColumns]) -> tuple[list[Scenario], list[str]]:
    """Return the job's what-if scenarios, and which questions have no answer and why.

    Times are of one step, or of the whole window if no steps are marked.  `collectives` are the matched ones, as
    numbered by `JobModel.kept_joins`.
    """
    if model.wall_ns <= 0:
        return [], []
    untold: list[str] = []
    named = list(_scenarios(model, collectives, untold))
    played = [Replay(), *(replay for _, replays, _ in named for replay in replays)]
    as_it_was, *walls_ns = walls(model.played, played).tolist()
    found = iter(walls_ns)
    steps = len(model.steps) or 1
    pace = model.wall_ns / steps
    error = (abs(model.error.ratio) + ERROR_RATIO_MIN) * pace
    of_peers = sum(each.error_ns for each in model.judgement.findings) / steps
    answers = []
    for name, replays, note in named:
        least = -as_it_was if name in MAY_COST else 0
        each = [max(as_it_was - next(found), least) for _ in replays]
        saved, apart = (max(each) + min(each)) / 2, (max(each) - min(each)) / 2
        more = of_peers if name in OF_PEERS else 0.0
        answers.append(
            Scenario(
                name=name,
                step_ns=pace - saved / steps,
                speedup=pace / max(pace - saved / steps, 1.0),
                saved_ns=saved / steps,
                error_ns=error + apart / steps + more,
                note=f"{note}; by replay, which is {model.error.ratio:+.2%} off for the run as it was",
            )
        )
    return answers, untold


def _scenarios(
    model: JobModel, collectives: Sequence[CollectiveColumns], untold: list[str]
) -> Iterator[tuple[str, list[Replay], str]]:
    """Yield each question's name, its replays (one for each possibility left open by the traces), and its meaning."""
    nothing = np.zeros_like(model.played.wire_ns)
    hidden = [Replay(wire_ns=nothing, scatter_ratio=ratio) for ratio in (1.0, 0.0)]
    yield "communication_hidden", hidden, "collectives take no time once all ranks have arrived"
    wire = _Wire(model)
    yield "link_twice_as_fast", *_twice_as_fast(model, wire)
    larger = _twice_as_large(model, collectives, wire)
    if isinstance(larger, str):
        untold.append(larger)
    elif larger is not None:
        yield "buckets_twice_as_large", *larger
    yield "data_free", [_without(model, (CauseCode.DATA_WAIT,))], "no waiting for data"
    if len(model.played.ranks) > 1:
        yield "straggler_median", [model.judgement.mended], _who(model)
    yield "launch_gaps_gone", [_without(model, (CauseCode.HOST_BOUND,))], "no Python between launches"
    ranks = _without(model, (CauseCode.HOST_BOUND, CauseCode.DATA_WAIT), model.judgement.mended).ranks
    peers = ", and the named ranks as fast as their peers" if model.judgement.findings else ""
    everything = [Replay(ranks, nothing, ratio) for ratio in (1.0, 0.0)]
    yield "all", everything, f"no communication, data wait or Python between launches{peers}"


class _Wire:
    """Which collectives are on the wire together (`sets`), and whether they share it, as far as the times show."""

    def __init__(self, model: JobModel) -> None:
        self.sets = shared_sets(model.played)
        self.step = np.maximum(model.join_step, 0)
        told = is_shared(model.played, self.sets, self.step) if self.sets else False
        self.shared = (True, False) if told is None else (told,)
        self.words = {
            True: ", and those of the same ranks at the same time share it",
            False: ", and those of the same ranks at the same time do not slow each other" if self.sets else "",
            None: "; whether those of the same ranks at the same time share it is unknown",
        }[told]


def _twice_as_fast(model: JobModel, wire: _Wire) -> tuple[list[Replay], str]:
    """Return the replays and their assumption: whether ranks that leave late do so because of the wire is open."""
    return [
        with_work(
            model.played,
            wire.sets,
            work_of(model.played, wire.sets, shared=shared) / 2,
            shared=shared,
            scatter_ratio=ratio,
        )
        for shared in wire.shared
        for ratio in (1.0, 0.5)
    ], f"collectives take half the time on the wire{wire.words}"


def _twice_as_large(
    model: JobModel, collectives: Sequence[CollectiveColumns], wire: _Wire
) -> tuple[list[Replay], str] | str | None:
    """Return replays with the lowest and highest likely latency, or why there are none; None without DDP's pairs."""
    buckets = _buckets(model, collectives, wire)
    if len(buckets.first) == 0:
        return None
    size = model.played.joins.bytes[buckets.members]
    if (size == NONE).any():
        return "other sizes of DDP's buckets: unknown, because their bytes were not recorded"
    replays = []
    for shared in wire.shared:
        work = work_of(model.played, wire.sets, shared=shared)
        latency = latency_of(size, work[buckets.members])
        if latency is None:
            return "other sizes of DDP's buckets: unknown, because they are too alike to tell latency from bandwidth"
        likely = (max(latency.ns - 2 * latency.error_ns, 0.0), latency.ns + 2 * latency.error_ns)
        replays += [with_work(model.played, wire.sets, merged(buckets, work, ns), shared=shared) for ns in likely]
    each = len(np.unique(wire.step[buckets.first]))
    pairs = len(buckets.first) / each if each else 0.0
    return replays, f"{plural(round(pairs), 'pair')} of neighboring buckets merged into one{wire.words}"


def _buckets(model: JobModel, collectives: Sequence[CollectiveColumns], wire: _Wire) -> Buckets:
    """Return DDP's buckets; none if a trace does not have DDP's forward."""
    is_ddp = all(DDP_FORWARD in rank.events.trace.names for rank in model.played.ranks)
    operations = [collectives[number].operation for number in model.kept_joins.tolist()]
    is_gradient = np.array([is_ddp and each == "all_reduce" for each in operations], dtype=np.bool_)
    return buckets_of(model.played, is_gradient, wire.step)


def _who(model: JobModel) -> str:
    found = model.judgement.findings
    return "no rank is named" if not found else f"{plural(len(found), 'finding')}, made as fast as the peers"


def _without(model: JobModel, causes: Sequence[CauseCode], now: Replay | None = None) -> Replay:
    changed = {} if now is None else now.ranks
    return Replay({place: partial(_zeroed, changed.get(place), causes) for place in range(len(model.played.ranks))})


def _zeroed(
    before: Callable[[RankGraph], RankWeights] | None, causes: Sequence[CauseCode], rank: RankGraph
) -> RankWeights:
    weights = rank.weights if before is None else before(rank)
    host = np.where(np.isin(rank.events.host.cause, causes), 0, weights.host_ns)
    delay = np.where(np.isin(rank.delay_cause, causes), 0, weights.delay_ns)
    return RankWeights(weights.row_ns, delay, host)
