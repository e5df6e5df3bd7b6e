"""Builds the GPU rows of the dashboard "pacecar / Node": use, health, activity of the parts, processes and MIG.

GPU utilization has a warning: it is the share of time in which any kernel ran, even one on a single multiprocessor that
waits for the network.  Clock reasons, memory and links explain a slow GPU better than utilization.
"""

from __future__ import annotations

from pacecar.metrics.catalog import WINDOW_NAMES

from ..palette import BAD, WARN
from ..panels import Query, Section, columns, look, table, time_series
from ..queries import NODE, ON_NODES, combine, divide

__all__ = ["NO_GPU", "gpu_extremes", "gpu_health_section", "gpu_inside_section", "gpu_section", "gpu_tenants_section"]

NO_GPU = "No GPU on this node"
NO_HOPPER = "No GPU on this node reports it (Hopper and later do)"
NO_MIG = "No GPU on this node has MIG instances"
GPU_NAME = f"{{{{{NODE}}}}} GPU {{{{gpu}}}}"
INSTANCE = f"{GPU_NAME} {{{{gpu_instance}}}}/{{{{compute_instance}}}}"

select, rate, increase = ON_NODES.select, ON_NODES.rate, ON_NODES.increase


def _of(what: str) -> str:
    return f"{GPU_NAME} {what}"


