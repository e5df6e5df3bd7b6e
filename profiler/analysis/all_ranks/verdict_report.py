"""Turns what the causal model found into the document's lists: stragglers with evidence, incidents, critical path.

Evidence is made of the numbers that the verdict is made of, and says no more than they do: how long the rank took and
how long its peers, in how many steps, whether it ran more kernels or the same ones slower, what its removal saves, and
how well the replay reproduces the run.

Pure: a model in, document types out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.quantities import duration, plural

from ...causal.all_ranks.job_graph import Scenario
from ...causal.all_ranks.replay import walls
from ...causal.model import JobModel
from ...causal.one_rank.causes import Cause
from ...causal.one_rank.rank_graph import RankGraph
from ...causal.verdict.findings import Finding
from ...causal.verdict.peers import PARTS
from ...causal.verdict.significance import P_MAX, least_p
from ...trace.columns import NONE, CollectiveColumns, Trace
from ..one_rank.kernel_families import family_of
from ..report import CriticalPart, LateTraceRank, StepIncident
from .critical_modules import modules_of_path
from .lateness import Lateness

if TYPE_CHECKING:
    from ..one_rank.tables.all_tables import RowModules

__all__ = [
    "CAUSE_WORDS", "UNTRUSTED_RATIO", "critical_parts", "doubt_words", "incidents_of", "is_trusted", "stragglers_of",
    "too_few_words",
]  # fmt: skip

UNTRUSTED_RATIO = 0.5
"""The share of a rank's time that no edge explains, beyond which nobody is named (sampled traces, missing launches),
unless the job would have taken as long without it."""

DOUBTFUL_RATIO = 0.1
"""The share of a rank's time that no edge explains, or that it communicates with ranks whose rows are unknown, beyond
which it is not known that nobody holds the job up: a slow rank would hide there."""

DOUBTFUL_ERROR_RATIO = 0.1
"""The same of the replay's own error."""

UNTOLD_WIRE_RATIO = 0.25
"""The same of the time that would be saved if links that nothing can be compared with took no time."""

SAME_WORK_RATIO_MAX = 1.02
"""Counts of kernels that differ by less are the same work."""

CAUSE_WORDS = {
    **HEADING_WORDS,
    "link": "slow link",
    "gc": "garbage collection",
    "imbalance": "uneven work",
    "exposed_copy": "copies",
}


def is_trusted(model: JobModel) -> bool:
    """Return whether the graph explains enough of the run to name anybody."""
    return model.error.unexplained_ratio <= UNTRUSTED_RATIO or model.is_elastic


def too_few_words(model: JobModel) -> str | None:
    """Return why nobody could have been named however slow, but for single steps; None where somebody could."""
    tested = sum(len(role) for role in model.roles if len(role) > 1) or len(model.roles)
    if tested < 2 or least_p(tested, model.units * PARTS) < P_MAX:
        return None
    return f"{tested} ranks in {plural(model.units, 'step')} are too few to tell a slow one from chance"


def doubt_words(model: JobModel) -> str | None:
    """Return why it is not known that nobody holds the job up, where nobody is named; None where it is."""
    shares = [_unmatched_ratio(rank) for rank in model.graph.ranks]
    if len(shares) < 2:
        return None
    wire_ns = np.where(model.untold_joins, 0, model.played.wire_ns)
    untold = 1 - int(walls(model.played, [Scenario(wire_ns=wire_ns)])[0]) / max(model.wall_ns, 1)
    if max(shares) > DOUBTFUL_RATIO:
        return (
            f"a rank spends {max(shares):.0%} of its time in communication of which the other ranks' rows are unknown"
        )
    if model.error.unexplained_ratio > DOUBTFUL_RATIO and not model.is_elastic:
        return f"work began for no known reason in {model.error.unexplained_ratio:.0%} of a rank's time"
    if abs(model.error.ratio) > DOUBTFUL_ERROR_RATIO:
        return f"the traces do not show what all work waited for: a replay of them is off by {model.error.ratio:+.0%}"
    if untold > UNTOLD_WIRE_RATIO:
        return (
            f"{untold:.0%} of the time is spent on links, and no group shows how fast they can be: where all groups use"
            " the same ones, a slow link looks like a busy one (no rank is slow)"
        )
    return None


def _unmatched_ratio(rank: RankGraph) -> float:
    """Return the share of a rank's time in communication that is no collective of the graph."""
    rows = rank.events.rows
    alone = (rows.cause[rank.order] == Cause.LINK) & ~rank.in_join
    span = int(rows.end_ns.max() - rows.start_ns.min()) if len(rows.start_ns) else 0
    return int((rows.end_ns - rows.start_ns)[rank.order[alone]].sum()) / span if span else 0.0


def stragglers_of(model: JobModel, traces: Sequence[Trace], lateness: Lateness) -> list[LateTraceRank]:
    """Return the verdict, the most harmful first; empty where the job is healthy or nothing can be told."""
    if not is_trusted(model):
        return []
    return [_straggler(model, finding, traces, lateness) for finding in model.judgement.findings]


def _straggler(model: JobModel, finding: Finding, traces: Sequence[Trace], lateness: Lateness) -> LateTraceRank:
    steps = len(model.steps) or 1
    place = finding.places[0]
    ranks = [_rank(traces[each]) for each in finding.places]
    return LateTraceRank(
        rank=ranks[0],
        ranks=ranks,
        kind=finding.kind,
        caused_wait_ns=int(lateness.caused_wait_ns[finding.places].sum()),
        late_count=int(lateness.late_count[place]),
        collectives=int(lateness.collectives[place]),
        cause=finding.cause.word,
        excess_ns=finding.excess_ns // steps,
        saved_ns=finding.saved_ns // steps,
        error_ns=finding.error_ns // steps,
        since_step=model.steps[finding.since] if model.steps and finding.by_step_ns else None,
        evidence="; ".join(_evidence(model, finding, steps)),
    )


