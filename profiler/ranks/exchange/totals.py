"""Encodes a rank's ledger totals at the end of each range message, and decodes them.

It sends totals since attach, not the ledgers of a range: an interval of the run is the difference of two messages, and
a message that is not read loses nothing.

Pure: a step record in, words out, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pacecar.records import LEDGER_HEADINGS, Ledger, StepRecord

__all__ = ["TOTALS_WORDS", "LedgerTotals", "decode_totals", "encode_totals", "totals_of"]

TOTALS_WORDS = len(LEDGER_HEADINGS) + 6
"""Words of 64 bits: headings, two parts of them, steps, step, age, and whether they are known."""

_FIELDS = tuple(f"{heading}_ns" for heading in LEDGER_HEADINGS)

_UNKNOWN = -1
"""The word of an unknown heading; durations are not negative."""


class LedgerTotals(NamedTuple):
    """One rank's ledger of `steps` steps since attach, up to `step`; estimates rest on a window `age_steps` ago."""

    ledger: Ledger
    steps: int
    step: int
    age_steps: int


def totals_of(record: StepRecord | None) -> LedgerTotals | None:
    """Return the totals that `record` carries; None before anything calibrated them."""
    if record is None:
        return None
    age = 0 if record.source == "exact" else record.calibration_age_steps
    return None if age is None else LedgerTotals(record.totals, record.total_steps, record.step, age)


def encode_totals(totals: LedgerTotals | None) -> list[int]:
    """Return the words of `totals`."""
    if totals is None:
        return [0] * TOTALS_WORDS
    parts = totals.ledger.parts()
    headings = [parts.get(heading, _UNKNOWN) for heading in LEDGER_HEADINGS]
    ledger = totals.ledger
    beside = [ledger.overlapped_communication_ns, ledger.loop_host_ns]
    return [*headings, *beside, totals.steps, totals.step, totals.age_steps, 1]


def decode_totals(words: Sequence[int]) -> LedgerTotals | None:
    """Return the totals in `words`.

    Raises:
        ValueError: another length, or headings that are no ledger.
    """
    *headings, overlapped, loop_host, steps, step, age_steps, is_known = words
    if not is_known:
        return None
    known = [None if value == _UNKNOWN else value for value in headings]
    parts: dict[str, Any] = dict(zip(_FIELDS, known, strict=True))
    ledger = Ledger(
        wall_ns=sum(filter(None, known)),
        communication_ns=parts["exposed_communication_ns"] + overlapped,
        overlapped_communication_ns=overlapped,
        loop_host_ns=loop_host,
        **parts,
    )
    return LedgerTotals(ledger, steps, step, age_steps)
