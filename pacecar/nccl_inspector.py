"""Reads what NCCL's Inspector wrote: the bandwidth of each communicator's collectives, sends and receives.

The Inspector is a profiler plugin of NCCL 2.28.3 and later.  Each process writes `<host>-pid<pid>.log`, a line of JSON
for each completed operation.  With NCCL_INSPECTOR_PROM_DUMP (2.29.7 and later) it rewrites a file for each GPU instead,
`nccl_inspector_metrics_<uuid>.prom`, with the means since the last time, and deletes it when the job ends.

A kernel's time includes waiting for the last rank.  So the rank of a communicator with the highest bandwidth waited
least and comes closest to what the links carried; of one rank alone the figure is a lower bound.

Memory is bounded by one file's figures and ROWS_MAX.  What is left out is noted with its line.  Empty files, and a last
line without an end, are those of a job that still writes.

Source: plugins/profiler/inspector in NVIDIA/nccl, 2.28.3 (ext-profiler/inspector) to 2.30.7.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta, structs

from pacecar.formatting.plain_text import clean

__all__ = [
    "CommunicatorBandwidth",
    "InspectorFigures",
    "find_inspector_files",
    "inspector_folder",
    "read_inspector",
]

BYTES_MAX = 1 << 29
"""Of all files together, shared equally: a million operations, 12 seconds."""

FILE_BYTES_MIN, FILE_BYTES_MAX = 1 << 20, 1 << 28

LINE_BYTES_MAX = 1 << 16
"""A line has 450 bytes; with event traces of 64 channels 15 000."""

SAMPLE_BYTES_MAX = 2048
"""Of a line in a .prom file (`buffer` in inspector_prom.cc)."""

FILES_MAX = 4096
ROWS_MAX = 4096

REASONS_MAX = 4
NOTE_CHARACTERS_MAX = 120
"""Notes of one file, and their length."""

RATE_MAX = 1e6
"""GB/s; a thousand times what a GPU sends."""

TIME_MAX = 1e12
"""Microseconds: eleven days."""

TRUSTED = ("kernel_gpu", "kernel_cpu")
"""Timings of a kernel; `collective_cpu` times only the call."""

_GB = 1e9
_US = 1000
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}

_JSON_NAME = re.compile(r"-pid\d+\.log$")
_PROM_NAME = re.compile(r"^nccl_inspector_metrics_.*\.prom$")
_SAMPLE = re.compile(r"nccl_(?:p2p_)?(algorithm_bandwidth|bus_bandwidth|(?:collective_)?exec_time)_\w+\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="(.*?)"(?=,\w+="|$)')  # quotes in a communicator's name are not escaped
_SIZE = re.compile(r"(\d{1,4}(?:\.\d{1,9})?)(?:-\d+)?([KMGT]?B)$")
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")

_Text = Annotated[str, Meta(max_length=255)]
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Ranks = Annotated[int, Meta(ge=1, lt=1 << 31)]
_Rate = Annotated[float, Meta(ge=0, le=RATE_MAX)]


class _Header(msgspec.Struct, frozen=True):
    id: _Text
    rank: _Number
    n_ranks: _Ranks
    nnodes: _Number
    comm_name: _Text = ""


class _Metadata(msgspec.Struct, frozen=True):
    hostname: _Text = ""


def _prefixed(prefix: str) -> Callable[[str], str]:
    return lambda field: prefix if field == "name" else f"{prefix}_{field}"


class _Collective(msgspec.Struct, frozen=True, rename=_prefixed("coll")):
    name: _Text
    msg_size_bytes: _Number
    exec_time_us: _Number
    algobw_gbs: _Rate
    busbw_gbs: _Rate
    timing_source: str = TRUSTED[0]


class _P2p(msgspec.Struct, frozen=True, rename=_prefixed("p2p")):
    name: _Text
    msg_size_bytes: _Number
    exec_time_us: _Number
    algobw_gbs: _Rate
    busbw_gbs: _Rate
    timing_source: str = TRUSTED[0]


class _Line(msgspec.Struct, frozen=True):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None
    p2p_perf: _P2p | None = None


class _Key(NamedTuple):
    """`size` is the number of bits of the size in bytes: the sizes of a row differ by less than a factor of two."""

    communicator: str | None
    name: str | None
    operation: str
    size: int
    ranks: int
    nodes: int | None


class CommunicatorBandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of one communicator, with all messages of about one size.

    `communicator` is NCCL's hash; None in a .prom file, whose `name` several communicators may share.  `bytes` is the
    median as NCCL counts: of an all-gather and a reduce-scatter one rank's share.  Bandwidths are bytes a second by
    NCCL's own reckoning, None where NCCL has none (all-to-all).  They and `median_ns` are the medians of `highest`, the
    rank or GPU with the highest bus bandwidth; `lowest` waited longest, or has a worse link; None if only one told.
    `count` is the most of a rank, None where only means were written; `seen` is how many told.
    """

    communicator: str | None
    name: str | None
    operation: str
    bytes: int
    ranks: int
    nodes: int | None
    count: int | None
    median_ns: int | None
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    highest: str
    lowest: str | None = None
    lowest_bus_bandwidth: float | None = None
    seen: int = 1


