"""Says in which driver versions a field number has the meaning that we read it with.

Numbers were moved: driver 575 and the first releases of 580 count clock events in fields 251 to 253, which other
versions use for power smoothing; 269 to 271 are the other way round.  A driver asked by the wrong numbering still gives
a plausible answer.  So a number is asked only of drivers whose header defines it.

Source: the constants NVML_FI_* of the 22 releases of nvidia-ml-py from 11.470.66 to 13.615.71, each made from the
header of that driver.  `since` is the first release with the name under that number, `until` the first version without
it. Between 580.65 and 580.82 there is no release, so clock events of those versions are not asked for.  Newer or
unreadable versions are treated as the newest header.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["DEFINED", "Definition", "is_defined"]

Version = tuple[int, int]

_OLDEST, _NEWEST = (0, 0), (1 << 31, 0)
_VERSION = re.compile(r"(\d{3,4})\.(\d{1,4})")


class Definition(NamedTuple):
    """The name of a number, without NVML_FI_, in drivers from `since` to before `until` (None: no end)."""

    name: str
    since: Version = _OLDEST
    until: Version | None = None


DEFINED = {
    1: Definition("DEV_ECC_CURRENT"),
    2: Definition("DEV_ECC_PENDING"),
    3: Definition("DEV_ECC_SBE_VOL_TOTAL"),
    4: Definition("DEV_ECC_DBE_VOL_TOTAL"),
    5: Definition("DEV_ECC_SBE_AGG_TOTAL"),
    6: Definition("DEV_ECC_DBE_AGG_TOTAL"),
    29: Definition("DEV_RETIRED_SBE"),
    30: Definition("DEV_RETIRED_DBE"),
    31: Definition("DEV_RETIRED_PENDING"),
    74: Definition("DEV_PERF_POLICY_POWER"),
    76: Definition("DEV_PERF_POLICY_SYNC_BOOST"),
    82: Definition("DEV_MEMORY_TEMP"),
    83: Definition("DEV_TOTAL_ENERGY_CONSUMPTION"),
    91: Definition("DEV_NVLINK_LINK_COUNT"),
    94: Definition("DEV_PCIE_REPLAY_COUNTER"),
    138: Definition("DEV_NVLINK_THROUGHPUT_DATA_TX"),
    139: Definition("DEV_NVLINK_THROUGHPUT_DATA_RX"),
    142: Definition("DEV_REMAPPED_COR"),
    143: Definition("DEV_REMAPPED_UNC"),
    144: Definition("DEV_REMAPPED_PENDING"),
    145: Definition("DEV_REMAPPED_FAILURE"),
    161: Definition("DEV_NVLINK_ERROR_DL_REPLAY", (525, 0)),
    162: Definition("DEV_NVLINK_ERROR_DL_RECOVERY", (525, 0)),
    163: Definition("DEV_NVLINK_ERROR_DL_CRC", (525, 0)),
    164: Definition("DEV_NVLINK_GET_SPEED", (525, 0)),
    165: Definition("DEV_NVLINK_GET_STATE", (525, 0)),
    170: Definition("DEV_C2C_LINK_COUNT", (535, 0)),
    171: Definition("DEV_C2C_LINK_GET_STATUS", (535, 0)),
    172: Definition("DEV_C2C_LINK_GET_MAX_BW", (535, 0)),
    193: Definition("DEV_TEMPERATURE_SHUTDOWN_TLIMIT", (525, 0)),
    194: Definition("DEV_TEMPERATURE_SLOWDOWN_TLIMIT", (525, 0)),
    195: Definition("DEV_TEMPERATURE_MEM_MAX_TLIMIT", (525, 0)),
    196: Definition("DEV_TEMPERATURE_GPU_MAX_TLIMIT", (525, 0)),
    197: Definition("DEV_PCIE_COUNT_TX_BYTES", (555, 0)),
    198: Definition("DEV_PCIE_COUNT_RX_BYTES", (555, 0)),
    201: Definition("DEV_NVLINK_COUNT_XMIT_PACKETS", (560, 0)),
    202: Definition("DEV_NVLINK_COUNT_XMIT_BYTES", (560, 0)),
    203: Definition("DEV_NVLINK_COUNT_RCV_PACKETS", (560, 0)),
    204: Definition("DEV_NVLINK_COUNT_RCV_BYTES", (560, 0)),
    206: Definition("DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS", (560, 0)),
    207: Definition("DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS", (560, 0)),
    208: Definition("DEV_NVLINK_COUNT_RCV_ERRORS", (560, 0)),
    209: Definition("DEV_NVLINK_COUNT_RCV_REMOTE_ERRORS", (560, 0)),
    210: Definition("DEV_NVLINK_COUNT_RCV_GENERAL_ERRORS", (560, 0)),
    211: Definition("DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS", (560, 0)),
    212: Definition("DEV_NVLINK_COUNT_XMIT_DISCARDS", (560, 0)),
    213: Definition("DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS", (560, 0)),
    214: Definition("DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS", (560, 0)),
    215: Definition("DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS", (560, 0)),
    219: Definition("DEV_NVLINK_COUNT_EFFECTIVE_ERRORS", (560, 0)),
    221: Definition("DEV_NVLINK_COUNT_SYMBOL_ERRORS", (560, 0)),
    231: Definition("DEV_C2C_LINK_ERROR_INTR", (575, 0)),
    232: Definition("DEV_C2C_LINK_ERROR_REPLAY", (575, 0)),
    233: Definition("DEV_C2C_LINK_ERROR_REPLAY_B2B", (575, 0)),
    251: Definition("DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN", (575, 0), (580, 66)),
    252: Definition("DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN", (575, 0), (580, 66)),
    253: Definition("DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN", (575, 0), (580, 66)),
    269: Definition("DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN", (580, 82)),
    270: Definition("DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN", (580, 82)),
    271: Definition("DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN", (580, 82)),
}
"""Number -> its meaning and drivers, for every field that is asked for."""


def is_defined(number: int, driver: str) -> bool:
    """Return whether a driver of that version ("580.65.06") gives `number` the meaning in DEFINED."""
    found = _VERSION.match(driver)
    version = _NEWEST if found is None else (int(found[1]), int(found[2]))
    defined = DEFINED[number]
    return defined.since <= version and (defined.until is None or version < defined.until)
