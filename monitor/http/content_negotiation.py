"""Chooses the media type and the content coding of an answer from what the client accepts (RFC 9110, section 12.5).

A client weighs what it accepts by q-values, and q=0 means "not this".  A search for the word in the header would take
`gzip;q=0` for gzip, and a comparison of version numbers would raise for `version=1.x`.  Here every header gives an
answer: an element that is malformed, or of a version that is not supported, counts as not sent.

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
"""Schemes in which our metrics' names are written as they are.  `dots` would double their underscores."""

GZIP_LEVEL = 1
"""Level 1 makes 12 kB of 140 kB of text in 1 ms and level 9 makes 8 in 6 ms, of the training job's CPU time."""

GZIP_BITS = 31
"""zlib.h: 15 for the largest window, 16 for a gzip header."""

_WEIGHT = re.compile(r"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")
ELEMENTS_MAX = 64
"""Most elements read of one header; a browser sends five."""


class _Accepted(NamedTuple):
    name: str
    parameters: Mapping[str, str]
    weight: float


class MetricsFormat(Enum):
    """How a page of metrics is written."""

    TEXT = "text"
    OPENMETRICS = "openmetrics"
    PROTOBUF = "protobuf"


class Media(NamedTuple):
    """How a page of metrics is written, and how that is called."""

    format: MetricsFormat
    content_type: str


TEXT = Media(MetricsFormat.TEXT, "text/plain; version=0.0.4; charset=utf-8")
TEXT_1 = "text/plain; version=1.0.0; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MESSAGE = "io.prometheus.client.MetricFamily"
PROTOBUF = f"application/vnd.google.protobuf; proto={MESSAGE}; encoding=delimited"
"""What a Prometheus asks for that keeps native histograms."""


def _accepted(header: str) -> Iterator[_Accepted]:
    """Yield what the header accepts or refuses; elements with a malformed weight are left out.

    A comma in quotes splits an element too: the halves name nothing that we serve.
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
    """Return how a page of metrics is written for a client whose Accept header is `header`; text where nothing fits."""
    wanted = [one for one in _accepted(header) if one.weight > 0]
    for one in sorted(wanted, key=lambda one: (-one.weight, one.name.endswith("/*"))):  # a stable sort: then as sent
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
    """Return the coding for a client whose Accept-Encoding header is `header`; None: it accepts neither of ours.

    gzip is chosen where it is named, with a weight that is not below identity's; else identity, unless that is
    refused.
    """
    gzip, identity, others = _weights(header)
    if gzip and gzip >= (identity or 0):
        return "gzip"
    if identity != 0:
        return "identity"
    return "gzip" if gzip or (gzip is None and others) else None


def coded(body: bytes, header: str) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return `body` and its headers for a page that is compressed only where the client refuses it otherwise."""
    if choose_coding(header) != "gzip" or _weights(header)[1] != 0:
        return body, (("Vary", "Accept-Encoding"),)
    return zlib.compress(body, GZIP_LEVEL, GZIP_BITS), (("Vary", "Accept-Encoding"), ("Content-Encoding", "gzip"))


def _weights(header: str) -> tuple[float | None, float | None, float | None]:
    """Return the weights of gzip, identity and all others; None: not named, and not implied by `*`."""
    weights: dict[str, float] = {}
    for one in _accepted(header):
        weights.setdefault("gzip" if one.name == "x-gzip" else one.name, one.weight)
    others = weights.get("*")
    return weights.get("gzip"), weights.get("identity", 0.0 if others == 0 else None), others
