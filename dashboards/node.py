"""What are the machines of this job doing meanwhile?  The rows "Host" and "GPU".

They follow the job: the variable `node` lists the nodes on which its ranks run.  Utilization of a GPU is drawn with
a warning, because it is the share of time in which any kernel ran, even one on a single multiprocessor that waits for
the network.
"""

from __future__ import annotations

from pacecar.dashboards.palette import BAD, WARN
from pacecar.dashboards.panels import Query, Section, columns, look, table, time_series
from pacecar.dashboards.queries import NODE, divide, increase, rate, select

__all__ = ["gpu_section", "host_section"]

NO_NODE = "No daemon is scraped on this job's nodes"
NO_GPU = "No GPU on this node"
_ON = f"{{{{{NODE}}}}}"


def _where(text: str) -> str:
    return f"{_ON} {text}"


def host_section() -> Section:
    """Return the row about processors, memory, disks, file systems and network interfaces."""
    return Section("Host", [
        (8, 7, time_series("CPU", "Share of CPU time not idle nor waiting for I/O. Data loading and gloo compete "
            "here with the training threads.", [Query(select("pacecar_host_cpu_utilization_ratio"), _ON)],
            unit="percentunit", limit=1.0, empty=NO_NODE)),
        (8, 7, time_series("CPU by mode", "Processors kept busy, by mode, idle left out; the top line is how many "
            "there are.", [
                Query(rate("pacecar_host_cpu_seconds_total", {"mode": "!=idle"}), _where("{{mode}}")),
                Query(select("pacecar_host_cpus_online"), _where("processors")),
            ], unit="none", empty=NO_NODE)),
        (8, 7, time_series("Load and switches", "Load averages; context switches per second on the right.", [
                Query(select("pacecar_host_load_average"), _where("{{window}}")),
                Query(rate("pacecar_host_context_switches_total"), _where("switches")),
            ], unit="none", empty=NO_NODE,
            overrides=[look(".* switches", regex=True, unit="cps", custom__axisPlacement="right")])),
        (8, 7, time_series("Memory", "Used, page cache, what can still be given out, and what is there.", [
                Query(select("pacecar_host_memory_used_bytes"), _where("used")),
                Query(select("pacecar_host_memory_cached_bytes"), _where("cached")),
                Query(select("pacecar_host_memory_available_bytes"), _where("available")),
                Query(select("pacecar_host_memory_size_bytes"), _where("size")),
            ], unit="bytes", empty=NO_NODE)),
        (8, 7, time_series("Swap", "Swap in use; a training job that swaps is slow for that reason alone.", [
                Query(select("pacecar_host_swap_used_bytes"), _where("used")),
                Query(select("pacecar_host_swap_size_bytes"), _where("size")),
            ], unit="bytes", empty=NO_NODE)),
        (8, 7, time_series("Pressure", "Share of time that tasks stalled on a resource (PSI): some of them, or all.",
            [Query(rate("pacecar_host_pressure_stalled_seconds_total"), _where("{{resource}} {{kind}}"))],
            unit="percentunit", limit=1.0, empty="This kernel keeps no pressure counters")),
        (8, 7, time_series("Network", "Bytes per second by interface; the rated speed of the link where it is known.", [
                Query(rate("pacecar_host_network_receive_bytes_total"), _where("{{interface}} received")),
                Query(rate("pacecar_host_network_transmit_bytes_total"), _where("{{interface}} sent")),
                Query(select("pacecar_host_network_link_bytes_per_second"), _where("{{interface}} link")),
            ], unit="Bps", empty=NO_NODE,
            overrides=[look(".* link", regex=True, custom__lineStyle={"fill": "dash", "dash": [8, 8]})])),
        (8, 7, time_series("Packets", "Packets per second by interface.", [
                Query(rate("pacecar_host_network_receive_packets_total"), _where("{{interface}} received")),
                Query(rate("pacecar_host_network_transmit_packets_total"), _where("{{interface}} sent")),
            ], unit="pps", empty=NO_NODE)),
        (8, 7, time_series("Lost packets", "Errors and drops. Any steady rate costs retransmissions, and with them "
            "the slowest rank's time.", [
                Query(increase("pacecar_host_network_receive_errors_total"), _where("{{interface}} receive errors")),
                Query(increase("pacecar_host_network_transmit_errors_total"), _where("{{interface}} send errors")),
                Query(increase("pacecar_host_network_receive_drops_total"), _where("{{interface}} receive drops")),
                Query(increase("pacecar_host_network_transmit_drops_total"), _where("{{interface}} send drops")),
            ], unit="none", empty=NO_NODE)),
        (8, 7, time_series("Disk", "Bytes per second by device.", [
                Query(rate("pacecar_host_disk_read_bytes_total"), _where("{{device}} read")),
                Query(rate("pacecar_host_disk_written_bytes_total"), _where("{{device}} written")),
            ], unit="Bps", empty="No disk on this node")),
        (8, 7, time_series("Disk operations", "Reads and writes per second; on the right the share of time with I/O in "
            "flight.", [
                Query(rate("pacecar_host_disk_reads_total"), _where("{{device}} reads")),
                Query(rate("pacecar_host_disk_writes_total"), _where("{{device}} writes")),
                Query(rate("pacecar_host_disk_busy_seconds_total"), _where("{{device}} busy")),
            ], unit="iops", empty="No disk on this node",
            overrides=[look(".* busy", regex=True, unit="percentunit", custom__axisPlacement="right")])),
        (8, 7, time_series("File systems", "Share of each file system that can still be written; checkpoints fail at "
            "zero.", [Query(divide(select("pacecar_host_filesystem_available_bytes"),
                                   select("pacecar_host_filesystem_size_bytes")), _where("{{mountpoint}}"))],
            unit="percentunit", limit=1.0, empty=NO_NODE)),
    ])  # fmt: skip


