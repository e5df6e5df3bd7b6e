"""Keeps a few series of the last minutes in a ring buffer, so that a page that is opened late is not empty.

Prometheus is the store, and on one machine there may be none.  So the daemon keeps what a person looks back for: use of
processors, memory, GPUs and links, and the pace of jobs.  Everything is bounded: HISTORY_TICKS times, SERIES_MAX
series of eight bytes a time, which is 1.2 MB in all.

A series without a value in the whole ring is forgotten.  Names are as Prometheus writes a series, so that what is
seen here can be queried there.  Left out: everything on disk.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec

from pacecar.records.status_document import VERSION, GpuStatus, Host, JobStatus, LinkStatus, StatusHistory

__all__ = ["HISTORY_TICKS", "SERIES_MAX", "Charted", "HistoryKeeper", "points"]

HISTORY_TICKS = 600
"""Ten minutes of ticks of a second: as much as fits on a screen a point a pixel."""

SERIES_MAX = 256
"""Eight GPUs, as many links and dozens of jobs take about a hundred."""

NAMES_MAX = 1024
"""Names of series that are remembered as they were written."""

DIGITS = 5
"""Significant digits kept: a chart of a thousand pixels shows three."""

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


class Charted(Protocol):
    """What is kept: a status document, or its figures."""

    @property
    def host(self) -> Host:
        """The host."""
        ...

    @property
    def gpus(self) -> Sequence[GpuStatus]:
        """The GPUs."""
        ...

    @property
    def links(self) -> Sequence[LinkStatus]:
        """The network links and RDMA ports."""
        ...

    @property
    def jobs(self) -> Sequence[JobStatus]:
        """The jobs that are shown."""
        ...


def points(document: Charted) -> dict[str, float]:
    """Return series -> value now, of what is kept; what was not read is not there."""
    return {name: _short(value) for name, value in _points(document) if value is not None and math.isfinite(value)}


def _points(document: Charted) -> Iterator[tuple[str, float | None]]:
    host = document.host
    yield "pacecar_host_cpu_utilization_ratio", host.cpu_utilization_ratio
    yield "pacecar_host_memory_used_bytes", host.memory_used_bytes
    for gpu in document.gpus:
        for field in ("utilization_ratio", "power_watts", "temperature_celsius", "memory_used_bytes"):
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
        self._last_said: dict[str, int] = {}
        self._count = 0
        self._left_out = 0

    @property
    def left_out(self) -> int:
        """How many series of the last tick had no room."""
        return self._left_out

    def add(self, time_seconds: float, values: Mapping[str, float]) -> dict[str, float]:
        """Take one tick's values; return those that had room."""
        with self._lock:
            slot = self._count % self._ticks
            self._times[slot] = time_seconds
            for name in [name for name, said in self._last_said.items() if self._count - said >= self._ticks]:
                del self._series[name], self._last_said[name]
            for name in values:
                if name not in self._series and self._has_room(values):
                    self._series[name] = array("d", [_ABSENT]) * self._ticks
            taken: dict[str, float] = {}
            for name, ring in self._series.items():
                value = values.get(name)
                ring[slot] = _ABSENT if value is None else value
                if value is not None:
                    taken[name] = value
                    self._last_said[name] = self._count
            self._left_out = len(values) - len(taken)
            self._count += 1
            return taken

    def _has_room(self, values: Mapping[str, float]) -> bool:
        """Return whether one more series fits; if need be, the one that has been without a value for longest goes.

        Jobs that come and go under fresh names must not keep those that run out of the charts for ten minutes.
        """
        if len(self._series) < self._series_max:
            return True
        over = min(self._series.keys() - values.keys(), key=lambda name: self._last_said.get(name, -1), default=None)
        if over is None:
            return False
        del self._series[over]
        self._last_said.pop(over, None)
        return True

    def json(self) -> bytes:
        """Return the `StatusHistory` as JSON, oldest first."""
        with self._lock:
            kept = min(self._count, self._ticks)
            start = self._count % self._ticks if kept == self._ticks else 0
            times = _unrolled(self._times, start, kept)
            series = {name: _unrolled(ring, start, kept) for name, ring in self._series.items()}
            left_out = self._left_out
        return msgspec.json.encode(  # which writes NaN as null
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
