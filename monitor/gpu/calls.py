"""Maps each number that the driver can be asked for to the functions that return it; the table behind `Nvml.number`.

Functions change their names over the years, and the old ones go.  So a number may have several functions, the newest
first; where the driver does not have one, the next is tried.

Left out on purpose: calling them.
"""

from __future__ import annotations

from .driver import Number

__all__ = ["NUMBER_CALLS"]

Call = tuple[object, ...]

NUMBER_CALLS: dict[Number, tuple[Call, ...]] = {
    Number.POWER: (("nvmlDeviceGetPowerUsage",),),
    Number.POWER_LIMIT: (("nvmlDeviceGetEnforcedPowerLimit",),),
    Number.ENERGY: (("nvmlDeviceGetTotalEnergyConsumption",),),
    Number.TEMPERATURE: (("nvmlDeviceGetTemperature", 0), ("nvmlDeviceGetTemperatureV", 0)),
    Number.THRESHOLD_SHUTDOWN: (("nvmlDeviceGetTemperatureThreshold", 0),),
    Number.THRESHOLD_SLOWDOWN: (("nvmlDeviceGetTemperatureThreshold", 1),),
    Number.THRESHOLD_MEMORY_MAX: (("nvmlDeviceGetTemperatureThreshold", 2),),
    Number.THRESHOLD_GPU_MAX: (("nvmlDeviceGetTemperatureThreshold", 3),),
    Number.CLOCK_GRAPHICS: (("nvmlDeviceGetClockInfo", 0),),
    Number.CLOCK_SM: (("nvmlDeviceGetClockInfo", 1),),
    Number.CLOCK_MEMORY: (("nvmlDeviceGetClockInfo", 2),),
    Number.CLOCK_VIDEO: (("nvmlDeviceGetClockInfo", 3),),
    Number.CLOCK_MAX_GRAPHICS: (("nvmlDeviceGetMaxClockInfo", 0),),
    Number.CLOCK_MAX_SM: (("nvmlDeviceGetMaxClockInfo", 1),),
    Number.CLOCK_MAX_MEMORY: (("nvmlDeviceGetMaxClockInfo", 2),),
    Number.CLOCK_MAX_VIDEO: (("nvmlDeviceGetMaxClockInfo", 3),),
    Number.CLOCK_REASONS: (
        ("nvmlDeviceGetCurrentClocksEventReasons",),
        ("nvmlDeviceGetCurrentClocksThrottleReasons",),  # its name before driver 535
    ),
    Number.CLOCK_REASONS_SUPPORTED: (
        ("nvmlDeviceGetSupportedClocksEventReasons",),
        ("nvmlDeviceGetSupportedClocksThrottleReasons",),
    ),
    Number.PERFORMANCE_STATE: (("nvmlDeviceGetPerformanceState",), ("nvmlDeviceGetPowerState",)),
    Number.ENCODER: (("nvmlDeviceGetEncoderUtilization",),),
    Number.DECODER: (("nvmlDeviceGetDecoderUtilization",),),
    Number.PCIE_GENERATION: (("nvmlDeviceGetCurrPcieLinkGeneration",),),
    Number.PCIE_GENERATION_MAX: (("nvmlDeviceGetMaxPcieLinkGeneration",),),
    Number.PCIE_WIDTH: (("nvmlDeviceGetCurrPcieLinkWidth",),),
    Number.PCIE_WIDTH_MAX: (("nvmlDeviceGetMaxPcieLinkWidth",),),
    Number.MIG_MODE: (("nvmlDeviceGetMigMode",),),
    Number.ARCHITECTURE: (("nvmlDeviceGetArchitecture",),),
    Number.GPM_SUPPORT: (("nvmlGpmQueryDeviceSupport",),),
    Number.PERSISTENCE: (("nvmlDeviceGetPersistenceMode",),),
    Number.FANS: (("nvmlDeviceGetNumFans",),),
    Number.POWER_LIMIT_DEFAULT: (("nvmlDeviceGetPowerManagementDefaultLimit",),),
}
"""Number -> the calls that answer it, the newest name first: where the driver lacks one, the next is tried."""
