"""Makes a demo's run folder and follows the record files in it.

runs/20261121T001503Z-3f9a/   rank0.jsonl rank1.jsonl           the records, written by the hooks
                              losses.jsonl job.log daemon.log   what the job and the daemon printed
                              recordings/ metrics.txt           what the daemon measured on this machine
                              report.json dashboard.json        what the demo leaves at the end
runs/latest -> 20261121T001503Z-3f9a
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from pacecar.clock import Clock
from pacecar.formatting.dates import file_stamp
from pacecar.records import JobRecord
from pacecar.records.rank_file import NOT_A_RECORD, RankFile, decode
from pacecar.safe_files import FOLDER_MODE, open_folder

__all__ = ["RecordTail", "make_run_folder", "point_latest"]


class RecordTail:
    """Follows the record file of one rank; a line that is not a record is skipped here and counted in the report."""

    def __init__(self, path: Path) -> None:
        self._file = RankFile(path)

    def read(self) -> list[JobRecord]:
        """Return the records completed since the last call; empty while the file does not exist."""
        records: list[JobRecord] = []
        with suppress(FileNotFoundError):
            for _, line in self._file.lines():
                with suppress(*NOT_A_RECORD):
                    records.append(decode(line or b""))
        return records


def make_run_folder(parent: Path, clock: Clock) -> Path:
    """Create a folder in `parent`, named by the UTC time and a few random digits, and return it."""
    folder = parent / f"{file_stamp(clock.wall_ns())}-{secrets.token_hex(2)}"
    os.close(open_folder(folder.parent, make_mode=FOLDER_MODE))
    folder.mkdir(mode=0o700)
    return folder


def point_latest(folder: Path) -> None:
    """Point the link `latest` beside `folder` at it.  A `latest` that is not a link belongs to the user and stays."""
    link = folder.parent / "latest"
    if link.exists() and not link.is_symlink():
        return
    fresh = folder.parent / f".latest-{secrets.token_hex(4)}"
    fresh.symlink_to(folder.name)
    fresh.replace(link)
