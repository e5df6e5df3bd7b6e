"""Defines ranges as types, for every field that crosses the socket or is in a run folder, and for host and GPU metrics.

A well-formed number can be impossible: a peak of zero, a negative count, NaN, an infinite gain.  The range is part of a
field's type, so no field is forgotten: msgspec checks it while decoding, and always giving both bounds excludes NaN and
infinities.  A test fails on a field without a range.

Values from the kernel and the driver are checked at each tick against the same types (`pacecar.metrics.value_ranges`);
`bounds_of` returns their limits.  msgspec does not check a record that is built in code:
`pacecar.profiler.transport.record_queue` does that on the job's side, off the step path.

Counts are bounded so that a float64, as in Prometheus and JavaScript, is exact; times, bytes and FLOPs by a signed
64-bit integer.  No sum, product or quotient of two such values overflows a float.
"""

from __future__ import annotations

from typing import Annotated, Union, get_args

from msgspec import Meta

__all__ = [
    "COUNT_MAX", "ENTRIES_MAX", "INT64_MAX", "LABEL_CHARACTERS_MAX", "TEXTS_MAX", "TEXT_CHARACTERS_MAX",
    "Arguments", "BoardMilliwatts", "Bytes", "Celsius", "ChipMilliwatts", "Count", "Cpus", "Domains", "EValue",
    "FewLanes", "FewParts", "Flag", "Flops", "Gain", "GainError", "Kilohertz", "KnobInteger", "KnobIntegers",
    "KnobValue", "KnobValues", "Label", "LinkRate", "LinkShare", "Load", "MeasuredRatio", "Megahertz", "Millicelsius",
    "Nanoseconds", "NvmlCode", "PerformanceState", "Pid", "PositiveCount", "PositiveFlops", "Rank", "Ranks", "Rate",
    "Ratio", "Revolutions", "SignedNanoseconds", "Tasks", "Text", "Texts", "Uid", "WorldSize", "bounds_of",
]  # fmt: skip

INT64_MAX = 2**63 - 1

COUNT_MAX = 2**53
"""Up to here a float64 holds every integer exactly (IEEE 754)."""

LABEL_CHARACTERS_MAX = 256
"""Text that becomes a label.  Longer labels cost time in every scrape and memory in every Prometheus."""

TEXT_CHARACTERS_MAX = 4096
"""Text that people read: reasons and details."""

ENTRIES_MAX = 32
"""Entries of a dict whose keys become labels (knobs, phases, dimensions), each a series."""

LIST_MAX = 64 * 1024
"""Entries of a list that makes no series; a frame has no room for more."""

TEXTS_MAX = 64
"""Sentences in one record."""

Nanoseconds = Annotated[int, Meta(ge=0, le=INT64_MAX)]
"""A duration, or an instant since 1970 or since boot; up to 292 years."""

SignedNanoseconds = Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
"""A difference of durations."""

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
PositiveCount = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
Bytes = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Flops = Annotated[int, Meta(ge=0, le=INT64_MAX)]

PositiveFlops = Annotated[int, Meta(ge=1, le=INT64_MAX)]
"""A divisor.  Unknown is None and never zero."""

Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]
WorldSize = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Ranks = Annotated[tuple[Rank, ...], Meta(max_length=LIST_MAX)]
Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Uid = Annotated[int, Meta(ge=0, le=2**32 - 1)]

Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]

# --- what hardware and kernels can measure: wide enough for years, without the values that mean "unknown" -------------

Flag = Annotated[int, Meta(ge=0, le=1)]

MeasuredRatio = Annotated[float, Meta(ge=0.0, le=2.0)]
"""A share whose parts are not measured at the same instant, or a share of a rated speed: it may exceed 1, as nvml.h
says of fans."""

LinkShare = Annotated[float, Meta(ge=0.0, le=32.0)]
"""A share of a link's rated speed between two readings.  If a card updates its counters once per second, the bytes of a
second appear between two glances 50 ms apart."""

LinkRate = Annotated[float, Meta(ge=0.0, le=1e13)]
"""Bytes per second of one link, or of all links of a GPU: up to 80 Tbit/s."""

Cpus = Annotated[float, Meta(ge=0.0, le=1e6)]
"""Processors, or a CPU limit; kernels support 8192."""

Tasks = Annotated[int, Meta(ge=0, le=10_000_000)]
"""Tasks, sockets or requests that exist at once; PID_MAX_LIMIT is 4 194 304.  Excludes counters that fell below zero
and read 4 294 967 295 or so."""

Load = Annotated[float, Meta(ge=0.0, le=1e7)]

Kilohertz = Annotated[float, Meta(ge=0.0, le=2e7)]
Megahertz = Annotated[int, Meta(ge=0, le=50_000)]
"""Up to 50 GHz: memory clocks count transfers."""

Celsius = Annotated[int, Meta(ge=-100, le=250)]
"""No chip works beyond; a bus without an answer reads 255."""

Millicelsius = Annotated[int, Meta(ge=-100_000, le=250_000)]

ChipMilliwatts = Annotated[float, Meta(ge=0.0, le=1e7)]
"""Of one GPU: up to 10 kW, several times the rating of a board."""

BoardMilliwatts = Annotated[float, Meta(ge=0.0, le=1e8)]
"""Of a machine or a part of it: up to 100 kW, as of a rack."""

Revolutions = Annotated[int, Meta(ge=0, le=200_000)]
"""Of a fan, per minute."""

FewLanes = Annotated[int, Meta(ge=0, le=64)]
"""PCIe generation and lanes, states of a link."""

FewParts = Annotated[int, Meta(ge=0, le=1_000_000)]
"""Retired pages and remapped rows of one GPU; a board has spares for several hundred."""

PerformanceState = Annotated[int, Meta(ge=0, le=15)]
"""nvml.h, nvmlPstates_t; 32 is NVML_PSTATE_UNKNOWN."""

NvmlCode = Annotated[int, Meta(ge=0, le=999)]
"""nvml.h, nvmlReturn_t; 999 is the last."""

Gain = Annotated[float, Meta(ge=-1e9, le=1.0)]
"""The fraction of step time saved; negative if steps take longer."""

GainError = Annotated[float, Meta(ge=0.0, le=1e9)]
"""The standard error of a gain."""

EValue = Annotated[float, Meta(ge=0.0, le=1e308)]
"""Evidence of a sequential test."""

Rate = Annotated[float, Meta(ge=0.0, le=1e24)]
"""A rate per second, in base units."""

Label = Annotated[str, Meta(max_length=LABEL_CHARACTERS_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=TEXTS_MAX)]

KnobInteger = Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
KnobValue = Union[KnobInteger, Label]  # noqa: UP007  msgspec resolves it at run time on every Python we support
KnobIntegers = Annotated[dict[Label, KnobInteger], Meta(max_length=ENTRIES_MAX)]
KnobValues = Annotated[dict[Label, KnobValue], Meta(max_length=ENTRIES_MAX)]

Domains = Annotated[
    dict[Label, Annotated[tuple[KnobInteger, ...], Meta(max_length=LIST_MAX)]], Meta(max_length=ENTRIES_MAX)
]
"""Knob -> the values that it may take."""

Arguments = Annotated[
    dict[Label, Union[KnobInteger, Text]], Meta(max_length=ENTRIES_MAX)  # noqa: UP007  as above
]
"""Arguments of a request; text may be as long as a path."""


def bounds_of(range_type: object) -> tuple[float, float]:
    """Return the lowest and the highest number of a range above."""
    limits = get_args(range_type)[1]
    return limits.ge, limits.le
