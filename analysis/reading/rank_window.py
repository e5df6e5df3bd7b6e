"""Runs in a process of its own beside a rank of a running job: condenses its recorded steps, and judges all ranks'.

    condense TRACE TIMED OUT RANK WORLD HOST    a trace file, and `TimedStretch`es as JSON -> its condensed rows
    judge FOLDER OUT                            the parts of all ranks, `<rank>.part` -> a `WindowVerdict` as JSON

The process lowers its own priority and limits its memory before it loads anything.  An error is one line on stderr and
status 1.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from pacecar.safe_files import replacing

if TYPE_CHECKING:
    from ..trace.columns import Trace

__all__ = ["TAKEN_RATIO", "TimedStretch", "WindowFinding", "WindowVerdict", "judge", "main", "prepared"]

DOUBTS = ("replay_not_trusted", "too_few_steps", "nobody_unproven")
"""Warnings of the comparison that make "no rank is late" uncertain."""

UNEVEN_WAIT_RATIO = 0.1
"""The ranks' waiting may differ by this share of the time without a reason: sharded parameters on gloo wait inside
operators, which look like work."""

NICENESS = 15
TAKEN_RATIO = 0.034
"""The share of a processor that such a process takes from a thread that wants it as well: weights of 36 and 1024, in
`sched_prio_to_weight` of the kernel.  With SCHED_IDLE or 19, importing the analysis did not finish in 150 s beside 14
runnable threads on two cores."""

MEMORY_BYTES_MAX = 2 * 1024**3
"""What such a process may allocate: judging 256 ranks takes 0.13 GB."""

Text = Annotated[str, Meta(max_length=2000)]


class TimedStretch(msgspec.Struct, frozen=True, array_like=True):
    """What the timers of the running job know: a pass of the model (`name`) or a garbage collection ("gc").

    Times are nanoseconds of the wall clock.
    """

    name: str
    start_ns: int
    end_ns: int


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
    _restrain()
    try:
        match words:
            case ["condense", trace, timed, out, rank, world, host]:
                stretches = msgspec.json.decode(Path(timed).read_bytes(), type=list[TimedStretch])
                result = _condense(Path(trace), stretches, int(rank), int(world), host)
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


def _restrain() -> None:
    with suppress(OSError):
        os.nice(NICENESS)
    with suppress(OSError):  # if memory runs out, this process dies rather than the job's
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        least = MEMORY_BYTES_MAX if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES_MAX)
        resource.setrlimit(resource.RLIMIT_DATA, (least, hard))


def _condense(path: Path, timed: Sequence[TimedStretch], rank: int, world_size: int, host: str) -> bytes:
    from ..one_rank.trace_bytes import BYTES_MAX, encode_trace
    from ..trace.reader import read_trace

    trace = read_trace(path)
    data = encode_trace(replace(prepared(trace, timed), rank=rank, world_size=world_size, host=host))
    if len(data) > BYTES_MAX:
        raise ValueError(f"{len(data)} bytes are left of {trace.events} rows, more than may be sent")
    return data


def prepared(trace: Trace, timed: Sequence[TimedStretch]) -> Trace:
    """Return what is sent of a rank's trace: condensed, with what the timers know of the recorded steps."""
    from ..one_rank.condensed_trace import condensed
    from ..one_rank.timed_stretches import with_collections, with_passes

    wall_ns, by_name = trace.wall_offset_ns or 0, dict[str, list[tuple[int, int]]]()
    for each in timed:
        by_name.setdefault(each.name, []).append((each.start_ns - wall_ns, each.end_ns - wall_ns))
    trace = with_collections(trace, by_name.pop("gc", []))
    for name, stretches in by_name.items():
        if not trace.has_device:
            trace = with_passes(trace, f"Python of {name}", stretches)
    return condensed(trace)


def _judge(folder: Path) -> bytes:
    from ..one_rank.trace_bytes import decode_trace

    parts = sorted(folder.glob("*.part"), key=lambda path: int(path.stem))
    return msgspec.json.encode(judge([decode_trace(path.read_bytes(), path.stem) for path in parts]))


def judge(traces: Sequence[Trace]) -> WindowVerdict:
    """Return what the condensed `traces` of all ranks show."""
    from ..all_ranks.rank_comparison import analyze_job
    from ..one_rank.one_trace import analyze_trace

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
    return WindowVerdict(findings, steps, wall_ns, "; ".join(doubts)[:2000] or None)
