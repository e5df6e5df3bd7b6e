"""Defines what a policy receives and returns: observations of steps, facts about the job, proposals and records.

A policy runs on rank 0 only.  It receives one Observation a step, with the pace of the *slowest* rank, because that is
the pace of the job.  It returns a Proposal (the values to put in force) and records for people.  It never touches
torch, a clock or a process group, so recorded observations replay exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from pacecar.config import TuneConfig
from pacecar.records import BackwardWindow, Decision, Ledger, TunerStatus, Verdict

from .knobs.batch.share_plan import RankWork

__all__ = [
    "BlockCosts",
    "Guard",
    "JobFacts",
    "KnobSpace",
    "NodeView",
    "Observation",
    "Policy",
    "Proposal",
    "Record",
    "RememberedSetting",
    "ShardedBytes",
    "TunerState",
    "absurdity",
    "bounded",
]

Record = Decision | Verdict | TunerStatus

TunerState = Literal["off", "advising", "warming", "screening", "trial", "watching", "frozen"]
"""What a tuner does now, as its status says."""

PACE_NS_MAX = 24 * 3600 * 1_000_000_000
"""A step longer than a day is a broken timer."""


@dataclass(frozen=True, slots=True)
class KnobSpace:
    """One knob that every rank can turn: its value at the start and its possible values, ascending.

    `pacecar.knobs` says what the values mean.  A value in `companions` is tried only together with a setting of another
    knob: (value, other knob, the other's value).
    """

    knob: str
    value: int
    domain: tuple[int, ...]
    companions: tuple[tuple[int, str, int], ...] = ()


def bounded(space: KnobSpace, config: TuneConfig) -> KnobSpace | None:
    """Return the space within the user's bounds, always with the present value; None if nothing can be turned."""
    if space.knob not in config.knobs:
        return None
    low = getattr(config, space.knob + "_min", None)
    high = getattr(config, space.knob + "_max", None)
    domain = tuple(
        value
        for value in sorted(space.domain)
        if value == space.value or ((low is None or low <= value) and (high is None or value <= high))
    )
    return replace(space, domain=domain) if len(domain) > 1 else None


@dataclass(frozen=True, slots=True)
class RememberedSetting:
    """What an earlier job like this one kept: `knobs` saved `gain_ratio`, as `origin` tells people."""

    knobs: dict[str, int]
    gain_ratio: float
    origin: str


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What rank 0's blocks that can be checkpointed cost, measured in one step before tuning.

    The job checkpoints `home` of `count` blocks by itself.  `again_ratio` is what it takes to run all of them again in
    backward, as a share of a step with its own value (an upper bound if that is 0).  `sample_bytes` is what one block
    keeps of one sample until backward, unless it is checkpointed.  None: unknown.
    """

    count: int
    home: int
    again_ratio: float | None
    sample_bytes: int | None


@dataclass(frozen=True, slots=True)
class ShardedBytes:
    """What one rank holds of each FSDP2 module when it is gathered.

    `freeable_bytes` are of the modules that "fsdp_reshard" counts, in order of forward; `other_bytes` of the rest.
    `on_host`: the model is on CPUs.
    """

    freeable_bytes: tuple[int, ...]
    other_bytes: tuple[int, ...]
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What does not change while the job runs.

    `gradient_bytes` holds the size of each synchronized gradient in the order in which backward finishes them (as DDP's
    Reducer recorded it); empty when the model is not under DDP.  `batch_samples` is the number of samples of one rank
    and step, None when unknown.  DDP began with buckets of `bucket_bytes`, the first of them of `first_bucket_bytes`:
    torch makes it 1 MiB if the user names no size, and like the others if they do.  `blocks` is None if activation
    checkpointing cannot be tuned, `sharded` without FSDP2.
    """

    job: str
    world_size: int
    gradient_bytes: tuple[int, ...] = ()
    batch_samples: int | None = None
    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = None
    remembered: RememberedSetting | None = None
    blocks: BlockCosts | None = None
    sharded: ShardedBytes | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """The state of rank 0's node from its daemon's last fresh signal; None for what is not known.

    `link_ratio` is all traffic over the link's rated speed, `headroom_ratio` the share of memory that this rank could
    still take (of the device, or of the host for CPU jobs), `cpu_stalled_ratio` the share of time in which some task
    waited for a processor.
    """

    link_ratio: float | None = None
    headroom_ratio: float | None = None
    cpu_stalled_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """One step of the job.

    `pace_ns` is the slowest rank's wall time.  `values` were in force during the whole step.  The phases and the ledger
    are rank 0's own; `exact` if the ledger came from a profiled window.  A `profiled` step includes the cost of a
    window, a checkpoint or an evaluation on some rank, so its pace must not be judged.  `node` is the node's state when
    the policy sees the step.  `switches` is how many switches every rank's overhead budget covers by then; None if
    nothing limits them.  `collection_ns` is what long garbage collections took of the step, on the rank where they took
    longest; the guard `collection_cost` puts the mean of such steps in its place, None while it is not known.  `works`
    is what a batch costs each rank, in order of rank; None where that is unknown.
    """

    step: int
    wall_ns: int
    values: dict[str, int]
    pace_ns: int
    profiled: bool = False
    ledger: Ledger | None = None
    exact: bool = False
    forward_ns: int | None = None
    backward_ns: int | None = None
    optimizer_ns: int | None = None
    data_wait_ns: int | None = None
    micro_batches: int | None = None
    node: NodeView | None = None
    backward: BackwardWindow | None = None
    switches: int | None = None
    collection_ns: int | None = None
    works: tuple[RankWork, ...] | None = None

    def can_pay_for(self, switches: int) -> bool:
        """Return whether every rank's overhead budget covers this many switches."""
        return self.switches is None or self.switches >= switches


def absurdity(step: Observation, last: Observation | None) -> str | None:
    """Return why an observation cannot be true after the `last` one, or None if it can."""
    if not (math.isfinite(step.pace_ns) and 0 < step.pace_ns <= PACE_NS_MAX):
        return f"step {step.step} was reported to take {step.pace_ns} ns"
    if last is not None and step.step <= last.step:
        return f"step {step.step} came after step {last.step}"
    return None


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a policy wants to be in force on all ranks as soon as they agree.

    The end of a trial is proposed too, even if it changes no value: until then a freeze restores the values from before
    the trial.
    """

    decision: int
    """The number under which the switch is recorded."""
    values: dict[str, int]
    """Knob -> value; other knobs stay as they are."""
    is_trial: bool = False
    """Whether a freeze takes these values back; if not, they are what a freeze restores."""


class Policy(Protocol):
    """Decides which settings are tried and kept.  Calls come in step order, from one thread."""

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Learn what can be turned; called before the first observation, and again after an order to start over.

        `spaces` hold what the user's mode allows, and the values to search from.  After an order, knobs that a person
        set are missing.  Decision numbers and totals go on.  If not `turns_knobs`, the policy only advises.
        """
        ...

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Judge no step from the next call of `advance` on, for `reason`; None releases.  May be repeated.

        A hold takes back what is being tried, and tuning goes on after the release.  One that `is_brief` (an
        evaluation, a checkpoint) leaves knobs and an open trial as they are.
        """
        ...

    def advance(self, observations: Sequence[Observation]) -> tuple[Proposal | None, list[Record]]:
        """Take the steps since the last call; return a proposal, if there is one, and records for people.

        A Proposal is carried out some steps later, or never if the ranks do not agree.  Observations say which values
        are in force; a policy judges by that alone.
        """
        ...

    def is_calm(self) -> bool:
        """Return False to see every step soon even while the status is "watching" or "advising".

        Asked between steps.  Ranks exchange steps less often while this is True and the status is one of those.
        """
        return True

    def wants_window(self) -> bool:
        """Return whether an exact window of the setting in force would help now; asked after `advance`.

        The profiler's budget decides when one comes, if at all.
        """
        return False

    def number(self) -> int:
        """Return a decision number for an order, which is recorded like a decision; 0 from a policy without numbers."""
        return 0

    def disproved(self) -> str | None:
        """Return, once, why the remembered setting does not hold in this job; None if it does or was not tried."""
        return None

    def finish(self, reason: str = "the job ended") -> list[Record]:
        """End, for `reason`: no more steps will come; return verdicts (outcome "abandoned") for what is still open."""
        ...

    @property
    def spent_ns(self) -> float | None:
        """Time lost to exploring so far; None if only its statuses say that."""
        return None


class Guard:
    """Watches what the policy does not, and may overrule it.  The tuner asks each guard, on rank 0 only.

    This base class never objects; a guard overrides the methods that it needs.
    """

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Learn what can be turned; called once, before the policy begins."""

    def pause_reason(self, step: int) -> str | None:
        """Return why tuning must pause at `step`, the last one observed, or None."""
        return None

    def must_act(self) -> bool:
        """Return whether `take_back` must be called even without new steps; asked at every vote."""
        return False

    def is_calm(self) -> bool:
        """Return False while ranks must exchange steps often even though the policy is calm."""
        return True

    def judgeable(self, step: Observation) -> Observation:
        """Return `step` as the policy may see it."""
        return step

    def take_back(self, proposal: Proposal | None, records: list[Record]) -> tuple[Proposal | None, list[Record]]:
        """Return what the policy proposed and recorded, changed if something must be taken back."""
        return proposal, records
