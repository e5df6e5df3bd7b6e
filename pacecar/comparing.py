"""Defines which steps of a run are compared, before with after: constants for the demo's closing tables and a report.

To compare the first half of a run with the second would count warm-up, trials and switches that still settle.  These
bounds leave them out; `pacecar.commands.demo.summary` and `pacecar.commands.report.before_after` both use them.

Left out: dividing the steps, which the demo does on records in memory and the report while it reads.
"""

from __future__ import annotations

__all__ = ["AFTER_STEPS_MIN", "SETTLE_STEPS", "WARMUP_STEPS", "WINDOW_STEPS"]

WARMUP_STEPS = 10
"""Allocators, caches and DDP's bucket rebuild are warm by then; the tuner's own warm-up is as long."""

SETTLE_STEPS = 2
"""Steps after a switch that still pay for it."""

WINDOW_STEPS = 8
"""Steps in one window of the spread: short enough to have many, long enough to smooth single steps."""

AFTER_STEPS_MIN = 6 * WINDOW_STEPS
"""Fewer since the last switch say more of the machine's last seconds than of the settings; then all steps at the kept
settings count."""
