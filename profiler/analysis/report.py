"""Defines the document that `pacecar analyze --json` prints, as types.

All times are integers of nanoseconds, all rates bytes or steps a second, all ratios 0..1.  None is unknown, never zero.
The fields are public: new ones may be added, but none is renamed.
"""

from __future__ import annotations

import msgspec

from pacecar.records import Ledger

from ..trace.columns import TraceWarning

__all__ = [
    "Arrival",
    "CollectiveInstance",
    "CollectiveTotal",
    "Difference",
    "Family",
    "Gap",
    "LateTraceRank",
    "RankClock",
    "RankShare",
    "Scenario",
    "StepReport",
    "TraceComparison",
    "TraceDocument",
    "TraceJob",
    "TraceReport",
    "TraceSide",
]


class CollectiveTotal(msgspec.Struct, kw_only=True):
    """All collectives of one trace that are alike: same operation, size, type and group.

    `duration_ns` is the sum over kernels, `exposed_ns` the part of their union that nothing hides.  `wait_ns` and
    `wire_ns` split the sum where several ranks were analysed together.  Bandwidths are bytes a second from the median
    duration (of the wire part where it is known), bus bandwidth by nccl-tests' factors (PERFORMANCE.md there).
    """

    operation: str
    bytes: int | None
    dtype: str | None
    group: str | None
    group_size: int | None
    count: int
    duration_ns: int
    median_ns: int
    min_ns: int
    max_ns: int
    exposed_ns: int
    wait_ns: int | None = None
    wire_ns: int | None = None
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None


class Family(msgspec.Struct, kw_only=True):
    """Kernels of one family (gemm, attention, ...): `duration_ns` is a sum, `share_ratio` its part of all kernels'."""

    family: str
    work: str
    count: int
    duration_ns: int
    share_ratio: float
    largest: str
    """The kernel name with the most time in this family."""


class Gap(msgspec.Struct, kw_only=True):
    """Idle device time by what ended it, beside the ledger's headings.

    `cause`: launch_late (the host launched the next work after the device had run dry), launch_latency (launched
    before, began later), sync (the host was waiting for the device when it ran dry), unknown.
    """

    cause: str
    count: int
    duration_ns: int


class Scenario(msgspec.Struct, kw_only=True):
    """One what-if bound: the shortest step if only this were gone.  A bound, not a promise."""

    name: str
    """communication_hidden, data_free, straggler_median, launch_gaps_gone, all."""
    step_ns: float
    speedup: float
    saved_ns: float
    note: str


class StepReport(msgspec.Struct, kw_only=True):
    """One step; the ledger's parts add up to its wall time exactly."""

    step: int
    start_ns: int
    ledger: Ledger


class TraceReport(msgspec.Struct, kw_only=True):
    """One trace, that is one rank.  The headings are those of `ledger`, spelt out for programs."""

    file: str
    rank: int | None
    world_size: int | None
    backend: str | None
    gpus: list[str]
    window: str
    """trace (first to last work), steps, or hta."""
    start_ns: int | None
    span_ns: int
    compute_ns: int
    communication_ns: int
    overlapped_communication_ns: int
    exposed_communication_ns: int
    copy_ns: int
    exposed_copy_ns: int
    idle_ns: int
    data_wait_ns: int
    host_bound_ns: int
    optimizer_host_ns: int
    checkpoint_ns: int
    unknown_ns: int
    overlap_ratio: float | None
    ledger: Ledger
    steps: list[StepReport]
    collectives: list[CollectiveTotal]
    families: list[Family]
    gaps: list[Gap]
    what_if: list[Scenario]
    warnings: list[TraceWarning]
    events: int
    is_truncated: bool


class Arrival(msgspec.Struct, kw_only=True):
    """When one rank came to a collective: `late_ns` after the first, `wait_ns` before the last; then the wire time."""

    rank: int
    start_ns: int
    """On the common clock."""
    late_ns: int
    wait_ns: int
    wire_ns: int


class CollectiveInstance(msgspec.Struct, kw_only=True):
    """One collective as all its ranks saw it.  `ranks_missing` took part and have no trace here."""

    operation: str
    bytes: int | None
    group: str | None
    index: int
    """Its number among the collectives of its group in these traces."""
    ranks: int
    ranks_missing: int | None
    """None when it is not known how many ranks the group has."""
    late_rank: int
    skew_ns: int
    wire_ns: int
    """The median rank's time after the last had come."""
    bus_bandwidth: float | None
    arrivals: list[Arrival]


class RankClock(msgspec.Struct, kw_only=True):
    """How one rank's clock was aligned with the common one: add `offset_ns`.  `residual_ns` is the remaining doubt."""

    rank: int
    host: str | None
    offset_ns: int
    residual_ns: int | None
    method: str
    """same_host, collectives, wall_clock or none."""


class RankShare(msgspec.Struct, kw_only=True):
    """One rank's communication, split into waiting and wire."""

    rank: int
    step_ns: float | None
    compute_ns: int
    communication_ns: int
    wait_ns: int
    wire_ns: int
    caused_wait_ns: int
    """How long the other ranks waited for this one, where it was late by more than ranks usually scatter."""
    exposed_wait_ns: int | None = None
    """The part of the exposed communication in which this rank did nothing but wait for another."""
    exposed_wire_ns: int | None = None
    """The part in which data could flow.  The rest of the exposed communication was found in no other trace."""


class LateTraceRank(msgspec.Struct, kw_only=True):
    """A rank that the others wait for, and the cause, from its own ledger compared with the median rank's."""

    rank: int
    caused_wait_ns: int
    late_count: int
    collectives: int
    cause: str
    """compute, host_bound, data_wait, optimizer_host, checkpoint, exposed_copy, unknown, or exposed_communication: held
    up in another collective."""
    excess_ns: int
    evidence: str


class TraceJob(msgspec.Struct, kw_only=True):
    """Several ranks together."""

    ranks: list[int]
    world_size: int | None
    clocks: list[RankClock]
    shares: list[RankShare]
    collectives: list[CollectiveTotal]
    instances: list[CollectiveInstance]
    stragglers: list[LateTraceRank]
    what_if: list[Scenario]
    warnings: list[TraceWarning]


class TraceSide(msgspec.Struct, kw_only=True):
    """One side of a comparison: the traces of one run.  `steps` counts the steps of all ranks."""

    name: str
    files: list[str]
    ranks: int
    steps: int | None
    median_step_ns: float | None
    """The median step of the rank whose median is the longest; None where there are no steps."""


class Difference(msgspec.Struct, kw_only=True):
    """One quantity before and after, for each step and rank (or for each trace: `TraceComparison.per`)."""

    name: str
    before_ns: float
    after_ns: float
    change_ns: float
    change_ratio: float | None
    """Change over before; None where there was nothing before."""
    before_count: float | None = None
    after_count: float | None = None


class TraceComparison(msgspec.Struct, kw_only=True):
    """Two runs side by side.  `headings` has the ledger's, then wall, communication and overlapped_communication."""

    before: TraceSide
    after: TraceSide
    per: str
    """step, or trace where a side has no steps."""
    headings: list[Difference]
    families: list[Difference]
    collectives: list[Difference]


class TraceDocument(msgspec.Struct, kw_only=True):
    """The whole document.  With `--compare` the traces are those before, then those after."""

    traces: list[TraceReport]
    job: TraceJob | None = None
    comparison: TraceComparison | None = None
    warnings: list[TraceWarning] = []
    version: int = 1
