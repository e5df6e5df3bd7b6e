"""Computes the figures of bench_attribution: medians, ratios, aims, and whether results agree.  Pure.

Ratios are between neighbouring runs rather than between overall medians, because drift of the machine affects
neighbours alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS, INSIDE, DECODING, HTA, TRACELENS = "pacecar analyze", "pacecar, in process", "mere decoding", "HTA", "TraceLens"
SMALL = "small"
"""The trace of a few events: what it costs is what starting costs."""

CPU_AIM, MEMORY_AIM, DECODING_AIM, LIVE_AIM_US = 15.0, 4.0, 1.3, 4.0
RELATIVE_TOLERANCE = 0.001
TOLERANCE_US = 1.0
"""0.1 % or a microsecond: peers round times to whole microseconds, or add floats."""

PERCENT_TOLERANCE = 0.01
"""HTA prints two decimals."""

Run = dict[str, Any]
"""One ended process: cpu_s, wall_s, peak_bytes, and what its line of JSON said."""


@dataclass
class Contestant:
    """How one is started on a file, and its runs by file."""

    name: str
    command: Sequence[str]
    runs: dict[str, list[Run]] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A median of rounds with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int, unit: float = 1.0) -> str:
        median, low, high = (f"{value / unit:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} ({low} to {high})"


@dataclass(frozen=True)
class Verdict:
    """One aim: `is_least` when the figure must be at least that, else at most.  Without an aim it only informs."""

    what: str
    figure: Figure
    aim: float | None = None
    is_least: bool = True

    @property
    def is_met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.figure.median >= self.aim if self.is_least else self.figure.median <= self.aim

    def text(self) -> str:
        line = f"  {self.what:<66}{self.figure.text(2):>24}"
        if self.aim is None:
            return line
        return (
            f"{line}   {'at least' if self.is_least else 'at most'} {self.aim:g}: {'met' if self.is_met else 'NOT met'}"
        )


def took_part(contestant: Contestant, file: str) -> bool:
    """Return whether there are figures of it: a peer may fail on a file."""
    return file in contestant.runs and SMALL in contestant.runs


def costs(contestant: Contestant, file: str) -> dict[str, Figure]:
    """Return what one file cost one contestant; `trace_...` leave out what starting costs."""
    runs = _without_start(contestant, file)
    keys = ("cpu_s", "trace_cpu_s", "wall_s", "peak_bytes", "trace_bytes")
    parts = ("work_s", "read_s", "analyze_s", "decompress_s", "decode_s")
    found = {key: Figure.of([run[key] for run in runs]) for key in keys + parts if all(key in run for run in runs)}
    for key, started in (("cpu_s", "start_cpu_s"), ("peak_bytes", "start_bytes")):
        found[started] = Figure.of([run[key] for run in contestant.runs[SMALL]])
    return found


def _without_start(contestant: Contestant, file: str) -> list[Run]:
    """Return the runs on `file`, each with what it took beyond a median start."""
    cpu_s = statistics.median(run["cpu_s"] for run in contestant.runs[SMALL])
    size = statistics.median(run["peak_bytes"] for run in contestant.runs[SMALL])
    return [
        run | {"trace_cpu_s": max(run["cpu_s"] - cpu_s, 1e-6), "trace_bytes": max(run["peak_bytes"] - size, 1)}
        for run in contestant.runs[file]
    ]


def ratio(over: Contestant, under: Contestant, file: str, key: str) -> Figure:
    """Return how many times more `over` takes, from the pairs of runs that stood beside each other."""
    pairs = zip(_without_start(over, file), _without_start(under, file), strict=True)
    return Figure.of([a[key] / b[key] for a, b in pairs])


def verdicts(field_: Mapping[str, Contestant], file: str, *, is_judged: bool) -> list[Verdict]:
    """Return the ratios of one file; the aims against HTA hold where `is_judged`."""

    def has(name: str) -> bool:
        return name in field_ and took_part(field_[name], file)

    found = []
    for peer in (HTA, TRACELENS):
        if not has(peer):
            continue
        aims = (CPU_AIM, MEMORY_AIM) if peer == HTA and is_judged else (None, None)
        for what, key, aim in (
            ("CPU of {} over ours, whole processes", "cpu_s", aims[0]),
            ("CPU of {} over ours, for the trace (starting left out)", "trace_cpu_s", aims[0]),
            ("peak memory of {} over ours, whole processes", "peak_bytes", aims[1]),
            ("peak memory of {} over ours, for the trace (starting left out)", "trace_bytes", aims[1]),
        ):
            found.append(Verdict(what.format(peer), ratio(field_[peer], field_[OURS], file, key), aim))
    inside, limit = field_[INSIDE], field_[DECODING]
    if has(DECODING):
        over = ratio(inside, limit, file, "work_s")
        found.append(Verdict("CPU of reading and analyzing over mere decoding, in process", over, DECODING_AIM, False))
        over = ratio(field_[OURS], limit, file, "cpu_s")
        found.append(Verdict("CPU of ours over mere decoding, whole processes", over))
    return found


def compared(peer: str, ours: Run, theirs: Run, reason: str | None = None) -> list[str]:
    """Return lines that say whether both computed the same, on what, and if not, by how much and why."""
    said, wrong, largest = [], [], 0.0
    for name in ("span_us", "compute_us", "communication_us", "exposed_us", "idle_us", "overlap_percent"):
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            continue
        word, _, unit = name.rpartition("_")
        if unit == "us":
            bound = max(TOLERANCE_US, RELATIVE_TOLERANCE * abs(mine))
            largest = max(largest, abs(other - mine))
        else:
            bound = PERCENT_TOLERANCE
        said.append(word)
        if abs(other - mine) > bound:
            wrong.append(f"{word} {other:.3f} {unit} (ours {mine:.3f})")
    if wrong:
        return [f"{peer}: differs in {', '.join(wrong)}", f"  because {reason or 'not investigated yet'}"]
    return [f"{peer}: agrees on {', '.join(said) or 'nothing, as it has no figures'}, within {largest:.3f} us"]


def table(field_: Sequence[Contestant], file: str) -> list[str]:
    """Return the costs on one file, a column for each contestant."""
    columns = [(contestant.name, costs(contestant, file)) for contestant in field_ if took_part(contestant, file)]
    events = next(run[0]["events"] for c in field_ if "events" in (run := c.runs.get(file, [{}]))[0])
    rows = [
        ("CPU, s", "cpu_s", 3, 1.0),
        ("  of it starting, s", "start_cpu_s", 3, 1.0),
        ("  for an event, us", "trace_cpu_s", 3, events / 1e6),
        ("CPU by the process itself, s", "work_s", 3, 1.0),
        ("  reading, s", "read_s", 3, 1.0),
        ("  analyzing, s", "analyze_s", 3, 1.0),
        ("  decompressing, s", "decompress_s", 3, 1.0),
        ("  decoding, s", "decode_s", 3, 1.0),
        ("wall, s", "wall_s", 3, 1.0),
        ("peak memory, MB", "peak_bytes", 1, 1e6),
        ("  of it starting, MB", "start_bytes", 1, 1e6),
    ]
    lines = [f"{'median (lowest to highest)':<30}" + "".join(f"{name:>26}" for name, _ in columns)]
    for what, key, digits, unit in rows:
        cells = [found[key].text(digits, unit) if key in found else "" for _, found in columns]
        if any(cells):
            lines.append(f"{what:<30}" + "".join(f"{cell:>26}" for cell in cells))
    return lines
