"""Brings the ranks together before pacecar makes a gloo group: all are present, configured alike, and can be reached.

A collective that one rank does not join hangs the others.  So ranks must find out by other means, the job's store, if
one of them does not attach or is configured differently.  A store does not block: a key exists or it does not.  It may
outlive its ranks: torchrun's agent keeps its store while it restarts failed workers (torch 2.13,
dynamic_rendezvous.py), so it still has the keys of the previous life.  So every key contains `life`.

By default a gloo group uses the address that the host name resolves to.  On a plain Debian or Ubuntu that is a loopback
address, which ranks on other hosts cannot reach.  So a rank's address comes from the first of these:

    GLOO_SOCKET_IFNAME   the first interface in its list that has an address, as for the job's own gloo groups
    the job's store      the local end of a connection to it, the way all ranks met
    the host name        if the store has no address (a file, a table in memory)

A rank on the store's own host may reach it over loopback.  If other hosts take part, that rank uses the address at
which they reach the store.  All ranks need addresses of one family, because gloo compares them.  Looking them up sends
packets only to a name server, and waits for it at most RESOLVE_SECONDS.

gloo retries an unreachable address over and over and prints each failure.  So the ranks first connect plain sockets,
along the same ring and in the same direction as gloo, and make a group only if all of them succeed.  All ranks read the
same verdict from the job's store.

Source: torch's ProcessGroupGloo and c10d's init.cpp (list of interfaces, host name, loopback where it resolves to
nothing), gloo's transport/tcp/device.cc (first address of an interface, one family, the greater address connects).
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

__all__ = [
    "ADVICE",
    "MEET_SECONDS",
    "Place",
    "RendezvousError",
    "addresses_of_name",
    "all_succeeded",
    "choose",
    "consult",
    "host_identity",
    "innermost",
    "interface_addresses",
    "is_loopback",
    "life",
    "meet",
    "prove_address",
    "route_to",
    "whereabouts",
]

MEET_SECONDS = 30.0
"""How long ranks wait for each other.  All attach after building the same model, so a later rank does not attach."""

MEET_POLL_SECONDS = 0.002
MEET_POLL_SECONDS_MAX = 0.02
"""Pauses between two polls of the store: short at first, because all ranks usually arrive at the same time."""


def life(world_size: int) -> str:
    """Return a name for this life of the job's ranks: the same on all of them, and a new one after a restart."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}of{world_size}"


class RendezvousError(RuntimeError):
    """Not all ranks arrived, or they are configured differently; nothing was started."""


def meet(
    store: Any,  # noqa: ANN401  dist.Store; its methods are untyped
    rank: int,
    world_size: int,
    claim: str,
    *,
    name: str,
    seconds: float,
    rest: Callable[[float], object] = time.sleep,
) -> None:
    """Return once all ranks have arrived with the same `claim`; other arguments are as for `consult`.

    Raises:
        RendezvousError: a rank did not arrive in time, or has a different claim.
    """

    def judge(claims: Sequence[str]) -> str:
        other = next((r for r, c in enumerate(claims) if c != claim), None)
        if other is not None:
            raise RendezvousError(f"rank {other} has {claims[other]}, rank 0 has {claim}")
        return ""

    consult(store, rank, world_size, claim, judge, name=name, seconds=seconds, absent="did not attach", rest=rest)


