"""Defines the facts of a job: its records, its script and NCCL's log, each only where it was given.

They are apart from `model` because these come from people's files and not from the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pacecar.records import Decision, JobHello, KnobValue, Ledger, Straggler, Vitals, WhatIf

from .evidence import FindingEvidence, Gain

__all__ = ["UNKNOWN", "Call", "Line", "Log", "Run", "Script"]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file of people's: its text and where it is."""

    text: str
    where: str

    def says(self, what: str) -> FindingEvidence:
        """Return it as evidence."""
        return FindingEvidence(what, self.text, self.where)


@dataclass(frozen=True, slots=True)
class Log:
    """What NCCL's log (NCCL_DEBUG=INFO) says.  `transports` is a transport -> its first line, and how many channels."""

    where: str
    version: str | None = None
    network: Line | None = None
    no_rdma: Line | None = None
    transports: Mapping[str, tuple[Line, int]] = field(default_factory=dict)
    warnings: tuple[Line, ...] = ()
    warning_count: int = 0
    hosts: frozenset[str] = frozenset()

    def is_of(self, host: str) -> bool:
        """Return whether `host` wrote in it, as far as the log says; NCCL names hosts up to the first dot."""
        return not self.hosts or host.partition(".")[0] in self.hosts


class _Unknown:
    """A value that a script computes, which cannot be known without running it."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True)
class Call:
    """A call in the script: full dotted name, place, and the keyword arguments that are literals."""

    name: str
    where: str
    text: str
    keywords: Mapping[str, object]
    positional: tuple[object, ...] = ()
    is_open: bool = False
    """Whether *args or **kwargs may give more than is seen here."""

    def says(self, what: str) -> FindingEvidence:
        """Return it as evidence."""
        return FindingEvidence(what, self.text, self.where)

    def lacks(self, keyword: str) -> bool:
        """Return whether the argument is surely not given."""
        return keyword not in self.keywords and not self.is_open


@dataclass(frozen=True, slots=True)
class Script:
    """What stands in the training script; it is parsed and never run."""

    path: str
    calls: tuple[Call, ...] = ()
    names: frozenset[str] = frozenset()
    assigned: tuple[Call, ...] = ()

    def of(self, *endings: str) -> Sequence[Call]:
        """Return the calls of functions with one of these names, whatever they are imported from."""
        return [call for call in self.calls if call.name.rsplit(".", 1)[-1] in endings]

    @property
    def uses_cuda(self) -> bool:
        """Whether it names CUDA at all."""
        return any("cuda" in name for name in self.names)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run folder says, of the last steps that were written.

    `ledger` adds up the last undisturbed steps of all ranks, `steps` of them, as read in `where`; `knobs` are those
    in force on rank 0, `tuner` the state that its tuner told last.
    """

    where: str
    hellos: tuple[JobHello, ...] = ()
    ledger: Ledger | None = None
    steps: int = 0
    pace_ns: int | None = None
    knobs: Mapping[str, KnobValue] = field(default_factory=dict)
    vitals: Mapping[int, Vitals] = field(default_factory=dict)
    total_wall_ns: Mapping[int, int] = field(default_factory=dict)
    ladder: WhatIf | None = None
    stragglers: tuple[Straggler, ...] = ()
    advice: tuple[Decision, ...] = ()
    tuner: str | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether a tuner was at work that turns knobs, and past its warm-up."""
        return self.tuner not in (None, "off", "advising", "warming")

    def share(self, heading: str) -> float | None:
        """Return the share of the step that `heading` takes; None where no ledger has it."""
        if self.ledger is None or self.ledger.wall_ns == 0:
            return None
        part_ns = self.ledger.parts().get(heading)
        return None if part_ns is None else part_ns / self.ledger.wall_ns

    def shows(self, heading: str) -> FindingEvidence:
        """Return a heading's share as evidence."""
        share = self.share(heading)
        text = "unknown" if share is None else f"{share:.1%} of the step, over the last {self.steps} steps of all ranks"
        return FindingEvidence(heading.replace("_", " "), text, self.where)

    def gain(self, rung: str) -> Gain | None:
        """Return the what-if bound `rung`; None where the run has no what-if record, or nothing to gain."""
        if self.ladder is None:
            return None
        for step in self.ladder.rungs:
            if step.name == rung and step.gain_ratio > 0:
                who = "the job" if self.ladder.of_rank is None else f"rank {self.ladder.of_rank}"
                return Gain(step.gain_ratio, f"what-if ladder of {who} at step {self.ladder.step}, rung {rung}")
        return None

    def gain_of(self, heading: str) -> Gain | None:
        """Return a heading's whole share as the bound, for what has no what-if bound of its own."""
        share = self.share(heading)
        return None if share is None or share <= 0 else Gain(share, f"all {heading.replace('_', ' ')} in the ledger")
