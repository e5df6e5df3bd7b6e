"""`pacecar dashboards push` against a Grafana on loopback that obeys, refuses, redirects, dies and dawdles."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pacecar.dashboards import committed
from pacecar.dashboards.push import ANSWER_BYTES_MAX, WORDS_MAX, Grafana, Refused, Unreachable
from tests.kit.forking_python import COMMAND, forking_python
from tests.kit.net import free_port

TOKEN = "glsa_a-token-nobody-may-see"
PASSWORD = "a password: nobody may see"
ALL = ["fleet.json", "itself.json", "job.json", "node.json", "tuning.json"]
Answer = tuple[int, object]


class Standin(ThreadingHTTPServer):
    """Keeps what it was asked and answers as `rule` says; by default as Grafana does where all is well."""

    daemon_threads = True

    def __init__(self, rule: Callable[[Standin, str, Any], Answer | None]) -> None:
        self.rule = rule
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def pushed(self) -> list[dict[str, Any]]:
        return [body for _, path, _, body in self.asked if path == "/api/dashboards/db"]

    def handle_error(self, *_: object) -> None:
        """A client that hung up is what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: Standin

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: Any) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path, dict(self.headers), body))
        said = self.server.rule(self.server, path, body) or well(self.command, path, body)
        code, content = said
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        if code in {301, 302, 307}:
            self.send_header("Location", str(content))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


def well(method: str, path: str, body: Any) -> Answer:
    if path == "/api/folders":
        return 200, [{"title": "Other", "uid": "o"}] if method == "GET" else {"title": body["title"], "uid": "new"}
    uid = body["dashboard"]["uid"]
    return 200, {"status": "success", "uid": uid, "url": f"/d/{uid}/x", "version": 1}


@pytest.fixture
def grafana() -> Iterator[Callable[..., Standin]]:
    made: list[Standin] = []

    def make(rule: Callable[[Standin, str, Any], Answer | None] = lambda *_: None) -> Standin:
        made.append(Standin(rule))
        return made[-1]

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


def push(url: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = variables or {"GRAFANA_TOKEN": TOKEN}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRAFANA_")} | given
    ran = subprocess.run(
        [forking_python(modules=COMMAND), "-m", "pacecar", "dashboards", "push", "--url", url, *options],
        capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    for secret in (TOKEN, PASSWORD, b64encode(f"admin:{PASSWORD}".encode()).decode()):
        assert secret not in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    return ran


@pytest.mark.slow
def test_every_dashboard_arrives_as_it_is_committed(grafana):
    server = grafana()
    ran = push(server.url)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    texts = committed(".json")
    assert sorted(texts) == ALL
    assert [body["dashboard"] for body in server.pushed()] == [json.loads(texts[n]) | {"id": None} for n in ALL]
    assert all(body["overwrite"] is False and "folderUid" not in body for body in server.pushed())
    assert all(headers["Authorization"] == f"Bearer {TOKEN}" for _, _, headers, _ in server.asked)
    assert ran.stdout.splitlines()[0] == f"fleet.json: {server.url}/d/pacecar-fleet/x"


@pytest.mark.slow
def test_a_folder_is_found_by_its_title_and_else_made(grafana):
    server = grafana()
    assert push(server.url, "--folder", "Other", "--overwrite").returncode == 0
    assert {(body["folderUid"], body["overwrite"]) for body in server.pushed()} == {("o", True)}
    server = grafana()
    assert push(server.url, "--folder", "Training").returncode == 0
    assert {body["folderUid"] for body in server.pushed()} == {"new"}


@pytest.mark.slow
def test_a_user_logs_in_with_the_password_of_the_environment(grafana):
    server = grafana()
    ran = push(server.url, "--user", "admin", GRAFANA_PASSWORD=PASSWORD, GRAFANA_TOKEN=TOKEN)
    assert ran.returncode == 0, ran.stderr
    basic = "Basic " + b64encode(f"admin:{PASSWORD}".encode()).decode()
    assert {headers["Authorization"] for _, _, headers, _ in server.asked} == {basic}


@pytest.mark.slow
def test_half_success_names_what_is_missing_and_pushes_the_rest(grafana):
    def rule(server: Standin, path: str, body: Any) -> Answer | None:
        if body and body.get("dashboard", {}).get("uid") == "pacecar-job":
            return 412, {"status": "version-mismatch", "message": "The dashboard has been changed by someone else"}
        return None

    ran = push(grafana(rule).url)
    assert ran.returncode == 1
    lines = ran.stdout.splitlines()
    assert len(lines) == 5
    assert lines[2] == "job.json: refused: version-mismatch: The dashboard has been changed by someone else (412)"
    assert "4 of 5 dashboards pushed; --overwrite replaces" in ran.stderr


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (401, {"message": f"Invalid API key {TOKEN}"}, "rejects these credentials (401): Invalid API key ***"),
        (403, {"message": "Access denied"}, "forbids it (403): Access denied; the account needs the role Editor"),
        (404, b"<html>nginx</html>", "does not exist (404): <html>nginx</html>; is the path of the address right?"),
        (200, b"<html>some page</html>", "does not answer with JSON: is it a Grafana?"),
    ],
)
def test_what_would_fail_for_all_is_asked_once_and_said(grafana, code, said, expected):
    server = grafana(lambda *_: (code, said))
    ran = push(server.url)
    assert ran.returncode == 1
    assert expected in ran.stderr
    assert "(0 of 5 dashboards pushed)" in ran.stderr
    assert len(server.asked) == 1


