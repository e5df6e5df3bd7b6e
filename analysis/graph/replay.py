"""Replays a job through its graph with changed durations, many scenarios at once.

A node is as late as the latest of its edges allows.  Nodes of one level do not depend on each other, so a level is one
numpy operation over all its edges and all scenarios.

Each answer needs an error.  With the recorded delays a replay repeats the recorded run exactly, by construction, and
hides missing edges.  So `fixed_lag_error` replays the run with the least lags that the hardware needs and no recorded
delays, and compares the result with the recording.

Pure: a graph and scenarios in, times out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..shelf import Derived
from .causes import CauseCode
from .job_graph import JobGraph, ReplayScenario
from .rank_graph import RankGraph

__all__ = ["ReplayError", "elastic", "fixed_lag_error", "play", "step_times", "walls"]

Index = NDArray[np.int64]

SCENARIOS_AT_ONCE = 32
"""The most scenarios that are replayed together."""

WEIGHTS_AT_ONCE = 2**24
"""And the most weights in them, of 8 bytes, of which there are two copies."""

NEVER = np.iinfo(np.int64).min // 4

ELASTIC_RATIO_MAX = 0.03
"""Unexplained delays count as waits if the run without them is shorter by at most this share of the wall time."""


def play(graph: JobGraph, weights: Index) -> Index:
    """Return the time of each node, after the common beginning; `weights` (edges) or (edges, scenarios)."""
    columns = weights if weights.ndim == 2 else weights[:, None]
    position = np.empty(graph.nodes, dtype=np.int64)
    position[graph.order] = np.arange(graph.nodes)
    source, target = position[graph.source[graph.place]], position[graph.target[graph.place]]
    columns = columns[graph.place]
    heads = np.flatnonzero(np.concatenate(([True], target[1:] != target[:-1]))) if len(target) else target
    head_of_level = np.searchsorted(heads, np.concatenate(([0], graph.edge_level_end)))
    value = np.full((graph.nodes, columns.shape[1]), NEVER)
    value[position[0]] = 0
    begin = 0
    for level, end in enumerate(graph.edge_level_end.tolist()):
        if end > begin:
            mine = heads[head_of_level[level] : head_of_level[level + 1]]
            value[target[mine]] = np.maximum.reduceat(value[source[begin:end]] + columns[begin:end], mine - begin)
        begin = end
    found = value[position]
    return found if weights.ndim == 2 else found[:, 0]


def walls(graph: JobGraph, scenarios: Sequence[ReplayScenario], *, fixed: bool = False) -> Index:
    """Return when the job ends in each scenario, after the common beginning."""
    found = []
    count = max(1, min(SCENARIOS_AT_ONCE, WEIGHTS_AT_ONCE // max(len(graph.source), 1)))
    for at in range(0, len(scenarios), count):
        some = scenarios[at : at + count]
        weights = np.stack([graph.weights(scenario, fixed=fixed) for scenario in some], axis=1)
        found.append(play(graph, weights).max(axis=0))
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def elastic(graph: JobGraph) -> JobGraph:
    """Return the graph for replays with changed durations.

    A delay that nothing in the trace explains is either the rank's own, or a wait for something that the trace does not
    show, such as a synchronization of hosts.  The rank keeps its own delays however fast the others become; waits
    shrink.  If the job takes as long without all these delays, they were waits: they are left out, except where a row
    may have waited for work from before the record (`RankGraph.weights`).  Otherwise the graph is returned unchanged.
    """
    if not any(((rank.delay_cause == CauseCode.UNKNOWN) & (rank.delay_ns > 0)).any() for rank in graph.ranks):
        return graph
    without = replace(graph, ranks=Derived(graph.ranks, lambda rank: replace(rank, is_elastic=True)))
    before, after = (int(walls(each, [ReplayScenario()])[0]) for each in (graph, without))
    return without if after >= (1 - ELASTIC_RATIO_MAX) * before else graph


@dataclass(frozen=True, slots=True)
class ReplayError:
    """The error of the fixed-lag replay.

    `ratio` is the error of the whole run, `of_steps` of each step (replayed over recorded, less one).
    `unexplained_ratio` is the largest share of a rank's time in which rows began for no reason in the graph.
    """

    ratio: float
    of_steps: list[float]
    unexplained_ratio: float


def fixed_lag_error(graph: JobGraph, bounds: Sequence[Index]) -> ReplayError:
    """Return the error of the fixed-lag replay; `bounds` are those of steps as of `step_times`."""
    recorded, fixed = (play(graph, graph.weights(fixed=each)) for each in (False, True))
    wall = int(recorded.max(initial=0))
    ratio = (int(fixed.max(initial=0)) - wall) / wall if wall > 0 else 0.0
    before, after = (np.diff(step_times(graph, times, bounds)) for times in (recorded, fixed))
    steps = [float(b / a - 1) for a, b in zip(before.tolist(), after.tolist(), strict=True) if a > 0]
    shares = [_unexplained(each) for each in graph.ranks]
    return ReplayError(ratio, steps, max(shares, default=0.0))


def _unexplained(graph: RankGraph) -> float:
    rows = graph.events.rows
    if len(rows.start_ns) == 0:
        return 0.0
    span = int(rows.end_ns.max() - rows.start_ns.min())
    return int(graph.delay_ns[graph.delay_cause == CauseCode.UNKNOWN].sum()) / span if span else 0.0


def step_times(
    graph: JobGraph, times: Index, bounds: Sequence[Index], *, scenario: ReplayScenario | None = None
) -> Index:
    """Return when the job passed each boundary of its steps: the latest rank's host, in `scenario`.

    `bounds` has for each rank the host points at which steps begin, then the end of the last; empty for a rank without
    steps.
    """
    found: list[Index] = []
    for place, points in enumerate(bounds):
        rank = graph.ranks[place]
        if len(points) and len(rank.host_begin):
            changed = None if scenario is None else scenario.ranks.get(place)
            own = rank.host_own_ns if changed is None else changed(rank).host_ns
            host = np.concatenate(([0], np.cumsum(own)))
            seg = np.clip(np.searchsorted(rank.host_begin, points, side="right") - 1, 0, len(rank.host_begin) - 1)
            found.append(times[graph.offset[place] + seg] + host[points] - host[rank.host_begin[seg]])
    if not found:
        return np.empty(0, dtype=np.int64)
    latest: Index = np.stack(found).max(axis=0)
    return latest
