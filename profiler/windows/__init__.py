"""Profiles single steps with Kineto (exact windows) and reads them operator by operator into ledgers.

In: rows of torch's profiler and the host timers of the same step.
Out: a `Measurement` (exact ledger, ledgers by phase, collectives) and a check of the estimate against it.
Start at `kineto_window`; `window_price` predicts the cost of a window from slices (`row_density_probe`), and
`window_reader` turns a window into a ledger: `trace_spans` turns its rows into spans, `device_phases` locates in them
the marks that `timing.cuda_timer` sets on the device, `collective_stats` sums its collectives.  `estimate_check`
measures the error of the estimate, `recording_switch` keeps our calls out of the rows, and `session_pause` decides when
a session may end.
"""
