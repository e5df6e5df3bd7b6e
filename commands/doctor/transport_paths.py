"""Derives the path of gradients from the facts, RDMA or TCP and over which cards, for several rules.  Pure.

Links are network cards and bonds of them.  A bridge or virtual cable also reports a speed, 10 Gbit/s, that means
nothing; a card in a bond has no address of its own.

NCCL uses RDMA if a port is up and no setting forbids it.  Otherwise, and always for gloo, TCP carries gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from .facts.evidence import Gain
from .facts.model import Interface, NodeFacts, PciDevice, RdmaPort

__all__ = [
    "DMABUF_KERNEL",
    "carriers",
    "is_local_run",
    "is_one_node_run",
    "links",
    "loader_workers",
    "local_gain",
    "local_ranks",
    "near_ports",
    "reached_as",
    "selected",
    "shares_switch",
    "training_ports",
    "uses_rdma",
]

DMABUF_KERNEL = (5, 12)
"""The first kernel whose RDMA drivers accept a dma-buf (NCCL user guide, Troubleshooting, GPU-to-NIC communication)."""

LOADER_WORKERS_MAX = 16
"""With more workers, the disk limits loading rather than the processors."""

_BELOW_ROOT = 3
"""Common parts of two paths that mean a common switch: host bridge, root port and the switch's upstream port."""


def shares_switch(one: PciDevice, other: PciDevice) -> bool:
    """Return whether both are below one PCIe switch, so that traffic between them never reaches the host."""
    pairs = zip(one.path[:-1], other.path[:-1], strict=False)
    common = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        common += 1
    return common >= _BELOW_ROOT


def near_ports(facts: NodeFacts, address: str) -> tuple[RdmaPort, ...]:
    """Return the RDMA ports below the same switch as the GPU at `address`."""
    gpu = facts.device_at(address)
    if gpu is None:
        return ()
    cards = {port: facts.device_at(port.address) for port in facts.network.ports}
    return tuple(port for port, card in cards.items() if card is not None and shares_switch(gpu, card))


def training_ports(facts: NodeFacts) -> tuple[RdmaPort, ...]:
    """Return the ports for training: those near a GPU, or all if none is known to be.

    Other ports, for storage and management, may well be down or slow.
    """
    near = {port for device in facts.pci if device.is_gpu for port in near_ports(facts, device.address)}
    return tuple(port for port in facts.network.ports if not near or port in near)


def loader_workers(facts: NodeFacts) -> int:
    """Return the loader workers for which a rank on this machine has processors: its share, less one for itself."""
    ranks = local_ranks(facts) or len(facts.gpus.working) or 1
    return min(max((facts.cpus.usable or 1) // ranks - 1, 1), LOADER_WORKERS_MAX)


def local_ranks(facts: NodeFacts) -> int:
    """Return how many ranks of the given run ran on this machine; 0 without a run."""
    return 0 if facts.run is None else sum(hello.host == facts.host for hello in facts.run.hellos)


def uses_rdma(facts: NodeFacts) -> bool:
    """Return whether NCCL would use RDMA here."""
    settings = facts.settings
    network = settings.get("NCCL_NET")
    is_forbidden = settings.is_on("NCCL_IB_DISABLE") or (network is not None and network.value.lower() == "socket")
    return bool(facts.network.active_ports) and not is_forbidden


def is_local_run(facts: NodeFacts) -> bool:
    """Return whether the given run ran on this machine, so that its records relate to these facts."""
    return facts.run is not None and any(hello.host == facts.host for hello in facts.run.hellos)


def is_one_node_run(facts: NodeFacts) -> bool:
    """Return whether the given run is known to have used one node only, and thus no network."""
    hellos = () if facts.run is None else facts.run.hellos
    return bool(hellos) and len({hello.host for hello in hellos}) == 1 and len(hellos) == hellos[0].world_size


def local_gain(facts: NodeFacts, rung: str) -> Gain | None:
    """Return the what-if bound `rung` for a fault of this machine; None unless the run was on it."""
    return None if facts.run is None or not is_local_run(facts) else facts.run.gain(rung)


def links(facts: NodeFacts) -> list[Interface]:
    """Return cards and bonds that are up and report a speed, fastest last."""
    bonds = {card.name for card in facts.network.interfaces if card.is_bond}
    up = [
        card
        for card in facts.network.interfaces
        if (card.is_physical or card.is_bond) and card.master not in bonds and card.state == "up" and card.speed
    ]
    return sorted(up, key=lambda card: card.speed or 0)


def reached_as(card: Interface) -> str:
    """Return the interface that has the card's address: itself, or its bond or bridge."""
    return card.master or card.name


def carriers(facts: NodeFacts) -> Sequence[Interface]:
    """Return the interfaces whose TCP carries gradients between nodes; none if RDMA does.

    They are those of the given run if it was on this machine, else the fastest card that is up.
    """
    by_name = {interface.name: interface for interface in facts.network.interfaces}
    if facts.run is not None and is_local_run(facts):
        if all(hello.world_size == 1 for hello in facts.run.hellos):
            return ()
        names = {hello.interface for hello in facts.run.hellos if hello.host == facts.host and hello.interface}
        known = [by_name[name] for name in sorted(names) if name in by_name]
        return [card for card in known if card.is_physical or card.is_bond]
    if uses_rdma(facts):
        return ()
    return links(facts)[-1:]


def selected(names: Sequence[str], text: str) -> list[str]:
    """Return the `names` that NCCL's filter selects: `eth`, `=eth0`, `^docker`, `^=docker0`, comma-separated."""
    excludes = text.startswith("^")
    text = text.removeprefix("^")
    exact = text.startswith("=")
    entries = [entry for entry in text.removeprefix("=").split(",") if entry]

    def is_meant(name: str) -> bool:
        return any(name == entry if exact else name.startswith(entry) for entry in entries)

    return [name for name in names if is_meant(name) != excludes]
