"""What do the rooms say to each other?  Frozen, typed values and nothing else.

Everything that crosses from one room to another, from the job to the daemon or into a run folder is one of
these.  Integers of nanoseconds and bytes; `None` where nothing was measured; zero only where zero was read.

Left out on purpose: behaviour.  A record can check its own invariants and add itself up, no more.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pacecar.accuracy import EstimateCheck
from pacecar.collectives import BackwardWindow, CollectiveSum, CollectiveWindow
from pacecar.ledger import LEDGER_HEADINGS, Ledger
from pacecar.steering import Answer, Command, DumpRequest, KnobValue, Request, TunerChange, TunerOrder, TunerReport
from pacecar.vitals import DeviceMemory, Vitals
from pacecar.whatif import Bound, Rung, WhatIf

__all__ = [
    "LEDGER_HEADINGS",
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
    "JobHello",
    "JobLedger",
    "JobRecord",
    "KnobSwitch",
    "KnobValue",
    "Knobs",
    "Ledger",
    "Ok",
    "Outcome",
    "Request",
    "Rung",
    "Sample",
    "Snapshot",
    "StepRecord",
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


# --- the host road: collectors to board ---------------------------------------------------------


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One number that was read.  It exists only if it was read.

    `metric` is a name in the catalog, `labels` the values of that metric's labels in its order, and `value` is in
    the metric's *inside* unit (nanoseconds, bytes, milliwatts ...); the exporter alone converts.
    """

    metric: str
    labels: tuple[str, ...]
    value: int | float


class Ok(msgspec.Struct, frozen=True, tag="ok"):
    """The collector read its source; `samples` may still lack what the source did not offer."""

    samples: tuple[Sample, ...]


class Absent(msgspec.Struct, frozen=True, tag="absent"):
    """There is nothing of that kind here, which is healthy: no GPU, no such file.  `reason` says what was missing."""

    reason: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The source is there and could not be read.  `samples` are those that were read all the same."""

    reason: str
    samples: tuple[Sample, ...] = ()


Outcome = Ok | Absent | Failed


class Snapshot(msgspec.Struct, frozen=True):
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

    def samples(self) -> list[Sample]:
        """Return what was read in this tick, in collector order."""
        return [
            sample
            for outcome in self.outcomes.values()
            if not isinstance(outcome, Absent)
            for sample in outcome.samples
        ]


# --- the job road: hook to daemon and run folder ------------------------------------------------


class Knobs(msgspec.Struct, frozen=True):
    """The settings in force.  `epoch` counts the switches since attach; ranks of one job must agree on it."""

    epoch: int = 0
    values: dict[str, KnobValue] = {}


class JobHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Who is speaking: the first frame of every connection.

    `interface` is what the rank's collectives go through; None: unknown, or they bypass the kernel.  `hears_signals`
    asks the daemon for HostSignals.  `slurm_job`, `pod_name` and `pod_namespace` are what its environment says.
    """

    job: str
    rank: int
    local_rank: int
    world_size: int
    pid: int
    host: str
    device: str
    device_uuid: str | None = None
    backend: str | None = None
    framework: str
    pacecar_version: str
    parallel: dict[str, int] = {}
    started_wall_ns: int
    interface: str | None = None
    hears_signals: bool = False
    slurm_job: str | None = None
    pod_name: str | None = None
    pod_namespace: str | None = None


