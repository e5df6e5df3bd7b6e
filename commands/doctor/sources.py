"""Who says so?  The documents that rules rest on, by name and section; each is public.

Rules name a section of theirs with `at`.  Left out: addresses, which move; names and sections are found by any search.
"""

from __future__ import annotations

from dataclasses import dataclass

from .findings import Source

__all__ = [
    "CONTAINERS", "CPUFREQ", "CUDA_GUIDE", "DRIVER_README", "GPUDIRECT", "IP_SYSCTL", "KERNEL_SYSCTL", "MEMORY_ERRORS",
    "MIG", "NCCL_ENV", "NCCL_TROUBLE", "NVML", "PERSISTENCE", "TORCH",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """A document, of which rules name sections."""

    name: str

    def at(self, section: str) -> Source:
        """Return a place in it."""
        return Source(self.name, section)


NVML = Document("NVIDIA, NVML API Reference Guide")
DRIVER_README = Document("NVIDIA, Linux driver README")
MEMORY_ERRORS = Document("NVIDIA, GPU Memory Error Management")
PERSISTENCE = Document("NVIDIA, Driver Persistence")
CONTAINERS = Document("NVIDIA, Containers For Deep Learning Frameworks User Guide")
MIG = Document("NVIDIA, Multi-Instance GPU User Guide")
GPUDIRECT = Document("NVIDIA, GPUDirect RDMA")
CUDA_GUIDE = Document("NVIDIA, CUDA C++ Programming Guide")
NCCL_ENV = Document("NVIDIA, NCCL User Guide, Environment Variables")
NCCL_TROUBLE = Document("NVIDIA, NCCL User Guide, Troubleshooting")
TORCH = Document("PyTorch documentation")
CPUFREQ = Document("Linux kernel, admin-guide/pm")
KERNEL_SYSCTL = Document("Linux kernel, admin-guide/sysctl/kernel.rst")
IP_SYSCTL = Document("Linux kernel, networking/ip-sysctl.rst")