def gpu_section() -> Section:
    """Return the row about GPUs: utilization, memory, temperature, clocks, and what holds the clocks down."""
    memory = divide(select("pacecar_gpu_memory_used_bytes"), select("pacecar_gpu_memory_size_bytes"))
    clock = divide(
        select("pacecar_gpu_clock_hertz", {"clock": "sm"}), select("pacecar_gpu_clock_max_hertz", {"clock": "sm"})
    )
    power = divide(select("pacecar_gpu_power_watts"), select("pacecar_gpu_power_limit_watts"))
    return Section("GPU", [
        (8, 7, time_series("Utilization", "Share of time in which any kernel ran, a waiting communication kernel "
            "included. High here does not mean fast: read the ledger.",
            [Query(select("pacecar_gpu_utilization_ratio"), GPU_NAME)], unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("GPU memory", "Share of device memory in use; a larger micro-batch needs headroom.",
            [Query(memory, GPU_NAME)], unit="percentunit", limit=1.0, empty=NO_GPU, thresholds=[(0.95, BAD)])),
        (8, 7, time_series("Held down", "Share of time in which a reason held the clocks down. Idle and clocks set by "
            "a user are not faults; thermal reasons and the power brake are.",
            [Query(combine("max", rate("pacecar_gpu_clock_event_seconds_total"), NODE, "gpu", "reason"),
                   _of("{{reason}}"))],
            unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("SM clock", "Clock of the multiprocessors, as a share of the highest. One GPU below its "
            "neighbours is a straggler.", [Query(clock, GPU_NAME)], unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("Power", "Power draw, as a share of the enforced limit. At the limit, clocks fall.",
            [Query(power, GPU_NAME)], unit="percentunit", empty=NO_GPU, low=0, thresholds=[(1.0, WARN)])),
        (8, 7, time_series("Temperature", "Temperature of the core and, if the GPU reports it, of the memory. The "
            "driver slows most data-centre GPUs above 85 to 90 degrees; the GPU's own limits are further down.", [
                Query(select("pacecar_gpu_temperature_celsius"), GPU_NAME),
                Query(select("pacecar_gpu_memory_temperature_celsius"), _of("memory")),
            ], unit="celsius", empty=NO_GPU, thresholds=[(85.0, WARN)])),
        (8, 7, time_series("Memory traffic", "Share of time in which device memory was read or written.",
            [Query(select("pacecar_gpu_memory_utilization_ratio"), GPU_NAME)],
            unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("Energy", "Mean power from the energy counter, which includes peaks between samples, and "
            "the daemon's value for its last tick.", [
                Query(rate("pacecar_gpu_energy_joules_total"), GPU_NAME),
                Query(select("pacecar_gpu_power_mean_watts"), _of("last tick")),
            ], unit="watt", empty=NO_GPU)),
        (8, 7, time_series("Clocks", "All clocks now, by domain.",
            [Query(select("pacecar_gpu_clock_hertz"), _of("{{clock}}"))], unit="hertz", empty=NO_GPU)),
        (24, 6, table("GPUs", "Constant facts of each GPU.", [Query(select("pacecar_gpu_info"), "", instant=True)],
            empty=NO_GPU,
            transformations=columns(NODE, "gpu", "name", "architecture", "driver", "cuda", "pci_bus_id", "mig",
                                    "uuid"))),
    ])  # fmt: skip


def gpu_health_section() -> Section:
    """Return the row about GPUs that are down, errors, and worn memory."""
    down = select("pacecar_gpu_down") + " == 1"
    waiting = [
        Query(select(f"pacecar_gpu_{metric}"), _of(words))
        for metric, words in (
            ("row_remap_pending", "remap waits for a reset"), ("row_remap_failed", "remap failed"),
            ("retired_pages_pending", "pages wait for a reset"),
            ("sram_ecc_threshold_exceeded", "SRAM has too many errors"),
        )
    ]  # fmt: skip
    return Section("GPU health", [
        (8, 7, table("GPUs that are not well", "Failed: run no jobs on it until it is repaired. Degraded: it "
            "works, but slower or at risk. Unknown: no reading yet.", [
                Query(f"{select('pacecar_gpu_health', {'verdict': '!=ok'})} == 1", "", instant=True),
            ], empty="Every GPU is well", transformations=columns(NODE, "gpu", "verdict"))),
        (8, 7, table("Why they are not", "The reasons; the runbook has the remedies.", [
                Query(f"{select('pacecar_gpu_health_reason')} == 1", "", instant=True),
            ], empty="Every GPU is well", transformations=columns(NODE, "gpu", "reason"))),
        (8, 7, table("Missing GPUs", "GPUs that a node had and has not found since its daemon started.", [
                Query(f"{select('pacecar_gpu_missing')} == 1", "", instant=True),
            ], empty="No GPU is missing", transformations=columns(NODE, "name", "pci_bus_id", "uuid"))),
        (8, 7, time_series("Answering", "1 while the last tick read something of the GPU.",
            [Query(select("pacecar_gpu_up"), GPU_NAME)], unit="none", empty=NO_GPU, limit=1.0, stepped=True)),
        (8, 7, table("GPUs that are down", "Hung: a call does not return. Lost, vanished: the driver no longer knows "
            "it.", [
                Query(down, "", instant=True),
            ], empty="Every GPU answers", transformations=columns(NODE, "gpu", "reason"))),
        (8, 7, time_series("Ticks without an answer", "Ticks in which nothing was read, in a row and in the window by "
            "reason; single numbers that could not be read, and numbers that the driver now refuses.", [
                Query(select("pacecar_gpu_consecutive_failures"), _of("in a row")),
                Query(increase("pacecar_gpu_failures_total"), _of("{{reason}}")),
                Query(increase("pacecar_gpu_read_failures_total"), _of("single numbers")),
                Query(select("pacecar_gpu_refused_numbers", {"since": "later"}), _of("refused")),
            ], unit="none", empty=NO_GPU)),
        (8, 7, time_series("Xid errors", "Xid errors in the window, by code: 48, 63, 64, 94, 95 are memory, 74 is "
            "NVLink, 79 fell off the bus; 13 and 31 are mostly the program's fault (NVIDIA's Xid catalog).",
            [Query(increase("pacecar_gpu_xid_errors_total"), _of("Xid {{xid}}"))], unit="none", empty=NO_GPU)),
        (8, 7, time_series("ECC errors", "Errors in the window, counted since the driver was loaded (volatile) or over "
            "the board's life. Corrected errors are harmless.",
            [
                Query(increase("pacecar_gpu_ecc_errors_total"), _of("{{severity}} {{lifetime}}")),
                Query(increase("pacecar_gpu_sram_ecc_errors_total"), _of("SRAM {{severity}} {{lifetime}}")),
                Query(select("pacecar_gpu_ecc_uncorrected_errors"), _of("uncorrected since the last reset")),
            ],
            unit="none", empty="No GPU on this node has ECC")),
        (8, 7, time_series("Waits for a reset", "1 if a row or page waits for a reset to be retired. If that failed, "
            "or the SRAM has too many errors, replace the board.", waiting, unit="none",
            empty="No GPU on this node repairs its memory", stepped=True, thresholds=[(1.0, BAD)])),
        (8, 7, time_series("Repaired memory", "Rows remapped (Ampere and later) and pages retired (before), so far.", [
                Query(select("pacecar_gpu_remapped_rows"), _of("rows {{severity}}")),
                Query(select("pacecar_gpu_retired_pages"), _of("pages {{cause}}")),
            ], unit="none", empty="No GPU on this node repairs its memory", stepped=True)),
        (8, 7, time_series("Distance to the slowdown", "Degrees below each temperature at which the GPU acts. "
            "Newer GPUs report the margin instead of temperatures.",
            [Query(f"{select('pacecar_gpu_temperature_threshold_celsius')} - on ({NODE}, gpu) group_left () "
                   f"{select('pacecar_gpu_temperature_celsius')}", _of("{{threshold}}")),
             Query(select("pacecar_gpu_temperature_margin_celsius"), _of("margin")),
             Query(f"{select('pacecar_gpu_temperature_margin_celsius')} - on ({NODE}, gpu) group_right () "
                   f"{select('pacecar_gpu_temperature_margin_threshold_celsius')}", _of("{{threshold}} by margin"))],
            unit="celsius", empty=NO_GPU, thresholds=[(5.0, WARN)])),
        (8, 7, time_series("Performance state", "0 is the fastest, 15 the slowest; an idle GPU is at 8.", [
                Query(select("pacecar_gpu_performance_state"), GPU_NAME),
            ], unit="none", empty=NO_GPU, stepped=True)),
        (8, 6, time_series("Silent for", "Time since each GPU was last read.",
            [Query(f"time() - {select('pacecar_gpu_last_success_time_seconds')}", GPU_NAME)],
            unit="s", empty=NO_GPU, thresholds=[(60.0, BAD)])),
        (8, 6, time_series("A slow driver", "1 while readings of a GPU take longer than a tick waits, so that it is "
            "read less often. On the right: time between two readings, and time of a call.", [
                Query(select("pacecar_gpu_driver_slow"), _of("slow")),
                Query(select("pacecar_gpu_read_interval_seconds"), _of("between readings")),
                Query(divide(rate("pacecar_gpu_driver_call_seconds_total"), rate("pacecar_gpu_driver_calls_total")),
                      _of("a call")),
            ], unit="none", empty=NO_GPU, low=0, overrides=[
                look(".*(between readings|a call)", regex=True, unit="s", custom__axisPlacement="right")])),
        (8, 6, time_series("Fans", "Requested speed of each fan, as a share of its maximum; rpm on the right.", [
                Query(select("pacecar_gpu_fan_speed_ratio"), _of("fan {{fan}}")),
                Query(select("pacecar_gpu_fan_rpm"), _of("fan {{fan}} rpm")),
            ], unit="percentunit", empty="The chassis cools these GPUs", low=0,
            overrides=[look(".* rpm", regex=True, unit="rotrpm", custom__axisPlacement="right")])),
        (8, 6, time_series("Spare rows", "Banks of memory with no or few spare rows left: the next errors in them "
            "cannot be repaired.", [
                Query(select("pacecar_gpu_row_remap_banks", {"spare": "none"}), _of("none")),
                Query(select("pacecar_gpu_row_remap_banks", {"spare": "few"}), _of("few")),
            ], unit="none", empty="No GPU on this node repairs its memory", stepped=True)),
        (8, 6, time_series("Power limits", "The enforced limit, the board's default, and their bounds.", [
                Query(select("pacecar_gpu_power_limit_watts"), _of("enforced")),
                Query(select("pacecar_gpu_power_limit_default_watts"), _of("default")),
                Query(select("pacecar_gpu_power_limit_min_watts"), _of("lowest")),
                Query(select("pacecar_gpu_power_limit_max_watts"), _of("highest")),
            ], unit="watt", empty=NO_GPU, stepped=True)),
        (8, 6, time_series("ECC and MIG modes", "1 if the mode is on; \"next\" is after a reset.", [
                Query(select("pacecar_gpu_ecc_enabled"), _of("ECC")),
                Query(select("pacecar_gpu_ecc_enabled_after_reset"), _of("ECC next")),
                Query(select("pacecar_gpu_mig_enabled_after_reset"), _of("MIG next")),
            ], unit="none", empty=NO_GPU, stepped=True)),
        (24, 6, table("Where the boards sit", "Chassis, slot and tray, if the platform reports them.",
            [Query(select("pacecar_gpu_platform_info"), "", instant=True)], empty="No platform reports it",
            transformations=columns(NODE, "gpu", "chassis_serial", "slot", "tray", "host", "module"))),
    ], collapsed=True)  # fmt: skip


def gpu_inside_section() -> Section:
    """Return the row about the activity of a GPU's parts, which newer GPUs report."""
    return Section("Inside the GPUs", [
        (8, 7, time_series("SMs at work", "Share of the multiprocessors that worked, unlike utilization.",
            [Query(select("pacecar_gpu_sm_active_ratio"), GPU_NAME),
             Query(select("pacecar_gpu_graphics_active_ratio"), _of("any engine"))],
            unit="percentunit", limit=1.0, empty=NO_HOPPER)),
        (8, 7, time_series("Occupancy", "Warps in flight over the most possible.",
            [Query(select("pacecar_gpu_sm_occupancy_ratio"), GPU_NAME)],
            unit="percentunit", limit=1.0, empty=NO_HOPPER)),
        (8, 7, time_series("Tensor cores", "Share of time in which the tensor cores worked; and the other pipes.", [
                Query(select("pacecar_gpu_tensor_active_ratio"), GPU_NAME),
                Query(select("pacecar_gpu_pipe_active_ratio"), _of("{{pipe}}")),
            ], unit="percentunit", limit=1.0, empty=NO_HOPPER)),
        (8, 7, time_series("Memory bandwidth", "Bandwidth of device memory used over the most possible.",
            [Query(select("pacecar_gpu_dram_bandwidth_ratio"), GPU_NAME)],
            unit="percentunit", limit=1.0, empty=NO_HOPPER)),
        (8, 7, time_series("Video engines", "Share of time in which encoder and decoder worked; only loading of video "
            "uses them.", [
                Query(select("pacecar_gpu_encoder_utilization_ratio"), _of("encoder")),
                Query(select("pacecar_gpu_decoder_utilization_ratio"), _of("decoder")),
            ], unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("Reserved memory and BAR1", "Memory reserved by the driver, and the window for other "
            "devices, which GPUDirect RDMA needs.", [
                Query(select("pacecar_gpu_memory_reserved_bytes"), _of("reserved")),
                Query(select("pacecar_gpu_bar1_used_bytes"), _of("BAR1 used")),
                Query(select("pacecar_gpu_bar1_size_bytes"), _of("BAR1")),
            ], unit="bytes", empty=NO_GPU)),
    ], collapsed=True)  # fmt: skip


def gpu_tenants_section() -> Section:
    """Return the row about processes and MIG instances."""
    memory = divide(select("pacecar_gpu_instance_memory_used_bytes"), select("pacecar_gpu_instance_memory_size_bytes"))
    return Section("Who is on the GPUs: processes and MIG instances", [
        (8, 7, time_series("Processes", "Compute processes on each GPU. If there are more than ranks, others use it "
            "too.", [
                Query(select("pacecar_gpu_processes"), GPU_NAME),
                Query(select("pacecar_gpu_mps_processes"), _of("MPS")),
            ], unit="none", empty=NO_GPU, stepped=True)),
        (8, 7, time_series("Memory of processes", "Device memory of the largest processes.",
            [Query(select("pacecar_gpu_process_memory_bytes"), _of("pid {{pid}}"))], unit="bytes",
            empty="No process is on these GPUs")),
        (8, 7, time_series("Processes at work", "Share of time in which a process's kernels ran.",
            [Query(select("pacecar_gpu_process_sm_ratio"), _of("pid {{pid}}"))], unit="percentunit", limit=1.0,
            empty="The driver does not report it for these GPUs")),
        (24, 6, table("MIG instances", "The instances of partitioned GPUs.",
            [Query(select("pacecar_gpu_instance_info"), "", instant=True)], empty=NO_MIG,
            transformations=columns(NODE, "gpu", "gpu_instance", "compute_instance", "name", "uuid"))),
        (8, 7, time_series("Memory of instances", "Share of each instance's memory in use.",
            [Query(memory, INSTANCE)], unit="percentunit", limit=1.0, empty=NO_MIG)),
        (8, 7, time_series("Memory of instances in bytes", "Used, free, and reserved by the driver.", [
                Query(select("pacecar_gpu_instance_memory_used_bytes"), f"{INSTANCE} used"),
                Query(select("pacecar_gpu_instance_memory_free_bytes"), f"{INSTANCE} free"),
                Query(select("pacecar_gpu_instance_memory_reserved_bytes"), f"{INSTANCE} reserved"),
            ], unit="bytes", empty=NO_MIG)),
        (8, 7, time_series("Instances at work", "Activity of the parts of each instance; processes on it.", [
                Query(select("pacecar_gpu_instance_active_ratio"), _of("{{gpu_instance}} {{part}}")),
                Query(select("pacecar_gpu_instance_processes"), f"{INSTANCE} processes"),
                Query(select("pacecar_gpu_mig_enabled"), _of("is cut")),
                Query(select("pacecar_gpu_mig_instances"), _of("instances")),
            ], unit="percentunit", empty=NO_MIG, overrides=[
                look(".* (processes|is cut|instances)", regex=True, unit="none", custom__axisPlacement="right")])),
    ], collapsed=True)  # fmt: skip


def gpu_extremes() -> list[tuple[str, str, str, str]]:
    """Return (title, metric, unit, series name) of GPU metrics with peaks that a scrape misses."""
    return [
        ("Utilization", "pacecar_gpu_utilization_ratio", "percentunit", GPU_NAME),
        ("Power", "pacecar_gpu_power_watts", "watt", GPU_NAME),
        ("SMs at work", "pacecar_gpu_sm_active_ratio", "percentunit", GPU_NAME),
        *(
            (f"NVLink {way}", f"pacecar_gpu_nvlink_{way}_bytes_per_second", "Bps", GPU_NAME)
            for way in ("receive", "transmit")
        ),
    ]


assert all(metric in WINDOW_NAMES for _, metric, _, _ in gpu_extremes()), "a metric is not windowed"
