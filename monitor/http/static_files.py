"""Loads the page's files once, from a fixed list, and defines the headers that say how a browser may use them.

A page that shows what jobs say of themselves must not run what they say.  The content security policy allows scripts
and styles from this daemon only, none inline; the page writes text, never markup; there is nothing to post to.  Names
come from the list and never from the request, so that no path can lead out of the folder.

uPlot (Leon Sorokin, MIT, see `page/uplot/LICENSE`) draws the charts and is part of the package: a node in a cluster
reaches no CDN.
"""

from __future__ import annotations

import hashlib
import zlib
from importlib.resources import files
from typing import NamedTuple

__all__ = ["ASSETS", "PAGE_HEADERS", "Asset", "load"]

_JS, _CSS = "text/javascript; charset=utf-8", "text/css; charset=utf-8"

ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
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
"""Headers of every answer that is not for Prometheus."""

_GZIP_BITS = 31  # zlib.h: 15 for the largest window, 16 for a gzip header
_GZIP_LEVEL = 9  # once, at the start


class Asset(NamedTuple):
    """One file as it is served."""

    kind: str
    body: bytes
    gzipped: bytes
    etag: str


def load() -> dict[str, Asset]:
    """Return path -> asset; read once at the start, so that a request touches no file."""
    folder = files("pacecar.monitor") / "page"
    assets: dict[str, Asset] = {}
    for path, (name, kind) in ASSETS.items():
        body = (folder / name).read_bytes()
        assets[path] = Asset(
            kind,
            body,
            zlib.compress(body, _GZIP_LEVEL, _GZIP_BITS),
            f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        )
    return assets