def consult(
    store: Any,  # noqa: ANN401  as above
    rank: int,
    world_size: int,
    said: str,
    judge: Callable[[Sequence[str]], str],
    *,
    name: str,
    seconds: float,
    absent: str,
    rest: Callable[[float], object] = time.sleep,
) -> str:
    """Tell the other ranks what this one `said`; return rank 0's conclusion, `judge` of what all ranks said.

    The verdict is one key, written by compare-and-set: a rank that waited too long writes "no" unless "go" is already
    there.  So either all ranks that arrived go on or none does, whatever the order of arrival.
    `name` must be the same on all ranks and used once; `absent` says what ranks missing after `seconds` did not do.
    `rest` waits between two polls, and may raise to end the rendezvous for this rank.

    Raises:
        RendezvousError: a rank did not arrive in time, or `judge` raised it on rank 0; all ranks raise the same.
    """
    prefix = f"pacecar/{life(world_size)}/{name}"
    store.set(f"{prefix}/rank{rank}", said)
    deadline = time.monotonic() + seconds
    keys = [f"{prefix}/rank{r}" for r in range(world_size)]
    if not store.check([keys[rank]]):  # torch's FileStore after its file was removed; other calls then never return
        raise RendezvousError("the job's store forgets what is written to it")
    pause = MEET_POLL_SECONDS
    while not store.check([f"{prefix}/verdict"]):
        if rank == 0 and store.check(keys):
            try:
                verdict = "go: " + judge([store.get(key).decode() for key in keys])
            except RendezvousError as error:
                verdict = f"no: {error}"
            store.compare_set(f"{prefix}/verdict", "", verdict)
        elif time.monotonic() > deadline:
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            reason = f"ranks {missing[:8]} {absent}" if missing else "rank 0 did not answer"
            store.compare_set(f"{prefix}/verdict", "", f"no: {reason} within {seconds:g} s")
        else:
            rest(pause)
            pause = min(2 * pause, MEET_POLL_SECONDS_MAX)
    verdict = store.get(f"{prefix}/verdict").decode()
    if not verdict.startswith("go: "):
        raise RendezvousError(verdict.removeprefix("no: "))
    return str(verdict.removeprefix("go: "))


RESOLVE_SECONDS = 0.5
"""The longest a name lookup may take: the job has just looked up its master's name, and must not wait to start."""

_SIOCGIFADDR = 0x8915  # netdevice(7)
_NAME_BYTES_MAX = 15
_SCOPE_LINK = 0x20
_TENTATIVE, _DUPLICATE = 0x40, 0x08
"""IFA_F_TENTATIVE and IFA_F_DADFAILED (linux/if_addr.h): an address with either flag cannot be bound."""


