"""Compares several ranks' traces: collectives, clocks, waiting and wire, and who holds the job up.

One trace shows that a collective took 7.6 ms, but not why: a peer arrived 7.5 ms later, and the link needed 0.1 ms.
So collectives are matched in all traces and clocks are aligned (`align`), and the time of each collective is split into
waiting and wire; each wait counts for the rank that arrived last (`collective_arrivals`).  Blame, and what a fix would
save, comes from the causal model of all ranks (`causal_model`), because arrivals name victims.

Pure: traces and their reports in, one `TraceJob` out, and times on the common clock (`job_times`).  Incomplete input is
allowed: missing, repeated or unnumbered ranks and unmatched collectives give warnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.attribution import Work
from pacecar.ledger.bus_bandwidth import bus_bandwidth_factor
from pacecar.ledger.intervals import EMPTY, Intervals, clip, length, subtract, union

from ..align.collective_matching import Matched, Matching, match
from ..align.host_clocks import Clocks, align_clocks, together
from ..document.report import Arrival, CollectiveInstance, CollectiveTotal, RankShare, TraceJob, TraceReport
from ..one_rank.collectives import coverage
from ..one_rank.one_trace import charges_of
from ..shelf import Derived, Shelf
from ..trace.columns import CollectiveColumns, Trace, TraceWarning
from .all_to_all import all_to_all_ranks
from .causal_model import JobModel
from .collective_arrivals import Arrivals, Lateness, arrivals_of, by_trace, lateness_of
from .critical_tables import add_critical_time
from .job_times import JobTimes, job_times
from .model_input import model_of
from .replayed_scenarios import replayed
from .verdict_report import critical_parts, doubt_words, incidents_of, is_trusted, stragglers_of, too_few_words

if TYPE_CHECKING:
    from ..one_rank.tables.all_tables import RowModules, TablePlaces

__all__ = ["ARRIVALS_MAX", "analyze_job", "compare_ranks"]

ARRIVALS_MAX = 200_000
"""The most arrivals in a document, some 20 MB of JSON; beyond that, only collectives with the largest skew are
listed."""


class _Rank(NamedTuple):
    """One rank: its trace, its report, the union of its compute, and the places of its rows in the report's tables."""

    trace: Trace
    report: TraceReport
    compute: Intervals
    places: TablePlaces | None


class _Share(NamedTuple):
    """One rank's matched communication, as unions of its own file's time."""

    wait: Intervals
    """Time in which a collective waited for a rank and none was on the wire."""
    wire: Intervals


def analyze_job(
    traces: Sequence[Trace], reports: Sequence[TraceReport], places: Sequence[TablePlaces | None] | None = None
) -> TraceJob:
    """Return the comparison of `compare_ranks` without its times."""
    return compare_ranks(traces, reports, places)[0]


def compare_ranks(
    traces: Sequence[Trace],
    reports: Sequence[TraceReport],
    places: Sequence[TablePlaces | None] | None = None,
    shelf: Shelf | None = None,
) -> tuple[TraceJob, JobTimes]:
    """Return the comparison of the traces of one job, and its times; `reports` are theirs, in their order.

    Collectives outside the windows of the reports are left out.  If reports have tables, `places` are the places of the
    traces' rows in them, and the tables get their time on the critical path.  What is computed of each rank is on
    `shelf` meanwhile.  Raises ShelfError if that cannot be written.
    """
    shelf = shelf or Shelf()
    chosen, warnings = _chosen(traces)
    ranks = shelf.keep(
        _Rank(
            traces[at],
            reports[at],
            union(charges_of(traces[at]).work.get(Work.COMPUTE, EMPTY)),
            None if places is None else places[at],
        )
        for at in chosen
    )
    world_size = _world_size(ranks, warnings)
    tables = Derived(ranks, lambda rank: rank.trace)
    matching = match(tables, world_size)
    groups = [_inside(group, ranks) for group in matching.groups]
    clocks = align_clocks(tables, groups)
    groups, strangers = _believed(groups, clocks)
    arrivals = [arrivals_of(group, clocks) for group in groups if group.collectives]
    lateness = lateness_of(arrivals, clocks, len(tables))
    model = model_of(tables, groups, matching.events, clocks, shelf)
    if model is not None and places is not None:
        _add_critical_time(model, ranks)
    metas = [meta for group in groups for meta in group.collectives]
    members = by_trace(arrivals, len(ranks))
    shares = [_share(rank, mine) for rank, mine in zip(ranks, members, strict=True)]
    instances, shortened = _instances(arrivals, [clock.rank for clock in clocks.clocks])
    warnings += [*_complete(matching, strangers), *clocks.warnings, *_missing(arrivals, shortened)]
    warnings += _of_model(model, metas)
    what_if, untold = ([], []) if model is None else replayed(model, metas)
    job = TraceJob(
        ranks=[clock.rank for clock in clocks.clocks],
        world_size=world_size,
        clocks=clocks.clocks,
        shares=[_rank_share(place, rank, shares[place], members[place], lateness) for place, rank in enumerate(ranks)],
        collectives=_totals(arrivals, ranks),
        instances=instances,
        stragglers=[] if model is None else stragglers_of(model, tables, lateness),
        what_if=what_if,
        what_if_untold=untold,
        warnings=warnings,
        wall_ns=None if model is None else model.wall_ns,
        critical_path=[] if model is None else critical_parts(model, tables, metas, _modules(ranks)),
        replay_error_ratio=None if model is None else model.error.ratio,
        unexplained_ratio=None if model is None else model.error.unexplained_ratio,
        incidents=[] if model is None else incidents_of(model, tables),
        clock_pairs_untold=clocks.pairs,
        all_to_all=all_to_all_ranks(tables, arrivals),
    )
    return job, job_times(model, job.ranks, clocks.corrections, metas)


