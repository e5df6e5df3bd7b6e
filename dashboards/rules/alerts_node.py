"""Defines the alerts about machines: GPUs, their memory and links, the network, disks and memory."""

from __future__ import annotations

from pacecar.gpu_health import FABRIC_JOIN_SECONDS, XIDS_OF_PROGRAMS, XIDS_OF_REPAIR, HealthReason

from ..queries import CLUSTER, GPU, JOB, LAUNCH, NODE, combine, divide
from .alerts import BY, Alert, Group
from .recording import GPU_HELD_DOWN, HELD_BY, MEMORY, PORT_USED, RULES, SENT, SENT_AGAIN, WRITABLE

__all__ = ["GPU_ALERTS", "HOST_ALERTS", "LINK_ALERTS"]

OF_GPU = (CLUSTER, NODE, GPU)
OF_BOARD = ("uuid", "name", "pci_bus_id")
"""Labels that identify a GPU without an index."""

OF_MOUNT = (CLUSTER, NODE, "mountpoint")
OF_PROGRAMS, OF_REPAIR = "|".join(XIDS_OF_PROGRAMS), "|".join(XIDS_OF_REPAIR)

HELD_RATIO = 0.2
"""As in `monitor/jobs/node_signals.py`: less is not worth acting on."""

HEAT_AND_HARDWARE = "sw_thermal_slowdown|hw_thermal_slowdown|hw_slowdown|hw_power_brake"
"""The nvmlClocksEventReasons that are faults.  Not `sw_power_cap`, because a loaded GPU runs at its power limit."""

LINK_ERRORS_IN_15_MINUTES = 10
"""A single replay or recovery takes microseconds and means nothing; ten in a quarter of an hour do."""

NVLINK_NORMAL = "symbol|effective|recovery_successful|transmit_discard"
"""Kinds that rise on healthy NVLink 5: forward error correction repairs symbols, and links retrain when they wake."""

RDMA_NORMAL = "(req|resp)_cqe(_flush)?_error|port_rcv_switch_relay_errors|port_xmit_discards"
"""Counters that rise when a job ends (flushed queues), by multicast, or by congestion, which has its own panel."""

NO_CABLE = "lo|(veth|docker|br-|cni|cali|lxc|flannel|virbr|vnet|tap|tun).*"
"""Virtual interfaces, which come and go with containers and virtual machines."""

TCP_RATIO = 0.01
"""With 1 % loss, a flow of 1460-byte segments over 1 ms is limited to 18 MB/s on any link
(Mathis, Semke, Mahdavi and Ott 1997: 1.22 x MSS / (RTT x sqrt(p)))."""

TCP_SEGMENTS_PER_SECOND = 100
"""Below this, a few lost segments make a large ratio without harm."""


IDLE_RATIO = 0.02
"""An idle GPU still shows short activity, as when its memory is queried."""

FULL_RATIO = 0.02
"""With less space, checkpoints fail.  The 5 % that ext4 reserves for root do not count as available."""

FILLS_BELOW, FILLS_IN_SECONDS = 0.2, 4 * 3600
"""Enough time to act.  With more than a fifth left, a job that unpacks its data set would look like a filling disk."""


def _grown(metric: str, window: str, *labels: str, **where: str) -> str:
    return combine("sum", RULES.increase(metric, where, window=window), *labels)


def _fired(alert: str) -> str:
    """Return where that alert fired recently, so that it persists when a restarted daemon knows less."""
    return f'max_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[{MEMORY}])'


def _xids(codes: str) -> str:
    """Return the Xids of the last ten minutes whose code matches.

    A new series has no increase, so a series that did not exist ten minutes ago counts too, if its daemon did.
    """
    of = (*OF_GPU, "xid")
    counter = RULES.select("pacecar_gpu_xid_errors_total", {"xid": codes})
    was_there = RULES.select("pacecar_build_info") + " offset 10m"
    born = f"(({counter} > 0) unless {counter} offset 10m) and on ({CLUSTER}, {NODE}) {was_there}"
    return f"({_grown('pacecar_gpu_xid_errors_total', '10m', *of, xid=codes)} > 0) or {combine('sum', born, *of)}"


HOLDER = '{{ or $labels.training_job $labels.pod_name $labels.slurm_job "a process" }}'


