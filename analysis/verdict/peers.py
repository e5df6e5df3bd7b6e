"""Compares each rank's work with its peers': the same kernel of the same step under the same operator.

The measure is the median of the peers, without the rank itself.  A peer without the piece counts as zero, so a kernel
that only one rank ran is all excess.  Where ranks have different roles (pipeline stages), the caller names the peers.

A key is (what, step, name, operator, earlier occurrences in the step).  Times are durations, so clocks do not matter.
If a rank runs a kernel more often in a step than its peers, it is unknown which runs are surplus (one more layer in
every microbatch, or one more microbatch), so all of them are shortened in proportion.

Pure: graphs in, columns out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..graph.causes import OWN_CAUSES, CauseCode
from ..graph.rank_graph import RankGraph, RankWeights
from ..shelf import Derived, Shelf
from ..trace.columns import NONE
from .key_blocks import in_blocks

__all__ = [
    "PARTS", "Atoms", "Compared", "atoms_of", "compare", "compare_in_time", "equalized", "excess_by_name",
    "with_durations",
]  # fmt: skip

Index = NDArray[np.int64]

PARTS = 4
"""A step is tested in so many parts; whole steps of two pipeline stages would be too few for a test."""

_ROW, _DELAY, _HOST = range(3)

OVERHEAD = (CauseCode.DATA_WAIT, CauseCode.CHECKPOINT, CauseCode.GC)
"""Causes that are not part of a stage's work, like copies between host and device (`TRANSFER`)."""

TRANSFER = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost")
"""Copies between host and device, as CUPTI and roctracer name them."""


@dataclass(frozen=True, slots=True)
class Atoms:
    """One rank's work in n pieces that its peers may have too.

    `kind` and `at` identify the row, delay or host interval of a piece; `key` is equal for the same piece of a peer;
    `step` counts from 0.
    """

    kind: NDArray[np.uint8]
    at: Index
    key: Index
    what: Index
    """Equal for the same kernel under the same operator in any step and place."""
    place: Index
    """Equal for the same piece in any step."""
    step: Index
    part: Index
    """The part of its step, in the order of issue; each of the `PARTS` has equally many pieces."""
    cause: NDArray[np.uint8]
    duration_ns: Index
    is_overhead: NDArray[np.bool_]
    """Whether it is not a role's work: one of `OVERHEAD`, or a copy between host and device."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Pieces with the median of the peers; `excess_ns[cause, step]` sums the differences from it."""

    atoms: Atoms
    median_ns: Index
    excess_ns: Index
    parts_ns: Index
    """The same by cause and part of a step: (causes, steps * PARTS)."""
    total_ns: Index
    """The rank's own time by cause and step."""


def atoms_of(graphs: Sequence[RankGraph], step_starts: Sequence[Index], steps: int, shelf: Shelf) -> Sequence[Atoms]:
    """Return the pieces of each rank; `step_starts` are the beginnings of its steps on the common clock."""
    numbers: dict[str, int] = {}
    most = 1
    for graph in graphs:
        most = max(most, 2 * len(graph.order) + len(graph.host_own_ns))
        for name in _names_used(graph):
            numbers.setdefault(graph.events.trace.names[name], len(numbers) + 1)
    return shelf.keep(
        _atoms(graph, starts, steps, numbers, most) for graph, starts in zip(graphs, step_starts, strict=True)
    )


def _names_used(graph: RankGraph) -> list[int]:
    used = np.unique(np.concatenate((graph.events.rows.name, graph.events.rows.operator, graph.events.host.name)))
    found: list[int] = used[used != NONE].tolist()
    return found


def _atoms(graph: RankGraph, starts: Index, steps: int, numbers: Mapping[str, int], most: int) -> Atoms:
    """Return the pieces of one rank; no rank has more than `most`."""
    kind, at, step, name, operator, order, cause, duration, overhead = _raw(graph, starts, numbers)
    names = len(numbers) + 1
    code = ((kind * max(steps, 1) + step) * names + name) * names + operator
    sort = np.lexsort((order, code))
    first = np.ones(len(sort), dtype=np.bool_)
    first[1:] = code[sort][1:] != code[sort][:-1]
    begins = np.maximum.accumulate(np.where(first, np.arange(len(sort)), 0))
    nth = np.empty(len(sort), dtype=np.int64)
    nth[sort] = np.arange(len(sort)) - begins
    what = (kind * names + name) * names + operator
    return Atoms(
        kind.astype(np.uint8), at, code * most + nth, what, what * most + nth, step, _parts(step, order),
        cause.astype(np.uint8), duration, overhead.astype(np.bool_),
    )  # fmt: skip


