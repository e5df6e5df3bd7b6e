"""The socket on which jobs report and commands arrive.

In come frames of bytes, out go validated records for `jobs/` and commands for the job that they are for.
Start with `socket_server`; `frame_validation` refuses frames, `authorization` says who may do what.
"""
