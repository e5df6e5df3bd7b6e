"""How records leave the training process without holding it up.

In come records, out go frames to the daemon and lines to the run folder.
Start with `record_queue`; `daemon_socket` and `run_log` are where it leads, `side_group` is gloo between ranks.
"""
