"""Defines ranges as types: of each field that crosses the socket or is in a run folder, and of host and GPU metrics.

A number that is well formed can still be impossible: a peak of zero, a negative count, NaN, an infinite
gain.  One check for each record, written by hand, is forgotten with the next field.  So the range is part of the
field's type, and msgspec checks it while it decodes: NaN and infinities fail a lower and an upper bound, and both are
always given.  A test walks all records and fails on a field without a range.

Decoders check the fields.  What the kernel and the driver report is checked at each tick against the same types
(`pacecar.metrics.value_ranges`); `bounds_of` gives their limits.

msgspec does not check whoever builds a record.  `pacecar.profiler.transport.field_filter` does that on the job's side,
off the step path.

Integers that are counted are bounded so that a float64, which is what Prometheus and JavaScript hold, is exact; times,
bytes and FLOPs by a signed 64-bit integer.  No sum, product or quotient that the daemon forms of two such values
overflows a float.
"""

from __future__ import annotations

from typing import Annotated, Union, get_args

from msgspec import Meta

__all__ = [
    "COUNT_MAX", "ENTRIES_MAX", "INT64_MAX", "LABEL_CHARACTERS_MAX", "TEXTS_MAX", "TEXT_CHARACTERS_MAX",
    "Arguments", "BoardMilliwatts", "Bytes", "Celsius", "ChipMilliwatts", "Count", "Cpus", "Domains", "EValue",
    "FewLanes", "FewParts", "Flag", "Flops", "Gain", "Kilohertz", "KnobInteger", "KnobIntegers", "KnobValue",
    "KnobValues", "Label", "LinkRate", "LinkShare", "Load", "MeasuredRatio", "Megahertz", "Millicelsius",
    "Nanoseconds", "NvmlCode", "PerformanceState", "Pid", "PositiveCount", "PositiveFlops", "Rank", "Ranks", "Rate",
    "Ratio", "Revolutions", "SignedNanoseconds", "Tasks", "Text", "Texts", "Uid", "WorldSize", "bounds_of",
]  # fmt: skip

INT64_MAX = 2**63 - 1

COUNT_MAX = 2**53
"""Up to here a float64 holds every integer exactly (IEEE 754)."""

LABEL_CHARACTERS_MAX = 256
"""Text that becomes a label.  Longer ones cost every scrape and the memory of every Prometheus."""

TEXT_CHARACTERS_MAX = 4096
"""Text that people read: reasons and details."""

ENTRIES_MAX = 32
"""Entries of a dict whose keys become labels: knobs, phases, dimensions.  Each is a series."""

LIST_MAX = 64 * 1024
"""Entries of a list that no series is made of: a frame has room for no more."""

TEXTS_MAX = 64
"""Sentences in one record."""

Nanoseconds = Annotated[int, Meta(ge=0, le=INT64_MAX)]
"""A duration, or an instant since 1970 or since the machine started; 292 years."""

SignedNanoseconds = Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
"""A difference of durations."""

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
PositiveCount = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
Bytes = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Flops = Annotated[int, Meta(ge=0, le=INT64_MAX)]

PositiveFlops = Annotated[int, Meta(ge=1, le=INT64_MAX)]
"""What is divided by.  Unknown is None and never zero."""

Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]
WorldSize = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Ranks = Annotated[tuple[Rank, ...], Meta(max_length=LIST_MAX)]
Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Uid = Annotated[int, Meta(ge=0, le=2**32 - 1)]

Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]

# --- what hardware and kernels can measure: wide enough for years, and without the numbers that stand for "unknown" ---

Flag = Annotated[int, Meta(ge=0, le=1)]

MeasuredRatio = Annotated[float, Meta(ge=0.0, le=2.0)]
"""A share whose two parts are not measured at the same instant, or of a rated speed: it may pass 1, as nvml.h says of
fans."""

LinkShare = Annotated[float, Meta(ge=0.0, le=32.0)]
"""A share of a link's rated speed between two readings.  Of a card that updates its counters once a second, a second's
bytes show between two glances 50 ms apart."""

LinkRate = Annotated[float, Meta(ge=0.0, le=1e13)]
"""Bytes a second of one link or of all of a GPU: 80 Tbit/s."""

Cpus = Annotated[float, Meta(ge=0.0, le=1e6)]
"""Processors, or a limit in processors' worth of time; a kernel can be built for 8192."""

Tasks = Annotated[int, Meta(ge=0, le=10_000_000)]
"""Tasks, sockets or requests that exist at once; PID_MAX_LIMIT is 4 194 304.  Counters that fell below zero show as
4 294 967 295 and the like."""

Load = Annotated[float, Meta(ge=0.0, le=1e7)]

Kilohertz = Annotated[float, Meta(ge=0.0, le=2e7)]
Megahertz = Annotated[int, Meta(ge=0, le=50_000)]
"""Up to 50 GHz: memory clocks count transfers."""

Celsius = Annotated[int, Meta(ge=-100, le=250)]
"""No chip works beyond; 255 is what a bus without an answer reads as."""

Millicelsius = Annotated[int, Meta(ge=-100_000, le=250_000)]

ChipMilliwatts = Annotated[float, Meta(ge=0.0, le=1e7)]
"""Of one GPU: 10 kW, several times what a board is built for."""

BoardMilliwatts = Annotated[float, Meta(ge=0.0, le=1e8)]
"""Of a machine or a part of it: 100 kW, which is a rack."""

Revolutions = Annotated[int, Meta(ge=0, le=200_000)]
"""Of a fan, a minute."""

FewLanes = Annotated[int, Meta(ge=0, le=64)]
"""PCIe generation and lanes, states of a link."""

FewParts = Annotated[int, Meta(ge=0, le=1_000_000)]
"""Retired pages and remapped rows of one GPU: a board has spares for some hundred."""

PerformanceState = Annotated[int, Meta(ge=0, le=15)]
"""nvml.h, nvmlPstates_t; 32 is NVML_PSTATE_UNKNOWN."""

NvmlCode = Annotated[int, Meta(ge=0, le=999)]
"""nvml.h, nvmlReturn_t; 999 is the last."""

Gain = Annotated[float, Meta(ge=-1e9, le=1.0)]
"""The fraction of step time that is saved; negative where steps take longer."""

EValue = Annotated[float, Meta(ge=0.0, le=1e308)]
"""Evidence of a sequential test."""

Rate = Annotated[float, Meta(ge=0.0, le=1e24)]
"""Something a second, in base units."""

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
"""What a request says; longer text than a knob's value, for paths."""


def bounds_of(range_type: object) -> tuple[float, float]:
    """Return the lowest and the highest number of a range above."""
    limits = get_args(range_type)[1]
    return limits.ge, limits.le
