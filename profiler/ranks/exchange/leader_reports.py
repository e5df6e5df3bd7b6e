"""Sends what the leaders of subgroups found to rank 0, on a group of the leaders' own (`side_group`).

A leader posts a report every REPORT_SECONDS; a gather is complete once all have posted, and no leader waits for one.
Reports carry totals and states, so one that is late loses nothing.  Stragglers are queued until they are sent.

    report = version, bytes, reason for leaving or none, MessagePack of at most REPORT_BYTES_MAX

`LeaderReports` belongs to one thread.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Straggler

from .ledger_sums import LedgerSums
from .phase_sums_message import VERSION, RangeMessageError
from .step_partition import RangesError
from .totals import LedgerTotals, decode_totals, encode_totals

__all__ = ["REPORT_SECONDS", "LeaderReports", "SubgroupReport"]

REPORT_SECONDS = 5.0
"""Time between two reports of a leader; what a subgroup found reaches rank 0 that much later at most."""

SILENCE_SECONDS_MAX = 600.0
"""How long a report may wait for those of other leaders: stopped processes wake up, or the job ends."""

_HEAD = 2
_WORDS = 512
REPORT_BYTES_MAX = 8 * (_WORDS - _HEAD)
"""The totals of 16 ranks take some 2 KB, the sums 0.2 KB, a straggler 0.4 KB."""

QUEUED_MAX = 64
"""Stragglers that wait to be sent; the oldest is dropped."""

RANKS_MAX = 64
TEXT_MAX = 200


class Transport(Protocol):
    """A `SideGroup` of the leaders."""

    @property
    def is_busy(self) -> bool:
        """Whether a gather is pending."""
        ...

    def post(self, words: Sequence[int]) -> None:
        """Send words to all leaders."""
        ...

    def receive(self) -> list[list[int]] | None:
        """Return the words of all leaders if the gather is complete."""
        ...

    def close(self) -> None:
        """Free the group."""
        ...


class SubgroupReport(msgspec.Struct, frozen=True, array_like=True):
    """The state of one subgroup: its ledger, its ranks' ledgers as words, and stragglers that are new or have ended.

    `leaves` is why its ranks are no longer compared.
    """

    sums: LedgerSums | None = None
    totals: Annotated[tuple[tuple[int, ...], ...], Meta(max_length=RANKS_MAX)] = ()
    stragglers: Annotated[tuple[Straggler, ...], Meta(max_length=QUEUED_MAX)] = ()
    leaves: Annotated[str, Meta(max_length=TEXT_MAX)] | None = None

    def ledgers(self) -> list[LedgerTotals | None]:
        """Return the ledger of each rank.

        Raises:
            ValueError: words that are not a ledger.
        """
        return [decode_totals(words) for words in self.totals]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SubgroupReport).decode


class LeaderReports:
    """One leader's side of the reports over `transport`; only rank 0 (`is_first`) reads those of the others."""

    def __init__(self, transport: Transport, now_ns: Callable[[], int], *, is_first: bool) -> None:
        self._transport = transport
        self._now_ns = now_ns
        self._is_first = is_first
        self._stragglers: deque[Straggler] = deque(maxlen=QUEUED_MAX)
        self._sums: LedgerSums | None = None
        self._posted_ns: int | None = None

    @property
    def is_out(self) -> bool:
        """Whether a report is under way."""
        return self._transport.is_busy

    def add(self, sums: LedgerSums, stragglers: Sequence[Straggler]) -> None:
        """Set the sums of the next report, and add `stragglers` to it."""
        self._sums = sums
        self._stragglers.extend(stragglers)

    def receive(self) -> list[SubgroupReport]:
        """Return the reports of all leaders if they are there, in order of rank; empty if not, or on other leaders.

        Raises:
            RangesError: a subgroup's ranks are no longer compared, or leaders have been silent for too long.
            RangeMessageError: a report cannot be decoded.
            RuntimeError: the gather failed.
        """
        heard = self._transport.receive() if self.is_out else None
        if heard is None:
            silent_ns = 0 if self._posted_ns is None else self._now_ns() - self._posted_ns
            if self.is_out and silent_ns > SILENCE_SECONDS_MAX * NS_PER_SECOND:
                raise RangesError(f"another subgroup's leader did not answer for {SILENCE_SECONDS_MAX:.0f} s")
            return []
        reports = [_read(words) for words in heard if self._is_first or words[1] < 0]
        left = next((report.leaves for report in reports if report.leaves is not None), None)
        if left is not None:
            raise RangesError(left)
        return reports

    def is_due(self, *, at_once: bool) -> bool:
        """Return whether to post a report now, `at_once` or in its turn."""
        if self.is_out:
            return False
        if at_once or self._posted_ns is None:
            return True
        return self._now_ns() - self._posted_ns >= REPORT_SECONDS * NS_PER_SECOND

    def post(self, totals: Sequence[LedgerTotals | None]) -> None:
        """Post a report with the ledgers of the subgroup's ranks; none may be under way."""
        words = tuple(tuple(encode_totals(each)) for each in totals)
        sent: list[Straggler] = []
        payload = _encode(SubgroupReport(self._sums, words))
        while self._stragglers:
            longer = _encode(SubgroupReport(self._sums, words, (*sent, self._stragglers[0])))
            if len(longer) > REPORT_BYTES_MAX:
                break
            payload = longer
            sent.append(self._stragglers.popleft())
        self._post(payload)

    def close(self, leaves: str | None = None) -> None:
        """Free the group, after telling the other leaders why this subgroup `leaves`."""
        if leaves is not None and not self.is_out:
            self._post(_encode(SubgroupReport(leaves=leaves[:TEXT_MAX])), leaves=True)
        self._transport.close()

    def _post(self, payload: bytes, *, leaves: bool = False) -> None:
        assert len(payload) <= REPORT_BYTES_MAX, f"a report of {len(payload)} bytes"
        body = array("q", payload.ljust(REPORT_BYTES_MAX, b"\0"))
        self._transport.post([VERSION, -len(payload) if leaves else len(payload), *body])
        self._posted_ns = self._now_ns()


def _read(words: Sequence[int]) -> SubgroupReport:
    """Return the report in `words`; their second is its length, negative if its subgroup leaves."""
    length = abs(words[1]) if len(words) == _WORDS and words[0] == VERSION else None
    if length is None or length > REPORT_BYTES_MAX:
        raise RangeMessageError(f"a leader sent {len(words)} words that are no report of version {VERSION}")
    try:
        return _decode(array("q", words[_HEAD:]).tobytes()[:length])
    except msgspec.MsgspecError as error:
        raise RangeMessageError(f"a leader's report is nonsense: {error}") from error
