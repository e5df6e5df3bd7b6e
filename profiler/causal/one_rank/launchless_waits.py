"""Infers what rows wait for where a trace shows the device alone (`activities=[CUDA]`): no call says so.

A rank runs the same program in every step, so what a row waits for is the same in every step.  The program is the
shortest sequence of kernels that its busiest stream repeats; of a collective or message of the n-th place in it:

    it waits for       the work launched before it.  In no step can that be later than the last kernel that had ended
                       when it began, and in a step in which it waited it is that one: so it is the earliest of them
    what waits for it  begins in no step before it has ended, and right after it in a step in which it held the device
                       up: so it is the latest of the kernels that came first after it

What a receive or a gather brings is always used.  A sum of gradients may be awaited much later than it ends, and a send
not at all: they are taken to be awaited only where they held the device up.

Pure: columns in, pairs of indices out.  Left out: programs that differ from step to step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...trace.columns import NONE
from .causes import Cause
from .rank_events import RankEvents, WorkRows

__all__ = ["Program", "launchless_waits", "repeated_program"]

Index = NDArray[np.int64]

SAME_RATIO_MIN = 0.99
"""The share of kernels that must be the same one program later."""

SAME_COUNT_RATIO_MIN = 0.9
"""The share of a kind's rows after which as many of the kind, or one more or less, follow in one step's time."""

CANDIDATES_MAX = 256
"""Lengths of a program that are tried."""

SLACK_NS = 20_000
"""By how much rows that follow each other may overlap in a trace, if that is no more than `SLACK_RATIO` of the kernel:
in tables of ByteDance's it is up to 8 us."""

SLACK_RATIO = 0.25

STALL_NS_MIN = 5_000
"""A stream that stood still for less was between two kernels."""

HELD_RATIO_MIN = 0.25
"""In so many of the steps a row must have held the stream up for what comes next to wait for it: where it is not known
to be used, an end at the right time may be chance."""

SENT_RATIO_MIN = 0.6
"""The same of a send, which most programs wait for much later, if at all."""

SENDS = ("send", "isend")

AWAITED = ("recv", "irecv", "coalesced", "all_gather", "broadcast", "all_to_all", "send_recv", "gather", "scatter")
"""Operations whose result is used by the next work that needs it."""


class Program(NamedTuple):
    """The busiest stream's rows in order, how many of them are one step, and the first that begins a step."""

    rows: Index
    length: int
    first: int


def repeated_program(events: RankEvents) -> Program | None:
    """Return what the rank's busiest stream repeats; None where it repeats nothing."""
    rows = events.rows
    work = np.flatnonzero(rows.cause != Cause.LINK)
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
    # The same on all ranks that run the same program, however their traces number names.
    candidates = [value for value in values[counts == least].tolist() if value != NONE]
    rarest = min(candidates, key=words.__getitem__, default=NONE)
    at = np.flatnonzero(name == rarest)
    for length in (at[1:] - at[0])[:CANDIDATES_MAX].tolist():
        if len(name) >= 2 * length and (name[length:] == name[:-length]).mean() >= SAME_RATIO_MIN:
            return Program(mine, length, int((at[0] + 1) % length))
    return None


def launchless_waits(events: RankEvents) -> tuple[list[tuple[int, int]], NDArray[np.bool_]]:
    """Return pairs (row, awaited row), and for which rows that is all there is to say."""
    rows = events.rows
    known = np.zeros(len(rows.start_ns), dtype=np.bool_)
    program = repeated_program(events)
    if program is None:
        return [], known
    operation = _operations(events)
    beside = np.flatnonzero((rows.cause == Cause.LINK) & (rows.stream != rows.stream[program.rows[0]]))
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
    """Return what each row of a collective or message does, "" for what is not known."""
    trace = events.trace
    words = [meta.operation for meta in trace.collectives]
    found = [""] * len(events.rows.start_ns)
    for row in np.flatnonzero(trace.device.collective != NONE).tolist():
        found[row] = words[trace.device.collective[row]]
    return found


def _of_kind(rows: WorkRows, program: Program, mine: Index, operation: str) -> list[tuple[int, int]]:
    """Return the pairs of rows of one kind, in order; none where they are not as many in each step."""
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
    """Return which rows the program's stream stood still for: it went on right after they had ended."""
    main = program.rows
    at = np.clip(after, 1, len(main) - 1)
    begin, pause_from = rows.start_ns[main[at]], rows.end_ns[main[at - 1]]
    is_right_after = np.abs(begin - rows.end_ns[mine]) <= SLACK_NS
    held: NDArray[np.bool_] = is_right_after & (begin - pause_from >= STALL_NS_MIN) & (after == at)
    return held & (rows.end_ns[mine] > pause_from)
