"""Finds what held the job up, for what cause, and what a fix would save; finds nothing in a healthy job.

One after the other, each rank, stage and link is made as good as its peers and the job is replayed.  The time saved is
what it cost.  A candidate is named only if it saves `SAVED_RATIO_MIN` of the job *and* its excess is not chance
(`significance`).  The worst is fixed first and stays fixed while the search goes on, so that a second fault behind the
first is found too.

The named cause is the one whose removal alone saves most.  Removal means the peers' median, up or down: with a minimum
the noise of each kernel would count as a gain.

Pure: a graph with its atoms in, findings out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..graph.causes import OWN_CAUSES, CauseCode
from ..graph.job_graph import JobGraph, ReplayScenario
from ..graph.replay import play, step_times, walls
from ..shelf import Derived, Shelf
from .findings import Incident, JobVerdict, VerdictFinding
from .imbalance import spread_evenly
from .links import SlowLink, slow_links
from .peers import Atoms, Compared, compare, compare_in_time, equalized
from .significance import P_MAX, change_step, permutation_p
from .stops import ANNOTATED, LONG_STOP_RATIO, Stops, lasting

__all__ = ["judge"]

SAVED_RATIO_MIN = 0.012
"""The share of the wall time that a fix must save; below it faults and chance look the same."""

FETCHED_RATIO_MIN = 0.025
"""The same where a stage alone fetches data or copies it from the host.  The first stage of every pipeline does, so a
little of it is not a fault."""

HOST_FAMILY = (CauseCode.HOST_BOUND, CauseCode.OPTIMIZER_HOST, CauseCode.GC)
"""Causes that occur together on a slow host."""

SPLIT_RATIO_MIN = 0.2
"""The share of a rank's saving that its other causes must bring to count as another fault."""

OWN_WORK_RATIO_MIN = 0.05
"""The same for work that only the first or last stage does: embedding, head and loss are their role, but a stage with
this much more than the others should have fewer layers.  A stage between two others has no work of its own."""

FETCHING = (CauseCode.DATA_WAIT, CauseCode.EXPOSED_COPY)

EXCESS_RATIO_MIN = 0.005
"""A rank is tried only if its excess is this share of the wall time."""

CANDIDATES_MAX = 64
"""At most so many ranks are tried in one round, those with the largest excess."""

TRIED_RATIO_MIN = 0.5
"""All pieces of a rank together must save this part of the minimum before its causes are tested one by one."""

UNEVEN_RATIO_MIN = 0.02
"""The share that an even spread of work must save to be reported: with many ranks some noise is always largest."""

FINDINGS_MAX = 4

MEMBER_RATIO_MIN = 0.3
"""The typical rank of a slow stage or host has this part of the worst rank's excess; else only that rank is slow."""

STAGE_RATIO_MIN = 1.3
"""A stage is named instead of its ranks if it saves this many times what its best rank does."""

Index = NDArray[np.int64]


@dataclass(slots=True)
class _State:
    graph: JobGraph
    bounds: Sequence[Index]
    compared: Sequence[Compared]
    single: Sequence[Compared]
    """The measure of single steps: `compared`, or the rank's own other steps where no other rank has its role."""
    now: ReplayScenario
    wall_ns: int
    whole_ns: int
    steps: int
    error_ratio: float
    is_uneven: bool
    stops: Stops
    shelf: Shelf
    mended: set[int] = field(default_factory=set)
    named: dict[int, tuple[CauseCode, ...]] = field(default_factory=dict)
    """By place: the causes fixed so far of a rank that has others too."""


