"""Builds the rows of the dashboard "pacecar / Node" about links: NVLink and PCIe, network interfaces, TCP and RDMA.

The utilization of a link shows a bottleneck, retransmissions show a fault.  A link with half its width or a lower
generation shows in no error counter, so the rated speed is drawn beside the traffic.
"""

from __future__ import annotations

from ..palette import BAD, WARN
from ..panels import Query, Section, columns, look, table, time_series
from ..queries import CLUSTER, GPU, NODE, ON_NODES, combine, divide
from .node_gpu import GPU_NAME, NO_GPU

__all__ = ["gpu_links_section", "network_section", "rdma_section", "tcp_section"]

NO_NODE = "No daemon is scraped there"
NO_NVLINK = "No NVLink on this node"
NO_FABRIC = "No GPU on this node is part of an NVLink fabric"
NO_RDMA = "No RDMA port on this node"
NO_SPEED = "No interface of this node reports its speed"
_ON = f"{{{{{NODE}}}}}"
_PORT = f"{_ON} {{{{device}}}}/{{{{port}}}}"
_DASHED = {"custom__lineStyle": {"fill": "dash", "dash": [8, 8]}}
_RIGHT = {"custom__axisPlacement": "right"}

select, rate, increase = ON_NODES.select, ON_NODES.rate, ON_NODES.increase


def _both(metric: str, name: str, *, gauge: bool = False) -> list[Query]:
    """Return the queries for both directions; `metric` has a placeholder for the direction."""
    ask = select if gauge else rate
    return [
        Query(ask(metric.format(way)), f"{name} {words}")
        for way, words in (("receive", "received"), ("transmit", "sent"))
    ]