def _modules(ranks: Sequence[_Rank]) -> list[RowModules | None]:
    return [None if rank.places is None else rank.places.modules for rank in ranks]


def _add_critical_time(model: JobModel, ranks: Sequence[_Rank]) -> None:
    tables = []
    for rank in ranks:
        its = rank.report.tables
        tables.append(None if its is None or rank.places is None else (its, rank.places))
    add_critical_time(model, [rank.trace for rank in ranks], tables)


def _chosen(traces: Sequence[Trace]) -> tuple[list[int], list[TraceWarning]]:
    """Return which traces have a rank of their own, in order of rank, and warnings about the others."""
    warnings: list[TraceWarning] = []
    found: dict[int, int] = {}
    for at, trace in enumerate(traces):
        if trace.rank is None:
            message = f"{trace.file} does not say which rank it is and is left out of the comparison of ranks"
            warnings.append(TraceWarning("rank_unknown", message))
        elif trace.rank in found:
            earlier = traces[found[trace.rank]].file
            message = f"{trace.file} is rank {trace.rank} like {earlier}; the later one is left out"
            warnings.append(TraceWarning("rank_twice", message))
        else:
            found[trace.rank] = at
    if any(warning.code == "rank_twice" for warning in warnings):
        warnings += _drop_other_recordings(traces, found)
    return [found[rank] for rank in sorted(found)], warnings


def _drop_other_recordings(traces: Sequence[Trace], found: dict[int, int]) -> list[TraceWarning]:
    """Drop from `found` the ranks with no step of most others, or another world size, and return warnings about them.

    Where a rank has several traces there are several recordings; a rank may lack the first of them.
    """
    marks = {
        rank: (traces[at].world_size, frozenset(step.number for step in traces[at].steps)) for rank, at in found.items()
    }
    ((size, steps), _), *_ = Counter(marks.values()).most_common(1)
    warnings = []
    for rank, (its_size, its_steps) in marks.items():
        if (None not in (size, its_size) and size != its_size) or (steps and its_steps and steps.isdisjoint(its_steps)):
            file = traces[found.pop(rank)].file
            message = (
                f"{file} has other steps, or another world size, than most ranks and is left out of the comparison"
            )
            warnings.append(TraceWarning("other_recording", message))
    return warnings


def _world_size(ranks: Sequence[_Rank], warnings: list[TraceWarning]) -> int | None:
    """Return the world size of most traces; warn of other sizes and of ranks beyond it."""
    sizes = Counter(rank.trace.world_size for rank in ranks if rank.trace.world_size is not None)
    if not sizes:
        return None
    size = max(sizes, key=lambda each: (sizes[each], each))
    if len(sizes) > 1:
        message = f"the traces disagree about the world size ({dict(sorted(sizes.items()))}); {size} is used"
        warnings.append(TraceWarning("world_size_differs", message, len(sizes)))
    if beyond := [rank.trace.rank for rank in ranks if rank.trace.rank is not None and rank.trace.rank >= size]:
        message = f"ranks {beyond} do not fit into a world of {size}"
        warnings.append(TraceWarning("rank_beyond_world", message, len(beyond)))
    return size


def _inside(group: Matched, ranks: Sequence[_Rank]) -> Matched:
    """Return the collectives that lie, on every rank that has them, at least partly in its report's window."""
    inside = np.ones(len(group.collectives), dtype=np.bool_)
    for column, place in enumerate(group.traces):
        report = ranks[place].report
        if report.start_ns is not None:
            start, end = group.start_ns[:, column], group.end_ns[:, column]
            window = (end >= report.start_ns) & (start <= report.start_ns + report.span_ns)
            inside &= window | ~group.has[:, column]
    return group.only(inside)


