"""Compares the savings that `pacecar analyze` predicts with real savings, on jobs of 4 ranks.

A DDP job on gloo runs with one rank slowed (in compute, data, its own code, or its link) and without; the predicted
saving and its stated error are printed beside the difference of the two runs.  So are two what-if answers about the
healthy job: free data, and every link twice as fast.  Each round runs every job once and compares its two runs; medians
and extremes over rounds are printed.

Links are shaped in network namespaces, which needs root.  Compute is an operator that sleeps, as the ranks share a few
processors (`counterfactual_job`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pacecar.analysis.document.report import TraceJob
from pacecar.analysis.reading.parallel_reading import analyze_files
from tests.kit.ranks import finish, start_ranks
from tests.kit.shaping import Link, Net, shaped, why_not

JOB = Path(__file__).resolve().parent / "counterfactual_job.py"
RANKS, SLOW = 4, 2
FAST, SLOW_LINK = Link(1000), Link(100)
BURST_BYTES = 80_000
"""What these links let through at full speed after a pause: little beside a bucket, as it is free at either rate."""

LINKS, TWICE = Link(300, burst_bytes=BURST_BYTES), Link(600, burst_bytes=BURST_BYTES)
"""Every link, before and after it is made twice as fast."""


@dataclass(frozen=True, slots=True)
class Run:
    """A job: what is slowed of rank SLOW, the links of all, and that of rank SLOW where it has another."""

    fault: str
    links: Link = FAST
    slow_link: Link | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """`answer` is "verdict", or the what-if answer's name, of `run`; it is true if `without` is faster by as much."""

    name: str
    run: Run
    without: Run
    answer: str = "verdict"
    causes: tuple[str, ...] = ()


HEALTHY = Run("none")
QUESTIONS = (
    Question("rank 2 computes 30 % slower", Run("compute"), HEALTHY, causes=("compute",)),
    Question("rank 2 waits 12 ms more for data", Run("data"), HEALTHY, causes=("data_wait",)),
    Question("rank 2's own code takes 10 ms more", Run("host"), HEALTHY, causes=("host_bound", "unknown")),
    Question(
        "rank 2 sends at a tenth of the others' rate", Run("none", slow_link=SLOW_LINK), HEALTHY, causes=("link",)
    ),
    Question("data free", HEALTHY, Run("no_data"), answer="data_free"),
    Question("every link twice as fast", Run("none", LINKS), Run("none", TWICE), answer="link_twice_as_fast"),
)


class Seen(NamedTuple):
    """A run's step in ns, mean of what was recorded but the last, and what the analysis says of its traces."""

    step_ns: float
    job: TraceJob


class Answer(NamedTuple):
    """What a round said of a question: true and said saving in ns a step, the error stated; who and why, if named."""

    true_ns: float
    step_ns: float
    said_ns: float | None
    error_ns: float | None
    named: tuple[tuple[int, ...], str] | None


def seen(run: Run, net: Net) -> Seen:
    """Run a job and analyze its traces.

    Raises:
        RuntimeError: a rank failed; says what it said last.
    """
    net.change(run.links)
    if run.slow_link is not None:
        net.change(run.slow_link, only=SLOW)
    with tempfile.TemporaryDirectory() as folder:
        words = [JOB, folder, run.fault, str(SLOW)]
        environ = {"GLOO_SOCKET_IFNAME": net.device}
        ranks = start_ranks(words, RANKS, environ=environ, address=net.address, prefixes=net.prefixes)
        ended = finish(ranks)
        if any(rank.code != 0 for rank in ended):
            raise RuntimeError("\n".join(rank.err[-2000:] for rank in ended))
        # In the last the profiler ends, which takes it longer than many a change saves.
        steps = [statistics.fmean([int(word) for word in rank.out.split()][:-1]) for rank in ended]
        document = analyze_files(sorted(Path(folder).glob("*.json")))
    assert document.job is not None
    return Seen(statistics.fmean(steps), document.job)


def answered(question: Question, found: dict[Run, Seen]) -> Answer:
    """Return what was said of a question and what is true, of one round."""
    mine, other = found[question.run], found[question.without]
    said = error = named = None
    if question.answer == "verdict":
        first = next(iter(mine.job.stragglers), None)
        if first is not None:
            said, error, named = float(first.saved_ns), float(first.error_ns), (tuple(first.ranks), first.cause)
    else:
        one = next(one for one in mine.job.what_if if one.name == question.answer)
        said, error = one.saved_ns, one.error_ns
    return Answer(mine.step_ns - other.step_ns, mine.step_ns, said, error, named)


def lines(question: Question, answers: Sequence[Answer]) -> list[str]:
    """Return what to print of a question's rounds; times in ms a step."""
    steps, true = ([getattr(one, name) for one in answers] for name in ("step_ns", "true_ns"))
    found = [question.name, f"  a step takes {_spread(steps)}; true saving {_spread(true)}"]
    said = [one for one in answers if one.said_ns is not None]
    if said:
        stated = statistics.median(one.error_ns or 0.0 for one in said) / 1e6
        off = [100 * ((one.said_ns or 0.0) - one.true_ns) / one.step_ns for one in said]
        found.append(
            f"  said {_spread([one.said_ns or 0.0 for one in said])}, stated error {stated:.2f};"
            f" off by {statistics.median(off):+.1f} % of the step ({min(off):+.1f} to {max(off):+.1f})"
        )
    if question.answer == "verdict":
        right = sum(
            one.named is not None and one.named[0] == (SLOW,) and one.named[1] in question.causes for one in answers
        )
        others = sorted({f"{list(one.named[0])} {one.named[1]}" for one in answers if one.named is not None})
        found.append(
            f"  rank and cause right in {right} of {len(answers)} rounds; named: {', '.join(others) or 'no rank'}"
        )
    return found


def _spread(values: Sequence[float]) -> str:
    low, middle, high = (f(values) / 1e6 for f in (min, statistics.median, max))
    return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each job is run (default: %(default)s)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="ask only the questions whose names have this in them"
    )
    args = parser.parse_args(words)
    questions = [one for one in QUESTIONS if args.only in one.name]
    if not questions:
        parser.error(f"no question has {args.only!r} in it: {', '.join(one.name for one in QUESTIONS)}")
    reason = why_not()
    if reason is not None:
        parser.error(reason)
    runs = list(dict.fromkeys(run for one in questions for run in (one.run, one.without)))
    rounds: list[dict[Run, Seen]] = []
    with shaped(RANKS, FAST) as net:
        for turn in range(args.rounds):
            order = runs if turn % 2 == 0 else runs[::-1]
            rounds.append({run: seen(run, net) for run in order})
            sys.stderr.write(f"round {turn + 1} of {args.rounds}\n")
    for question in questions:
        sys.stdout.write("\n".join(lines(question, [answered(question, found) for found in rounds])) + "\n")
    healthy = [found[HEALTHY].job for found in rounds if HEALTHY in found]
    if not healthy:
        return
    named = sum(bool(job.stragglers) for job in healthy)
    errors = [abs(job.replay_error_ratio or 0.0) for job in healthy]
    sys.stdout.write(
        f"healthy job: a rank named in {named} of {len(healthy)} rounds;"
        f" replay off by {100 * statistics.median(errors):.2f} % (at most {100 * max(errors):.2f})\n"
    )


if __name__ == "__main__":
    main()
