"""Defines the types of the document that `pacecar analyze --json` prints.

Times are integers of nanoseconds, rates are bytes or steps a second, ratios 0..1.  None is unknown, never zero.  The
fields are public: new ones may be added, but existing ones keep their names.
"""

from __future__ import annotations

import msgspec

from pacecar.nccl_inspector import CommunicatorBandwidth
from pacecar.records import Cause, Ledger

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
    """All collectives of one trace with the same operation, size, type and group.

    `duration_ns` is the sum over kernels, `exposed_ns` the part of their union that no compute hides.  `wait_ns` and
    `wire_ns` split the sum if several ranks were analyzed together.  Bandwidths are bytes a second from the median
    duration (of the wire part if known), bus bandwidth by nccl-tests' factors (PERFORMANCE.md there).
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
    """The name of the kernel with the most time in this family."""


class Gap(msgspec.Struct, kw_only=True):
    """Idle device time by what ended it, beside the ledger's headings.

    `cause`: launch_late (the host launched the next work after the device ran dry), launch_latency (launched in time,
    began late), sync (the host was waiting for the device when it ran dry), unknown.
    """

    cause: str
    count: int
    duration_ns: int


class Scenario(msgspec.Struct, kw_only=True):
    """One what-if answer: by replay for a job, a bound for a single trace (the shortest step if only this were gone).

    Times are of one step, or of the whole window where no steps are marked.
    """

    name: str
    """communication_hidden, data_free, straggler_median, launch_gaps_gone, all, link_twice_as_fast, and for DDP
    buckets_twice_as_large.  A bound is called `at_most_` and one of the first five."""
    step_ns: float
    speedup: float
    saved_ns: float
    """Negative if it makes the step longer, as larger buckets may."""
    note: str
    error_ns: float | None = None
    """How far `saved_ns` may be off; None for a bound."""


class StepReport(msgspec.Struct, kw_only=True):
    """One step; the ledger's parts add up to its wall time exactly."""

    step: int
    start_ns: int
    ledger: Ledger


class TraceReport(msgspec.Struct, kw_only=True):
    """One trace of one rank.  The headings of `ledger` are repeated as fields for programs."""

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
    """None unless requested (`--tables`, `--csv`, `--compare`)."""


class Arrival(msgspec.Struct, kw_only=True):
    """One rank's arrival at a collective: `late_ns` after the first, `wait_ns` before the last; then the wire time."""

    rank: int
    start_ns: int
    """On the common clock."""
    late_ns: int
    wait_ns: int
    wire_ns: int


class CollectiveInstance(msgspec.Struct, kw_only=True):
    """One collective as all its ranks saw it.  `ranks_missing` took part but have no trace here."""

    operation: str
    bytes: int | None
    group: str | None
    index: int
    """Its number among the collectives of its group in these traces."""
    ranks: int
    ranks_missing: int | None
    """None if the size of the group is unknown."""
    late_rank: int
    skew_ns: int
    wire_ns: int
    """The median rank's time after the last arrival."""
    bus_bandwidth: float | None
    arrivals: list[Arrival]


class RankClock(msgspec.Struct, kw_only=True):
    """The alignment of one rank's clock with the common one: add `offset_ns`.

    `residual_ns` is the remaining uncertainty: two standard errors, plus the difference left between ranks of one host.
    The common clock is the first rank's; an island that no collective connects to it uses its own first rank's.
    """

    rank: int
    host: str | None
    offset_ns: int
    residual_ns: int | None
    method: str
    """same_host, collectives, wall_clock or none."""
    standard_error_ns: int | None = None
    """Of `offset_ns` against the first rank's clock: zero on its host, None if no collective connects the two."""
    drift_ratio: float | None = None
    """How much faster the first rank's clock runs: `offset_ns` is for the middle of the traces and grows so fast."""
    drift_standard_error_ratio: float | None = None


class ClockPair(msgspec.Struct, kw_only=True):
    """Two clocks, each given by one of its ranks, with an unknown difference; None if no collective connects them."""

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
    """How long the other ranks waited for this one when it arrived last by more than the usual scatter.  It may itself
    have waited, so this blames no rank."""
    exposed_wait_ns: int | None = None
    """The part of the exposed communication in which this rank only waited for another."""
    exposed_wire_ns: int | None = None
    """The part in which data could flow.  The rest of the exposed communication is not in any other trace."""


