"""Protects the daemon's port: TLS, passwords, and shares among clients that nobody can take from another.

In: a web configuration (`web_config`) and a client's socket and head.  Out: whether, and when, it is answered.
Start at `basic_auth`, which checks a password; `password_queue` orders the checks, so that no guesser holds up others,
and `client_source` says who a client is.
"""
