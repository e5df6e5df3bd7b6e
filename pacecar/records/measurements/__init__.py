"""Defines what a job measures in its steps, as frozen values that records carry.

Start at `ledger`, where a step's time went.  `estimate_check` has the error of an estimated ledger, `collectives` the
cost of communication, `causes` what makes a rank late, `device_utilization` FLOPs and memory, `what_if` how much faster
the job could be at most.
"""
