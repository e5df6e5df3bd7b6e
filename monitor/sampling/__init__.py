"""Decides when collectors are read: the tick, the threads, the windows and the daemon's own CPU budget.

In come collectors (`collector_registry` lists them), out goes one snapshot a tick.  Start with `sampler`, which reads
all collectors at a tick and glances between ticks.  `sample_screen` removes impossible values, `ticker` keeps time,
`window_stats` keeps minimum, mean and maximum, and `cpu_budget` reduces glances when the daemon costs too much.
"""
