"""Computes a job's fingerprint, by which earlier runs are comparable: model, ranks, device, link and torch.

The name of a script or a job does not tell: the same script trains other models.  The best knobs depend on what there
is to send (shapes and types of the parameters), between how many ranks, over which link, and on which device.  The link
is described by its kind and nominal speed; a slow or shared link does not show, but what is remembered has to prove
itself again anyway.

Left out: the batch.  It shows in the micro-batch that the script began with, and a remembered size that does not fit
the batch is not in the knob's domain.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import torch
from torch import nn

from pacecar.kernel_files.link_speeds import active_rdma_ports, nominal_speed
from pacecar.kernel_files.reader import KernelFiles, lines_of
from pacecar.records import JobHello

from .knob_store import Fingerprint

__all__ = ["fingerprint", "link"]

_DESTINATION_ANY = "00000000"


def fingerprint(
    model: nn.Module,
    hello: JobHello,
    *,
    environ: Mapping[str, str] = os.environ,
    proc_root: str = "/proc",
    sys_root: str = "/sys",
) -> Fingerprint:
    """Return the job's fingerprint without `began`, which is known once the knobs are settled.

    Reads a few kernel files and no parameter values.
    """
    digest = hashlib.blake2b(digest_size=8)
    elements = 0
    for parameter in model.parameters():
        elements += parameter.numel()
        digest.update(repr((tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)).encode())
    return Fingerprint(
        parameters=digest.hexdigest(),
        elements=elements,
        world_size=hello.world_size,
        device=_device(hello.device),
        backend=hello.backend,
        link=link(hello.world_size, hello.backend, environ=environ, proc_root=proc_root, sys_root=sys_root),
        torch=".".join(torch.__version__.split("+")[0].split(".")[:2]),
        began={},
    )


def link(
    world_size: int,
    backend: str | None,
    *,
    environ: Mapping[str, str] = os.environ,
    proc_root: str = "/proc",
    sys_root: str = "/sys",
) -> str:
    """Return the link between the ranks: "none", "local", "InfiniBand 200 Gb/s", "ethernet 10 Gb/s", "ethernet"."""
    if world_size == 1:
        return "none"
    if environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        return "local"
    files = KernelFiles(proc_root, sys_root)
    if backend is not None and "nccl" in backend and environ.get("NCCL_IB_DISABLE", "0") in {"", "0"}:
        fabric = _fabric(files)
        if fabric is not None:
            return fabric
    name = _named(environ, "NCCL_SOCKET_IFNAME" if backend is not None and "nccl" in backend else "GLOO_SOCKET_IFNAME")
    name = name or _default_interface(files)
    speed = None if name is None else nominal_speed(files, name)
    return "ethernet" if not speed else f"ethernet {_gigabits(speed)} Gb/s"


def _device(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return f"{device}, {os.cpu_count()} processors" if device == "cpu" else device.split(":", maxsplit=1)[0]


def _fabric(files: KernelFiles) -> str | None:
    """Return the fastest active RDMA port."""
    found = [(port.bytes_per_second, port.link_layer or "RDMA") for port in active_rdma_ports(files)]
    if not found:
        return None
    speed, layer = max(found)
    return f"{'RoCE' if layer == 'Ethernet' else layer} {_gigabits(speed)} Gb/s"


def _gigabits(bytes_per_second: int) -> str:
    return f"{bytes_per_second * 8 / 1e9:g}"


def _named(environ: Mapping[str, str], variable: str) -> str | None:
    """Return the first interface that the variable names, None for an exclusion ("^lo")."""
    first = environ.get(variable, "").split(",")[0].removeprefix("=")
    return first if first and not first.startswith("^") else None


def _default_interface(files: KernelFiles) -> str | None:
    """Return the interface of the default route with the lowest metric (proc(5), /proc/net/route)."""
    routes = [line.split() for line in lines_of(files.text(files.proc / "net/route") or "")[1:]]
    defaults = [(int(r[6]), r[0]) for r in routes if len(r) > 6 and r[1] == _DESTINATION_ANY and r[6].isdigit()]
    return min(defaults)[1] if defaults else None
