"""Finds which host threads train, and which host rows explain why the device had nothing to do.

The ledger of a trace and the causal model of a job both read this, so an instant has the same cause in both.

Threads: on a device job those that launch device work; on a CPU job, or where no launch was recorded, those with step
marks, optimizer steps or data loading, plus autograd's.  A thread that only writes checkpoints does not train: the
operators of an asynchronous checkpoint are not compute.

Causes: an annotated row counts on any thread, because the loop may wait for a thread that launches nothing.  Where
rows overlap, data loading comes first, then operators (they are the work of a CPU job), a checkpoint, a garbage
collection and the optimizer.  The rest is Python between launches (host-bound).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .columns import HostKind, Trace
from .steps import STEP_PREFIX

__all__ = ["HostActivity", "host_activity", "name_starts_with", "training_threads"]

Index = NDArray[np.int64]

LOOP_KINDS = (HostKind.OPTIMIZER, HostKind.LOADER)
"""Rows that only a thread of the training loop has."""

GC_WORDS = ("gc.collect", "garbage", "python gc", "gc:")
"""An annotation with one of these in its name, in lower case, is a garbage collection."""


@dataclass(frozen=True, slots=True)
class HostActivity:
    """Indices into the host rows of a trace.

    `operators` and `collective_calls` are those of the training threads; the causes are on any thread.
    """

    threads: Index
    operators: Index
    collective_calls: Index
    data_wait: Index
    checkpoint: Index
    garbage_collection: Index
    optimizer: Index


def host_activity(trace: Trace) -> HostActivity:
    """Return what the training threads ran, and the rows that say why the device was idle."""
    host = trace.host_rows
    threads = training_threads(trace)
    trains = np.isin(host.thread, threads)
    is_gc = np.array([any(word in name.lower() for word in GC_WORDS) for name in trace.names] or [False])

    return HostActivity(
        threads=threads,
        operators=np.flatnonzero((host.kind == HostKind.OPERATOR) & trains),
        collective_calls=np.flatnonzero((host.kind == HostKind.COLLECTIVE_CALL) & trains),
        data_wait=np.flatnonzero(host.kind == HostKind.LOADER),
        checkpoint=np.flatnonzero(host.kind == HostKind.CHECKPOINT),
        garbage_collection=np.flatnonzero((host.kind == HostKind.ANNOTATION) & is_gc[host.name]),
        optimizer=np.flatnonzero(host.kind == HostKind.OPTIMIZER),
    )


def training_threads(trace: Trace) -> Index:
    """Return the threads that train, as indices into `trace.threads`."""
    host = trace.host_rows
    if trace.has_device:
        launching = np.unique(host.thread[host.kind == HostKind.LAUNCH])
        if len(launching):
            return launching
    is_operator = host.kind == HostKind.OPERATOR
    loop = np.unique(host.thread[np.isin(host.kind, LOOP_KINDS) | name_starts_with(trace, STEP_PREFIX)[host.name]])
    if not np.isin(host.thread[is_operator], loop).any():
        return np.unique(host.thread[is_operator | (host.kind == HostKind.COLLECTIVE_CALL)])
    is_engine = name_starts_with(trace, "autograd::engine::")[host.name]
    return np.union1d(loop, host.thread[is_operator & is_engine])


def name_starts_with(trace: Trace, prefix: str) -> NDArray[np.bool_]:
    """Return for each of `trace.names` whether it starts with `prefix`; one False where there are no names."""
    return np.array([name.startswith(prefix) for name in trace.names] or [False], dtype=np.bool_)
