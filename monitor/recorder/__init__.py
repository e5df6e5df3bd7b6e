"""The flight recorder: the last minutes of the host and of each user's jobs, written when something happens.

In come ticks, glances and records, none of which is ever held up; out go recordings (`pacecar dump`).
Start with `recorder`; `fair_queue` takes entries in, `ring_buffer` keeps them in few bytes and `user_buffers` keeps
users apart, `triggers` says what happened and `pending_triggers` what is due, `writer` writes.  The file's
format is `pacecar.records.recording`.
"""