def judge(
    graph: JobGraph,
    atoms: Sequence[Atoms],
    roles: Sequence[Sequence[int]],
    bounds: Sequence[Index],
    steps: int,
    error_ratio: float,
    join_step: Index,
    shelf: Shelf,
    hosts: Sequence[Sequence[int]] = (),
) -> JobVerdict:
    """Return the verdict.

    `bounds` are the host points of steps as in `step_times`, `error_ratio` is the replay's, `join_step` the step of
    each collective, and `hosts` the places on each host where hosts are known.
    """
    compared = compare(atoms, roles, steps, shelf)
    if len(graph.ranks) < 2 or steps < 1:
        return JobVerdict([], [], ReplayScenario(), compared)
    whole = int(walls(graph, [ReplayScenario()])[0])
    is_uneven = spread_evenly(atoms, roles, steps, ReplayScenario(), shelf) is not None
    alone = {role[0]: compare_in_time(atoms[role[0]], steps) for role in roles if len(role) == 1}
    single = Derived(range(len(compared)), lambda place: alone[place] if place in alone else compared[place])
    stops = Stops(single, whole, is_uneven=is_uneven)
    state = _State(
        graph, bounds, compared, single, ReplayScenario(), whole, whole, steps, error_ratio, is_uneven, stops,
        shelf,
    )  # fmt: skip
    findings: list[VerdictFinding] = []
    links_tried, uneven_tried = False, not state.is_uneven
    while len(findings) < FINDINGS_MAX:
        tried = (
            _best_stage(state, atoms, roles), _best_host(state, atoms, roles, hosts), _best_rank(state, roles),
            _best_single(state, roles),
        )  # fmt: skip
        found = [each for each in tried if each is not None]
        if not links_tried:
            link = slow_links(graph, state.now, join_step, steps, hosts)
            if link is not None:
                found += _link(state, link)
            else:
                links_tried = True
        if not found:
            break
        chosen = max(found, key=lambda each: each[0].saved_ns)
        ranks = next((each for each in found if len(each[0].places) == 1), None)
        is_shared = chosen[0].kind in ("stage", "host")
        if is_shared and ranks and chosen[0].saved_ns < STAGE_RATIO_MIN * ranks[0].saved_ns:
            chosen = ranks
        if chosen[0].kind == "stage" and not uneven_tried:
            # A stage at the others' medians also has even work: first find out what that alone is worth.
            uneven_tried, uneven = True, _imbalance(state, atoms, roles)
            chosen = uneven or chosen
        finding, then = chosen
        findings.append(finding)
        if finding.kind not in ("link", "imbalance"):
            state.mended |= set(finding.places)
            for place in finding.places:
                state.named[place] = (*state.named.get(place, ()), *finding.causes)
        links_tried = links_tried or finding.kind == "link"
        state.now, state.wall_ns = then, int(walls(graph, [then])[0])
    uneven = None if uneven_tried else _imbalance(state, atoms, roles)
    if uneven is not None:
        findings.append(uneven[0])
        state.now = uneven[1]
    findings.sort(key=lambda each: -each.saved_ns)
    return JobVerdict(findings, _incidents(state, findings), state.now, compared)


def _best_rank(state: _State, roles: Sequence[Sequence[int]]) -> tuple[VerdictFinding, ReplayScenario] | None:
    """Return the rank whose equalizing saves most, if one is named."""
    # One step of two replicas is not evidence, but ranks of all roles scatter alike around their own peers.
    group = [place for role in roles if len(role) > 1 for place in role]
    return _best(state, [[place] for place in group], state.compared, [[place] for place in group])


def _best_stage(
    state: _State, atoms: Sequence[Atoms], roles: Sequence[Sequence[int]]
) -> tuple[VerdictFinding, ReplayScenario] | None:
    """Return the stage whose equalizing with the other stages saves most, if it is named."""
    if len(roles) < 2:
        return None
    # Hosts are compared with those of the same stage if there are any.
    is_alone = all(len(role) == 1 for role in roles)
    everyone = [list(range(len(atoms)))]
    stages = [list(stage) for stage in roles]
    across, with_own = (
        compare(atoms, everyone, state.steps, state.shelf, roles_differ=True, with_hosts=is_alone, with_own_work=own)
        for own in (False, True)
    )
    best = _best(state, stages, across, stages)
    for some, least in ((stages[1:-1], SAVED_RATIO_MIN), ([stages[0], stages[-1]], OWN_WORK_RATIO_MIN)):
        found = _best(state, some, with_own, stages)
        if found is not None:
            alone = int(walls(state.graph, [_with(state, found[0].places, across, None)])[0])
            own_ns = alone - (state.wall_ns - found[0].saved_ns)
            if own_ns >= least * state.whole_ns and (best is None or found[0].saved_ns > best[0].saved_ns):
                best = found
    return best


