"""Compares the ranks of one job: names stragglers and their cause, suspects hangs, computes what-if bounds.

In: each rank's finished steps; the ranks exchange sums and medians of them over a gloo group of our own.
Out: `Straggler`, `HangSuspicion`, `JobLedger` and `WhatIf` records, and log lines.
Start at `rank_monitor.RankMonitor`, which ties the parts together on a thread of its own.

    exchange                            what a rank tells the others of which steps, when and how
    data_parallel                       over how many ranks DDP or FSDP2 spreads the model, and where in it that is
    host_pressure                       what the kernel says of waits
    straggler_detector, link_diagnosis  who is late, and why
    cusum                               is it chance?
    hang_detector                       may it hang?
    torch_flight_recorder               which collectives it has begun and not finished
    what_if                             bounds for one rank and for the job
    reports                             records and log lines
"""
