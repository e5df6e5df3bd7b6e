"""Loads the page's files once, from a fixed list, and defines the headers that restrict what a browser does with them.

The page shows text that jobs send, so it must not run that text.  The content security policy allows scripts and styles
from this daemon only and none inline, the page writes text and never markup, and no address accepts a POST.  File names
come from the list and never from the request, so no path can lead out of the folder.

uPlot (Leon Sorokin, MIT, see `page/uplot/LICENSE`) draws the charts.  It is part of the package because a cluster node
may not reach a CDN.
"""

from __future__ import annotations

import hashlib
import zlib
from importlib.resources import files
from typing import NamedTuple

from .content_negotiation import GZIP_BITS

__all__ = ["ASSETS", "PAGE_HEADERS", "Asset", "load"]

_HTML, _JS, _CSS = (f"text/{kind}; charset=utf-8" for kind in ("html", "javascript", "css"))

ASSETS = {
    "/": ("index.html", _HTML),
    "/page/page.css": ("page.css", _CSS),
    "/page/page.js": ("page.js", _JS),
    "/page/draw.js": ("draw.js", _JS),
    "/page/charts.js": ("charts.js", _JS),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/uplot/uPlot.iife.min.js": ("uplot/uPlot.iife.min.js", _JS),
    "/page/uplot/uPlot.min.css": ("uplot/uPlot.min.css", _CSS),
    "/page/uplot/LICENSE": ("uplot/LICENSE", "text/plain; charset=utf-8"),
}
"""Path -> file and type."""

PAGE_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""Headers of every response that is not for Prometheus."""

_GZIP_LEVEL = 9  # once, at the start


class Asset(NamedTuple):
    """One file as it is served."""

    kind: str
    body: bytes
    gzipped: bytes
    etag: str


def load() -> dict[str, Asset]:
    """Return path -> asset, read at the start so that a request touches no file."""
    folder = files("pacecar.monitor") / "page"
    assets: dict[str, Asset] = {}
    for path, (name, kind) in ASSETS.items():
        body = (folder / name).read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        assets[path] = Asset(kind, body, zlib.compress(body, _GZIP_LEVEL, GZIP_BITS), etag)
    return assets
