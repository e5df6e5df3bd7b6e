"""Ports and pages: what tests of anything that listens need."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping

__all__ = ["free_port", "scrape"]

SCRAPE_SECONDS_MAX = 30.0
"""Against a daemon that hangs; an answer takes milliseconds, seconds on a busy machine."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on now; another process may take it before you do."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


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
