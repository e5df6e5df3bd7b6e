"""What is tuning worth on a real link, for every policy, and how near does it come to the best there is?

Real DDP training over gloo, a network namespace for each rank, shaped links between them (see `tests/kit/shaping.py`;
needs root).  For each case (model, link, ranks) first a sweep over bucket sizes in rounds finds the oracle's setting;
then the arms run one after the other in an order that turns with every repeat:

    never       the job as torch comes, without pacecar
    oracle      a fixed bucket: the best of the sweep
    others      the named policies, pacecar's own in exact and in lossy mode, exploration and overhead included

The pace of a step is its slowest rank's wall time.  Per arm are printed: total time against never tuning, the pace of
the last fifth against the oracle's, steps in trials, the slowest trial, steps over 20 % slower than never tuning's
typical one, and what was expected of each trial beside what was measured.  Medians over repeats, lowest and highest in
brackets.

Others on the host take the processors at times.  A step in which the hypervisor gave them over STOLEN_MAX is disturbed:
in the tables the median of its nearest calm steps stands for it.  An arm with over DISTURBED_MAX of such steps is run
again, at most `--again` times, and the run with the fewest counts: that is the only thing that a run is judged by.  A
sweep runs disturbed stretches again by itself.  Before each run the processors are kept busy for a moment, to see what
others take of them now, and at most `--patience` seconds are waited until it is little.

At the end the settings that exact arms arrived at run side by side with the oracle's in one job, round by round, on the
link as it is then: two runs on end differ by more than good settings do.  `--json FILE` keeps all of it, and the sweeps
as curves that policies can be replayed on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds its own folder only
from bench.tuning_figures import STOLEN_MAX, Run, compact, spread, summary, table
from bench.tuning_job import processor_seconds
from tests.kit.shaping import Link, Net, shaped, why_not

MIB = 2**20
JOB = Path(__file__).with_name("tuning_job.py")
JOB_SECONDS_MAX = 3600
PORT = 29_611
SWEEP = (0, MIB // 4, MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)
"""Bucket sizes of the sweep; 0 is DDP's default."""

ARMS: dict[str, dict[str, Any] | None] = {
    "never": None,
    "oracle": None,
    "doubling": {"tune": "exact", "policy": "throughput-doubling", "knobs": ("bucket_bytes",)},
    "gaussian": {"tune": "exact", "baseline": "gaussian-process", "knobs": ("bucket_bytes",)},
    "tpe": {"tune": "exact", "baseline": "tpe", "knobs": ("bucket_bytes",)},
    "exact": {"tune": "exact"},
    "lossy": {"tune": "lossy"},
}
"""What the job attaches pacecar with, if at all; `baseline` is a policy of `bench.baselines` in place of pacecar's."""


