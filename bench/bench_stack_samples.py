"""Measures what the samples of the training thread's stack (`collective_waits`) take from that thread.

The training thread does nothing but look at the clock, so it always holds the GIL or wants it: the worst case.  Or it
multiplies matrices and looks at the clock after each, as operators give the GIL up while they run.  Seconds with
samples and without alternate.  A sample costs the time between two looks that it lies in, beyond a usual one.

    python -m bench.bench_stack_samples
    chrt -r 1 python -m bench.bench_stack_samples --seconds 120        where other programs run
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence

import torch

from pacecar.profiler.ranks.collective_waits import SAMPLE_SECONDS, CollectiveWaits

SIZE = 96
GAP_NS = 3_000
"""A longer time between two looks is an interruption."""
GAP_NS_MAX = 20_000_000
"""A longer one is that of a machine that is busy with something else."""
DEPTH = 40
"""Frames of the training thread's stack."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    for name, work in (("python", None), ("operators", torch.ones(SIZE, SIZE))):
        measure(name, work, args.seconds)


def measure(name: str, work: torch.Tensor | None, seconds: float) -> None:
    """Print what a sample takes from a thread that does `work`."""
    samples: list[tuple[int, int]] = []
    is_on, is_over = threading.Event(), threading.Event()
    waits = CollectiveWaits(threading.get_ident(), lambda: "forward", time.monotonic_ns)

    def sample() -> None:
        while not is_over.wait(waits.pause_seconds()):
            if is_on.is_set():
                begun = time.perf_counter_ns()
                waits.sample()
                samples.append((begun, time.perf_counter_ns()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    lost: dict[bool, list[int]] = {True: [], False: []}
    gaps: list[tuple[int, int]] = []
    for second in range(round(seconds)):
        (is_on.set if second % 2 else is_on.clear)()
        found = _spin(1.0, DEPTH, work)
        gaps += found if second % 2 else []
        lost[bool(second % 2)].append(sum(end - begun for begun, end in found))
    is_over.set()
    thread.join()
    ends = [end for _, end in gaps]
    took = []
    for begun, _ in samples:
        at = bisect_left(ends, begun)
        took.append(gaps[at][1] - gaps[at][0] if at < len(gaps) and gaps[at][0] <= begun else 0)
    middle = statistics.median(took)
    share = middle / 1e9 / SAMPLE_SECONDS
    spent = statistics.median(end - begun for begun, end in samples)
    _say(
        f"{name}: {len(samples)} samples take {1e-3 * middle:.0f} us each from the training thread (medians), and"
        f" {1e-3 * spent:.0f} of their own: {100 * share:.3f} % of a step, every {SAMPLE_SECONDS} s"
    )
    by = {name: statistics.median(lost[name]) / 1e6 for name in (True, False)}
    _say(f"  all interruptions: {by[True]:.2f} ms a second with samples, {by[False]:.2f} without (medians)")


def _spin(seconds: float, depth: int, work: torch.Tensor | None) -> list[tuple[int, int]]:
    """Work at `depth` more frames; return the interruptions, less the time of one piece of work."""
    if depth:
        return _spin(seconds, depth - 1, work)
    now = time.perf_counter_ns
    usual = 0
    if work is not None:
        times = [now()] + [now() for _ in range(100) if work.mm(work) is not None]
        usual = round(statistics.median(b - a for a, b in itertools.pairwise(times)))
    before, end, gaps = now(), now() + round(seconds * 1e9), []
    while before < end:
        if work is not None:
            work.mm(work)
        at = now()
        before += min(usual, at - before)
        if at - before > GAP_NS and at - before < GAP_NS_MAX:
            gaps.append((before, at))
            at = now()
        before = at
    return gaps


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
