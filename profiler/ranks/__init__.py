"""Compares the ranks of one job: names stragglers and their cause, suspects hangs, computes what-if bounds.

In: each rank's finished steps; the ranks exchange sums and medians of them over a gloo group of our own.
Out: `Straggler`, `HangSuspicion`, `JobLedger` and `WhatIf` records, and log lines.
Start at `rank_monitor.RankMonitor`.
"""