def _best_single(state: _State, roles: Sequence[Sequence[int]]) -> tuple[VerdictFinding, ReplayScenario] | None:
    """Return the rank without peers whose outlying steps cost most, if it is named for them."""
    alone = [list(role) for role in roles if len(role) == 1]
    return _best(state, alone, state.single, [list(role) for role in roles]) if len(alone) > 1 else None


def _best_host(
    state: _State, atoms: Sequence[Atoms], roles: Sequence[Sequence[int]], hosts: Sequence[Sequence[int]]
) -> tuple[VerdictFinding, ReplayScenario] | None:
    """Return the host that saves most with its ranks as good as the same roles on other hosts, if it is named."""
    several = [list(places) for places in hosts if len(places) > 1]
    if len(several) < 3:  # of two hosts, either may be the odd one
        return None
    return _best(state, several, state.compared, several, kind="host")


def _best(
    state: _State,
    groups: Sequence[list[int]],
    compared: Sequence[Compared],
    rows: Sequence[Sequence[int]],
    *,
    kind: str = "stage",
) -> tuple[VerdictFinding, ReplayScenario] | None:
    """Return the group of places whose equalizing saves most, if one is named.

    It is tested against `rows`: ranks, or stages.  Groups that were named before are left out.
    """
    candidates = _candidates(state, groups, compared)
    saved = state.wall_ns - walls(state.graph, [_with(state, places, compared, None) for places in candidates])
    best: tuple[VerdictFinding, ReplayScenario] | None = None
    for at in np.argsort(-saved).tolist():
        if saved[at] < TRIED_RATIO_MIN * SAVED_RATIO_MIN * state.whole_ns:
            break
        if best is not None and saved[at] < best[0].saved_ns:
            break
        found = _named(state, candidates[at], compared, rows, kind)
        if found is not None and (best is None or found[0].saved_ns > best[0].saved_ns):
            best = found
    return best


def _candidates(state: _State, groups: Sequence[list[int]], compared: Sequence[Compared]) -> list[list[int]]:
    """Return the groups of places with enough excess to try, the largest first."""
    found = []
    for places in groups:
        if any(place in state.mended and len(state.named[place]) == len(OWN_CAUSES) for place in places):
            continue
        excess = sum(int(np.maximum(compared[place].excess_ns.sum(axis=0), 0).sum()) for place in places)
        if excess / len(places) > EXCESS_RATIO_MIN * state.whole_ns:
            found.append((excess, places))
    found.sort(key=lambda each: -each[0])
    return [places for _, places in found[:CANDIDATES_MAX]]


def _with(
    state: _State, places: Sequence[int], compared: Sequence[Compared], causes: Sequence[int] | None
) -> ReplayScenario:
    """Return the present scenario with these ranks' pieces equalized too."""
    more = {}
    for place in places:
        some = None if causes is None else (*causes, *state.named.get(place, ()))
        more[place] = partial(equalized, compared[place], some)
    return replace(state.now, ranks={**state.now.ranks, **more})