def gpu_links_section() -> Section:
    """Return the row about NVLink, its fabric and PCIe."""
    link = f"{GPU_NAME} link {{{{link}}}}"
    lanes = divide(select("pacecar_gpu_pcie_width"), select("pacecar_gpu_pcie_width_max"))
    generation = divide(select("pacecar_gpu_pcie_generation"), select("pacecar_gpu_pcie_generation_max"))
    state = select("pacecar_gpu_nvlink_link_state")
    led = f"on ({CLUSTER}, {NODE}, {GPU}, link) {select('pacecar_gpu_nvlink_info')}"
    down = combine("count", f"{state} == 0 and {led}", NODE, "gpu")
    return Section("NVLink and PCIe", [
        (8, 7, time_series("NVLink", "Bytes per second over all NVLinks of a GPU.",
            _both("pacecar_gpu_nvlink_{}_bytes_total", GPU_NAME), unit="Bps", empty=NO_NVLINK)),
        (8, 7, time_series("NVLinks that are down", "Links in the state down, per GPU; 0 if all are up. "
            "Links that the board does not connect do not count.",
            [Query(f"{down} or 0 * {combine('count', state, NODE, 'gpu')}", GPU_NAME)],
            unit="none", empty=NO_NVLINK, stepped=True, thresholds=[(1.0, BAD)])),
        (8, 7, time_series("NVLink errors", "Errors and recoveries in the window by kind. A single recovery costs "
            "milliseconds; a steady rate is a bad link.",
            [Query(combine("sum", increase("pacecar_gpu_nvlink_link_errors_total"), NODE, "gpu", "kind"),
                   f"{GPU_NAME} {{{{kind}}}}")], unit="none", empty=NO_NVLINK)),
        (8, 7, time_series("PCIe", "Bytes per second between GPU and host or network card.",
            [*_both("pacecar_gpu_pcie_{}_bytes_total", GPU_NAME),
             Query(select("pacecar_gpu_pcie_counters_reliable"), f"{GPU_NAME} counters are right (1)")],
            unit="Bps", empty="No PCIe counters on this node", overrides=[
                look(".* counters are right .*", regex=True, unit="none", custom__axisPlacement="right")])),
        (8, 7, time_series("PCIe below its best", "Lanes and generation as a share of the maximum of GPU and slot. "
            "The generation falls when the GPU idles; lost lanes do not come back by themselves.", [
                Query(lanes, f"{GPU_NAME} lanes"),
                Query(generation, f"{GPU_NAME} generation"),
            ], unit="percentunit", limit=1.0, empty=NO_GPU, stepped=True)),
        (8, 7, time_series("PCIe replays", "Packets sent again for an error on the link, in the window.",
            [Query(increase("pacecar_gpu_pcie_replays_total"), GPU_NAME)], unit="none", empty=NO_GPU)),
        (8, 7, time_series("By the performance monitor", "NVLink and PCIe as measured by newer GPUs themselves.", [
                *_both("pacecar_gpu_nvlink_{}_bytes_per_second", f"{GPU_NAME} NVLink", gauge=True),
                *_both("pacecar_gpu_pcie_{}_bytes_per_second", f"{GPU_NAME} PCIe", gauge=True),
            ], unit="Bps", empty="No GPU on this node reports it (Hopper and later do)")),
        (8, 7, time_series("Each NVLink", "Bytes per second of one link, and its rated speed.", [
                *_both("pacecar_gpu_nvlink_link_{}_bytes_total", link),
                Query(select("pacecar_gpu_nvlink_link_bytes_per_second"), f"{link} rated"),
            ], unit="Bps", empty=NO_NVLINK, overrides=[look(".* rated", regex=True, **_DASHED)])),
        (8, 7, time_series("Packets of each NVLink", "Packets per second of one link (NVLink 5).",
            _both("pacecar_gpu_nvlink_link_{}_packets_total", link), unit="pps",
            empty="No NVLink on this node counts packets")),
        (12, 7, table("What is at the other end", "Each NVLink and its other end.",
            [Query(select("pacecar_gpu_nvlink_info"), "", instant=True)], empty=NO_NVLINK,
            transformations=columns(NODE, "gpu", "link", "version", "remote_type", "remote_pci_bus_id"))),
        (12, 7, time_series("NVLink fabric", "State of joining the fabric, conditions that hold, and NVML's return "
            "code (0 is success).", [
                Query(select("pacecar_gpu_fabric_state") + " == 1", f"{GPU_NAME} {{{{state}}}}"),
                Query(select("pacecar_gpu_fabric_health") + " == 1", f"{GPU_NAME} {{{{health}}}}"),
                Query(select("pacecar_gpu_fabric_condition"), f"{GPU_NAME} {{{{condition}}}}"),
                Query(select("pacecar_gpu_fabric_status"), f"{GPU_NAME} return code"),
            ], unit="none", empty=NO_FABRIC, stepped=True)),
        (12, 7, table("Which fabric", "The cluster and clique of each GPU; NVLink connects GPUs of one clique. A "
            "problem is one of the fabric's configuration.",
            [Query(select("pacecar_gpu_fabric_info"), "", instant=True)], empty=NO_FABRIC,
            transformations=columns(NODE, "gpu", "cluster_uuid", "clique", "problem"))),
        (12, 7, time_series("NVLink-C2C", "Links between GPU and CPU: all, and those that are up; errors in the "
            "window. On the right their rated speed together.", [
                Query(select("pacecar_gpu_c2c_links"), f"{GPU_NAME} links"),
                Query(select("pacecar_gpu_c2c_links_up"), f"{GPU_NAME} up"),
                Query(select("pacecar_gpu_c2c_enabled"), f"{GPU_NAME} enabled"),
                Query(increase("pacecar_gpu_c2c_errors_total"), f"{GPU_NAME} {{{{kind}}}}"),
                Query(select("pacecar_gpu_c2c_bytes_per_second"), f"{GPU_NAME} rated"),
            ], unit="none", empty="No GPU on this node has NVLink-C2C to its CPU", stepped=True,
            overrides=[look(".* rated", regex=True, unit="Bps", **_RIGHT)])),
    ], collapsed=True)  # fmt: skip


