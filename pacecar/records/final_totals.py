"""Completes the totals of a rank's last step record with its Goodbye.

Only one short step in k has a record, whose totals include all steps before it.  The steps after the last record, up to
252 and perhaps most of a short run, are only in the Goodbye.  So totals are shown from the completed record.
"""

from __future__ import annotations

import msgspec

from pacecar.records import Goodbye, StepRecord

__all__ = ["completed"]


def completed(last: StepRecord, goodbye: Goodbye | None) -> StepRecord:
    """Return a rank's last record with the totals of its `goodbye`, if it has any and they are not lower."""
    if goodbye is None or goodbye.totals is None or goodbye.total_steps is None:
        return last
    if goodbye.total_steps < last.total_steps or goodbye.totals.wall_ns < last.totals.wall_ns:
        return last  # the Goodbye is of another start of the job
    samples, tokens, overhead_ns = goodbye.total_samples, goodbye.total_tokens, goodbye.total_overhead_ns
    return msgspec.structs.replace(
        last,
        totals=goodbye.totals,
        total_steps=goodbye.total_steps,
        total_samples=last.total_samples if samples is None else samples,
        total_tokens=last.total_tokens if tokens is None else tokens,
        total_overhead_ns=last.total_overhead_ns if overhead_ns is None else overhead_ns,
    )
