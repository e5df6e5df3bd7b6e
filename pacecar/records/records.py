"""Defines the records that cross from one room to another, from the job to the daemon, or into a run folder.

All are frozen and typed.  Integers of nanoseconds and bytes; `None` where nothing was measured; zero only where zero
was read.

Left out on purpose: behaviour.  A record can check its own invariants and add itself up, no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pacecar.records.commands import (
    Answer,
    Command,
    DumpRequest,
    HealthRequest,
    KnobValue,
    Request,
    TunerChange,
    TunerOrder,
    TunerReport,
)
from pacecar.records.measurements.collectives import BackwardWindow, CollectiveSum, CollectiveWindow
from pacecar.records.measurements.device_utilization import DeviceMemory, Vitals
from pacecar.records.measurements.estimate_check import EstimateCheck
from pacecar.records.measurements.ledger import LEDGER_HEADINGS, Ledger
from pacecar.records.measurements.what_if import Bound, Rung, WhatIf
from pacecar.records.ranges import (
    ENTRIES_MAX,
    TEXTS_MAX,
    Count,
    EValue,
    Gain,
    KnobValues,
    Label,
    Nanoseconds,
    Pid,
    PositiveCount,
    Rank,
    Ratio,
    SignedNanoseconds,
    Text,
    WorldSize,
)

__all__ = [
    "LEDGER_HEADINGS",
    "PHASES_OF_JOBS",
    "Absent",
    "Answer",
    "BackwardWindow",
    "Bound",
    "CollectiveSum",
    "CollectiveWindow",
    "Command",
    "Decision",
    "DeviceMemory",
    "DumpRequest",
    "EstimateCheck",
    "Failed",
    "Goodbye",
    "HangSuspicion",
    "HealthRequest",
    "HelloRefused",
    "JobHello",
    "JobLedger",
    "JobRecord",
    "KnobSwitch",
    "KnobValue",
    "Knobs",
    "Ledger",
    "Ok",
    "Outcome",
    "ProcessStop",
    "Request",
    "Rung",
    "Sample",
    "Snapshot",
    "StepRecord",
    "StopCause",
    "Straggler",
    "Throttling",
    "TunerChange",
    "TunerOrder",
    "TunerReport",
    "TunerStatus",
    "Uncalibrated",
    "Verdict",
    "Vitals",
    "WhatIf",
]


# --- of the host: from collectors to the daemon's state -----------------------------------------


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One number that was read.  It exists only if it was read.

    `metric` is a name in the catalog, `labels` the values of that metric's labels in its order, and `value` is in
    the metric's *inside* unit (nanoseconds, bytes, milliwatts ...); the exporter alone converts.
    """

    metric: str
    labels: tuple[str, ...]
    value: int | float


class Ok(msgspec.Struct, frozen=True, tag="ok"):
    """The collector read its source; `samples` may still lack what the source did not offer.

    `read_failures` rows or numbers are there and could not be read, or cannot be true, and cost only themselves;
    `reason` names them, and is empty without any.
    """

    samples: tuple[Sample, ...]
    read_failures: int = 0
    reason: str = ""


class Absent(msgspec.Struct, frozen=True, tag="absent"):
    """There is nothing of that kind here, which is healthy: no GPU, no such file.  `reason` says what was missing."""

    reason: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The source is there and could not be read, or a GPU is down.  `samples` are those that were read all the same.

    `read_failures` counts single numbers beside that, as in `Ok`.
    """

    reason: str
    samples: tuple[Sample, ...] = ()
    read_failures: int = 0


Outcome = Ok | Absent | Failed


class Snapshot(msgspec.Struct, frozen=True, dict=True):
    """One tick of the daemon.

    `started_ns` is monotonic, `wall_ns` names the instant, `lateness_ns` is how much later than planned the tick
    began; `outcomes` and `durations_ns` are keyed by the collector's name.
    """

    tick: int
    started_ns: int
    wall_ns: int
    lateness_ns: int
    outcomes: dict[str, Outcome]
    durations_ns: dict[str, int]

    def samples(self) -> tuple[Sample, ...]:
        """Return what was read in this tick, in collector order; made once, however many ask."""
        return self._samples

    def of(self, metric: str) -> Sequence[Sample]:
        """Return the samples of `metric`; made once for all metrics, because each part of the daemon needs a few."""
        return self._by_metric.get(metric, ())

    @cached_property
    def _samples(self) -> tuple[Sample, ...]:
        read = (outcome.samples for outcome in self.outcomes.values() if not isinstance(outcome, Absent))
        return tuple(chain.from_iterable(read))

    @cached_property
    def _by_metric(self) -> dict[str, list[Sample]]:
        found: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in self._samples:
            found[sample.metric].append(sample)
        return found


# --- of the job: from the hook to daemon and run folder -----------------------------------------


class Knobs(msgspec.Struct, frozen=True):
    """The settings in force.  `epoch` counts the switches since attach; ranks of one job must agree on it."""

    epoch: Count = 0
    values: KnobValues = {}


class JobHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Which rank sends: the first frame of every connection.

    `interface` is what the rank's collectives go through; None: unknown, or they bypass the kernel.  `hears_signals`
    asks the daemon for HostSignals.  `slurm_job`, `pod_name` and `pod_namespace` are what its environment says.
    `launch` with `job` is the job's identity (`pacecar.records.job_identity`); empty: not known.  `overhead_budget` is
    the share of wall time that the job allows pacecar; None: the hook did not say.
    """

    job: Label
    rank: Rank
    local_rank: Rank
    world_size: WorldSize
    pid: Pid
    host: Label
    device: Label
    device_uuid: Label | None = None
    backend: Label | None = None
    framework: Label
    pacecar_version: Label
    parallel: Annotated[dict[Label, PositiveCount], Meta(max_length=ENTRIES_MAX)] = {}
    started_wall_ns: Nanoseconds
    interface: Label | None = None
    hears_signals: bool = False
    slurm_job: Label | None = None
    pod_name: Label | None = None
    pod_namespace: Label | None = None
    launch: Label = ""
    overhead_budget: Ratio | None = None