def _idle_and_held() -> str:
    """Return the utilization of idle GPUs with a process, labelled with its owner if known."""
    on_gpu = f"on ({', '.join(OF_GPU)})"
    idle = f"({RULES.select('pacecar_gpu_utilization_ratio')} < {IDLE_RATIO})"
    used = RULES.select("pacecar_gpu_processes") + " > 0"
    named = f"{HELD_BY.name} * {on_gpu} group_left () {combine('max', idle, *OF_GPU)}"
    return f"{named} or {on_gpu} {combine('max', f'{idle} and {on_gpu} {used}', *OF_GPU)}"


def _room(what: str, of: str) -> str:
    """Return the share of `of` that is left as `what`, by file system."""
    left = divide(RULES.select(f"pacecar_host_filesystem_{what}"), RULES.select(f"pacecar_host_filesystem_{of}"))
    return combine("min", left, *OF_MOUNT)


def _unhealthy(*reasons: HealthReason) -> str:
    """Return the GPUs with one of `reasons` of `pacecar.gpu_health`."""
    codes = "|".join(reasons)
    return RULES.select("pacecar_gpu_health_reason", {"reason": f"=~{codes}" if len(reasons) > 1 else codes}) + " == 1"


def _links_down() -> str:
    """Return the NVLinks that are down and should not be: of a GPU with that reason, or with a recent alert."""
    down = RULES.select("pacecar_gpu_nvlink_link_state") + " == 0"
    of_gpu, of_link = ", ".join(OF_GPU), ", ".join((*OF_GPU, "link"))
    return (
        f"({down} and on ({of_gpu}) {_unhealthy(HealthReason.NVLINK_DOWN)}) or "
        f"({down} and on ({of_link}) {_fired('PacecarNvlinkDown')})"
    )


def _writable(condition: str) -> str:
    writable = RULES.select("pacecar_host_filesystem_read_only") + " == 0"
    return f"({condition}) and on ({', '.join(OF_MOUNT)}) {writable}"


def _soon_full() -> str:
    available = RULES.select("pacecar_host_filesystem_available_bytes")
    then = combine("min", f"predict_linear({available}[1h], {FILLS_IN_SECONDS})", *OF_MOUNT)
    return _writable(f"{_room('available_bytes', 'size_bytes')} < {FILLS_BELOW} and {then} < 0")


def _out_of_memory() -> str:
    """Return the processes killed in jobs' control groups or, if there are none, on the node."""
    of_rank = RULES.select("pacecar_cgroup_member_info", {"member": "rank"})
    members = combine("group", of_rank, CLUSTER, NODE, "cgroup", JOB, LAUNCH)
    group = f"on ({CLUSTER}, {NODE}, cgroup)"
    of_group = _grown("pacecar_cgroup_oom_kills_total", "10m", CLUSTER, NODE, "cgroup")
    of_job = combine("sum", f"{members} * {group} group_left () {of_group}", CLUSTER, NODE, JOB, LAUNCH)
    of_node = _grown("pacecar_host_oom_kills_total", "10m", CLUSTER, NODE)
    return f"{of_job} > 0 or on ({CLUSTER}, {NODE}) {of_node} > 0"


