"""Computes how far apart two cards are on the PCI bus, and how the GPUs of this machine can communicate.  Pure.

Distances are named as in `nvidia-smi topo -m`, by the same rule, from the tree of /sys/devices:

    PIX   one PCIe switch between them        PHB   the host bridge       NODE  other host bridges of one NUMA node
    PXB   several switches, no host bridge                                SYS   the link between processors

Left out: NVLink's own topology, which is uniform with NVSwitch, and other vendors' links.
"""

from __future__ import annotations

from typing import Any

from pacecar.version_numbers import major_minor

from .facts.model import GpuFacts, NodeFacts, PciDevice
from .transport_paths import DMABUF_KERNEL, training_ports, uses_rdma

__all__ = ["distance", "gpudirect", "nearest", "offers"]

_ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")


def distance(one: PciDevice, other: PciDevice) -> str | None:
    """Return how far apart two cards are; None if unknown."""
    if not one.path or not other.path:
        return None
    common = 0
    for mine, theirs in zip(one.path[:-1], other.path[:-1], strict=False):
        if mine != theirs:
            break
        common += 1
    if common >= 2:  # a port below the host bridge
        switches = max(len(one.path), len(other.path)) - common
        return "PIX" if switches <= 2 else "PXB"
    if common == 1:
        return "PHB"
    return "NODE" if one.node is not None and one.node == other.node else "SYS"


def nearest(facts: NodeFacts, gpu: GpuFacts) -> tuple[str, tuple[str, ...]] | None:
    """Return the distance of the GPU's nearest active RDMA ports and their names; None if unknown."""
    device = facts.device_at(gpu.address)
    found: dict[str, list[str]] = {}
    for port in training_ports(facts):
        card = facts.device_at(port.address)
        if device is None or card is None or not port.is_active:
            continue
        apart = distance(device, card)
        if apart is not None:
            found.setdefault(apart, []).append(f"{port.device}:{port.port}")
    if not found:
        return None
    best = min(found, key=_ORDER.index)
    return best, tuple(found[best])


def gpudirect(facts: NodeFacts) -> str | None:
    """Return how GPUDirect RDMA would work: "nvidia-peermem" or "dma-buf"; None if neither is known to be there."""
    if facts.gpus.peermem is not None:
        return "nvidia-peermem"
    module, kernel = facts.gpus.kernel_module, facts.cpus.kernel
    version = None if kernel is None else major_minor(kernel.value)
    if module is None or version is None or "Open Kernel Module" not in module.value:
        return None
    return "dma-buf" if version >= DMABUF_KERNEL else None


def offers(facts: NodeFacts) -> dict[str, Any]:
    """Return how GPUs can communicate, and how they do according to NCCL's log (None without a log)."""
    gpus = facts.gpus.working
    pairs = {pair: status for pair, status in facts.gpus.peers.items() if pair[0] < pair[1]}
    near = {gpu.index: nearest(facts, gpu) for gpu in gpus}
    return {
        "nvlink": {
            "gpus": sum(bool(gpu.links_up) for gpu in gpus),
            "links_up": sum(len(gpu.links_up) for gpu in gpus),
            "links_down": sum(len(gpu.links_down) for gpu in gpus),
            "has_switch": any(gpu.has_switch for gpu in gpus),
        },
        "p2p": {"pairs": len(pairs), "possible": sum(status == 0 for status in pairs.values())},
        "rdma": {
            "active_ports": len(facts.network.active_ports),
            "nccl_may_use_it": uses_rdma(facts),
            "gpudirect": gpudirect(facts),
            "nearest_port": {
                str(index): None if found is None else {"distance": found[0], "ports": list(found[1])}
                for index, found in near.items()
            },
        },
        "in_use": None
        if facts.log is None
        else {name: count for name, (_, count) in sorted(facts.log.transports.items())},
    }
