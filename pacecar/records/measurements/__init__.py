"""Defines what a job measured of its steps: the values that records carry, each checked as it is made.

In: integers of nanoseconds and bytes, with the types of `ranges`.  Out: frozen values.
Start at `ledger`, where a step's time went; `estimate_check` says how far off an estimated ledger was, `collectives`
what communication cost, `device_utilization` FLOPs and memory, `what_if` how much faster the job could be at most.
"""
