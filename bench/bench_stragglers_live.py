"""Measures whom the running job's comparison of ranks names: in simulated CUDA jobs, and in real gloo jobs.

Simulated jobs (`tests/kit/simulated_jobs`, loud noise) tell their steps through the shipped device timer, rows and
messages to the shipped detectors, one for each subgroup of ranks.  One rank gets slow in the middle of the run, or is
from its first step on (`always`); a fault counts if it makes the job's steps at least 15 % longer.  Healthy jobs have,
by turns, sequences of uneven lengths, pauses of all ranks for evaluation and checkpoints, and links that are slow for
a few steps.  Real jobs are those of `straggler_job.py`, with rank 1 slowed by 40 % of a step; of `link` (root) it
sends at 20 Mbit/s from then on.

Everything follows from `--seed`.

    python -m bench.bench_stragglers_live
    python -m bench.bench_stragglers_live --ranks 8 64 --runs 5 --healthy 100 --kinds ddp pipeline fsdp tensor mixture
    python -m bench.bench_stragglers_live --ranks --real ddp fsdp2 tensor pipeline
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.straggler_job import ONSET_FILE, SLOW_RANK
from pacecar.profiler.ranks.exchange.phase_sums_message import RankRange
from pacecar.profiler.ranks.exchange.subgroups import subgroup_of
from pacecar.profiler.ranks.straggler_detector import StragglerDetector
from pacecar.records import Cause, Straggler
from tests.kit.ranks import finish, start_ranks
from tests.kit.shaping import Link, shaped
from tests.kit.simulated_jobs import LOUD, Fault, FaultKind, Job, Layout, Model, simulate
from tests.kit.simulated_jobs.timers import ranges_of

STEPS, ONSET = 88, 48
SLOW_LINK = Link(20)
"""Of a gloo job whose ranks send at 1 Gbit/s."""
SLOWER_MIN = 1.15


class Case(NamedTuple):
    """A fault, and the causes that are right for it; `is_larger`: it comes from larger batches.

    With `is_always` the rank is slow from its first step on.
    """

    kind: FaultKind
    size: float
    causes: tuple[Cause, ...]
    is_throttled: bool = False
    is_larger: bool = False
    is_always: bool = False


CASES = {
    "compute": Case(FaultKind.SLOW_COMPUTE, 0.4, (Cause.COMPUTE,)),
    "backward": Case(FaultKind.SLOW_BACKWARD, 0.5, (Cause.COMPUTE,)),
    "always": Case(FaultKind.SLOW_COMPUTE, 0.4, (Cause.COMPUTE,), is_always=True),
    "throttled": Case(FaultKind.SLOW_COMPUTE, 0.4, (Cause.THROTTLED,), is_throttled=True),
    "larger": Case(FaultKind.SLOW_COMPUTE, 0.4, (Cause.IMBALANCE,), is_larger=True),
    "data": Case(FaultKind.DATA_WAIT, 8e6, (Cause.DATA_WAIT,)),
    "host": Case(FaultKind.SLOW_HOST, 7.0, (Cause.HOST_BOUND,)),
    "optimizer": Case(FaultKind.OPTIMIZER_HOST, 20e6, (Cause.OPTIMIZER_HOST,)),
    "checkpoint": Case(FaultKind.CHECKPOINT, 8e6, (Cause.CHECKPOINT,)),
    "gc": Case(FaultKind.GC, 10e6, (Cause.GC,)),
}


def layouts(ranks: int) -> dict[str, Layout]:
    return {
        "ddp": Layout(data=ranks),
        "fsdp": Layout(data=ranks, is_sharded=True),
        "tensor": Layout(tensor=8, data=ranks // 8),
        "mixture": Layout(tensor=2, data=ranks // 2),
        "pipeline": Layout(pipeline=2, data=ranks // 2),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", nargs="*", type=int, default=[8], help="of simulated jobs, multiples of 8")
    parser.add_argument("--kinds", nargs="+", choices=[*layouts(8)], default=["ddp"])
    parser.add_argument("--cases", nargs="*", choices=[*CASES], default=[*CASES])
    parser.add_argument("--runs", type=int, default=1, help="of each case")
    parser.add_argument("--healthy", type=int, default=4, help="runs of each kind without a fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--real", nargs="*", default=[], metavar="KIND", help="of gloo jobs, as `straggler_job.py`")
    parser.add_argument("--world", nargs="+", type=int, default=[2], help="ranks of a gloo job")
    parser.add_argument("--faults", nargs="+", default=["forward", "backward", "data", "host", "gc", "work", "none"])
    args = parser.parse_args(words)
    _say(f"{'ranks':>5} {'job':9} {'fault':11} {'right':>5} {'none':>5} {'cause':>5} {'rank':>5} {'moot':>5}  steps")
    with ProcessPoolExecutor(args.processes) as pool:
        for ranks in args.ranks:
            for kind in args.kinds:
                for case in args.cases:
                    seeds = range(args.seed, args.seed + args.runs)
                    _tell(ranks, kind, case, [*pool.map(partial(faulty, layouts(ranks)[kind], case), seeds)])
                seeds = range(1000 * args.seed, 1000 * args.seed + args.healthy)
                found = [*pool.map(partial(healthy, layouts(ranks)[kind]), seeds)]
                _say(f"{ranks:5} {kind:9} healthy: somebody named in {sum(map(bool, found))} of {len(found)} runs")
                for seed, named in zip(seeds, found, strict=True):
                    if named:
                        _say(f"      seed {seed}: {', '.join(named)}")
    for kind, world, fault in itertools.product(args.real, args.world, args.faults):
        _say(f"gloo, {world} ranks, {kind}, {fault}: {real(kind, fault, world=world)}")


class Outcome(NamedTuple):
    """How a fault was told ("right", "nobody", wrong "cause" or "rank", or "moot": it cost little), and when."""

    what: str
    steps: int | None = None
    named: str = ""


def detectors(ranks: int) -> list[StragglerDetector]:
    """Return the detectors of a job's subgroups."""
    leaders = subgroup_of(0, ranks).leaders
    return [StragglerDetector("j", ranks, subgroup_of(leader, ranks).members) for leader in leaders]


