"""Infers what rows wait for in a trace of the device alone (`activities=[CUDA]`), which has no host calls.

A rank runs the same program in every step, so a row waits for the same thing in every step.  The program is the
shortest sequence of kernels that the busiest stream repeats.  For a collective or message at the n-th place in it:

    it waits for       the work launched before it: never later than the last kernel that had ended when it began, and
                       exactly that kernel in a step in which it waited.  So it is the earliest of those kernels
    what waits for it  never begins before its end, and begins right after it in a step in which it delayed the device.
                       So it is the latest of the kernels that came first after it

Later work always uses the result of a receive or a gather.  A sum of gradients may be awaited long after it ends, and a
send never: these count as awaited only if they delayed the device.

Pure: columns in, pairs of indices out.  Left out: programs that differ from step to step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE
from .causes import CauseCode
from .rank_events import RankEvents, WorkRows

__all__ = ["Program", "launchless_waits", "repeated_program"]

Index = NDArray[np.int64]

SAME_RATIO_MIN = 0.99
"""The least share of kernels that must be the same one program later."""

SAME_COUNT_RATIO_MIN = 0.9
"""The least share of a kind's rows that are followed by as many of the kind, give or take one, within a step's time."""

CANDIDATES_MAX = 256
"""The most lengths of a program that are tried."""

SLACK_NS = 20_000
"""Consecutive rows may overlap by this much, but at most by `SLACK_RATIO` of the kernel: up to 8 us in ByteDance's
traces."""

SLACK_RATIO = 0.25

STALL_NS_MIN = 5_000
"""A stream that stood still for less was only between two kernels."""

HELD_RATIO_MIN = 0.25
"""The least share of steps in which a row must have delayed the stream, for the next work to count as waiting for it.
Without a known use, an end at the right time may be chance."""

SENT_RATIO_MIN = 0.6
"""The same for a send, which most programs await much later, if at all."""

SENDS = ("send", "isend")

AWAITED = ("recv", "irecv", "coalesced", "all_gather", "broadcast", "all_to_all", "send_recv", "gather", "scatter")
"""Operations whose result later work always uses."""


class Program(NamedTuple):
    """The busiest stream's rows in order, how many of them are one step, and the first that begins a step."""

    rows: Index
    length: int
    first: int


def repeated_program(events: RankEvents) -> Program | None:
    """Return the program that the rank's busiest stream repeats; None if it repeats nothing."""
    rows = events.rows
    work = np.flatnonzero(rows.cause != CauseCode.LINK)
    if len(work) < 2:
        return None
    busiest = int(np.bincount(rows.stream[work], (rows.end_ns - rows.start_ns)[work]).argmax())
    mine = work[rows.stream[work] == busiest]
    mine = mine[np.argsort(rows.start_ns[mine], kind="stable")]
    name = rows.name[mine]
    values, counts = np.unique(name, return_counts=True)
    often = counts >= 2
    if not often.any():
        return None
    least = counts[often].min()
    words = events.trace.names
    # The same on all ranks that run one program, although their traces number names differently.
    candidates = [value for value in values[counts == least].tolist() if value != NONE]
    rarest = min(candidates, key=words.__getitem__, default=NONE)
    at = np.flatnonzero(name == rarest)
    for length in (at[1:] - at[0])[:CANDIDATES_MAX].tolist():
        if len(name) >= 2 * length and (name[length:] == name[:-length]).mean() >= SAME_RATIO_MIN:
            return Program(mine, length, int((at[0] + 1) % length))
    return None


def launchless_waits(events: RankEvents) -> tuple[list[tuple[int, int]], NDArray[np.bool_]]:
    """Return pairs (row, awaited row), and the rows whose waits they fully describe."""
    rows = events.rows
    known = np.zeros(len(rows.start_ns), dtype=np.bool_)
    program = repeated_program(events)
    if program is None:
        return [], known
    operation = _operations(events)
    beside = np.flatnonzero((rows.cause == CauseCode.LINK) & (rows.stream != rows.stream[program.rows[0]]))
    kinds = [(int(rows.stream[row]), operation[row]) for row in beside.tolist()]
    pairs: list[tuple[int, int]] = []
    for kind in sorted(set(kinds)):
        mine = beside[[each == kind for each in kinds]]
        mine = mine[np.argsort(rows.start_ns[mine], kind="stable")]
        found = _of_kind(rows, program, mine, kind[1])
        pairs += found
        known[mine] |= bool(found)
    known[program.rows] = bool(pairs)
    return pairs, known


def _operations(events: RankEvents) -> list[str]:
    """Return the operation of each row of a collective or message, "" if unknown."""
    trace = events.trace
    words = [meta.operation for meta in trace.collectives]
    found = [""] * len(events.rows.start_ns)
    for row in np.flatnonzero(trace.device.collective != NONE).tolist():
        found[row] = words[trace.device.collective[row]]
    return found


def _of_kind(rows: WorkRows, program: Program, mine: Index, operation: str) -> list[tuple[int, int]]:
    """Return the pairs of rows of one kind, in order; none if their number differs from step to step."""
    main, length = program.rows, program.length
    start, end = rows.start_ns[main], rows.end_ns[main]
    slack = np.minimum(SLACK_NS, np.rint(SLACK_RATIO * (end - start)).astype(np.int64))
    start, end = np.maximum.accumulate(start + slack), np.maximum.accumulate(end - slack)
    after = np.searchsorted(start, rows.end_ns[mine], side="left")
    nth = np.arange(len(mine))
    whole = after + length <= len(main)
    counts = (np.searchsorted(after, after + length) - nth)[whole]
    per_step = int(np.median(counts)) if len(counts) else 0
    if per_step == 0 or (np.abs(counts - per_step) <= 1).mean() < SAME_COUNT_RATIO_MIN:
        return []
    step, place = nth // per_step, nth % per_step
    before = np.searchsorted(end, rows.start_ns[mine], side="right") - 1 - step * length
    held = _held_up(rows, program, mine, after)
    after = after - step * length
    earliest, latest = np.full(per_step, np.iinfo(np.int64).max), np.full(per_step, np.iinfo(np.int64).min)
    np.minimum.at(earliest, place, before)
    np.maximum.at(latest, place, after)
    held_ratio = np.bincount(place, held, per_step) / np.bincount(place, minlength=per_step)
    awaited = earliest[place] + step * length
    waiting = latest[place] + step * length
    is_used = (held_ratio >= (SENT_RATIO_MIN if operation in SENDS else HELD_RATIO_MIN))[place] | (operation in AWAITED)
    has, some = np.flatnonzero(awaited >= 0), np.flatnonzero(is_used & (waiting < len(main)) & (waiting >= 0))
    pairs = list(zip(mine[has].tolist(), main[awaited[has]].tolist(), strict=True))
    return pairs + list(zip(main[waiting[some]].tolist(), mine[some].tolist(), strict=True))


def _held_up(rows: WorkRows, program: Program, mine: Index, after: Index) -> NDArray[np.bool_]:
    """Return the rows that the program's stream stood still for: it went on right after they ended."""
    main = program.rows
    at = np.clip(after, 1, len(main) - 1)
    begin, pause_from = rows.start_ns[main[at]], rows.end_ns[main[at - 1]]
    is_right_after = np.abs(begin - rows.end_ns[mine]) <= SLACK_NS
    held: NDArray[np.bool_] = is_right_after & (begin - pause_from >= STALL_NS_MIN) & (after == at)
    return held & (rows.end_ns[mine] > pause_from)
