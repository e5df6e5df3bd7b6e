"""Carries records out of the training process without blocking it, and connects ranks by a gloo group of our own.

In: records from the training thread and from threads of ours.
Out: frames to the daemon, lines in the run folder; from the daemon come commands and news.
Start at `record_queue`: the interface `RecordSink`, and the thread behind `daemon_socket` and `run_log`; `field_filter`
leaves out what their readers would refuse.  `side_group` is gloo between ranks, beside torch's registry, after a
`store_rendezvous` and at addresses that `side_address` has proven.
"""
