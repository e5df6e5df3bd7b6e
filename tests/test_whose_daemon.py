"""Whose daemon is it?  Real users, real sockets: what a stranger listens on hears nothing, and is not obeyed."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from pathlib import Path

import pytest

from pacecar import config
from pacecar.commands.daemon_client import AskError, converse
from pacecar.config import default_socket
from pacecar.monitor.ingest.unix_socket import UnixSocket, UnixSocketError
from pacecar.profiler.transport.daemon_socket import DaemonSocket
from pacecar.records import Command, DumpRequest, Goodbye
from pacecar.wire import decode_frame, encode_frame
from tests.kit.listeners import HeardInbox
from tests.kit.records import job_hello
from tests.kit.users import (  # fmt: skip
    DAEMON,
    MS_BIND,
    OWNER,
    STRANGER,
    as_user,
    commons,
    in_user_namespace,
    listen,
    mounts_of_ones_own,
    needs_root,
)
from tests.kit.waiting import until

pytestmark = needs_root

ROOT = 0


class Heard:
    """Sits at a listening socket, whoever's it is: orders in root's name whoever connects, and keeps what he says."""

    def __init__(self, listener):
        self.listener, self.frames, self.peers = listener, [], []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        try:
            while True:
                peer, _ = self.listener.accept()
                self.peers.append(peer)
                peer.send(encode_frame(Command(number=1, action="trace", at_step=0, arguments={}, uid=0)))
                while frame := peer.recv(65536):
                    self.frames.append(decode_frame(frame))
        except OSError:
            pass

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join(30)
        for one in (*self.peers, self.listener):
            one.close()


@pytest.fixture
def hears():
    """Make somebody sit at a listening socket."""
    sitting = []

    def sit(listener):
        sitting.append(Heard(listener))
        return sitting[-1]

    yield sit
    for heard in sitting:
        heard.close()


def hook(path):
    """Run the hook's side against `path` until it has said what it thinks; return (obeyed, what was logged)."""
    inbox, said = HeardInbox(), []
    obeyed = inbox.commands
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("pacecar.profiler")
    logger.addHandler(handler)
    outbox = DaemonSocket(str(path), job_hello(), inbox=inbox)
    try:
        outbox.put(Goodbye(job="j", rank=0, reason="secret", wall_ns=1))
        until(lambda: said or obeyed, "neither connected nor complained", seconds=30)
        outbox.close(0.5)
    finally:
        logger.removeHandler(handler)
    return len(obeyed), " / ".join(said)


def try_hook(uid, path, heard):
    """Return (what was heard, how many orders were carried out, what the hook logged), as user `uid`."""
    obeyed, said = as_user(uid, lambda: hook(path))
    if obeyed:
        until(lambda: len(heard.frames) >= 2, "hello and record")
    return heard.frames, obeyed, said


@pytest.fixture
def public():
    with commons() as folder:
        yield folder


@pytest.fixture
def roots():
    """A folder that only root writes, and so do those above it."""
    with commons("/run", 0o755) as folder:
        yield folder


def own(folder, uid, mode=0o755):
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, uid, uid)
    return folder


# --- strangers ---------------------------------------------------------------------------------------


def planted_folder(public):
    def plant():
        (public / "p").mkdir(mode=0o755)
        return listen(public / "p/s")

    return public / "p/s", as_user(STRANGER, plant)


def planted_link_to_a_folder(public):
    def plant():
        (public / "mine").mkdir(mode=0o755)
        (public / "p").symlink_to("mine")
        return listen(public / "mine/s")

    return public / "p/s", as_user(STRANGER, plant)


def planted_socket(public):
    return public / "s", as_user(STRANGER, lambda: listen(public / "s"))


def planted_link_to_a_socket(public):
    def plant():
        (public / "s").symlink_to("real")
        return listen(public / "real")

    return public / "s", as_user(STRANGER, plant)


def a_strangers_socket_in_ones_own_open_folder(public):
    own(public / "p", OWNER, 0o777)
    return public / "p/s", as_user(STRANGER, lambda: listen(public / "p/s"))


def a_strangers_socket_in_roots_open_folder(public):
    own(public / "p", ROOT, 0o777)
    return public / "p/s", as_user(STRANGER, lambda: listen(public / "p/s"))


def a_strangers_socket_in_a_group_folder(public):
    own(public / "p", ROOT, 0o775)
    os.chown(public / "p", ROOT, STRANGER)
    return public / "p/s", as_user(STRANGER, lambda: listen(public / "p/s"))


