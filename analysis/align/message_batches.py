"""Finds the messages of a batch: the sends and receives that one kernel does at once (`batch_isend_irecv`).

The kernel's metadata say only "coalesced", not even the group; torch and Megatron run their pipelines with such
batches.  But each message has a call of its own, with peer and size, before the batch is launched.  So a call belongs
to the first launch of a send, receive or batch after it.

Pure: columns in, indices out.  Left out: batches launched before the trace began, because it lacks their calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE, HostKind, Trace

__all__ = ["BATCH", "POINT_TO_POINT", "batched_calls"]

POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv"})

BATCH = "coalesced"
"""The operation of a kernel that does several things at once."""

Index = NDArray[np.int64]
Bools = NDArray[np.bool_]


def batched_calls(
    issue_ns: Index, start_ns: Index, is_batch: Bools, is_single: Bools, trace: Trace
) -> tuple[Index, Index]:
    """Return the host rows that are calls of batched messages, and for each the index (of n rows) of its batch.

    `issue_ns` is when the rows were launched, `start_ns` where that is not known; `is_single` marks sends and receives.
    """
    host = trace.host_rows
    is_message = np.array([meta.operation in POINT_TO_POINT for meta in trace.collectives] or [False])
    calls = np.flatnonzero((host.kind == HostKind.COLLECTIVE_CALL) & (host.collective != NONE))
    calls = calls[is_message[host.collective[calls]]]
    launched = np.flatnonzero((is_batch | is_single) & (issue_ns < start_ns))
    launched = launched[np.argsort(issue_ns[launched], kind="stable")]
    at = np.searchsorted(issue_ns[launched], host.start_ns[calls], side="right")
    calls, of = calls[at < len(launched)], launched[at[at < len(launched)]]
    return calls[is_batch[of]], of[is_batch[of]]