Uncalibrated = Literal["off", "unavailable", "warming_up", "price"]
"""Why a ledger has no exact window behind it: the user wants none, this torch has none, it is too early, or one would
cost more than the budget has earned."""


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
    """

    job: str
    rank: int
    step: int
    ended_wall_ns: int
    wall_ns: int
    data_wait_ns: int | None
    forward_ns: int | None
    backward_ns: int | None
    optimizer_ns: int | None
    micro_batches: int | None
    samples: int | None
    tokens: int | None
    ledger: Ledger
    source: Literal["exact", "estimate"]
    calibration_age_steps: int | None
    totals: Ledger
    total_steps: int
    total_samples: int | None
    total_tokens: int | None
    overhead_ns: int
    total_overhead_ns: int
    total_windows: int
    dropped_records: int
    knobs: Knobs
    disturbed: bool = False
    measured_every: int | None = 1
    uncalibrated: Uncalibrated | None = None
    window_price_ns: int | None = None


class KnobSwitch(msgspec.Struct, frozen=True, kw_only=True, tag="switch"):
    """A knob was turned on one rank, at the boundary after `step`; `duration_ns` is what the call itself took."""

    job: str
    rank: int
    decision: int
    epoch: int
    step: int
    knobs: Knobs
    duration_ns: int


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag="decision"):
    """The controller wants `knob` at `to_value`.

    `expected_gain_ratio` is the fraction of step time that the model says is saved (0.1: steps take 10 % less
    time); None when the model cannot tell.  A "trial" is measured and then kept or taken back; "advise" turns
    nothing.
    """

    job: str
    decision: int
    kind: Literal["trial", "advise"]
    knob: str
    from_value: KnobValue
    to_value: KnobValue
    step: int
    wall_ns: int
    reason: str
    expected_gain_ratio: float | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """What became of a decision.

    `measured_gain_ratio` has `gain_low` and `gain_high` as its bounds, each valid at every look at the stated
    false-accept rate; None when nothing was measured.
    `trial_steps` ran during the trial, `exploration_ns` is the time the trial cost against the old setting
    (negative when it gained).  `evidence` is the e-value against "no better".
    """

    job: str
    decision: int
    knob: str
    outcome: Literal["kept", "rolled_back", "barred", "abandoned"]
    step: int
    wall_ns: int
    measured_gain_ratio: float | None
    gain_low: float | None
    gain_high: float | None
    evidence: float | None
    trial_steps: int
    exploration_ns: int
    reason: str


class TunerStatus(msgspec.Struct, frozen=True, kw_only=True, tag="tuner"):
    """What the tuner of one job is doing; sent on every change of `state` and of `detail`."""

    job: str
    rank: int
    state: Literal["off", "advising", "warming", "screening", "trial", "watching", "frozen"]
    detail: str
    step: int
    wall_ns: int
    exploration_ns: int
    trials: int


class Straggler(msgspec.Struct, frozen=True, kw_only=True, tag="straggler"):
    """A rank holds the others up, or does so no longer (`ended`); said by rank 0.

    `late_rank` is None where only the cause is known (a link that sockets do not show).  `phase` holds the excess,
    `excess_ns` is how much longer a step it takes than the other ranks' median: what the job would gain.
    """

    job: str
    late_rank: int | None
    cause: Literal["compute", "data_wait", "host", "optimizer", "checkpoint", "link", "throttled"]
    phase: str
    since_step: int
    step: int
    wall_ns: int
    excess_ns: int
    evidence: str
    ended: bool = False


class JobLedger(msgspec.Struct, frozen=True, kw_only=True, tag="job_ledger"):
    """All ranks of a job together; said by rank 0.

    `pace_ns` is the mean step of the slowest rank over the last steps up to `step`, `median_ns` that of the median
    rank.  Totals add up all `ranks` and all steps since they met; `total_phases_ns`, by phases of the host's timers,
    sum to `total_wall_ns`.  `total_measured_steps`, of all ranks, is what they rest on: with very short steps hooks
    measure one step in k, and the others count like those.
    """

    job: str
    ranks: int
    step: int
    pace_ns: int
    median_ns: int
    total_steps: int
    total_wall_ns: int
    total_phases_ns: dict[str, int]
    total_measured_steps: int | None = None


class HangSuspicion(msgspec.Struct, frozen=True, kw_only=True, tag="hang"):
    """This rank has not ended step `step` for `silent_ns`, or has at last (`ended`).

    `phase` is where the training thread is, `stack` its innermost python frames.  `last_collective` is the latest that
    torch's flight recorder holds, `collectives` how many the default group has begun: ranks that differ do not wait for
    the same one.  None where torch does not say.
    """

    job: str
    rank: int
    step: int
    phase: str
    wall_ns: int
    silent_ns: int
    last_collective: str | None
    collectives: int | None
    stack: str | None
    ended: bool = False


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """The hook closes: the job ended or detached."""

    job: str
    rank: int
    reason: str
    wall_ns: int


CrewRecord = Straggler | JobLedger | HangSuspicion | WhatIf

MeasuredRecord = StepRecord | Vitals | EstimateCheck | CollectiveWindow

TunerRecord = KnobSwitch | Decision | Verdict | TunerStatus | TunerOrder

JobRecord = JobHello | MeasuredRecord | TunerRecord | CrewRecord | Goodbye
"""What may cross the socket and what a run folder holds."""


# --- the way back: the daemon to its hooks (what people ask goes along it too, see `pacecar.steering`) ---------


class Throttling(msgspec.Struct, frozen=True, kw_only=True, tag="throttling"):
    """The daemon tells a rank what holds down the clocks of its device; said when it changes.

    `reasons` are named as in the metric of clock events; empty: nothing does.  None: the daemon does not know any more.
    """

    device_uuid: str
    reasons: tuple[str, ...] | None
