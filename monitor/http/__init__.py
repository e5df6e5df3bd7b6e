"""The daemon's port: pages, metrics, snapshots and the event stream.

In come HTTP requests, out go answers; nothing that is reached here changes anything.
Start with `server` (sockets) and `routes` (addresses); `basic_auth` and `web_config` protect them.
"""
