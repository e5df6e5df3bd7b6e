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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pacecar.clock import Clock
from pacecar.formatting.dates import file_stamp
from pacecar.records import JobRecord
from pacecar.records.rank_file import NOT_A_RECORD, RankFile, decode
from pacecar.safe_files import FOLDER_MODE, open_folder, replacing

from .result import DemoLosses

__all__ = ["RecordTail", "make_run_folder", "point_latest", "read_losses", "write_json"]


class RecordTail:
    """Follows one rank's record file; `refused` counts the lines that are no record."""

    def __init__(self, path: Path) -> None:
        self.refused = 0
        self._file = RankFile(path)

    def read(self) -> list[JobRecord]:
        """Return the records that were completed since the last call; none when there is no file yet."""
        records: list[JobRecord] = []
        with suppress(FileNotFoundError):
            for _, line in self._file.lines():
                try:
                    records.append(decode(line or b""))
                except NOT_A_RECORD:
                    self.refused += 1
        return records


def make_run_folder(parent: Path, clock: Clock) -> Path:
    """Make and return a new folder in `parent`, named by the UTC time and a few random digits."""
    folder = parent / f"{file_stamp(clock.wall_ns())}-{secrets.token_hex(2)}"
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
