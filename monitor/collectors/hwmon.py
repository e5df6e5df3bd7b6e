"""Reads the sensors of the machine's boards and chips: temperatures, their limits, fans and power (hwmon).

Processors, network cards, NVMe disks, memory modules and boards each register a chip with a file a sensor.  What it
measures changes slowly, and some chips sit on a bus of 100 kHz, where one sensor takes milliseconds.  So sensors are
read at one tick in `READ_TICKS`, on this collector's own thread, and looked for less often still.  A disk that hangs
hangs its sensor with it, and nothing else.

A socket with sixty cores has sixty sensors and one of the whole package, which shows the hottest; those of single cores
are left out.  So are voltages, and limits other than the critical one, or the highest where a chip has no critical one.

A chip is named by its driver and the device behind it, because `hwmon3` is another chip after the next start.  Where
two sensors have one name (a board with four fans "fan", a card with two chips of one driver), the files that they are
read from tell them apart.

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
from .source_reader import Seldom, SourceReading

__all__ = ["HwmonCollector"]

CHIPS_MAX = 64
SENSORS_MAX = 128
"""Sensors that are read of one machine; a node of two sockets, eight cards and eight disks has some forty."""

READ_TICKS = 15
"""Ticks between two readings of the sensors: a board warms up over minutes."""

FIND_READINGS = 20
"""Readings between two searches for sensors: disks and cards come and go by hand."""

SENSOR_HAS_NONE = NOT_THERE | {errno.ENODATA, errno.EAGAIN, errno.ENXIO, errno.EINVAL}
"""Errors by which a chip says that it has no value now: a radio that is off, a disk that sleeps, an empty bank."""

ONE_CORE = re.compile(r"Core \d+|Tccd\d+")
"""Labels of sensors inside a package that has a sensor of its own (coretemp, k10temp)."""

INPUTS = {
    "temp": (("input",), "pacecar_host_sensor_temperature_celsius", 1),
    "fan": (("input",), "pacecar_host_sensor_fan_rpm", 1),
    "power": (("input", "average"), "pacecar_host_sensor_power_watts", 1000),
}
"""Kind of sensor -> suffixes of its value, of which the first that is there counts; its metric; the divisor that makes
the inside unit of it."""

LIMIT = "pacecar_host_sensor_temperature_limit_celsius"
LIMITS = ("crit", "max")

_, LIMIT_MAX = bounds_of(Millicelsius)
"""A chip that has no limit writes the largest number that it can (an NVMe disk 65 261 850): it is no failure."""

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
        self._sensors: Seldom[list[SensorFile]] = Seldom(FIND_READINGS)
        self._samples: Seldom[list[Sample]] = Seldom(READ_TICKS)

    def collect(self) -> Outcome:
        """Read every sensor once, at one tick in READ_TICKS."""
        reading = SourceReading(self._files)
        reading.add_seldom(self._samples, lambda: self._read(reading))
        return reading.outcome()

    def close(self) -> None:
        """Nothing is held open."""

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
        return list(reading.first(told_apart(found), SENSORS_MAX, "sensors"))

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
    """Return the number of a sensor, which may be below zero; raises ValueError."""
    return integer(line.strip())


def told_apart(sensors: Sequence[SensorFile]) -> list[SensorFile]:
    """Return `sensors` with those that share their labels named by their files too: `fan (hwmon2/fan1)`."""
    shared = Counter((sensor.metric, sensor.labels) for sensor in sensors)
    named = []
    for sensor in sensors:
        if shared[sensor.metric, sensor.labels] > 1:
            stem, _, _ = sensor.path.name.partition("_")
            *chip, name = sensor.labels
            sensor = sensor._replace(labels=(*chip, f"{name} ({sensor.path.parent.name}/{stem})"))
        named.append(sensor)
    return named
