"""Parses a page for tests: tags and attributes, text, and whether every tag is closed and anything is loaded."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

__all__ = ["Reader", "assert_loads_nothing", "assert_reachable"]

VOID = {"meta", "br", "hr", "img", "input", "link"}

LOADING = {"src", "srcset", "poster", "data", "action", "formaction", "background", "ping", "xlink:href", "style"}

LOADERS = {"link", "img", "iframe", "object", "embed", "video", "audio", "source", "base", "use", "image", "form",
           "foreignobject", "animate", "set"}  # fmt: skip


class Reader(HTMLParser):
    """Holds the tags with their attributes and the text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], "a tag is left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)

    def policies(self) -> list[str | None]:
        """Return the content security policies of the page."""
        return [attributes["content"] for tag, attributes in self.tags if tag == "meta" and "http-equiv" in attributes]


def assert_loads_nothing(page: str) -> Reader:
    """Fail where a page asks for anything that is not in it, or has a handler of its own; return what was read."""
    reader = Reader(page)
    assert not {tag for tag, _ in reader.tags} & LOADERS
    for tag, attributes in reader.tags:
        assert not attributes.keys() & LOADING, (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        if "href" in attributes:
            assert tag == "a"
            assert str(attributes["href"]).startswith("#")
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert not re.search(r"@import|url\s*\(|@font-face|expression|image-set", style)
    assert not re.search(
        r"(?:https?|ftp|file|data|javascript):|//[a-z]", re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    )
    return reader


def assert_reachable(reader: Reader, *, levels_max: int = 2) -> None:
    """Fail where a drawing is not named and told, or what scrolls cannot be reached by keyboard."""
    ids = Counter(attributes["id"] for _, attributes in reader.tags if "id" in attributes)
    assert max(ids.values()) == 1
    for tag, attributes in reader.tags:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert set(str(attributes["aria-labelledby"]).split()) <= ids.keys()
        if tag == "a":
            assert str(attributes["href"])[1:] in ids
        if tag == "section":
            assert attributes["aria-labelledby"] in ids
        if tag == "div" and attributes.get("class") == "wide":
            assert (attributes["tabindex"], attributes["role"]) == ("0", "group")
            assert attributes["aria-label"]
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
    levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert set(levels[1:]) <= set(range(2, levels_max + 1))
    assert [attributes.get("lang") for tag, attributes in reader.tags if tag == "html"] == ["en"]
