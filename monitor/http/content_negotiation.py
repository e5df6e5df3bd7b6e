"""Chooses the media type and the content coding of a response from what the client accepts (RFC 9110, section 12.5).

Clients weigh their choices by q-values, and q=0 means "not this".  Searching the header for a word would take
`gzip;q=0` for gzip, and comparing version numbers would raise for `version=1.x`.  Here every header leads to a choice:
a malformed element, or one of an unsupported version, counts as not sent.

Pure: a header in, a choice out.  Left out: languages and character sets; there is one of each.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Literal, NamedTuple

__all__ = ["GZIP_BITS", "GZIP_LEVEL", "Media", "MetricsFormat", "choose_coding", "choose_media", "coded"]

Coding = Literal["gzip", "identity"]

ESCAPINGS = ("underscores", "allow-utf-8")
"""Schemes that leave our metric names as they are.  `dots` would double their underscores."""

GZIP_LEVEL = 1
"""Level 1 turns 140 kB of text into 12 kB in 1 ms; level 9 into 8 kB in 6 ms, of the training job's CPU time."""

GZIP_BITS = 31
"""zlib.h: 15 for the largest window, 16 for a gzip header."""

_WEIGHT = re.compile(r"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")
ELEMENTS_MAX = 64
"""Elements read of one header; a browser sends five."""


class _Accepted(NamedTuple):
    name: str
    parameters: Mapping[str, str]
    weight: float


class MetricsFormat(Enum):
    """The format of a page of metrics."""

    TEXT = "text"
    OPENMETRICS = "openmetrics"
    PROTOBUF = "protobuf"


class Media(NamedTuple):
    """The format of a page of metrics and its Content-Type."""

    format: MetricsFormat
    content_type: str


TEXT = Media(MetricsFormat.TEXT, "text/plain; version=0.0.4; charset=utf-8")
TEXT_1 = "text/plain; version=1.0.0; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MESSAGE = "io.prometheus.client.MetricFamily"
PROTOBUF = f"application/vnd.google.protobuf; proto={MESSAGE}; encoding=delimited"
"""Requested by a Prometheus that stores native histograms."""


def _accepted(header: str) -> Iterator[_Accepted]:
    """Yield what the header accepts or refuses, except elements with a malformed weight.

    A quoted comma splits an element too: neither half names anything that we serve.
    """
    for element in header.split(",", ELEMENTS_MAX)[:ELEMENTS_MAX]:
        name, *rest = element.split(";")
        parameters: dict[str, str] = {}
        for one in rest:
            key, _, value = one.partition("=")
            parameters.setdefault(key.strip().lower(), value.strip().strip('"'))
        weight = parameters.pop("q", "1")
        if name.strip() and _WEIGHT.fullmatch(weight):
            yield _Accepted(name.strip().lower(), parameters, float(weight))


def choose_media(header: str) -> Media:
    """Return the format of a page of metrics for the Accept header `header`; text if nothing fits."""
    wanted = [one for one in _accepted(header) if one.weight > 0]
    for one in sorted(wanted, key=lambda one: (-one.weight, one.name.endswith("/*"))):  # stable: ties stay as sent
        version = one.parameters.get("version")
        escaping = one.parameters.get("escaping")
        escaping = escaping if escaping in ESCAPINGS else ESCAPINGS[0]
        if one.name == "application/vnd.google.protobuf" and _is_delimited(one.parameters):
            return Media(MetricsFormat.PROTOBUF, PROTOBUF)
        if one.name == "application/openmetrics-text" and version is None:
            return Media(MetricsFormat.OPENMETRICS, OPENMETRICS)
        if one.name == "application/openmetrics-text" and version == "1.0.0":
            return Media(MetricsFormat.OPENMETRICS, f"{OPENMETRICS}; escaping={escaping}")
        if one.name == "text/plain" and version == "1.0.0":
            return Media(MetricsFormat.TEXT, f"{TEXT_1}; escaping={escaping}")
        if one.name in ("text/*", "*/*") or (one.name == "text/plain" and version in (None, "0.0.4")):
            return TEXT
    return TEXT


def _is_delimited(parameters: Mapping[str, str]) -> bool:
    return parameters.get("proto") == MESSAGE and parameters.get("encoding") == "delimited"


def choose_coding(header: str) -> Coding | None:
    """Return the coding for the Accept-Encoding header `header`; None if it accepts neither of ours.

    gzip must be named with at least the weight of identity; otherwise identity is chosen unless it is refused.
    """
    gzip, identity, others = _weights(header)
    if gzip and gzip >= (identity or 0):
        return "gzip"
    if identity != 0:
        return "identity"
    return "gzip" if gzip or (gzip is None and others) else None


def coded(body: bytes, header: str) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return `body` and its headers, compressed only if the client refuses anything else."""
    if choose_coding(header) != "gzip" or _weights(header)[1] != 0:
        return body, (("Vary", "Accept-Encoding"),)
    return zlib.compress(body, GZIP_LEVEL, GZIP_BITS), (("Vary", "Accept-Encoding"), ("Content-Encoding", "gzip"))


def _weights(header: str) -> tuple[float | None, float | None, float | None]:
    """Return the weights of gzip, identity and all others; None if not named and not implied by `*`."""
    weights: dict[str, float] = {}
    for one in _accepted(header):
        weights.setdefault("gzip" if one.name == "x-gzip" else one.name, one.weight)
    others = weights.get("*")
    return weights.get("gzip"), weights.get("identity", 0.0 if others == 0 else None), others
