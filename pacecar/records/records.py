"""Defines the records that pass from one room to another, from the job to the daemon, or into a run folder.

All are frozen and typed, with integers of nanoseconds and bytes.  None means "not measured"; zero is a measured zero.
Records check their own invariants and can be summed, but have no other behaviour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from pacecar.records.hangs import HangVerdict
from pacecar.records.measurements.causes import Cause
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
    GainError,
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
    "Cause",
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
    "HangVerdict",
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
    """One number that was read.

    `metric` is a name in the catalog, `labels` are its label values in the catalog's order, and `value` is in the
    metric's *inside* unit (nanoseconds, bytes, milliwatts ...); only the exporter converts.
    """

    metric: str
    labels: tuple[str, ...]
    value: int | float


class Ok(msgspec.Struct, frozen=True, tag="ok"):
    """The collector read its source; `samples` lacks what the source did not offer.

    `read_failures` counts rows or numbers that could not be read or cannot be true and were left out; `reason` names
    them.
    """

    samples: tuple[Sample, ...]
    read_failures: int = 0
    reason: str = ""


class Absent(msgspec.Struct, frozen=True, tag="absent"):
    """There is nothing to read here, which is healthy: no GPU, no such file.  `reason` says what is missing."""

    reason: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The source exists and could not be read, or a GPU is down.  `samples` are those that were read nevertheless.

    `read_failures` also counts single numbers, as in `Ok`.
    """

    reason: str
    samples: tuple[Sample, ...] = ()
    read_failures: int = 0


Outcome = Ok | Absent | Failed


class Snapshot(msgspec.Struct, frozen=True, dict=True):
    """One tick of the daemon.

    `started_ns` is monotonic, `wall_ns` is the wall time, `lateness_ns` is how much later than planned the tick began;
    `outcomes` and `durations_ns` are keyed by collector.
    """

    tick: int
    started_ns: int
    wall_ns: int
    lateness_ns: int
    outcomes: dict[str, Outcome]
    durations_ns: dict[str, int]
    places: Mapping[str, Sequence[int]] | None = None
    """Metric -> the indices of its samples in `samples()`, if the creator of the snapshot knows them."""

    def samples(self) -> tuple[Sample, ...]:
        """Return the samples of this tick, in collector order."""
        return self._samples

    def of(self, metric: str) -> Sequence[Sample]:
        """Return the samples of `metric`, in order."""
        samples = self._samples
        return [samples[place] for place in self._places.get(metric, ())]

    @cached_property
    def _samples(self) -> tuple[Sample, ...]:
        read = (outcome.samples for outcome in self.outcomes.values() if not isinstance(outcome, Absent))
        return tuple(chain.from_iterable(read))

    @cached_property
    def _places(self) -> Mapping[str, Sequence[int]]:
        if self.places is not None:
            return self.places
        found: defaultdict[str, list[int]] = defaultdict(list)
        for place, sample in enumerate(self._samples):
            found[sample.metric].append(place)
        return found


# --- of the job: from the hook to daemon and run folder -----------------------------------------


class Knobs(msgspec.Struct, frozen=True):
    """The settings in force.  `epoch` counts the switches since attach and is the same on all ranks of a job."""

    epoch: Count = 0
    values: KnobValues = {}


class JobHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The identity of a rank, the first frame of every connection.

    `interface` carries the rank's collectives; None if it is unknown or they bypass the kernel.  `hears_signals` asks
    the daemon for HostSignals.  `slurm_job`, `pod_name` and `pod_namespace` come from the environment.  `job` and
    `launch` together identify the job (`pacecar.records.job_identity`); an unknown launch is empty.  `overhead_budget`
    is the share of wall time that the job allows pacecar; None if the hook did not send it.

    `attempt` counts the restarts of the job that its launchers, or the user, have told it of; None: none tells.
    `process_wall_ns` is when the process began, `rendezvous_wall_ns` when its first process group existed.
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
    attempt: Count | None = None
    process_wall_ns: Nanoseconds | None = None
    rendezvous_wall_ns: Nanoseconds | None = None


