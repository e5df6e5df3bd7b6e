"""Makes something happen to a real gloo job, and returns what pacecar said of it and after how long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.ranks import Rank, finish, start_ranks

__all__ = ["ALL", "Case", "Outcome", "inject"]

JOB = Path(__file__).with_name("job_hang.py")

ALL = -1
"""In place of a rank: it happens to all of them."""

WATCH_SECONDS = 26.0
"""How long to wait for a verdict from the moment when it happened."""

START_SECONDS = 240.0
HEALTHY_SECONDS = 600.0

ENDED_SECONDS = 10.0
"""How long to look for the record that a hang is over."""


@dataclass(frozen=True)
class Case:
    """What happens to which rank of how many; `kinds` are right answers, and () means that there is none to give."""

    fault: str
    rank: int
    world: int
    kinds: tuple[str, ...] = ()
    may_end: bool = False
    """Whether the job may fail by itself instead, as gloo's does when a process ends."""
    steps: int = 60
    """Of a healthy job."""
    pause_seconds: float = 9.0
    stop_all_seconds: float = 0.0
    device: str = "cpu"


@dataclass(frozen=True)
class Outcome:
    """`verdicts` as records, with `seconds` from the moment when it happened; whether the job ended by itself."""

    verdicts: list[dict[str, Any]]
    has_ended: bool
    log: str

    def judged(self, case: Case) -> str:
        """Return "right", "wrong", "unknown", "none", or "ended" where the job failed by itself.

        Of two ranks that called different things "pair" is right: which of them is wrong cannot be told.
        """
        begun = [verdict for verdict in self.verdicts if not verdict["ended"]]
        named = [verdict for verdict in begun if verdict["culprits"]]
        if not case.kinds:
            return "wrong" if begun else "right"
        truth = [case.rank]
        if named and all(
            "cannot be told" in verdict["summary"] and case.rank in verdict["culprits"] for verdict in named
        ):
            return "pair"
        if any(sorted(verdict["culprits"]) != truth or verdict["kind"] not in case.kinds for verdict in named):
            return "wrong"
        if named:
            return "right"
        if begun:
            return "unknown"
        return "ended" if self.has_ended and case.may_end else "none"


def inject(folder: Path, case: Case, watch: Callable[[], None] = lambda: None) -> Outcome:
    """Run the job of `case` until there is a verdict, it ends, or WATCH_SECONDS have passed; end it then."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = case.steps if not case.kinds else 100_000
    arguments = [JOB, str(folder), case.fault, str(case.rank), str(steps)]
    ranks = start_ranks(
        arguments,
        case.world,
        python=sys.executable if case.device == "cuda" else None,  # what is forked from another cannot use CUDA
        environ={"PAUSE_SECONDS": str(case.pause_seconds), "HANG_DEVICE": case.device},
    )
    try:
        if case.stop_all_seconds:
            _stop_all(folder, case)
        if case.kinds:
            _wait_for_verdict(folder, case, ranks)
        else:
            end = time.monotonic() + HEALTHY_SECONDS
            while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < end:
                time.sleep(0.2)
        watch()
        has_ended = any(rank.process.poll() is not None for rank in ranks)
        begun_ns = _begun_ns(folder)
        verdicts = _verdicts(folder)
    finally:
        for path in folder.glob("pid*"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        ended = finish(ranks, 5.0)
    for verdict in verdicts:
        verdict["seconds"] = None if begun_ns is None else (verdict["wall_ns"] - begun_ns) / 1e9
    log = "\n".join(f"rank {number} ({end.code}): {end.err[-1500:]}" for number, end in enumerate(ended))
    return Outcome(verdicts, has_ended, log)


def _wait_for_verdict(folder: Path, case: Case, ranks: list[Rank]) -> None:
    start = time.monotonic()
    begun: float | None = None
    while time.monotonic() - (begun or start) < (WATCH_SECONDS if begun else START_SECONDS):
        if begun is None and _begun_ns(folder) is not None:
            begun = time.monotonic()
        if _verdicts(folder):
            return
        if (
            case.may_end
            and begun
            and all(rank.process.poll() is not None for number, rank in enumerate(ranks) if number != case.rank)
        ):
            return
        time.sleep(0.2)


def _stop_all(folder: Path, case: Case) -> None:
    end = time.monotonic() + START_SECONDS
    steps = [folder / f"step{rank}" for rank in range(case.world)]
    while time.monotonic() < end and not all(step.exists() and (step.read_text() or "0") >= "12" for step in steps):
        time.sleep(0.05)
    pids = [int((folder / f"pid{rank}").read_text()) for rank in range(case.world)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(case.stop_all_seconds)


def _begun_ns(folder: Path) -> int | None:
    found = [int(text) for path in folder.glob("begun*") if (text := path.read_text())]
    return min(found, default=None)


def _verdicts(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            if '"hang_verdict"' in line:
                try:
                    found.append(json.loads(line))
                except ValueError:  # it is being written
                    continue
    return found