@pytest.mark.slow
def test_a_server_error_is_told_of_each_dashboard_in_one_line(grafana):
    ran = push(grafana(lambda *_: (500, b"\x1b[31mpanic:\n goroutine " + b"x" * 5000)).url)
    assert ran.returncode == 1
    assert len(ran.stdout.splitlines()) == 5
    assert all(len(line) < 400 and "\x1b" not in line for line in ran.stdout.splitlines())
    assert "0 of 5 dashboards pushed" in ran.stderr


def test_a_folder_that_is_refused_stops_before_any_dashboard(grafana):
    server = grafana(lambda _, path, body: (400, {"message": "no"}) if path == "/api/folders" and body else None)
    ran = push(server.url, "--folder", "New")
    assert ran.returncode == 1
    assert "no (400) (0 of 5 dashboards pushed)" in ran.stderr
    assert server.pushed() == []


def test_a_redirect_is_named_and_carries_no_credential_elsewhere(grafana):
    other = grafana()
    ran = push(grafana(lambda *_: (302, other.url + "/login")).url)
    assert ran.returncode == 1
    assert f"redirects to {other.url}/login" in ran.stderr
    assert other.asked == []


def test_one_that_dies_half_way_is_told_with_how_many_arrived(grafana):
    def rule(server: Standin, path: str, body: Any) -> Answer | None:
        if len(server.asked) == 3:
            raise ConnectionResetError  # the thread ends, the connection closes without an answer
        return None

    ran = push(grafana(rule).url)
    assert ran.returncode == 1
    assert len(ran.stdout.splitlines()) == 2
    assert "(2 of 5 dashboards pushed)" in ran.stderr


@pytest.mark.slow
def test_nobody_there_and_nobody_answering_end_soon():
    ran = push(f"http://127.0.0.1:{free_port()}")
    assert ran.returncode == 1
    assert "Connection refused" in ran.stderr
    with socket.create_server(("127.0.0.1", 0)) as mute:
        begun = time.monotonic()
        ran = push(f"http://127.0.0.1:{mute.getsockname()[1]}", "--timeout-seconds", "0.4")
        assert time.monotonic() - begun < 20
    assert ran.returncode == 1
    assert "no answer within 0.4 s (0 of 5 dashboards pushed)" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("status", ["200 OK", "500 Internal Server Error"])
def test_an_answer_that_drips_in_has_a_deadline_too(status):
    """Each byte restarts the socket's own timeout: without a deadline this would take an hour."""
    hung_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as dripping:

        def drip() -> None:
            taken, _ = dripping.accept()
            with taken:
                taken.recv(65536)
                taken.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {ANSWER_BYTES_MAX}\r\n\r\n".encode())
                for _ in range(1200):
                    try:
                        taken.sendall(b" ")
                    except OSError:
                        hung_up.set()
                        return
                    time.sleep(0.05)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{dripping.getsockname()[1]}"
        with pytest.raises((Unreachable, Refused)) as failed:
            Grafana(address, TOKEN, timeout_seconds=0.5).ask("/api/folders")
        thread.join(timeout=60)
    assert hung_up.is_set(), "it waited until the last byte"
    assert ("no answer within 0.5 s" if status.startswith("2") else "(500)") in str(failed.value)


