"""When collectors are read: the tick, the threads, the windows and the daemon's own CPU budget.

In come collectors, out goes one snapshot a tick.
Start with `sampler`; `ticker` keeps time, `window_stats` keeps lowest, mean and highest between two ticks.
"""
