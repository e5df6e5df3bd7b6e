"""Defines the result of `pacecar bench net` for programs: one document, in nanoseconds and bytes; None is not known."""

from __future__ import annotations

import msgspec

__all__ = ["OPERATIONS", "BenchPlace", "LineFit", "NetBench", "Operation", "Rated", "Row"]

FORMAT = "pacecar-bench-net-1"

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
"""What data-parallel jobs wait for."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One size.  A time is the mean over the ranks of one iteration; median and quartiles are over iterations.

    As in nccl-tests `bytes` are of the whole array, and `count` elements of one rank's part (all-reduce: the whole).
    """

    bytes: int
    count: int
    iterations: int
    time_ns: int
    low_ns: int
    high_ns: int
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float
    wrong: int


class LineFit(msgspec.Struct, frozen=True, kw_only=True):
    """time = alpha + bytes * beta, and how far the table is from it (shares of the measured time)."""

    alpha_ns: float
    beta_ns_per_byte: float
    half_bandwidth_bytes: float | None
    bus_bytes_per_second: float | None
    residual_ratio: float
    worst_residual_ratio: float
    worst_bytes: int
    method: str


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One collective; `missing` says why it was not measured, or not to the end."""

    operation: str
    bus_factor: float
    rows: tuple[Row, ...]
    fit: LineFit | None = None
    missing: str | None = None


class Rated(msgspec.Struct, frozen=True, kw_only=True):
    """What the link between the ranks is rated at, one way; None where nothing says so, and `basis` why."""

    bytes_per_second: int | None
    basis: str


class BenchPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank runs."""

    rank: int
    host: str
    pid: int
    device: str
    interface: str | None


class NetBench(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `pacecar bench net`.  `failure` is why it ended early."""

    backend: str
    ranks: int
    places: tuple[BenchPlace, ...]
    rated: Rated
    operations: tuple[Operation, ...]
    warmup: int
    iterations: int
    pacecar_version: str
    torch_version: str
    element_type: str = "float32"
    failure: str | None = None
    format: str = FORMAT
