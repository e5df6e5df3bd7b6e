"""Writes a page: its frame with style and content security policy, its sections, and the small pieces of them.

A page is sent by mail, kept with a paper and opened in ten years.  So style and drawings stand in it, its own content
security policy forbids it to load anything, and all figures are text and tables that a keyboard and a screen reader
reach.  A page whose tables can be sorted has the one script `sort_tables.js` inside, which the policy allows by its
hash; without scripts it shows the same.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import resources

from pacecar import __version__

__all__ = [
    "POLICY", "Section", "Tile", "definitions", "figure", "legend", "script_policy", "tiles", "unbroken", "whole_page",
]  # fmt: skip

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Nothing is fetched; style stands in the page itself."""

Section = tuple[str, str, list[str]]
"""Anchor, title, pieces of HTML."""

Tile = tuple[str, str, str]
"""What a figure is, the figure, and a word about it."""


def whole_page(title: str, top: Sequence[str], sections: Sequence[Section], *, is_sortable: bool = False) -> str:
    """Return the page: `top` is HTML above the sections.  With `is_sortable` it has the script that sorts tables."""
    style = _file("style.css")
    script = _file("sort_tables.js") if is_sortable else None
    links = "".join(f'<li><a href="#{anchor}">{escape(name)}</a></li>' for anchor, name, _ in sections)
    body = "".join(
        f'<section id="{anchor}" aria-labelledby="{anchor}-h"><h2 id="{anchor}-h">{escape(name)}</h2>'
        f"{''.join(pieces)}</section>"
        for anchor, name, pieces in sections
    )
    said = "needs no network" + ("; its script only sorts tables" if is_sortable else " and has no script")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY if script is None else script_policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#content">To the figures</a>\n'
        f'<header><h1>{escape(title)}</h1><nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
        f'<main id="content">{"".join(top)}{body}</main>\n'
        f"<footer>pacecar {escape(__version__)}. This file {said}.</footer>\n"
        + ("" if script is None else f"<script>{script}</script>\n")
        + "</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return (resources.files("pacecar.formatting.page") / name).read_text(encoding="utf-8")


def script_policy(script: str) -> str:
    """Return the policy of a page that may run this script and no other."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{POLICY}; script-src 'sha256-{digest}'"


def figure(caption: str, drawing: str) -> str:
    """Return a drawing under its caption; nothing where there is no drawing."""
    if not drawing:
        return ""
    # On a narrow screen a drawing keeps its size and scrolls, or nobody could read it.
    region = f'<div class="wide" tabindex="0" role="region" aria-label="Drawing: {escape(caption)}">{drawing}</div>'
    return f"<figure><figcaption>{escape(caption)}</figcaption>{region}</figure>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return what colours mean: the style's class of each, and its words."""
    items = "".join(f'<li><b class="{name}"></b>{escape(words)}</li>' for name, words in entries)
    return f'<ul class="legend">{items}</ul>'


def tiles(found: Sequence[Tile]) -> str:
    """Return the most important figures, each on a card."""
    inner = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{unbroken(more)}</small></dd></div>"
        for name, value, more in found
    )
    return f'<dl class="tiles">{inner}</dl>'


def unbroken(text: str) -> str:
    """Return escaped text whose lines do not end between a figure and its per cent."""
    return escape(text).replace(" %", "&nbsp;%")


def definitions(classes: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return names and what is so."""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    return f'<dl class="{classes}">{inner}</dl>'