def _believed(groups: Sequence[Matched], clocks: Clocks) -> tuple[list[Matched], int]:
    """Return the groups without pairs that only order matched and the clocks contradict."""
    believed, strangers = [], 0
    for group in groups:
        if group.is_assumed:
            keep = together(group, clocks)
            strangers += int(group.has[~keep].sum())
            group = group.only(keep)
        believed.append(group)
    return believed, strangers


def _complete(matching: Matching, strangers: int) -> list[TraceWarning]:
    """Return the matching's warnings, with contradicted pairs added to the unmatched."""
    if not strangers:
        return matching.warnings
    others = [warning for warning in matching.warnings if warning.code != "unmatched_collectives"]
    count = strangers + sum(w.count for w in matching.warnings if w.code == "unmatched_collectives")
    message = f"{count} collectives could not be found in the other ranks' traces and are left out of the comparison"
    return [TraceWarning("unmatched_collectives", message, count), *others]


def _missing(arrivals: Sequence[Arrivals], shortened: int) -> list[TraceWarning]:
    warnings = []
    lacking = sum(int((mine.has.sum(axis=1) < (mine.group.size or 0)).sum()) for mine in arrivals)
    if lacking:
        message = f"{lacking} collectives had ranks without a trace: waits may be longer, wires shorter"
        warnings.append(TraceWarning("ranks_missing", message, lacking))
    if shortened:
        message = f"{shortened} collectives with the least skew are not listed one by one, only in the sums"
        warnings.append(TraceWarning("instances_shortened", message, shortened))
    return warnings


def _share(rank: _Rank, groups: Sequence[tuple[Arrivals, int]]) -> _Share:
    """Return when one rank waited and when it was on the wire, in all its matched collectives."""
    waits, wires = [EMPTY], [EMPTY]
    for mine, column in groups:
        has = mine.has[:, column]
        start, end = mine.group.start_ns[has, column], mine.group.end_ns[has, column]
        came = start + mine.wait_ns[has, column]
        waits.append(np.stack((start, came), axis=1))
        wires.append(np.stack((came, end), axis=1))
    low = rank.report.start_ns or 0
    high = low + rank.report.span_ns
    wire = union(clip(np.concatenate(wires), low, high))
    return _Share(subtract(union(clip(np.concatenate(waits), low, high)), wire), wire)


def _rank_share(
    place: int, rank: _Rank, share: _Share, mine: Sequence[tuple[Arrivals, int]], lateness: Lateness
) -> RankShare:
    steps = [step.ledger.wall_ns for step in rank.report.steps]
    assert rank.trace.rank is not None
    return RankShare(
        rank=rank.trace.rank,
        step_ns=sum(steps) / len(steps) if steps else None,
        compute_ns=rank.report.compute_ns,
        communication_ns=rank.report.communication_ns,
        wait_ns=sum(int(each.wait_ns[:, column].sum()) for each, column in mine),
        wire_ns=sum(int(each.wire_ns[:, column].sum()) for each, column in mine),
        caused_wait_ns=int(lateness.caused_wait_ns[place]),
        exposed_wait_ns=length(subtract(share.wait, rank.compute)),
        exposed_wire_ns=length(subtract(share.wire, rank.compute)),
    )


def _instances(arrivals: Sequence[Arrivals], ranks: Sequence[int]) -> tuple[list[CollectiveInstance], int]:
    """Return the collectives one by one in order of completion, and how many were not listed."""
    places = [(group, at) for group, mine in enumerate(arrivals) for at in range(len(mine.last_ns))]
    total = sum(int(mine.has.sum()) for mine in arrivals)
    if total > ARRIVALS_MAX:
        places.sort(key=lambda place: -int(arrivals[place[0]].skew_ns[place[1]]))
        room, kept = ARRIVALS_MAX, 0
        while kept < len(places) and (room := room - int(arrivals[places[kept][0]].has[places[kept][1]].sum())) >= 0:
            kept += 1
    else:
        kept = len(places)
    listed = sorted(places[:kept], key=lambda place: int(arrivals[place[0]].last_ns[place[1]]))
    return [_instance(arrivals[group], at, ranks) for group, at in listed], len(places) - kept


