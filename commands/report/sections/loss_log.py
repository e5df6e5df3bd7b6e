"""Reads the first and the last loss of the training script from `losses.jsonl`, as the demo's script writes it."""

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


_decoder = msgspec.json.Decoder(_Line)


def read_losses(path: Path, notices: ReportNotices) -> ReportLosses | None:
    """Return the first and last loss; None when there is none."""
    first = last = None
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(LINE_BYTES_MAX):
                number += 1
                if not line.endswith(b"\n"):
                    break  # cut off, or no such line
                try:
                    loss = _decoder.decode(line).loss
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    notices.add(path.name, "malformed", f"line {number}: {error}")
                    continue
                if loss is not None and math.isfinite(loss):
                    first, last = loss if first is None else first, loss
    except OSError as error:
        notices.add(path.name, "read", f"cannot be read: {error.strerror or error}")
    return None if first is None else ReportLosses(first=first, last=last)
