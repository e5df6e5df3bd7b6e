"""Defines the JSON results of `pacecar bench net`, in nanoseconds and bytes; None is unknown."""

from __future__ import annotations

import msgspec

__all__ = [
    "OPERATIONS",
    "AlgorithmsBench",
    "BenchPlace",
    "LineFit",
    "MeasuredOperation",
    "NetBench",
    "Rated",
    "Row",
    "SettingBench",
    "Winner",
]

FORMAT = "pacecar-bench-net-1"
ALGORITHMS_FORMAT = "pacecar-bench-net-algorithms-1"

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
"""The operations that data-parallel jobs wait for."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One size.  The time of an iteration is the mean over ranks; median and quartiles are over iterations.

    As in nccl-tests, `bytes` is the size of the whole array, and `count` the elements of one rank's part (all-reduce:
    of the whole array).
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
    """time = alpha + bytes * beta, with residuals as shares of the measured time."""

    alpha_ns: float
    beta_ns_per_byte: float
    half_bandwidth_bytes: float | None
    bus_bytes_per_second: float | None
    residual_ratio: float
    worst_residual_ratio: float
    worst_bytes: int
    method: str


class MeasuredOperation(msgspec.Struct, frozen=True, kw_only=True):
    """One collective; `missing` is the reason if it was not measured."""

    operation: str
    bus_factor: float
    rows: tuple[Row, ...]
    fit: LineFit | None = None
    missing: str | None = None


class Rated(msgspec.Struct, frozen=True, kw_only=True):
    """The rated speed of the link between the ranks, one way, and its source; None if unknown, and why."""

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
    """The result of `pacecar bench net`; `failure` is the reason if it ended early."""

    backend: str
    ranks: int
    places: tuple[BenchPlace, ...]
    rated: Rated
    operations: tuple[MeasuredOperation, ...]
    warmup: int
    iterations: int
    pacecar_version: str
    torch_version: str
    element_type: str = "float32"
    failure: str | None = None
    format: str = FORMAT


class SettingBench(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of NCCL, with the environment that makes it; `failure` is the reason if nothing was measured."""

    setting: str
    environment: dict[str, str]
    bench: NetBench | None
    failure: str | None = None


class Winner(msgspec.Struct, frozen=True, kw_only=True):
    """The setting that beats NCCL's own choice at one size; the gains are shares of the time, from the quartiles."""

    operation: str
    bytes: int
    setting: str
    time_ns: int
    default_ns: int
    gain_ratio: float
    gain_low: float
    gain_high: float


class AlgorithmsBench(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `pacecar bench net --algorithms`: NCCL's own choice first and last, each setting in between."""

    settings: tuple[SettingBench, ...]
    winners: tuple[Winner, ...]
    format: str = ALGORITHMS_FORMAT
