"""Encodes a rank's ledger totals at the end of each range message, and decodes them.

It sends totals since attach, not the ledgers of a range: an interval of the run is the difference of two messages, and
a message that is not read loses nothing.

Pure: a step record in, words out, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pacecar.records import LEDGER_HEADINGS, Ledger, StepRecord

__all__ = ["TOTALS_WORDS", "LedgerTotals", "decode_totals", "encode_totals", "totals_of"]

TOTALS_WORDS = len(LEDGER_HEADINGS) + 5
"""Words of 64 bits: headings, overlapped communication, steps, step, age, and whether they are known."""


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
    headings = [parts[heading] for heading in LEDGER_HEADINGS]
    return [*headings, totals.ledger.overlapped_communication_ns, totals.steps, totals.step, totals.age_steps, 1]


def decode_totals(words: Sequence[int]) -> LedgerTotals | None:
    """Return the totals in `words`.

    Raises:
        ValueError: another length, or headings that are no ledger.
    """
    *headings, overlapped, steps, step, age_steps, is_known = words
    if not is_known:
        return None
    parts = {f"{heading}_ns": value for heading, value in zip(LEDGER_HEADINGS, headings, strict=True)}
    ledger = Ledger(
        wall_ns=sum(headings),
        communication_ns=parts["exposed_communication_ns"] + overlapped,
        overlapped_communication_ns=overlapped,
        **parts,
    )
    return LedgerTotals(ledger, steps, step, age_steps)
