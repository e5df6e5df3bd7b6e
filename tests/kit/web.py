"""A web server with pages of a test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pacecar.monitor.http.request import HttpRequest, HttpResponse, plain
from pacecar.monitor.http.security.web_config import OPEN, Security
from pacecar.monitor.http.server import WebServer


def page(request: HttpRequest) -> HttpResponse:
    """Answer every request with "ok"."""
    return plain("200 OK", "ok")


@contextmanager
def web_server(respond: Callable[[HttpRequest], HttpResponse] = page, security: Security = OPEN) -> Iterator[WebServer]:
    """Serve `respond` at a free port."""
    server = WebServer("127.0.0.1", 0)
    server.secure(security)
    server.bind()
    server.start(respond)
    try:
        yield server
    finally:
        server.close()
