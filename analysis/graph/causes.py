"""Defines the causes that the causal model charges time to, numbered for columns.

A cause has the name of the ledger's heading where there is one.  `link` is time on the wire after all ranks arrived;
`host_bound` is python between launches, and the short times that the hardware needs between two pieces of work;
`unknown` is a start that nothing in the traces explains.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["OWN_CAUSES", "CauseCode"]


class CauseCode(IntEnum):
    """What a stretch of one rank's time was, as a number; columns named `cause` hold these."""

    COMPUTE = 0
    HOST_BOUND = 1
    DATA_WAIT = 2
    OPTIMIZER_HOST = 3
    CHECKPOINT = 4
    EXPOSED_COPY = 5
    GC = 6
    LINK = 7
    BLOCKED = 8  # the host waits for the device; what it waits for is the cause
    UNKNOWN = 9
    IMBALANCE = 10  # uneven work: of a finding, never of a stretch

    @property
    def word(self) -> str:
        """The name in the document: that of `pacecar.records.CauseCode`, or blocked."""
        return self.name.lower()


OWN_CAUSES = (
    CauseCode.COMPUTE,
    CauseCode.HOST_BOUND,
    CauseCode.DATA_WAIT,
    CauseCode.OPTIMIZER_HOST,
    CauseCode.CHECKPOINT,
    CauseCode.EXPOSED_COPY,
    CauseCode.GC,
)
"""Causes of a rank's own time, which can be compared with its peers'."""