Uncalibrated = Literal["off", "unavailable", "warming_up", "price", "profiler"]
"""Why a ledger has no exact window behind it: windows are off, this torch has none, it is too early, a window would
cost more than the budget has earned, or the script's own profiler was on whenever a window was due."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One optimizer update of one rank.

    Phases (`data_wait_ns` ... `optimizer_ns`) are host timers; None if the hook could not see that phase.

    source               "exact": `ledger` comes from a profiled window; "estimate": from host timers, calibrated by the
                         window `calibration_age_steps` ago (None: never calibrated)
    totals               sums of all steps since attach, so that lost records do not affect counters
    overhead_ns          pacecar's own time on the step path, inside this step's wall time
    disturbed            pacecar's window slowed this step: the step was profiled, or the window of the step before was
                         opened, ended or read in it; its pace does not reflect the job's settings
    measured_every       only one step in k is measured and has a record, because steps are so short; the others are in
                         the totals, with their wall time and this step's proportions.  None: the hook has turned itself
                         off, and this is its last record
    uncalibrated         why there is no exact window yet; None after the first
    window_price_ns      the expected cost of the first window; None if unknown
    samples_guessed      neither the script nor a batch sampler gave the number of samples: it is the first dimension of
                         a tensor, which for some batches is time or tokens
    gc_ns                how long Python's garbage collector stopped this process in the step; `total_gc_ns`: since
                         attach.  It is part of the phases and headings.  None: not timed
    global_step          how many updates the whole training has had after this one, over all restarts; None: unknown
    saved_steps          how many of `total_steps` the last finished checkpoint holds; None: none was seen
    total_evaluation_ns  how long evaluations lasted, from their first forward to the next one in training, checkpoints
                         between the two left out; those during steps without a record are not seen
    total_compile_ns     how long torch.compile compiled since attach; part of the phases and headings.  None: not timed
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
    gc_ns: Nanoseconds | None = None
    total_gc_ns: Nanoseconds | None = None
    global_step: Count | None = None
    saved_steps: Count | None = None
    total_evaluation_ns: Nanoseconds | None = None
    total_compile_ns: Nanoseconds | None = None


class KnobSwitch(msgspec.Struct, frozen=True, kw_only=True, tag="switch"):
    """A knob was turned on one rank, at the boundary after `step`; the call took `duration_ns`."""

    job: Label
    rank: Rank
    decision: Count
    epoch: Count
    step: Count
    knobs: Knobs
    duration_ns: Nanoseconds


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag="decision"):
    """The controller wants `knob` at `to_value`.

    `expected_gain_ratio` is the forecast saving as a fraction of step time (0.1: steps take 10 % less time), and
    `expected_gain_error` its standard error; None without a forecast, or for a lower bound.  Knobs that are tried
    together have a decision each, with the forecast of all; `expected_share_ratio` is this knob's part of it.
    A "trial" is measured and then kept or taken back; "advise" turns nothing.
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
    expected_gain_error: GainError | None = None
    expected_share_ratio: Gain | None = None


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
    """What the tuner of one job is doing; sent on every change of `state` or `detail`."""

    job: Label
    rank: Rank
    state: Literal["off", "advising", "warming", "screening", "trial", "watching", "frozen"]
    detail: Text
    step: Count
    wall_ns: Nanoseconds
    exploration_ns: SignedNanoseconds
    trials: Count


class Straggler(msgspec.Struct, frozen=True, kw_only=True, tag="straggler"):
    """A rank holds the others up, or no longer does (`ended`); sent by rank 0.

    `late_rank` is None where only the cause is known.  The excess lies in `phase`; `excess_ns` is how much longer the
    rank's step takes than the other ranks' median, as a mean over the late ranges: what the job would gain.
    """

    job: Label
    late_rank: Rank | None
    cause: Cause
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
    rank.  Totals are sums over all `ranks` and all steps since they met; `total_phases_ns`, by phase of the host
    timers, sum to `total_wall_ns`.  They are based on `total_measured_steps`, because hooks measure only one very short
    step in k and count the others like it.
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
    """This rank has not ended step `step` for `silent_ns`, or has ended it at last (`ended`).

    `phase` is the phase of the training thread, `stack` its innermost Python frames.  `last_collective` is the first
    unfinished collective of each process group in torch's flight recorders, or the latest if all are finished.
    `collectives` is how many the default group has started; ranks with different numbers wait for different ones.  None
    if torch does not tell.
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
"""Why a process did not run, according to the kernel: held back by the CPU quota of its control group; frozen with the
group; waiting for a processor that others used; stopped by a debugger."""


class ProcessStop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """This rank's process did not run for `stopped_ns` in step `step`, from `wall_ns` on; sent when it continued.

    `phase` is the host's phase at that moment.  `cause` is None if the kernel does not tell: a signal stopped the
    process, or a debugger or freezer that has since released it.
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

    The totals include the last StepRecord and the steps after it that were only counted (`final_totals`); None if there
    was no step, or if an older hook did not send them.
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


CrewRecord = Straggler | JobLedger | HangSuspicion | HangVerdict | WhatIf

MeasuredRecord = StepRecord | Vitals | EstimateCheck | CollectiveWindow | ProcessStop

TunerRecord = KnobSwitch | Decision | Verdict | TunerStatus | TunerOrder

JobRecord = JobHello | MeasuredRecord | TunerRecord | CrewRecord | Goodbye
"""Records that a job sends over the socket and writes to a run folder."""


# --- from the daemon to its hooks (see also `pacecar.records.commands`) -----------------------------------------------


class Throttling(msgspec.Struct, frozen=True, kw_only=True, tag="throttling"):
    """What holds down the clocks of a rank's device; sent by the daemon when it changes.

    `reasons` are named as in the metric of clock events and empty if there are none; None: the daemon no longer knows.
    """

    device_uuid: Label
    reasons: Annotated[tuple[Label, ...], Meta(max_length=TEXTS_MAX)] | None


class HelloRefused(msgspec.Struct, frozen=True, kw_only=True, tag="hello_refused"):
    """Why the daemon does not show this rank; sent once per connection, for the owner of the job."""

    reason: Text
