"""Holds the catalog of every metric: its name, unit, labels and meaning.

Start with `catalog`, one row per metric.  `metric` defines a row, `value_ranges` the possible values.

To add a metric, in this order:

1. `pacecar/metrics/catalog.py`: a row in the section of its subject; `WINDOWED` adds its lowest, mean and highest.  For
   hosts and GPUs also `pacecar/metrics/value_ranges.py`: its source and possible values, for a gauge that counts the
   narrowest type of `pacecar/records/ranges.py`.
2. Emit it: in a collector of `monitor/collectors/`, whose docstring names the source; for jobs in
   `monitor/export/job_samples.py`; for the daemon itself in `own_samples` of the part that knows it, which `_parts` in
   `monitor/daemon.py` lists.
3. `dashboards/boards/`: a panel in `job.py`, `node.py` or a module of rows (`node_host.py` for the host; a row is 24
   wide), or a reason in `NOT_DRAWN` of `tests/dashboards/test_dashboards.py`.  If machines may lack it, a row in
   `MAY_BE_MISSING` of `tests/dashboards/test_live_expressions.py`.  Then `make dashboards`.
4. A test source with a number used nowhere else.  Host: `tests/machines/training_host.txt`, with the value and a
   malformed line in `tests/monitor/test_host_collectors.py` (`zeroed` there knows numbers between blanks).  Job:
   `tests/monitor/testimony.py`.  GPU: `tests/monitor/nvml_standin/`.
5. Except for GPUs, run `PACECAR_GOLDEN=write .venv/bin/python -m pytest tests/monitor/test_golden.py` and read the
   difference in `tests/monitor/golden/metrics.txt`.
6. If the page shows it: a field in `pacecar/records/status_document.py`, and a row in `docs/snapshot.md`.  If another
   exporter has it: its row in `docs/coming-from.md`.
"""