def judge(judges: Sequence[StragglerDetector], rows: Sequence[RankRange]) -> Iterator[Straggler]:
    """Yield whom the subgroups name anew in one range."""
    for leader, detector in zip(subgroup_of(0, len(rows)).leaders, judges, strict=True):
        members = subgroup_of(leader, len(rows)).members
        yield from (one for one in detector.judge(rows[members.start : members.stop], 0) if not one.ended)


def faulty(layout: Layout, name: str, seed: int) -> Outcome:
    """Return how the fault was told."""
    case, rank = CASES[name], (7 * seed + 2) % layout.ranks
    onset = 0 if case.is_always else ONSET
    fault = Fault(case.kind, (rank,), case.size, tuple(range(onset, STEPS + 1)))
    judges, found, walls = detectors(layout.ranks), [], ([], [])  # type: ignore[var-annotated]
    throttled, larger = (rank,) if case.is_throttled else (), {rank: 1.4} if case.is_larger else {}
    for rows in ranges_of(simulate(_job(layout, seed, fault)), throttled=throttled, larger=larger):
        walls[rows[0].first_step >= ONSET].append(rows[0].wall_ns)
        found += [(rows[0].last_step, one) for one in judge(judges, rows)]
    others = [one for _, one in found if one.late_rank != rank]
    if others:
        return Outcome("rank", None, f"{others[0].cause} of rank {others[0].late_rank} for {rank}")
    if not case.is_always and statistics.median(walls[1]) < SLOWER_MIN * statistics.median(walls[0]):
        return Outcome("moot")
    if not found:
        return Outcome("nobody")
    step, first = found[0]
    return Outcome("right" if first.cause in case.causes else "cause", step - onset, str(first.cause))


def healthy(layout: Layout, seed: int) -> list[str]:
    """Return who was named in a run without a fault."""
    everybody = tuple(range(layout.ranks))
    faults = {
        0: (Fault(FaultKind.IMBALANCE, everybody, 0.2),),
        1: (Fault(FaultKind.STALL, everybody, 300e6, (30, 60)), Fault(FaultKind.CHECKPOINT, everybody, 80e6, (40, 70))),
        2: tuple(
            Fault(FaultKind.SLOW_DEVICE_LINK, ((seed + at) % layout.ranks,), 4.0, tuple(range(at, at + 3)))
            for at in (20, 35, 50, 71)
        ),
        3: (),
    }[seed % 4]
    judges = detectors(layout.ranks)
    run = simulate(_job(layout, seed, *faults))
    return [f"{one.cause} of {one.late_rank}" for rows in ranges_of(run) for one in judge(judges, rows)]


def _job(layout: Layout, seed: int, *faults: Fault) -> Job:
    model = Model(layers=2, microbatches=4 if layout.pipeline > 1 else 1)
    return Job(layout, model, noise=LOUD, faults=faults, steps=STEPS, seed=seed)


def real(kind: str, fault: str, *, world: int = 2, onset: int = 80, steps: int = 320) -> str:
    """Return whom rank 0 of a gloo job named."""
    program = [Path(__file__).with_name("straggler_job.py"), kind, fault, str(onset), str(steps), "0.4"]
    if fault == "link":
        with shaped(world, Link(1000)) as net, tempfile.TemporaryDirectory() as folder:
            ranks = start_ranks(
                program, world, python=sys.executable, environ={"GLOO_SOCKET_IFNAME": net.device},
                folder=Path(folder), address=net.address, prefixes=net.prefixes,
            )  # fmt: skip
            while not Path(folder, ONSET_FILE).exists() and ranks[0].process.poll() is None:
                time.sleep(0.1)
            net.change(SLOW_LINK, only=SLOW_RANK)
            ended = finish(ranks)
    else:
        ended = finish(start_ranks(program, world, python=sys.executable))
    rows = [json.loads(line) for line in ended[0].out.splitlines() if line.startswith("{")]
    named = [f"rank {row['rank']} {row['cause']} at step {row['at']}" for row in rows if not row["ended"]]
    return ", ".join(dict.fromkeys(named)) or "nobody"


def _tell(ranks: int, kind: str, case: str, outcomes: Sequence[Outcome]) -> None:
    counts = Counter(outcome.what for outcome in outcomes)
    after = [outcome.steps for outcome in outcomes if outcome.what == "right" and outcome.steps is not None]
    steps = f"{statistics.median(after):.0f} (at most {max(after)})" if after else "-"
    wrong = "; ".join(sorted({outcome.named for outcome in outcomes if outcome.what in ("cause", "rank")}))
    columns = " ".join(f"{counts[what]:5}" for what in ("right", "nobody", "cause", "rank", "moot"))
    _say(f"{ranks:5} {kind:9} {case:11} {columns}  {steps}{'  ' + wrong if wrong else ''}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