def _instance(mine: Arrivals, at: int, ranks: Sequence[int]) -> CollectiveInstance:
    meta, has = mine.group.collectives[at], mine.has[at]
    starts, waits, wires = mine.start_ns[at].tolist(), mine.wait_ns[at].tolist(), mine.wire_ns[at].tolist()
    first = int(mine.last_ns[at] - mine.skew_ns[at])
    present = int(has.sum())
    link = int(mine.link_ns[at])
    return CollectiveInstance(
        operation=meta.operation,
        bytes=meta.bytes,
        group=mine.group.group,
        index=at,
        ranks=present,
        ranks_missing=None if mine.group.size is None else max(mine.group.size - present, 0),
        late_rank=ranks[mine.group.traces[int(mine.late[at])]],
        skew_ns=int(mine.skew_ns[at]),
        wire_ns=link,
        bus_bandwidth=_bandwidths(meta.operation, meta.bytes, link, _size(mine, present))[1],
        arrivals=[
            Arrival(
                rank=ranks[mine.group.traces[column]],
                start_ns=starts[column],
                late_ns=starts[column] - first,
                wait_ns=waits[column],
                wire_ns=wires[column],
            )
            for column in np.flatnonzero(has).tolist()
        ],
    )


def _size(mine: Arrivals, present: int) -> int:
    """Return how many ranks took part: the size of the group, or the number seen."""
    return present if mine.group.size is None else max(mine.group.size, present)


def _bandwidths(operation: str, size: int | None, link_ns: int, ranks: int) -> tuple[float | None, float | None]:
    """Return algorithm and bus bandwidth in bytes a second; None if size or time is unknown."""
    if size is None or link_ns <= 0:
        return None, None
    algorithm = size * 1e9 / link_ns
    factor = bus_bandwidth_factor(operation, ranks)
    return algorithm, None if factor is None else algorithm * factor


def _totals(arrivals: Sequence[Arrivals], ranks: Sequence[_Rank]) -> list[CollectiveTotal]:
    """Return a line for each kind of collective, the longest first; sums are over all ranks."""
    totals = []
    for mine in arrivals:
        kinds: dict[tuple[str, int | None, str | None], list[int]] = {}
        for at, meta in enumerate(mine.group.collectives):
            kinds.setdefault((meta.operation, meta.bytes, meta.dtype), []).append(at)
        for (operation, size, dtype), places in kinds.items():
            totals.append(_total(mine, np.array(places), operation, size, dtype, ranks))
    return sorted(totals, key=lambda total: (-total.duration_ns, total.operation, total.bytes or 0))


def _total(
    mine: Arrivals,
    at: NDArray[np.int64],
    operation: str,
    size: int | None,
    dtype: str | None,
    ranks: Sequence[_Rank],
) -> CollectiveTotal:
    has = mine.has[at]
    durations = (mine.end_ns - mine.start_ns)[at][has]
    exposed = 0
    for column, place in enumerate(mine.group.traces):
        there = at[has[:, column]]
        rows = union(np.stack((mine.group.start_ns[there, column], mine.group.end_ns[there, column]), axis=1))
        hidden = coverage(ranks[place].compute, rows[:, 1]) - coverage(ranks[place].compute, rows[:, 0])
        exposed += length(rows) - int(hidden.sum())
    members = _size(mine, int(has.sum(axis=1).max()))
    algorithm, bus = _bandwidths(operation, size, int(np.median(mine.link_ns[at])), members)
    return CollectiveTotal(
        operation=operation,
        bytes=size,
        dtype=dtype,
        group=mine.group.group,
        group_size=mine.group.size,
        count=len(at),
        duration_ns=int(durations.sum()),
        median_ns=int(np.median(durations)),
        min_ns=int(durations.min()),
        max_ns=int(durations.max()),
        exposed_ns=exposed,
        wait_ns=int(mine.wait_ns[at].sum()),
        wire_ns=int(mine.wire_ns[at].sum()),
        algorithm_bandwidth=algorithm,
        bus_bandwidth=bus,
    )


def _of_model(model: JobModel | None, metas: Sequence[CollectiveColumns]) -> list[TraceWarning]:
    """Return warnings about the causal model: cycles, too much unexplained time, or too few steps."""
    warnings = []
    if model is not None and model.graph.broken:
        first = metas[int(model.kept_joins[model.graph.broken[0]])]
        count = len(model.graph.broken)
        message = f"{count} collectives wait for themselves (the first: {first.operation}) and are split"
        warnings.append(TraceWarning("cycle_broken", message, count))
    if model is not None and not is_trusted(model):
        message = (
            f"work began for no known reason in {model.error.unexplained_ratio:.0%} of a rank's time (sampled traces,"
            " missing launches): who holds the job up cannot be told, and what-if answers mean little"
        )
        warnings.append(TraceWarning("replay_not_trusted", message))
    elif model is not None and not model.judgement.findings:
        if (words := too_few_words(model)) is not None:
            warnings.append(TraceWarning("too_few_steps", words))
        elif (words := doubt_words(model)) is not None:
            warnings.append(TraceWarning("nobody_unproven", words))
    return warnings
