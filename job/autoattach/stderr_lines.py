"""Prints the lines that a user of `pacecar run` sees, on rank 0's stderr, and keeps pacecar's log off the script's.

`OutcomeLines` prints the outcome: at the run's end, and earlier if there is nothing to tune.  It receives the records
as a user's logger does (`attach(loggers=...)`): states of the tuner, decisions and verdicts, and the goodbye with its
totals.  The numbers of single steps are in the run folder.

Everything else that pacecar reports is in its records.  Its warnings would be lines among the script's own, even among
its results if logging goes to stdout; with a run folder they go to `rank<r>.log` there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.quantities import duration, percent, plural
from pacecar.knobs import setting
from pacecar.profiler.hook.identity import RANK
from pacecar.records import Decision, Goodbye, JobRecord, Ledger, TunerStatus, Verdict
from pacecar.safe_files import append_whole, appending

__all__ = ["OutcomeLines", "keep_quiet", "say", "write_line"]

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


SHARES_MAX = 3
SHARE_MIN = 0.01
"""Headings of the ledger that the line names: the largest, of a hundredth of the time or more."""

NOT_KEPT = "nothing more is kept: pacecar run --run-dir FOLDER keeps it for pacecar report"
"""For a run without a run folder, which leaves nothing but this line."""

TURNING = ("warming", "screening", "trial", "watching")
"""States of a tuner that may turn a knob."""


class OutcomeLines:
    """A `RecordSink` that prints the lines; `run_dir` is the folder that the last one points to."""

    dropped = 0

    def __init__(self, run_dir: str | None) -> None:
        self._run_dir = run_dir
        self._is_tuned = False
        self._decided: dict[int, Decision] = {}
        self._kept: dict[str, tuple[int | str, int | str]] = {}
        self._goodbye: Goodbye | None = None

    def put(self, record: JobRecord) -> None:
        """Take what the lines need from a record; most contain nothing."""
        if isinstance(record, Decision):
            self._decided[record.decision] = record
        elif isinstance(record, Verdict):
            decision = self._decided.pop(record.decision, None)
            if decision is not None and record.outcome == "kept":
                first, _ = self._kept.get(decision.knob, (decision.from_value, None))
                self._kept[decision.knob] = (first, decision.to_value)
        elif isinstance(record, TunerStatus):
            if record.state == "off" and self._is_tuned and record.rank == 0:
                write_line(f"tunes nothing: {_first_reason(record.detail)}")
            self._is_tuned = record.state != "off" and (self._is_tuned or record.state in TURNING)
        elif isinstance(record, Goodbye):
            self._goodbye = record

    def close(self, timeout_seconds: float) -> None:
        """Print the line, once."""
        goodbye, self._goodbye = self._goodbye, None
        if goodbye is None or goodbye.rank != 0:
            return
        if goodbye.totals is None or not goodbye.total_steps:
            line = "measured no step: none ended after the one in which pacecar attached"
        else:
            line = self._line(goodbye, goodbye.totals, goodbye.total_steps)
        more = NOT_KEPT if self._run_dir is None else f"more: pacecar report {shlex.quote(self._run_dir)}"
        write_line(f"{line}; {more}")

    def _line(self, goodbye: Goodbye, totals: Ledger, steps: int) -> str:
        wall_ns = max(1, totals.wall_ns)
        line = f"{plural(steps, 'step')} of {duration(wall_ns / steps)}: {_shares(totals)}"
        if goodbye.total_overhead_ns is not None:
            ratio = percent(goodbye.total_overhead_ns / wall_ns, digits=2)
            line += f"; pacecar's own time {duration(goodbye.total_overhead_ns)} ({ratio})"
        if self._is_tuned:
            changes = [
                f"{knob} {setting(knob, first)} -> {setting(knob, last)}"
                for knob, (first, last) in self._kept.items()
                if first != last
            ]
            line += f"; kept {', '.join(changes) or 'no change'}"
        return line


def _first_reason(detail: str) -> str:
    """Return why the first knob cannot be turned: DDP's come first, and a script here has no others."""
    return detail.removeprefix("nothing to tune: ").removeprefix("not tuning: ").split("; ")[0]


def _shares(ledger: Ledger) -> str:
    parts = {heading: part_ns / max(1, ledger.wall_ns) for heading, part_ns in ledger.parts().items()}
    largest = sorted((heading for heading in parts if parts[heading] >= SHARE_MIN), key=lambda each: -parts[each])
    return ", ".join(f"{percent(parts[heading])} {HEADING_WORDS[heading]}" for heading in largest[:SHARES_MAX])