Uncalibrated = Literal["off", "unavailable", "warming_up", "price", "profiler"]
"""Why a ledger has no exact window behind it: the user wants none, this torch has none, it is too early, one would cost
more than the budget has earned, or a profiler of the script's own was on whenever one was due."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One optimizer update of one rank.

    Phases (`data_wait_ns` ... `optimizer_ns`) are host timers; None where the hook could not see that phase.  `source`
    says whether `ledger` was attributed from a profiled window ("exact") or estimated from host timers
    ("estimate", calibrated by the window `calibration_age_steps` ago; None: never calibrated).  `totals` adds up every
    step since attach, so a reader that lost records still has right counters.  `overhead_ns` is pacecar's own
    time on the step path inside this step's wall time.  `disturbed` says that pacecar's window slowed this
    step on this rank: it was profiled, or the window of the step before was opened, ended or read inside it.  Such a
    step's pace says nothing about the job's settings.  `measured_every` k: steps are so short that only one in k is
    measured and has a record; the others are in the totals, with their wall time and this one's proportions.  None:
    the hook has turned itself off, and this is its last record.  `uncalibrated` says why there is no exact window yet,
    None after the first; `window_price_ns` what that one is expected to cost, None where nobody knows.
    `samples_guessed`: neither the script nor a batch sampler said how many `samples` there are; they are the first
    dimension of a tensor, which is right for most batches, and for some is time or tokens.
    """

    job: Label
    rank: Rank
    step: Count
    ended_wall_ns: Nanoseconds
    wall_ns: Nanoseconds
    data_wait_ns: Nanoseconds | None
    forward_ns: Nanoseconds | None
    backward_ns: Nanoseconds | None
    optimizer_ns: Nanoseconds | None
    micro_batches: Count | None
    samples: Count | None
    tokens: Count | None
    ledger: Ledger
    source: Literal["exact", "estimate"]
    calibration_age_steps: Count | None
    totals: Ledger
    total_steps: Count
    total_samples: Count | None
    total_tokens: Count | None
    overhead_ns: Nanoseconds
    total_overhead_ns: Nanoseconds
    total_windows: Count
    dropped_records: Count
    knobs: Knobs
    disturbed: bool = False
    samples_guessed: bool = False
    measured_every: PositiveCount | None = 1
    uncalibrated: Uncalibrated | None = None
    window_price_ns: Nanoseconds | None = None


class KnobSwitch(msgspec.Struct, frozen=True, kw_only=True, tag="switch"):
    """A knob was turned on one rank, at the boundary after `step`; `duration_ns` is what the call itself took."""

    job: Label
    rank: Rank
    decision: Count
    epoch: Count
    step: Count
    knobs: Knobs
    duration_ns: Nanoseconds


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag="decision"):
    """The controller wants `knob` at `to_value`.

    `expected_gain_ratio` is the fraction of step time that the model says is saved (0.1: steps take 10 % less
    time); None when the model cannot tell.  A "trial" is measured and then kept or taken back; "advise" turns
    nothing.
    """

    job: Label
    decision: Count
    kind: Literal["trial", "advise"]
    knob: Label
    from_value: KnobValue
    to_value: KnobValue
    step: Count
    wall_ns: Nanoseconds
    reason: Text
    expected_gain_ratio: Gain | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """What became of a decision.

    `measured_gain_ratio` has `gain_low` and `gain_high` as its bounds, each valid at every look at the stated
    false-accept rate; None when nothing was measured.
    `trial_steps` ran during the trial, `exploration_ns` is the time the trial cost against the old setting
    (negative when it gained).  `evidence` is the e-value against "no better".
    """

    job: Label
    decision: Count
    knob: Label
    outcome: Literal["kept", "rolled_back", "barred", "abandoned"]
    step: Count
    wall_ns: Nanoseconds
    measured_gain_ratio: Gain | None
    gain_low: Gain | None
    gain_high: Gain | None
    evidence: EValue | None
    trial_steps: Count
    exploration_ns: SignedNanoseconds
    reason: Text


