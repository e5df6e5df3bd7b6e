"""Lists the documents that rules rest on, by name; rules name sections of them.  All are public.

Rules name a section of theirs with `at`.  Left out: addresses, which move; names and sections are found by any search.
"""

from __future__ import annotations

from dataclasses import dataclass

from .findings import FindingSource

__all__ = [
    "CONTAINERS", "CPUFREQ", "CUDA_GUIDE", "DRIVER_README", "GPUDIRECT", "IP_SYSCTL", "KERNEL_SYSCTL", "MEMORY_ERRORS",
    "MIG", "NCCL_ENV", "NCCL_TROUBLE", "NVML", "PERSISTENCE", "TORCH",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document, of which rules name sections."""

    name: str

    def at(self, section: str) -> FindingSource:
        """Return a place in it."""
        return FindingSource(self.name, section)


NVML = SourceDocument("NVIDIA, NVML API Reference Guide")
DRIVER_README = SourceDocument("NVIDIA, Linux driver README")
MEMORY_ERRORS = SourceDocument("NVIDIA, GPU Memory Error Management")
PERSISTENCE = SourceDocument("NVIDIA, Driver Persistence")
CONTAINERS = SourceDocument("NVIDIA, Containers For Deep Learning Frameworks User Guide")
MIG = SourceDocument("NVIDIA, Multi-Instance GPU User Guide")
GPUDIRECT = SourceDocument("NVIDIA, GPUDirect RDMA")
CUDA_GUIDE = SourceDocument("NVIDIA, CUDA C++ Programming Guide")
NCCL_ENV = SourceDocument("NVIDIA, NCCL User Guide, Environment Variables")
NCCL_TROUBLE = SourceDocument("NVIDIA, NCCL User Guide, Troubleshooting")
TORCH = SourceDocument("PyTorch documentation")
CPUFREQ = SourceDocument("Linux kernel, admin-guide/pm")
KERNEL_SYSCTL = SourceDocument("Linux kernel, admin-guide/sysctl/kernel.rst")
IP_SYSCTL = SourceDocument("Linux kernel, networking/ip-sysctl.rst")
