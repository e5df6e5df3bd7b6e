"""Measures `pacecar analyze` on all ranks of a job together, and the share of the graph.

Traces of simulated jobs (`tests/kit/simulated_jobs`: DDP, a host for every eight ranks; with `--tensor` that many share
each layer) are written as by torch.profiler.  Each folder is analyzed by its own process, whose CPU time and peak
resident memory are the kernel's, including its children.  Then, in one process: reading all traces, analyzing each
alone, and all together, which adds matching, clocks, graph, verdict and what-if.

    python bench/bench_ranks.py
    python bench/bench_ranks.py --jobs 8x6 64x6 64x72     ranks x steps; the last has some five million events

A child inherits its parent's peak memory, so this process imports nothing large, and runs itself to write traces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

LAYERS = 8


class Whole(NamedTuple):
    """Figures of whole processes."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="+", type=_job, default=[(8, 6), (64, 6)], metavar="RANKSxSTEPS")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.write or args.inside:
        sys.path.insert(0, str(ROOT))  # run as a script, it finds its own folder only
        found = write(Path(args.write), *args.jobs[0], args.tensor) if args.write else inside(Path(args.inside))
        sys.stdout.write(json.dumps(found))
        return
    for ranks, steps in args.jobs:
        with tempfile.TemporaryDirectory() as folder:
            events = _itself("--write", folder, "--jobs", f"{ranks}x{steps}", "--tensor", str(args.tensor))
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
            sys.stdout.write(f"{ranks} ranks, {steps} steps: {events:,} events in {size / 1e6:.1f} MB, packed\n")
            sys.stdout.flush()
            wholes = [_whole(Path(folder)) for _ in range(args.rounds)]
            _say("processor, whole", [one.cpu_seconds for one in wholes], "s")
            _say("wall", [one.wall_seconds for one in wholes], "s")
            _say("peak memory of the largest process", [one.peak_bytes / 1e6 for one in wholes], "MB")
            parts = [_itself("--inside", folder) for _ in range(args.rounds)]
            for at, word in enumerate(("reading, in one process", "each trace by itself", "all together")):
                _say(word, [each[at] for each in parts], "s")
            ratios = [sum(each) / (each[0] + each[1]) for each in parts]
            _say("all of it over reading and each by itself", ratios, "times")


def _job(word: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", word)
    if found is None or int(found[1]) < 2 or int(found[2]) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not RANKSxSTEPS with at least 2 ranks, such as 8x6")
    return int(found[1]), int(found[2])


def _itself(*words: str) -> Any:
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def write(folder: Path, ranks: int, steps: int, tensor: int) -> int:
    """Write the traces of a job, and return how many events the reader finds in them."""
    from pacecar.analysis.trace.reader import read_trace
    from tests.kit.simulated_jobs import Job, Layout, Model, simulate
    from tests.kit.simulated_jobs.kineto import write_job

    job = Job(Layout(tensor=tensor, data=ranks // tensor), Model(layers=LAYERS), steps=steps, seed=1)
    return sum(read_trace(path).events for path in write_job(folder, simulate(job).traces(), job.layout))


def _whole(folder: Path) -> Whole:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "pacecar", "analyze", str(folder), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"pacecar analyze ended with {process.returncode}")
    cpu = usage.ru_utime + usage.ru_stime  # with that of the processes it waited for
    return Whole(cpu, time.perf_counter() - begun, usage.ru_maxrss * 1024)


def inside(folder: Path) -> list[float]:
    """Return the CPU seconds of reading all, of analyzing each by itself, and of analyzing all together."""
    from pacecar.analysis.all_ranks.rank_comparison import analyze_job
    from pacecar.analysis.one_rank.one_trace import analyze_trace
    from pacecar.analysis.trace.reader import read_trace

    at = [time.process_time()]
    traces = [read_trace(path) for path in sorted(folder.iterdir())]
    at.append(time.process_time())
    reports = [analyze_trace(trace) for trace in traces]
    at.append(time.process_time())
    analyze_job(traces, reports)
    at.append(time.process_time())
    return [after - before for before, after in itertools.pairwise(at)]


def _say(word: str, values: Sequence[float], unit: str) -> None:
    middle, least, most = statistics.median(values), min(values), max(values)
    sys.stdout.write(f"  {word:44} {middle:9.2f} {unit} ({least:.2f} to {most:.2f})\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