class LateTraceRank(msgspec.Struct, kw_only=True):
    """Ranks that hold the job up, found by replaying the job with these ranks as good as their peers.

    `excess_ns` (of the cause, over the peers), `saved_ns` and `error_ns` are means over the steps, or of the whole
    window if no steps are marked.  `caused_wait_ns` is how long others waited for the ranks in the whole window.
    """

    rank: int
    caused_wait_ns: int
    late_count: int
    collectives: int
    cause: Cause
    excess_ns: int
    evidence: str
    saved_ns: int
    """How much shorter a step would be without it, by replay."""
    error_ns: int
    """How far the true saving may be below `saved_ns`."""
    since_step: int | None
    """The first step with the excess; None if no steps are marked."""
    kind: str = "rank"
    """rank, stage (all ranks of a pipeline stage), host (all ranks on one), link, or imbalance."""
    ranks: list[int] = []
    """All ranks concerned; `rank` is the first of them."""


class StepIncident(msgspec.Struct, kw_only=True):
    """A single step in which one rank took much longer; it happened once, so the rank is not blamed."""

    rank: int
    step: int | None
    cause: str
    excess_ns: int


class CriticalPart(msgspec.Struct, kw_only=True):
    """A part of the critical path: everything with the same rank, cause, family, collective and module.

    `cause` is one of `LateTraceRank.cause`.  A large share does not blame a rank: if ranks finish almost together, one
    has most of the path by chance.
    """

    rank: int
    cause: str
    duration_ns: int
    family: str | None
    """The kernel family of work on a device."""
    collective: str | None
    """The operation of time on the wire."""
    module: str | None
    """The modules around the work, outermost first (Net/Linear); None if not read or recorded."""


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
    """From the start of the first step that all ranks mark to the end of the last; of all events if none are marked."""
    critical_path: list[CriticalPart] = []
    """The parts add up to `wall_ns` exactly."""
    replay_error_ratio: float | None = None
    """How much longer the replay with the least lags and without recorded delays is than the run; see the docs."""
    unexplained_ratio: float | None = None
    """The largest share of a rank's time in which work began for a reason that is not in the graph."""
    incidents: list[StepIncident] = []
    clock_pairs_untold: list[ClockPair] = []
    all_to_all: list[AllToAllRank] = []
    what_if_untold: list[str] = []
    """The questions without an answer in `what_if`, and why."""


class TraceSide(msgspec.Struct, kw_only=True):
    """One side of a comparison: the traces of one run.  `steps` counts the steps of all ranks."""

    name: str
    files: list[str]
    ranks: int
    steps: int | None
    median_step_ns: float | None
    """The median step of the rank with the longest median; None if there are no steps."""


class Difference(msgspec.Struct, kw_only=True):
    """One quantity before and after, per step and rank (or per trace: `TraceComparison.per`)."""

    name: str
    before_ns: float
    after_ns: float
    change_ns: float
    change_ratio: float | None
    """Change over before; None if there was nothing before."""
    before_count: float | None = None
    after_count: float | None = None
    status: str | None = None
    """For kernels and operators: slower, faster, same, new or gone."""


class TraceComparison(msgspec.Struct, kw_only=True):
    """Two runs side by side.  `headings` has the ledger's, then wall, communication and overlapped_communication."""

    before: TraceSide
    after: TraceSide
    per: str
    """step, or trace if a side has no steps."""
    headings: list[Difference]
    families: list[Difference]
    collectives: list[Difference]
    kernels: list[Difference] = []
    """By name; time on the device."""
    operators: list[Difference] = []
    """By name; device time of what the operator itself launched, or for a CPU job its own time on the host."""
    operators_host: list[Difference] = []
    """By name; the operator's own time on the host."""


class TraceDocument(msgspec.Struct, kw_only=True):
    """The whole document.  With `--compare`, the traces before come first, then those after.

    `communicators` is what NCCL's Inspector wrote into the given folders.
    """

    traces: list[TraceReport]
    job: TraceJob | None = None
    comparison: TraceComparison | None = None
    warnings: list[TraceWarning] = []
    communicators: list[CommunicatorBandwidth] = []
    version: int = 1
