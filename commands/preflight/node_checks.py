"""Measures one rank alone: its device's arithmetic and memory, its node's disk, and what the hardware says of itself.

Each is measured a few times, and the best counts: other programs can only slow a measurement down.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from ..joining_ranks import first_line
from .document import NodeChecks

__all__ = ["check_node", "checked_again"]

TRIES = 3
TRY_SECONDS = 0.6
MATRIX = {"cuda": 8192, "cpu": 768}
"""Rows and columns of the multiplied matrices; bfloat16 on GPUs, float32 on processors."""

COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
DISK_BYTES = 1 << 26
DISK_CHUNK = 1 << 22

HARDWARE_RULES = ("gpu-", "nic-", "rdma-")
"""Of the doctor's rules, by how their names begin; critical ones make a node unfit."""


def _device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def _flops_per_second(device: torch.device) -> float:
    size = MATRIX[device.type]
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.ones(size, size, dtype=kind, device=device) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * size**3 * _best_rate(lambda: torch.mm(left, right, out=product), device)


def _copied_bytes_per_second(device: torch.device) -> float:
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) * _best_rate(lambda: target.copy_(source), device)


def _best_rate(work: Callable[[], object], device: torch.device) -> float:
    """Return how often a second `work` is done, in the best of TRIES."""
    best = 0.0
    for _ in range(TRIES):
        work()
        _wait_for(device)
        begun, done = time.perf_counter(), 0
        while (passed := time.perf_counter() - begun) < TRY_SECONDS:
            work()
            _wait_for(device)
            done += 1
        best = max(best, done / passed)
    return best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _disk_bytes_per_second(folder: Path | None) -> float:
    """Return bytes/s of writing a file to the disk (`fsync`); None: in the folder for temporary files.

    Raises:
        OSError: it could not be written.
    """
    folder = folder or Path(os.environ.get("TMPDIR") or "/tmp")  # tempfile would go elsewhere if that is full
    chunk = os.urandom(DISK_CHUNK)
    best = 0.0
    for _ in range(TRIES):
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begun = time.perf_counter()
            for _ in range(DISK_BYTES // DISK_CHUNK):
                file.write(chunk)
            os.fsync(file.fileno())
            best = max(best, DISK_BYTES / (time.perf_counter() - begun))
    return best


def _check_hardware() -> tuple[list[str], list[str]]:
    """Return what the doctor finds of GPUs, network cards and RDMA ports: what makes a node unfit, and the rest."""
    from pacecar.monitor.gpu.nvml import PyNvml

    from ..doctor.collect_facts import collect_facts
    from ..doctor.findings import Severity
    from ..doctor.host_access import HostAccess
    from ..doctor.rules.registry import RULES, judge

    rules = [rule for rule in RULES if rule.id.startswith(HARDWARE_RULES)]
    found = judge(collect_facts(HostAccess(nvml=PyNvml()), host="here"), rules).findings
    lines = {Severity.CRITICAL: list[str](), Severity.WARNING: list[str]()}
    for finding in found:
        if finding.severity in lines:
            evidence = "; ".join(f"{one.what} {one.value}" for one in finding.evidence[:2])
            lines[finding.severity].append(f"{finding.title}: {evidence}")
    return lines[Severity.CRITICAL], lines[Severity.WARNING]


def check_node(
    rank: int, node: str, host: str, device: torch.device, *, is_first_here: bool, folder: Path | None
) -> NodeChecks:
    """Run all checks of one rank; a disk that fails is named in `missing`.  `folder` is on the disk to check."""
    missing, findings = [], []
    flops = moved = disk = None
    warnings: Iterable[str] = ()
    try:
        flops, moved = _flops_per_second(device), _copied_bytes_per_second(device)
    except RuntimeError as error:
        findings.append(f"the device cannot compute: {first_line(error)}")
    if is_first_here:
        try:
            disk = _disk_bytes_per_second(folder)
        except OSError as error:
            missing.append(f"the disk cannot be written: {error}")
        with suppress(ImportError):
            broken, warnings = _check_hardware()
            findings += broken
    return NodeChecks(
        rank=rank, node=node, host=host, device=_device_name(device), flops_per_second=flops,
        memory_bytes_per_second=moved, disk_bytes_per_second=disk, findings=tuple(findings),
        warnings=tuple(warnings), missing=tuple(missing),
    )  # fmt: skip


def checked_again(before: NodeChecks, device: torch.device, folder: Path | None) -> NodeChecks:
    """Measure once more what was measured; the better figure counts."""
    flops, moved, disk = before.flops_per_second, before.memory_bytes_per_second, before.disk_bytes_per_second
    with suppress(RuntimeError, OSError):
        flops = flops and max(flops, _flops_per_second(device))
        moved = moved and max(moved, _copied_bytes_per_second(device))
        disk = disk and max(disk, _disk_bytes_per_second(folder))
    return msgspec.structs.replace(
        before, flops_per_second=flops, memory_bytes_per_second=moved, disk_bytes_per_second=disk
    )
