"""Builds the rows of the dashboard "pacecar / Node" about the system, its clock, its limits and its sensors.

These do not slow a job until a limit is reached, and then the failure looks unrelated: a loader cannot open a file, a
connection is dropped, a rank's log is an hour off.  So the row shows shares of limits.
"""

from __future__ import annotations

from ..palette import BAD, WARN
from ..panels import Query, Section, columns, look, table, time_series
from ..queries import NODE, ON_NODES, divide

__all__ = ["sensors_section", "system_section"]

NO_NODE = "No daemon is scraped there"
NO_SENSOR = "This node has no such sensor (virtual machines have none)"
DAY_SECONDS = 86400
DAYS = "suffix: d"
"""Grafana's own time units would change to weeks and years along one axis."""

_ON = f"{{{{{NODE}}}}}"
_SENSOR = f"{_ON} {{{{device}}}} {{{{sensor}}}}"
_DASHED = {"custom__lineStyle": {"fill": "dash", "dash": [8, 8]}}

select, increase = ON_NODES.select, ON_NODES.increase


def _share(name: str) -> str:
    return divide(select(f"pacecar_host_{name}"), select(f"pacecar_host_{name}_limit"))


def system_section() -> Section:
    """Return the row about kernel, clock and limits."""
    shown = (NODE, "kernel", "architecture", "os", "version")
    return Section("System and clock", [
        (12, 7, table("Systems", "Kernel and distribution of each node; the latter is empty if the daemon runs in a "
            "container that hides the host's.", [Query(select("pacecar_host_os_info"), "", instant=True)],
            empty=NO_NODE, transformations=columns(*shown))),
        (12, 7, time_series("Uptime", "Time since the machine started. It falls to zero at a restart.",
            [Query(f"(time() - {select('pacecar_host_boot_time_seconds')}) / {DAY_SECONDS}", _ON)],
            unit=DAYS, low=0, empty=NO_NODE)),
        (8, 7, time_series("Error of the clock", "Bound of the error, and the time server's own estimate. Steps of two "
            "nodes can only be compared this precisely.", [
                Query(select("pacecar_host_clock_max_error_seconds"), f"{_ON} at most"),
                Query(select("pacecar_host_clock_estimated_error_seconds"), f"{_ON} estimated"),
            ], unit="s", low=0, empty="This kernel, or the daemon's sandbox, does not tell")),
        (8, 7, time_series("Clock", "The remaining correction of the clock, and 1 on the right while a time server "
            "keeps it.", [
                Query(select("pacecar_host_clock_offset_seconds"), f"{_ON} offset"),
                Query(select("pacecar_host_clock_synchronized"), f"{_ON} synchronized"),
            ], unit="s", empty="This kernel, or the daemon's sandbox, does not tell", overrides=[
                look(".* synchronized", regex=True, unit="none", custom__axisPlacement="right", min=0, max=1)])),
        (8, 7, time_series("Limits of the system", "Open files, threads and tracked connections as a share of their "
            "limit. At one, the next open, start or connection fails.", [
                Query(_share("open_files"), f"{_ON} open files"),
                Query(_share("threads"), f"{_ON} threads"),
                Query(_share("tracked_connections"), f"{_ON} connections"),
            ], unit="percentunit", low=0, soft_limit=1.0, empty=NO_NODE, thresholds=[(0.8, WARN), (0.95, BAD)])),
        (24, 6, time_series("Hung tasks", "Tasks that waited for two minutes without a break, in the window. The "
            "kernel's log names them.", [Query(increase("pacecar_host_hung_tasks_total"), _ON)], unit="none",
            empty="This kernel does not count them (before Linux 6.13)")),
    ], collapsed=True)  # fmt: skip


def sensors_section() -> Section:
    """Return the row about temperatures, fans and power of boards and chips other than GPUs."""
    return Section("Sensors of the machine", [
        (12, 8, time_series("Temperatures", "Processors, cards, disks and boards; GPUs have their own row.", [
                Query(select("pacecar_host_sensor_temperature_celsius"), f"{_SENSOR}"),
                Query(select("pacecar_host_sensor_temperature_limit_celsius"), f"{_SENSOR} limit"),
            ], unit="celsius", empty=NO_SENSOR, overrides=[look(".* limit", regex=True, **_DASHED)])),
        (6, 8, time_series("Fans of the machine", "Revolutions a minute, measured.",
            [Query(select("pacecar_host_sensor_fan_rpm"), _SENSOR)], unit="rotrpm", low=0, empty=NO_SENSOR)),
        (6, 8, time_series("Power by sensor", "Power of boards and chips; GPUs have their own row.",
            [Query(select("pacecar_host_sensor_power_watts"), _SENSOR)], unit="watt", low=0, empty=NO_SENSOR)),
    ], collapsed=True)  # fmt: skip
