"""Lists the collectors of a node: all that are not disabled.  Each finds out by itself what the machine lacks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pacecar.clock import Clock, SystemClock
from pacecar.config import DaemonConfig
from pacecar.kernel_files.reader import KernelFiles
from pacecar.records import Snapshot

from ..collectors.cgroup import CgroupCollector, CgroupMember
from ..collectors.cpu import CpuCollector
from ..collectors.daemon_process import DaemonProcessCollector
from ..collectors.disk import DiskCollector, MountCollector
from ..collectors.gpu import GpuCollector
from ..collectors.hwmon import HwmonCollector
from ..collectors.identity import IdentityCollector
from ..collectors.memory import MemoryCollector
from ..collectors.network import NetworkCollector
from ..collectors.numa import NumaCollector
from ..collectors.rdma import RdmaCollector
from ..collectors.source_reader import Collector
from ..collectors.system import SystemCollector
from ..collectors.tcp import TcpCollector
from ..gpu.nvml import PyNvml
from .sampler import Sampler
from .ticker import SamplingTick

__all__ = ["DaemonError", "default_collectors", "sample_once"]

GPU_DEADLINE_RATIO = 0.5
"""Share of the period that a tick waits for its GPUs: less than the sampler waits for the GPU collector."""

SAMPLE_ONCE_SECONDS = 0.2
"""Seconds between the two ticks of `sample_once`: twenty of the kernel's 10 ms ticks give utilization to 5 %."""


class DaemonError(RuntimeError):
    """The daemon cannot start; the message says why and what to do."""


def default_collectors(
    config: DaemonConfig,
    clock: Clock,
    members: Callable[[], Sequence[CgroupMember]] = tuple,
    identity: IdentityCollector | None = None,
) -> list[Collector]:
    """Return the collectors that `config` does not disable; raises DaemonError for an unknown name.

    `members` returns the processes whose control groups are read in addition to the daemon's; `identity` is the
    daemon's own collector, which also tells it where ranks run.
    """
    files = KernelFiles(config.proc_root, config.sys_root)
    identity = identity or IdentityCollector(files, clock, tuple, tuple)
    collectors: list[Collector] = [
        CpuCollector(files),
        MemoryCollector(files),
        NumaCollector(files),
        DiskCollector(files, named=config.mounts),
        *(MountCollector(mountpoint, files) for mountpoint in dict.fromkeys(config.mounts)),
        NetworkCollector(files, clock),
        TcpCollector(files),
        SystemCollector(files),
        HwmonCollector(files),
        RdmaCollector(files, clock),
        CgroupCollector(files, members),
        identity,
        GpuCollector(PyNvml(), clock, deadline_seconds=GPU_DEADLINE_RATIO * config.period_seconds),
        DaemonProcessCollector(),
    ]
    names = [collector.name for collector in collectors]
    unknown = [name for name in config.disable if name not in names]
    if unknown:
        raise DaemonError(f"[daemon] disable: unknown collector {', '.join(unknown)}; known are {', '.join(names)}")
    return [collector for collector in collectors if collector.name not in config.disable]


def sample_once(config: DaemonConfig) -> Snapshot:
    """Return one snapshot of this machine after two ticks, so that rates exist."""
    clock = SystemClock()
    sampler = Sampler(default_collectors(config, clock), clock, deadline_seconds=5.0)
    sampler.start()
    try:
        sampler.sample(SamplingTick(0, clock.monotonic_ns(), 0, 0))
        threading.Event().wait(SAMPLE_ONCE_SECONDS)
        return sampler.sample(SamplingTick(1, clock.monotonic_ns(), 0, 0))
    finally:
        sampler.close()
