"""Lists the public documents that rules cite, by name.

Left out: addresses, which change; names and sections are easy to search for.
"""

from __future__ import annotations

from dataclasses import dataclass

from .findings import FindingSource

__all__ = [
    "CONTAINERS", "CPUFREQ", "CUDA_GUIDE", "DRIVER_README", "GPUDIRECT", "IP_SYSCTL", "KERNEL_SYSCTL", "MEMORY_ERRORS",
    "MIG", "NCCL_ENV", "NCCL_INSPECTOR", "NCCL_RAS", "NCCL_TROUBLE", "NVML", "PERSISTENCE", "TORCH",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document, whose sections rules cite."""

    name: str

    def at(self, section: str) -> FindingSource:
        """Return a section of it."""
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
NCCL_INSPECTOR = SourceDocument("NVIDIA, NCCL 2.30.7, plugins/profiler/inspector")
NCCL_RAS = SourceDocument("NVIDIA, NCCL User Guide, RAS")
NCCL_TROUBLE = SourceDocument("NVIDIA, NCCL User Guide, Troubleshooting")
TORCH = SourceDocument("PyTorch documentation")
CPUFREQ = SourceDocument("Linux kernel, admin-guide/pm")
KERNEL_SYSCTL = SourceDocument("Linux kernel, admin-guide/sysctl/kernel.rst")
IP_SYSCTL = SourceDocument("Linux kernel, networking/ip-sysctl.rst")
