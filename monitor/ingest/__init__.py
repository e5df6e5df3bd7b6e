"""The socket on which jobs report and commands arrive.

In come frames of bytes, out go validated records for `jobs/` and commands for the job that they are for.
Start with `socket_server` (the selector loop); `unix_socket` makes the socket file, `connection` is one peer.
`frame_validation` refuses frames (pure), `frame_rate_limit` bounds them, `log_limiter` bounds what others may write
into our log.  `authorization` says who may do what, `command_routing` passes on what people request of jobs.
"""
