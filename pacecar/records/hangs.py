"""Defines what ranks say of themselves while a job hangs, and the verdict on it.

A `RankAccount` is one rank's answer to "what are you doing?": the counters and latest collectives of its process
groups, the stacks of its Python threads, and what the kernel says of its process.  Ranks send it to each other, flight
recorder files are read into it, and the daemon makes one for a rank that cannot answer.  `pacecar.analysis.hang` joins
the accounts of a job into a `HangVerdict`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from pacecar.records.ranges import Bytes, Count, Label, Nanoseconds, Pid, Rank, Ranks, Text, Texts, WorldSize

__all__ = [
    "CallOrder", "CollectiveCall", "Departure", "GroupState", "HangEvidence", "HangKind", "HangVerdict", "ProcessState",
    "RankAccount", "ThreadStack",
]  # fmt: skip

GROUPS_MAX = 256
"""Process groups of one rank; Megatron with tensor, pipeline, expert and context parallelism makes about a hundred."""

CALLS_MAX = 16
"""Calls of one group, the latest: those that are unfinished, and a few before them."""

THREADS_MAX = 64

FRAMES_MAX = 32
"""Frames of one thread, the innermost."""


class HangKind(StrEnum):
    """What the culprits of a hang did, or what is known of it."""

    STOPPED = "stopped"
    """The process is stopped by a signal, frozen with its control group, or held by a debugger."""
    GONE = "gone"
    """The process has ended; it is not known how, or it exited by itself."""
    KILLED = "killed"
    """A signal ended the process."""
    KILLED_FOR_MEMORY = "killed_for_memory"
    """The process has ended, and the kernel has killed one of its control group for want of memory since it lived."""
    NOT_JOINED = "not_joined"
    """The rank is alive and never joined a collective that the others wait in."""
    NOT_FINISHED = "not_finished"
    """The rank joined a collective that the others have finished, and does not finish it: its device or its link."""
    SKIPPED = "skipped"
    """The rank went on to a later collective and left one out."""
    EXTRA = "extra"
    """The rank called a collective that no other rank called."""
    MISMATCHED = "mismatched"
    """The ranks joined one collective with another operation, shape or type."""
    NO_ANSWER = "no_answer"
    """The rank does not answer and nothing is known of its process: its host, its link, or Python's lock."""
    LINK = "link"
    """All ranks joined, and the transfer between some of them does not end; or ranks can no longer be reached."""
    NOBODY = "nobody"
    """No rank is to blame: those that others wait for are all in one place, or no rank waits for another."""
    UNKNOWN = "unknown"
    """It cannot be told; the evidence says why."""


class CollectiveCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call on a process group.

    `number` is its sequence number on that group, of collectives or (`is_p2p`) of sends and receives.  Equal numbers on
    two ranks mean the same collective.  `operation` is torch's profiling name with its backend ("nccl:all_reduce",
    "nccl:recv 2<-3"), `sizes` and `dtypes` are those of its inputs, as torch prints them.
    """

    number: Count
    operation: Label
    sizes: Text = ""
    dtypes: Text = ""
    is_p2p: bool = False
    is_finished: bool = False
    created_ns: Nanoseconds | None = None
    """Wall clock of the calling rank."""
    state: Label = ""
    """In torch's own word: scheduled, started, completed."""


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """One process group as one of its ranks sees it.

    `name` is the same on all ranks of the group; `description` is what people call it ("dp").  Counters are sequence
    numbers of its latest collective so far; None is unknown.  gloo counts no starts.
    """

    name: Label
    description: Label = ""
    ranks: Ranks = ()
    """Ranks of the job that are in it, by their places in it (`new_group(sort_ranks=False)`); empty if unknown."""
    enqueued: Count | None = None
    started: Count | None = None
    completed: Count | None = None
    operations: Count | None = None
    """Torch's own counter: collectives, sends and receives that this rank has begun; tells only whether it moves."""
    calls: Annotated[tuple[CollectiveCall, ...], Meta(max_length=CALLS_MAX)] = ()
    """The latest calls, oldest first; empty where torch has no flight recorder."""


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """The first call that a rank made out of turn, on `group`, where one of `due_group` was due.

    `number` and `operation` are None and empty for a send or receive that torch does not record.  `left_out` is after
    how many calls of the usual order this one would have been due; 0: it would not, or other calls came after it.
    """

    group: Label
    number: Count | None = None
    operation: Label = ""
    due_group: Label
    due_operation: Label
    left_out: Count = 0


class CallOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order in which one rank makes its calls on all groups: `period` calls, again and again, `repeats` times."""

    period: Count
    repeats: Count
    departure: Departure | None = None
    """None: its latest calls are those that were due."""


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """The Python stack of one thread, innermost frame first, each as "loader.py:40 __next__"."""

    name: Label
    frames: Annotated[tuple[Label, ...], Meta(max_length=FRAMES_MAX)]
    is_training: bool = False


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel says of a rank's process (proc_pid_status(5), proc_pid_wchan(5)).

    `state` is the letter of its training thread: R, S, D, T, t, Z, X.  None where nothing could be read.
    """

    pid: Pid
    exists: bool = True
    state: Annotated[str, Meta(max_length=1)] | None = None
    wait_channel: Label | None = None
    tracer_pid: Pid | None = None
    is_frozen: bool = False
    processor_ns: Nanoseconds | None = None
    """Processor time of the training thread so far; two readings tell whether it computes."""
    wakeups: Count | None = None
    """How often the training thread has gone to sleep so far (voluntary_ctxt_switches); it stays the same in a hang."""
    transferred_bytes: Bytes | None = None
    """What the training thread has read and written so far, as a slow save does (proc_pid_io(5), rchar and wchar)."""
    ended_by: Annotated[int, Meta(ge=1, le=127)] | None = None
    """The signal that ended the process, if the kernel still tells."""
    killed_for_memory: bool = False
    """Whether the kernel has killed a process of its control group for memory since it was seen alive."""


class RankAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is doing, by its own word or (`process` alone) by that of others."""

    rank: Rank
    world_size: WorldSize
    host: Label | None = None
    wall_ns: Nanoseconds | None = None
    """When it was taken, on that rank's clock."""
    step: Count | None = None
    phase: Label | None = None
    silent_ns: Nanoseconds | None = None
    """How long no step has ended, and the model has shown no other sign of life."""
    groups: Annotated[tuple[GroupState, ...], Meta(max_length=GROUPS_MAX)] = ()
    stacks: Annotated[tuple[ThreadStack, ...], Meta(max_length=THREADS_MAX)] = ()
    process: ProcessState | None = None
    answered: bool = True
    """False: made for a rank that did not answer in time."""
    problems: Texts = ()
    """What could not be read, and why."""
    patience_ns: Nanoseconds | None = None
    """A silence in this phase is only suspicious from here on, by what this rank has seen in this job."""
    is_cut_off: bool = False
    """Connections to its host were possible, and are no longer."""
    has_left: bool = False
    """Pacecar is closed on this rank, though its process lives."""
    is_in_step: bool | None = None
    """Whether the model has run forward in training since the last step ended, and not in evaluation since."""
    order: CallOrder | None = None
    """None: its calls have no order, or torch has no flight recorder or several."""


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True, tag="hang_verdict"):
    """Why a job hangs: `culprits` hold it up, the other ranks wait.

    No culprits with kind `nobody` means that no rank is to blame, with `unknown` that it cannot be told, and with
    `link` that it is not known between which ranks.  `group` and `collective` are where the others wait, `stack` is
    that of the first culprit's training thread.  `summary` is the sentence for people; `evidence` has what it is based
    on, and what is missing.  With `ended` the job goes on.
    """

    job: Label
    rank: Rank | None
    """The rank that judged; None: the daemon, as no rank says anything."""
    wall_ns: Nanoseconds
    kind: HangKind
    culprits: Ranks
    waiting: Ranks
    waited_ns: Nanoseconds
    group: Label | None = None
    collective: Label | None = None
    stack: Text | None = None
    summary: Text
    evidence: Texts = ()
    step: Count | None = None
    ended: bool = False


class HangEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a verdict is based on, as the judging rank writes it into the run folder.

    `left_out` are ranks whose accounts did not fit; those of culprits come first.
    """

    verdict: HangVerdict
    accounts: tuple[RankAccount, ...]
    left_out: Ranks = ()