def network_section() -> Section:
    """Return the row about network interfaces."""
    card = f"{_ON} {{{{interface}}}}"
    lost = [
        Query(increase(f"pacecar_host_network_{way}_{what}_total"), f"{card} {way} {what}")
        for what in ("errors", "drops")
        for way in ("receive", "transmit")
    ]
    return Section("Network", [
        (8, 7, time_series("Links in use", "Bytes as a share of the link's rated speed, by direction.",
            _both("pacecar_host_network_{}_utilization_ratio", card, gauge=True),
            unit="percentunit", limit=1.0, empty=NO_SPEED, thresholds=[(0.9, WARN)])),
        (8, 7, time_series("Network", "Bytes per second by interface, and the rated speed of the link if known.", [
                *_both("pacecar_host_network_{}_bytes_total", card),
                Query(select("pacecar_host_network_link_bytes_per_second"), f"{card} rated"),
            ], unit="Bps", empty=NO_NODE, overrides=[look(".* rated", regex=True, **_DASHED)])),
        (8, 7, time_series("Lost packets", "Errors and drops in the window. Any steady rate causes retransmissions, "
            "which delay the slowest rank.", lost, unit="none", empty=NO_NODE)),
        (8, 7, time_series("Packets", "Packets per second by interface.",
            _both("pacecar_host_network_{}_packets_total", card), unit="pps", empty=NO_NODE)),
        (8, 7, time_series("Interfaces that come and go", "Times that a link went up or down, in the window.", [
                Query(increase("pacecar_host_network_carrier_changes_total"), f"{card} changes"),
            ], unit="none", empty="No interface of this node counts it")),
        (8, 7, time_series("Interfaces", "1 if the interface is operational; on the right, the MTU: storage and RDMA "
            "networks should have 9000.", [
                Query(select("pacecar_host_network_up"), f"{card} up"),
                Query(select("pacecar_host_network_mtu_bytes"), f"{card} MTU"),
            ], unit="none", empty=NO_NODE, stepped=True,
            overrides=[look(".* MTU", regex=True, unit="bytes", **_RIGHT)])),
    ])  # fmt: skip


def tcp_section() -> Section:
    """Return the row about TCP, UDP and the kernel's queues."""
    again = divide(rate("pacecar_host_tcp_segments_retransmitted_total"), rate("pacecar_host_tcp_segments_sent_total"))
    return Section("TCP, UDP and the kernel's queues", [
        (8, 7, time_series("Retransmitted", "Retransmitted segments as a share of those sent. A ring of n ranks waits "
            "for the worst of n links: 0.1 % is a lot.", [Query(again, _ON)], unit="percentunit", decimals=3,
            empty="Nothing was sent by TCP", thresholds=[(0.001, WARN), (0.01, BAD)])),
        (8, 7, time_series("Causes of retransmissions", "Retransmissions in the window by cause, and timers that ran "
            "out: each stalls a connection for 200 ms or more.", [
                Query(increase("pacecar_host_tcp_retransmissions_total"), f"{_ON} {{{{cause}}}}"),
                Query(increase("pacecar_host_tcp_timeouts_total"), f"{_ON} timeouts"),
            ], unit="none", empty=NO_NODE)),
        (8, 7, time_series("Segments", "TCP segments per second, and connections on the right.", [
                Query(rate("pacecar_host_tcp_segments_received_total"), f"{_ON} received"),
                Query(rate("pacecar_host_tcp_segments_sent_total"), f"{_ON} sent"),
                Query(select("pacecar_host_tcp_connections"), f"{_ON} connections"),
            ], unit="pps", empty=NO_NODE, overrides=[look(".* connections", regex=True, unit="none", **_RIGHT)])),
        (8, 7, time_series("Dropped for want of room", "TCP segments and connections by cause, UDP datagrams by "
            "direction, and packets for a full backlog, in the window.", [
                Query(increase("pacecar_host_tcp_drops_total"), f"{_ON} TCP {{{{cause}}}}"),
                Query(increase("pacecar_host_udp_buffer_errors_total"), f"{_ON} UDP {{{{direction}}}}"),
                Query(increase("pacecar_host_softnet_drops_total"), f"{_ON} backlog"),
            ], unit="none", empty=NO_NODE)),
        (8, 7, time_series("Errors and resets", "Segments and datagrams with errors, and resets sent, in the window.", [
                Query(increase("pacecar_host_tcp_receive_errors_total"), f"{_ON} TCP errors"),
                Query(increase("pacecar_host_tcp_resets_sent_total"), f"{_ON} resets"),
                Query(increase("pacecar_host_udp_receive_errors_total"), f"{_ON} UDP errors"),
            ], unit="none", empty=NO_NODE)),
        (8, 7, time_series("Squeezed", "Times a processor ran out of its budget with packets left: raise "
            "net.core.netdev_budget or spread interrupts.",
            [Query(increase("pacecar_host_softnet_squeezes_total"), _ON)], unit="none", empty=NO_NODE)),
        (8, 7, time_series("Sockets", "TCP sockets by state; their buffers on the right.", [
                Query(select("pacecar_host_tcp_sockets"), f"{_ON} {{{{state}}}}"),
                Query(select("pacecar_host_socket_memory_bytes"), f"{_ON} {{{{protocol}}}} memory"),
            ], unit="none", empty=NO_NODE, overrides=[look(".* memory", regex=True, unit="bytes", **_RIGHT)])),
        (8, 7, time_series("Connections opened", "TCP connections per second, by the side that opened them.",
            [Query(rate("pacecar_host_tcp_opens_total"), f"{_ON} {{{{side}}}}")], unit="cps", empty=NO_NODE)),
        (8, 7, time_series("UDP datagrams", "Datagrams per second, by direction.",
            [Query(rate("pacecar_host_udp_datagrams_total"), f"{_ON} {{{{direction}}}}")], unit="pps", empty=NO_NODE)),
    ], collapsed=True)  # fmt: skip