def _named(
    state: _State, places: list[int], compared: Sequence[Compared], rows: Sequence[Sequence[int]], kind: str
) -> tuple[VerdictFinding, ReplayScenario] | None:
    """Return the finding and the job without it, if some cause's excess is not chance and its removal saves enough."""
    own, sure, apart_ns = [], {}, 0.0
    is_across = compared is not state.compared  # with other stages, or with its own other steps
    # Ranks that were named before do not show what chance does.
    rows = [group for group in rows if set(group) & set(places) or not set(group) <= state.mended]
    row = next(at for at, group in enumerate(rows) if places[0] in group)
    left = [cause for cause in OWN_CAUSES if not any(cause in state.named.get(place, ()) for place in places)]
    for cause in left:
        if sum(int(compared[place].excess_ns[cause].sum()) for place in places) <= 0:
            continue
        table = _typical([[compared[place].excess_ns[cause] for place in group] for group in rows])
        if table[row].sum() < MEMBER_RATIO_MIN * max(compared[place].excess_ns[cause].sum() for place in places):
            continue
        parts = _typical([[compared[place].parts_ns[cause] for place in group] for group in rows])
        # Parts of a step are not independent evidence where its sequences are long or short throughout.
        # Work in every step is not an excess over the rank's own other steps, so sums over steps prove nothing there.
        is_single = len(places) == 1 and compared is state.single
        p = 1.0 if is_single else permutation_p(table if state.is_uneven and cause is CauseCode.COMPUTE else parts, row)
        out = state.stops.steps_out(cause, table, row)
        share = state.stops.fault_ratio(cause, table[row], out, {*rows[row], *state.mended}, parts[row])
        if p < P_MAX:
            share = max(share, lasting(cause, table[row], parts[row]))
        if share > 0 or p < P_MAX:
            own.append(cause)
            if is_across:  # stages are not replicas: their median is a measure only as far as they are alike
                others = np.delete(table, row, axis=0).sum(axis=1)
                apart_ns += float(np.abs(others - np.median(others)).mean()) if len(others) else 0.0
            sure[cause] = (p, share, int(out[0]) if len(out) else 0, len(out) == 1)
    if not own:
        return None
    alone = state.wall_ns - walls(state.graph, [_with(state, places, compared, (cause,)) for cause in own])
    cause = own[int(alone.argmax())]
    scenario = _with(state, places, compared, own)
    saved = state.wall_ns - int(walls(state.graph, [scenario])[0])
    family = [each for each in own if each in HOST_FAMILY] if cause in HOST_FAMILY else [cause]
    causes: tuple[CauseCode, ...] = OWN_CAUSES
    if len(family) < len(own):
        first = _with(state, places, compared, family)
        of_family = state.wall_ns - int(walls(state.graph, [first])[0])
        if saved - of_family >= max(SAVED_RATIO_MIN * state.whole_ns, SPLIT_RATIO_MIN * saved):
            # Two faults of the same ranks; the next round finds the other.
            scenario, saved, causes = first, of_family, tuple(family)
    p, share, first_out, is_one = sure[cause]
    least = FETCHED_RATIO_MIN if is_across and cause in FETCHING else SAVED_RATIO_MIN
    if p >= P_MAX and is_one and cause not in ANNOTATED:
        least = max(least, LONG_STOP_RATIO)
    if saved * share < least * state.whole_ns:
        return None
    by_step = sum(compared[place].excess_ns[cause] for place in places) // len(places)
    measure = compared[places[0]]
    finding = VerdictFinding(
        places=places,
        kind="rank" if len(places) == 1 else kind,
        cause=cause,
        causes=causes,
        saved_ns=saved,
        error_ns=_error(state, scenario, saved) + round(apart_ns),
        excess_ns=int(by_step.sum()),
        own_ns=int(measure.total_ns[cause].sum()),
        peers_ns=int(measure.total_ns[cause].sum() - measure.excess_ns[cause].sum()),
        since=change_step(by_step.astype(np.float64)) if p < P_MAX else first_out,
        by_step_ns=by_step.tolist(),
        p=p,
    )
    return finding, scenario