GPU_ALERTS = Group("pacecar-gpu", (
    Alert("PacecarGpuXid", _xids(f"!~{OF_PROGRAMS}|{OF_REPAIR}"), "0m", "critical",
        f"{BY} reported Xid {{{{ $labels.xid }}}}",
        "{{ printf \"%.0f\" $value }} errors with code {{ $labels.xid }} in the last ten minutes. The work on this GPU "
        "is mostly lost."),
    Alert("PacecarGpuXidOfProgram", _xids(f"=~{OF_PROGRAMS}"), "0m", "warning",
        f"{BY} reported Xid {{{{ $labels.xid }}}}, mostly the program's own fault",
        "{{ printf \"%.0f\" $value }} errors with code {{ $labels.xid }} in the last ten minutes: an illegal "
        "instruction or address of a kernel, or the aftermath of a process that ended."),
    Alert("PacecarGpuXidOfRepair", _xids(f"=~{OF_REPAIR}"), "0m", "warning",
        f"{BY} marks memory for repair (Xid {{{{ $labels.xid }}}})",
        "{{ printf \"%.0f\" $value }} notes with code {{ $labels.xid }} in the last ten minutes: bad memory was found "
        "and will be repaired at the next reset. By itself this costs no work."),
    Alert("PacecarGpuDown", RULES.select("pacecar_gpu_down") + " == 1", "1m", "critical",
        f"{BY} is {{{{ $labels.reason }}}}",
        "The daemon could not read this GPU for a minute, because it is {{ $labels.reason }}. hung: a call of the "
        "driver does not return; lost, vanished: the driver no longer knows it."),
    Alert("PacecarGpuThrottled", f'{GPU_HELD_DOWN.name}{{reason=~"{HEAT_AND_HARDWARE}"}} > {HELD_RATIO}', "5m",
        "warning", f"{BY} holds its clocks down: {{{{ $labels.reason }}}}",
        "For {{ $value | humanizePercentage }} of the last five minutes {{ $labels.reason }} held the clocks down. All "
        "ranks of its job wait for this GPU."),
    Alert("PacecarGpuEccUncorrected",
        _grown("pacecar_gpu_ecc_errors_total", "15m", *OF_GPU, severity="uncorrected", lifetime="volatile") + " > 0",
        "0m", "critical", f"{BY} has memory errors that could not be corrected",
        "{{ printf \"%.0f\" $value }} uncorrected ECC errors in the last 15 minutes. The driver kills the process that "
        "hits one, and results since then cannot be trusted."),
    Alert("PacecarGpuMemoryRepairPending",
        combine("max", f"({RULES.select('pacecar_gpu_row_remap_pending')} or "
                       f"{RULES.select('pacecar_gpu_retired_pages_pending')})", *OF_GPU) + " == 1",
        "5m", "warning", f"{BY} waits for a reset to take bad memory out of use",
        "Rows or pages of device memory are marked bad and stay in use until the GPU is reset."),
    Alert("PacecarGpuMemoryRepairFailed", RULES.select("pacecar_gpu_row_remap_failed") + " == 1", "0m", "critical",
        f"{BY} could not remap bad memory: replace it",
        "A row of device memory could not be remapped, because the spare rows of its bank are used up."),
    Alert("PacecarGpuMissing", combine("max", RULES.select("pacecar_gpu_missing"), CLUSTER, NODE, *OF_BOARD) + " == 1",
        "5m", "critical", "A GPU of {{ $labels.instance }} is missing: {{ $labels.name }} at {{ $labels.pci_bus_id }}",
        "{{ $labels.uuid }} was on this node before, and the driver has not listed it since the daemon started, or no "
        "driver answers. If it was removed on purpose, see the runbook for how to tell the daemon."),
    Alert("PacecarGpuPcieWidth",
        f"{RULES.select('pacecar_gpu_pcie_width')} and on ({', '.join(OF_GPU)}) "
        f"{_unhealthy(HealthReason.PCIE_WIDTH)}", "10m", "warning",
        f"The PCIe link of {BY} is too narrow",
        "It runs on {{ printf \"%.0f\" $value }} lanes, fewer than GPU and slot have. Copies from the host and all "
        "traffic outside NVLink share this link."),
    Alert("PacecarGpuIdle", _idle_and_held(), "30m", "warning",
        f"{BY} idles, and {HOLDER} holds it",
        "No kernel ran on it for half an hour, though a process holds its memory: a job that hangs or waits, a "
        "notebook left open, or a process that did not end."),
))  # fmt: skip

