"""Writes a run's records to `<run folder>/rank<r>.jsonl`: one record a line, the hello first.

The queue's thread writes each line with one `write`.  A full disk leaves no partial line behind: it is truncated, the
record waits, and when the queue is full the oldest records are dropped and counted.  A folder that was removed is made
again.  Half a line, left by a node that lost its power, is ended first: the next attempt's hello would be a part of it.

Only its owner can access the file (0600).  A link, a pipe or another user's file in its place is refused, because
others may be able to write in the folder.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from pacecar.records import JobHello
from pacecar.safe_files import append_whole, appending

from .record_queue import QUEUE_LENGTH_MAX, RecordQueue, Sendable, reason_of

__all__ = ["RunLog"]

_log = logging.getLogger(__name__)


class RunLog(RecordQueue):
    """A `RecordSink` into the run folder `run_dir`, which is made if it does not exist."""

    def __init__(
        self, run_dir: str | os.PathLike[str], hello: JobHello, *, queue_length_max: int = QUEUE_LENGTH_MAX
    ) -> None:
        self.path = Path(run_dir) / f"rank{hello.rank}.jsonl"
        super().__init__(_FileCarrier(self.path, hello), queue_length_max=queue_length_max)


class _FileCarrier:
    def __init__(self, path: Path, hello: JobHello) -> None:
        self._path = path
        self._hello = hello
        self._encoder = msgspec.json.Encoder()
        self._file: int | None = None
        self._has_hello = False

    @property
    def destination(self) -> str:
        return str(self._path)

    def deliver(self, record: Sendable, timeout_seconds: float) -> None:
        if self._file is None:
            self._file = appending(self._path)
        if not self._has_hello:
            if not _ends_a_line(self._file):
                append_whole(self._file, b"\n")
            self._write(self._hello)
            self._has_hello = True
        self._write(record)

    def listen(self) -> None:
        """Do nothing: a file sends nothing."""

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            os.close(file)
        except OSError as error:  # a file server may report only now that it could not store the data
            _log.warning("pacecar may have lost the end of %s: %s", self._path, reason_of(error))

    def _write(self, record: Sendable) -> None:
        assert self._file is not None, "opened before writing"
        try:
            append_whole(self._file, self._encoder.encode(record) + b"\n")
        except OSError as error:
            self.close()  # open it again for the next record: this file was removed, or its server has forgotten it
            self._has_hello = self._has_hello and not isinstance(error, FileNotFoundError)
            raise


def _ends_a_line(handle: int) -> bool:
    """Return whether a line may follow what the file holds; True if that cannot be read."""
    try:
        with open(f"/proc/self/fd/{handle}", "rb", buffering=0) as file:
            return os.fstat(handle).st_size == 0 or (file.seek(-1, os.SEEK_END) >= 0 and file.read(1) == b"\n")
    except OSError:
        return True
