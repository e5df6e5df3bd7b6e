"""Every header gets an answer, weights count, and HEAD has the headers of GET."""

import gzip
import logging
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.monitor.http.content_negotiation import MetricsFormat, choose_coding, choose_media
from pacecar.monitor.http.static_files import ASSETS
from tests.kit.daemons import running_daemon
from tests.kit.net import get

OPEN = "application/openmetrics-text"
PROMETHEUS = (
    f"{OPEN};version=1.0.0;escaping=allow-utf-8;q=0.6,{OPEN};version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "is_openmetrics", "says"),
    [
        ("", False, "version=0.0.4"),
        ("*/*", False, "version=0.0.4"),
        (PROMETHEUS, True, "version=1.0.0; charset=utf-8; escaping=allow-utf-8"),
        (OPEN, True, "version=1.0.0; charset=utf-8"),
        (f"{OPEN.upper()} ; Version=1.0.0", True, "escaping=underscores"),
        (f"{OPEN};version=0.0.1", False, "version=0.0.4"),
        (f"{OPEN};version=1.x", False, "version=0.0.4"),
        (f"{OPEN};q=0, text/plain", False, "version=0.0.4"),
        (f"{OPEN};q=0.0", False, "version=0.0.4"),
        (f"{OPEN};q=0.1, text/plain;q=0.9", False, "version=0.0.4"),
        (f"text/plain;q=0.1, {OPEN};q=0.9", True, "version=1.0.0"),
        (f"{OPEN};q=2", False, "version=0.0.4"),
        (f"{OPEN};q=nan", False, "version=0.0.4"),
        (f"{OPEN};version=1.0.0;escaping=dots", True, "escaping=underscores"),
        ("text/plain;version=1.0.0", False, "version=1.0.0; charset=utf-8; escaping=underscores"),
        ("text/plain;version=1.x", False, "version=0.0.4"),
        ("text/plain;version=", False, "version=0.0.4"),
        ("text/plain;version=1.0.0\x00", False, "version=0.0.4"),
        (f"*/*, {OPEN}", True, "version=1.0.0"),
        ("image/png", False, "version=0.0.4"),
        (";;;,,,q=;=", False, "version=0.0.4"),
    ],
)
def test_the_type_is_the_one_with_the_greatest_weight_that_we_speak(accept, is_openmetrics, says):
    media = choose_media(accept)
    assert (media.format is MetricsFormat.OPENMETRICS) is is_openmetrics
    assert media.format is not MetricsFormat.PROTOBUF
    assert says in media.content_type


PROTO = "application/vnd.google.protobuf"
FAMILY = "proto=io.prometheus.client.MetricFamily"


@pytest.mark.parametrize(
    ("accept", "is_protobuf"),
    [
        (f"{PROTO};{FAMILY};encoding=delimited;q=0.6,{PROMETHEUS.replace('q=0.6', 'q=0.5')}", True),
        (f"{PROTO}; {FAMILY}; encoding=delimited", True),
        (f"{PROTO};{FAMILY};encoding=delimited;q=0.1,{OPEN};version=1.0.0;q=0.2", False),
        (f"{PROTO};{FAMILY};encoding=text", False),
        (f"{PROTO};{FAMILY}", False),
        (f"{PROTO};proto=other;encoding=delimited", False),
        (f"{PROTO};{FAMILY};encoding=delimited;q=0", False),
        (PROTO, False),
    ],
)
def test_protobuf_is_for_those_who_name_its_message_and_its_form(accept, is_protobuf):
    media = choose_media(accept)
    assert (media.format is MetricsFormat.PROTOBUF) is is_protobuf
    assert media.content_type.startswith(PROTO) is is_protobuf


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        ("", "identity"), ("gzip", "gzip"), ("GZIP", "gzip"), ("x-gzip", "gzip"), ("br, gzip;q=1", "gzip"),
        ("gzip;q=0", "identity"), ("gzip; q=0.000", "identity"), ("gzip;q=0.5, identity", "identity"),
        ("gzip;q=0.5", "gzip"), ("*", "identity"), ("*;q=0", None), ("*;q=0, gzip", "gzip"), ("identity;q=0", None),
        ("identity;q=0, gzip", "gzip"), ("identity;q=0, *", "gzip"), ("gzip;q=0, identity;q=0", None),
        ("gzip;q=0, *;q=0", None), ("*;q=0, identity", "identity"), ("gzip;q=x", "identity"), ("gzippy", "identity"),
        ("deflate", "identity"), ("gzip;q=1.0001", "identity"),
    ],
)  # fmt: skip
def test_a_coding_of_weight_zero_is_refused(header, coding):
    assert choose_coding(header) == coding


