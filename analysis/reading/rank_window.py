"""Runs in a process of its own beside a rank of a running job: condenses its recorded steps, and judges all ranks'.

    condense TRACE OUT RANK WORLD HOST    a trace file -> `encode_trace` of its condensed rows
    judge FOLDER OUT                      the parts of all ranks, `<rank>.part` -> a `WindowVerdict` as JSON

The process lowers its own priority before it loads anything, so that the job keeps nine tenths of a processor that
both want.  An error is one line on stderr and status 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pacecar.safe_files import replacing

__all__ = ["WindowFinding", "WindowVerdict", "main"]

DOUBTS = ("replay_not_trusted", "too_few_steps", "nobody_unproven")
"""Warnings of the comparison that make "no rank is late" uncertain."""

UNEVEN_WAIT_RATIO = 0.1
"""The ranks' waiting may differ by this share of the time without a reason: sharded parameters on gloo wait inside
operators, which look like work."""

NICENESS = 10
"""A tenth of the job's weight.  With SCHED_IDLE or 19, importing the analysis did not finish in 150 s beside 14
runnable threads on two cores."""

Text = Annotated[str, Meta(max_length=2000)]


class WindowFinding(msgspec.Struct, frozen=True):
    """What holds the job up, as `pacecar analyze` says it; times are of one step."""

    kind: str
    ranks: list[int]
    cause: str
    saved_ns: int
    error_ns: int
    since_step: int | None
    evidence: Text


class WindowVerdict(msgspec.Struct, frozen=True):
    """What the steps show, the most harmful finding first; `doubt` is why no finding proves nothing, if it does not."""

    findings: Annotated[list[WindowFinding], Meta(max_length=64)]
    steps: int
    wall_ns: int
    doubt: Text | None = None


def main(words: Sequence[str]) -> int:
    """Run one of the two tasks; return the exit status."""
    _lower_priority()
    try:
        match words:
            case ["condense", trace, out, rank, world, host]:
                result = _condense(Path(trace), int(rank), int(world), host)
            case ["judge", folder, out]:
                result = _judge(Path(folder))
            case _:
                raise ValueError(f"unknown task {list(words)[:1]}")
        with replacing(out) as file:
            file.write(result)
    except Exception as error:  # noqa: BLE001  the parent reads one line
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def _lower_priority() -> None:
    with suppress(OSError):
        os.nice(NICENESS)


def _condense(path: Path, rank: int, world_size: int, host: str) -> bytes:
    from ..one_rank.condensed_trace import condensed
    from ..one_rank.trace_bytes import BYTES_MAX, encode_trace
    from ..trace.reader import read_trace

    trace = replace(condensed(read_trace(path)), rank=rank, world_size=world_size, host=host)
    data = encode_trace(trace)
    if len(data) > BYTES_MAX:
        raise ValueError(f"{len(data)} bytes are left of {trace.events} rows, more than may be sent")
    return data


def _judge(folder: Path) -> bytes:
    from ..all_ranks.rank_comparison import analyze_job
    from ..one_rank.one_trace import analyze_trace
    from ..one_rank.trace_bytes import decode_trace

    parts = sorted(folder.glob("*.part"), key=lambda path: int(path.stem))
    traces = [decode_trace(path.read_bytes(), path.stem) for path in parts]
    job = analyze_job(traces, [analyze_trace(trace) for trace in traces])
    steps = len(set.intersection(*({step.number for step in trace.steps} for trace in traces)))
    doubts = [warning.message for warning in job.warnings if warning.code in DOUBTS]
    waits = [share.wait_ns for share in job.shares]
    if waits and max(waits) - min(waits) > UNEVEN_WAIT_RATIO * (job.wall_ns or 0):
        doubts.append("ranks wait for each other unevenly, and no recorded work explains it")
    if steps == 0:
        doubts.append("the ranks recorded no common steps")
    findings = [
        WindowFinding(
            each.kind, each.ranks, each.cause.value, each.saved_ns, each.error_ns, each.since_step, each.evidence[:2000]
        )
        for each in job.stragglers
    ]
    wall_ns = (job.wall_ns or 0) // max(steps, 1)
    doubt = "; ".join(doubts)[:2000] or None
    return msgspec.json.encode(WindowVerdict(findings, steps, wall_ns, doubt))
