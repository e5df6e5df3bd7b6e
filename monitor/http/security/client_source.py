"""Names the source of a TCP client, the unit of fair sharing: the user on this machine, or the address.

All users of a node reach the daemon from 127.0.0.1, and so does a Prometheus beside it: by address alone one of them
could take everyone's share.  For a loopback connection the kernel knows the uid of the other end (sock_diag(7),
NETLINK_SOCK_DIAG) and answers in microseconds, without privileges.  /proc/net/tcp has the same information but must be
read whole, and a flood leaves ten thousand lines there.

An IPv6 address is cut to its /64 network, because a host may have all addresses of one.  If the kernel does not answer,
all loopback clients are one source.  Left out: clients behind a proxy, which are one source.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import suppress

__all__ = ["LoopbackUsers", "source_of"]

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
TCP_ESTABLISHED = 1
_NLMSG_HEAD = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_SOCKET_ID = struct.Struct(">HH16s16s")
_NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
"""The interface, and a cookie that matches any socket (linux/inet_diag.h)."""

_ANSWER = struct.Struct("=BBBB48xIIIII")
"""struct inet_diag_msg: family, state, timer, retransmits, the socket's id, expiry, two queues, uid, inode."""

ANSWER_SECONDS = 0.05
"""The kernel answers within the call, or not at all."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class LoopbackUsers:
    """Asks the kernel for the user at the other end of a loopback connection.  One thread at a time."""

    def __init__(self) -> None:
        self._netlink: socket.socket | None = None
        self._is_asking = True

    def uid_at(self, peer: tuple[Address, int], own: tuple[Address, int]) -> int | None:
        """Return the uid of the socket `peer` connected to `own`; None if the kernel does not tell."""
        if not self._is_asking:
            return None
        try:
            if self._netlink is None:
                self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG)
                self._netlink.settimeout(ANSWER_SECONDS)
            self._netlink.send(_question(peer, own))
            return _uid_in(self._netlink.recv(4096))
        except TimeoutError:  # a late answer would be taken for the next client's
            self.close()
        except OSError:
            self.close()
            self._is_asking = False  # forbidden or not supported: do not try again for each client
        return None

    def close(self) -> None:
        """Close the netlink socket."""
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None


def _question(peer: tuple[Address, int], own: tuple[Address, int]) -> bytes:
    family = socket.AF_INET if peer[0].version == 4 else socket.AF_INET6
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << TCP_ESTABLISHED)
    body += _SOCKET_ID.pack(peer[1], own[1], peer[0].packed.ljust(16, b"\0"), own[0].packed.ljust(16, b"\0"))
    body += _NO_COOKIE
    return _NLMSG_HEAD.pack(_NLMSG_HEAD.size + len(body), SOCK_DIAG_BY_FAMILY, 1, 0, 0) + body


def _uid_in(answer: bytes) -> int | None:
    """Return the uid; None for an error or a closed socket, for which the kernel reports root."""
    if len(answer) < _NLMSG_HEAD.size + _ANSWER.size:
        return None
    if _NLMSG_HEAD.unpack_from(answer)[1] != SOCK_DIAG_BY_FAMILY:
        return None
    _, state, _, _, _, _, _, uid, _ = _ANSWER.unpack_from(answer, _NLMSG_HEAD.size)
    return int(uid) if state == TCP_ESTABLISHED else None


def source_of(sock: socket.socket, users: LoopbackUsers) -> str:
    """Return the source of a connected client: "uid 1000", an address, or an IPv6 network."""
    with suppress(OSError, ValueError, IndexError):
        peer, own = _endpoint(sock.getpeername()), _endpoint(sock.getsockname())
        if peer[0].is_loopback or peer[0] == own[0]:  # a machine reaches its own addresses by loopback, too
            uid = users.uid_at(peer, own)
            return str(peer[0]) if uid is None else f"uid {uid}"
        if isinstance(peer[0], ipaddress.IPv6Address):
            return str(ipaddress.IPv6Network((int(peer[0]) >> 64 << 64, 64)))
        return str(peer[0])
    return "unknown"


def _endpoint(address: tuple[str, int]) -> tuple[Address, int]:
    """Return address and port; an IPv4-mapped IPv6 address as IPv4."""
    found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found), int(address[1])
