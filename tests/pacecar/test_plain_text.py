"""Foreign text loses control characters, and nothing else."""

import dataclasses
import logging
import sys
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.formatting.plain_text import PlainFormatter, clean, clean_values, escaped

EVIL = "a\x1b[2Jb\nc\rd\x9b31me\u202ef\u2028g\x00h\x7fi"


class Point(NamedTuple):
    name: str
    at: int


class Inner(msgspec.Struct, frozen=True):
    text: str
    number: float = 0.5


class Outer(msgspec.Struct, frozen=True):
    inner: Inner
    many: tuple[Inner, ...]
    named: dict[str, str]
    point: Point
    none: str | None = None


@dataclasses.dataclass(frozen=True)
class Plain:
    text: str
    numbers: list[int]


@pytest.mark.slow
@given(st.text())
def test_what_is_clean_is_one_printable_line_of_the_same_length(text):
    shown = clean(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert clean(shown) == shown


@pytest.mark.parametrize("text", ["", "job-7", "Größe 3 µs → 4", "名前", "a b"])
def test_what_people_write_stays(text):
    assert clean(text) == text


def test_a_long_text_is_cut():
    assert clean("x" * 100, 10) == "x" * 9 + "…"
    assert clean("x" * 10, 10) == "x" * 10


@pytest.mark.slow
@given(st.text())
def test_what_is_escaped_is_one_printable_line_that_shows_what_was_there(text):
    shown = escaped(text)
    assert shown.isprintable()
    assert (shown == text) == (clean(text) == text)
    assert escaped("a\x1b[2J\x9b\u202e\udc80b\n") == r"a\x1b[2J\x9b\u202e\udc80b\n"


def test_every_text_of_a_document_is_cleaned_and_nothing_else_changes():
    inner = Inner(EVIL, 2.5)
    value = Outer(inner, (inner, Inner("fine")), {EVIL: EVIL}, Point(EVIL, 3))
    shown = clean_values(value)
    assert EVIL not in repr(shown)
    assert "\\x1b" not in repr(shown)
    assert (shown.inner.number, shown.point.at, shown.many[1], shown.none) == (2.5, 3, Inner("fine"), None)
    assert shown.named == {clean(EVIL): clean(EVIL)}
    assert clean_values(Plain(EVIL, [1, 0])) == Plain(clean(EVIL), [1, 0])
    assert clean_values([EVIL, 0, None, True]) == [clean(EVIL), 0, None, True]


def test_a_log_record_is_one_line_and_its_traceback_keeps_its_own():
    formatter = PlainFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "job %s", (EVIL,), None)
    assert formatter.format(record) == f"WARNING job {clean(EVIL)}"
    try:
        raise ValueError(EVIL)
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *lines = formatter.format(record).split("\n")
    assert first.startswith("WARNING job")
    assert len(lines) > 2
    assert all(line.isprintable() for line in lines)
