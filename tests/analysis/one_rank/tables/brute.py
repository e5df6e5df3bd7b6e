"""The tables' figures by the simplest arithmetic there could be: one row after the other, in whole nanoseconds.

Slow, without numpy, and on the file's own JSON, so that the tables have something to agree with.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pacecar.ledger.classification import classify_device
from tests.analysis.trace.plain_reader import OLD_CATEGORIES, nanoseconds

__all__ = ["Raw", "RawRow", "charged", "innermost", "read_raw"]

ORDER = ("compute", "communication", "copy", "other")


@dataclass
class RawRow:
    name: str
    start: int
    end: int
    thread: tuple[str, str]
    args: dict[str, Any]
    work: str = ""
    order: int = 0


@dataclass
class Raw:
    device: list[RawRow] = field(default_factory=list)
    operators: list[RawRow] = field(default_factory=list)
    calls: dict[int, RawRow] = field(default_factory=dict)
    modules: list[RawRow] = field(default_factory=list)
    memory: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    annotations: list[RawRow] = field(default_factory=list)


def read_raw(path: Path) -> Raw:
    """Return the rows of a trace of torch 1.10 or later, without communication that metadata alone tells."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, parse_float=str)
    found = Raw()
    for number, event in enumerate(document["traceEvents"]):
        if event.get("ph") == "i" and event.get("name") == "[memory]":
            found.memory.append((nanoseconds(event["ts"]), event["args"]))
        if event.get("ph") != "X":
            continue
        category = OLD_CATEGORIES.get(str(event.get("cat", "")).lower(), str(event.get("cat", "")).lower())
        args = event.get("args") or {}
        start = nanoseconds(event["ts"])
        thread = (str(event.get("pid")), str(event.get("tid")))
        row = RawRow(str(event["name"]), start, start + nanoseconds(event.get("dur", 0)), thread, args, order=number)
        work = classify_device(category, row.name, "record_param_comms" if "Collective name" in args else None)
        if work is not None:
            row.work = str(work)
            found.device.append(row)
        elif category == "cpu_op" and not row.name.startswith(("enumerate(", "Optimizer.", "ProfilerStep#")):
            found.operators.append(row)
        elif category.endswith(("_runtime", "_driver")) and re.search("Launch|Memcpy|Memset", row.name):
            if "Synchronize" not in row.name and "correlation" in args:
                first = found.calls.setdefault(args["correlation"], row)
                if row.start < first.start:
                    found.calls[args["correlation"]] = row
        elif category == "python_function" and row.name.startswith("nn.Module: "):
            found.modules.append(row)
    return found


def innermost(rows: list[RawRow], thread: tuple[str, str], instant: int) -> RawRow | None:
    """Return the row opened last of those open at an instant."""
    open_rows = [row for row in rows if row.thread == thread and row.start <= instant < row.end]
    return max(open_rows, key=lambda row: (row.start, -row.end, row.order), default=None)


def around(rows: list[RawRow], thread: tuple[str, str], instant: int) -> list[RawRow]:
    """Return all rows open at an instant, the outermost first."""
    open_rows = [row for row in rows if row.thread == thread and row.start <= instant < row.end]
    return sorted(open_rows, key=lambda row: (row.start, -row.end, row.order))


def charged(rows: list[RawRow]) -> Counter[str]:
    """Return by name the time charged: each instant to the first kind of ORDER, of it to the row that began first."""
    times = sorted({time for row in rows for time in (row.start, row.end)})
    begins: dict[int, list[RawRow]] = defaultdict(list)
    for row in rows:
        begins[row.start].append(row)
    running: list[RawRow] = []
    found: Counter[str] = Counter()
    for time, following in pairwise(times):
        running = [row for row in running if row.end > time] + [row for row in begins[time] if row.end > time]
        if running:
            winner = min(running, key=lambda row: (ORDER.index(row.work), row.start, row.order))
            found[winner.name] += following - time
    return found
