"""Holds the records that rooms exchange: frozen, typed values, one module per subject.

`records` has the records between job, daemon and command line, and its names are exported here.  `ranges` bounds every
field, `measurements` has what a job measures in its steps, `commands` the requests to a running job, `job_orders` those
that its ranks pass on to each other, `host_signals` what a node's daemon tells its jobs.

Durations are integers of nanoseconds, sizes integers of bytes; None means "not measured".  A `Ledger` whose parts do
not sum to its wall time cannot be made.  `status_document` is for page and terminal, `recording` is the flight
recorder's file, `rank_file` reads a run's `rank<r>.jsonl`, `judged_decision` pairs decisions with verdicts,
`job_identity` distinguishes jobs of one name, `final_totals` completes a rank's totals with its Goodbye.

To add a record that the job sends, in this order:

1. `pacecar/records/records.py`: a struct with its own tag, whose fields have types of `pacecar/records/ranges.py`; its
   name in `__all__` and in its union (`MeasuredRecord`, `TunerRecord`, `CrewRecord`).
2. Send it with `put` of the sinks, in `profiler/hook/step_records.py` or `profiler/ranks/reports.py`, or with `emit` in
   the controller.
3. `monitor/jobs/tracked_job.py`: a `case` in `TrackedJob.add`; if a rank's latest is kept, a row in `LATEST_OF_RANK`
   and a field of `RankView`.  `monitor/ingest/frame_validation.py`: closed sets for labels that name a kind,
   comparisons of values that must agree.
4. `monitor/export/job_samples.py`: its metrics.  `commands/report/reading/run_index.py`: what a report needs of it.
5. `pacecar/wire.py`: raise `VERSION` if an old reader would misunderstand it.  A new field with a default needs no new
   version.
6. `tests/kit/anyrecord.py` draws it unchanged, and so do the tests of ranges, wire and daemon; test the sender.
"""

from __future__ import annotations

from pacecar.records import records
from pacecar.records.records import *  # noqa: F403  `__all__` of that module is the list

__all__ = records.__all__
