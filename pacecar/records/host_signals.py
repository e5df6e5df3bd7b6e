"""Defines the record in which a node's daemon tells a job the node's state, which a tuner needs to trust a step time.

The daemon sends it each `period_ns` to every connected rank that wants it, also when nothing changed.  Silence then
means that nobody knows, and not that all is well.  Rates are of the interface that the job's traffic takes, of
everybody's traffic together; what the job itself sends only the job knows.

A record may wait in a socket for as long as its reader is stopped.  So it carries the instant at which its tick began,
by CLOCK_MONOTONIC, which all processes of a machine share (clock_gettime(2)).  In another time namespace it is shifted
(time_namespaces(7)), and then looks too old or too new, which is as good as unknown.

Left out: who else is on the link, and what to conclude from it (`pacecar.controller.guards.node_disturbance`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pacecar.records.ranges import Bytes, Label, Nanoseconds, Rate

__all__ = ["NAMES_MAX", "HostSignals"]

NAMES_MAX = 16
"""Reasons or faults in one record: all that a GPU has at one time, and a frame stays small."""

Name = Annotated[str, Meta(max_length=64)]
Names = Annotated[tuple[Name, ...], Meta(max_length=NAMES_MAX)]


class HostSignals(msgspec.Struct, frozen=True, kw_only=True, tag="host_signals"):
    """The node as the daemon saw it in its last ticks; None for what it does not know.

    `taken_ns` is when the tick began.  `throttled_by` names what holds down the clocks of `device_uuid`, as in
    `Throttling`; empty: nothing does.  `faults` are those that the device had lately, in words.  `interface` names what
    the rates are of; they are means over the period before.  `link_bytes_per_second` is the rated speed, one direction.
    Stalled ratios are the share of that period in which some task waited for the resource (PSI).
    """

    period_ns: Nanoseconds
    taken_ns: Nanoseconds
    device_uuid: Label | None = None
    throttled_by: Names | None = None
    faults: Names | None = None
    device_free_bytes: Bytes | None = None
    device_total_bytes: Bytes | None = None
    interface: Name | None = None
    receive_bytes_per_second: Rate | None = None
    transmit_bytes_per_second: Rate | None = None
    link_bytes_per_second: Bytes | None = None
    host_available_bytes: Bytes | None = None
    host_total_bytes: Bytes | None = None
    memory_stalled_ratio: Rate | None = None
    cpu_stalled_ratio: Rate | None = None