def _typical(rows: Sequence[Sequence[Index]]) -> NDArray[np.float64]:
    """Return the lower median of each row's members as (rows, columns): one slow member does not make a row slow."""
    typical = [
        np.sort(np.stack(members), axis=0)[(len(members) - 1) // 2] if len(members) > 1 else members[0]
        for members in rows
    ]
    return np.stack(typical).astype(np.float64)


def _error(state: _State, scenario: ReplayScenario, saved: int) -> int:
    """Return how far below the true saving may lie: the scatter of the steps' savings plus the replay's own error."""
    graph = state.graph
    before, after = (play(graph, graph.weights(each)) for each in (state.now, scenario))
    pairs = ((before, state.now), (after, scenario))
    times = [np.diff(_steps(graph, played, state.bounds, each)) for played, each in pairs]
    scatter = 0.0
    if len(times[0]) == len(times[1]) and len(times[0]) > 1:
        per_step = times[0] - times[1]
        scatter = 2 * float(np.std(per_step, ddof=1)) * np.sqrt(len(per_step))
    # A fault that comes and goes scatters by itself, by no more than it saved.
    scatter = min(scatter, saved / 2)
    return round(scatter + abs(state.error_ratio) * state.whole_ns + ERROR_RATIO_MIN * state.whole_ns)


ERROR_RATIO_MIN = 0.005
"""The error of medians of noisy kernels, as a share of the wall time."""


def _steps(graph: JobGraph, times: Index, bounds: Sequence[Index], scenario: ReplayScenario) -> Index:
    return step_times(graph, times, bounds, scenario=scenario)


def _link(state: _State, link: SlowLink) -> list[tuple[VerdictFinding, ReplayScenario]]:
    scenario = replace(state.now, wire_ns=link.wire_ns)
    saved = state.wall_ns - int(walls(state.graph, [scenario])[0])
    if saved < SAVED_RATIO_MIN * state.whole_ns:
        return []
    details = link.details
    finding = VerdictFinding(
        places=link.places, kind="link", cause=CauseCode.LINK, saved_ns=saved, error_ns=_error(state, scenario, saved),
        excess_ns=int(details["excess_ns"]), own_ns=int(details["own_ns"]), peers_ns=int(details["peers_ns"]),
        since=change_step(link.by_step_ns.astype(np.float64)), by_step_ns=link.by_step_ns.tolist(), p=details["p"],
        details=details,
    )  # fmt: skip
    return [(finding, scenario)]


def _imbalance(
    state: _State, atoms: Sequence[Atoms], roles: Sequence[Sequence[int]]
) -> tuple[VerdictFinding, ReplayScenario] | None:
    """Return what an even spread of compute would save, if work is uneven and no rank is slow throughout."""
    found = spread_evenly(atoms, roles, state.steps, state.now, state.shelf)
    if found is None:
        return None
    scenario, totals = found.scenario, found.totals_ns
    saved = state.wall_ns - int(walls(state.graph, [scenario])[0])
    if saved < UNEVEN_RATIO_MIN * state.whole_ns:
        return None
    # The mean amount of work is itself a draw: an even spread of other samples would have more or less.
    drawn_ns = found.spread_ratio * float(totals.mean(axis=0).sum()) / np.sqrt(totals.size)
    over = totals - totals.mean(axis=0)
    place = int(over.sum(axis=1).argmax())
    finding = VerdictFinding(
        places=[place], kind="imbalance", cause=CauseCode.IMBALANCE, saved_ns=saved,
        error_ns=_error(state, scenario, saved) + round(drawn_ns),
        excess_ns=int(np.maximum(over, 0).max(axis=0).sum()),
        own_ns=int(totals.max(axis=0).sum()), peers_ns=int(totals.mean(axis=0).sum()),
        since=int(found.is_in_step.argmax()),
        by_step_ns=np.rint(over[place]).astype(np.int64).tolist(), p=1.0, details={"spread_ratio": found.spread_ratio},
    )  # fmt: skip
    return finding, scenario


def _incidents(state: _State, findings: Sequence[VerdictFinding]) -> list[Incident]:
    """Return single steps that stand out among the ranks without a finding."""
    named = {place for finding in findings for place in finding.places}
    others = [place for place in range(len(state.single)) if place not in named]
    found = []
    for cause in OWN_CAUSES if others else ():
        table = np.stack([state.single[place].excess_ns[cause] for place in others]).astype(np.float64)
        for row, place in enumerate(others):
            if table[row].max() > SAVED_RATIO_MIN * state.whole_ns and len(state.stops.steps_out(cause, table, row)):
                step = int(table[row].argmax())
                found.append(Incident(place, step, cause, int(table[row, step])))
    return sorted(found, key=lambda one: (one.place, one.cause))
