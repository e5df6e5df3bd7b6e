"""TLS and passwords: real certificates, real hashes, and files as people get them wrong."""

import base64
import http.client
import re
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest

from pacecar.monitor.http.security import basic_auth
from pacecar.monitor.http.security.basic_auth import AuthVerdict, BasicAuth
from pacecar.monitor.http.security.web_config import OPEN, Security, WebConfigError, authorization, read_security
from pacecar.monitor.http.web import pages
from tests.kit.net import basic, get
from tests.kit.waiting import until
from tests.kit.web import page, web_server

pytest.importorskip("yaml", reason="the extra `secure` is not installed")
bcrypt = pytest.importorskip("bcrypt", reason="the extra `secure` is not installed")

CHEAP = 4  # bcrypt's lowest cost: a millisecond


def hashed(password, cost=CHEAP):
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost)).decode()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """Two pairs of certificate and key, each its own authority; `c` is a client's."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not here to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    for name in "abc":
        command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        command += ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture
def folder(certificates, tmp_path):
    return shutil.copytree(certificates, tmp_path / "web")


@pytest.fixture
def write(folder):
    def write(text):
        (folder / "web.yml").write_text(text)
        return folder / "web.yml"

    return write


@pytest.fixture
def serve():
    with ExitStack() as stack:
        yield lambda security: stack.enter_context(
            web_server(pages(page, lambda request: None, lambda: None), security)
        )


TLS = "tls_server_config:\n  cert_file: a.crt\n  key_file: a.key\n"


def test_a_whole_file_is_read(write, folder):
    users = "".join(f"  {name}: {hashed('x')}\n" for name in ("one", "two"))
    security = read_security(write(f"""{TLS}  min_version: TLS13
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: c.crt
http_server_config:
  http2: false
  headers:
    X-Frame-Options: deny
    Strict-Transport-Security: max-age=31536000
