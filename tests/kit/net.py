"""Free ports and HTTP requests, for tests of anything that listens."""

from __future__ import annotations

import base64
import contextlib
import http.client
import random
import socket
import ssl
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

__all__ = ["Answer", "basic", "free_port", "get", "scrape", "scraped"]

SCRAPE_SECONDS_MAX = 60.0
"""A limit that only a hanging daemon reaches; an answer takes milliseconds, or seconds on a busy machine."""


PORTS = range(12_000, 32_000)
"""Below the ports that Linux assigns to outgoing connections (32768 to 60999), which can take one at any time."""


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1; raises OSError if none of a hundred is free."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"no free port between {PORTS.start} and {PORTS.stop}")


class Answer(NamedTuple):
    """An answer to a request."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()


def get(
    port: int, path: str = "/metrics", method: str = "GET", context: ssl.SSLContext | None = None, **headers: str
) -> Answer:
    """Return the answer to a request at 127.0.0.1; raises OSError if there is none."""
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SCRAPE_SECONDS_MAX)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=SCRAPE_SECONDS_MAX, context=context)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())


def basic(user: str, password: str) -> str:
    """Return the Authorization header of a user."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def scrape(port: int, path: str = "/metrics", headers: Mapping[str, str] = {}) -> str:
    """Return the page as Prometheus would get it; raises OSError without an answer, AssertionError unless it is 200."""
    answer = get(port, path, **headers)
    assert answer.status == 200, f"{path}: {answer.status} {answer.text[:500]}"
    return answer.text


def scraped(port: int) -> list[Sample]:
    """Return the samples of the page of metrics."""
    return [sample for family in text_string_to_metric_families(scrape(port)) for sample in family.samples]