class InspectorFigures(msgspec.Struct, frozen=True):
    """All rows, those with the most traffic first; `notes` says what was left out, `files` counts what was read."""

    rows: tuple[CommunicatorBandwidth, ...] = ()
    notes: tuple[str, ...] = ()
    files: int = 0


def inspector_folder(environ: Mapping[str, str], folder: Path) -> Path | None:
    """Return where a job with this environment and working folder writes; None if it has no Inspector."""
    where = environ.get("NCCL_INSPECTOR_DUMP_DIR")
    if where:
        return folder / where
    if environ.get("NCCL_INSPECTOR_ENABLE", "0") == "0":
        return None
    number = re.match(r"\s*\d+", environ.get("SLURM_JOBID", ""))
    return folder / f"nccl-inspector-{int(number[0]) if number else 'unknown-jobid'}"


def find_inspector_files(folders: Iterable[Path]) -> list[Path]:
    """Return the Inspector's files in `folders` and in the folders `nccl-inspector-*` in them."""
    found: dict[Path, None] = {}
    for folder in folders:
        for place in (folder, *sorted(folder.glob("nccl-inspector-*"))):
            try:
                paths = sorted(place.iterdir())
            except OSError:
                continue
            for path in paths:  # only files: opening a pipe would wait for a writer
                if (_JSON_NAME.search(path.name) or _PROM_NAME.match(path.name)) and os.path.isfile(path):
                    found[path] = None
    return list(found)