@pytest.mark.slow
def test_a_path_before_the_api_stays_and_the_address_of_a_dashboard_is_not_doubled(grafana):
    """Grafana below a path (`serve_from_sub_path`) gives addresses with that path."""

    def rule(server: Standin, path: str, body: Any) -> Answer | None:
        return 200, {"status": "success", "url": f"/grafana/d/{body['dashboard']['uid']}/x"}

    server = grafana(rule)
    ran = push(server.url + "/grafana/")
    assert ran.returncode == 0, ran.stderr
    assert {path for _, path, _, _ in server.asked} == {"/grafana/api/dashboards/db"}
    assert ran.stdout.splitlines()[0] == f"fleet.json: {server.url}/grafana/d/pacecar-fleet/x"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """The key of 127.0.0.1 and a certificate that no system knows."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not here to make a certificate with")
    key, certificate = tmp_path / "own.key", tmp_path / "own.crt"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return key, certificate


@pytest.mark.slow
def test_a_grafana_with_a_certificate_of_ones_own_wants_its_authority_named(grafana, certificate):
    key, own = certificate
    server = grafana()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http:", "https:")
    ran = push(url)
    assert ran.returncode == 1
    assert "its certificate cannot be trusted" in ran.stderr
    assert "SSL_CERT_FILE names other authorities (0 of 5 dashboards pushed)" in ran.stderr
    assert server.asked == [], "the token was not sent"
    ran = push(url, GRAFANA_TOKEN=TOKEN, SSL_CERT_FILE=str(own))
    assert ran.returncode == 0, ran.stderr
    assert len(server.pushed()) == 5


@pytest.mark.slow
def test_a_secret_at_the_edge_of_what_is_repeated_is_not_cut_in_half(grafana):
    said = "x" * (WORDS_MAX - 10) + TOKEN
    ran = push(grafana(lambda *_: (500, {"message": said})).url)
    assert TOKEN[:8] not in ran.stdout + ran.stderr


def test_an_answer_of_a_hundred_thousand_brackets_is_no_json(grafana):
    ran = push(grafana(lambda *_: (200, b"[" * 100_000)).url)
    assert "does not answer with JSON" in ran.stderr


@pytest.mark.parametrize(
    ("url", "options", "variables", "expected"),
    [
        ("grafana.example.com", (), {"GRAFANA_TOKEN": TOKEN}, "use http(s)://host[:port][/path]"),
        ("ftp://grafana", (), {"GRAFANA_TOKEN": TOKEN}, "use http(s)://host[:port][/path]"),
        (f"http://admin:{PASSWORD.replace(' ', '')}@g", (), {"GRAFANA_TOKEN": TOKEN}, "has more than host"),
        ("http://127.0.0.1:9", (), {"HOME": "/"}, "pass either a token"),
        ("http://127.0.0.1:9", (), {"GRAFANA_TOKEN": TOKEN + "\n"}, "the token contains blanks or line ends"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_sent(url, options, variables, expected):
    ran = push(url, *options, **variables)
    assert ran.returncode == 2
    assert expected in ran.stderr
    assert PASSWORD.replace(" ", "") not in ran.stderr


def test_a_secret_is_in_no_repr():
    assert TOKEN not in repr(Grafana("http://g", TOKEN))
    assert PASSWORD not in repr(Grafana("http://g", None, "admin", PASSWORD))


@pytest.mark.slow
def test_a_password_that_everybody_on_the_way_can_read_is_warned_of():
    ran = push("http://0.0.0.0:9", "--timeout-seconds", "2")
    assert "http sends the credentials in clear text" in ran.stderr
    assert "over http" not in push("http://127.0.0.1:9", "--timeout-seconds", "2").stderr
