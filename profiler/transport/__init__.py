"""Carries records out of the training process without blocking it, and connects ranks with a gloo group of our own.

In: records from the training thread and from our own threads; commands and news from the daemon.
Out: frames to the daemon, lines in the run folder.
Start at `record_queue`, which has the interface `RecordSink` and the thread behind `daemon_socket` and `run_log`; it
removes what readers would reject.  `side_group` is a gloo group outside torch's registry, made once `rendezvous` has
brought the ranks together and proven their addresses.
"""
