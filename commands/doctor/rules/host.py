"""Rules for the host: processors, memory and limits that slow training down.

Each threshold names its source or, if no document gives one, its reason.
"""

from __future__ import annotations

from functools import partial

from pacecar.formatting.quantities import plural

from ..facts.evidence import FindingEvidence
from ..facts.model import NodeFacts
from ..findings import FindingSource, Hit, Rule, Severity, hit
from ..sources import CONTAINERS, CPUFREQ, KERNEL_SYSCTL, TORCH
from ..transport_paths import local_gain, uses_rdma

__all__ = ["RULES"]

SHARED_MEMORY_MIN = 1 << 30
"""Loader workers pass batches in /dev/shm, and NCCL keeps buffers there.  A container has 64 MiB by default (docker run
--shm-size); 1 GiB holds several batches of each rank."""

FILES_MIN = 4096
"""Each tensor from a loader worker is an open file (torch.multiprocessing, file_descriptor)."""

THROTTLED_RATIO_MIN = 0.05
PERIODS_MIN = 100
"""Periods of 100 ms: ten seconds of work under the limit."""

LOCKED_BYTES_MIN = 4 << 30
"""NCCL needs about 10 MB of host buffers per channel and peer: enough for 400 of them."""

_SLOWEST = frozenset({"powersave"})
_FOLLOWING = frozenset({"ondemand", "conservative", "schedutil"})
_BALANCING_NORMAL = 1
"""The bit for balancing between nodes; 2 is memory tiering (admin-guide/sysctl/kernel.rst, numa_balancing)."""

