"""What does a node's daemon tell a job about the node?  What a tuner has to know before it believes a step time.

One record, said to every connected rank each `period_ns`, also when nothing changed: silence then means that nobody
knows, and not that all is well.  Rates are of the interface that the job's traffic takes, of everybody's traffic
together; what the job itself sends only the job knows.

Left out: who else is on the link, and what to make of it (the controller's `gate`).
"""

from __future__ import annotations

import msgspec

__all__ = ["HostSignals"]


class HostSignals(msgspec.Struct, frozen=True, kw_only=True, tag="host_signals"):
    """The node as the daemon saw it in its last ticks; None for what it does not know.

    `throttled_by` names what holds down the clocks of `device_uuid`, as in `Throttling`; empty: nothing does.  Rates
    are means over the period before; `link_bytes_per_second` is the rated speed, one direction.
    """

    period_ns: int
    device_uuid: str | None = None
    throttled_by: tuple[str, ...] | None = None
    device_free_bytes: int | None = None
    device_total_bytes: int | None = None
    interface: str | None = None
    receive_bytes_per_second: float | None = None
    transmit_bytes_per_second: float | None = None
    link_bytes_per_second: int | None = None
