"""Decides whether more bytes fit into the memory of this rank's device, or of the host where it trains on a CPU.

A knob that takes memory asks when it is offered and again at each vote.  A container's own limit on a CPU job is not
read, because its page cache cannot be told from what is held.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pacecar.kernel_files.memory import rows_bytes
from pacecar.kernel_files.reader import KernelFiles

from ..guards.node_monitor import ranks_on_node

__all__ = ["MEMORY_RATIO_MAX", "beyond_memory", "computing_device", "is_short", "peak_ratio"]

MEMORY_RATIO_MAX = 0.9
"""A value that needs more memory is offered only if the peak stays under this share of the memory."""

SHORT_RATIO = 0.95
"""Above this share the memory is short, and a knob that took some of it must give it back."""


def computing_device(model: nn.Module) -> torch.device | None:
    """Return where `model` computes; None without parameters.  FSDP2's may lie on the host (`CPUOffloadPolicy`)."""
    first = next(model.parameters(), None)
    if first is None:
        return None
    kind = getattr(getattr(first, "device_mesh", None), "device_type", first.device.type)
    return first.device if kind == first.device.type else torch.device(kind)


def beyond_memory(device: torch.device | None, extra_bytes: int, what: str) -> str | None:
    """Return why `extra_bytes` more on each rank, of `what`, do not fit; None if they do, or if that is unknown."""
    is_cpu = device is not None and device.type == "cpu"
    ratio = _host_ratio(extra_bytes) if is_cpu else peak_ratio(device, extra_bytes)
    if ratio is not None and ratio > MEMORY_RATIO_MAX:
        return f"{what} would bring the {'host' if is_cpu else 'device'}'s memory to {ratio:.0%}"
    return None


def is_short(device: torch.device) -> bool:
    """Return whether almost nothing is left, by what all processes hold; False if unknown."""
    ratio = _host_ratio(0) if device.type == "cpu" else peak_ratio(device, 0)
    return ratio is not None and ratio > SHORT_RATIO


def peak_ratio(device: torch.device | None, extra_bytes: int) -> float | None:
    """Return the share of `device`'s memory in use at this process's peak if that were `extra_bytes` higher.

    What other processes and the driver hold now counts too.  Right after the script reset the peak, as some do with
    every line of their log, what the allocator holds counts instead.  None unless CUDA.
    """
    if device is None or device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes, peak_bytes = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    others_bytes = max(0, total_bytes - free_bytes - reserved_bytes)
    if extra_bytes > 0 and peak_bytes <= torch.cuda.memory_allocated(device):  # the script has just reset the peak
        peak_bytes = reserved_bytes
    return (peak_bytes + extra_bytes + others_bytes) / total_bytes


def _host_ratio(extra_bytes: int) -> float | None:
    """Return the share of this host's memory at the peak of a step in which each rank takes `extra_bytes` more.

    Between steps less is in use: each rank is taken to need what this process held at most (proc(5), meminfo, status).
    """
    files = KernelFiles()
    text, status = files.text(files.proc / "meminfo") or "", files.text(files.proc / "self/status") or ""
    try:
        total, available = rows_bytes(text, "MemTotal"), rows_bytes(text, "MemAvailable")
        most, held = rows_bytes(status, "VmHWM"), rows_bytes(status, "VmRSS")
    except (ValueError, IndexError):
        return None
    if not total or available is None:
        return None
    ranks = ranks_on_node(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1
    passing = 0 if most is None or held is None else max(0, most - held)
    return (total - available + ranks * (extra_bytes + passing)) / total
