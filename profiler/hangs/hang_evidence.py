"""Writes what a verdict on a hang is based on into the run folder: a `HangEvidence` in `hang-step387.json`.

It is `hang.json` if the step is unknown.  `pacecar analyze --hang` reads it again.
"""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pacecar.records import HangVerdict
from pacecar.records.hangs import HangEvidence, RankAccount
from pacecar.safe_files import FOLDER_MODE, replacing

__all__ = ["keep_evidence", "write_evidence"]

BYTES_MAX = 20_000_000
"""Of a file.  A rank's account has 2 to 10 kB, so that those of 2000 ranks fit."""

_log = logging.getLogger("pacecar")


def keep_evidence(
    folder: Path, verdict: HangVerdict, accounts: Sequence[RankAccount], *, after: threading.Thread | None = None
) -> threading.Thread:
    """Start a thread that writes the file and logs where it is: the file system may be what the job waits for.

    `after` is the thread that writes an earlier verdict on the same hang, whose file is replaced without another line.
    """
    thread = threading.Thread(
        target=_write, args=(folder, verdict, accounts, after), name="pacecar-hang-evidence", daemon=True
    )
    thread.start()
    return thread


def write_evidence(path: Path, verdict: HangVerdict, accounts: Iterable[RankAccount]) -> None:
    """Write the file at `path`, and make its folder; raises OSError."""
    with replacing(path, make_mode=FOLDER_MODE) as file:
        file.write(_encoded(verdict, accounts))


def _write(folder: Path, verdict: HangVerdict, accounts: Iterable[RankAccount], after: threading.Thread | None) -> None:
    if after is not None:
        after.join()
    path = folder / ("hang.json" if verdict.step is None else f"hang-step{verdict.step}.json")
    try:
        write_evidence(path, verdict, accounts)
    except OSError as error:
        _log.warning("pacecar cannot write %s: %s", path, error.strerror or error)
        return
    if after is not None:
        return
    _log.warning("pacecar: what each rank was doing: pacecar analyze --hang %s", shlex.quote(str(folder)))


def _encoded(verdict: HangVerdict, accounts: Iterable[RankAccount]) -> bytes:
    """Return the file: as many accounts as fit, those of culprits first."""
    left_bytes = BYTES_MAX
    kept: list[RankAccount] = []
    left_out: list[int] = []
    for account in sorted(accounts, key=lambda each: (each.rank not in verdict.culprits, each.rank)):
        left_bytes -= len(msgspec.json.encode(account))
        if left_bytes > 0:
            kept.append(account)
        else:
            left_out.append(account.rank)
    evidence = HangEvidence(verdict=verdict, accounts=tuple(kept), left_out=tuple(left_out))
    return msgspec.json.encode(evidence)
