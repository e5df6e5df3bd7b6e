"""Compares the ranks of one job: names stragglers and their cause, reports hangs, computes what-if bounds.

In: each rank's finished steps; the ranks exchange sums and medians of them over a gloo group of our own.
Out: `Straggler`, `HangSuspicion`, `HangVerdict`, `JobLedger` and `WhatIf` records, and log lines.
Start at `rank_monitor.RankMonitor`, which ties the parts together on a thread of its own.
`..hangs` has what it asks about hangs.

    exchange                            the messages between ranks, in large jobs in subgroups
    data_parallel                       how many ranks DDP or FSDP2 spreads the model over, and where in it
    collective_waits                    waits in collectives, by samples of the training thread's stack
    host_pressure                       waits, as the kernel counts them
    straggler_detector                  which rank is late, and why
    link_diagnosis                      whether a rank's link is slow
    collection_diagnosis                whether a rank's garbage collector holds the others up
    cross_rank                          all ranks record the same steps when one seems late, for the model of `analyze`
    cusum                               whether it is chance
    what_if                             bounds for one rank and for the job
    reports                             records and log lines
"""