def _rank(trace: Trace) -> int:
    assert trace.rank is not None
    return trace.rank


def _evidence(model: JobModel, finding: Finding, steps: int) -> Iterator[str]:
    per = " a step" if model.steps else ""
    words = CAUSE_WORDS.get(finding.cause.word, finding.cause.word)
    if finding.kind == "link":
        collectives, groups = (round(finding.details[each]) for each in ("count", "groups"))
        yield (
            f"{plural(collectives, 'collective')} of {plural(groups, 'group')} were on the wire for"
            f" {duration(finding.own_ns)} on average, where like ones of other groups took"
            f" {duration(finding.peers_ns)}"
        )
    elif finding.kind == "imbalance":
        yield (
            "the same work takes ranks differently long, in each step anew:"
            f" {finding.details['spread_ratio']:.1%} apart (robust standard deviation);"
            f" the longest of a step {duration(finding.own_ns / steps)}{per}, the mean"
            f" {duration(finding.peers_ns / steps)}; no rank is slow throughout"
        )
    else:
        peers = "the other stages' median" if _is_among_stages(model, finding) else "the median of its peers"
        yield f"{words}: {duration(finding.own_ns / steps)}{per}, {peers} {duration(finding.peers_ns / steps)}"
        more = sum(excess > 0 for excess in finding.by_step_ns)
        unit = "steps" if model.steps else "parts of the record"
        yield f"more in {more} of {len(finding.by_step_ns)} {unit}"
        if finding.cause is Cause.COMPUTE:
            yield _counts(model, finding)
    wall = model.wall_ns / steps
    how = "evenly spread" if finding.kind == "imbalance" else "as its peers"
    yield f"{how} it would save {duration(finding.saved_ns / steps)} of {duration(wall)}{per}, by replay"
    yield f"the replay's own error is {abs(model.error.ratio):.2%}"


def _is_among_stages(model: JobModel, finding: Finding) -> bool:
    """Return whether the measure was the other stages: of a stage, and of a rank whose stage has no replica."""
    return finding.kind == "stage" or len(_role(model, finding.places[0])) == 1


def _role(model: JobModel, place: int) -> list[int]:
    return next((role for role in model.roles if place in role), [place])


def _counts(model: JobModel, finding: Finding) -> str:
    place = finding.places[0]
    group = _role(model, place)
    if _is_among_stages(model, finding):
        group = [each for role in model.roles for each in role]
    counts = [int((model.atoms[each].cause == Cause.COMPUTE).sum()) for each in group]
    mine = int((model.atoms[place].cause == Cause.COMPUTE).sum())
    others = int(np.median([count for each, count in zip(group, counts, strict=True) if each != place] or [mine]))
    what = "operators" if model.graph.ranks[place].events.is_host_job else "kernels"
    if mine > SAME_WORK_RATIO_MAX * others:
        return f"it ran more: {mine} {what}, its peers {others}"
    return f"it ran the same work slower: {mine} {what}, its peers {others}"


def incidents_of(model: JobModel, traces: Sequence[Trace]) -> list[StepIncident]:
    """Return single steps of single ranks that stand out and say nothing about the rank."""
    return [
        StepIncident(
            rank=_rank(traces[incident.place]),
            step=model.steps[incident.step] if model.steps else None,
            cause=incident.cause.word,
            excess_ns=incident.excess_ns,
        )
        for incident in model.judgement.incidents
    ]


def critical_parts(
    model: JobModel,
    traces: Sequence[Trace],
    collectives: Sequence[CollectiveColumns],
    modules: Sequence[RowModules | None],
) -> list[CriticalPart]:
    """Return the critical path summed by all that a part says, the longest first; it adds up exactly.

    `modules` are those of the rows of each of `traces`, None for one that has none.
    """
    path = model.path
    module, names_of_modules = modules_of_path(model, traces, modules)
    sums: dict[tuple[int, int, str | None, str | None, str | None], int] = {}
    columns = np.stack((path.rank, path.cause.astype(np.int64), path.name, path.row != NONE, path.join, module), axis=1)
    kinds, number = np.unique(columns, axis=0, return_inverse=True)
    lengths = path.end_ns - path.start_ns
    totals = np.zeros(len(kinds), dtype=np.int64)
    np.add.at(totals, number.reshape(-1), lengths)
    for (place, cause, name, is_row, join, within), total in zip(kinds.tolist(), totals.tolist(), strict=True):
        names = model.graph.ranks[place].events.trace.names
        operation = collectives[int(model.kept_joins[join])].operation if join != NONE else None
        family = _family(cause, names[name]) if is_row and name != NONE else None
        key = (place, cause, family, operation, names_of_modules[within] if within != NONE else None)
        sums[key] = sums.get(key, 0) + total
    parts = [
        CriticalPart(
            rank=_rank(traces[place]),
            cause=Cause(cause).word,
            duration_ns=total,
            family=family,
            collective=operation,
            module=within,
        )
        for (place, cause, family, operation, within), total in sums.items()
    ]
    return sorted(
        parts, key=lambda part: (-part.duration_ns, part.rank, part.cause, part.family or "", part.module or "")
    )


def _family(cause: int, name: str) -> str:
    if cause == Cause.COMPUTE:
        return family_of(name)
    return {Cause.LINK: "communication", Cause.EXPOSED_COPY: "copy"}.get(Cause(cause), "unknown")
