"""Defines the daemon's status document, which page and terminal read: versioned, and in base units.

Unlike internal records, it is public and stable.  Each figure is named like its metric without the prefix
(`pacecar_gpu_power_watts` of GPU 0 is `power_watts` of that GPU), in the metric's unit, and null if nothing was read.
Fields may be added at any time; renaming or removing one, or changing its meaning, raises `VERSION`.
`docs/snapshot.md` describes every field, and a test compares it with this module.

Left out: time series (/metrics has them), and building the document (`pacecar.monitor.http.status_document`).
"""

from __future__ import annotations

import msgspec

from pacecar.records.commands import KnobValue
from pacecar.records.job_identity import JobKey

__all__ = [
    "VERSION",
    "CollectorStatus",
    "DaemonStatus",
    "GpuStatus",
    "HangStatus",
    "HealthReasonStatus",
    "Host",
    "JobStatus",
    "Ladder",
    "LateRank",
    "LinkStatus",
    "MigInstance",
    "MissingGpu",
    "Move",
    "Rank",
    "Saving",
    "StatusDocument",
    "StatusHistory",
    "TunerView",
]

VERSION = 1
"""Version of the document and of the history; readers refuse unknown versions."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The node: each field is the metric `pacecar_host_<field>`."""

    cpus_online: int | None = None
    cpu_utilization_ratio: float | None = None
    tasks_runnable: int | None = None
    tasks_blocked: int | None = None
    memory_size_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_cached_bytes: int | None = None
    swap_size_bytes: int | None = None
    swap_used_bytes: int | None = None


class HealthReasonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Why a GPU is degraded or failed: a reason of `pacecar_gpu_health_reason`, its figure in words, and a remedy."""

    reason: str
    verdict: str
    words: str
    remedy: str


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG instance: each figure is the metric `pacecar_gpu_instance_<field>`."""

    gpu_instance: str
    compute_instance: str
    name: str | None = None
    uuid: str | None = None
    memory_size_bytes: int | None = None
    memory_used_bytes: int | None = None
    processes: int | None = None


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU: each figure is the metric `pacecar_gpu_<field>`; `sm_clock_hertz` is `gpu_clock_hertz` of clock sm.

    Name, UUID and PCI address of a GPU that is down are the last known ones.  `health` is the verdict, with
    `health_reasons`; null if it was not judged.  `throttled_by` are the reasons that hold the clocks down, null if
    unknown; `xid_errors_total` sums all codes; `down_reason` explains an `up` of 0.
    """

    gpu: str
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    up: int | None = None
    down_reason: str | None = None
    health: str | None = None
    health_reasons: tuple[HealthReasonStatus, ...] = ()
    utilization_ratio: float | None = None
    sm_active_ratio: float | None = None
    tensor_active_ratio: float | None = None
    dram_bandwidth_ratio: float | None = None
    memory_size_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    pcie_receive_bytes_per_second: float | None = None
    pcie_transmit_bytes_per_second: float | None = None
    nvlink_receive_bytes_per_second: float | None = None
    nvlink_transmit_bytes_per_second: float | None = None
    processes: int | None = None
    mps_processes: int | None = None
    xid_errors_total: int | None = None
    throttled_by: tuple[str, ...] | None = None
    mig_enabled: int | None = None
    instances: tuple[MigInstance, ...] = ()

    @property
    def identity(self) -> str:
        """Name, PCI address and UUID, as far as known, to find the board."""
        return ", ".join(text for text in (self.name, self.pci_bus_id, self.uuid) if text)


class MissingGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that this node had and that has not been found since the daemon started.

    `gpu` was its index when it was last read, at `seen_time_seconds`.
    """

    gpu: str
    name: str
    uuid: str
    pci_bus_id: str
    seen_time_seconds: float


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface, or one port of an RDMA device as `device/port`.

    Rates are between the last two ticks; `errors_total` sums errors and drops of both directions.
    """

    kind: str
    name: str
    up: int | None = None
    link_bytes_per_second: float | None = None
    receive_bytes_per_second: float | None = None
    transmit_bytes_per_second: float | None = None
    receive_utilization_ratio: float | None = None
    transmit_utilization_ratio: float | None = None
    errors_total: int | None = None


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank; `ledger_seconds` is its last step by heading, `ledger_source` says whether exact or an estimate.

    `ledger_uncalibrated` is why there is no exact window behind it, null if there is one.
    """

    rank: int
    host: str
    pid: int
    device: str
    device_uuid: str | None
    connected: bool
    finished: bool
    step: int | None = None
    step_duration_seconds: float | None = None
    last_record_age_seconds: float | None = None
    ledger_seconds: dict[str, float] | None = None
    ledger_source: str | None = None
    ledger_uncalibrated: str | None = None
    mfu_ratio: float | None = None
    memory_allocated_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    pod_name: str | None = None
    pod_namespace: str | None = None
    slurm_job: str | None = None


