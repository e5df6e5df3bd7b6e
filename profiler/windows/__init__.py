"""Profiles single steps with Kineto (exact windows) and reads them operator by operator into ledgers.

In: rows of torch's profiler and the host timers of the same step.
Out: a `Measurement` (exact ledger, ledgers by phase, collectives) and a check of the estimate against it.
Start at `kineto_window`; `window_price` predicts what a window costs, `window_reader` turns it into a ledger.
"""
