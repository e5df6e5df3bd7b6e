"""How does a test read Prometheus' protocol buffers?  With protobuf's own library, and the messages as published.

The messages are those of github.com/prometheus/client_model, io/prometheus/client/metrics.proto, without what we do not
write.  They are made when they are first asked for: protobuf comes with OpenTelemetry's exporter and need not be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

__all__ = ["families"]

MESSAGES = {
    "LabelPair": "string name = 1; string value = 2",
    "Gauge": "double value = 1",
    "Counter": "double value = 1",
    "Bucket": "uint64 cumulative_count = 1; double upper_bound = 2",
    "BucketSpan": "sint32 offset = 1; uint32 length = 2",
    "Histogram": "uint64 sample_count = 1; double sample_sum = 2; repeated Bucket bucket = 3; sint32 schema = 5;"
    " double zero_threshold = 6; uint64 zero_count = 7; repeated BucketSpan positive_span = 12;"
    " repeated sint64 positive_delta = 13",
    "Metric": "repeated LabelPair label = 1; Gauge gauge = 2; Counter counter = 3; Histogram histogram = 7",
    "MetricFamily": "string name = 1; string help = 2; int32 type = 3; repeated Metric metric = 4",
}
"""As in the .proto file; an enumeration is a number on the wire."""


@cache
def _family() -> Any:
    pool = pytest.importorskip("google.protobuf.descriptor_pool", reason="protobuf is not installed")
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.message_factory import GetMessageClass

    file = FileDescriptorProto(name="metrics.proto", package="io.prometheus.client", syntax="proto2")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(";"):
            *words, field_name, _, number = field.split()
            kind = words[-1]
            is_message = kind in MESSAGES
            message.field.add(
                name=field_name,
                number=int(number),
                label=FieldDescriptorProto.LABEL_REPEATED if len(words) == 2 else FieldDescriptorProto.LABEL_OPTIONAL,
                type=FieldDescriptorProto.TYPE_MESSAGE
                if is_message
                else getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}"),
                type_name=f".io.prometheus.client.{kind}" if is_message else None,
            )
    made = pool.DescriptorPool()
    made.Add(file)
    return GetMessageClass(made.FindMessageTypeByName("io.prometheus.client.MetricFamily"))


def families(page: bytes) -> Iterator[Any]:
    """Yield the families of a page, each of which has its length before it; unknown fields and rests are failures."""
    from google.protobuf.internal.decoder import _DecodeVarint32
    from google.protobuf.unknown_fields import UnknownFieldSet

    at = 0
    while at < len(page):
        length, at = _DecodeVarint32(page, at)
        assert at + length <= len(page), "a message is cut short"
        family = _family().FromString(page[at : at + length])
        assert not len(UnknownFieldSet(family))
        assert not any(len(UnknownFieldSet(metric)) for metric in family.metric)
        yield family
        at += length
