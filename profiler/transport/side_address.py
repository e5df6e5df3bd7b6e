"""Chooses this rank's address in one of pacecar's own gloo groups, and proves that its neighbors can reach it.

By default such a group uses the address that the host name resolves to.  On a plain Debian or Ubuntu that is a loopback
address, which ranks on other hosts cannot reach.  So the address comes from the first of these:

    GLOO_SOCKET_IFNAME   the first interface in its list that has an address, as for the job's own gloo groups
    the job's store      the local end of a connection to it, the way all ranks met
    the host name        if the store has no address (a file, a table in memory)

A rank on the store's own host may reach it over loopback.  If other hosts take part, that rank uses the address at
which they reach the store.  All ranks need addresses of one family, because gloo compares them.

gloo retries an unreachable address over and over and prints each failure.  So the ranks first connect plain sockets,
along the same ring and in the same direction as gloo, and make a group only if all of them succeed.  All ranks read the
same verdict from the job's store.

Source: torch's ProcessGroupGloo and c10d's init.cpp (list of interfaces, host name, loopback where it resolves to
nothing), gloo's transport/tcp/device.cc (first address of an interface, one family, the greater address connects).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec

from .local_addresses import addresses_of_name, host_identity, interface_addresses, is_loopback, route_to
from .store_rendezvous import RendezvousError, consult

__all__ = ["ADVICE", "Place", "all_succeeded", "choose", "prove_address", "whereabouts"]

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


def _route_to_store(store: Any) -> tuple[str, str] | None:  # noqa: ANN401  dist.Store
    """Return this rank's and the store's address on the route to the store; None if the store has no address."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return route_to(host, port) if host and port else None


def _family(address: str) -> int:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def _named(address: str, origin: str) -> str:
    return f"{address} ({origin})"
