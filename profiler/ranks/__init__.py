"""Compares the ranks of one job: names stragglers and their cause, suspects hangs, computes what-if bounds.

In: each rank's finished steps; the ranks exchange sums and medians of them over a gloo group of our own.
Out: `Straggler`, `HangSuspicion`, `JobLedger` and `WhatIf` records, and log lines.
Start at `rank_monitor.RankMonitor`, which ties the parts together on a thread of its own.

    step_partition                     which steps belong together, the same on all ranks
    phase_sums_message, totals         what a rank says of a range: a row of integers
    gather_schedule, gloo_transport    when to send it; how, without ever waiting
    data_parallel                      over how many ranks DDP or FSDP2 spreads the model, and where in it that is
    host_pressure, tcp_busy_time       what the kernel says of waits
    straggler_detector, link_diagnosis, noise, cusum    who is late, and is it chance?
    hang_detector, collectives         may it hang, and in which collective?
    what_if                            bounds for one rank and for the job
    reports                            records and log lines
"""
