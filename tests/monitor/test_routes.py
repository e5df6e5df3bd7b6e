"""What a browser gets: the page with its policy, the document, its history, and a push at each tick."""

import json
import socket
import time
import zlib

import pytest

from pacecar.clock import SystemClock
from pacecar.monitor.http.event_stream import VIEWERS_MAX
from pacecar.monitor.http.routes import Routes
from pacecar.monitor.http.static_files import ASSETS
from pacecar.monitor.http.web import pages
from pacecar.records.status_document import DaemonStatus as Own
from pacecar.records.status_document import Host, StatusDocument
from tests.kit.daemons import running_daemon
from tests.kit.net import get
from tests.kit.waiting import until
from tests.kit.web import page, web_server


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, steady):
    """One daemon for all tests; no request can change it."""
    with running_daemon(tmp_path_factory.mktemp("screens"), [steady()], period_seconds=0.2) as daemon:
        yield daemon


def figure(daemon, name):
    """Return a number of the daemon's own, as it is served now."""
    (line,) = [line for line in get(daemon.port, "/metrics")[2].decode().splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def nobody_looks(daemon):
    until(lambda: figure(daemon, "pacecar_daemon_viewers") == 0, "all viewers are forgotten")


class Stream:
    """One viewer's end."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=15)
        self.socket.sendall(b"GET /api/events HTTP/1.1\r\nHost: a\r\n\r\n")
        self.lines = self.socket.makefile("rb")
        self.status = int(self.lines.readline().split()[1])
        self.headers = {}
        while line := self.lines.readline().strip():
            key, _, value = line.decode().partition(": ")
            self.headers[key] = value

    def event(self):
        """Return (name, data) of the next event."""
        name = None
        for line in self.lines:
            word, _, rest = line.decode().strip().partition(": ")
            if word == "event":
                name = rest
            elif word == "data":
                return name, json.loads(rest)
        return None

    def close(self):
        self.lines.close()
        self.socket.close()


@pytest.mark.parametrize("path", ASSETS)
def test_each_file_is_there_with_its_policy_and_nothing_is_inline(daemon, path):
    status, headers, body = get(daemon.port, path)
    assert (status, headers["Content-Type"]) == (200, ASSETS[path][1])
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    if path == "/":
        assert b"style=" not in body
        assert b"onclick" not in body
        assert b"<script>" not in body
        assert b'src="/' not in body
        assert b'href="/' not in body
        assert b"//" not in body.replace(b"<!doctype", b"")  # no other host
    status, headers, packed = get(daemon.port, path, **{"Accept-Encoding": "gzip"})
    assert zlib.decompress(packed, 31) == body
    status, _, rest = get(daemon.port, path, **{"If-None-Match": headers["ETag"]})
    assert (status, rest) == (304, b"")


def test_no_other_file_can_be_had(daemon):
    paths = ["/page/", "/page/../web.py", "/page/%2e%2e/web.py", "/page/page.js/", "/api/", "/api"]
    assert {path: get(daemon.port, path)[0] for path in paths} == dict.fromkeys(paths, 404)


def test_nothing_can_be_written(daemon):
    methods, paths = (
        ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"),
        ("/", "/api/snapshot", "/api/history", "/api/events"),
    )
    answers = {(method, path): get(daemon.port, path, method)[0] for method in methods for path in paths}
    assert {asked: status for asked, status in answers.items() if status not in (405, 501)} == {}


def test_the_document_and_its_history(daemon):
    status, headers, body = get(daemon.port, "/api/snapshot")
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/json", "no-store")
    assert json.loads(body)["host"]["cpus_online"] == 2
    history = json.loads(get(daemon.port, "/api/history")[2])
    assert history["version"] == 1
    assert len(history["time_seconds"]) >= 1


@pytest.mark.slow
def test_a_viewer_gets_the_document_at_once_and_then_each_tick(daemon):
    nobody_looks(daemon)
    stream = Stream(daemon.port)
    assert stream.status == 200
    assert stream.headers["Content-Type"] == "text/event-stream"
    assert "Content-Length" not in stream.headers
    name, first = stream.event()
    assert (name, first["version"]) == ("snapshot", 1)
    (name, second), (other, (at, values)) = stream.event(), stream.event()
    assert (name, other) == ("snapshot", "point")
    assert second["tick"] >= first["tick"]
    assert second["daemon"]["viewers"] == 1
    assert at == second["time_seconds"]
    assert isinstance(values, dict)
    stream.close()


def test_viewers_hold_no_thread_and_one_too_many_gets_the_place_of_the_first(daemon):
    nobody_looks(daemon)
    displaced = figure(daemon, "pacecar_daemon_viewers_displaced_total")
    streams = [Stream(daemon.port) for _ in range(VIEWERS_MAX)]
    assert {stream.status for stream in streams} == {200}
    until(lambda: figure(daemon, "pacecar_daemon_viewers") == VIEWERS_MAX, "all are counted")
    late = Stream(daemon.port)
    assert late.event()[0] == "snapshot"
    assert figure(daemon, "pacecar_daemon_viewers_displaced_total") == displaced + 1
    for stream in [*streams, late]:
        stream.close()
    nobody_looks(daemon)


@pytest.mark.slow
def test_the_daemon_stops_while_viewers_look_on(tmp_path, steady):
    with running_daemon(tmp_path, [steady()]) as daemon:
        stream = Stream(daemon.port)  # the daemon ends while the viewer is there; its end of the stream is closed
    while stream.event() is not None:
        pass
    stream.close()


def test_a_tick_that_nobody_looks_at_builds_no_document():
    built = []
    own = Own(pacecar_version="1", start_time_seconds=0.0, period_seconds=1.0)
    figures = StatusDocument(
        version=1, node="n", time_seconds=1.0, tick=None, snapshot_age_seconds=None, daemon=own,
        host=Host(cpu_utilization_ratio=0.25),
    )  # fmt: skip

    def build():
        built.append(1)
        return figures

    screens = Routes(SystemClock(), 1.0, build, lambda: figures)
    screens.tick()
    assert built == []
    history = json.loads(screens._history.json())
    assert history["series"]["pacecar_host_cpu_utilization_ratio"] == [0.25]
    screens.close()


def test_a_flood_of_requests_builds_few_documents():
    built = []

    def build():
        built.append(1)
        own = Own(pacecar_version="1", start_time_seconds=0.0, period_seconds=1.0)
        return StatusDocument(
            version=1, node="n", time_seconds=1.0, tick=None, snapshot_age_seconds=None, daemon=own, host=Host()
        )

    screens = Routes(SystemClock(), 1.0, build)
    with web_server(pages(page, screens, lambda: None)) as server:
        begun = time.monotonic()
        for _ in range(50):
            assert get(server.port, "/api/snapshot").status == 200
        assert len(built) <= 2 + (time.monotonic() - begun) * 4
    screens.close()
