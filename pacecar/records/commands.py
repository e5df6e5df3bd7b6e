"""Defines what people request of a running job and what it answers: requests, commands, answers, orders and reports.

    a person -- Request --> the daemon -- Command --> ranks -- Answer --> the daemon -- Answer --> the person

A decision of the tuner has a forecast and ends in a verdict.  What a person orders has neither, and he wants to know
whether it was done.  So an order is a record of its own, and a report is one message that holds what a person looks for
first: what the tuner does now, what is in force, what was tried and what it was worth.

Left out: how an order is carried out (`pacecar.controller.policy.ordered_policy`), how a report is shown (the command).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pacecar.records.ranges import (
    ENTRIES_MAX,
    TEXTS_MAX,
    Arguments,
    Count,
    Domains,
    Gain,
    KnobInteger,
    KnobIntegers,
    KnobValue,
    Label,
    Nanoseconds,
    Rank,
    Ranks,
    Ratio,
    SignedNanoseconds,
    Text,
    Texts,
    Uid,
)

__all__ = [
    "ORDERS",
    "REPORTED_CHANGES_MAX",
    "REPORTED_ORDERS_MAX",
    "TOO_LATE",
    "Answer",
    "Command",
    "DumpRequest",
    "HealthRequest",
    "KnobValue",
    "Request",
    "TunerChange",
    "TunerOrder",
    "TunerReport",
]

TOO_LATE = "too late"
"""How a rank's refusal begins that was past the steps of a command when it came: who asked may ask again."""

ORDERS = ("freeze", "resume", "set", "rollback")
"""What may be ordered."""

REPORTED_CHANGES_MAX = 16
"""The last changes in a report: more than a screen holds, and 16 reasons stay far below the frame limit."""

REPORTED_ORDERS_MAX = 4
"""The last orders in a report: who looks wants to know who was here before."""


class TunerOrder(msgspec.Struct, frozen=True, kw_only=True, tag="tuner_order"):
    """An order that a person gave the tuner, and its outcome.

    `uid` is who asked, by the daemon's word; None when the daemon did not say.  `values` are the knobs that the order
    named (`set`) or brought back (`rollback`, `freeze`).  "done": all ranks carried it out; "refused" has the reason in
    `detail`.
    """

    job: Label
    action: Literal["freeze", "resume", "set", "rollback"]
    outcome: Literal["done", "refused"]
    uid: Uid | None
    values: KnobIntegers
    step: Count
    wall_ns: Nanoseconds
    detail: Text


class TunerChange(msgspec.Struct, frozen=True, kw_only=True):
    """One decision and what became of it; `outcome` None: it is open, or it is advice."""

    decision: Count
    kind: Literal["trial", "advise"]
    knob: Label
    from_value: KnobInteger
    to_value: KnobInteger
    step: Count
    expected_gain_ratio: Gain | None
    measured_gain_ratio: Gain | None
    outcome: Label | None
    reason: Text


class TunerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A tuner as it is at one moment.

    `began` are the values that the job began with, `by_hand` the knobs that a person set, `refused` knob -> why it is
    not tuned, `advice` what would be done or needs a restart, in sentences, `node` what daemons say of the nodes.
    `exploration_ns` was lost to trials of `elapsed_ns` of training; `budget_ratio` is the share that may be.
    """

    mode: Label
    policy: Label
    state: Label
    detail: Text
    step: Count
    knobs: KnobIntegers
    began: KnobIntegers
    domains: Domains
    by_hand: Texts
    refused: Annotated[dict[Label, Text], Meta(max_length=ENTRIES_MAX)]
    trials: Count
    exploration_ns: SignedNanoseconds
    elapsed_ns: Nanoseconds
    budget_ratio: Ratio
    changes: Annotated[tuple[TunerChange, ...], Meta(max_length=TEXTS_MAX)] = ()
    orders: Annotated[tuple[TunerOrder, ...], Meta(max_length=TEXTS_MAX)] = ()
    advice: Texts = ()
    node: Texts = ()


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """Somebody asks a running job for something; `serial` is the asker's own number and comes back in each answer.

    `ranks` says which ranks are meant, none all of them.
    """

    serial: Count
    job: Label
    action: Label
    arguments: Arguments = {}
    ranks: Ranks = ()


class DumpRequest(msgspec.Struct, frozen=True, kw_only=True, tag="dump_request"):
    """Somebody asks the daemon for a recording of its last minutes; `note` says why, and is written into it."""

    serial: Count
    note: Text = ""


class HealthRequest(msgspec.Struct, frozen=True, kw_only=True, tag="health_request"):
    """Somebody asks the daemon whether its numbers are fresh; the answer is "done", or "refused" with the reason."""

    serial: Count


class Command(msgspec.Struct, frozen=True, kw_only=True, tag="command"):
    """The daemon passes a request on to one rank.

    `at_step` is a step that every rank of the job on this node has still before it, so that all can begin together.
    `uid` is who asked, as the daemon's kernel says.
    """

    number: Count
    action: Label
    at_step: Count
    arguments: Arguments = {}
    uid: Uid | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """What became of a request: from one rank, or from the daemon itself (`rank` is None).

    "accepted" is not the end, the others are.  `number` is the command's, towards the asker the request's serial.
    `ranks` says whom the daemon reached; `expected_ns` when they begin, from now, and `pace_ns` how long a step takes,
    as far as it knows.  `report` is what the tuner was asked for.
    """

    job: Label
    rank: Rank | None
    number: Count
    state: Literal["accepted", "done", "refused"]
    detail: Text
    ranks: Ranks = ()
    report: TunerReport | None = None
    expected_ns: Nanoseconds | None = None
    pace_ns: Nanoseconds | None = None