@dataclass(frozen=True)
class Case:
    """One job: `changes` is what the link becomes, each for an equal part of the run."""

    model: str
    link: Link
    ranks: int = 2
    changes: tuple[Link, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read "stack10@1000/5", "deep@1000:4" (four ranks) or "stack10@1000>5000>1000" (the link changes twice)."""
        model, _, rest = text.partition("@")
        links, _, ranks = rest.partition(":")
        first, *others = map(Link.parse, links.split(">"))
        return cls(model, first, int(ranks or 2), tuple(others))

    def __str__(self) -> str:
        changes = "".join(f", then {link}" for link in self.changes)
        return f"{self.model}, {self.ranks} ranks, {self.link}{changes}"


FULL = (
    *(
        Case.parse(f"{model}@{link}")
        for model in ("stack10", "gpt", "deep", "wide")
        for link in ("1000", "1000/1", "1000/5", "5000", "unlimited", "1000>5000")
    ),
    Case.parse("stack10@1000:4"),
    Case.parse("deep@1000/1:4"),
    *(Case.parse(f"{model}@2500") for model in ("embedding", "vgg", "alternating", "accumulation")),
    Case.parse("stack10@1000:3"),
    Case.parse("stack10@4000>1000"),
    Case.parse("stack10@4000>1000>4000"),
)
"""Everything; many hours.  `--cases` takes some of it."""

FINAL_ROUNDS = 5
"""Rounds of the comparison of what the arms arrived at."""

DISTURBED_MAX = 0.3
"""Share of an arm's steps that others may disturb."""

STRETCHES_AGAIN = 30
"""Times that a sweep runs a disturbed stretch again, of all together: bursts last a minute or two, and may not end."""

LOOK = "import time; end = time.monotonic() + 3\nwhile time.monotonic() < end: pass"
"""A processor that has nothing to do is taken by nobody: only a busy one tells."""

PAUSE_SECONDS = 20.0
"""Between two looks."""

DEFAULT = (25 * MIB, MIB)
"""What DDP does with `bucket_cap_mb` left alone: buckets of 25 MiB after a first one of 1 MiB (torch 2.13)."""

Setting = tuple[int, int | None]
"""Bucket bytes, 0 for the default, and the first bucket's, None as DDP does it."""

QUICK = (Case.parse("stack10@1000"),)


def run_ranks(net: Net, ranks: int, given: dict[str, Any], changes: Sequence[Link] = ()) -> list[dict[str, Any]]:
    """Run one job to its end and return what each rank said; changes the link when rank 0 reaches a step of `say`."""
    environ = os.environ | {
        "MASTER_ADDR": net.address,
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": net.device,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(JOB), json.dumps(given)]
    processes = [
        subprocess.Popen(
            [*net.prefixes[rank], *command],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        first = processes[0].stdout
        assert first is not None
        last, left = "", list(changes)
        for line in first:
            if left and '"reached"' in line:
                net.change(left.pop(0))
            last = line
        outputs = [last, *(process.communicate(timeout=JOB_SECONDS_MAX)[0] for process in processes[1:])]
        _, errors = processes[0].communicate()
        if any(process.returncode for process in processes):
            raise RuntimeError(f"the job failed: {given}\n{errors[-2000:]}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def say(line: str) -> None:
    """Print a line at once: a case takes many minutes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def slowest(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return step by step the slowest rank."""
    return [max(step) for step in zip(*rows, strict=True)]


def run_sweep(net: Net, case: Case, settings: Sequence[Setting], *, rounds: int, steps: int) -> list[list[list[float]]]:
    """Return for each setting the paces of its judged steps, a list a round."""
    given = {"model": case.model, "sweep": settings, "rounds": rounds, "steps": steps, "again": STRETCHES_AGAIN}
    said = run_ranks(net, case.ranks, given)
    if said[0]["repeated"]:
        say(f"  {said[0]['repeated']} stretches were run again: others took the processors")
    return [
        [slowest([rank["sweep"][place][number] for rank in said]) for number in range(rounds)]
        for place in range(len(settings))
    ]


def find_curve(net: Net, case: Case, rounds: int) -> dict[int, list[float]]:
    """Return bucket size -> paces of its judged steps."""
    taken = run_sweep(net, case, [(size, None) for size in SWEEP], rounds=rounds, steps=4)
    return {size: list(chain.from_iterable(paces)) for size, paces in zip(SWEEP, taken, strict=True)}


def compare_finals(net: Net, case: Case, runs: Sequence[Run], best_bytes: int) -> dict[str, list[list[float]]]:
    """Run the oracle's setting, the default and what the exact arms ended with side by side; print and return paces."""
    names: dict[Setting, list[str]] = {(best_bytes, None): ["oracle"]}
    names.setdefault((0, None), []).append("default")
    for run in runs:
        if "bucket_bytes" in run.values and run.values.get("compression", "none") == "none":
            setting = (run.values["bucket_bytes"], run.values.get("first_bucket_bytes"))
            names.setdefault((0, None) if setting == DEFAULT else setting, []).append(run.arm)
    taken = run_sweep(net, case, list(names), rounds=FINAL_ROUNDS, steps=6)
    oracle, *_ = taken
    for (size, first), arms, paces in zip(names, names.values(), taken, strict=True):
        ratios = [median(mine) / median(best) - 1 for mine, best in zip(paces, oracle, strict=True)]
        typical = median(chain.from_iterable(paces))
        shown = _size(size) + ("" if first in (None, size) else f", first {_size(first)}")
        say(f"  side by side: {', '.join(arms)} ({shown}): {typical * 1e3:.0f} ms, {spread(ratios)} of the oracle's")
    return {", ".join(arms): paces for arms, paces in zip(names.values(), taken, strict=True)}


def run_arm(net: Net, case: Case, arm: str, steps: int, best_bytes: int) -> Run:
    """Run one arm on a link that is as the case begins."""
    net.change(case.link)
    given: dict[str, Any] = {"model": case.model, "steps": steps}
    options = ARMS[arm]
    if options is not None:
        given["attach"] = options
    if arm == "oracle" and best_bytes:
        given["bucket_bytes"] = best_bytes
    parts = 1 + len(case.changes)
    given["say"] = [steps * part // parts for part in range(1, parts)]
    before = processor_seconds()
    said = run_ranks(net, case.ranks, given, case.changes)
    stolen, passed = (after - was for after, was in zip(processor_seconds(), before, strict=True))
    first = said[0]
    return Run(
        arm,
        slowest([rank["walls"] for rank in said]),
        first.get("records", []),
        first.get("values", {}),
        stolen / passed if passed else None,
        first["stolen"],
    )


def stolen_now() -> float:
    """Return the share that others take of all processors when they are busy."""
    before = processor_seconds()
    for busy in [subprocess.Popen([sys.executable, "-c", LOOK]) for _ in range(os.cpu_count() or 1)]:
        busy.wait()
    stolen, passed = (after - was for after, was in zip(processor_seconds(), before, strict=True))
    return stolen / passed if passed else 0.0


def wait_for_calm(patience_seconds: float) -> None:
    """Wait until others leave the processors alone, but no longer than that."""
    end = time.monotonic() + patience_seconds
    while stolen_now() > STOLEN_MAX and time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)


def run_calmly(
    net: Net, case: Case, arm: str, steps: int, best_bytes: int, *, again: int, patience_seconds: float
) -> Run:
    """Run one arm until the host leaves it alone, at most `again` times more; return the least disturbed run."""
    taken: list[Run] = []
    while len(taken) <= again:
        wait_for_calm(patience_seconds)
        run = run_arm(net, case, arm, steps, best_bytes)
        taken.append(run)
        stolen = "" if run.stolen_ratio is None else f", {run.stolen_ratio:.1%} stolen"
        disturbed = f", {len(run.disturbed)} of {len(run.paces)} steps disturbed"
        say(f"  {arm:10} {run.total:8.1f} s, {run.final * 1e3:.0f} ms{stolen}{disturbed}")
        if len(run.disturbed) <= DISTURBED_MAX * len(run.paces):
            break
    return min(taken, key=lambda run: len(run.disturbed))


def run_case(
    case: Case, arms: Sequence[str], *, steps: int, repeats: int, rounds: int, again: int, patience_seconds: float
) -> dict[str, Any]:
    """Run a case: sweep, then all arms in turn; prints each as it comes and the table at the end."""
    say(f"\n== {case}")
    runs: list[Run] = []
    with shaped(case.ranks, case.link) as net:
        sent = net.sent_bytes()[0]
        wait_for_calm(patience_seconds)
        curve = find_curve(net, case, rounds)
        levels = {size: median(paces) for size, paces in curve.items()}
        best = min(levels, key=lambda size: levels[size])
        shown = "  ".join(f"{_size(size)} {level * 1e3:.0f}" for size, level in levels.items())
        say(f"sweep, ms a step: {shown}; the oracle takes {_size(best)}")
        if net.sent_bytes()[0] - sent < MIB:
            raise RuntimeError("the job's bytes do not cross the shaped link")
        for repeat in range(repeats):
            order = [*arms[repeat % len(arms) :], *arms[: repeat % len(arms)]]
            say(f"repeat {repeat + 1}:")
            runs += [
                run_calmly(net, case, arm, steps, best, again=again, patience_seconds=patience_seconds) for arm in order
            ]
        say("")
        wait_for_calm(patience_seconds)
        finals = compare_finals(net, case, runs, best)
    say(table(str(case), arms, runs))
    return {
        "case": str(case),
        "curve_seconds": {str(size): paces for size, paces in curve.items()},
        "best_bytes": best,
        "finals": finals,
        "runs": [asdict(run) for run in runs],
    }


def _size(size: int) -> str:
    return "default" if not size else f"{size / MIB:g} MiB"


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="MODEL@LINK[>LINK...][:RANKS], separated by commas; 'all' for every one")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the sweep")
    parser.add_argument("--again", type=int, default=2, help="runs more of an arm whose processors others took")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for a calm host before a run")
    parser.add_argument("--json", type=Path, help="keep everything in this file")
    parser.add_argument("--show", type=Path, nargs="+", help="run nothing; sum these files up as Markdown")
    args = parser.parse_args()
    if args.show is not None:
        say(summary([case for file in args.show for case in json.loads(file.read_text())]))
        return
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"bench-tuning cannot run here: {reason}")
    cases = QUICK if args.cases is None else FULL if args.cases == "all" else map(Case.parse, args.cases.split(","))
    arms = args.arms.split(",")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        parser.error(f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and namespaces go with it
    begun = time.monotonic()
    kept = []
    for case in cases:
        kept.append(
            run_case(
                case,
                arms,
                steps=args.steps,
                repeats=args.repeats,
                rounds=args.rounds,
                again=args.again,
                patience_seconds=args.patience,
            )
        )
        if args.json is not None:
            args.json.write_text(json.dumps([compact(one) for one in kept]) + "\n")
    say("\n" + summary(kept))
    say(f"\n{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
