"""Defines the ledger: where wall time went, in headings that sum to it exactly."""

from __future__ import annotations

import msgspec

from pacecar.records.ranges import Nanoseconds

__all__ = ["LEDGER_HEADINGS", "Ledger"]

LEDGER_HEADINGS = (
    "compute",
    "exposed_communication",
    "exposed_copy",
    "data_wait",
    "host_bound",
    "optimizer_host",
    "checkpoint",
    "stopped",
    "unknown",
)
"""The headings that sum to the wall time of a step, in reading order."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where wall time went, in nanoseconds.  The headings sum to `wall_ns` exactly.

    compute                a compute kernel ran (on CPU: an operator on a training thread)
    exposed_communication  communication ran and no compute did
    exposed_copy           only a copy ran
    data_wait, host_bound, optimizer_host, checkpoint    nothing ran, by cause
    stopped                the process had no processor: a signal, a debugger, a frozen group, a quota, other programs
    unknown                time that could not be attributed; never hidden in another heading

    `data_wait_ns` is None if no data loader was seen; waits for data are then in other headings.  A sum of ledgers has
    it if any of them has.
    Not part of the sum: `communication_ns` is all communication, `overlapped_communication_ns` the part under compute;
    `loop_host_ns` is the part of `host_bound_ns` outside forward, backward and optimizer, where the script's own code
    runs (a simulator, logging), which faster launches would not shorten.
    Raises ValueError if the parts do not add up, so that a wrong ledger cannot exist.
    """

    wall_ns: Nanoseconds
    compute_ns: Nanoseconds = 0
    exposed_communication_ns: Nanoseconds = 0
    exposed_copy_ns: Nanoseconds = 0
    data_wait_ns: Nanoseconds | None = 0
    host_bound_ns: Nanoseconds = 0
    optimizer_host_ns: Nanoseconds = 0
    checkpoint_ns: Nanoseconds = 0
    stopped_ns: Nanoseconds = 0
    unknown_ns: Nanoseconds = 0
    communication_ns: Nanoseconds = 0
    overlapped_communication_ns: Nanoseconds = 0
    loop_host_ns: Nanoseconds = 0

    def __post_init__(self) -> None:
        # Written out, because this runs twice per step in the training process.
        compute, exposed, copy, data = (
            self.compute_ns, self.exposed_communication_ns, self.exposed_copy_ns, self.data_wait_ns,
        )  # fmt: skip
        if data is None:
            data = 0
        host, optimizer, checkpoint, stopped, unknown = (
            self.host_bound_ns, self.optimizer_host_ns, self.checkpoint_ns, self.stopped_ns, self.unknown_ns,
        )  # fmt: skip
        total = compute + exposed + copy + data + host + optimizer + checkpoint + stopped + unknown
        least = min(compute, exposed, copy, data, host, optimizer, checkpoint, stopped, unknown)
        if total != self.wall_ns or least < 0:
            raise ValueError(f"ledger parts sum to {total} ns, wall time is {self.wall_ns} ns: {self.parts()}")
        if self.communication_ns != self.exposed_communication_ns + self.overlapped_communication_ns:
            raise ValueError(
                f"communication {self.communication_ns} ns is not exposed {self.exposed_communication_ns} ns"
                f" plus overlapped {self.overlapped_communication_ns} ns"
            )
        if not 0 <= self.loop_host_ns <= host:
            raise ValueError(f"host-bound time of the loop, {self.loop_host_ns} ns, is not a part of {host} ns")
        if self.overlapped_communication_ns < 0:
            raise ValueError(f"overlapped communication is {self.overlapped_communication_ns} ns")

    def parts(self) -> dict[str, int]:
        """Return heading -> nanoseconds, in `LEDGER_HEADINGS` order, without an unknown data wait."""
        parts = {heading: getattr(self, heading + "_ns") for heading in LEDGER_HEADINGS}
        if self.data_wait_ns is None:
            del parts["data_wait"]
        return parts

    @property
    def overlap_ratio(self) -> float | None:
        """Overlapped communication over all communication (0..1); None if there was none."""
        if self.communication_ns == 0:
            return None
        return self.overlapped_communication_ns / self.communication_ns

    def __add__(self, other: Ledger) -> Ledger:
        mine, theirs = self.data_wait_ns, other.data_wait_ns
        return Ledger(
            wall_ns=self.wall_ns + other.wall_ns,
            compute_ns=self.compute_ns + other.compute_ns,
            exposed_communication_ns=self.exposed_communication_ns + other.exposed_communication_ns,
            exposed_copy_ns=self.exposed_copy_ns + other.exposed_copy_ns,
            data_wait_ns=theirs if mine is None else mine if theirs is None else mine + theirs,
            host_bound_ns=self.host_bound_ns + other.host_bound_ns,
            optimizer_host_ns=self.optimizer_host_ns + other.optimizer_host_ns,
            checkpoint_ns=self.checkpoint_ns + other.checkpoint_ns,
            stopped_ns=self.stopped_ns + other.stopped_ns,
            unknown_ns=self.unknown_ns + other.unknown_ns,
            communication_ns=self.communication_ns + other.communication_ns,
            overlapped_communication_ns=self.overlapped_communication_ns + other.overlapped_communication_ns,
            loop_host_ns=self.loop_host_ns + other.loop_host_ns,
        )
