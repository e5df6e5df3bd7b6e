"""Prints the lines that a user of `pacecar run` sees, on rank 0's stderr, and keeps pacecar's log off the script's.

Everything else that pacecar reports is in its records.  Its warnings would be lines among the script's own, even among
its results if logging goes to stdout; with a run folder they go to `rank<r>.log` there.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from pacecar.profiler.hook.identity import RANK
from pacecar.safe_files import append_whole, appending

__all__ = ["keep_quiet", "say", "write_line"]

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def say(what: str, environ: Mapping[str, str] = os.environ) -> None:
    """Print one line on stderr, on rank 0 only."""
    if dist.is_available() and dist.is_initialized():
        rank = str(dist.get_rank())
    else:
        rank = next((environ[name] for name in RANK if name in environ), "0")
    if rank != "0":
        return
    write_line(what)


def write_line(what: str) -> None:
    """Print one line on stderr."""
    line = f"pacecar: {' '.join(what.split())}\n"
    # Not sys.stderr: what the script put in its place is for the script's own output.
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


class _LogFile(logging.Handler):
    """A log file that is created with its first line, and only if it is or becomes this user's (`safe_files`).

    If it cannot be written, the script's stderr gets one line and no traceback: the warning that could not be logged,
    or that the log cannot be written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file: int | None = None
        self._has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; drop it if it cannot be written."""
        try:
            line = f"{self.format(record)}\n".encode(errors="replace")
            if self._file is None:
                self._file = appending(self._path)
            append_whole(self._file, line)
        except OSError as error:
            self._failed(record, error)
        except Exception:  # noqa: BLE001  logging would print a traceback on the script's stderr
            return

    def _failed(self, record: logging.LogRecord, error: OSError) -> None:
        self._release()
        if self._has_failed:
            return
        self._has_failed = True
        if record.levelno >= logging.WARNING and str(self._path.parent) in record.getMessage():
            say(record.getMessage().removeprefix("pacecar "))  # of the same folder, so one line says it all
        else:
            say(f"its log cannot be written to {self._path}: {error.strerror or error}")

    def close(self) -> None:
        """Close the file."""
        self._release()
        super().close()

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


def keep_quiet(rank: int, run_dir: str | None) -> None:
    """Keep pacecar's log out of the script's, in a file of the run folder if there is one."""
    logger = logging.getLogger("pacecar")
    logger.propagate = False
    handler: logging.Handler = logging.NullHandler()
    if run_dir is not None:
        handler = _LogFile(Path(run_dir) / f"rank{rank}.log")
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.addHandler(handler)