class TunerStatus(msgspec.Struct, frozen=True, kw_only=True, tag="tuner"):
    """What the tuner of one job is doing; sent on every change of `state` and of `detail`."""

    job: Label
    rank: Rank
    state: Literal["off", "advising", "warming", "screening", "trial", "watching", "frozen"]
    detail: Text
    step: Count
    wall_ns: Nanoseconds
    exploration_ns: SignedNanoseconds
    trials: Count


class Straggler(msgspec.Struct, frozen=True, kw_only=True, tag="straggler"):
    """A rank holds the others up, or does so no longer (`ended`); sent by rank 0.

    `late_rank` is None where only the cause is known (a link that sockets do not show).  `phase` holds the excess,
    `excess_ns` is how much longer a step it takes than the other ranks' median: what the job would gain.
    """

    job: Label
    late_rank: Rank | None
    cause: Literal["compute", "data_wait", "host", "optimizer", "checkpoint", "link", "throttled"]
    phase: Label
    since_step: Count
    step: Count
    wall_ns: Nanoseconds
    excess_ns: SignedNanoseconds
    evidence: Text
    ended: bool = False


PHASES_OF_JOBS = ("data_wait", "forward", "backward", "tail", "optimizer", "checkpoint", "overhead", "stopped", "rest")
"""Every key of `JobLedger.total_phases_ns`."""


class JobLedger(msgspec.Struct, frozen=True, kw_only=True, tag="job_ledger"):
    """All ranks of a job together; sent by rank 0.

    `pace_ns` is the mean step of the slowest rank over the last steps up to `step`, `median_ns` that of the median
    rank.  Totals add up all `ranks` and all steps since they met; `total_phases_ns`, by phases of the host's timers,
    sum to `total_wall_ns`.  `total_measured_steps`, of all ranks, is what they rest on: with very short steps hooks
    measure one step in k, and the others count like those.
    """

    job: Label
    ranks: WorldSize
    step: Count
    pace_ns: Nanoseconds
    median_ns: Nanoseconds
    total_steps: Count
    total_wall_ns: Nanoseconds
    total_phases_ns: Annotated[dict[Label, Nanoseconds], Meta(max_length=ENTRIES_MAX)]
    total_measured_steps: Count | None = None


class HangSuspicion(msgspec.Struct, frozen=True, kw_only=True, tag="hang"):
    """This rank has not ended step `step` for `silent_ns`, or has at last (`ended`).

    `phase` is where the training thread is, `stack` its innermost python frames.  `last_collective` is the first
    unfinished one of each process group that torch's flight recorders hold, or the latest where all are finished.
    `collectives` is how many the default group has begun: ranks that differ do not wait for the same one.  None where
    torch does not say.
    """

    job: Label
    rank: Rank
    step: Count
    phase: Label
    wall_ns: Nanoseconds
    silent_ns: Nanoseconds
    last_collective: Text | None
    collectives: Count | None
    stack: Text | None
    ended: bool = False


StopCause = Literal["throttled", "frozen", "preempted", "traced"]
"""Why the kernel says that a process did not run: held back by its control group's CPU quota; frozen with the group;
waiting for a processor that others had; a debugger is attached."""


class ProcessStop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """This rank's process did not run for `stopped_ns` inside step `step`, from `wall_ns` on; sent when it went on.

    `phase` is the host's at that moment.  `cause` None: the kernel does not say; a signal has stopped it, or a debugger
    or freezer that has let go.
    """

    job: Label
    rank: Rank
    step: Count
    phase: Label
    wall_ns: Nanoseconds
    stopped_ns: Nanoseconds
    cause: StopCause | None


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """The hook closes: the job ended or detached.

    The totals are those of the last StepRecord and of the steps that were only counted after it (`final_totals`);
    None where there was no step, and in logs of hooks that did not say them.
    """

    job: Label
    rank: Rank
    reason: Text
    wall_ns: Nanoseconds
    totals: Ledger | None = None
    total_steps: Count | None = None
    total_samples: Count | None = None
    total_tokens: Count | None = None
    total_overhead_ns: Nanoseconds | None = None


CrewRecord = Straggler | JobLedger | HangSuspicion | WhatIf

MeasuredRecord = StepRecord | Vitals | EstimateCheck | CollectiveWindow | ProcessStop

TunerRecord = KnobSwitch | Decision | Verdict | TunerStatus | TunerOrder

JobRecord = JobHello | MeasuredRecord | TunerRecord | CrewRecord | Goodbye
"""What may cross the socket and what a run folder holds."""


# --- from the daemon to its hooks (what people request goes there too, see `pacecar.records.commands`) ----------------


class Throttling(msgspec.Struct, frozen=True, kw_only=True, tag="throttling"):
    """The daemon tells a rank what holds down the clocks of its device; sent when it changes.

    `reasons` are named as in the metric of clock events; empty: nothing does.  None: the daemon does not know any more.
    """

    device_uuid: Label
    reasons: Annotated[tuple[Label, ...], Meta(max_length=TEXTS_MAX)] | None


class HelloRefused(msgspec.Struct, frozen=True, kw_only=True, tag="hello_refused"):
    """The daemon does not show this rank, and why: sent once a connection, for whoever runs the job."""

    reason: Text
