"""Models what all ranks of a job did and waited for, and answers who held it up and what mending it would save.

In: `Trace`s, which of their rows are one collective, and each trace's clock (`model.JobInput`).  Out: a
`model.JobModel` with the critical path, the replay's error, a verdict, and a graph in which other durations can be
played.  Start at `model.build_model`.

    one_rank    rank_events (columns), waits, device_waits and launchless_waits (what waits for what), rank_graph
                (condensed to nodes and edges); `causes` has the words for what took time
    all_ranks   clocks, job_graph, replay, critical_path
    verdict     peers (medians of like work), roles, links, imbalance, significance, stops, findings, verdict

Everything is numpy, linear in the events, and integers of nanoseconds; no torch, no files.
"""
