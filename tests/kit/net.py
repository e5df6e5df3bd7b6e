"""Ports and pages: what tests of anything that listens need."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
from collections.abc import Mapping

__all__ = ["free_port", "scrape"]

SCRAPE_SECONDS_MAX = 30.0
"""Against a daemon that hangs; an answer takes milliseconds, seconds on a busy machine."""


PORTS = range(12_000, 32_000)
"""Under Linux's range for ports that it gives out itself (32768 to 60999): a connection that anybody makes takes one of
those at any time, also one that was free a moment ago."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on now; raises OSError where none of a hundred is free."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"no free port between {PORTS.start} and {PORTS.stop}")


def scrape(port: int, path: str = "/metrics", headers: Mapping[str, str] = {}) -> str:
    """Return the page as Prometheus would get it; raises OSError where nobody answers, AssertionError for no 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SCRAPE_SECONDS_MAX)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, f"{path}: {response.status} {text[:500]}"
        return text
    finally:
        connection.close()