def _parts(step: Index, order: Index) -> Index:
    """Return the part of its step that each piece is in."""
    sort = np.lexsort((order, step))
    _, first, counts = np.unique(step[sort], return_index=True, return_counts=True)
    within = np.arange(len(sort)) - np.repeat(first, counts)
    part = np.empty(len(sort), dtype=np.int64)
    part[sort] = within * PARTS // np.repeat(counts, counts)
    return part


def _raw(graph: RankGraph, starts: Index, numbers: Mapping[str, int]) -> tuple[Index, ...]:
    """Return kind, place, step, name, operator, order, cause, duration and overhead of the pieces of one rank."""
    rows, lane = graph.events.rows, graph.events.host
    known = np.zeros(len(graph.events.trace.names) + 1, dtype=np.int64)
    transfers = np.zeros(len(known), dtype=np.bool_)
    for each in _names_used(graph):
        word = graph.events.trace.names[each]
        known[each] = numbers[word]
        transfers[each] = TRANSFER.search(word) is not None
    order = graph.order
    issued = np.where(
        rows.launch == NONE, rows.start_ns, lane.time_ns[np.maximum(rows.launch, 0)] if len(lane.time_ns) else 0
    )[order]
    own = np.isin(rows.cause[order], OWN_CAUSES) & ~graph.in_join
    at_row = np.flatnonzero(own)
    is_own = np.isin(graph.delay_cause, OWN_CAUSES)
    if (rows.launch == NONE).all():  # without launches the trace does not show what the host did
        is_own &= graph.delay_cause != CauseCode.HOST_BOUND
    at_delay = np.flatnonzero((graph.delay_ns > 0) & is_own)
    at_host = np.flatnonzero(np.isin(lane.cause, OWN_CAUSES) & (len(graph.host_begin) > 0))
    kinds = np.repeat((_ROW, _DELAY, _HOST), (len(at_row), len(at_delay), len(at_host)))
    at = np.concatenate((at_row, at_delay, at_host))
    time = np.concatenate((issued[at_row], issued[at_delay], lane.time_ns[at_host]))
    step = np.searchsorted(starts, time, side="right") - 1 if len(starts) else np.zeros(len(time), dtype=np.int64)
    of_row = np.concatenate((order[at_row], order[at_delay]))
    name = np.concatenate((known[rows.name[of_row]], known[lane.name[at_host]]))
    operator = np.concatenate((known[rows.operator[of_row]], lane.cause[at_host].astype(np.int64)))
    cause = np.concatenate((rows.cause[order[at_row]], graph.delay_cause[at_delay], lane.cause[at_host]))
    weights = graph.weights
    duration = np.concatenate((weights.row_ns[at_row], weights.delay_ns[at_delay], weights.host_ns[at_host]))
    overhead = np.isin(cause, OVERHEAD)
    is_copy = rows.cause[order[at_row]] == CauseCode.EXPOSED_COPY
    overhead[: len(at_row)] |= is_copy & transfers[rows.name[order[at_row]]]
    inside = step >= 0
    # Rows without a launch at the start of a stream were launched before the window; their number is chance.
    inside[: len(at_row)] &= ~_left_over(rows.stream[order], rows.launch[order])[at_row]
    columns = (kinds, at, step, name, operator, time, cause, duration, overhead)
    return tuple(np.asarray(column[inside], dtype=np.int64) for column in columns)


def _left_over(stream: Index, launch: Index) -> NDArray[np.bool_]:
    """Return, for rows in stream order, whether they precede the first row of their stream with a launch."""
    left = np.zeros(len(stream), dtype=np.bool_)
    for one in np.unique(stream).tolist():
        mine = np.flatnonzero(stream == one)
        known = np.flatnonzero(launch[mine] != NONE)
        if len(known):
            left[mine[: known[0]]] = True
    return left


