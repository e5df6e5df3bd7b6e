"""Makes the rows of a job's attempt (`attempts`) from what a rank measured between two records."""

from __future__ import annotations

from pacecar.records import Ledger, StepRecord

from .attempts import StepRow

__all__ = ["row_between"]


def row_between(before: StepRecord | None, record: StepRecord, evaluation_ns: int | None = None) -> StepRow | None:
    """Return the steps from `before` (None: from the first) to `record`, with what the rank itself knows of them.

    `evaluation_ns` is what of the evaluations belongs to these steps, by default what the records say; it is cut to
    their length.  None if there are no steps between them, or the record is damaged.
    """
    totals, was = record.totals, Ledger(wall_ns=0) if before is None else before.totals
    steps, wall_ns = record.total_steps - (0 if before is None else before.total_steps), totals.wall_ns - was.wall_ns
    if steps <= 0 or wall_ns < 0:
        return None
    if evaluation_ns is None:
        evaluation_ns = (record.total_evaluation_ns or 0) - (0 if before is None else before.total_evaluation_ns or 0)
    return StepRow(
        ended_ns=record.ended_wall_ns,
        steps=steps,
        wall_ns=wall_ns,
        number=record.global_step,
        parts={
            "checkpoint_save" if before is not None else "checkpoint_restore": totals.checkpoint_ns - was.checkpoint_ns,
            "compilation": max(
                0, (record.total_compile_ns or 0) - (0 if before is None else before.total_compile_ns or 0)
            ),
            "evaluation": min(wall_ns, max(0, evaluation_ns)),
            "data_wait": (totals.data_wait_ns or 0) - (was.data_wait_ns or 0),
            "exposed_communication": totals.exposed_communication_ns - was.exposed_communication_ns,
            "stopped": totals.stopped_ns - was.stopped_ns,
        },
    )