@pytest.mark.slow
@given(st.text(max_size=200))
def test_every_header_gives_an_answer(header):
    assert choose_media(header).content_type.isascii()
    assert choose_coding(header) in ("gzip", "identity", None)


def test_a_header_of_many_elements_is_looked_at_no_further_than_some():
    assert choose_coding("br," * 10_000 + "gzip") == "identity"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, steady):
    with running_daemon(tmp_path_factory.mktemp("negotiation"), [steady()], recorder=False) as daemon:
        yield daemon


@pytest.mark.parametrize("path", ["/metrics", "/api/snapshot", "/api/history", "/-/healthy", "/nowhere", *ASSETS])
def test_head_has_the_headers_of_get_and_no_body(daemon, path):
    (status, headers, body), (head_status, head, nothing) = get(daemon.port, path), get(daemon.port, path, "HEAD")
    assert (head_status, nothing) == (status, b"")
    assert set(head) == set(headers)
    lives = path in ("/metrics", "/api/snapshot", "/api/history")
    for name in set(headers) - ({"Date", "Content-Length"} if lives else {"Date"}):
        assert head[name] == headers[name], name
    assert int(headers["Content-Length"]) == len(body)
    assert int(head["Content-Length"]) > 0


def test_head_of_a_stream_has_its_type_and_takes_no_place(daemon):
    status, headers, body = get(daemon.port, "/api/events", "HEAD")
    assert (status, headers["Content-Type"], body) == (200, "text/event-stream", b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_told_which_there_are(daemon, method):
    for path in ("/metrics", "/", "/api/snapshot"):
        status, headers, _ = get(daemon.port, path, method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/metrics", "/", "/api/snapshot", "/api/history"])
def test_pages_are_coded_as_the_client_says(daemon, path):
    plain = get(daemon.port, path, **{"Accept-Encoding": "gzip;q=0"})
    assert "Content-Encoding" not in plain[1]
    status, headers, body = get(daemon.port, path, **{"Accept-Encoding": "identity;q=0, gzip"})
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert gzip.decompress(body)[:1] == plain[2][:1]
    for refused in ("*;q=0", "gzip;q=0, identity;q=0"):
        assert get(daemon.port, path, **{"Accept-Encoding": refused})[0] == 406


def test_refusals_of_a_head_have_no_body(daemon):
    with socket.create_connection(("127.0.0.1", daemon.port), 30) as client:
        client.sendall(b"HEAD / HTTP/1.1\r\nno header\r\n\r\n")
        head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert body == b""


@pytest.mark.parametrize("version", ["1.x", "x", "1..0", "1.0.0.x", "9" * 5000, "\xe9", "-1"])
def test_no_version_that_a_client_asks_for_is_a_traceback(daemon, caplog, version):
    for kind in ("text/plain", OPEN):
        assert get(daemon.port, "/metrics", Accept=f"{kind};version={version}")[0] == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_page_that_fails_is_a_bounded_number_of_lines(daemon, caplog, monkeypatch):
    """Whatever the next such bug is: a client may ask for it as often as it likes."""
    monkeypatch.setattr(daemon._exporter, "_live", lambda: 1 / 0)
    for _ in range(100):
        assert get(daemon.port, "/metrics")[0] == 500
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    assert len(caplog.records) < 5
