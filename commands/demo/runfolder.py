"""Makes a demo's run folder, follows the record files in it, and writes JSON files there; `latest` links the newest.

    runs/20261121T001503Z-3f9a/   rank0.jsonl rank1.jsonl   the records, written by the hooks
                                  losses.jsonl job.log daemon.log   what the job and the daemon said
                                  result.json dashboard.json recordings/   what the daemon saw of the node
    runs/latest -> 20261121T001503Z-3f9a

Readers here follow files that are still being written: a last line without its newline is not there yet, and a line
that is no record is counted and left out.  What is written here appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pacecar.clock import Clock
from pacecar.records import JobRecord
from pacecar.safe_files import FOLDER_MODE, open_folder, replacing

from .result import DemoLosses

__all__ = ["RecordTail", "make_run_folder", "point_latest", "read_losses", "write_json"]

READ_BYTES_MAX = 4 * 1024 * 1024
"""Read at a time: a display that was suspended for long catches up in pieces."""

LINE_BYTES_MAX = 1024 * 1024
"""No record is nearly as long; what is longer is not a record and is not kept in memory until its end."""


class RecordTail:
    """Follows one rank's record file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refused = 0
        self._offset = 0
        self._rest = b""
        self._decoder = msgspec.json.Decoder(JobRecord)

    def read(self) -> list[JobRecord]:
        """Return the records that were completed since the last call; none when there is no file yet."""
        records: list[JobRecord] = []
        while True:
            try:
                with self.path.open("rb") as stream:
                    stream.seek(self._offset)
                    chunk = stream.read(READ_BYTES_MAX)
            except FileNotFoundError:
                return records
            self._offset += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > LINE_BYTES_MAX:
                self._rest = b""
                self.refused += 1
            for line in lines:
                self._take(line, records)
            if len(chunk) < READ_BYTES_MAX:
                return records

    def _take(self, line: bytes, records: list[JobRecord]) -> None:
        if not line.strip():
            return
        try:
            records.append(self._decoder.decode(line))
        except (msgspec.DecodeError, ValueError):
            self.refused += 1


def make_run_folder(parent: Path, clock: Clock) -> Path:
    """Make and return a new folder in `parent`, named by the UTC time and a few random digits."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(clock.wall_ns() / 1e9))
    folder = parent / f"{stamp}-{secrets.token_hex(2)}"
    os.close(open_folder(folder.parent, make_mode=FOLDER_MODE))
    folder.mkdir(mode=0o700)
    return folder


def point_latest(folder: Path) -> None:
    """Make `latest` beside `folder` a link to it.  A `latest` that is not a link is somebody's own and stays."""
    link = folder.parent / "latest"
    if link.exists() and not link.is_symlink():
        return
    fresh = folder.parent / f".latest-{secrets.token_hex(4)}"
    fresh.symlink_to(folder.name)
    fresh.replace(link)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write `document` so that a reader sees the old file or the whole new one."""
    with replacing(path) as stream:
        stream.write(json.dumps(document, indent=2).encode() + b"\n")


def read_losses(path: Path) -> DemoLosses:
    """Return the first and last losses in the training script's metrics file; all None when there are none."""
    losses: list[float] = []
    validations: list[float] = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return DemoLosses()
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue  # the last line of a job that was killed
        if "loss" in values:
            losses.append(values["loss"])
        if "validation_bits_per_byte" in values:
            validations.append(values["validation_bits_per_byte"])
    return DemoLosses(
        first=losses[0] if losses else None,
        last=losses[-1] if losses else None,
        validation_first=validations[0] if validations else None,
        validation_last=validations[-1] if validations else None,
    )
