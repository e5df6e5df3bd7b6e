"""Finds the rated speed of the link between the ranks, from the interface, RDMA ports or NVLinks that they use.

    nccl, one machine        the NVLinks of the GPU with the lowest total, by NVML
    nccl, several machines   the active RDMA ports together, unless NCCL_IB_DISABLE=1; else the interface
    gloo, several machines   the interface of the collectives (`collective_interface`)

The slowest machine counts.  Ranks in one network namespace talk over memory, which has no rated speed.  A virtual
interface (veth, a bridge) reports 10 Gbit/s whatever it can do, so only one with a device or bond behind it counts.

Left out: PCIe between GPUs without NVLink, several interfaces of one rank, and limits of a switch.
Source: Documentation/ABI/testing/sysfs-class-net; NCCL's environment variables (docs.nvidia.com/deeplearning/nccl).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pacecar.kernel_files.link_speeds import active_rdma_ports, is_link, nominal_speed
from pacecar.kernel_files.reader import KernelFiles
from pacecar.profiler.hook.identity import collective_interface
from pacecar.profiler.transport.rendezvous import host_identity, route_to

from .document import Rated

__all__ = ["RatedLinks", "interface_speed", "nvlink_speed", "rate", "rated_links"]

DISCARD_PORT = 9
"""No packet is sent to it."""


class RatedLinks(NamedTuple):
    """The rated speeds at one rank's end; `network` is equal for ranks that reach each other over loopback."""

    network: str
    host: str
    address: str | None
    interface: str | None
    interface_speed: int | None
    rdma_speed: int | None
    nvlink_speed: int | None


def rated_links(
    backend: str, towards: str, *, sys_root: Path = Path("/sys"), environ: Mapping[str, str] = os.environ
) -> RatedLinks:
    """Return this rank's end of the link to the host `towards`."""
    route = route_to(towards, DISCARD_PORT)
    # The interface counts even beside RDMA, in case another machine has none.
    sockets = {**environ, "MASTER_ADDR": towards, "NCCL_IB_DISABLE": "1"}
    interface = collective_interface(backend, environ=sockets, sys_root=sys_root)
    is_nccl = backend == "nccl"
    uses_rdma = is_nccl and environ.get("NCCL_IB_DISABLE", "0") != "1"
    return RatedLinks(
        network=host_identity(),
        host=socket.gethostname(),
        address=None if route is None else route[0],
        interface=interface,
        interface_speed=None if interface is None else interface_speed(interface, sys_root),
        rdma_speed=_rdma_speed(sys_root) if uses_rdma else None,
        nvlink_speed=nvlink_speed() if is_nccl else None,
    )


def rate(backend: str, sites: Sequence[RatedLinks]) -> Rated:
    """Return the rated speed of the slowest end."""
    if len({site.network for site in sites}) == 1:
        if backend != "nccl":
            return Rated(bytes_per_second=None, basis="memory of one machine, which has no rated speed")
        speeds = [site.nvlink_speed for site in sites]
        return _slowest(speeds, "NVLink", "NVML reports no NVLink between these GPUs")
    if all(site.rdma_speed is not None for site in sites):
        return _slowest([site.rdma_speed for site in sites], "all RDMA ports of a node together", "")
    names = "/".join(sorted({site.interface for site in sites if site.interface is not None})) or "unknown"
    unknown = f"interface {names} does not report its speed; give --rated-gigabits"
    return _slowest([site.interface_speed for site in sites], f"interface {names}", unknown)


def interface_speed(interface: str, sys_root: Path) -> int | None:
    """Return bytes per second of an interface; None if it is virtual or does not report a speed."""
    files = KernelFiles(sys=sys_root)
    try:
        names = files.names(sys_root / "class" / "net" / interface)
    except OSError:
        return None
    return nominal_speed(files, interface) or None if is_link(names) else None


def nvlink_speed() -> int | None:
    """Return bytes per second one way of all active NVLinks of the GPU with the lowest total; None without any."""
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


def _rdma_speed(sys_root: Path) -> int | None:
    """Return bytes per second of all active ports together; None without any."""
    return sum(port.bytes_per_second for port in active_rdma_ports(KernelFiles(sys=sys_root))) or None