def interface_addresses(name: str, *, net_root: Path = Path("/proc/net")) -> tuple[str, ...]:
    """Return the interface's first IPv4 address and its first IPv6 address that other hosts can use, if any.

    Link-local IPv6 addresses are omitted: they need the number of an interface on the other host.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", name.encode()[:_NAME_BYTES_MAX])
        found.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]))
    with suppress(OSError):  # a kernel without IPv6 has no such file
        for line in (net_root / "if_inet6").read_text().splitlines():
            digits, _, _, scope, flags, interface = line.split()
            usable = int(scope, 16) != _SCOPE_LINK and not int(flags, 16) & (_TENTATIVE | _DUPLICATE)
            if interface == name and usable:
                found.append(str(ipaddress.IPv6Address(int(digits, 16))))
                break
    return tuple(found)


def route_to(host: str, port: int) -> tuple[str, str] | None:
    """Return the local and the remote address that the kernel would choose for a connection to `host`.

    Return None if the name does not resolve in time, or there is no route.
    """
    for family, address in _resolve(host, port):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # on a UDP socket this chooses the addresses and sends nothing
            return str(probe.getsockname()[0]), str(address[0])
    return None


def addresses_of_name(name: str) -> tuple[str, ...]:
    """Return the first address of each family that `name` resolves to and this host can bind."""
    found: dict[int, str] = {}
    for family, address in _resolve(name, 0):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            found.setdefault(family, str(address[0]))
    return tuple(found.values())


def is_loopback(address: str) -> bool:
    """Return whether `address` only reaches this host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def host_identity(*, proc_root: Path = Path("/proc")) -> str:
    """Return a name for this machine and network namespace; processes with the same name share their loopback."""
    try:
        boot = (proc_root / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        return f"{boot} {os.readlink(proc_root / 'self' / 'ns' / 'net')}"
    except OSError:
        return socket.gethostname()


def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []

    def resolve() -> None:
        with suppress(OSError, UnicodeError):
            found.extend((info[0], info[4]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=resolve, name="pacecar-resolve", daemon=True)
    thread.start()
    thread.join(RESOLVE_SECONDS)
    return list(found)


PROVE_SECONDS = 5.0
"""How long ranks that have met wait for each other's next message, and for a connection.

Long enough to retransmit two lost packets of a handshake (after 1 s and another 2 s: RFC 6298).
"""

ADVICE = "set GLOO_SOCKET_IFNAME on every rank to the interface by which it reaches the others"

_FALLBACK = "127.0.0.1"


class Place(msgspec.Struct, frozen=True):
    """Where one rank is: its `addresses`, at most one per family, preferred ones first, and their origin.

    `host` is the same for ranks that share their loopback.  `store` is the address at which this rank reaches the job's
    store, None if the store has no address.
    """

    host: str
    addresses: tuple[str, ...]
    origin: str
    store: str | None = None
    is_by_store: bool = False


_place = msgspec.json.Decoder(Place)


def prove_address(
    store: Any,  # noqa: ANN401  dist.Store
    rank: int,
    world_size: int,
    *,
    name: str,
    rest: Callable[[float], object] = time.sleep,
) -> str:
    """Return this rank's address in pacecar's own groups; waits for the other ranks, which have already met.

    `name` and `rest` are as for `consult`.

    Raises:
        RendezvousError: the ranks cannot reach each other; all ranks raise the same, with addresses and a remedy.
    """

    def ask(what: str, said: str, judge: Callable[[Sequence[str]], str]) -> str:
        return consult(
            store, rank, world_size, said, judge, name=f"{name}/{what}", seconds=2 * PROVE_SECONDS,
            absent="did not say where they are", rest=rest,
        )  # fmt: skip

    def chosen(places: Sequence[str]) -> str:
        decoded = [_place.decode(place) for place in places]
        return msgspec.json.encode([choose(decoded), [place.origin for place in decoded]]).decode()

    own = msgspec.json.encode(whereabouts(store)).decode()
    addresses, origins = msgspec.json.decode(ask("places", own, chosen), type=tuple[list[str], list[str]])
    door = None
    try:
        door = socket.create_server((addresses[rank], 0), family=_family(addresses[rank]), backlog=2)
        said = str(door.getsockname()[1])
    except OSError as error:
        said = f"rank {rank} cannot use {_named(addresses[rank], origins[rank])}: {error.strerror or error}; {ADVICE}"
    try:
        ports = ask("doors", said, _all_open).split()
        failures = (
            f"rank {rank} cannot reach rank {other} at {_named(addresses[other], origins[other])}: {reason}; {ADVICE}"
            for other in _connects_to(rank, addresses)
            if (reason := _unreachable(addresses[other], int(ports[other]), rest)) is not None
        )
        ask("reached", next(failures, ""), all_succeeded)
    finally:
        if door is not None:
            door.close()
    return addresses[rank]


def whereabouts(store: Any, environ: Mapping[str, str] = os.environ) -> Place:  # noqa: ANN401  dist.Store
    """Return where this rank is, from the first source that knows."""
    host = host_identity()
    route = _route_to_store(store)
    reached_at = None if route is None else route[1]
    there = [name for _, name in socket.if_nameindex()]
    told = environ.get("GLOO_SOCKET_IFNAME", "")
    for interface in told.split(","):
        addresses = interface_addresses(interface.strip())
        if addresses:
            return Place(host, addresses, f"of {interface.strip()}, by GLOO_SOCKET_IFNAME={told}", reached_at)
    if len(told) > 1:  # torch ignores a name of one letter
        reason = f"GLOO_SOCKET_IFNAME={told} names no interface with an address (there are {', '.join(there)})"
        return Place(host, (), reason, reached_at)
    if route is not None:
        others = next((found for found in map(interface_addresses, there) if route[0] in found), ())
        addresses = tuple(dict.fromkeys((route[0], *others)))
        return Place(host, addresses, "from which it reaches the job's store", reached_at, is_by_store=True)
    name = socket.gethostname()
    addresses = addresses_of_name(name)
    if addresses:
        return Place(host, addresses, f"of the host name {name}")
    return Place(host, (_FALLBACK,), f"loopback, as the host name {name} resolves to nothing")


def choose(places: Sequence[Place]) -> list[str]:
    """Return the address of each rank, all of one family.

    Raises:
        RendezvousError: no addresses let ranks on different hosts reach each other.
    """
    candidates = [_reachable(place, places) for place in places]
    for rank, (addresses, place) in enumerate(zip(candidates, places, strict=True)):
        if not addresses:
            raise RendezvousError(f"rank {rank}: {place.origin}; {ADVICE}")
    for version in (4, 6):
        chosen = [_of_version(addresses, version) for addresses in candidates]
        found = [address for address in chosen if address is not None]
        if len(found) == len(places):
            _refuse_shared(found, places)
            return found
    versions = [[ipaddress.ip_address(a).version for a in addresses] for addresses in candidates]
    other = next(rank for rank, mine in enumerate(versions) if not set(mine) & set(versions[0]))
    raise RendezvousError(
        f"rank 0 is at {candidates[0][0]} and rank {other} at {candidates[other][0]}: IPv4 and IPv6; {ADVICE}"
    )


def all_succeeded(said: Sequence[str]) -> str:
    """Conclude for `consult` that no rank failed; each said "", or why it failed.

    Raises:
        RendezvousError: a rank failed.
    """
    failure = next((reason for reason in said if reason), None)
    if failure is not None:
        raise RendezvousError(failure)
    return ""


def _reachable(place: Place, places: Sequence[Place]) -> tuple[str, ...]:
    """Return the addresses of `place`, or those of the store's host if this rank reaches it over loopback."""
    others = [other for other in places if other.host != place.host]
    if not others or not place.is_by_store or not is_loopback(place.addresses[0]):
        return place.addresses
    seen = (other.store for other in others if other.store is not None and not is_loopback(other.store))
    return tuple(dict.fromkeys(seen)) or place.addresses


def _refuse_shared(addresses: Sequence[str], places: Sequence[Place]) -> None:
    """Refuse addresses that mean a different host on each host: loopback, or a bridge with the same name everywhere."""
    host_of: dict[str, tuple[int, str]] = {}
    for rank, (address, place) in enumerate(zip(addresses, places, strict=True)):
        first, host = host_of.setdefault(address, (rank, place.host))
        if host != place.host:
            both = f"ranks {first} and {rank} are on different hosts and both at {address}"
            raise RendezvousError(f"{both} ({place.origin}); {ADVICE}")
        if is_loopback(address) and any(other.host != place.host for other in places):
            raise RendezvousError(f"rank {rank} is at {_named(address, place.origin)}, and others elsewhere; {ADVICE}")


def _of_version(addresses: Sequence[str], version: int) -> str | None:
    return next((address for address in addresses if ipaddress.ip_address(address).version == version), None)


def _all_open(said: Sequence[str]) -> str:
    """Return all ports; refuse if a rank could not open one."""
    for port in said:
        if not port.isdigit():
            raise RendezvousError(port)
    return " ".join(said)


def _connects_to(rank: int, addresses: Sequence[str]) -> list[int]:
    """Return the ring neighbors that gloo connects to from `rank`: those with smaller addresses.

    Between equal addresses gloo compares ports, which are not known yet, so either rank may connect.
    """
    packed = [ipaddress.ip_address(address).packed for address in addresses]
    neighbours = dict.fromkeys(((rank + 1) % len(addresses), (rank - 1) % len(addresses)))
    return [other for other in neighbours if packed[other] <= packed[rank] and other != rank]


def _unreachable(address: str, port: int, rest: Callable[[float], object]) -> str | None:
    """Return why `address` cannot be connected to, None if it can; the connection need not be accepted."""
    rest(0.0)
    try:
        with closing(socket.create_connection((address, port), PROVE_SECONDS)):
            return None
    except TimeoutError:
        return f"no answer within {PROVE_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)


def innermost(store: Any) -> Any:  # noqa: ANN401  dist.Store
    """Return the store that holds the keys of `store`, without the prefixes around it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _route_to_store(store: Any) -> tuple[str, str] | None:  # noqa: ANN401  dist.Store
    """Return this rank's and the store's address on the route to the store; None if the store has no address."""
    store = innermost(store)
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return route_to(host, port) if host and port else None


def _family(address: str) -> int:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def _named(address: str, origin: str) -> str:
    return f"{address} ({origin})"
