"""Says which text of `nvidia-smi -q -x` tells the same as a metric of pacecar's, and how far apart the two may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["COUNTERPARTS", "FACTS", "NOT_COMPARED", "Counterpart", "number"]

MIB, KIB = 2**20, 2**10


@dataclass(frozen=True)
class Counterpart:
    """A series and its texts; the product's value lies between the readings, give or take `absolute` and `ratio`.

    `paths` are below the XML's <gpu>; `total` adds them up, else each is a reading of its own.  With neither tolerance
    nor change, between is equal.
    """

    metric: str
    labels: tuple[tuple[str, str], ...]
    paths: tuple[str, ...]
    read: Callable[[str], float]
    absolute: float = 0.0
    ratio: float = 0.0
    total: bool = False


def number(text: str) -> float:
    """Return the number that a text begins with: "78.91 W", "16x", "P0", "3072 bank(s)"."""
    word = text.split()[0]
    return float(word.removeprefix("P").removesuffix("x"))


def _times(factor: float) -> Callable[[str], float]:
    return lambda text: number(text) * factor


def _divided(divisor: float) -> Callable[[str], float]:
    return lambda text: number(text) / divisor


def _claim(text: str) -> float:
    return {"yes": 1.0, "no": 0.0, "enabled": 1.0, "disabled": 0.0}[text.lower()]


def _one(
    metric: str,
    *paths: str,
    read: Callable[[str], float] = number,
    absolute: float = 0.0,
    ratio: float = 0.0,
    total: bool = False,
    **labels: str,
) -> Counterpart:
    return Counterpart(f"pacecar_gpu_{metric}", tuple(sorted(labels.items())), paths, read, absolute, ratio, total)


_POWER, _HOT, _ECC, _ROWS, _PCI = (
    "gpu_power_readings/", "temperature/", "ecc_errors/", "remapped_rows/", "pci/pci_gpu_link_info/",
)  # fmt: skip
_MARGINS = {"shutdown": "max", "slowdown": "slow", "memory_max": "max_mem", "gpu_max": "max_gpu"}
_EVENTS = {
    "sw_power_cap": "sw_power_cap",
    "sync_boost": "sync_boost",
    "sw_thermal_slowdown": "sw_therm_slowdown",
    "hw_thermal_slowdown": "hw_therm_slowdown",
    "hw_power_brake": "hw_power_brake",
}
_SRAM = {
    "corrected": "sram_correctable",
    "uncorrected_parity": "sram_uncorrectable_parity",
    "uncorrected_sec_ded": "sram_uncorrectable_secded",
}
_SPARES = {"all": "max", "most": "high", "some": "partial", "few": "low", "none": "none"}
_CLOCKS = {"graphics": "graphics", "sm": "sm", "memory": "mem", "video": "video"}

COUNTERPARTS = (
    # nvidia-smi rounds to whole MiB, up or down.  What is used changes as programs come and go.
    _one("memory_size_bytes", "fb_memory_usage/total", read=_times(MIB), absolute=MIB),
    _one("memory_reserved_bytes", "fb_memory_usage/reserved", read=_times(MIB), absolute=2 * MIB),
    _one("memory_used_bytes", "fb_memory_usage/used", read=_times(MIB), absolute=64 * MIB),
    _one("memory_free_bytes", "fb_memory_usage/free", read=_times(MIB), absolute=64 * MIB),
    _one("bar1_size_bytes", "bar1_memory_usage/total", read=_times(MIB), absolute=MIB),
    _one("bar1_used_bytes", "bar1_memory_usage/used", read=_times(MIB), absolute=64 * MIB),
    _one("utilization_ratio", "utilization/gpu_util", read=_divided(100), absolute=0.15),
    _one("memory_utilization_ratio", "utilization/memory_util", read=_divided(100), absolute=0.15),
    _one("encoder_utilization_ratio", "utilization/encoder_util", read=_divided(100), absolute=0.05),
    _one("decoder_utilization_ratio", "utilization/decoder_util", read=_divided(100), absolute=0.05),
    _one("power_watts", _POWER + "average_power_draw", _POWER + "instant_power_draw", absolute=10, ratio=0.1),
    _one("power_limit_watts", _POWER + "current_power_limit", absolute=0.01),
    _one("power_limit_min_watts", _POWER + "min_power_limit", absolute=0.01),
    _one("power_limit_max_watts", _POWER + "max_power_limit", absolute=0.01),
    _one("power_limit_default_watts", _POWER + "default_power_limit", absolute=0.01),
    _one("temperature_celsius", _HOT + "gpu_temp", absolute=3),
    _one("memory_temperature_celsius", _HOT + "memory_temp", absolute=3),
    _one("temperature_margin_celsius", _HOT + "gpu_temp_tlimit", absolute=3),
    *(
        _one("temperature_margin_threshold_celsius", f"{_HOT}gpu_temp_{word}_tlimit_threshold", threshold=ours)
        for ours, word in _MARGINS.items()
    ),
    *(
        _one("temperature_threshold_celsius", f"{_HOT}gpu_temp_{word}_threshold", threshold=ours)
        for ours, word in _MARGINS.items()
    ),
    *(
        _one("clock_hertz", f"clocks/{word}_clock", read=_times(1e6), ratio=0.15, clock=ours)
        for ours, word in _CLOCKS.items()
    ),
    *(
        _one("clock_max_hertz", f"max_clocks/{word}_clock", read=_times(1e6), clock=ours)
        for ours, word in _CLOCKS.items()
    ),
    *(
        _one(
            "clock_event_seconds_total", f"clocks_event_reasons_counters/clocks_event_reasons_counters_{word}",
            read=_divided(1e6), absolute=0.001, reason=ours, source="driver",
        )
        for ours, word in _EVENTS.items()
    ),
    _one("performance_state", "performance_state"),
    *(
        _one("ecc_errors_total", f"{_ECC}{life}/sram_correctable", f"{_ECC}{life}/dram_correctable", total=True,
             severity="corrected", lifetime=life)
        for life in ("volatile", "aggregate")
    ),
    *(
        _one("ecc_errors_total", *(f"{_ECC}{life}/{unit}" for unit in
             ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable")), total=True,
             severity="uncorrected", lifetime=life)
        for life in ("volatile", "aggregate")
    ),
    _one("ecc_uncorrected_errors", *(f"{_ECC}volatile/{unit}" for unit in
         ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable")), total=True),
    *(
        _one("sram_ecc_errors_total", f"{_ECC}{life}/{word}", severity=ours, lifetime=life)
        for ours, word in _SRAM.items()
        for life in ("volatile", "aggregate")
    ),
    _one("sram_ecc_threshold_exceeded", _ECC + "aggregate/sram_threshold_exceeded", read=_claim),
    _one("ecc_enabled", "ecc_mode/current_ecc", read=_claim),
    _one("ecc_enabled_after_reset", "ecc_mode/pending_ecc", read=_claim),
    _one("retired_pages", "retired_pages/multiple_single_bit_retirement/retired_count", cause="single_bit"),
    _one("retired_pages", "retired_pages/double_bit_retirement/retired_count", cause="double_bit"),
    _one("retired_pages_pending", "retired_pages/pending_retirement", read=_claim),
    _one("remapped_rows", _ROWS + "remapped_row_corr", severity="corrected"),
    _one("remapped_rows", _ROWS + "remapped_row_unc", severity="uncorrected"),
    _one("row_remap_pending", _ROWS + "remapped_row_pending", read=_claim),
    _one("row_remap_failed", _ROWS + "remapped_row_failure", read=_claim),
    *(
        _one("row_remap_banks", f"{_ROWS}row_remapper_histogram/row_remapper_histogram_{word}", spare=ours)
        for ours, word in _SPARES.items()
    ),
    _one("pcie_generation", _PCI + "pcie_gen/current_link_gen"),
    _one("pcie_generation_max", _PCI + "pcie_gen/max_link_gen"),
    _one("pcie_width", _PCI + "link_widths/current_link_width"),
    _one("pcie_width_max", _PCI + "link_widths/max_link_width"),
    _one("pcie_replays_total", "pci/replay_counter", absolute=10),
    _one("mig_enabled", "mig_mode/current_mig", read=_claim),
    _one("mig_enabled_after_reset", "mig_mode/pending_mig", read=_claim),
    _one("c2c_enabled", "c2c_mode", read=_claim),
    _one("fan_speed_ratio", "fan_speed", read=_divided(100), absolute=0.05, fan="0"),
)  # fmt: skip

FACTS: Sequence[tuple[str, str, str]] = (
    ("info", "uuid", "uuid"),
    ("info", "name", "product_name"),
    ("info", "driver", "/driver_version"),
    ("info", "cuda", "/cuda_version"),
    ("info", "pci_bus_id", "pci/pci_bus_id"),
    ("info", "architecture", "product_architecture"),
    ("info", "vbios", "vbios_version"),
    ("platform_info", "chassis_serial", "platformInfo/chassis_serial_number"),
    ("platform_info", "slot", "platformInfo/slot_number"),
    ("platform_info", "tray", "platformInfo/tray_index"),
    ("platform_info", "host", "platformInfo/host_id"),
    ("platform_info", "module", "platformInfo/module_id"),
)
"""Metric pacecar_gpu_..., label, path: texts, which are compared without regard to case."""

NOT_COMPARED = {
    "pacecar_gpu_power_mean_watts": "by the energy counter, since the tick before",
    "pacecar_gpu_pcie_transmit_bytes_per_second": "nvidia-smi measures over 20 ms of its own",
    "pacecar_gpu_pcie_receive_bytes_per_second": "nvidia-smi measures over 20 ms of its own",
    "pacecar_gpu_process_memory_bytes": "by process",
    "pacecar_gpu_processes": "nvidia-smi lists graphics processes, too",
}
"""Metrics that nvidia-smi has something like, and why it is another number; all others it does not print."""
