"""When collectors are read: the tick, the threads, the windows and the daemon's own CPU budget.

In come collectors (`collector_registry` lists them), out goes one snapshot a tick.
Start with `sampler`, which reads all collectors at a tick and glances between ticks; `sample_screen` leaves out what
cannot be true; `ticker` keeps time,
`window_stats` keeps lowest, mean and highest, `cpu_budget` takes glances away when the daemon costs too much,
and `glance_control` puts that into force.
"""
