"""Protects the daemon's port: TLS, passwords, and a fair share for each client.

`web_config` reads the configuration, `basic_auth` checks a password, `password_queue` orders the checks so that no
guesser delays other clients, and `client_source` identifies a client's source.
"""
