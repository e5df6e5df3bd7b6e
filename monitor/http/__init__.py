"""The daemon's HTTP port: pages, metrics, snapshots and the event stream.

Requests come in, responses go out; no address changes anything.  Start with `server` (sockets) and `routes`
(addresses).

    server, request              one thread for all clients; heads of requests and responses
    web                          which page a request gets; 503 while the numbers are old
    status_document, job_status  the state as the public document `pacecar.records.status_document`
    status_history               the last minutes of a few series
    event_stream                 one frame per tick, pushed to all viewers
    static_files                 the page itself (page/)
    content_negotiation          media types and codings
    security                     TLS, passwords; who a client is

`pacecar top` draws the same document in a terminal.
"""
