"""How do the ranks of a test get a host each?  A network namespace, with an /etc/hosts of its own.

The ranks' namespaces share a wire, device WIRE.  What the host name resolves to there is the test's choice: loopback as
on a plain Debian or Ubuntu, nothing, or the address of a device that leads nowhere (NOWHERE).  A second wire (SIDE), on
request, can lose packets or go down while the first one works.

Needs root.  Everything has a new name and is removed at the end.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.shaping import Link, change_wire, delayed_wire, sh

__all__ = ["LOOPBACK", "NOWHERE", "SIDE", "WIRE", "Hosts", "hosts"]

WIRE, SIDE, NOWHERE = "e0", "e1", "e9"

LOOPBACK = "127.0.1.1"
"""What Debian and Ubuntu write into /etc/hosts for the host's own name."""

_NETNS = Path("/etc/netns")


class Hosts:
    """`prefixes[rank]` is what to put before a rank's command; rank 0 is at `address`."""

    def __init__(self, middle: str, names: list[str], address: str, hub: subprocess.Popen[str] | None) -> None:
        self._middle = middle
        self.names = names
        self.prefixes = [["ip", "netns", "exec", name] for name in names]
        self.address = address
        self._hub = hub

    def unplug(self, host: int) -> None:
        """Let no packet of the host's first wire through, which neither end can see."""
        sh(f"ip -n {self._middle} link set p{host} nomaster")

    def change_side(self, link: Link) -> None:
        """Let the second wire carry packets as `link` would."""
        assert self._hub is not None, "these hosts have one wire"
        change_wire(self._hub, link)


@contextmanager
def hosts(count: int, *, name: str | None = LOOPBACK, ipv6: bool = False, side: Link | None = None) -> Iterator[Hosts]:
    """Make `count` hosts and remove them again.

    `name` is what their host name resolves to, None: to nothing; "e9": to the address of a device that leads nowhere.
    `ipv6`: the wire has no IPv4 address.  `side`: there is a second wire, with a delay.

    Raises:
        RuntimeError: it cannot be done here; says what failed.
    """
    stem = f"ph{uuid.uuid4().hex[:6]}"
    middle, names = f"{stem}b", [f"{stem}{rank}" for rank in range(count)]
    hub: subprocess.Popen[str] | None = None
    made: list[str] = []
    try:
        for each in (middle, *names):
            sh(f"ip netns add {each}")
            made.append(each)
            sh(f"ip -n {each} link set lo up")
        sh(f"ip -n {middle} link add br0 type bridge")
        sh(f"ip -n {middle} link set br0 up")
        for rank, each in enumerate(names):
            sh(f"ip -n {each} link add {WIRE} type veth peer name p{rank} netns {middle}")
            sh(f"ip -n {middle} link set p{rank} master br0 up")
            sh(f"ip -n {each} addr add {_address(rank, ipv6=ipv6)}/{64 if ipv6 else 24} dev {WIRE} nodad")
            sh(f"ip -n {each} link set {WIRE} up")
            sh(f"ip -n {each} link add {NOWHERE} type veth peer name n{rank} netns {middle}")
            sh(f"ip -n {each} addr add 10.79.{rank}.1/24 dev {NOWHERE}")
            sh(f"ip -n {each} link set {NOWHERE} up")
            _write_names(each, f"10.79.{rank}.1" if name == NOWHERE else name)
        if side is not None:
            hub = delayed_wire(middle, names, side, SIDE)
            for rank, each in enumerate(names):
                sh(f"ip -n {each} addr add 10.80.0.{rank + 1}/24 dev {SIDE}")
                sh(f"ip -n {each} link set {SIDE} up")
        yield Hosts(middle, names, _address(0, ipv6=ipv6), hub)
    finally:
        if hub is not None:
            hub.communicate()  # the end of its standard input is its own
        for each in made:
            subprocess.run(["ip", "netns", "del", each], check=False)
            shutil.rmtree(_NETNS / each, ignore_errors=True)


def _address(rank: int, *, ipv6: bool) -> str:
    return f"fd78::{rank + 1}" if ipv6 else f"10.78.0.{rank + 1}"


def _write_names(namespace: str, name: str | None) -> None:
    """Write what `ip netns exec` mounts over /etc: names come from this file alone."""
    folder = _NETNS / namespace
    folder.mkdir(parents=True)
    own = "" if name is None else f"{name} {socket.gethostname()}\n"
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{own}")
    (folder / "nsswitch.conf").write_text("hosts: files\n")
