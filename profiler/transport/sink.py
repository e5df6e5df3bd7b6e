"""Defines `RecordSink`, the interface of every destination of records: it takes a record without waiting."""

from __future__ import annotations

from typing import Protocol

from pacecar.records import JobRecord

__all__ = ["RecordSink"]


class RecordSink(Protocol):
    """Takes records on the training thread.  `put` neither blocks nor raises; what does not fit is counted."""

    @property
    def dropped(self) -> int:
        """How many records were dropped so far."""
        ...

    def put(self, record: JobRecord) -> None:
        """Queue `record` or drop it."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Deliver what is queued, for at most `timeout_seconds`, then close."""
        ...
