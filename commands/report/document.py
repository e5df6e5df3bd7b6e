"""Defines the report's document: what `--json` prints, and what page and tables are drawn from; it is public.

Durations are nanoseconds, rates a second, ratios 0..1, energies joules; None is what was not measured or cannot be
known.  Fields are added and not renamed; `schema_version` rises when one changes its meaning.
"""

from __future__ import annotations

import msgspec

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
    """One stretch of the run; steps as (life, step).

    `rate` spreads over `windows` of `window_steps` steps, in the report's `rate_unit`; `is_stable` says whether its
    standard deviation is at most 2 % of its mean (None: too few windows), `drift_ratio` how much its second half
    differs from the first.  `ledger_ns` is a mean step of a mean rank.  Percentiles of step times are within 0.25 %.
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
    """A decision and what became of it.  Gains are shares of step time; None: not known, or no verdict.

    `is_in_force`: kept, in the last start of the job that kept any, and the job ended at what it led to.
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
    """One quantity before and after tuning (of the whole run in `before`, where nothing was turned).

    `unit` is ratio, bytes, bytes_per_second, watts, celsius or flops_per_second; `source` says who measured it.
    """

    name: str
    label: str
    unit: str
    source: str
    before: Stat | None
    after: Stat | None


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did and recorded; `slowest_ratio` is the share of common steps in which it was the last.

    `uncalibrated` is why no exact window was behind its ledger to the end.
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
    """A straggler: from `since_step` to `last_step`, worst `excess_ns` a step; `lost_ns` is excess times steps."""

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
    """A rank whose process did not run for `stopped_ns` from `wall_ns` on; `cause` is the kernel's, None if unknown."""

    life: int
    rank: int
    step: int
    phase: str
    wall_ns: int
    stopped_ns: int
    cause: str | None


class ReportHang(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that ended no step for `silent_ns` from `wall_ns` on, in `phase`."""

    life: int
    rank: int
    step: int
    phase: str
    wall_ns: int
    silent_ns: int
    last_collective: str | None
    is_over: bool


class ReportOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """pacecar's own time over the wall time of all steps and ranks, the worst rank's, and what was allowed.

    `is_jobs_budget`: that is what the job allowed; else its records do not say, and it is what the configuration on the
    reading machine allows.  `exploration_ns` is what the tuner charged to its exploration budget: only stretches that
    lost.  `trials_ns` is the sum of the changes' own `exploration_ns`, losses and gains.
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
    """Energy of the job's GPUs; `watts` of all `gpus` together, `covered_ns` of the stretch had a recording."""

    source: str
    gpus: int | None
    watts: float | None
    joules_per_step: float | None
    joules_per_sample: float | None
    joules_per_token: float | None
    covered_ns: int | None = None


class CostSide(msgspec.Struct, frozen=True, kw_only=True):
    """What one stretch's pace costs."""

    per_hour: float
    per_million_samples: float | None
    per_million_tokens: float | None
    per_epoch: float | None
    per_epochs: float | None
    epoch_seconds: float | None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Money, in the currency of `price_per_gpu_hour`; one GPU a rank.  `run` is what the whole run took.

    `saved_ratio` is the share of the price of a sample (of a step where samples are not known) that is saved after
    against before; below zero where it costs more.
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
    """First and last of what the training script reported."""

    first: float | None = None
    last: float | None = None


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the time line from `at_ns` after its start: a mean step of a mean rank, and the job's mean pace."""

    at_ns: int
    rank_steps: int
    ledger_ns: dict[str, int]
    pace_ns: int | None
    rate: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run.  `is_tuned`: a knob was turned; else `before` is all of the run after warm-up and `after` is None.

    `change` is the rate after against before, `change_verdict` and `change_why` what that shows ("faster", "slower",
    "no difference shown", "not decided") and `change_noise_ratio` the largest drift inside either; None without an
    `after`.  `proven_gain_ratio` is the share of step time that the changes in force save together, by their trials;
    its bounds are those of the trials together.
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
    stops: tuple[Stopped, ...] = ()
    estimate_error: EstimateError | None
    overhead: ReportOverhead
    energy_before: Energy | None
    energy_after: Energy | None
    cost: Cost | None
    losses: ReportLosses | None
    line_start_wall_ns: int | None
    line_width_ns: int
    line: tuple[Piece, ...]


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run against the first one: `change` of the rate in the stretch named, and whether it is more than noise.

    `noise_ratio` is the largest drift inside either run, which a difference must exceed as well as its interval zero.
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
