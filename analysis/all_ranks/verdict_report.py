"""Turns the causal model's findings into the document's lists: stragglers with evidence, incidents, critical path.

The evidence is the numbers behind the verdict: how long the rank and its peers took, in how many steps, whether it ran
more kernels or the same ones slower, what removing the excess saves, and how well the replay reproduces the run.

Pure: a model in, document types out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pacecar.formatting.ledger_headings import CAUSE_WORDS
from pacecar.formatting.quantities import duration, plural
from pacecar.records import Cause

from ..document.report import CriticalPart, LateTraceRank, StepIncident
from ..graph.causes import CauseCode
from ..graph.job_graph import ReplayScenario
from ..graph.rank_graph import RankGraph
from ..graph.replay import walls
from ..one_rank.condensed_trace import OPERATOR_MARK
from ..one_rank.kernel_families import family_of, kernel_name
from ..trace.columns import NONE, CollectiveColumns, Trace
from ..verdict.findings import VerdictFinding
from ..verdict.peers import PARTS, excess_by_name
from ..verdict.significance import P_MAX, least_p
from .causal_model import JobModel
from .collective_arrivals import Lateness
from .critical_modules import modules_of_path

if TYPE_CHECKING:
    from ..one_rank.tables.all_tables import RowModules

__all__ = [
    "UNTRUSTED_RATIO", "critical_parts", "doubt_words", "incidents_of", "is_trusted", "stragglers_of",
    "too_few_words",
]  # fmt: skip

UNTRUSTED_RATIO = 0.5
"""If edges leave more than this share of a rank's time unexplained (sampled traces, missing launches), no rank is
named, unless the job would have taken as long without that time."""

DOUBTFUL_RATIO = 0.1
"""If a rank spends more than this share of its time unexplained, or communicating with ranks whose rows are unknown,
"no rank is late" is not certain: a slow rank could hide there."""

DOUBTFUL_ERROR_RATIO = 0.1
"""The same for the replay's own error."""

UNTOLD_WIRE_RATIO = 0.25
"""The same for the time saved if links without anything to compare them with took no time."""

FAMILIES_MAX = 3
FAMILIES_RATIO = 0.8
"""The evidence has the families of kernels that make up this share of an excess, at most so many."""

SAME_WORK_RATIO_MAX = 1.02
"""Kernel counts that differ by less than this ratio are the same work."""


def is_trusted(model: JobModel) -> bool:
    """Return whether the graph explains enough of the run to name a rank."""
    return model.error.unexplained_ratio <= UNTRUSTED_RATIO or model.is_elastic


def too_few_words(model: JobModel) -> str | None:
    """Return why no rank could have been named, however slow, except for single steps; None if one could have been."""
    tested = sum(len(role) for role in model.roles if len(role) > 1) or len(model.roles)
    if tested < 2 or least_p(tested, model.units * PARTS) < P_MAX:
        return None
    return f"{tested} ranks in {plural(model.units, 'step')} are too few to tell a slow one from chance"


def doubt_words(model: JobModel) -> str | None:
    """Return why "no rank is late" is not certain although no rank is named; None if it is certain."""
    shares = [_unmatched_ratio(rank) for rank in model.graph.ranks]
    if len(shares) < 2:
        return None
    wire_ns = np.where(model.untold_joins, 0, model.played.wire_ns)
    untold = 1 - int(walls(model.played, [ReplayScenario(wire_ns=wire_ns)])[0]) / max(model.wall_ns, 1)
    if max(shares) > DOUBTFUL_RATIO:
        return f"a rank spends {max(shares):.0%} of its time in communication whose rows on other ranks are unknown"
    if model.error.unexplained_ratio > DOUBTFUL_RATIO and not model.is_elastic:
        return f"work began for no known reason in {model.error.unexplained_ratio:.0%} of a rank's time"
    if abs(model.error.ratio) > DOUBTFUL_ERROR_RATIO:
        return f"the traces do not show what all work waited for: a replay of them is off by {model.error.ratio:+.0%}"
    if untold > UNTOLD_WIRE_RATIO:
        return (
            f"{untold:.0%} of the time is spent on links, and no group shows how fast they can be: if all groups use"
            " the same ones, a slow link looks like a busy one (no rank is slow)"
        )
    return None


def _unmatched_ratio(rank: RankGraph) -> float:
    """Return the share of a rank's time in communication that is not a collective of the graph."""
    rows = rank.events.rows
    alone = (rows.cause[rank.order] == CauseCode.LINK) & ~rank.in_join
    span = int(rows.end_ns.max() - rows.start_ns.min()) if len(rows.start_ns) else 0
    return int((rows.end_ns - rows.start_ns)[rank.order[alone]].sum()) / span if span else 0.0


