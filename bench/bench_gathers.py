"""Measures what comparing the ranks of a job costs: the shipped rank monitors of real gloo processes, and 1024 ranks.

Each process has a monitor that is told of steps of STEP_SECONDS that nobody computes.  Midway the last rank gets slow,
and the time until rank 0 reports it is taken.  For 1024 ranks the messages are encoded, and the work of the rank that
does the most is done and timed: once as one gather of all ranks, once as that of rank 0 in its subgroup and with the
reports of all leaders.

    python -m bench.bench_gathers
    python -m bench.bench_gathers --ranks 16 64 --subgroups 16 --seconds 60
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from pacecar.clock import SystemClock
from pacecar.config import HookConfig
from pacecar.profiler.ranks.exchange.leader_reports import REPORT_SECONDS, LeaderReports
from pacecar.profiler.ranks.exchange.ledger_sums import RangeSums
from pacecar.profiler.ranks.exchange.phase_sums_message import (
    MESSAGE_WORDS,
    PHASES,
    ROWS_MAX,
    HostPressure,
    RankRange,
    decode,
    encode,
)
from pacecar.profiler.ranks.exchange.step_partition import BUDGET_SHARE, gather_seconds
from pacecar.profiler.ranks.exchange.subgroups import Subgroup, subgroup_of
from pacecar.profiler.ranks.exchange.totals import LedgerTotals
from pacecar.profiler.ranks.rank_monitor import RankMonitor
from pacecar.profiler.ranks.reports import RankReports
from pacecar.profiler.ranks.straggler_detector import StragglerDetector
from pacecar.profiler.timing.overhead_budget import OverheadBudget
from pacecar.profiler.timing.step_timer import TimedStep
from pacecar.records import JobRecord, Knobs, Straggler
from tests.kit.ranks import finish, start_ranks
from tests.kit.records import job_hello, ledger

STEP_SECONDS = 0.1
BUDGET = 0.01
SLOWER_NS = 40_000_000
LARGE = 1024
REPEATS = 5


class Watched:
    """The hook that a monitor watches."""

    def __init__(self) -> None:
        self.phase, self.evaluated_ns, self.step, self.is_alive = "outside", None, 0, True
        self.begun_ns: int | None = None
        self.trained_ns, self.is_ddp, self.records = None, True, self
        self.budget = OverheadBudget(BUDGET, warmup_steps=3, interval_steps=50)

    def current_step(self) -> tuple[int, int | None]:
        return self.step, self.begun_ns

    def flush_in_background(self, after_seconds: float) -> None:
        pass

    def watch_calls(self) -> None:
        pass

    def meeting_phases(self) -> frozenset[str]:
        return frozenset()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 32, 64], help="of real processes")
    parser.add_argument("--subgroups", type=int, default=16, help="ranks of a subgroup, where they are divided")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.rank:
        run_rank(**json.loads(args.rank))
        return
    _say(f"a message of a rank has {8 * MESSAGE_WORDS} bytes; steps of {STEP_SECONDS} s, overhead budget {BUDGET}")
    for ranks in args.ranks:
        for size in sorted({ranks, min(ranks, args.subgroups)}, reverse=True):
            _say(f"{ranks} ranks, {'all' if size == ranks else size} compared: {real(ranks, size, args.seconds)}")
    for line in large():
        _say(line)


# --- real processes -----------------------------------------------------------------------------


def run_rank(size: int, seconds: float) -> None:
    """Be one rank; prints what it measured."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    watched, reported, posts = Watched(), [], [0, 0]
    onset = round(seconds / 2 / STEP_SECONDS)

    def emit(record: JobRecord) -> None:
        if isinstance(record, Straggler):
            reported.append((record.late_rank, record.cause, record.ended, watched.step - onset))

    subgroup = subgroup_of(rank, ranks, whole_max=size, subgroup_ranks=size)
    config = HookConfig(overhead_budget=BUDGET)
    monitor = RankMonitor(job_hello(rank, ranks), config, watched, emit=emit, subgroup=subgroup)  # type: ignore[arg-type]
    if size < ranks:  # as in a large job
        monitor._gather_seconds = gather_seconds(BUDGET, LARGE)
        monitor._ranges = type(monitor._ranges)(config.crew_period_steps, monitor._gather_seconds)
    monitor.start()
    begun = time.monotonic()
    for step in range(round(seconds / STEP_SECONDS)):
        time.sleep(max(0.0, begun + (step + 1) * STEP_SECONDS - time.monotonic()))
        end_ns, is_slow = time.monotonic_ns(), step >= onset
        wall_ns = round(STEP_SECONDS * 1e9) + SLOWER_NS * is_slow
        waits_ns = 5_000_000 + (SLOWER_NS if is_slow and rank != ranks - 1 else 0)
        timed = TimedStep(
            start_ns=end_ns - wall_ns, end_ns=end_ns, marks={}, micro_batches=1, overhead_ns=0,
            phases={"forward": 30_000_000, "backward_tail": waits_ns, "backward": wall_ns - waits_ns - 30_000_000},
        )  # fmt: skip
        record = SimpleNamespace(
            step=step, knobs=Knobs(), disturbed=False, measured_every=1, source="exact", calibration_age_steps=None,
            gc_ns=0, tokens=None, totals=ledger(wall_ns * (step + 1)), total_steps=step + 1,
        )  # fmt: skip
        monitor.note(timed, record)  # type: ignore[arg-type]
        watched.step, watched.begun_ns = step + 1, end_ns
    off, gathers, cpu_ns = monitor.off_because, monitor.gathers, monitor.cpu_ns
    monitor.close()
    found: dict[str, Any] = {"gathers": gathers, "cpu_ns": cpu_ns, "off": off, "reported": reported, "posts": posts}
    sys.stdout.write(json.dumps(found | {"is_leader": rank == subgroup.first, "ranks": subgroup.ranks}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)


def real(ranks: int, size: int, seconds: float) -> str:
    """Run monitors of `ranks` processes, `size` of them compared with each other; return what they measured."""
    given = json.dumps({"size": size, "seconds": seconds})
    ended = finish(start_ranks(["-m", "bench.bench_gathers", "--rank", given], ranks, folder=Path.cwd()))
    rows = [json.loads(line) for rank in ended for line in rank.out.splitlines() if line.startswith("{")]
    if len(rows) < ranks or any(row["off"] for row in rows):
        return f"failed: {[row['off'] for row in rows if row['off']][:2]} {ended[0].err[-300:]}"
    first, steps = rows[0], seconds / STEP_SECONDS
    named = [(rank, cause, after) for rank, cause, is_ended, after in first["reported"] if not is_ended]
    received = statistics.mean(row["gathers"] * row["ranks"] for row in rows) * 8 * MESSAGE_WORDS / steps
    cpu = [row["cpu_ns"] / 1e9 / seconds for row in rows]
    return (
        f"{first['gathers']} gathers in {seconds:.0f} s, {received / 1e3:.2f} KB received a rank-step; "
        f"thread of rank 0 {100 * cpu[0]:.3f} % of a processor, median rank {100 * statistics.median(cpu):.3f} %; "
        f"reported {named}"
    )


# --- 1024 ranks ---------------------------------------------------------------------------------


def large(ranks: int = LARGE) -> list[str]:
    """Return what a gather of `ranks` ranks costs the one that does the most."""
    subgroup = subgroup_of(0, ranks)
    whole = Subgroup(0, 0, ranks, (0,))
    all_at_once, one = (_seconds(_gather(each, ranks)) for each in (whole, subgroup))
    joined, payload = _reports(subgroup, ranks)
    reports = _seconds(joined)
    interval = gather_seconds(BUDGET, ranks)
    # The length of a batch is a power of two times that of a range.
    received = 8 * MESSAGE_WORDS * subgroup.ranks / 64 + payload * len(subgroup.leaders) ** 2 / ranks / 50
    return [
        f"{ranks} ranks as one: {1e3 * all_at_once:.1f} ms a gather of {ROWS_MAX} rows on rank 0:"
        f" one in {all_at_once / BUDGET / BUDGET_SHARE:.0f} s; each rank receives {8 * MESSAGE_WORDS * ranks} bytes",
        f"{ranks} ranks in {len(subgroup.leaders)} subgroups: {1e3 * one:.1f} ms a gather, and {1e3 * reports:.1f} ms"
        f" for all reports of {payload} bytes: {100 * (one / interval + reports / REPORT_SECONDS):.3f} % of rank 0"
        f" at a gather in {interval:.1f} s ({2 * interval:.1f} at most), {received / 1e3:.2f} KB a rank-step",
    ]


def _row(number: int, rank: int) -> RankRange:
    medians = {phase: 1_000_000 * (at + 1) + 977 * ((rank * 7 + number) % 101) for at, phase in enumerate(PHASES)}
    medians["wall"] = sum(value for phase, value in medians.items() if phase != "wall")
    sums = {phase: 4 * value for phase, value in medians.items()}
    around = HostPressure(0.1, 0.01, 0.2)
    return RankRange(number, 4 * number, 4, 4, 0, 1, sums, medians, around=around, gc_ns=1000, work=4096)


def _totals(step: int) -> LedgerTotals:
    return LedgerTotals(ledger(100_000_000 * step, exposed_communication=20_000_000 * step), step, step, 0)


def _gather(subgroup: Subgroup, ranks: int) -> Callable[[], object]:
    detector, sums, number = StragglerDetector("j", ranks, subgroup.members), RangeSums(), [0]

    def gather() -> Callable[[], object]:
        words = [
            encode(0, [_row(number[0] + at, rank) for at in range(ROWS_MAX)], totals=_totals(1 + number[0]))
            for rank in subgroup.members
        ]
        number[0] += ROWS_MAX

        def judge() -> None:
            rows = [decode(0, mine).rows for mine in words]
            for at in range(ROWS_MAX):
                one_range = [mine[at] for mine in rows]
                sums.add(one_range)
                detector.judge(one_range, 0)

        return judge

    return gather


class _Table:
    """A group on which all leaders have posted the same."""

    def __init__(self, count: int) -> None:
        self.count, self.is_busy = count, False
        self.words: list[int] = []

    def post(self, words: Sequence[int]) -> None:
        self.words, self.is_busy = list(words), True

    def receive(self) -> list[list[int]]:
        self.is_busy = False
        return [self.words] * self.count

    def close(self) -> None:
        pass


def _reports(subgroup: Subgroup, ranks: int) -> tuple[Callable[[], Callable[[], object]], int]:
    table, step = _Table(len(subgroup.leaders)), [0]
    clock = SystemClock()
    leader = LeaderReports(table, clock.monotonic_ns, is_first=True)
    report = RankReports(job_hello(0, ranks), lambda _: None, clock, lambda: False)

    def gather() -> Callable[[], object]:
        step[0] += 50
        totals = [_totals(step[0])] * subgroup.ranks

        def tell() -> None:
            leader.add(RangeSums().add([_row(step[0], rank) for rank in subgroup.members]), [])
            leader.post(totals)
            reports = leader.receive()
            report.ledger([one.sums for one in reports if one.sums is not None])
            report.what_if([each for one in reports for each in one.ledgers()])

        return tell

    gather()()
    return gather, 8 * len(table.words)


def _seconds(prepare: Callable[[], Any]) -> float:
    took = []
    for _ in range(REPEATS):
        work = prepare()
        begun = time.thread_time()
        work()
        took.append(time.thread_time() - begun)
    return statistics.median(took)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
