"""Defines the range of every field that crosses the socket or stands in a run folder, as types that decoders check.

A number that is well formed can still be impossible: a peak of zero, a negative count, NaN, an infinite
gain.  One check for each record, written by hand, is forgotten with the next field.  So the range is part of the
field's type, and msgspec checks it while it decodes: NaN and infinities fail a lower and an upper bound, and both are
always given.  A test walks all records and fails on a field without a range.

msgspec does not check whoever builds a record.  `pacecar.profiler.transport.field_filter` does that on the job's side,
off the step path.

Integers that are counted are bounded so that a float64, which is what Prometheus and JavaScript hold, is exact; times,
bytes and FLOPs by a signed 64-bit integer.  No sum, product or quotient that the daemon forms of two such values
overflows a float.
"""

from __future__ import annotations

from typing import Annotated, Union

from msgspec import Meta

__all__ = [
    "COUNT_MAX", "ENTRIES_MAX", "INT64_MAX", "LABEL_CHARACTERS_MAX", "TEXTS_MAX", "TEXT_CHARACTERS_MAX", "Arguments",
    "Bytes", "Count", "Domains", "EValue", "Flops", "Gain", "KnobInteger", "KnobIntegers", "KnobValue", "KnobValues",
    "Label", "Nanoseconds", "Pid", "PositiveCount", "PositiveFlops", "Rank", "Ranks", "Rate", "Ratio",
    "SignedNanoseconds", "Text", "Texts", "Uid", "WorldSize",
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
