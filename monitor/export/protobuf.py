"""Encodes metrics in Prometheus' protocol buffers, the only scrape format with native histograms.

A Prometheus that stores native histograms asks for this format first; others do not.  prometheus_client does not write
it (0.26), and protobuf's library would rebuild every message although most values did not change.  Field numbers never
change, so the few fields of metrics.proto that we need are written by hand (docs/decisions/0012).  Tests decode them
with protobuf's library, and a real Prometheus scrapes them.

    page = (length, MetricFamily)*        MetricFamily = name, help, type, Metric*
    Metric = LabelPair*, and one of       Gauge | Counter | Histogram

Everything here is pure: values in, bytes out, in base units.  Left out: exemplars, timestamps, summaries.

Source: github.com/prometheus/client_model, io/prometheus/client/metrics.proto; protobuf.dev, "Encoding".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pacecar.metrics.catalog import Metric, MetricKind

__all__ = ["before_number", "family", "histogram", "labels_of", "number"]

_VARINT, _DOUBLE, _BYTES = 0, 1, 2
_TYPES = {MetricKind.COUNTER: 0, MetricKind.GAUGE: 1, MetricKind.HISTOGRAM: 4}

_LABEL, _GAUGE, _COUNTER, _HISTOGRAM = 1, 2, 3, 7
"""Fields of Metric."""

number = struct.Struct("<d").pack
"""Returns the eight bytes of a number."""


def varint(count: int) -> bytes:
    """Return a non-negative number, seven bits a byte, lowest first."""
    out = bytearray()
    while count > 0x7F:
        out.append(count & 0x7F | 0x80)
        count >>= 7
    out.append(count)
    return bytes(out)


def zigzag(signed: int) -> int:
    """Return a signed number as a non-negative one: 0, -1, 1, -2 become 0, 1, 2, 3."""
    return 2 * signed if signed >= 0 else -2 * signed - 1


def _key(field: int, kind: int) -> bytes:
    return varint(field << 3 | kind)


def _whole(field: int, count: int) -> bytes:
    return _key(field, _VARINT) + varint(count)


def _double(field: int, value: float) -> bytes:
    return _key(field, _DOUBLE) + number(value)


def _message(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + varint(len(content)) + content


def labels_of(entry: Metric, labels: Sequence[str]) -> bytes:
    """Return the labels of one series, the beginning of its Metric."""
    pairs = zip(entry.labels, labels, strict=True)
    return b"".join(_message(_LABEL, _message(1, name.encode()) + _message(2, value.encode())) for name, value in pairs)


def before_number(entry: Metric, labels: bytes) -> bytes:
    """Return a Metric with a gauge or a counter up to its value, which `number` encodes."""
    one = _GAUGE if entry.kind is MetricKind.GAUGE else _COUNTER
    return _message(4, labels + _message(one, _double(1, 0.0)))[:-8]


def histogram(
    labels: bytes,
    *,
    count: int,
    total: float,
    below: Iterable[tuple[float, int]],
    schema: int,
    native: Sequence[tuple[int, int]],
    zeroes: int,
) -> bytes:
    """Return a Metric with a histogram, both classic and native.

    `below` are pairs (upper bound, cumulative count), `native` are pairs (index, count) by rising index.
    """
    classic = b"".join(_message(3, _whole(1, seen) + _double(2, bound)) for bound, seen in below)
    spans, deltas = _native(native)
    buckets = _whole(5, zigzag(schema)) + _double(6, 0.0) + _whole(7, zeroes)
    buckets += b"".join(_message(12, _whole(1, zigzag(offset)) + _whole(2, length)) for offset, length in spans)
    if deltas:
        buckets += _message(13, b"".join(varint(zigzag(delta)) for delta in deltas))
    return _message(4, labels + _message(_HISTOGRAM, _whole(1, count) + _double(2, total) + classic + buckets))


def _native(native: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return spans of adjacent buckets, as (gap before it, its length), and the differences between counts.

    Without buckets there is one empty span: readers tell native histograms from classic ones by it.
    """
    if not native:
        return [(0, 0)], []
    spans: list[tuple[int, int]] = []
    following: int | None = None
    for index, _ in native:
        if index == following:
            offset, length = spans[-1]
            spans[-1] = (offset, length + 1)
        else:
            spans.append((index if following is None else index - following, 1))
        following = index + 1
    counts = [0, *(count for _, count in native)]
    return spans, [after - before for before, after in pairwise(counts)]


def family(entry: Metric, metrics: bytes) -> bytes:
    """Return a family, preceded by its length; `metrics` are its Metrics as returned by the functions above."""
    head = _message(1, entry.name.encode()) + _message(2, entry.help.encode()) + _whole(3, _TYPES[entry.kind])
    return varint(len(head) + len(metrics)) + head + metrics