_OWN_GOVERNORS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose `powersave` follows the load like `ondemand` elsewhere (admin-guide/pm/intel_pstate.rst)."""


def _governors(facts: NodeFacts, names: frozenset[str]) -> list[FindingEvidence]:
    cpus = facts.cpus
    return [
        FindingEvidence("governor", f"{governor} on {plural(len(found), 'CPU')}", cpus.governor_where)
        for governor, found in sorted(cpus.governors.items())
        if governor in names
    ]


def _has_own_governor(facts: NodeFacts) -> bool:
    driver = facts.cpus.scaling_driver
    return driver is not None and driver.value in _OWN_GOVERNORS


_PERFORMANCE = "sudo cpupower frequency-set -g performance"


def _governor_slow(facts: NodeFacts) -> Hit | None:
    return None if _has_own_governor(facts) else hit(_governors(facts, _SLOWEST), _PERFORMANCE)


def _governor_follows(facts: NodeFacts) -> Hit | None:
    if not facts.gpus.boards and facts.run is None:
        return None  # nothing shows that this machine trains, and saving power at rest is right
    names = _FOLLOWING | (_SLOWEST if _has_own_governor(facts) else frozenset())
    evidence = _governors(facts, names)
    if not evidence:
        return None
    driver = facts.cpus.scaling_driver
    return Hit((*evidence, *([] if driver is None else [driver.as_evidence("scaling driver")])), _PERFORMANCE,
               local_gain(facts, "launch_gaps_gone"))  # fmt: skip


def _boost(facts: NodeFacts) -> Hit | None:
    boost, no_turbo = facts.cpus.boost, facts.cpus.no_turbo
    if boost is not None and boost.value == 0:
        return Hit((boost.as_evidence("boost"),), f"echo 1 | sudo tee {boost.where}")
    if no_turbo is not None and no_turbo.value == 1:
        return Hit((no_turbo.as_evidence("no_turbo"),), f"echo 0 | sudo tee {no_turbo.where}")
    return None


def _balancing(facts: NodeFacts) -> Hit | None:
    seen = facts.cpus.numa_balancing
    if seen is None or not seen.value & _BALANCING_NORMAL or len(facts.cpus.nodes) < 2 or not facts.gpus.boards:
        return None
    nodes = FindingEvidence("NUMA nodes", str(len(facts.cpus.nodes)), "/sys/devices/system/node")
    return Hit((seen.as_evidence("numa_balancing"), nodes), "sudo sysctl -w kernel.numa_balancing=0")


def _node_of_process(facts: NodeFacts) -> tuple[int, int, frozenset[int]] | None:
    """Return the process's GPU, its NUMA node and that node's CPUs; None if any of these is unknown."""
    if facts.process is None:
        return None
    for gpu in facts.gpus.working:
        device = facts.device_at(gpu.address)
        if facts.process.pid in gpu.pids and device is not None and device.node in facts.cpus.nodes:
            assert device.node is not None, "None is no NUMA node"
            return gpu.index, device.node, facts.cpus.nodes[device.node]
    return None


def _affinity(facts: NodeFacts, *, is_far: bool) -> Hit | None:
    found = _node_of_process(facts)
    if found is None or facts.process is None or facts.process.cpus is None or len(facts.cpus.nodes) < 2:
        return None
    gpu, node, local = found
    allowed = facts.process.cpus.value
    if (not allowed & local) != is_far or allowed <= local:
        return None
    nodes = [str(number) for number, cpus in sorted(facts.cpus.nodes.items()) if cpus & allowed]
    evidence = (
        FindingEvidence(
            f"process {facts.process.pid} may run on",
            f"{len(allowed)} CPUs, of NUMA node {', '.join(nodes)}",
            facts.process.cpus.where,
        ),
        FindingEvidence(f"its GPU {gpu}", f"on NUMA node {node}", f"NVML, GPU {gpu}"),
    )
    return Hit(
        evidence,
        "torchrun --numa-binding=node ...    # torch 2.9; before, for this rank:"
        f" numactl --cpunodebind={node} --membind={node} python ...",
    )


def _throttled(facts: NodeFacts) -> Hit | None:
    seen = facts.cpus.throttling
    if (
        seen is None
        or seen.value.periods < PERIODS_MIN
        or seen.value.throttled < THROTTLED_RATIO_MIN * seen.value.periods
    ):
        return None
    text = (
        f"in {seen.value.throttled} of {seen.value.periods} periods ({seen.value.throttled / seen.value.periods:.0%})"
    )
    return Hit(
        (seen.as_evidence("held back", text),),
        "docker update --cpus N CONTAINER    # or Kubernetes: raise resources.limits.cpu",
    )


def _shared_memory(facts: NodeFacts) -> Hit | None:
    seen, missing = facts.limits.shared_memory_bytes, facts.limits.shared_memory_missing
    remedy = "docker run --shm-size=16g ...    # or --ipc=host; on a host: sudo mount -o remount,size=16G /dev/shm"
    if missing is not None:
        return Hit((missing.as_evidence("/dev/shm"),), remedy)
    if seen is None or seen.value >= SHARED_MEMORY_MIN:
        return None
    return Hit((seen.as_evidence("size of /dev/shm", f"{seen.value / 2**20:.0f} MiB"),), remedy)


def _has_workers(facts: NodeFacts) -> bool:
    workers = None if facts.run is None else facts.run.knobs.get("loader_workers")
    if isinstance(workers, int):
        return workers > 0
    loaders = () if facts.script is None else facts.script.of("DataLoader")
    return any(isinstance(number := call.keywords.get("num_workers"), int) and number > 0 for call in loaders)


def _files(facts: NodeFacts) -> Hit | None:
    seen = facts.limits.files
    if seen is None or seen.value is None or seen.value >= FILES_MIN or not _has_workers(facts):
        return None
    return Hit(
        (seen.as_evidence("open files, soft limit"),), "ulimit -n 65536    # in the shell or unit that starts the job"
    )


def _locked(facts: NodeFacts) -> Hit | None:
    seen = facts.limits.locked_bytes
    if seen is None or seen.value is None or facts.limits.may_lock_all or not uses_rdma(facts):
        return None
    if seen.value >= LOCKED_BYTES_MIN:
        return None
    return Hit(
        (seen.as_evidence("locked memory, soft limit", f"{seen.value / 2**20:.0f} MiB"),),
        "ulimit -l unlimited    # or docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity",
    )


RULES = (
    Rule("cpu-governor-slow", Severity.WARNING, "The processors stay at their lowest clock",
         "launches, data loading and the optimizer's host part run at a fraction of the processor's speed", "machine",
         CPUFREQ.at("cpufreq.rst, Generic Scaling Governors"), _governor_slow),
    Rule("cpu-governor-follows", Severity.INFO, "The processors' clocks follow the load",
         "a step's short bursts on the host start at a low clock", "machine",
         CPUFREQ.at("cpufreq.rst, Generic Scaling Governors; intel_pstate.rst, powersave"), _governor_follows),
    Rule("cpu-boost-off", Severity.WARNING, "The processors' boost is turned off",
         "boost speeds up single threads, which launch kernels", "machine",
         CPUFREQ.at("cpufreq.rst, Frequency Boost Support; intel_pstate.rst, no_turbo"), _boost),
    Rule("numa-balancing-on", Severity.INFO, "Automatic NUMA balancing is on",
         "the kernel unmaps pages to track their use, and moves them: a cost if ranks are bound to their node",
         "machine", KERNEL_SYSCTL.at("numa_balancing"), _balancing),
    Rule("numa-far", Severity.WARNING, "The process may run only far from its GPU",
         "each launch and each copy crosses the link between the processors", "--pid",
         TORCH.at("NUMA Binding (torch.distributed.elastic)"), partial(_affinity, is_far=True)),
    Rule("numa-unbound", Severity.INFO, "The process is not bound to its GPU's NUMA node",
         "PyTorch's documentation expects 1 to 10 % from binding, and for some jobs nothing", "--pid",
         TORCH.at("NUMA Binding (torch.distributed.elastic)"), partial(_affinity, is_far=False)),
    Rule("cpu-throttled", Severity.WARNING, "A CPU limit throttles the processes",
         "a control group that has used up its share is stopped for the rest of each period, with all its threads",
         "machine",
         FindingSource("Linux kernel", "admin-guide/cgroup-v2.rst, cpu.max and cpu.stat"), _throttled),
    Rule("shm-small", Severity.WARNING, "Shared memory is small",
         "loader workers fail with a bus error when /dev/shm is full, and NCCL cannot start without it", "machine",
         FindingSource("PyTorch README", "Docker Image, Using pre-built images"), _shared_memory),
    Rule("files-low", Severity.INFO, "The limit of open files is low",
         "each tensor from a loader worker is an open file, and each peer is a socket", "machine",
         TORCH.at("Multiprocessing package, File descriptor"), _files),
    Rule("memlock-low", Severity.WARNING, "The limit of locked memory is low for RDMA",
         "buffers that a card reads must be locked, and registering them fails beyond the limit", "machine",
         CONTAINERS.at("Running A Container, --ulimit memlock"), _locked),
)  # fmt: skip
