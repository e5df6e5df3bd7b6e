"""Reads the sensors of boards and chips (hwmon): temperatures, their limits, fans and power.

Processors, network cards, NVMe disks, memory modules and boards each register a chip with one file per sensor.  Values
change slowly, and some chips sit on a 100 kHz bus, where one sensor takes milliseconds.  So sensors are read at one
tick in `READ_TICKS`, and searched for less often.  A disk that hangs blocks only this collector.

A socket with sixty cores has sixty sensors and one for the package, which shows the hottest; those of single cores are
left out.  So are voltages, and limits other than the critical one, or the maximum of a chip without one.

A chip is named by its driver and the device behind it, because `hwmon3` may be another chip after a boot.  If two
sensors share a name (a board with four fans "fan", a card with two chips of one driver), their files tell them apart.

Source: Documentation/hwmon/sysfs-interface.rst (temperatures in thousandths of a degree, power in microwatts, fans in
revolutions a minute).
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pacecar.kernel_files.reader import NOT_THERE, KernelFiles, integer
from pacecar.records import Outcome, Sample
from pacecar.records.ranges import Millicelsius, bounds_of

from ..catalog_sample import sample
from .source_reader import CachedReading, SourceReading

__all__ = ["HwmonCollector"]

CHIPS_MAX = 64
SENSORS_MAX = 128
"""Sensors of one machine that are read; a node with two sockets, eight cards and eight disks has some forty."""

READ_TICKS = 15
"""Ticks between two readings of the sensors: a board warms up over minutes."""

FIND_READINGS = 20
"""Readings between two searches for sensors: people add and remove disks and cards."""

SENSOR_HAS_NONE = NOT_THERE | {errno.ENODATA, errno.EAGAIN, errno.ENXIO, errno.EINVAL}
"""Errors by which a chip says that it has no value now: a radio that is off, a disk that sleeps, an empty bank."""

ONE_CORE = re.compile(r"Core \d+|Tccd\d+")
"""Labels of sensors inside a package that has its own sensor (coretemp, k10temp)."""

INPUTS = {
    "temp": (("input",), "pacecar_host_sensor_temperature_celsius", 1),
    "fan": (("input",), "pacecar_host_sensor_fan_rpm", 1),
    "power": (("input", "average"), "pacecar_host_sensor_power_watts", 1000),
}
"""Kind of sensor -> suffixes of its value (the first that exists is used), its metric, and the divisor to the inside
unit."""

LIMIT = "pacecar_host_sensor_temperature_limit_celsius"
LIMITS = ("crit", "max")

_, LIMIT_MAX = bounds_of(Millicelsius)
"""A chip without a limit writes its largest number (an NVMe disk 65 261 850), which is not a failure."""

_SENSOR = re.compile(r"(temp|fan|power)(\d+)_(\w+)")


class SensorFile(NamedTuple):
    """One file to read, and the series that it feeds."""

    path: Path
    metric: str
    labels: tuple[str, ...]
    divisor: int


class HwmonCollector:
    """Temperatures, their limits, fans and power of the chips that the kernel knows."""

    name = "hwmon"

    def __init__(self, files: KernelFiles) -> None:
        self._files = files
        self._root = files.sys / "class" / "hwmon"
        self._sensors: CachedReading[list[SensorFile]] = CachedReading(FIND_READINGS)
        self._samples: CachedReading[list[Sample]] = CachedReading(READ_TICKS)

    def collect(self) -> Outcome:
        """Read every sensor once, at one tick in READ_TICKS."""
        reading = SourceReading(self._files)
        reading.add_cached(self._samples, lambda: self._read(reading))
        return reading.outcome()

    def _read(self, reading: SourceReading) -> list[Sample]:
        samples = []
        for file in self._sensors.get(reading, lambda: self._find(reading)):
            value = reading.parsed(file.path, parse_sensor, has_none=SENSOR_HAS_NONE)
            if value is not None and not (file.metric == LIMIT and value > LIMIT_MAX):
                samples.append(sample(file.metric, value // file.divisor, *file.labels))
        return samples

    def _find(self, reading: SourceReading) -> list[SensorFile]:
        found: list[SensorFile] = []
        for chip in reading.first(reading.names(self._root) or [], CHIPS_MAX, "sensor chips"):
            found += self._of_chip(reading, self._root / chip)
        return list(reading.first(with_unique_labels(found), SENSORS_MAX, "sensors"))

    def _of_chip(self, reading: SourceReading, folder: Path) -> Iterator[SensorFile]:
        name = reading.parsed(folder / "name", str.strip)
        names = frozenset(reading.names(folder) or [])
        if name is None:
            return
        device = os.path.basename(os.path.realpath(folder / "device")) if "device" in names else folder.name
        for kind, number in sorted({(m[1], int(m[2])) for n in names if (m := _SENSOR.fullmatch(n))}):
            stem = f"{kind}{number}"
            has_label = f"{stem}_label" in names
            sensor = reading.parsed(folder / f"{stem}_label", str.strip) if has_label else stem
            if sensor is None or ONE_CORE.fullmatch(sensor):
                continue
            labels = (name, device, sensor)
            suffixes, metric, divisor = INPUTS[kind]
            value = next((f"{stem}_{suffix}" for suffix in suffixes if f"{stem}_{suffix}" in names), None)
            if value is not None:
                yield SensorFile(folder / value, metric, labels, divisor)
            limit = next((f"{stem}_{suffix}" for suffix in LIMITS if f"{stem}_{suffix}" in names), None)
            if kind == "temp" and limit is not None:
                yield SensorFile(folder / limit, LIMIT, labels, divisor)


def parse_sensor(line: str) -> int:
    """Return the number of a sensor, which may be negative; raises ValueError."""
    return integer(line.strip())


def with_unique_labels(sensors: Sequence[SensorFile]) -> list[SensorFile]:
    """Return `sensors`; those that share their labels get their file in the name: `fan (hwmon2/fan1)`."""
    shared = Counter((sensor.metric, sensor.labels) for sensor in sensors)
    named = []
    for sensor in sensors:
        if shared[sensor.metric, sensor.labels] > 1:
            stem, _, _ = sensor.path.name.partition("_")
            *chip, name = sensor.labels
            sensor = sensor._replace(labels=(*chip, f"{name} ({sensor.path.parent.name}/{stem})"))
        named.append(sensor)
    return named
