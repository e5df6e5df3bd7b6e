"""Reads a run's records: the last steps of each `rank<r>.jsonl`, and the latest of everything else.

A day of training leaves gigabytes, and only the job's current state matters, so of each file only the first line (the
rank's hello) and the last READ_BYTES are read.  Steps that pacecar's own window disturbed are left out.

Lines that are not records are counted and skipped; a last line without a newline is still being written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from pacecar.records import (
    Cause,
    Decision,
    JobHello,
    JobRecord,
    Ledger,
    StepRecord,
    Straggler,
    TunerStatus,
    Verdict,
    Vitals,
    WhatIf,
)
from pacecar.records.rank_file import NOT_A_RECORD, RankFile, decode, rank_files

from .evidence import FactError
from .job import Run

__all__ = ["READ_BYTES", "STEPS_MAX", "read_run"]

READ_BYTES = 4 * 1024 * 1024
"""Enough for about 3000 steps."""

STEPS_MAX = 200
"""Steps per rank: enough for current settings, few enough to exclude warm-up."""

RANKS_MAX = 1024


class _Rank:
    """The contents of one file."""

    def __init__(self) -> None:
        self.hello: JobHello | None = None
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_MAX)
        self.last: StepRecord | None = None
        self.vitals: Vitals | None = None
        self.ladders: dict[int | None, WhatIf] = {}
        self.stragglers: dict[tuple[int | None, Cause], Straggler] = {}
        self.advice: dict[str, Decision] = {}
        self.tuner: str | None = None
        self.refused = 0

    def add(self, record: JobRecord) -> None:
        if isinstance(record, JobHello):
            self.hello = record
        elif isinstance(record, StepRecord):
            self.last = record
            if not record.disturbed:
                self.steps.append(record)
        elif isinstance(record, Vitals):
            self.vitals = record
        elif isinstance(record, WhatIf):
            self.ladders[record.of_rank] = record
        elif isinstance(record, Straggler):
            self.stragglers[record.late_rank, record.cause] = record
        elif isinstance(record, Decision) and record.kind == "advise":
            self.advice[record.knob] = record
        elif isinstance(record, TunerStatus):
            self.tuner = record.state
        elif isinstance(record, Verdict):
            self.advice.pop(record.knob, None)


def read_run(folder: Path) -> tuple[Run, tuple[str, ...]]:
    """Return the contents of the folder, and notes on what could not be read.

    Raises:
        FactError: the folder has no record of any rank.
    """
    try:
        files = rank_files(folder)
    except OSError as error:
        raise FactError(f"{folder}: cannot be read: {error.strerror or error}") from error
    notes: list[str] = []
    ranks: dict[int, _Rank] = {}
    if len(files) > RANKS_MAX:
        notes.append(f"{folder}: {len(files) - RANKS_MAX} ranks beyond the first {RANKS_MAX} were left out")
    for number, path in islice(files.items(), RANKS_MAX):
        rank = _Rank()
        if not path.is_file():  # reading a pipe would block
            notes.append(f"{path}: not a file")
            continue
        try:
            lines = _lines(path)
        except OSError as error:
            notes.append(f"{path}: {error.strerror or error}")
            continue
        for line in lines:
            try:
                rank.add(decode(line))
            except NOT_A_RECORD:
                rank.refused += 1
        if rank.refused:
            notes.append(f"{path}: {rank.refused} of {len(lines)} lines are not records and were left out")
        if rank.hello is not None or rank.last is not None:
            ranks[number] = rank
    if not ranks:
        raise FactError(f"{folder}: no record of any rank (rank0.jsonl, ...){': ' if notes else ''}{'; '.join(notes)}")
    return _run(folder, ranks), tuple(notes)


def _lines(path: Path) -> list[bytes]:
    """Return the first line and the complete lines of the last READ_BYTES; a line that is too long is empty."""
    start = max(0, path.stat().st_size - READ_BYTES)
    head = list(islice(RankFile(path).lines(), 1)) if start else []
    return [line or b"" for _, line in (*head, *RankFile(path, start=start).lines())]


def _run(folder: Path, ranks: dict[int, _Rank]) -> Run:
    lowest = ranks[min(ranks)]
    steps = [step for rank in ranks.values() for step in rank.steps]
    stragglers = {key: said for rank in ranks.values() for key, said in rank.stragglers.items()}
    ladders = {of: said for rank in ranks.values() for of, said in rank.ladders.items()}
    paces = [sum(step.wall_ns for step in rank.steps) // len(rank.steps) for rank in ranks.values() if rank.steps]
    return Run(
        where=str(folder),
        hellos=tuple(rank.hello for rank in ranks.values() if rank.hello is not None),
        ledger=_sum(step.ledger for step in steps) if steps else None,
        steps=len(steps),
        pace_ns=max(paces, default=None),
        knobs={} if lowest.last is None else lowest.last.knobs.values,
        vitals={number: rank.vitals for number, rank in ranks.items() if rank.vitals is not None},
        total_wall_ns={number: rank.last.totals.wall_ns for number, rank in ranks.items() if rank.last is not None},
        compile_shares={number: share for number, rank in ranks.items() if (share := _compile_share(rank.steps))},
        ladder=ladders.get(None, next((ladders[of] for of in sorted(o for o in ladders if o is not None)), None)),
        stragglers=tuple(said for said in stragglers.values() if not said.ended),
        advice=tuple(lowest.advice.values()),
        tuner=lowest.tuner,
    )


def _compile_share(steps: Sequence[StepRecord]) -> float | None:
    """Return the share of the time after the first of `steps` for which torch.compile compiled; None if unknown."""
    if len(steps) < 2 or steps[0].total_compile_ns is None or steps[-1].total_compile_ns is None:
        return None
    wall_ns = steps[-1].totals.wall_ns - steps[0].totals.wall_ns
    return (steps[-1].total_compile_ns - steps[0].total_compile_ns) / wall_ns if wall_ns > 0 else None


def _sum(ledgers: Iterable[Ledger]) -> Ledger:
    return sum(ledgers, Ledger(wall_ns=0, data_wait_ns=None))
