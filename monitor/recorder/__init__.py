"""The flight recorder: the last minutes of the host and of each user's jobs, written to a file when something happens.

Ticks, glances and records come in, without ever waiting; recordings go out (`pacecar dump`).  Start with `recorder`;
`fair_queue` queues entries, `ring_buffer` keeps them in few bytes, `user_buffers` separates users, `triggers` detects
events, `pending_triggers` decides which recording is due, and `writer` writes it.  `pacecar.records.recording` defines
the file format.
"""
