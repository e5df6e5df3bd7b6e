"""Profiles single steps with Kineto (exact windows) and reads them operator by operator into ledgers.

In: rows of torch's profiler and the host timers of the same step.
Out: a `Measurement` (exact ledger, ledgers by phase, collectives) and a check of the estimate against it.
Start at `kineto_window`; `window_price` predicts what a window costs, from slices (`row_density_probe`), and
`window_reader` turns it into a ledger: `trace_spans` makes spans of its rows, `device_phases` finds in them the marks
that `timing.cuda_timer` sets on the device, `collective_stats` adds up its collectives.  `estimate_check` says how far
off the estimate is; `recording_switch` keeps calls of ours out of the rows, and `session_pause` says when a session may
end.
"""
