"""Defines the facts of a job: its records, its script and NCCL's log, if they were given.

`model` has the facts that come from the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pacecar.records import Decision, JobHello, KnobValue, Ledger, Straggler, Vitals, WhatIf
from pacecar.records.measurements.what_if import AT_MOST

from .evidence import FindingEvidence, Gain

__all__ = ["UNKNOWN", "Call", "Line", "Log", "Run", "Script"]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file, and its place."""

    text: str
    where: str

    def as_evidence(self, what: str) -> FindingEvidence:
        """Return it as evidence."""
        return FindingEvidence(what, self.text, self.where)


@dataclass(frozen=True, slots=True)
class Log:
    """The contents of NCCL's log (NCCL_DEBUG=INFO); `transports` is transport -> (first line, number of channels).

    `slowest_init` is the line of the communicator that took longest to make, its seconds, and the longest part of them.
    """

    where: str
    version: str | None = None
    network: Line | None = None
    no_rdma: Line | None = None
    transports: Mapping[str, tuple[Line, int]] = field(default_factory=dict)
    warnings: tuple[Line, ...] = ()
    warning_count: int = 0
    hosts: frozenset[str] = frozenset()
    slowest_init: tuple[Line, float, str] | None = None

    def is_of(self, host: str) -> bool:
        """Return whether `host` may have written to the log; NCCL cuts host names at the first dot."""
        return not self.hosts or host.partition(".")[0] in self.hosts


class _Unknown:
    """A value that a script computes, unknown without running it."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True)
class Call:
    """A call in the script: full dotted name, place, and literal arguments."""

    name: str
    where: str
    text: str
    keywords: Mapping[str, object]
    positional: tuple[object, ...] = ()
    is_open: bool = False
    """Whether *args or **kwargs may pass more arguments."""

    def as_evidence(self, what: str) -> FindingEvidence:
        """Return it as evidence."""
        return FindingEvidence(what, self.text, self.where)

    def lacks(self, keyword: str) -> bool:
        """Return whether the argument is definitely not passed."""
        return keyword not in self.keywords and not self.is_open


@dataclass(frozen=True, slots=True)
class Script:
    """The contents of the training script, which is parsed and never run."""

    path: str
    calls: tuple[Call, ...] = ()
    names: frozenset[str] = frozenset()
    assigned: tuple[Call, ...] = ()

    def of(self, *endings: str) -> Sequence[Call]:
        """Return the calls of functions with one of these names, from any module."""
        return [call for call in self.calls if call.name.rsplit(".", 1)[-1] in endings]

    @property
    def uses_cuda(self) -> bool:
        """Whether it mentions CUDA."""
        return any("cuda" in name for name in self.names)


@dataclass(frozen=True, slots=True)
class Run:
    """The contents of a run folder, for the last recorded steps.

    `ledger` is the sum of the last `steps` undisturbed steps of all ranks; `knobs` are those in force on rank 0,
    `tuner` is the last state of its tuner; `where` is the folder.  `compile_shares` is rank -> share of the time of its
    last steps for which torch.compile compiled, without ranks that did not.
    """

    where: str
    hellos: tuple[JobHello, ...] = ()
    ledger: Ledger | None = None
    steps: int = 0
    pace_ns: int | None = None
    knobs: Mapping[str, KnobValue] = field(default_factory=dict)
    vitals: Mapping[int, Vitals] = field(default_factory=dict)
    total_wall_ns: Mapping[int, int] = field(default_factory=dict)
    compile_shares: Mapping[int, float] = field(default_factory=dict)
    ladder: WhatIf | None = None
    stragglers: tuple[Straggler, ...] = ()
    advice: tuple[Decision, ...] = ()
    tuner: str | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether a tuner turned knobs after its warm-up."""
        return self.tuner not in (None, "off", "advising", "warming")

    def share(self, heading: str) -> float | None:
        """Return the share of the step that `heading` takes; None if no ledger has it."""
        if self.ledger is None or self.ledger.wall_ns == 0:
            return None
        part_ns = self.ledger.parts().get(heading)
        return None if part_ns is None else part_ns / self.ledger.wall_ns

    def share_evidence(self, heading: str) -> FindingEvidence:
        """Return a heading's share as evidence."""
        share = self.share(heading)
        text = "unknown" if share is None else f"{share:.1%} of the step, over the last {self.steps} steps of all ranks"
        return FindingEvidence(heading.replace("_", " "), text, self.where)

    def gain(self, rung: str) -> Gain | None:
        """Return what the run could gain at most without the cost `rung`; None if nothing, or if it has no bounds."""
        if self.ladder is None:
            return None
        for step in self.ladder.rungs:
            if step.name == AT_MOST + rung and step.gain_ratio > 0:
                who = "the job" if self.ladder.of_rank is None else f"rank {self.ladder.of_rank}"
                return Gain(step.gain_ratio, f"what-if ladder of {who} at step {self.ladder.step}, rung {step.name}")
        return None

    def gain_of(self, heading: str) -> Gain | None:
        """Return a heading's whole share as the bound, for headings without a what-if bound."""
        share = self.share(heading)
        return None if share is None or share <= 0 else Gain(share, f"all {heading.replace('_', ' ')} in the ledger")
