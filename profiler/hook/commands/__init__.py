"""Handles the daemon's messages on the training thread: commands at the step that it named, news of the device.

In: frames from the daemon.  Out: answers, and trace files.
Start at `daemon_messages`, which holds commands until their step; `trace_request` executes the `trace` command, and
`trace_file` writes its file safely in folders that other users can write in.  The controller handles `tune`.
"""