def compare(
    atoms: Sequence[Atoms],
    peers: Sequence[Sequence[int]],
    steps: int,
    shelf: Shelf,
    *,
    roles_differ: bool = False,
    with_hosts: bool = False,
    with_own_work: bool = False,
) -> Sequence[Compared]:
    """Return each rank's pieces with its peers' medians; `peers` are groups of places, each place in one of them.

    If `roles_differ`, copies on the device are not compared, and Python between launches only `with_hosts` and where
    most peers do the same.  A piece that most peers lack is then excess only if it is overhead, or compute that they do
    less often; `with_own_work`, any compute.  Only the last stage has the loss, for example, which is not a fault.
    Data and copies from the host can be fetched ahead while the device computes.  So where only the first stage has
    them, the others' zero is the right measure.
    """
    structural = STRUCTURAL[1:] if with_hosts else STRUCTURAL

    def found() -> Iterator[Compared]:
        for group in peers:
            members = Derived(group, atoms.__getitem__)
            medians = in_blocks(
                _medians, Derived(members, lambda mine: mine.key), Derived(members, lambda mine: mine.duration_ns)
            )
            shortened = _where_more(members, steps)
            shared = _shared(members) if roles_differ else None
            for at, mine in enumerate(members):
                median = medians[at] if shortened is None else shortened(mine, at, medians[at])
                if shared is not None:
                    is_common = np.isin(mine.what, shared) | with_own_work
                    counts = mine.is_overhead | ((mine.cause == CauseCode.COMPUTE) & is_common)
                    own = ~mine.is_overhead & (np.isin(mine.cause, structural) | ((median == 0) & ~counts))
                    median = np.where(own, mine.duration_ns, median)
                yield _over(mine, median, steps)

    kept = shelf.keep(found())
    return Derived(np.argsort([place for group in peers for place in group]).tolist(), kept.__getitem__)


def compare_in_time(atoms: Atoms, steps: int) -> Compared:
    """Return a rank's pieces with the medians of the same pieces in all of its steps, absent ones as zero.

    This measures single steps where no other rank has the same role; work in every step is not an excess.
    """
    _, piece, counts = np.unique(atoms.place, return_inverse=True, return_counts=True)
    order = np.lexsort((atoms.duration_ns, piece))
    begin = np.cumsum(counts) - counts
    nth = (steps - 1) // 2 - (steps - counts)  # the lower median of so many steps, behind those that lack it
    median = np.where(nth < 0, 0, atoms.duration_ns[order][np.clip(begin + nth, 0, max(len(order) - 1, 0))])
    return _over(atoms, median[piece], steps)


def _over(mine: Atoms, median: Index, steps: int) -> Compared:
    slot = mine.cause.astype(np.int64) * steps + mine.step
    over = mine.duration_ns - median
    excess, total = _sums(slot, over, steps), _sums(slot, mine.duration_ns, steps)
    return Compared(mine, median, excess, _sums(slot * PARTS + mine.part, over, steps * PARTS), total)


STRUCTURAL = (CauseCode.HOST_BOUND, CauseCode.EXPOSED_COPY)
"""Causes that cannot be compared between roles: an inner stage receives and sends, which is more work for its host and
may need copies on the device."""


def _shared(group: Sequence[Atoms]) -> Index:
    """Return what most members do, in any place."""
    what, counts = np.unique(np.concatenate([np.unique(mine.what) for mine in group]), return_counts=True)
    return what[2 * counts > len(group)]


def _sums(slot: Index, values: Index, columns: int) -> Index:
    """Return the sums of values by slot as (causes, columns); floats are exact below 2**53 ns, about 100 days."""
    found: Index = np.bincount(slot, values, len(CauseCode) * columns).astype(np.int64).reshape(len(CauseCode), columns)
    return found


