"""Keeps a few series of the last minutes in a ring buffer, so that a newly opened page has charts.

Prometheus is the store, but a single machine may have none.  So the daemon keeps what people look back for: utilization
of processors, memory, GPUs and links, and the pace of jobs.  HISTORY_TICKS times and SERIES_MAX series take 1.2 MB.

A series without a value in the whole ring is forgotten.  Series are named as Prometheus writes them, so that they can
be queried there.  Left out: everything on disk.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from pacecar.records.status_document import (
    VERSION,
    GpuStatus,
    Host,
    JobStatus,
    LinkStatus,
    StatusDocument,
    StatusHistory,
)

__all__ = [
    "GPU_CHARTED", "HISTORY_TICKS", "HOST_CHARTED", "SERIES_MAX", "Charted", "HistoryKeeper",
    "StatusFigures", "points",
]  # fmt: skip

HISTORY_TICKS = 600
"""Ten minutes of one-second ticks: as many points as a chart has pixels."""

SERIES_MAX = 256
"""Eight GPUs, eight links and dozens of jobs need about a hundred."""

NAMES_MAX = 1024
"""Formatted series names that are cached."""

DIGITS = 5
"""Significant digits kept: a chart of a thousand pixels shows three."""

HOST_CHARTED = ("cpu_utilization_ratio", "memory_used_bytes")
GPU_CHARTED = ("utilization_ratio", "power_watts", "temperature_celsius", "memory_used_bytes")
"""Fields of `Host` and `GpuStatus` that are kept."""

_ABSENT = math.nan  # inside the array only; JSON says null


@lru_cache(maxsize=NAMES_MAX)
def series_name(metric: str, **labels: str) -> str:
    """Return the series as Prometheus writes it."""
    if not labels:
        return metric
    escaped = (
        (key, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for key, value in labels.items()
    )
    return metric + "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"


class StatusFigures(NamedTuple):
    """The part of a status document that the history keeps; host and GPUs only with the figures that have charts."""

    host: Host
    gpus: tuple[GpuStatus, ...]
    links: tuple[LinkStatus, ...]
    jobs: tuple[JobStatus, ...]


Charted = StatusDocument | StatusFigures


def points(document: Charted) -> dict[str, float]:
    """Return series -> current value; without series that were not read."""
    return {name: _short(value) for name, value in _points(document) if value is not None and math.isfinite(value)}


def _points(document: Charted) -> Iterator[tuple[str, float | None]]:
    host = document.host
    for field in HOST_CHARTED:
        yield f"pacecar_host_{field}", getattr(host, field)
    for gpu in document.gpus:
        for field in GPU_CHARTED:
            yield series_name(f"pacecar_gpu_{field}", gpu=gpu.gpu), getattr(gpu, field)
    for job in document.jobs:
        labels = {"training_job": job.job} | ({"launch": job.launch} if job.launch else {})
        yield series_name("pacecar_job_pace_seconds", **labels), None if job.finished else job.pace_seconds
    for link in document.links:
        for field in ("receive_bytes_per_second", "transmit_bytes_per_second"):
            yield series_name(f"pacecar_{link.kind}_{field}", link=link.name), getattr(link, field)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


class HistoryKeeper:
    """The ring buffer of the history.  One thread adds, any thread reads."""

    def __init__(self, period_seconds: float, *, ticks: int = HISTORY_TICKS, series_max: int = SERIES_MAX) -> None:
        self._lock = threading.Lock()
        self._period_seconds = period_seconds
        self._ticks = ticks
        self._series_max = series_max
        self._times = array("d", [0.0]) * ticks
        self._series: dict[str, array[float]] = {}
        self._last_seen: dict[str, int] = {}
        self._count = 0
        self._left_out = 0

    @property
    def left_out(self) -> int:
        """How many series of the last tick did not fit."""
        return self._left_out

    def add(self, time_seconds: float, values: Mapping[str, float]) -> dict[str, float]:
        """Add one tick's values; return those that fit."""
        with self._lock:
            slot = self._count % self._ticks
            self._times[slot] = time_seconds
            for name in [name for name, seen in self._last_seen.items() if self._count - seen >= self._ticks]:
                del self._series[name], self._last_seen[name]
            for name in values:
                if name not in self._series and self._make_room(values):
                    self._series[name] = array("d", [_ABSENT]) * self._ticks
            added = {name: value for name, value in values.items() if name in self._series}
            for name, ring in self._series.items():
                ring[slot] = added.get(name, _ABSENT)
            self._last_seen.update(dict.fromkeys(added, self._count))
            self._left_out = len(values) - len(added)
            self._count += 1
            return added

    def _make_room(self, values: Mapping[str, float]) -> bool:
        """Return whether one more series fits, after dropping the one that has had no value for longest if need be.

        Otherwise jobs that come and go under new names would keep running ones out of the charts for ten minutes.
        """
        if len(self._series) < self._series_max:
            return True
        oldest = min(self._series.keys() - values.keys(), key=lambda name: self._last_seen.get(name, -1), default=None)
        if oldest is None:
            return False
        del self._series[oldest]
        self._last_seen.pop(oldest, None)
        return True

    def json(self) -> bytes:
        """Return the `StatusHistory` as JSON, oldest first."""
        with self._lock:
            kept = min(self._count, self._ticks)
            start = self._count % self._ticks if kept == self._ticks else 0
            times = _unrolled(self._times, start, kept)
            series = {name: _unrolled(ring, start, kept) for name, ring in self._series.items()}
            left_out = self._left_out
        return msgspec.json.encode(  # writes NaN as null
            StatusHistory(
                version=VERSION,
                period_seconds=self._period_seconds,
                time_seconds=times,
                series=series,  # type: ignore[arg-type]  # floats, and dict is invariant
                series_left_out=left_out,
            )
        )


def _unrolled(ring: array[float], start: int, kept: int) -> tuple[float, ...]:
    return tuple(ring[start:kept]) + tuple(ring[:start])
