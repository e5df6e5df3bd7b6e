"""Measures the overhead of `pacecar run` against the bare script, in turns.

Start-up: fresh interpreters that do nothing, or import torch.  Steps: a script on two gloo ranks, bare and measured in
turns; medians of its steps once settled, and the wall time of the whole run.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pacecar.commands.run import PTH, STARTUP, environment

JOBS = Path(__file__).resolve().parents[1] / "tests" / "jobs"
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_") and name != "PYTHONPATH"}
SETTLED_STEPS = 20
"""Imports, attaching and the first window are start-up; they are in the wall time."""


def spent(command: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Return the seconds that `command` took, and those of processors: others on the machine stretch only the first."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    subprocess.run(command, env=PLAIN | environ, check=True, capture_output=True, timeout=300)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


Run = Callable[[], tuple[float, float]]


def compare(name: str, rounds: int, bare: Run, watched: Run) -> None:
    """Run both by turns and print what `show` does, of the clock's time and the processors'."""
    pairs = []
    for turn in range(rounds):
        first, second = (bare, watched) if turn % 2 == 0 else (watched, bare)
        a, b = first(), second()
        pairs.append((a, b) if turn % 2 == 0 else (b, a))
    for what, index in (("", 0), (", processor", 1)):
        show(name + what, [(a[index], b[index]) for a, b in pairs], "ms")


def show(name: str, pairs: list[tuple[float, float]], unit: str) -> None:
    """Print medians, and median and quartiles of the ratios of neighbours."""
    rounds = len(pairs)
    scale = {"ms": 1e3, "s": 1.0}[unit]
    plain, ours = ([scale * pair[side] for pair in pairs] for side in (0, 1))
    ratios = sorted(b / a for a, b in pairs)
    low, _, high = statistics.quantiles(ratios, n=4) if rounds > 1 else (ratios[0], 0, ratios[0])
    sys.stdout.write(
        f"{name:<36} bare {statistics.median(plain):9.2f} {unit:<2}  watched {statistics.median(ours):9.2f} {unit:<2}"
        f"  ratio {statistics.median(ratios):6.4f}  (quartiles {low:.4f} .. {high:.4f}, {rounds} pairs)\n"
    )
    sys.stdout.flush()


def job(script: str, arguments: list[str], environ: dict[str, str]) -> tuple[float, float, float]:
    """Return the median step of a script on two ranks, and the time of all of it by the clock and of processors."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", str(JOBS / script), "--paces", *arguments]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=PLAIN | environ, check=True, capture_output=True, text=True, timeout=600)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("paces ")]
    return statistics.median([float(pace) for pace in line.split()[1:]][SETTLED_STEPS:]), wall, processors


def compare_jobs(name: str, script: str, arguments: list[str], mode: str, pairs: int) -> None:
    """Run a script bare and watched by turns; compare its steps and the whole of it."""
    threads = {"OMP_NUM_THREADS": "1"}
    added = threads | environment({}, tune=mode) | {"PACECAR_TUNE_REMEMBER": "false"}
    found: list[dict[bool, tuple[float, float, float]]] = []
    for turn in range(pairs):
        order = (False, True) if turn % 2 == 0 else (True, False)
        found.append({is_watched: job(script, arguments, added if is_watched else threads) for is_watched in order})
    for what, index, unit in (("steps", 0, "ms"), ("whole run", 1, "s"), ("its processors", 2, "s")):
        show(f"{name}, mode {mode}: {what}", [(one[False][index], one[True][index]) for one in found], unit)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11, help="of interpreters")
    parser.add_argument("--pairs", type=int, default=5, help="of jobs; 0 for none")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    ours = environment({})
    for name, code in (("python, nothing imported", "pass"), ("import torch", "import torch")):
        command = [sys.executable, "-c", code]
        compare(name, args.rounds, lambda c=command: spent(c, {}), lambda c=command: spent(c, ours))
    pth = PTH.format(folder=str(STARTUP))
    bare, lines = [sys.executable, "-c", "pass"], [sys.executable, "-c", pth]
    compare("the .pth line, variable not set", args.rounds, lambda: spent(bare, {}), lambda: spent(lines, {}))
    gpt = ["--steps", str(args.steps), "--width", "128", "--layers", "4", "--batch", "4"]
    resnet = ["--images", str(16 * args.steps), "--batch", "8", "--width", "16", "--epochs", "1"]
    if args.pairs == 0:
        return
    for mode in ("off", "exact"):
        compare_jobs("GPT on 2 ranks", "nanogpt_like.py", gpt, mode, args.pairs)
    compare_jobs("ResNet on 2 ranks", "resnet_like.py", resnet, "off", args.pairs)


if __name__ == "__main__":
    main()
