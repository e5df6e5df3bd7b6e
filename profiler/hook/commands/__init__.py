"""Executes in the training thread what the daemon sends: commands at the step that it named, news of the device.

In: frames from the daemon.  Out: answers, and the files of a trace.
Start at `daemon_messages`, which holds them until that step; `trace_request` executes the command `trace`, and
`trace_file` writes its file where other users may write too.  The command `tune` is the controller's.
"""
