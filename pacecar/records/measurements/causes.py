"""Defines the causes for which something holds a job up, one word for each.

The running job's comparison of ranks and the verdict of `pacecar analyze` use the same words, and so do all that show
them.  Causes that are also headings of the ledger have the heading's name.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Cause"]


class Cause(StrEnum):
    """What takes a rank, a stage, a host or a link longer than its peers."""

    COMPUTE = "compute"
    """Kernels.  On a CPU job the host is the device: all of forward and backward, which timers know and a trace alone
    does not (it has operators)."""
    HOST_BOUND = "host_bound"
    """Python and the framework between launches, or a rank that waits for a processor."""
    DATA_WAIT = "data_wait"
    OPTIMIZER_HOST = "optimizer_host"
    """The optimizer, as the host sees it."""
    CHECKPOINT = "checkpoint"
    LINK = "link"
    THROTTLED = "throttled"
    """Compute on a device that holds its clocks down; a trace does not show clocks and says compute."""
    GC = "gc"
    """Python's garbage collector."""
    EXPOSED_COPY = "exposed_copy"
    """Only in traces, like those below; the running job counts copies with their phase."""
    IMBALANCE = "imbalance"
    """Uneven work: no rank is slow throughout."""
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Cause | None:
        """Read the words of recordings and hooks from before the two vocabularies became one."""
        return {"host": cls.HOST_BOUND, "optimizer": cls.OPTIMIZER_HOST}.get(str(value))
