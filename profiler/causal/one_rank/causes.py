"""Names the causes that time is charged to in the causal model, and numbers them for columns.

The causes are the headings of the ledger where there is one, so that the job's ledger and a rank's use the same words.
`link` is time on the wire once all ranks have come; `host_bound` is python between launches, and everything short that
the hardware needs between two pieces of work; `unknown` is a start that nothing in the traces explains.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["HOST_CAUSES", "OWN_CAUSES", "Cause"]


class Cause(IntEnum):
    """What a stretch of one rank's time was; columns named `cause` hold these."""

    COMPUTE = 0
    HOST_BOUND = 1
    DATA_WAIT = 2
    OPTIMIZER_HOST = 3
    CHECKPOINT = 4
    EXPOSED_COPY = 5
    GC = 6
    LINK = 7
    BLOCKED = 8  # the host waits for the device: not a cause, what it waits for is
    UNKNOWN = 9
    IMBALANCE = 10  # uneven work: of a finding, never of a stretch

    @property
    def word(self) -> str:
        """The name in the document: compute, host_bound, ..."""
        return self.name.lower()


OWN_CAUSES = (
    Cause.COMPUTE,
    Cause.HOST_BOUND,
    Cause.DATA_WAIT,
    Cause.OPTIMIZER_HOST,
    Cause.CHECKPOINT,
    Cause.EXPOSED_COPY,
    Cause.GC,
)
"""Causes that a rank has by itself, so that its peers' durations are a measure for it."""

HOST_CAUSES = (Cause.HOST_BOUND, Cause.DATA_WAIT, Cause.OPTIMIZER_HOST, Cause.CHECKPOINT, Cause.GC)