basic_auth_users:
{users}"""))  # fmt: skip
    assert security.context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert security.context.verify_mode is ssl.CERT_REQUIRED
    assert dict(security.headers) == {"X-Frame-Options": "deny", "Strict-Transport-Security": "max-age=31536000"}
    assert set(security.users) == {"one", "two"}
    assert {path.name for path in security.files} == {"web.yml", "a.crt", "a.key", "c.crt"}


def test_no_file_and_an_empty_file_ask_for_nothing(write):
    assert read_security(None) is OPEN
    empty = read_security(write("# nothing yet\n"))
    assert (empty.context, empty.users, empty.headers) == (None, {}, ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tls_server_config: [", r"web.yml: not valid YAML: line 1: "),
        ("tls_server_config:\n  cert_file: a.crt\n", r"missing required field `key_file` - at `\$.tls_server_config`"),
        (TLS.replace("a.crt", "z.crt"), r"tls_server_config: cert_file .*z.crt: cannot be read: No such file"),
        (TLS.replace("a.key", "b.key"), r"a.crt and .*b.key are not a certificate with its key"),
        (TLS.replace("a.key", "a.crt"), r"are not a certificate with its key"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n", r"client_ca_file and .* go together"),
        (TLS + "  client_ca_file: c.crt\n", r"client_ca_file and .* go together"),
        (TLS + "  client_ca_file: a.key\n  client_auth_type: VerifyClientCertIfGiven\n", r"a.key: no cert"),
        (TLS + "  client_auth_type: RequestClientCert\n", r"Invalid enum value 'RequestClientCert'"),
        (TLS + "  client_allowed_sans: [a]\n", r"unknown field `client_allowed_sans`"),
        (TLS + "  min_version: TLS10\n", r"Invalid enum value 'TLS10'"),
        (TLS + "  min_version: TLS13\n  max_version: TLS12\n", r"min_version is above max_version"),
        ("basic_auth_users:\n  me: secret\n", r"basic_auth_users: me: not a bcrypt hash"),
        ("basic_auth_users:\n  'a:b': x\n", r"cannot be a user's name"),
        ("basic_auth_users:\n  me: $2y$15$" + "a" * 53 + "\n", r"me: bcrypt cost 15 is not from 4 to 14"),
        ("basic_auth_users:\n  me: x\n  me: y\n", r"line 3: me appears twice"),
        ("basic_auth_user: {}\n", r"unknown field `basic_auth_user`"),
        ('http_server_config:\n  headers:\n    X-XSS-Protection: "1\\r\\nX: y"\n', r"a header is one line"),
        ("a: &a [*a]\n", r"web.yml: "),
        ("x" * 300_000, r"larger than"),
        ("\x00", r"not valid YAML"),
        ("just a text", r"Expected `object`, got `str`"),
    ],
)  # fmt: skip
def test_what_people_get_wrong_is_named_and_no_secret_is_repeated(write, text, says):
    with pytest.raises(WebConfigError, match=says) as caught:
        read_security(write(text))
    assert "web.yml" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_without_the_extra_the_file_is_refused_and_the_extra_named(write, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bcrypt", None)
    with pytest.raises(WebConfigError, match=r"pip install 'pacecar\[secure\]'"):
        read_security(write(f"basic_auth_users:\n  me: {hashed('x')}\n"))


def test_a_password_is_asked_for_and_told_from_a_wrong_one_in_the_same_words(serve, write):
    security = read_security(write(f"basic_auth_users:\n  me: {hashed('right')}\n"))
    server = serve(security)
    assert get(server.port).status == 401
    assert get(server.port).headers["WWW-Authenticate"].startswith('Basic realm="pacecar"')
    assert get(server.port, Authorization=basic("me", "right")).status == 200
    answers = {
        (a.status, a.headers["Content-Length"])
        for a in (get(server.port, Authorization=basic(user, "no")) for user in ("me", "nobody"))
    }
    assert len(answers) == 1
    for odd in ("Basic", "Basic !!!", "Bearer abc", "Basic " + base64.b64encode(b"nocolon").decode(), "Basic /w=="):
        assert get(server.port, Authorization=odd).status == 401
    refused = {reason.value: count for reason, count in server.refused().items() if count}
    assert refused == {"no_credentials": 7, "credentials": 2}


def test_passwords_may_be_long_and_odd(write):
    long = "ä" * 60
    stored = bcrypt.hashpw(long.encode()[:72], bcrypt.gensalt(CHEAP)).decode()
    auth = BasicAuth(read_security(write(f"basic_auth_users:\n  me: {stored}\n  you: {hashed('x')}\n")))
    assert auth.check(basic("me", long)) is AuthVerdict.ALLOWED
    assert auth.check(basic("you", "x")) is AuthVerdict.ALLOWED
    assert auth.check(basic("you", "x\0y")) is AuthVerdict.WRONG
    assert authorization(basic("me", "a:b")) == ("me", "a:b")


def test_what_was_right_or_wrong_is_remembered():
    calls = []

    def verify(password, stored):
        calls.append(stored)
        return password == b"right"

    auth = BasicAuth(Security(users={"me": b"$2b$04$x"}, verify=verify))
    assert auth.recall(basic("me", "right")) is AuthVerdict.UNCHECKED
    assert auth.check(basic("me", "right")) is AuthVerdict.ALLOWED
    assert auth.recall(basic("me", "old")) is AuthVerdict.UNCHECKED
    assert auth.check(basic("me", "old")) is AuthVerdict.WRONG
    for _ in range(100):
        assert auth.recall(basic("me", "right")) is AuthVerdict.ALLOWED
        assert auth.recall(basic("me", "old")) is AuthVerdict.WRONG
    assert len(calls) == 2


def test_who_does_not_exist_is_checked_against_a_hash_of_the_same_cost():
    """No timing oracle: the same work for a stranger, the same each time, among the costs that the users have."""
    seen = []
    users = {"me": b"$2b$04$" + b"a" * 53, "you": b"$2b$06$" + b"b" * 53}
    auth = BasicAuth(Security(users=users, verify=lambda _, stored: bool(seen.append(stored))))
    for _ in range(2):
        for number in range(40):
            assert auth.check(basic(f"stranger{number}", "x")) is AuthVerdict.WRONG
    costs = [stored[4:6] for stored in seen]
    assert costs[:40] == costs[40:]
    assert set(costs) == {b"04", b"06"}
    assert not set(seen) & set(users.values())
    for cost in (4, 6):
        assert bcrypt.checkpw(b"", basic_auth._NO_PASSWORD.format(cost=cost).encode()) is False


def test_memory_of_the_gate_is_bounded_and_holds_no_password():
    auth = BasicAuth(Security(users={"me": b"$2b$04$x"}, verify=lambda *_: True))
    for number in range(1000):
        auth.check(basic("me", f"pass{number}"))
    assert len(auth._right) == basic_auth.REMEMBERED_MAX
    assert not [digest for digest in auth._right if b"pass" in digest]


def trusting(folder, authority, client=None):
    context = ssl.create_default_context(cafile=folder / f"{authority}.crt")
    if client is not None:
        context.load_cert_chain(folder / f"{client}.crt", folder / f"{client}.key")
    return context


def test_tls_serves_who_speaks_it_and_counts_who_does_not(serve, write, folder):
    server = serve(read_security(write(TLS)))
    assert get(server.port, context=trusting(folder, "a")).status == 200
    with pytest.raises(ssl.SSLError):
        get(server.port, context=trusting(folder, "b"))
    with pytest.raises((http.client.HTTPException, OSError)):
        get(server.port)  # not encrypted
    assert server.refused()["tls"] >= 1
    assert get(server.port, context=trusting(folder, "a")).status == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # python's own, of such a socket
def test_a_client_that_resets_before_it_is_taken_in_does_not_end_the_server(serve, write, folder):
    """Such a socket has lost its peer when TLS is put on it, which raises there and not in the handshake."""
    server = serve(read_security(write(TLS)))
    reset = struct.pack("ii", 1, 0)  # close sends RST (socket(7), SO_LINGER)
    for said in (b"", b"hello", b"GET / HTTP/1.1\r\n\r\n") * 30:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
            client.sendall(said)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert get(server.port, context=ssl.create_default_context(cafile=folder / "a.crt")).status == 200
    assert server.thread.restarts == 0


def test_a_client_without_a_certificate_is_refused_where_one_is_required(serve, write, folder):
    text = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: c.crt\n"
    server = serve(read_security(write(text)))
    assert get(server.port, context=trusting(folder, "a", "c")).status == 200
    for client in (None, "b"):
        with pytest.raises((ssl.SSLError, http.client.HTTPException, OSError)):
            get(server.port, context=trusting(folder, "a", client))
    until(lambda: server.refused()["tls"] >= 2)  # it counts after the client has been told
    assert server.refused()["tls"] == 2


@pytest.mark.slow
def test_certificates_and_users_are_exchanged_while_clients_come(serve, write, folder):
    server = serve(read_security(write(TLS)))
    both = ssl.create_default_context(cafile=folder / "a.crt")
    both.load_verify_locations(folder / "b.crt")
    stop, failed, served = threading.Event(), [], []

    def come():
        while not stop.is_set():
            try:
                served.append(get(server.port, context=both).status)
            except (OSError, http.client.HTTPException) as error:
                failed.append(error)

    client = threading.Thread(target=come)
    client.start()
    for name in "bababab":
        server.secure(read_security(write(TLS.replace("a.", f"{name}."))))
        time.sleep(0.05)
    stop.set()
    client.join()
    assert not failed
    assert set(served) == {200}
    with pytest.raises(ssl.SSLError):
        get(server.port, context=trusting(folder, "a"))


def test_a_slow_handshake_and_a_slow_password_hold_up_nobody(serve, write, folder):
    """A bcrypt of a quarter of a second, and a client that says half a handshake."""
    text = f"basic_auth_users:\n  me: {hashed('right')}\n"
    security = read_security(write(text))
    release = threading.Event()

    def slowly(password, stored):
        release.wait(30)
        return security.verify(password, stored)

    slow = Security(users=security.users, verify=slowly)
    server = serve(slow)
    waiting = threading.Thread(target=lambda: get(server.port, Authorization=basic("me", "right")))
    waiting.start()
    assert get(server.port).status == 401, "answered while the other's password is being checked"
    release.set()
    waiting.join()


def test_urllib_logs_in_as_users_do(serve, write):
    server = serve(read_security(write(f"basic_auth_users:\n  me: {hashed('right')}\n")))
    manager = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    manager.add_password(None, f"http://127.0.0.1:{server.port}/", "me", "right")
    opener = urllib.request.build_opener(urllib.request.HTTPBasicAuthHandler(manager))
    assert opener.open(f"http://127.0.0.1:{server.port}/metrics", timeout=30).read() == b"ok\n"
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30)
    refused.value.close()  # it is a response too


def test_the_hash_of_htpasswd_is_accepted(write):
    stored = re.sub(r"^\$2b\$", "$2y$", hashed("right"))
    auth = BasicAuth(read_security(write(f"basic_auth_users:\n  me: {stored}\n")))
    assert auth.check(basic("me", "right")) is AuthVerdict.ALLOWED