def _where_more(group: Sequence[Atoms], steps: int) -> Callable[[Atoms, int, Index], Index] | None:
    """Return how a member's medians change, None if they do not: compute it does more often is shortened in proportion.

    The function takes a member, its number and its medians.
    """

    def kinds(mine: Atoms) -> tuple[Index, Index, Index, Index]:
        """Return the rank's compute, its kinds by what and step, and the number and count of each."""
        at = np.flatnonzero((mine.cause == CauseCode.COMPUTE) & (mine.kind == _ROW))
        key, number, count = np.unique(mine.what[at] * steps + mine.step[at], return_inverse=True, return_counts=True)
        return at, key, number.reshape(-1), count

    keys, counts, totals = [], [], []
    for mine in group:
        at, key, number, count = kinds(mine)
        keys.append(key)
        counts.append(count)
        totals.append(np.bincount(number, mine.duration_ns[at], len(key)).astype(np.int64))
    usual = in_blocks(_medians, keys, counts)
    if all((count <= often).all() for count, often in zip(counts, usual, strict=True)):
        return None
    even = in_blocks(_medians, keys, totals)

    def shortened(mine: Atoms, member: int, median: Index) -> Index:
        at, _, number, _ = kinds(mine)
        ratio = np.minimum(even[member] / np.maximum(totals[member], 1), 1.0)
        is_more = ((counts[member] > usual[member]) & (usual[member] > 0))[number]
        changed = median.copy()
        changed[at[is_more]] = np.rint(mine.duration_ns[at] * ratio[number])[is_more].astype(np.int64)
        return changed

    return shortened


def _medians(keys: Sequence[Index], values: Sequence[Index]) -> list[Index]:
    """Return for each rank's pieces the median of the others' durations, absent ones as zero."""
    members = len(keys)
    if members < 2:
        return list(values)
    key, value = np.concatenate(keys), np.concatenate(values)
    order = np.lexsort((value, key))
    key, value = key[order], value[order]
    first = np.ones(len(key), dtype=np.bool_)
    first[1:] = key[1:] != key[:-1]
    heads = np.flatnonzero(first)
    counts = np.diff(np.append(heads, len(key)))
    head, absent = np.repeat(heads, counts), members - np.repeat(counts, counts)
    mine = np.arange(len(key)) - head + absent

    def without_me(nth: int) -> Index:
        place = np.where(nth < mine, nth, nth + 1) - absent
        picked: Index = np.where(place < 0, 0, value[np.clip(head + np.maximum(place, 0), 0, len(value) - 1)])
        return picked

    median = np.empty(len(key), dtype=np.int64)
    median[order] = (without_me((members - 2) // 2) + without_me((members - 1) // 2)) // 2
    return np.split(median, np.cumsum([len(its) for its in keys])[:-1])


def equalized(compared: Compared, causes: Sequence[int] | None, graph: RankGraph) -> RankWeights:
    """Return the durations of a rank with its pieces of `causes` (all of its own: None) as its peers' medians."""
    atoms = compared.atoms
    every = causes is None
    chosen = np.arange(len(atoms.at)) if every else np.flatnonzero(np.isin(atoms.cause, causes or ()))
    return with_durations(graph.weights, atoms, chosen, compared.median_ns[chosen])


def with_durations(weights: RankWeights, atoms: Atoms, chosen: Index, durations_ns: Index) -> RankWeights:
    """Return the weights with these durations of the pieces `chosen`."""
    parts = [weights.row_ns.copy(), weights.delay_ns.copy(), weights.host_ns.copy()]
    for kind, part in enumerate(parts):
        mine = atoms.kind[chosen] == kind
        part[atoms.at[chosen[mine]]] = durations_ns[mine]
    return RankWeights(*parts)


def excess_by_name(graph: RankGraph, compared: Compared, cause: CauseCode) -> dict[str, int]:
    """Return how much longer than its peers a rank took with `cause`, by name of kernel or operator, in nanoseconds."""
    atoms = compared.atoms
    chosen = np.flatnonzero((atoms.cause == cause) & (atoms.kind != _DELAY))
    is_row = atoms.kind[chosen] == _ROW
    name = np.empty(len(chosen), dtype=np.int64)
    name[is_row] = graph.events.rows.name[graph.order[atoms.at[chosen[is_row]]]]
    name[~is_row] = graph.events.host.name[atoms.at[chosen[~is_row]]]
    names, number = np.unique(name, return_inverse=True)
    sums = np.zeros(len(names), dtype=np.int64)
    np.add.at(sums, number.reshape(-1), (atoms.duration_ns - compared.median_ns)[chosen])
    return {
        graph.events.trace.names[each]: excess
        for each, excess in zip(names.tolist(), sums.tolist(), strict=True)
        if each != NONE
    }
