"""Defines requests to a running job and its replies: requests, commands, answers, orders and reports.

    a person -- Request --> the daemon -- Command --> ranks -- Answer --> the daemon -- Answer --> the person

A decision of the tuner has a forecast and ends in a verdict.  A person's order has neither, but an outcome, so it is a
separate record.  A report is one message with what people look for first: what the tuner is doing, which settings are
in force, what was tried and what it gained.

`pacecar.controller.policy.hand_orders` carries out orders; `commands` shows reports.
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
"""Prefix of a refusal by a rank that had already passed the steps of a command; the request may be repeated."""

ORDERS = ("freeze", "resume", "set", "rollback")
"""The orders that a tuner accepts."""

REPORTED_CHANGES_MAX = 16
"""Changes in a report, the last ones: more than fit on a screen, and far below the frame limit."""

REPORTED_ORDERS_MAX = 4
"""Orders in a report, the last ones: they show who intervened before."""


class TunerOrder(msgspec.Struct, frozen=True, kw_only=True, tag="tuner_order"):
    """An order that a person gave the tuner, and its outcome.

    `uid` is who asked, according to the daemon; None if it did not say.  `values` are the knobs that the order set
    (`set`) or restored (`rollback`, `freeze`).  "done": all ranks carried it out; "refused": `detail` has the reason.
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
    """One decision and its outcome; None while it is open, and for advice."""

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
    """The state of a tuner at one moment.

    `began` are the values at the start of the job, `by_hand` the knobs that a person set, `refused` knob -> why it is
    not tuned, `advice` what the tuner would do or what needs a restart, in sentences, `node` what daemons report about
    the nodes.  `exploration_ns` of `elapsed_ns` of training were lost to trials; `budget_ratio` may be.
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
    """A person's request to a running job; `serial` is the requester's own number, repeated in each answer.

    It is for `ranks`, or for all if that is empty.
    """

    serial: Count
    job: Label
    action: Label
    arguments: Arguments = {}
    ranks: Ranks = ()


class DumpRequest(msgspec.Struct, frozen=True, kw_only=True, tag="dump_request"):
    """A request for a recording of the daemon's last minutes; `note` says why and is stored in it."""

    serial: Count
    note: Text = ""


class HealthRequest(msgspec.Struct, frozen=True, kw_only=True, tag="health_request"):
    """A request whether the daemon's numbers are fresh; the answer is "done", or "refused" with the reason."""

    serial: Count


class Command(msgspec.Struct, frozen=True, kw_only=True, tag="command"):
    """A request that the daemon passes on to one rank.

    No rank of the job on this node has reached `at_step` yet, so all can begin together there.  `uid` is who asked,
    according to the kernel.
    """

    number: Count
    action: Label
    at_step: Count
    arguments: Arguments = {}
    uid: Uid | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The answer to a request, from one rank or from the daemon itself (`rank` is None).

    More answers follow "accepted", but not the others.  `number` is the command's number or, for the requester, the
    serial.  `ranks` are those that the daemon reached; they begin in `expected_ns`, and a step takes `pace_ns`, if
    known.  `report` is the tuner's report if that was requested.
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