STRANGERS = [
    planted_folder, planted_link_to_a_folder, planted_socket, planted_link_to_a_socket,
    a_strangers_socket_in_ones_own_open_folder, a_strangers_socket_in_roots_open_folder,
    a_strangers_socket_in_a_group_folder,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plant", STRANGERS, ids=lambda plant: plant.__name__)
def test_a_strangers_daemon_hears_nothing_and_is_not_obeyed(public, hears, plant):
    path, listener = plant(public)
    frames, obeyed, said = try_hook(OWNER, path, hears(listener))
    assert (frames, obeyed) == ([], 0)
    assert f"uid {STRANGER}" in said
    assert "not trusted" in said
    assert " / " not in said, "one line"


@pytest.mark.slow
def test_without_a_system_daemon_and_runtime_folder_a_planted_default_place_is_refused(hears):
    """The issue's own case: no /run/pacecar, no $XDG_RUNTIME_DIR, and somebody was faster in /tmp."""
    if os.path.exists("/run/pacecar/pacecar.sock"):
        pytest.skip("this machine has a daemon")
    victim = 1_000_000 + os.getpid()  # other checkouts may run this test at the same time
    path = Path(as_user(victim, lambda: default_socket({})))
    assert path == Path(f"/tmp/pacecar-{victim}/pacecar.sock")

    def plant():
        path.parent.mkdir(mode=0o755)
        return listen(path)

    try:
        frames, obeyed, said = try_hook(victim, path, hears(as_user(STRANGER, plant)))
        assert (frames, obeyed) == ([], 0)
        assert f"/tmp/pacecar-{victim} belongs to uid {STRANGER}, and anybody could have made it" in said

        def serve():
            try:
                UnixSocket(path).open()
            except UnixSocketError as error:
                return str(error)
            return "served"

        assert f"belongs to uid {STRANGER}, who could listen in your place" in as_user(victim, serve)
    finally:
        path.unlink()
        path.parent.rmdir()


@pytest.mark.slow
def test_a_runtime_folder_that_su_left_behind_is_not_used(roots):
    left = own(roots / "run-user", STRANGER, 0o755)
    environ = {"XDG_RUNTIME_DIR": str(left)}
    assert str(left) in as_user(STRANGER, lambda: default_socket(environ))
    assert str(left) not in as_user(OWNER, lambda: default_socket(environ))


def test_a_system_folder_that_one_may_not_enter_is_no_error(roots, monkeypatch):
    closed = own(roots / "closed", ROOT, 0o700)
    real = os.path.exists
    monkeypatch.setattr(config.os.path, "exists", lambda path: real(str(path).replace("/run/pacecar", str(closed))))
    assert as_user(OWNER, lambda: default_socket({})) == f"/tmp/pacecar-{OWNER}/pacecar.sock"


@pytest.mark.slow
def test_the_command_line_asks_no_strangers_daemon_but_root_may_ask_a_users(public):
    path, listener = planted_folder(public)

    def ask():
        try:
            converse(str(path), DumpRequest(serial=1), timeout_seconds=0.1)
        except AskError as error:
            return str(error)

    said = as_user(OWNER, ask)
    assert "refusing to use the daemon" in said
    assert f"uid {STRANGER}" in said
    assert not select.select([listener], [], [], 0)[0], "no connection was made"
    assert "does not answer" in ask(), "root named this path, and was connected"
    listener.close()


# --- those who are trusted ---------------------------------------------------------------------------


def ones_own(public, roots):
    own(public / "p", OWNER, 0o700)
    return public / "p/s", as_user(OWNER, lambda: listen(public / "p/s", 0o600))


def ones_own_socket_straight_in_tmp(public, roots):
    return public / "s", as_user(OWNER, lambda: listen(public / "s", 0o600))


def ones_own_in_a_pods_shared_folder(public, roots):
    """Of an emptyDir: root's, and all may write."""
    own(roots / "p", ROOT, 0o777)
    return roots / "p/s", as_user(OWNER, lambda: listen(roots / "p/s"))


def of_root_for_all(public, roots):
    return roots / "s", listen(roots / "s")


def of_root_in_tmp(public, roots):
    own(public / "p", ROOT)
    return public / "p/s", listen(public / "p/s")


def of_systemds_runtime_folder(public, roots):
    own(roots / "pacecar", DAEMON)
    return roots / "pacecar/s", as_user(DAEMON, lambda: listen(roots / "pacecar/s"))


def of_a_folder_that_root_gave_in_roots_folder_in_tmp(public, roots):
    own(public / "p", ROOT)
    own(public / "p/pacecar", DAEMON)
    return public / "p/pacecar/s", as_user(DAEMON, lambda: listen(public / "p/pacecar/s"))


def over_roots_link(public, roots):
    own(roots / "pacecar", DAEMON)
    (roots / "link").symlink_to("pacecar")
    return roots / "link/s", as_user(DAEMON, lambda: listen(roots / "pacecar/s"))


def over_ones_own_link_in_tmp(public, roots):
    own(roots / "pacecar", DAEMON)
    (public / "link").symlink_to(roots / "pacecar")
    os.lchown(public / "link", OWNER, OWNER)
    return public / "link/s", as_user(DAEMON, lambda: listen(roots / "pacecar/s"))


def a_socket_that_was_mounted_into_roots_folder(public, roots):
    """`-v /run/pacecar/pacecar.sock:...`: the folder is the image's, the socket the daemon's."""
    own(roots / "outside", DAEMON)
    listener = as_user(DAEMON, lambda: listen(roots / "outside/s"))
    os.link(roots / "outside/s", roots / "s")
    return roots / "s", listener


TRUSTED = [
    ones_own, ones_own_socket_straight_in_tmp, ones_own_in_a_pods_shared_folder, of_root_for_all, of_root_in_tmp,
    of_systemds_runtime_folder, of_a_folder_that_root_gave_in_roots_folder_in_tmp, over_roots_link,
    over_ones_own_link_in_tmp, a_socket_that_was_mounted_into_roots_folder,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make", TRUSTED, ids=lambda make: make.__name__)
def test_root_oneself_and_who_was_given_a_folder_by_root_are_heard_and_obeyed(public, roots, hears, make):
    path, listener = make(public, roots)
    frames, obeyed, said = try_hook(OWNER, path, hears(listener))
    assert (obeyed, said) == (1, "")
    assert [type(frame).__name__ for frame in frames[:2]] == ["JobHello", "Goodbye"]


@pytest.mark.slow
def test_what_is_mounted_into_a_folder_that_all_may_write_was_put_there_by_root(public, roots, hears):
    """`docker run --tmpfs /run -v /run/pacecar:/run/pacecar`: that /run is mode 1777."""
    own(roots / "pacecar", DAEMON)
    heard = hears(as_user(DAEMON, lambda: listen(roots / "pacecar/s")))

    def contained():
        try:
            mounts_of_ones_own(
                ("none", str(public), "tmpfs", 0, "mode=1777"),
                (str(roots / "pacecar"), str(public / "pacecar"), "", MS_BIND, ""),
            )
        except OSError as error:
            return 0, f"skip: {error}"
        os.setresuid(OWNER, OWNER, OWNER)
        return hook(public / "pacecar/s")

    obeyed, said = as_user(ROOT, contained)
    if said.startswith("skip"):
        pytest.skip(said)
    assert (obeyed, said) == (1, "")
    until(lambda: len(heard.frames) >= 2, "hello and record")


def namespaced(path, *, is_mapped=True):
    try:
        in_user_namespace(OWNER if is_mapped else None)
    except OSError as error:
        return 0, f"skip: {error}"
    return hook(path)


@pytest.mark.slow
@pytest.mark.parametrize("of", [ROOT, DAEMON])
def test_in_a_user_namespace_a_protected_path_stands_for_a_peer_without_a_number(roots, hears, of):
    own(roots / "pacecar", of)
    heard = hears(as_user(of, lambda: listen(roots / "pacecar/s")))
    obeyed, said = as_user(OWNER, lambda: namespaced(roots / "pacecar/s"))
    if said.startswith("skip"):
        pytest.skip(said)
    assert (obeyed, said) == (1, "")
    until(lambda: len(heard.frames) >= 2, "hello and record")


@pytest.mark.slow
@pytest.mark.parametrize("plant", STRANGERS, ids=lambda plant: plant.__name__)
def test_in_a_user_namespace_strangers_are_still_refused(public, hears, plant):
    path, listener = plant(public)
    heard = hears(listener)
    obeyed, said = as_user(OWNER, lambda: namespaced(path))
    if said.startswith("skip"):
        pytest.skip(said)
    assert (obeyed, heard.frames) == (0, [])
    assert "not trusted" in said


@pytest.mark.slow
def test_without_any_mapping_nobody_is_oneself(public, hears):
    """`unshare -U`: all users of the machine, and this one, have the one number."""
    path, listener = planted_socket(public)
    heard = hears(listener)

    obeyed, said = as_user(OWNER, lambda: namespaced(path, is_mapped=False))
    if said.startswith("skip"):
        pytest.skip(said)
    assert (obeyed, heard.frames) == (0, [])
    assert "not trusted" in said
