"""Builds the dashboard "pacecar / Node": faults, GPUs, links, network and host of one node or several.

It begins with faults, then GPUs and their links, the network, and the host.  Rows that are needed only when something
else points to them are collapsed, because a collapsed row does not query Prometheus.
"""

from __future__ import annotations

from grafanalib import core

from pacecar.metrics.catalog import WINDOW_NAMES

from ..frame import dashboard, variables
from ..palette import BAD, GOOD, WARN
from ..panels import Panelled, Query, Section, stat, time_series
from ..queries import CLUSTER, JOB, LAUNCH, NODE, ON_NODES, combine, divide, or_zero
from .node_gpu import gpu_extremes, gpu_health_section, gpu_inside_section, gpu_section, gpu_tenants_section
from .node_host import cgroup_section, disk_section, host_section, memory_section, numa_section
from .node_links import gpu_links_section, network_section, rdma_section, tcp_section
from .node_system import sensors_section, system_section
from .ranking import Column, ranking

__all__ = ["node_dashboard"]

NO_NODE = "No daemon is scraped there"
NO_GPU = "No GPU on this node"
_ON = f"{{{{{NODE}}}}}"
_JOB = (CLUSTER, JOB, LAUNCH)
_PORT = f"{_ON} {{{{device}}}}/{{{{port}}}}"

select, rate, increase = ON_NODES.select, ON_NODES.rate, ON_NODES.increase


def _now() -> Section:
    ranks = select("pacecar_rank_info")
    gpus, cards = select("pacecar_gpu_up"), select("pacecar_gpu_xid_errors_total")
    xids = combine("sum", increase("pacecar_gpu_xid_errors_total", window="$__range"))
    again = divide(
        combine("sum", rate("pacecar_host_tcp_segments_retransmitted_total")),
        combine("sum", rate("pacecar_host_tcp_segments_sent_total")),
    )
    busiest = combine("max", select("pacecar_host_network_transmit_utilization_ratio"))
    left = combine(
        "min", divide(select("pacecar_host_memory_available_bytes"), select("pacecar_host_memory_size_bytes"))
    )
    throttled = combine("max", rate("pacecar_gpu_clock_event_seconds_total", {"reason": "=~.*thermal.*|hw_.*"}))
    return Section("Now", [
        (3, 4, stat("Ranks here", "Ranks of all jobs on the selected nodes.",
            [Query(or_zero(combine("count", ranks), select("pacecar_build_info")), "ranks")], unit="none",
            empty=NO_NODE)),
        (3, 4, stat("GPUs down", "GPUs that the last tick could not read.",
            [Query(f"{combine('count', gpus)} - {combine('sum', gpus)}", "down")], unit="none", empty=NO_GPU,
            thresholds=[(0.0, GOOD), (1.0, BAD)])),
        (3, 4, stat("Xids", "Xid errors of all codes over the range shown.",
            [Query(or_zero(xids, cards), "errors")], unit="none", empty=NO_GPU, decimals=0,
            thresholds=[(0.0, GOOD), (1.0, BAD)])),
        (3, 4, stat("Hottest GPU", "Temperature of the hottest core.",
            [Query(combine("max", select("pacecar_gpu_temperature_celsius")), "core")], unit="celsius", empty=NO_GPU,
            thresholds=[(0.0, GOOD), (85.0, WARN), (90.0, BAD)])),
        (3, 4, stat("Held by heat", "Share of time in which heat or the hardware held the clocks of the worst GPU "
            "down.", [Query(throttled, "held down")], unit="percentunit", empty=NO_GPU, decimals=0,
            thresholds=[(0.0, GOOD), (0.05, WARN), (0.2, BAD)])),
        (3, 4, stat("Busiest link", "Bytes sent over the busiest interface, as a share of its rated speed.",
            [Query(busiest, "sent")], unit="percentunit", empty="No interface reports its speed", decimals=0,
            thresholds=[(0.0, GOOD), (0.9, WARN)])),
        (3, 4, stat("TCP again", "Retransmitted segments as a share of those sent.", [Query(again, "again")],
            unit="percentunit", empty="Nothing was sent by TCP", decimals=3,
            thresholds=[(0.0, GOOD), (0.001, WARN), (0.01, BAD)])),
        (3, 4, stat("Least memory", "Share of memory that can be given out without swapping.",
            [Query(left, "left")], unit="percentunit", empty=NO_NODE, decimals=0,
            thresholds=[(0.0, BAD), (0.05, WARN), (0.1, GOOD)])),
        (24, 5, ranking("Jobs on these nodes", "Each job with ranks here; its name links to its own dashboard.",
            _JOB, [
                Column("Ranks here", combine("count", ranks, *_JOB)),
                Column("Step", combine("max", select("pacecar_job_step"), *_JOB)),
                Column("Step time", combine("max", select("pacecar_job_step_duration_seconds"), *_JOB), "s"),
                Column("Most silent rank", combine("max", select("pacecar_job_last_record_age_seconds"), *_JOB),
                       "s", steps=[(30.0, WARN), (120.0, BAD)]),
                Column("Power here", combine("sum", rate("pacecar_job_energy_joules_total"), *_JOB), "watt"),
            ], worst="Most silent rank", empty="No job has ranks on these nodes")),
    ])  # fmt: skip


def _extremes() -> Section:
    card = f"{_ON} {{{{interface}}}}"
    rows = [
        *gpu_extremes(),
        ("CPU", "pacecar_host_cpu_utilization_ratio", "percentunit", _ON),
        *(
            (f"Network {way}", f"pacecar_host_network_{way}_utilization_ratio", "percentunit", card)
            for way in ("receive", "transmit")
        ),
        *((f"RDMA {way}", f"pacecar_rdma_{way}_utilization_ratio", "percentunit", _PORT)
          for way in ("receive", "transmit")),
    ]  # fmt: skip

    def panel(title: str, metric: str, unit: str, name: str) -> Panelled:
        low, mean, high = WINDOW_NAMES[metric]
        return 8, 7, time_series(
            f"{title}: lowest, mean, highest", "In the daemon's last window: peaks that a scrape would miss.", [
                Query(select(high), f"{name} highest"), Query(select(mean), f"{name} mean"),
                Query(select(low), f"{name} lowest"),
            ], unit=unit, empty="Nothing of this kind on this node, or the daemon's budget does not allow it",
        )  # fmt: skip

    return Section("Between two scrapes", [panel(*row) for row in rows], collapsed=True)


def node_dashboard() -> core.Dashboard:
    """Return the dashboard of one node or several."""
    return dashboard(
        "pacecar-node",
        "One node or several: GPUs and their health, NVLink, PCIe, network, RDMA, processors, memory and disks.",
        variables("node", "gpu"),
        [
            _now(), gpu_section(), gpu_health_section(), gpu_inside_section(), gpu_links_section(),
            gpu_tenants_section(), network_section(), tcp_section(), rdma_section(), host_section(),
            memory_section(), numa_section(), disk_section(), cgroup_section(), system_section(), sensors_section(),
            _extremes(),
        ],
    )  # fmt: skip
