"""What do people say to a running job, and what does it answer?  The values that go along the asking road.

    a person -- Request --> the daemon -- Command --> ranks -- Answer --> the daemon -- Answer --> the person

A decision of the tuner has a forecast and ends in a verdict; what a person orders has neither, and he wants to know
whether it was done.  So an order is a record of its own, and a report is one message that holds what a person looks for
first: what it does now, what is in force, what was tried and what it was worth.

Left out: how an order is carried out (the controller's overseer) and how a report is shown (the command).
"""

from __future__ import annotations

from typing import Literal, Union

import msgspec

__all__ = [
    "ORDERS",
    "REPORTED_CHANGES_MAX",
    "REPORTED_ORDERS_MAX",
    "Answer",
    "Command",
    "DumpRequest",
    "KnobValue",
    "Request",
    "TunerChange",
    "TunerOrder",
    "TunerReport",
]

KnobValue = Union[int, str]  # noqa: UP007  msgspec resolves it at run time on every Python we support

ORDERS = ("freeze", "resume", "set", "rollback")
"""What may be ordered."""

REPORTED_CHANGES_MAX = 16
"""The last changes in a report: more than a screen holds, and 16 reasons stay far below the frame limit."""

REPORTED_ORDERS_MAX = 4
"""The last orders in a report: who looks wants to know who was here before."""


class TunerOrder(msgspec.Struct, frozen=True, kw_only=True, tag="tuner_order"):
    """A person ordered `action`, and this became of it.

    `uid` is who asked, by the daemon's word; None when the daemon did not say.  `values` are the knobs that the order
    named (`set`) or brought back (`rollback`, `freeze`).  "done": all ranks carried it out; "refused" has the reason in
    `detail`.
    """

    job: str
    action: Literal["freeze", "resume", "set", "rollback"]
    outcome: Literal["done", "refused"]
    uid: int | None
    values: dict[str, int]
    step: int
    wall_ns: int
    detail: str


class TunerChange(msgspec.Struct, frozen=True, kw_only=True):
    """One decision and what became of it; `outcome` None: it is open, or it is advice."""

    decision: int
    kind: Literal["trial", "advise"]
    knob: str
    from_value: int
    to_value: int
    step: int
    expected_gain_ratio: float | None
    measured_gain_ratio: float | None
    outcome: str | None
    reason: str


class TunerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A tuner as it is at one moment.

    `began` are the values that the job began with, `by_hand` the knobs that a person set, `refused` knob -> why it is
    not tuned, `advice` what would be done or needs a restart, in sentences, `node` what daemons say of the nodes.
    `exploration_ns` was lost to trials of `elapsed_ns` of training; `budget_ratio` is the share that may be.
    """

    mode: str
    policy: str
    state: str
    detail: str
    step: int
    knobs: dict[str, int]
    began: dict[str, int]
    domains: dict[str, tuple[int, ...]]
    by_hand: tuple[str, ...]
    refused: dict[str, str]
    trials: int
    exploration_ns: int
    elapsed_ns: int
    budget_ratio: float
    changes: tuple[TunerChange, ...] = ()
    orders: tuple[TunerOrder, ...] = ()
    advice: tuple[str, ...] = ()
    node: tuple[str, ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """Somebody asks a running job for something; `serial` is the asker's own number and comes back in each answer.

    `ranks` says which ranks are meant, none all of them.
    """

    serial: int
    job: str
    action: str
    arguments: dict[str, KnobValue] = {}
    ranks: tuple[int, ...] = ()


class DumpRequest(msgspec.Struct, frozen=True, kw_only=True, tag="dump_request"):
    """Somebody asks the daemon for a recording of its last minutes; `note` says why, and is written into it."""

    serial: int
    note: str = ""


class Command(msgspec.Struct, frozen=True, kw_only=True, tag="command"):
    """The daemon passes a request on to one rank.

    `at_step` is a step that every rank of the job on this node has still before it, so that all can begin together.
    `uid` is who asked, as the daemon's kernel says.
    """

    number: int
    action: str
    at_step: int
    arguments: dict[str, KnobValue] = {}
    uid: int | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """What became of a request: from one rank, or from the daemon itself (`rank` is None).

    "accepted" is not the end, the others are.  `number` is the command's, towards the asker the request's serial.
    `ranks` says whom the daemon reached; `expected_ns` when they begin, from now, and `pace_ns` how long a step takes,
    as far as it knows.  `report` is what the tuner was asked for.
    """

    job: str
    rank: int | None
    number: int
    state: Literal["accepted", "done", "refused"]
    detail: str
    ranks: tuple[int, ...] = ()
    report: TunerReport | None = None
    expected_ns: int | None = None
    pace_ns: int | None = None