class LateRank(msgspec.Struct, frozen=True, kw_only=True):
    """A straggler; `rank` is null where only the cause is known."""

    rank: int | None
    cause: str
    phase: str
    since_step: int
    excess_seconds: float
    evidence: str


class HangStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that ends no step, or (`silent`) sends nothing at all while others suspect a hang."""

    rank: int
    suspected: bool
    silent: bool


class TunerView(msgspec.Struct, frozen=True, kw_only=True):
    """What the tuner is doing."""

    state: str
    detail: str
    step: int
    trials: int
    exploration_seconds: float


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One decision and its verdict, if any; `outcome` is null while it is open, and for advice."""

    decision: int
    time_seconds: float
    kind: str | None
    knob: str
    from_value: KnobValue | None
    to_value: KnobValue | None
    step: int
    reason: str
    expected_gain_ratio: float | None
    outcome: str | None = None
    outcome_reason: str | None = None
    measured_gain_ratio: float | None = None


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """One what-if bound: without this cost a step takes at least `step_seconds`, and `bound` says what forbids less."""

    scenario: str
    step_seconds: float
    gain_ratio: float
    bound: str


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """The what-if bounds of the last `steps` steps, each as if only one cost were gone; they do not add up."""

    step: int
    steps: int
    pace_seconds: float
    source: str
    calibration_age_steps: int
    rungs: tuple[Saving, ...]


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job as this node sees it.

    `job` and `launch` together identify it, `title` is its name in commands on this node
    (`pacecar.records.job_identity.titles`), `uid` its owner.

    `ledger_seconds` is where the time of its local ranks went during the last `ledger_window_seconds`, or in the last
    steps while nothing older is known (the window is then null).  `samples_guessed`: a local rank takes the first
    dimension of a tensor for its samples, because their number is not known.  `ranks` has the most interesting ones in
    order, `ranks_left_out` counts the others; `moves` are decisions, newest first.  `hang_verdict` says why
    the job hangs; null while it does not, or where its ranks could not ask each other.
    """

    job: str
    launch: str = ""
    title: str = ""
    uid: int | None = None
    world_size: int | None
    ranks: tuple[Rank, ...]
    ranks_left_out: int
    finished: bool
    step: int | None = None
    pace_seconds: float | None = None
    median_pace_seconds: float | None = None
    samples_per_second: float | None = None
    samples_guessed: bool = False
    tokens_per_second: float | None = None
    mfu_ratio: float | None = None
    last_record_age_seconds: float | None = None
    ledger_seconds: dict[str, float] | None = None
    ledger_window_seconds: float | None = None
    knobs: dict[str, KnobValue] = {}
    stragglers: tuple[LateRank, ...] = ()
    hangs: tuple[HangStatus, ...] = ()
    hang_verdict: str | None = None
    tuner: TunerView | None = None
    moves: tuple[Move, ...] = ()
    what_if: Ladder | None = None

    @property
    def key(self) -> JobKey:
        """The identity of this job."""
        return JobKey(self.job, self.launch)

    @property
    def called(self) -> str:
        """The job's name for people; a daemon older than titles sends only `job`."""
        return self.title or self.job


class CollectorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One collector in the last tick; `reason` also names the rows and numbers that an `ok` one could not read."""

    name: str
    outcome: str
    reason: str | None
    duration_seconds: float | None
    read_failures: int = 0


class RecorderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The flight recorder: each figure is the metric `pacecar_recorder_<field>`; `triggers_total` by trigger."""

    span_seconds: float
    memory_bytes: int
    triggers_total: dict[str, int]
    files_total: int
    files_bytes: int | None = None
    write_failures_total: int
    lost_total: int


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon itself: each figure except `period_seconds` is the metric `pacecar_daemon_<field>`.

    `viewers` counts the pages and terminals that receive each tick.
    """

    pacecar_version: str | None = None
    start_time_seconds: float | None = None
    period_seconds: float
    cpu_utilization_ratio: float | None = None
    cpu_budget_ratio: float | None = None
    resident_memory_bytes: int | None = None
    viewers: int | None = None
    collectors: tuple[CollectorStatus, ...] = ()
    recorder: RecorderStatus | None = None


class StatusDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document of /api/snapshot and of each push; `snapshot_age_seconds` is null before the first tick."""

    version: int
    node: str
    time_seconds: float
    tick: int | None
    snapshot_age_seconds: float | None
    daemon: DaemonStatus
    host: Host
    gpus: tuple[GpuStatus, ...] = ()
    gpus_missing: tuple[MissingGpu, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    jobs_left_out: int = 0


class StatusHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The document of /api/history, the last minutes; `series` is name -> one value per time, null if missing."""

    version: int
    period_seconds: float
    time_seconds: tuple[float, ...]
    series: dict[str, tuple[float | None, ...]]
    series_left_out: int = 0
