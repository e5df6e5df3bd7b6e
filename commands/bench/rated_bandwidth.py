"""Finds what the link between the ranks is rated at: by the interface, the RDMA ports or the NVLinks that they use.

"The network card says 100 Gbit/s" is of no use where the ranks do not use that card.  So the kernel is asked
which address a packet to another rank would leave from (connect(2) of a UDP socket sends nothing), and that address's
interface for its speed.  Ranks in one network namespace of one machine talk over memory, which has no rated speed.

    backend nccl, one machine       the NVLinks of the GPU that has least of them, by NVML
    backend nccl, several           the active RDMA ports together, unless NCCL_IB_DISABLE=1; else the interface
    any other backend, several      the interface, or what GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names

Several machines are as fast as the slowest of them.  A virtual interface (veth, a bridge) says 10 Gbit/s whatever it
can do, so only what has a device or a bond behind it is believed.  Unknown is unknown.

Left out: PCIe between GPUs without NVLink, several interfaces of one rank, and what a switch allows.
Source: Documentation/ABI/testing/sysfs-class-net; NCCL's environment variables (docs.nvidia.com/deeplearning/nccl).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pacecar.kernel_files.network import active_rdma_ports, is_link, nominal_speed
from pacecar.kernel_files.reader import KernelFiles
from pacecar.profiler.transport.local_addresses import host_identity

from .document import Rated

__all__ = ["RatedLinks", "interface_speed", "look", "nvlink_speed", "rate"]

DISCARD_PORT = 9
"""No packet is sent to it."""


class RatedLinks(NamedTuple):
    """The rated speeds at one rank's end.  `network` is the same for ranks that reach each other over loopback."""

    network: str
    host: str
    address: str | None
    interface: str | None
    interface_speed: int | None
    rdma_speed: int | None
    nvlink_speed: int | None


def look(
    backend: str, towards: str, *, sys_root: Path = Path("/sys"), environ: Mapping[str, str] = os.environ
) -> RatedLinks:
    """Return this rank's end of the link; `towards` is a host where another rank is."""
    address = _source_address(towards)
    interface = _named_interface(backend, environ) or (None if address is None else _interface_of(address))
    is_nccl = backend == "nccl"
    uses_rdma = is_nccl and environ.get("NCCL_IB_DISABLE", "0") != "1"
    return RatedLinks(
        network=host_identity(),
        host=socket.gethostname(),
        address=address,
        interface=interface,
        interface_speed=None if interface is None else interface_speed(interface, sys_root),
        rdma_speed=_rdma_speed(sys_root) if uses_rdma else None,
        nvlink_speed=nvlink_speed() if is_nccl else None,
    )


def rate(backend: str, sites: Sequence[RatedLinks]) -> Rated:
    """Return what the slowest end is rated at."""
    if len({site.network for site in sites}) == 1:
        if backend != "nccl":
            return Rated(bytes_per_second=None, basis="memory of one machine, which has no rated speed")
        speeds = [site.nvlink_speed for site in sites]
        return _slowest(speeds, "NVLink", "no NVLink between these GPUs is known to NVML")
    if all(site.rdma_speed is not None for site in sites):
        return _slowest([site.rdma_speed for site in sites], "the RDMA ports of a node together", "")
    names = "/".join(sorted({site.interface for site in sites if site.interface is not None})) or "unknown"
    unknown = f"interface {names} does not say its speed; --rated-gigabits does"
    return _slowest([site.interface_speed for site in sites], f"interface {names}", unknown)


def interface_speed(interface: str, sys_root: Path) -> int | None:
    """Return bytes per second of a real interface, None where it does not say or is virtual."""
    files = KernelFiles(sys=sys_root)
    try:
        names = files.names(sys_root / "class" / "net" / interface)
    except OSError:
        return None
    return nominal_speed(files, interface) or None if is_link(names) else None


def nvlink_speed() -> int | None:
    """Return bytes per second one way of all active NVLinks of the GPU that has least; None without."""
    from pacecar.clock import SystemClock
    from pacecar.config import DaemonConfig
    from pacecar.monitor.sampling.collector_registry import default_collectors, sample_once

    names = [collector.name for collector in default_collectors(DaemonConfig(), SystemClock())]
    snapshot = sample_once(DaemonConfig(disable=tuple(name for name in names if name != "gpu")))
    states: dict[tuple[str, ...], int] = {}
    speeds: dict[tuple[str, ...], int] = {}
    gpus: set[str] = set()
    for sample in snapshot.samples():
        if sample.metric == "pacecar_gpu_up":
            gpus.add(sample.labels[0])
        elif sample.metric == "pacecar_gpu_nvlink_link_state":
            states[sample.labels] = int(sample.value)
        elif sample.metric == "pacecar_gpu_nvlink_link_bytes_per_second":
            speeds[sample.labels] = int(sample.value)
    sums = dict.fromkeys(gpus, 0)
    for (gpu, link), speed in speeds.items():
        if states.get((gpu, link)) == 1:
            sums[gpu] = sums.get(gpu, 0) + speed
    return min(sums.values(), default=0) or None


def _slowest(speeds: Sequence[int | None], what: str, unknown: str) -> Rated:
    known = [speed for speed in speeds if speed is not None]
    if len(known) < len(speeds):
        return Rated(bytes_per_second=None, basis=unknown)
    return Rated(bytes_per_second=min(known), basis=what)


def _source_address(towards: str) -> str | None:
    """Return the address that a packet to `towards` would come from."""
    try:
        found = socket.getaddrinfo(towards, DISCARD_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interface_of(address: str) -> str | None:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


def _named_interface(backend: str, environ: Mapping[str, str]) -> str | None:
    """Return the one interface that the backend was told to use; patterns and lists are left to the route."""
    told = environ.get(f"{backend.upper()}_SOCKET_IFNAME", "").lstrip("=")
    return told if told and not set(told) & set("^,") and Path("/sys/class/net", told).exists() else None


def _rdma_speed(sys_root: Path) -> int | None:
    """Return bytes per second of all active ports together."""
    return sum(port.bytes_per_second for port in active_rdma_ports(KernelFiles(sys=sys_root))) or None
