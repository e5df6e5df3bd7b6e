"""Versions compare by their numbers, whatever follows."""

from __future__ import annotations

import pytest

from pacecar.version_numbers import major_minor


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("5.23", (5, 23)), ("0.0.1", (0, 0)), ("6.8.0-45-generic", (6, 8)), ("2.13.0a0+git1", (2, 13)), ("main", None),
        ("5", None), ("v5.23", None), ("", None),
    ],
)  # fmt: skip
def test_a_version_is_its_first_two_numbers(version: str, numbers: tuple[int, int] | None) -> None:
    assert major_minor(version) == numbers


def test_a_later_minor_version_is_above_an_earlier_one() -> None:
    earlier, later = major_minor("5.9"), major_minor("5.23")
    assert earlier < later