def gpu_section() -> Section:
    """Return the row about GPUs: how busy, how full, how hot, how fast, and what crosses their links."""
    gpu = _where("GPU {{gpu}}")
    memory = divide(select("pacecar_gpu_memory_used_bytes"), select("pacecar_gpu_memory_size_bytes"))
    clock = divide(
        select("pacecar_gpu_clock_hertz", {"clock": "sm"}), select("pacecar_gpu_clock_max_hertz", {"clock": "sm"})
    )
    power = divide(select("pacecar_gpu_power_watts"), select("pacecar_gpu_power_limit_watts"))
    return Section("GPU", [
        (8, 7, time_series("Utilization", "Share of time in which any kernel ran, a waiting communication kernel "
            "included. High here does not mean fast: read the ledger.",
            [Query(select("pacecar_gpu_utilization_ratio"), gpu)], unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("Memory traffic", "Share of time in which device memory was read or written.",
            [Query(select("pacecar_gpu_memory_utilization_ratio"), gpu)],
            unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("GPU memory", "Share of device memory in use; head-room is what a larger micro-batch needs.",
            [Query(memory, gpu)], unit="percentunit", limit=1.0, empty=NO_GPU, thresholds=[(0.95, BAD)])),
        (8, 7, time_series("Power", "Power draw, as a share of the enforced limit. Steadily at the limit, clocks fall.",
            [Query(power, gpu)], unit="percentunit", empty=NO_GPU, thresholds=[(1.0, WARN)])),
        (8, 7, time_series("Energy", "Mean power from the energy counter, which misses no peak between two samples.",
            [Query(rate("pacecar_gpu_energy_joules_total"), gpu)], unit="watt", empty=NO_GPU)),
        (8, 7, time_series("Temperature", "Temperature of the core. The driver slows most data-centre GPUs above 85 to "
            "90 degrees.", [Query(select("pacecar_gpu_temperature_celsius"), gpu)], unit="celsius", empty=NO_GPU,
            thresholds=[(85.0, WARN)])),
        (8, 7, time_series("SM clock", "Clock of the multiprocessors, as a share of the highest. One GPU below its "
            "neighbours is a straggler.", [Query(clock, gpu)], unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("Clocks", "All clocks now, by domain.",
            [Query(select("pacecar_gpu_clock_hertz"), _where("GPU {{gpu}} {{clock}}"))], unit="hertz", empty=NO_GPU)),
        (8, 7, time_series("NVLink", "Bytes per second over all NVLinks of a GPU.", [
                Query(rate("pacecar_gpu_nvlink_receive_bytes_total"), _where("GPU {{gpu}} received")),
                Query(rate("pacecar_gpu_nvlink_transmit_bytes_total"), _where("GPU {{gpu}} sent")),
            ], unit="Bps", empty="No NVLink counters on this node")),
        (8, 7, time_series("PCIe", "Bytes per second between GPU and host or network card.", [
                Query(rate("pacecar_gpu_pcie_receive_bytes_total"), _where("GPU {{gpu}} received")),
                Query(rate("pacecar_gpu_pcie_transmit_bytes_total"), _where("GPU {{gpu}} sent")),
            ], unit="Bps", empty="No PCIe counters on this node")),
        (16, 7, table("GPUs", "Constant facts of each GPU.", [Query(select("pacecar_gpu_info"), "", instant=True)],
            empty=NO_GPU, transformations=columns(NODE, "gpu", "name", "uuid", "driver", "pci_bus_id"))),
    ])  # fmt: skip
