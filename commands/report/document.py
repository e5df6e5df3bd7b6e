"""Defines the report's document: `--json` prints it, and page and tables are drawn from it.  It is public.

Durations are in nanoseconds, rates per second, ratios 0..1, energies in joules; None: not measured, or not known.
Fields are added and never renamed; `schema_version` rises when a field changes its meaning.
"""

from __future__ import annotations

import msgspec

from pacecar.ledger.attempts import JobLife
from pacecar.nccl_inspector import CommunicatorBandwidth
from pacecar.records import KnobValue, WhatIf
from pacecar.run_statistics import EstimateError

from .figures import Interval, Spread
from .reading.notices import Notice

__all__ = [
    "SCHEMA_VERSION",
    "ComparisonRow",
    "Cost",
    "CostSide",
    "Energy",
    "EstimateError",
    "Piece",
    "RankRow",
    "Report",
    "ReportChange",
    "ReportHang",
    "ReportHangVerdict",
    "ReportLosses",
    "ReportOverhead",
    "ReportUtilization",
    "RunComparison",
    "RunSide",
    "Slowdown",
    "Stat",
    "Stopped",
]  # fmt: skip

SCHEMA_VERSION = 1


class RunSide(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of the run; a step is (start of the job, step).

    `rate` is the spread over `windows` of `window_steps` steps, in the report's `rate_unit`.  It `is_stable` if its
    standard deviation is at most 2 % of its mean (None: too few windows); `drift_ratio` compares its second half with
    its first.  `ledger_ns` is a mean step of a mean rank.  Percentiles of step times are accurate to 0.25 %.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    began_wall_ns: int
    ended_wall_ns: int
    steps: int
    windows: int
    window_steps: int
    rate: Spread | None
    is_stable: bool | None
    drift_ratio: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    step_mean_ns: int
    step_p50_ns: int
    step_p95_ns: int
    step_p99_ns: int
    step_max_ns: int
    ledger_ns: dict[str, int]
    communication_ns: int
    overlap_ratio: float | None
    knobs: dict[str, KnobValue]


class ReportChange(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and its outcome.  Gains are shares of step time; None: not known, or no verdict yet.

    `is_in_force`: it was kept in the last start of the job that kept any, and the job ended with its value set.
    """

    life: int
    decision: int
    kind: str
    knob: str
    from_value: KnobValue
    to_value: KnobValue
    step: int
    applied_step: int | None
    verdict_step: int | None
    wall_ns: int
    verdict_wall_ns: int | None
    expected_gain_ratio: float | None
    measured_gain_ratio: float | None
    gain_low: float | None
    gain_high: float | None
    outcome: str | None
    trial_steps: int | None
    exploration_ns: int | None
    is_in_force: bool
    reason: str


class Stat(msgspec.Struct, frozen=True):
    """Mean, standard deviation, lowest and highest of `count` readings."""

    count: int
    mean: float
    sd: float | None
    low: float
    high: float


class ReportUtilization(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity before and after tuning; `before` holds the whole run if no knob was turned.

    `unit` is ratio, bytes, bytes_per_second, watts, celsius or flops_per_second; `source` is ledger, torch or daemon.
    """

    name: str
    label: str
    unit: str
    source: str
    before: Stat | None
    after: Stat | None


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did and recorded; `slowest_ratio` is the share of common steps in which it finished last.

    `uncalibrated` is the reason if its ledger was not based on an exact window at the end.
    """

    rank: int
    host: str | None
    device: str | None
    steps: int
    records: int
    step_mean_ns: int | None
    ledger_ns: dict[str, int]
    slowest_ratio: float | None
    overhead_ratio: float | None
    windows: int
    dropped_records: int
    last_words: str | None
    uncalibrated: str | None = None


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """A straggler from `since_step` to `last_step`: at worst `excess_ns` a step; `lost_ns` is that times the steps."""

    life: int
    rank: int | None
    cause: str
    phase: str
    since_step: int
    last_step: int
    excess_ns: int
    lost_ns: int
    is_over: bool
    evidence: str


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose process did not run for `stopped_ns` from `wall_ns`; `cause` is the kernel's, None if unknown."""

    life: int
    rank: int
    step: int
    phase: str
    wall_ns: int
    stopped_ns: int
    cause: str | None


class ReportHang(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that finished no step for `silent_ns` from `wall_ns`, in `phase`."""

    life: int
    rank: int
    step: int
    phase: str
    wall_ns: int
    silent_ns: int
    last_collective: str | None
    is_over: bool


class ReportHangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why the job hung for `waited_ns` from `wall_ns`, by the accounts of its ranks: a sentence."""

    life: int
    step: int | None
    kind: str
    culprits: tuple[int, ...]
    wall_ns: int
    waited_ns: int
    summary: str
    is_over: bool


class ReportOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """pacecar's share of the wall time of all steps and ranks, that of the worst rank, and the budget.

    `is_jobs_budget`: the budget is the job's own; otherwise the records do not hold it, and it is the one configured on
    the reading machine.  `exploration_ns` is what the tuner charged to its exploration budget, which are losses only.
    `trials_ns` is the sum of `exploration_ns` over the changes, losses and gains.
    """

    ratio: float | None
    worst_ratio: float | None
    worst_rank: int | None
    budget_ratio: float
    is_jobs_budget: bool
    exploration_ns: int | None
    exploration_ratio: float | None
    trials_ns: int | None


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """Energy of the job's GPUs: `watts` of all `gpus` together; a recording covers `covered_ns` of the stretch."""

    source: str
    gpus: int | None
    watts: float | None
    joules_per_step: float | None
    joules_per_sample: float | None
    joules_per_token: float | None
    covered_ns: int | None = None


class PowerPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Steps under one power limit of the job's GPUs, each with its board's `limit_watts`.

    `capped_ratio` is the share of time in which the limit held the clocks down.  The changes are against the highest
    limit in force; None for that one.
    """

    limit_watts: float
    gpus: tuple[str, ...]
    steps: int
    step_ns: float
    joules_per_step: float
    capped_ratio: float | None
    step_change: Interval | None
    energy_change: Interval | None


class CostSide(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of training at the pace of one stretch."""

    per_hour: float
    per_million_samples: float | None
    per_million_tokens: float | None
    per_epoch: float | None
    per_epochs: float | None
    epoch_seconds: float | None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs in the currency of `price_per_gpu_hour`, with one GPU per rank.  `run` is the cost of the whole run.

    `saved_ratio` is the saving per sample (per step if samples are unknown) after against before; negative if it costs
    more.
    """

    price_per_gpu_hour: float
    gpus: int
    epochs: int
    epoch_of: str | None
    before: CostSide | None
    after: CostSide | None
    saved_ratio: float | None
    run: float | None


class ReportLosses(msgspec.Struct, frozen=True, kw_only=True):
    """The first and last loss in `losses.jsonl`, and on held-out text in bits per byte; None where there is none."""

    first: float | None = None
    last: float | None = None
    validation_first: float | None = None
    validation_last: float | None = None


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the time line, `at_ns` after its start: a mean step of a mean rank, and the job's mean pace."""

    at_ns: int
    rank_steps: int
    ledger_ns: dict[str, int]
    pace_ns: int | None
    rate: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run.  If no knob was turned (`is_tuned`), `before` is the whole run after warm-up, and `after` is None.

    `change` is the rate after against before, `change_verdict` what it shows ("faster", "slower", "no difference
    shown", "not decided"), `change_why` the reason, and `change_noise_ratio` the larger drift inside the two; None
    without an `after`.  `proven_gain_ratio` is the share of step time that the changes in force save together according
    to their trials, with the bounds of those trials combined.  `life` charges all time since the first process began,
    over all starts of the job.
    """

    schema_version: int = SCHEMA_VERSION
    pacecar_version: str
    run: str
    job: str
    notices: tuple[Notice, ...]
    world_size: int | None
    ranks_seen: int
    lives: int
    hosts: tuple[str, ...]
    device: str | None
    backend: str | None
    framework: str | None
    recorded_by: str | None
    is_data_parallel: bool
    began_wall_ns: int | None
    duration_ns: int | None
    steps: int
    samples: int | None
    samples_guessed: bool = False
    tokens: int | None
    compared_steps: int
    incomplete_steps: int
    is_sampled: bool
    rate_unit: str
    is_tuned: bool
    before: RunSide | None
    after: RunSide | None
    whole: RunSide | None
    change: Interval | None
    change_verdict: str | None
    change_why: str | None
    change_noise_ratio: float | None
    proven_gain_ratio: float | None
    proven_gain_low: float | None
    proven_gain_high: float | None
    changes: tuple[ReportChange, ...]
    orders: tuple[str, ...]
    tuner: str | None
    ladder: WhatIf | None
    utilization: tuple[ReportUtilization, ...]
    ranks: tuple[RankRow, ...]
    slowdowns: tuple[Slowdown, ...]
    hangs: tuple[ReportHang, ...]
    hang_verdicts: tuple[ReportHangVerdict, ...]
    stops: tuple[Stopped, ...] = ()
    estimate_error: EstimateError | None
    overhead: ReportOverhead
    energy_before: Energy | None
    energy_after: Energy | None
    power: tuple[PowerPoint, ...]
    cost: Cost | None
    losses: ReportLosses | None
    line_start_wall_ns: int | None
    line_width_ns: int
    line: tuple[Piece, ...]
    communicators: tuple[CommunicatorBandwidth, ...] = ()
    life: JobLife | None = None


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run against the first one: the `change` of the rate in `stretch`, and whether it is more than noise.

    `noise_ratio` is the larger drift inside the two runs: a difference counts only if it exceeds that and its interval
    excludes zero.
    """

    run: str
    stretch: str
    rate: float | None
    step_ns: int | None
    change: Interval | None
    noise_ratio: float | None
    verdict: str
    why: str


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Several runs; `rows` compares each with the first in `runs`."""

    schema_version: int = SCHEMA_VERSION
    rate_unit: str
    runs: tuple[Report, ...]
    rows: tuple[ComparisonRow, ...]
    warnings: tuple[str, ...]
