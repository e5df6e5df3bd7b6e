"""Carries records out of the training process without blocking it, and connects ranks by a gloo group of our own.

In: records from the training thread and from threads of ours.
Out: frames to the daemon, lines in the run folder; from the daemon come commands and news.
Start at `record_queue`; `daemon_socket` and `run_log` are its destinations, `side_group` is gloo between ranks.
"""
