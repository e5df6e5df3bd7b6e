"""The socket on which jobs report and commands arrive.

Frames of bytes come in; validated records for `jobs/`, and commands for jobs, go out.  Start with `socket_server` (the
selector loop); `unix_socket` makes the socket file, `connection` is one peer.  `frame_validation` refuses frames,
`frame_rate_limit` bounds them, and `log_limiter` bounds what clients can write into our log.  `authorization` decides
who may do what, `command_routing` passes people's requests on to jobs.
"""
