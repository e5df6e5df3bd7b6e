"""Measures whom the running job's comparison of ranks names: in simulated CUDA jobs, and in real gloo jobs.

Simulated jobs (`tests/kit/simulated_jobs`, loud noise) tell their steps through the shipped device timer, rows and
messages to the shipped detector.  One rank gets slow in the middle of the run; a fault counts if it makes the job's
steps at least 15 % longer.  Real jobs are those of `straggler_job.py`, with rank 1 slowed by 40 % of a step.

    python -m bench.bench_stragglers_live
    python -m bench.bench_stragglers_live --ranks 8 64 --runs 5 --healthy 100
    python -m bench.bench_stragglers_live --ranks --real ddp fsdp2 tensor pipeline
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pacecar.profiler.ranks.exchange.phase_sums_message import MESSAGE_WORDS
from pacecar.profiler.ranks.straggler_detector import StragglerDetector
from pacecar.records import Cause
from tests.kit.ranks import finish, start_ranks
from tests.kit.simulated_jobs import LOUD, Fault, FaultKind, Job, Layout, Model, simulate
from tests.kit.simulated_jobs.timers import ranges_of

STEPS, ONSET = 88, 48
SLOWER_MIN = 1.15


class Case(NamedTuple):
    """A fault, and the causes that are right for it; `is_larger`: it comes from larger batches."""

    kind: FaultKind
    size: float
    causes: tuple[Cause, ...]
    is_throttled: bool = False
    is_larger: bool = False


CASES = {
    "compute": Case(FaultKind.SLOW_COMPUTE, 0.4, (Cause.COMPUTE,)),
    "backward": Case(FaultKind.SLOW_BACKWARD, 0.5, (Cause.COMPUTE,)),
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
        "tensor": Layout(tensor=4, data=ranks // 4),
        "pipeline": Layout(pipeline=2, data=ranks // 2),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", nargs="*", type=int, default=[8], help="of simulated jobs, multiples of 4")
    parser.add_argument("--layouts", nargs="+", choices=[*layouts(4)], default=["ddp"])
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--runs", type=int, default=1, help="of each case")
    parser.add_argument("--healthy", type=int, default=4, help="runs without a fault, half of them of uneven lengths")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", nargs="*", default=[], metavar="KIND", help="of gloo jobs, as `straggler_job.py`")
    parser.add_argument("--faults", nargs="+", default=["forward", "backward", "data", "host", "gc", "work", "none"])
    args = parser.parse_args(words)
    _say(f"a message of a rank has {8 * MESSAGE_WORDS} bytes, of up to 16 ranges of 4 steps or more")
    for ranks in args.ranks:
        for name in args.layouts:
            for case in args.cases:
                seeds = range(args.seed, args.seed + args.runs)
                _tell(f"{ranks} ranks, {name}, {case}", [faulty(layouts(ranks)[name], case, seed) for seed in seeds])
            named = [healthy(layouts(ranks)[name], seed, is_uneven=bool(seed % 2)) for seed in range(args.healthy)]
            _say(f"{ranks} ranks, {name}, healthy: somebody named in {sum(named)} of {len(named)} runs")
    for kind in args.real:
        for fault in args.faults:
            _say(f"gloo, {kind}, {fault}: {real(kind, fault)}")


def faulty(layout: Layout, name: str, seed: int) -> tuple[str, int | None]:
    """Return how the fault was told, and after how many steps if it was."""
    case, rank = CASES[name], (7 * seed + 2) % layout.ranks
    steps = tuple(range(ONSET, STEPS + 1))
    fault = Fault(case.kind, (rank,), case.size, steps)
    detector, found, walls = StragglerDetector("j", layout.ranks), [], ([], [])  # type: ignore[var-annotated]
    throttled, larger = (rank,) if case.is_throttled else (), {rank: 1.4} if case.is_larger else {}
    for rows in ranges_of(simulate(_job(layout, seed, fault)), throttled=throttled, larger=larger):
        walls[rows[0].first_step >= ONSET].append(rows[0].wall_ns)
        found += [(rows[0].last_step, one) for one in detector.judge(rows, 0) if not one.ended]
    others = [one for _, one in found if one.late_rank != rank]
    if others:
        return f"wrong rank ({others[0].cause})", None
    if statistics.median(walls[1]) < SLOWER_MIN * statistics.median(walls[0]):
        return "of no consequence", None
    if not found:
        return "nobody", None
    step, first = found[0]
    return ("right" if first.cause in case.causes else f"right rank, {first.cause}"), step - ONSET


def healthy(layout: Layout, seed: int, *, is_uneven: bool) -> bool:
    """Return whether anybody was named in a run without a fault."""
    everybody = tuple(range(layout.ranks))
    faults = (Fault(FaultKind.IMBALANCE, everybody, 0.2),) if is_uneven else ()
    detector = StragglerDetector("j", layout.ranks)
    return any(detector.judge(rows, 0) for rows in ranges_of(simulate(_job(layout, 1000 + seed, *faults))))


def _job(layout: Layout, seed: int, *faults: Fault) -> Job:
    model = Model(layers=2, microbatches=4 if layout.pipeline > 1 else 1)
    return Job(layout, model, noise=LOUD, faults=faults, steps=STEPS, seed=seed)


def real(kind: str, fault: str, *, world: int = 2, onset: int = 80, steps: int = 320) -> str:
    """Return whom rank 0 of a gloo job named."""
    program = [Path(__file__).with_name("straggler_job.py"), kind, fault, str(onset), str(steps), "0.4"]
    ended = finish(start_ranks(program, world, python=sys.executable))
    rows = [json.loads(line) for line in ended[0].out.splitlines() if line.startswith("{")]
    named = [f"rank {row['rank']} {row['cause']} at step {row['at']}" for row in rows if not row["ended"]]
    return ", ".join(dict.fromkeys(named)) or "nobody"


def _tell(what: str, outcomes: Sequence[tuple[str, int | None]]) -> None:
    counts = Counter(outcome for outcome, _ in outcomes)
    after = [steps for _, steps in outcomes if steps is not None]
    steps = f"; named after {statistics.median(after):.0f} steps (at most {max(after)})" if after else ""
    _say(f"{what}: " + ", ".join(f"{outcome} {count}" for outcome, count in counts.most_common()) + steps)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
