"""Rules for the paths between cards: PCIe links, ACS, IOMMU, RDMA ports and GPUDirect RDMA.

A rule reports paths that are longer or slower than the machine allows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pacecar.formatting.quantities import gigabits

from ..facts.evidence import FindingEvidence
from ..facts.model import NodeFacts, PciDevice, RdmaPort
from ..findings import Hit, Rule, Severity, hit
from ..sources import GPUDIRECT, NCCL_ENV, NCCL_TROUBLE, NVML
from ..topology import gpudirect
from ..transport_paths import DMABUF_KERNEL, local_gain, near_ports, training_ports, uses_rdma

__all__ = ["RULES"]

PCIE_OVERHEAD = 1.2
"""Packets of 256 bytes have about 30 bytes of headers, and flow control takes a little more."""

_LAST_8B10B = 5.0
"""GT/s: up to this speed 8 of 10 bits are data, then 128 of 130 (PCI Express Base Specification)."""

_TRANSLATES = ("DMA", "DMA-FQ")
"""IOMMU domains that map addresses; `identity` does not (Documentation/ABI/testing/sysfs-kernel-iommu_groups)."""


def _cards(facts: NodeFacts) -> list[tuple[str, PciDevice]]:
    """Return the PCI devices that training depends on, with their names."""
    found: list[tuple[str, PciDevice]] = []
    for gpu in facts.gpus.working:
        device = facts.device_at(gpu.address)
        if device is not None:
            found.append((f"GPU {gpu.index}", device))
    for port in training_ports(facts):
        device = facts.device_at(port.address)
        if port.is_active and device is not None and (port.device, device) not in found:
            found.append((port.device, device))
    return found


def _is_pcie_used(facts: NodeFacts) -> bool:
    """Return whether traffic between cards uses PCIe: to the network, or between GPUs without NVLink.

    False in a virtual machine, where it is up to the hypervisor.
    """
    gpus = facts.gpus.working
    bridged = {gpu.index for gpu in gpus if gpu.links_up}
    peers = facts.gpus.peers
    over_pcie = [status for pair, status in peers.items() if not bridged.issuperset(pair)]
    has_peers = len(gpus) > len(bridged) and len(gpus) > 1 and (not peers or 0 in over_pcie)
    return not facts.cpus.is_virtual and bool(gpus) and (has_peers or uses_rdma(facts))


def _nic_pcie(facts: NodeFacts) -> Hit | None:
    names = {card.address: card.name for card in facts.network.interfaces if card.state == "up"}
    names |= {port.address: port.device for port in facts.network.active_ports}
    evidence, first = [], ""
    for address, name in names.items():
        device = facts.device_at(address)
        if device is None or address is None or _suffices(device, _rate_of_card(facts, address)):
            continue
        parts = []
        if device.width is not None and device.width_max is not None and device.width < device.width_max:
            parts.append(f"{device.width} of {device.width_max} lanes")
        if device.speed is not None and device.speed_max is not None and device.speed < device.speed_max:
            parts.append(f"{device.speed:g} of {device.speed_max:g} GT/s")
        if parts:
            first = first or device.address
            evidence.append(FindingEvidence(f"PCIe link of {name}", ", ".join(parts), f"{device.where}/current_link_*"))
    return hit(evidence, f"sudo lspci -vv -s {first} | grep Lnk    # then reseat the card, or move it to a wider slot")


def _rate_of_card(facts: NodeFacts, address: str) -> float:
    """Return the total rate of all ports of the card with the function `address`, in bits per second."""
    slot = address.rpartition(".")[0]
    rates: dict[str, float] = {}
    for port in facts.network.active_ports:
        if port.address is not None and port.address.rpartition(".")[0] == slot:
            rates[port.address] = rates.get(port.address, 0.0) + 8.0 * (port.rate or 0)
    for card in facts.network.interfaces:  # the same function as an interface counts once
        if card.address is not None and card.address.rpartition(".")[0] == slot and card.state == "up":
            rates[card.address] = max(rates.get(card.address, 0.0), float(card.speed or 0))
    return sum(rates.values())


def _suffices(device: PciDevice, rate: float) -> bool:
    """Return whether the current link suffices for `rate`; then missing lanes cost nothing."""
    if device.speed is None or device.width is None:
        return False
    coding = 0.8 if device.speed <= _LAST_8B10B else 128 / 130
    return device.speed * 1e9 * device.width * coding >= PCIE_OVERHEAD * rate


def _acs(facts: NodeFacts) -> Hit | None:
    if not _is_pcie_used(facts):
        return None
    evidence, bridges = [], []
    for name, device in _cards(facts):
        if device.redirects is not None and device.redirects.value:
            evidence.append(
                FindingEvidence(
                    f"ACS above {name}", "redirects traffic between cards to the host", device.redirects.where
                )
            )
            bridges += re.findall(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/config)", device.redirects.where)
    ports = " ".join(dict.fromkeys(bridges))
    return hit(
        evidence, f"for port in {ports}; do sudo setpci -s $port ECAP_ACS+0x6.w=0000; done    # until the next boot"
    )


def _iommu(facts: NodeFacts) -> Hit | None:
    if not _is_pcie_used(facts):
        return None
    evidence = [
        FindingEvidence(f"IOMMU domain of {name}", device.iommu_domain.value, device.iommu_domain.where)
        for name, device in _cards(facts)
        if device.iommu_domain is not None and device.iommu_domain.value in _TRANSLATES
    ]
    return hit(
        evidence,
        # Works on x86 and ARM (admin-guide/kernel-parameters.txt); iommu=pt is for x86 only.
        "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu.passthrough=1 /' /etc/default/grub && sudo update-grub"
        "    # then reboot; Red Hat: sudo grubby --update-kernel=ALL --args=iommu.passthrough=1",
    )


def _is_spare(port: RdmaPort, ports: Sequence[RdmaPort]) -> bool:
    """Return whether it is the second port of a card whose other port is up, and no card here uses its second port."""
    slot, _, function = (port.address or "").rpartition(".")
    up = [((other.address or "").rpartition("."), other.port) for other in ports if other.is_active]
    has_sibling = bool(slot) and any(at[0] == slot for at, _ in up)
    return has_sibling and not any((at[2], number) == (function, port.port) for at, number in up)


def _port_down(facts: NodeFacts) -> Hit | None:
    ports = training_ports(facts)
    evidence = [
        FindingEvidence(f"{port.device} port {port.port}", str(port.state), f"{port.where}/state")
        for port in ports
        if port.state is not None and not port.is_active
        and any(other.is_active and other.link_layer == port.link_layer for other in ports)
        and not _is_spare(port, ports)
    ]  # fmt: skip
    return hit(evidence, "ibstat && sudo dmesg | grep -i mlx    # then check cable, transceiver and switch port")


def _port_slow(facts: NodeFacts) -> Hit | None:
    ports = [port for port in training_ports(facts) if port.is_active and port.rate]
    evidence: list[FindingEvidence] = []
    slow = ""
    for port in ports:
        best = max(other.rate or 0 for other in ports if other.link_layer == port.link_layer)
        assert port.rate is not None, "those without a rate were left out"
        if port.rate < best:
            slow = slow or port.device
            text = f"{gigabits(port.rate * 8)}, others of this node {best * 8 / 1e9:g}"
            evidence.append(FindingEvidence(f"{port.device} port {port.port}", text, f"{port.where}/rate"))
    return hit(evidence, f"sudo mlxlink -d {slow} -m -e    # what the link was trained to, and why (NVIDIA's cards)")


def _no_gpudirect(facts: NodeFacts) -> Hit | None:
    module, kernel = facts.gpus.kernel_module, facts.cpus.kernel
    if (
        not facts.gpus.working
        or not uses_rdma(facts)
        or module is None
        or kernel is None
        or gpudirect(facts) is not None
        or all("GeForce" in gpu.name for gpu in facts.gpus.working)  # without GPUDirect RDMA (its Overview)
    ):
        return None
    evidence = (
        FindingEvidence("module nvidia_peermem", "not loaded", "/sys/module/nvidia_peermem"),
        module.as_evidence("driver; dma-buf needs an open one", module.value.splitlines()[0]),
        kernel.as_evidence("kernel; dma-buf needs {}.{}".format(*DMABUF_KERNEL)),
    )
    return Hit(
        evidence,
        "sudo modprobe nvidia-peermem && echo nvidia-peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf",
        local_gain(facts, "communication_hidden"),
    )


def _far(facts: NodeFacts) -> Hit | None:
    active = set(facts.network.active_ports)
    if not active or not uses_rdma(facts):
        return None
    near = {gpu: [port for port in near_ports(facts, gpu.address) if port in active] for gpu in facts.gpus.working}
    ports_of_node: dict[int | None, list[str]] = {}
    for port in active:
        card = facts.device_at(port.address)
        ports_of_node.setdefault(None if card is None else card.node, []).append(port.device)
    evidence: list[FindingEvidence] = []
    for gpu, ports in near.items():
        device = facts.device_at(gpu.address)
        if ports or device is None or device.node is None or device.node in ports_of_node or None in ports_of_node:
            continue
        others = ", ".join(sorted(name for names in ports_of_node.values() for name in names))
        evidence.append(
            FindingEvidence(
                f"GPU {gpu.index}",
                f"on NUMA node {device.node}, active ports ({others}) on others",
                f"{device.where}/numa_node",
            )
        )
    return hit(evidence, "nvidia-smi topo -m    # bring up the ports on that node, or move a card there")


RULES = (
    Rule("nic-pcie-link", Severity.WARNING, "A network card's PCIe link is below its maximum",
         "its ports can send more than its current link to the host can carry", "machine",
         NCCL_TROUBLE.at("Networking issues"), _nic_pcie),
    Rule("pci-acs", Severity.WARNING, "PCIe access control sends traffic between cards through the host",
         "GPUs and network cards below one switch reach each other only through the processor", "machine",
         NCCL_TROUBLE.at("PCI Access Control Services (ACS)"), _acs),
    Rule("pci-iommu", Severity.WARNING, "The IOMMU translates the addresses of GPUs or network cards",
         "direct transfers between cards go to the host for translation, or do not work", "machine",
         GPUDIRECT.at("Supported Systems; IOMMUs"), _iommu),
    Rule("rdma-port-down", Severity.WARNING, "An RDMA port is down while others are up",
         "its GPU's traffic uses another card, which then carries twice as much", "machine",
         NCCL_ENV.at("NCCL_IB_HCA"), _port_down),
    Rule("rdma-port-slow", Severity.WARNING, "An RDMA port is slower than the others",
         "the ports carry equal shares, so the slowest sets the pace", "machine",
         NCCL_TROUBLE.at("Networking issues"), _port_slow),
    Rule("rdma-no-gpudirect", Severity.WARNING, "GPUDirect RDMA has neither nvidia-peermem nor dma-buf",
         "network traffic is copied through the host's memory", "machine",
         NCCL_TROUBLE.at("GPU-to-NIC communication; GPUDirect RDMA"), _no_gpudirect),
    Rule("rdma-far", Severity.INFO, "GPUs have no RDMA port on their NUMA node",
         "their traffic crosses the link between the processors", "machine",
         NVML.at("nvmlDeviceGetTopologyCommonAncestor"), _far),
)  # fmt: skip
