"""The flight recorder: the last minutes of the host and of each user's jobs, written when something happens.

In come samples and records, out go recordings (`pacecar dump`).
Start with `recorder`; `triggers` says what happened, `user_buffers` keeps shares apart, `writer` writes.
"""