def stragglers_of(model: JobModel, traces: Sequence[Trace], lateness: Lateness) -> list[LateTraceRank]:
    """Return the verdict, the most harmful finding first; empty if the job is healthy or nothing can be concluded."""
    if not is_trusted(model):
        return []
    return [_straggler(model, finding, traces, lateness) for finding in model.judgement.findings]


def _straggler(model: JobModel, finding: VerdictFinding, traces: Sequence[Trace], lateness: Lateness) -> LateTraceRank:
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
        cause=Cause(finding.cause.word),
        excess_ns=finding.excess_ns // steps,
        saved_ns=finding.saved_ns // steps,
        error_ns=finding.error_ns // steps,
        since_step=model.steps[finding.since] if model.steps and finding.by_step_ns else None,
        evidence="; ".join(_evidence(model, finding, steps)),
    )


def _rank(trace: Trace) -> int:
    assert trace.rank is not None
    return trace.rank


def _evidence(model: JobModel, finding: VerdictFinding, steps: int) -> Iterator[str]:
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
            "the ranks take different times for the same work, and others in each step:"
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
        if finding.cause is CauseCode.COMPUTE:
            if not model.graph.ranks[finding.places[0]].events.trace.is_condensed:
                yield _counts(model, finding)
            if (families := _families(model, finding, steps)) is not None:
                yield families
    wall = model.wall_ns / steps
    how = "evenly spread" if finding.kind == "imbalance" else "as its peers"
    yield f"{how} it would save {duration(finding.saved_ns / steps)} of {duration(wall)}{per}, by replay"
    yield f"the replay's own error is {abs(model.error.ratio):.2%}"


def _is_among_stages(model: JobModel, finding: VerdictFinding) -> bool:
    """Return whether it was compared with the other stages: it is a stage, or a rank whose stage has no replica."""
    return finding.kind == "stage" or len(_role(model, finding.places[0])) == 1


def _role(model: JobModel, place: int) -> list[int]:
    return next((role for role in model.roles if place in role), [place])


def _counts(model: JobModel, finding: VerdictFinding) -> str:
    place = finding.places[0]
    group = _role(model, place)
    if _is_among_stages(model, finding):
        group = [each for role in model.roles for each in role]
    counts = [int((model.atoms[each].cause == CauseCode.COMPUTE).sum()) for each in group]
    mine = int((model.atoms[place].cause == CauseCode.COMPUTE).sum())
    others = int(np.median([count for each, count in zip(group, counts, strict=True) if each != place] or [mine]))
    what = "operators" if model.graph.ranks[place].events.is_host_job else "kernels"
    if mine > SAME_WORK_RATIO_MAX * others:
        return f"it ran more: {mine} {what}, its peers {others}"
    return f"it ran the same work slower: {mine} {what}, its peers {others}"


def _families(model: JobModel, finding: VerdictFinding, steps: int) -> str | None:
    """Return in which kernels' families, or operators, a rank differs from its peers; None if they are other stages."""
    place = finding.places[0]
    if _is_among_stages(model, finding):
        return None
    rank, sums = model.graph.ranks[place], dict[str, int]()
    for name, excess in excess_by_name(rank, model.judgement.compared[place], finding.cause).items():
        name = name.partition(OPERATOR_MARK)[0]
        word = kernel_name(name) if rank.events.is_host_job else family_of(name)
        sums[word] = sums.get(word, 0) + excess
    longer = sorted(((excess, word) for word, excess in sums.items() if excess > 0), reverse=True)
    left, words = FAMILIES_RATIO * sum(excess for excess, _ in longer), []
    for excess, word in longer[:FAMILIES_MAX]:
        if left <= 0:
            break
        left -= excess
        words.append(f"{word} ({duration(excess / steps)})")
    return f"most of the difference is in {', '.join(words)}" if words else None


def incidents_of(model: JobModel, traces: Sequence[Trace]) -> list[StepIncident]:
    """Return single steps of single ranks that stand out but say nothing about the rank."""
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
    """Return the critical path, summed over parts that are alike, the longest first; it adds up exactly.

    `modules` are those of the rows of each trace; None for a trace without modules.
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
            cause=CauseCode(cause).word,
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
    if cause == CauseCode.COMPUTE:
        return family_of(name)
    return {CauseCode.LINK: "communication", CauseCode.EXPOSED_COPY: "copy"}.get(CauseCode(cause), "unknown")
