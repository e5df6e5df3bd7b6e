"""Defines orders to all ranks of a job, which its ranks pass on to each other, and what the ranks reply.

    a person -- Request --> the daemon -- Command --> one rank -- JobOrder --> the other ranks
    a person <-- JobAnswer, Answer --  the daemon   <--  one rank  <-- RankReply --  the other ranks

`pacecar.profiler.orders` passes them on, `pacecar.commands` shows them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pacecar.records.commands import TunerReport
from pacecar.records.hangs import HangVerdict
from pacecar.records.ranges import ENTRIES_MAX, Arguments, Count, Label, Nanoseconds, Rank, Text, Uid, WorldSize
from pacecar.records.records import JobLedger, Knobs, Straggler, TunerStatus

__all__ = ["ALL_RANKS", "REPLIES_MAX", "AttemptSoFar", "JobAnswer", "JobNews", "JobOrder", "RankReply"]

ALL_RANKS = "job"
"""The action of a request that one rank passes on to all."""

REPLIES_MAX = 128
"""Replies in one JobAnswer: one with an ordinary detail has 100 to 200 bytes, and a frame 64 KiB."""

LATE_MAX = 16

RANKS_MAX = 4096
"""Replies of one rank for itself and others: those of its subgroup."""


class JobOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order to ranks of a job.

    A rank carries out each `id` once; if it comes again, the rank says how far it is.  `uid` gave the order, by the
    kernel's word to a daemon, to a rank that runs as `rank_uid`.  `at_step` is as in a Command.
    """

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    action: Literal["show", "tune", "trace"]
    arguments: Arguments = {}
    at_step: Count = 0
    uid: Uid | None = None
    rank_uid: Uid


class AttemptSoFar(msgspec.Struct, frozen=True, kw_only=True):
    """Where this attempt's time went since its first process began, as its first rank measured it.

    `headings_ns` are those of `pacecar.ledger.attempts` and sum to `wall_ns`; what stragglers, hangs and trials cost is
    part of other headings.  `unsaved_steps` are in no checkpoint yet; None: no checkpoint was seen.  `global_step`
    counts the whole training.
    """

    attempt: Count | None
    wall_ns: Nanoseconds
    headings_ns: Annotated[dict[Label, Nanoseconds], Meta(max_length=ENTRIES_MAX)]
    global_step: Count | None = None
    unsaved_steps: Count | None = None


class JobNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank knows of the whole job: its latest records.  Most are made on rank 0, verdicts by who judged."""

    ledger: JobLedger | None = None
    late: Annotated[tuple[Straggler, ...], Meta(max_length=LATE_MAX)] = ()
    hang: HangVerdict | None = None
    tuner: TunerStatus | None = None
    attempt: AttemptSoFar | None = None


class RankReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank replies to an order, or ("silent") what another one says of it.

    `silent_ns` is how long it has ended no step; of a silent rank, how long ago it was last heard from, None: never.
    `has_daemon`: whether its records reach a daemon.  `report` is the tuner's if that was asked for.
    """

    rank: Rank
    state: Literal["accepted", "done", "refused", "silent"] = "done"
    detail: Text = ""
    host: Label = ""
    step: Count | None = None
    phase: Label | None = None
    silent_ns: Nanoseconds | None = None
    pace_ns: Nanoseconds | None = None
    knobs: Knobs | None = None
    has_daemon: bool = True
    report: TunerReport | None = None
    news: JobNews | None = None


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="job_answer"):
    """Replies of some ranks of a job of `world_size`, from `rank`, which passed the order on; an Answer ends them."""

    job: Label
    rank: Rank
    number: Count
    world_size: WorldSize
    replies: Annotated[tuple[RankReply, ...], Meta(max_length=REPLIES_MAX)]
