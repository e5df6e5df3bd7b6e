"""Defines the record in which a daemon tells a job the state of its node; the tuner needs it to trust step times.

The daemon sends it every `period_ns` to each connected rank that wants it, also if nothing changed, so silence means
"unknown" and not "all is well".  Rates are the total traffic of the interface that the job uses; only the job knows its
own share.

A record may wait in a socket while its reader is stopped.  So it carries the start of its tick by CLOCK_MONOTONIC,
which all processes of a machine share (clock_gettime(2)).  In another time namespace the clock is shifted
(time_namespaces(7)), and the record looks too old or too new, which counts as unknown.

Left out: conclusions (`pacecar.controller.guards.node_monitor`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pacecar.records.ranges import Bytes, Label, Nanoseconds, Rate

__all__ = ["NAMES_MAX", "HostSignals"]

NAMES_MAX = 16
"""Reasons or faults in one record: more than a GPU has at one time, and few enough for a frame."""

Name = Annotated[str, Meta(max_length=64)]
Names = Annotated[tuple[Name, ...], Meta(max_length=NAMES_MAX)]


class HostSignals(msgspec.Struct, frozen=True, kw_only=True, tag="host_signals"):
    """The node in the daemon's last ticks; None means unknown.

    `taken_ns` is the start of the tick.  `throttled_by` names what holds down the clocks of `device_uuid`, as in
    `Throttling`; it is empty if nothing does.  `faults` are the device's recent faults, in words.  The rates are those
    of `interface`, means over the last period; `link_bytes_per_second` is its rated speed in one direction.  Stalled
    ratios are the share of that period in which some task waited for the resource (PSI).
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
