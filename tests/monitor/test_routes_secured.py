"""The page where a password and TLS are asked for: every address asks, and pushes go on over TLS."""

import base64
import http.client
import json
import shutil
import ssl
import subprocess
import time

import pytest

from pacecar.monitor.http.static_files import ASSETS
from tests.kit.daemons import running_daemon

bcrypt = pytest.importorskip("bcrypt", reason="the extra `secure` is not installed")

ADDRESSES = [*ASSETS, "/api/snapshot", "/api/history", "/api/events", "/metrics", "/-/healthy", "/nowhere"]
ANN = {"Authorization": "Basic " + base64.b64encode(b"ann:right").decode()}


@pytest.fixture(scope="module")
def asked_for(tmp_path_factory):
    """A folder with a certificate and a web configuration that asks for it and for a password."""
    folder = tmp_path_factory.mktemp("secured")
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not here to make a certificate with")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", "node.key", "-out", "node.crt"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    secret = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
    (folder / "web.yml").write_text(
        f"tls_server_config:\n  cert_file: node.crt\n  key_file: node.key\nbasic_auth_users:\n  ann: {secret}\n"
    )
    return folder


@pytest.fixture
def node(tmp_path, asked_for, steady):
    """Return a function that connects to a daemon that wants both; one per test, because guesses slow it down."""
    context = ssl.create_default_context(cafile=str(asked_for / "node.crt"))
    with running_daemon(tmp_path, [steady()], web_config_file=str(asked_for / "web.yml")) as daemon:
        yield lambda: http.client.HTTPSConnection("127.0.0.1", daemon.port, timeout=30, context=context)


def status(connection, path, method="GET", **headers):
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    if path != "/api/events" or answer.status != 200:
        answer.read()
    connection.close()
    return answer.status


@pytest.mark.slow
@pytest.mark.parametrize("path", ADDRESSES)
def test_no_address_says_anything_without_the_password(node, path):
    assert status(node(), path) == 401
    assert status(node(), path, method="POST") == 401
    assert status(node(), path, Authorization=ANN["Authorization"][:-4] + "AAAA") == 401
    assert status(node(), path, **ANN) in ((404,) if path == "/nowhere" else (200, 503))


@pytest.mark.slow
def test_ticks_are_pushed_over_tls_for_as_long_as_somebody_looks(node):
    connection = node()
    connection.request("GET", "/api/events", headers=ANN)
    answer = connection.getresponse()
    assert answer.status == 200
    ticks = []
    limit = time.monotonic() + 30
    while len(ticks) < 3:
        assert time.monotonic() < limit
        name, _, rest = answer.readline().decode().strip().partition(": ")
        if name == "data" and rest.startswith("{"):
            ticks += [tick for tick in [json.loads(rest)["tick"]] if tick is not None]  # None before the first
    assert ticks == sorted(ticks)
    assert ticks[-1] > ticks[0]
    connection.close()
