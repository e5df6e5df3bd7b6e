"""Defines what a policy receives and returns: observations of steps, facts of the job, requested knob values.

A policy runs on rank 0 only.  It receives one Observation a step, with the pace of the *slowest* rank, because that is
the pace of the job.  It returns a TuningTurn (a request to bring the knobs to these values) and records for people.
It never touches torch, a clock or a process group, so recorded observations replay exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pacecar.config import TuneConfig
from pacecar.records import BackwardWindow, Decision, Ledger, TunerStatus, Verdict

__all__ = [
    "JobFacts",
    "KnobSpace",
    "NodeView",
    "Observation",
    "Policy",
    "PolicyLayer",
    "TuningTurn",
    "absurdity",
    "bounded",
]

PACE_NS_MAX = 24 * 3600 * 1_000_000_000
"""A step longer than a day is a broken timer."""


@dataclass(frozen=True, slots=True)
class KnobSpace:
    """One knob that every rank is able to turn: its value at the start and the values it may take, ascending.

    What the values mean is said in `pacecar.knobs`.
    """

    knob: str
    value: int
    domain: tuple[int, ...]


def bounded(space: KnobSpace, config: TuneConfig) -> KnobSpace | None:
    """Return the space within the user's bounds, the present value always in; None if nothing can be turned."""
    if space.knob not in config.knobs:
        return None
    low = getattr(config, space.knob + "_min", None)
    high = getattr(config, space.knob + "_max", None)
    domain = tuple(
        value
        for value in sorted(space.domain)
        if value == space.value or ((low is None or low <= value) and (high is None or value <= high))
    )
    return KnobSpace(space.knob, space.value, domain) if len(domain) > 1 else None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What does not change while the job runs.

    `gradient_bytes` holds the size of each synchronized gradient in the order in which they become ready in
    backward (as DDP's Reducer recorded it); empty when the model is not under DDP.  `batch_samples` is the number
    of samples of one rank and step, None when unknown.  DDP came with buckets of `bucket_bytes`, the first
    one of `first_bucket_bytes`: torch makes it 1 MiB where the user names no size, and only then another than the rest.
    """

    job: str
    world_size: int
    gradient_bytes: tuple[int, ...] = ()
    batch_samples: int | None = None
    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """The state of rank 0's node by its daemon's last fresh signal; None for what is not known.

    `link_ratio` is everybody's traffic over the link's rated speed, `headroom_ratio` the share of the memory that this
    rank could still take (the device's, on a CPU the host's), `cpu_stalled_ratio` the share of time in which some task
    waited for a processor.
    """

    link_ratio: float | None = None
    headroom_ratio: float | None = None
    cpu_stalled_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """One step of the job.

    `pace_ns` is the slowest rank's wall time.  `values` were in force during the whole step.  The phases and the
    ledger are rank 0's own, `exact` says whether that ledger came from a profiled window.  A `profiled` step carries a
    window's cost on some rank, a checkpoint's or an evaluation's, so its pace must not be judged.  `node` is what is
    known of the node when the policy sees the step.  `switches` is how many switches every rank could pay for by then
    out of its overhead budget; None: nothing limits them.
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

    def can_pay_for(self, switches: int) -> bool:
        """Return whether every rank's overhead budget covers so many switches."""
        return self.switches is None or self.switches >= switches


def absurdity(step: Observation, last: Observation | None) -> str | None:
    """Return why an observation cannot be true after the `last` one, or None."""
    if not (math.isfinite(step.pace_ns) and 0 < step.pace_ns <= PACE_NS_MAX):
        return f"step {step.step} is said to have taken {step.pace_ns} ns"
    if last is not None and step.step <= last.step:
        return f"step {step.step} came after step {last.step}"
    return None


@dataclass(frozen=True, slots=True)
class TuningTurn:
    """A request to bring the knobs to `values` (every knob named) on all ranks, for `decision`, as soon as they agree.

    `is_trial`: not proven.  If tuning freezes before a turn that is not a trial was carried out, all ranks go back to
    the values before the first trial turn that was.  So the end of a trial is a TuningTurn too, even where it changes
    no value.
    """

    decision: int
    values: dict[str, int] = field(default_factory=dict)
    is_trial: bool = False


class Policy(Protocol):
    """Decides which settings are tried and kept.  Calls come in step order, from one thread."""

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, mode: Literal["advise", "exact"]) -> None:
        """Learn what can be turned; called once, before the first observation.

        `mode` "exact" stands for every mode in which knobs are turned: `spaces` hold what the user's mode allows.
        """
        ...

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Judge no step from the next call of `advance` on, for `reason`; None releases.  May be repeated.

        What is tried meanwhile is taken back and tuning goes on after the release, as after a straggler.  A hold that
        `is_brief` (evaluation, a checkpoint) leaves knobs and an open trial as they are.
        """
        ...

    def advance(
        self, observations: Sequence[Observation]
    ) -> tuple[TuningTurn | None, list[Decision | Verdict | TunerStatus]]:
        """Take the steps since the last call; return the requested turn, if any, and records for people.

        A TuningTurn is carried out some steps later, or never if the ranks do not agree.  Observations say which values
        are in force, and a policy judges by that alone.
        """
        ...

    def is_calm(self) -> bool:
        """Return False while the policy must see every step soon, although its status does not say that it tries one.

        Asked between steps.  While this is True and its status is "watching" or "advising", ranks exchange steps less
        often.
        """
        return True

    def is_urgent(self) -> bool:
        """Return whether `advance` must be called although no step was observed; asked at every vote."""
        return False

    def wants_window(self) -> bool:
        """Return whether an exact window of the setting in force would be useful now; asked after `advance`.

        The profiler's budget decides whether and when one comes.
        """
        return False

    def finish(self, reason: str = "the job ended") -> list[Decision | Verdict | TunerStatus]:
        """End, for `reason`: no more steps will come; return verdicts (outcome "abandoned") for what is still open."""
        ...

    @property
    def spent_ns(self) -> float | None:
        """Time lost to exploring so far; None: its statuses alone say that."""
        return None


class PolicyLayer(Policy):
    """Passes everything on to `policy`: what stands around a policy overrides what it changes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, mode: Literal["advise", "exact"]) -> None:
        """Pass on."""
        self._policy.begin(facts, spaces, mode=mode)

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        """Pass on."""
        self._policy.hold(reason, is_brief=is_brief)

    def advance(
        self, observations: Sequence[Observation]
    ) -> tuple[TuningTurn | None, list[Decision | Verdict | TunerStatus]]:
        """Pass on."""
        return self._policy.advance(observations)

    def is_calm(self) -> bool:
        """Pass on."""
        return self._policy.is_calm()

    def is_urgent(self) -> bool:
        """Pass on."""
        return self._policy.is_urgent()

    def wants_window(self) -> bool:
        """Pass on."""
        return self._policy.wants_window()

    def finish(self, reason: str = "the job ended") -> list[Decision | Verdict | TunerStatus]:
        """Pass on."""
        return self._policy.finish(reason)

    @property
    def spent_ns(self) -> float | None:
        """Pass on."""
        return self._policy.spent_ns