def rdma_section() -> Section:
    """Return the row about RDMA ports."""
    return Section("RDMA", [
        (8, 7, time_series("RDMA links in use", "Bytes as a share of the port's rated speed, by direction.",
            _both("pacecar_rdma_{}_utilization_ratio", _PORT, gauge=True),
            unit="percentunit", limit=1.0, empty=NO_RDMA, thresholds=[(0.9, WARN)])),
        (8, 7, time_series("RDMA traffic", "Bytes per second by port, and its rated speed.", [
                *_both("pacecar_rdma_{}_bytes_total", _PORT),
                Query(select("pacecar_rdma_port_link_bytes_per_second"), f"{_PORT} rated"),
            ], unit="Bps", empty=NO_RDMA, overrides=[look(".* rated", regex=True, **_DASHED)])),
        (8, 7, time_series("RDMA congestion", "Marks, losses and retransmissions in the window, by the kernel's name.",
            [Query(increase("pacecar_rdma_congestion_events_total"), f"{_PORT} {{{{event}}}}")],
            unit="none", empty=NO_RDMA)),
        (8, 7, time_series("RDMA errors", "Errors in the window, by the kernel's name.",
            [Query(increase("pacecar_rdma_errors_total"), f"{_PORT} {{{{error}}}}")], unit="none", empty=NO_RDMA)),
        (8, 7, time_series("RDMA waits", "Ticks of the port's own clock in which it had data but no credit to send: "
            "the other side or the switch delays it.",
            [Query(rate("pacecar_rdma_transmit_waits_total"), _PORT)], unit="cps", empty=NO_RDMA)),
        (8, 7, time_series("RDMA packets", "Packets per second by port.",
            _both("pacecar_rdma_{}_packets_total", _PORT), unit="pps", empty=NO_RDMA)),
        (12, 7, time_series("RDMA ports", "1 if the port is active; 1 if its link is up.", [
                Query(select("pacecar_rdma_port_active"), f"{_PORT} active"),
                Query(select("pacecar_rdma_port_link_up"), f"{_PORT} link"),
            ], unit="none", limit=1.0, empty=NO_RDMA, stepped=True)),
        (12, 7, table("RDMA adapters", "Constant facts of each port.",
            [Query(select("pacecar_rdma_port_info"), "", instant=True)], empty=NO_RDMA,
            transformations=columns(NODE, "device", "port", "link_layer", "adapter", "firmware"))),
    ], collapsed=True)  # fmt: skip
