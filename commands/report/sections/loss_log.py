"""Reads the first and last loss of a run from `losses.jsonl`, which the demo's training script writes."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from ..document import ReportLosses
from ..reading.notices import ReportNotices

__all__ = ["read_losses"]

LINE_BYTES_MAX = 64 * 1024


class _Line(msgspec.Struct):
    loss: float | None = None
    validation_bits_per_byte: float | None = None


_decoder = msgspec.json.Decoder(_Line)


def read_losses(path: Path, notices: ReportNotices) -> ReportLosses | None:
    """Return the first and last losses; None when there are none."""
    losses: list[float] = []
    validations: list[float] = []
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(LINE_BYTES_MAX):
                number += 1
                if not line.endswith(b"\n"):
                    break  # cut off, or too long
                try:
                    read = _decoder.decode(line)
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    notices.add(path.name, "malformed", f"line {number}: {error}")
                    continue
                for found, value in ((losses, read.loss), (validations, read.validation_bits_per_byte)):
                    if value is not None and math.isfinite(value):
                        found[1:] = [value]  # keeps the first and the last
    except OSError as error:
        notices.add(path.name, "read", f"cannot be read: {error.strerror or error}")
    if not losses and not validations:
        return None
    (first, last), (validation_first, validation_last) = _ends(losses), _ends(validations)
    return ReportLosses(first=first, last=last, validation_first=validation_first, validation_last=validation_last)


def _ends(values: list[float]) -> tuple[float, float] | tuple[None, None]:
    return (values[0], values[-1]) if values else (None, None)