def read_inspector(files: Iterable[Path], bytes_max: int = BYTES_MAX) -> InspectorFigures:
    """Return the figures in `files`; raises nothing.  Of a larger file than its share only the end is read."""
    paths = list(files)
    told: dict[_Key, list[CommunicatorBandwidth]] = {}
    notes, read = [], 0
    if len(paths) > FILES_MAX:
        notes.append(f"{len(paths)} files of NCCL's Inspector: only the first {FILES_MAX} were read")
    share = min(FILE_BYTES_MAX, max(FILE_BYTES_MIN, bytes_max // max(1, len(paths))))
    for path in paths[:FILES_MAX]:
        file = _File(path, share)
        try:
            is_read = file.read()
        except OSError as error:
            notes.append(f"{path}: {error.strerror or error}")
            continue
        read += is_read
        notes += file.notes()
        left_out = 0
        for key, row in file.rows():
            if key in told or len(told) < ROWS_MAX:
                told.setdefault(key, []).append(row)
            else:
                left_out += 1
        if left_out:
            notes.append(f"{path}: {left_out} rows beyond {ROWS_MAX} were left out")
    rows = [_joined(members) for members in told.values()]
    rows.sort(key=lambda row: (-row.bytes * (row.count or 1), row.operation, row.communicator or row.name or ""))
    return InspectorFigures(tuple(rows), tuple(notes), read)


class _Samples:
    """What one rank told of one operation; `count` stays 0 where only means were written."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = array("q")
        self.time_ns = array("d")
        self.algorithm = array("d")
        self.bus = array("d")


class _File:
    """One file, and what its ranks or GPU told."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._samples: dict[tuple[_Key, str], _Samples] = {}
        self._dropped: Counter[str] = Counter()
        self._first: dict[str, int] = {}
        self._skipped_bytes = 0

    def read(self) -> bool:
        """Read the file; return whether it is one of the Inspector's, and not empty."""
        is_json = self._path.suffix == ".log"
        decoder = msgspec.json.Decoder(_Line)
        with self._path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            if not size or (is_json and stream.read(1) != b"{"):
                return False  # other programs name their logs so as well
            self._skipped_bytes = max(0, size - self._most_bytes)
            stream.seek(self._skipped_bytes)
            if self._skipped_bytes:
                stream.readline(LINE_BYTES_MAX)  # the rest of a line
            for number, line in _lines(stream):
                try:
                    if line is None or not (is_json or len(line) <= SAMPLE_BYTES_MAX):
                        raise ValueError("too long")
                    if is_json:
                        self._add_json(decoder.decode(line))
                    elif not line.startswith(b"#") and line.strip():
                        self._add_sample(line.decode())
                except (ValueError, RecursionError, msgspec.DecodeError) as error:
                    reason = clean(error, NOTE_CHARACTERS_MAX)
                    if reason not in self._dropped and len(self._dropped) >= REASONS_MAX:
                        reason = "other reasons"
                    self._dropped[reason] += 1
                    self._first.setdefault(reason, number)
        return True

    def notes(self) -> Iterator[str]:
        """Yield what was left out of the file, and where."""
        if self._skipped_bytes:
            yield f"{self._path}: only the last {self._most_bytes >> 20} MiB were read, from which lines are counted"
        for reason, count in self._dropped.items():
            more = f", and {count - 1} more" if count > 1 else ""
            yield f"{self._path}:{self._first[reason]}{more}: left out: {reason}"

    def rows(self) -> Iterator[tuple[_Key, CommunicatorBandwidth]]:
        """Yield what each rank, or the GPU, told of each operation."""
        for (key, who), of in self._samples.items():
            time_ns = _median(of.time_ns)
            yield (
                key,
                CommunicatorBandwidth(
                    communicator=key.communicator,
                    name=key.name,
                    operation=key.operation,
                    bytes=round(median(of.bytes)),
                    ranks=key.ranks,
                    nodes=key.nodes,
                    count=of.count or None,
                    median_ns=None if time_ns is None else round(time_ns),
                    algorithm_bandwidth=_median(of.algorithm),
                    bus_bandwidth=_median(of.bus),
                    highest=who,
                ),
            )

    def _add_json(self, line: _Line) -> None:
        header, one = line.header, line.coll_perf or line.p2p_perf
        if header.rank >= header.n_ranks:
            raise ValueError("the rank is not below the number of ranks")
        if one is None:
            raise ValueError("neither a collective nor a send or receive")
        if one.timing_source not in TRUSTED:
            raise ValueError(f"timed by {clean(one.timing_source, 32)}, not by the kernel")
        if one.exec_time_us == 0:
            raise ValueError("took no time")
        key = _key(header.id, header.comm_name, one.name, one.msg_size_bytes, header.n_ranks, header.nnodes)
        of = self._samples.setdefault((key, f"rank {header.rank} on {line.metadata.hostname}"), _Samples())
        of.count += 1
        of.bytes.append(one.msg_size_bytes)
        of.time_ns.append(one.exec_time_us * _US)
        for values, rate in ((of.algorithm, one.algobw_gbs), (of.bus, one.busbw_gbs)):
            if rate > 0:
                values.append(rate * _GB)

    def _add_sample(self, line: str) -> None:
        found = _SAMPLE.match(line)
        if found is None:
            raise ValueError("not a sample of NCCL's Inspector")
        labels = {name: value[:255] for name, value in _LABEL.findall(found[2])}
        value = float(found[3])
        size, ranks = _SIZE.match(labels.get("message_size", "")), labels.get("nranks", "")
        name = labels.get("collective") or labels.get("p2p_operation")
        nodes = labels.get("n_nodes", "")
        if size is None or not re.fullmatch(r"[1-9]\d{0,8}", ranks) or name is None:
            raise ValueError("lacks a label")
        is_time = found[1].endswith("exec_time")
        if not 0 <= value <= (TIME_MAX if is_time else RATE_MAX):  # NaN fails as well
            raise ValueError("a number that cannot be")
        number = round(float(size[1]) * _UNITS[size[2]])
        known = int(nodes) if re.fullmatch(r"\d{1,9}", nodes) else None
        key = _key(labels.get("comm_id"), labels.get("comm_name", ""), name, number, int(ranks), known)
        gpu = labels.get("gpu") or labels.get("gpu_device_id", "")
        who = f"rank {labels['rank']}" if "rank" in labels else gpu
        host = labels.get("node") or labels.get("hostname", "")
        of = self._samples.setdefault((key, f"{who} on {host}"), _Samples())
        of.bytes.append(number)
        if is_time:
            of.time_ns.append(round(value * _US))
        elif value > 0:
            (of.bus if found[1] == "bus_bandwidth" else of.algorithm).append(value * _GB)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield numbered lines, None for one that is too long; a last line without an end is still being written."""
    number, is_new = 0, True
    while raw := stream.readline(LINE_BYTES_MAX):
        number += is_new
        ends = raw.endswith(b"\n")
        if is_new and ends:
            yield number, raw
        elif is_new and len(raw) == LINE_BYTES_MAX:
            yield number, None
        is_new = ends


def _key(communicator: str | None, name: str, operation: str, size: int, ranks: int, nodes: int | None) -> _Key:
    named = None if name in ("", "unknown") else name
    words = {"All2All": "all_to_all", "AllGatherV": "all_gather"}.get(operation)
    operation = words or _CAPITAL.sub("_", operation).lower()
    return _Key(communicator, named, operation, size.bit_length(), ranks, nodes)


def _joined(members: list[CommunicatorBandwidth]) -> CommunicatorBandwidth:
    """Return one row for the rows of single members."""
    best = max(members, key=lambda one: (one.bus_bandwidth or 0.0, -(one.median_ns or 0)))
    rated = [one for one in members if one.bus_bandwidth is not None]
    lowest = min(rated, key=lambda one: one.bus_bandwidth or 0.0) if len(rated) > 1 else None
    return structs.replace(
        best,
        count=max((one.count for one in members if one.count is not None), default=None),
        lowest=None if lowest is None else lowest.highest,
        lowest_bus_bandwidth=None if lowest is None else lowest.bus_bandwidth,
        seen=len(members),
    )


def _median(values: array[float]) -> float | None:
    return median(values) if values else None
