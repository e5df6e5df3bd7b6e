"""Measures whom cross-rank windows name in simulated CUDA jobs in which a rank gets slow while they run.

All of it is shipped code but the processes and sockets: the device's timers, rows and messages feed the detector and
the trigger; some steps of the same run become the ranks' traces; these are condensed, encoded, decoded and judged; the
verdict is applied to what the detector says.  A fault counts if it makes the job's steps at least 15 % longer.  It is
right if in the end only its rank is named, with its cause, and no other rank ever was.  Healthy runs, half of them with
uneven lengths, are judged whether or not a window was due.

    python -m bench.bench_cross_rank
    python -m bench.bench_cross_rank --ranks 8 64 --layouts fsdp tensor --runs 5 --healthy 10
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pacecar.analysis.one_rank.trace_bytes import decode_trace, encode_trace
from pacecar.analysis.reading.rank_window import judge, prepared
from pacecar.clock import SystemClock
from pacecar.profiler.ranks.cross_rank.cross_rank_window import AHEAD_STEPS, WINDOW_STEPS
from pacecar.profiler.ranks.cross_rank.named_ranks import NamedRanks
from pacecar.profiler.ranks.cross_rank.window_trigger import WindowTrigger
from pacecar.profiler.ranks.straggler_detector import StragglerDetector
from pacecar.records import Cause, Straggler
from tests.kit.simulated_jobs import LOUD, QUIET, Fault, FaultKind, Job, Layout, Model, Run, simulate
from tests.kit.simulated_jobs.timers import ranges_of

STEPS, ONSET = 80, 48
SLOWER_MIN = 1.15

CASES = {
    "compute": (FaultKind.SLOW_COMPUTE, 0.4, Cause.COMPUTE),
    "backward": (FaultKind.SLOW_BACKWARD, 0.5, Cause.COMPUTE),
    "data": (FaultKind.DATA_WAIT, 8e6, Cause.DATA_WAIT),
    "host": (FaultKind.SLOW_HOST, 7.0, Cause.HOST_BOUND),
    "optimizer": (FaultKind.OPTIMIZER_HOST, 20e6, Cause.OPTIMIZER_HOST),
    "checkpoint": (FaultKind.CHECKPOINT, 8e6, Cause.CHECKPOINT),
}
"""Faults by what they are, how large, and the cause that is right for them."""


class Outcome(NamedTuple):
    """What was said in one run: in a word, steps from the fault to the verdict, and bytes of a rank's part.

    `was_due`: a suspicion ordered the window.
    """

    word: str
    steps: int | None = None
    part_bytes: int | None = None
    was_due: bool = True


def layouts(ranks: int) -> dict[str, Layout]:
    return {
        "ddp": Layout(data=ranks),
        "fsdp": Layout(data=ranks, is_sharded=True),
        "tensor": Layout(tensor=8, data=ranks // 8),
        "pipeline": Layout(pipeline=2, data=ranks // 2),
        "all": Layout(pipeline=2, tensor=2, data=ranks // 4),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", nargs="*", type=int, default=[8], help="of simulated jobs, multiples of 8")
    parser.add_argument("--layouts", nargs="+", choices=[*layouts(8)], default=["fsdp", "tensor", "all"])
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--runs", type=int, default=1, help="of each case")
    parser.add_argument("--healthy", type=int, default=2, help="runs of each layout without a fault")
    parser.add_argument("--steps", type=int, default=WINDOW_STEPS, help="of a window, where the budget allows no more")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(words)
    begun, every = time.process_time(), list[Outcome]()
    for ranks in args.ranks:
        for name in args.layouts:
            layout = layouts(ranks)[name]
            for case in args.cases:
                some = [faulty(layout, case, seed, args.steps) for seed in range(args.seed, args.seed + args.runs)]
                every += some
                _say(f"{ranks} ranks, {name}, {case}: {_words(some)}")
            if args.healthy:
                found = [healthy(layout, seed, args.steps) for seed in range(args.seed, args.seed + args.healthy)]
                _say(f"{ranks} ranks, {name}, healthy: {_words(found)}")
    counted = [one for one in every if one.word != "of no consequence"]
    right = sum(one.word == "right" for one in counted)
    _say(f"right in {right} of {len(counted)}; {time.process_time() - begun:.0f} s of the processor")


def faulty(layout: Layout, name: str, seed: int, steps: int) -> Outcome:
    """Return how the fault was told."""
    kind, size, cause = CASES[name]
    rank = (7 * seed + 2) % layout.ranks
    run = simulate(_job(layout, seed, Fault(kind, (rank,), size, tuple(range(ONSET, STEPS + 1)))))
    return followed(run, {(rank, cause)}, steps)


def healthy(layout: Layout, seed: int, steps: int) -> Outcome:
    """Return whom a window names in a run without a fault."""
    faults = (Fault(FaultKind.IMBALANCE, tuple(range(layout.ranks)), 0.2),) if seed % 2 else ()
    return followed(simulate(_job(layout, 1000 + seed, *faults)), set(), steps, always=True)


def followed(run: Run, truth: set[tuple[int, Cause]], steps: int, *, always: bool = False) -> Outcome:
    """Play a run through detector, trigger and a window of `steps`; `always`: take a window in any case."""
    reports: list[Straggler] = []
    names = NamedRanks("j", reports.append, SystemClock(), on_device=True)
    detector, trigger = StragglerDetector("j", run.job.layout.ranks), WindowTrigger()
    walls: tuple[list[int], list[int]] = [], []
    due_step = judged_step = part_bytes = None
    for rows in ranges_of(run):
        first, last = rows[0].first_step, rows[0].last_step
        walls[first >= ONSET].append(rows[0].wall_ns or 0)
        if judged_step is None and due_step is not None and due_step + steps <= last:
            parts = [encode_trace(prepared(trace, [])) for trace in recorded(run, due_step, steps).traces()]
            part_bytes, judged_step = max(map(len, parts)), due_step + steps
            verdict = judge([decode_trace(part, str(rank)) for rank, part in enumerate(parts)])
            trigger.done(0, last, has_changed=names.judged(verdict, due_step))
        if names.detected(detector.judge(rows, 0)):
            trigger.named()
        trigger.add(rows)
        if trigger.is_over:
            names.recovered(last)
        is_forced = always and first >= ONSET
        if due_step is None and (trigger.is_due(0) or is_forced) and last + AHEAD_STEPS + steps < STEPS:
            due_step = last + AHEAD_STEPS
            trigger.ordered()
            names.ordered()
    last_said = {(one.late_rank, one.cause): one for one in reports}
    told = {key for key, one in last_said.items() if not one.ended}
    if {rank for rank, _ in last_said} - {rank for rank, _ in truth}:
        word = "wrong: " + ", ".join(f"rank {rank} {cause}" for rank, cause in last_said)
    elif truth and statistics.median(walls[1]) < SLOWER_MIN * statistics.median(walls[0]):
        return Outcome("of no consequence")
    elif told == truth:
        first_right = next((one.step for one in reports if (one.late_rank, one.cause) in truth), None)
        return Outcome("right", None if first_right is None else first_right - ONSET, part_bytes)
    else:
        word = f"right rank, {', '.join(cause for _, cause in told)}" if told else "nobody"
    return Outcome(word if judged_step is not None else f"{word}, no window", None, part_bytes)


def recorded(run: Run, first: int, steps: int) -> Run:
    """Return the run as it is recorded from step `first` on, for `steps` steps."""
    job = replace(run.job, steps_before=first, steps=steps)
    times = [
        type(times)(*(column[: job.all_steps * len(run.program(rank))] for column in times))
        for rank, times in enumerate(run.times)
    ]
    return Run(job, run.programs, tuple(times))


def _job(layout: Layout, seed: int, *faults: Fault) -> Job:
    # Between hosts kernels are longer, or communication hides any fault.
    scale = layout.tensor * (1 if layout.hosts == 1 else 3)
    model = Model(layers=2, kernel_scale=scale, microbatches=4 if layout.pipeline > 1 else 1)
    return Job(layout, model, noise=LOUD if seed % 2 else QUIET, faults=faults, steps=STEPS, seed=seed)


def _words(some: Sequence[Outcome]) -> str:
    counts = Counter(one.word for one in some)
    after = [one.steps for one in some if one.steps is not None]
    sizes = [one.part_bytes for one in some if one.part_bytes is not None]
    words = ", ".join(f"{word} {count}" for word, count in counts.most_common())
    words += f"; named after {statistics.median(after):.0f} steps (at most {max(after)})" if after else ""
    return words + (f"; at most {max(sizes) / 1024:.1f} KB a rank" if sizes else "; no window")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
