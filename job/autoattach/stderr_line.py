"""Writes the lines that a user of `pacecar run` sees, on rank 0's stderr, and keeps pacecar's log off the script's.

Everything else that pacecar has to say is in its records.  Its warnings would be lines among the script's own, where
logging is configured on stdout even among its results; with a run folder they go to `rank<r>.log` there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from pacecar.profiler.hook.identity.job_identity import RANK
from pacecar.safe_files import appending

__all__ = ["keep_quiet", "say", "write_line"]

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def say(what: str, environ: Mapping[str, str] = os.environ) -> None:
    """Write one line to stderr, on rank 0 only."""
    if dist.is_available() and dist.is_initialized():
        rank = str(dist.get_rank())
    else:
        rank = next((environ[name] for name in RANK if name in environ), "0")
    if rank != "0":
        return
    write_line(what)


def write_line(what: str) -> None:
    """Write one line to stderr."""
    line = f"pacecar: {' '.join(what.split())}\n"
    # Not sys.stderr: what the script put in its place is for the script's own output.
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


class _LogFile(logging.FileHandler):
    """A log file that is made at the first line, and only where the file is or becomes this user's (`safe_files`)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)
        self._is_refused = False

    def _open(self) -> io.TextIOWrapper:
        return os.fdopen(appending(self.baseFilename), "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; where the file cannot be opened, say so once and drop all: stderr is the script's own."""
        if self._is_refused:
            return
        try:
            super().emit(record)
        except OSError as error:
            self._is_refused = True
            say(f"its log cannot be written to {self.baseFilename}: {error.strerror or error}")


def keep_quiet(rank: int, run_dir: str | None) -> None:
    """Keep pacecar's log out of the script's, in a file of the run folder if there is one."""
    logger = logging.getLogger("pacecar")
    logger.propagate = False
    handler: logging.Handler = logging.NullHandler()
    if run_dir is not None:
        with contextlib.suppress(OSError):
            handler = _LogFile(Path(run_dir) / f"rank{rank}.log")
            handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.addHandler(handler)
