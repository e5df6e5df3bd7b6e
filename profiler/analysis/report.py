"""Defines the document that `pacecar analyze --json` prints, as types.

All times are integers of nanoseconds, all rates bytes or steps a second, all ratios 0..1.  None is unknown, never zero.
The fields are public: new ones may be added, but none is renamed.
"""

from __future__ import annotations

import msgspec

from pacecar.records import Ledger

from ..trace.columns import TraceWarning
from .report_tables import AllToAllRank, TraceTables

__all__ = [
    "Arrival",
    "ClockPair",
    "CollectiveInstance",
    "CollectiveTotal",
    "CriticalPart",
    "Difference",
    "Family",
    "Gap",
    "LateTraceRank",
    "RankClock",
    "RankShare",
    "Scenario",
    "StepIncident",
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
    """One what-if answer: of one trace a bound (the shortest step if only this were gone), of a job by replay.

    Times are of one step, or of the whole window where no steps are marked.
    """

    name: str
    """communication_hidden, data_free, straggler_median, launch_gaps_gone, all; of a job also link_twice_as_fast, and
    of DDP's buckets_twice_as_large."""
    step_ns: float
    speedup: float
    saved_ns: float
    """Below zero where it makes the step longer, as larger buckets may."""
    note: str
    error_ns: float | None = None
    """How far `saved_ns` may be off; None for a bound."""


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
    tables: TraceTables | None = None
    """None where they were not asked for (`--tables`, `--csv`, `--compare`)."""


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
    """How one rank's clock was aligned with the common one: add `offset_ns`.

    `residual_ns` is the remaining doubt: two standard errors, and what a host that is said to be one leaves apart.  The
    axis is the first rank's clock; that of an island that no collective ties to it is its own first rank's.
    """

    rank: int
    host: str | None
    offset_ns: int
    residual_ns: int | None
    method: str
    """same_host, collectives, wall_clock or none."""
    standard_error_ns: int | None = None
    """Of `offset_ns` against the first rank's clock: zero on its own host, None where no collective ties the two."""
    drift_ratio: float | None = None
    """How much faster the first rank's clock runs: `offset_ns` holds in the middle of the traces, and grows by this."""
    drift_standard_error_ratio: float | None = None


class ClockPair(msgspec.Struct, kw_only=True):
    """Two clocks, each by one of its ranks, whose difference cannot be told; None: no collective connects them."""

    ranks: list[int]
    hosts: list[str | None]
    standard_error_ns: int | None


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
    """Who holds the job up, and by what: named by replaying the job with this rank as its peers.

    `excess_ns` (of the cause, over the peers), `saved_ns` and `error_ns` are of one step, or of the whole window where
    no steps are marked.  `caused_wait_ns` is what others waited for the ranks, over the whole window.
    """

    rank: int
    caused_wait_ns: int
    late_count: int
    collectives: int
    cause: str
    """compute, host_bound, data_wait, optimizer_host, checkpoint, exposed_copy, gc, link, imbalance or unknown."""
    excess_ns: int
    evidence: str
    saved_ns: int
    """How much shorter a step were without it, by replay."""
    error_ns: int
    """How far the true saving may lie below `saved_ns`."""
    since_step: int | None
    """The step from which on it is so; None where no steps are marked."""
    kind: str = "rank"
    """rank, stage (all ranks of a pipeline stage), host (all ranks on one), link, or imbalance."""
    ranks: list[int] = []
    """All ranks concerned; `rank` is the first of them."""


class StepIncident(msgspec.Struct, kw_only=True):
    """A single step in which one rank took much longer: it happened once, so it names nobody."""

    rank: int
    step: int | None
    cause: str
    excess_ns: int


class CriticalPart(msgspec.Struct, kw_only=True):
    """A part of the critical path: all of it that has the same rank, cause, family, collective and module.

    `cause` is one of `LateTraceRank.cause`.  A large share is no blame: of ranks that finish almost together one has
    most of the path by chance.
    """

    rank: int
    cause: str
    duration_ns: int
    family: str | None
    """The kernel family, of work on a device."""
    collective: str | None
    """The operation, of time on the wire."""
    module: str | None
    """Around what was launched or ran, outermost first (Net/Linear); None where it was not read or recorded."""


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
    wall_ns: int | None = None
    """From the beginning of the first step that all ranks mark to the end of the last; of all events without marks."""
    critical_path: list[CriticalPart] = []
    """The parts add up to `wall_ns` exactly."""
    replay_error_ratio: float | None = None
    """By how much the replay with the least lags and without recorded delays is longer than the run; see the docs."""
    unexplained_ratio: float | None = None
    """The largest share of a rank's time in which work began for no reason in the graph."""
    incidents: list[StepIncident] = []
    clock_pairs_untold: list[ClockPair] = []
    all_to_all: list[AllToAllRank] = []
    what_if_untold: list[str] = []
    """What has no answer in `what_if`, and why."""


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
    status: str | None = None
    """Of kernels and operators: slower, faster, same, new or gone."""


class TraceComparison(msgspec.Struct, kw_only=True):
    """Two runs side by side.  `headings` has the ledger's, then wall, communication and overlapped_communication."""

    before: TraceSide
    after: TraceSide
    per: str
    """step, or trace where a side has no steps."""
    headings: list[Difference]
    families: list[Difference]
    collectives: list[Difference]
    kernels: list[Difference] = []
    """By name; time on the device."""
    operators: list[Difference] = []
    """By name; time on the device of what the operator itself launched, or of a CPU job its own time on the host."""
    operators_host: list[Difference] = []
    """By name; the operator's own time on the host."""


class TraceDocument(msgspec.Struct, kw_only=True):
    """The whole document.  With `--compare` the traces are those before, then those after."""

    traces: list[TraceReport]
    job: TraceJob | None = None
    comparison: TraceComparison | None = None
    warnings: list[TraceWarning] = []
    version: int = 1