LINK_ALERTS = Group("pacecar-links", (
    Alert("PacecarNvlinkDown",
        _links_down(), "1m", "critical",
        f"NVLink {{{{ $labels.link }}}} of {BY} is down",
        "The link was up before, or is up on the neighbouring GPUs. Collectives run over the remaining links, or over "
        "PCIe."),
    Alert("PacecarGpuFabric",
        _unhealthy(HealthReason.FABRIC_FAILED, HealthReason.FABRIC_NOT_JOINED, HealthReason.FABRIC_MISCONFIGURED), "1m",
        "critical", f"{BY} is not in its NVLink fabric: {{{{ $labels.reason }}}}",
        "fabric_failed: joining ended with an error; fabric_not_joined: it has not ended for "
        f"{FABRIC_JOIN_SECONDS // 60} minutes; fabric_misconfigured: the configuration is wrong. CUDA does not start "
        "on it, or runs without NVLink."),
    Alert("PacecarGpuFabricDegraded", _unhealthy(HealthReason.FABRIC_DEGRADED), "5m", "warning",
        f"The NVLink fabric of {BY} is degraded",
        "The GPU has less bandwidth than it should have, or its routes are unhealthy or being recovered. Collectives "
        "run at the speed of the slowest route."),
    Alert("PacecarNvlinkErrors",
        _grown("pacecar_gpu_nvlink_link_errors_total", "15m", *OF_GPU, "link", "kind", kind=f"!~{NVLINK_NORMAL}")
        + f" > {LINK_ERRORS_IN_15_MINUTES}", "5m", "warning",
        f"NVLink {{{{ $labels.link }}}} of {BY} has errors: {{{{ $labels.kind }}}}",
        "{{ printf \"%.0f\" $value }} errors of the kind {{ $labels.kind }} in the last 15 minutes."),
    Alert("PacecarRdmaErrors",
        _grown("pacecar_rdma_errors_total", "15m", CLUSTER, NODE, "device", "port", "error", error=f"!~{RDMA_NORMAL}")
        + " > 0", "0m", "warning",
        "RDMA port {{ $labels.device }}/{{ $labels.port }} of {{ $labels.instance }}: {{ $labels.error }}",
        "{{ $labels.error }} rose by {{ printf \"%.0f\" $value }} in the last 15 minutes."),
    Alert("PacecarRdmaPortDown",
        f"({RULES.select('pacecar_rdma_port_active')} == 0) and on ({CLUSTER}, {NODE}, device, port) {PORT_USED.name}",
        "1m", "critical", "RDMA port {{ $labels.device }}/{{ $labels.port }} of {{ $labels.instance }} is down",
        "It was active before. Jobs that use it fail or hang; new jobs run without it, over fewer ports or over TCP."),
    Alert("PacecarNetworkErrors",
        " > 10 or ".join(
            _grown(f"pacecar_host_network_{way}_errors_total", "15m", CLUSTER, NODE, "interface",
                   interface=f"!~{NO_CABLE}")
            for way in ("receive", "transmit")) + " > 10", "5m", "warning",
        "Interface {{ $labels.interface }} of {{ $labels.instance }} has errors",
        "{{ printf \"%.0f\" $value }} packets had an error in the last 15 minutes: a cable, a transceiver or a duplex "
        "setting."),
    Alert("PacecarNetworkFlaps",
        _grown("pacecar_host_network_carrier_changes_total", "15m", CLUSTER, NODE, "interface",
               interface=f"!~{NO_CABLE}") + " > 3", "0m", "warning",
        "Interface {{ $labels.interface }} of {{ $labels.instance }} comes and goes",
        "Its link changed {{ printf \"%.0f\" $value }} times in the last 15 minutes."),
    Alert("PacecarTcpRetransmissions",
        f"{SENT_AGAIN.name} > {TCP_RATIO} and {SENT.name} > {TCP_SEGMENTS_PER_SECOND}", "5m", "warning",
        "{{ $labels.instance }} retransmits many TCP segments",
        "{{ $value | humanizePercentage }} of the TCP segments of the last five minutes were retransmitted. Every rank "
        "of a ring waits for the worst link."),
))  # fmt: skip

HOST_ALERTS = Group("pacecar-host", (
    Alert("PacecarDiskFull",
        _writable(f"{_room('available_bytes', 'size_bytes')} < {FULL_RATIO} or "
                  f"{_room('files_free', 'files')} < {FULL_RATIO}"), "5m", "critical",
        "{{ $labels.mountpoint }} of {{ $labels.instance }} is full",
        "{{ $value | humanizePercentage }} of its space or of its files (inodes) is left. Checkpoints, logs and "
        "recordings fail there; on /dev/shm data loaders die."),
    Alert("PacecarDiskFilling", _soon_full(), "15m", "warning",
        "{{ $labels.mountpoint }} of {{ $labels.instance }} will be full within four hours",
        "{{ $value | humanizePercentage }} is left; at the rate of the last hour it lasts less than four hours."),
    Alert("PacecarDiskReadOnly",
        f"({RULES.select('pacecar_host_filesystem_read_only')} == 1) and on ({', '.join(OF_MOUNT)}) {WRITABLE.name}",
        "1m", "critical", "{{ $labels.mountpoint }} of {{ $labels.instance }} has become read-only",
        "It was writable before. The kernel does this after a disk error; nothing can be saved there."),
    Alert("PacecarOomKill", _out_of_memory(), "0m", "warning",
        "{{ $labels.instance }} killed {{ with $labels.training_job }}a process of {{ . }} {{ end }}for lack of memory",
        "The kernel killed {{ printf \"%.0f\" $value }} processes in the last ten minutes. If one was a data loader's "
        "worker, the job later fails or hangs with another error."),
))  # fmt: skip
