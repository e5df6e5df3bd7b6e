"""Measures how often the verdict of `pacecar analyze` names the right ranks and cause, on simulated jobs.

Jobs of all layouts are drawn, healthy or with one or two faults that cost 3 to 40 % of the wall time
(`tests/kit/simulated_jobs/acceptance.py`).  Each is simulated, analyzed from its traces, and judged against the truth
(`causal_figures`).  Jobs depend on `--seed`; seeds that were used while improving the model are not held out.

    --misses               also print each fault that was not named rightly
    --late-us              all ranks of a host leave collectives later by this, as behind a slow link: from the ends of
                           collectives that looks like a wrong clock
    --kernel-noise         variation of kernels in healthy jobs; hosts of loud jobs still stop
    --form                 only certain faults, or traces of certain forms (`FORMS` in `acceptance.py`): hosts without
                           names, links shared by groups, rows of the device alone
    --condensed            traces are condensed, sent and read again, as in a cross-rank window of a running job
    --exponential-stops    stops of healthy loud jobs have a mean of 3 ms instead of exactly 3 ms
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds its own folder only
from bench.causal_figures import Case, ClockError, Named, Planted, falsely_named, lines, outcomes
from pacecar.analysis.all_ranks.rank_comparison import analyze_job
from pacecar.analysis.document.report import TraceJob
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.one_rank.trace_bytes import decode_trace, encode_trace
from pacecar.analysis.output.words import untold_words
from pacecar.analysis.reading.rank_window import prepared
from tests.kit.simulated_jobs import Run, Truth, simulate
from tests.kit.simulated_jobs.acceptance import (
    FORMS,
    KINDS,
    LARGE_KINDS,
    SPANNING_KINDS,
    healthy_jobs,
    planted_faults,
)


def judged(truth: Truth, seed: int, number: int, *, is_condensed: bool = False) -> Case:
    """Analyze one simulated job and put what was said beside what is true."""
    run = truth.run
    traces = run.traces()
    if is_condensed:
        traces = [decode_trace(encode_trace(prepared(trace, [])), trace.file) for trace in traces]
    job = analyze_job(traces, [analyze_trace(trace) for trace in traces])
    wall = run.step_ns if run.job.has_host_rows else run.wall_ns  # a step is known where traces mark it
    return Case(
        seed=seed,
        number=number,
        layout=layout_words(run),
        ranks=run.job.layout.ranks,
        is_loud=run.job.noise.hiccup_ratio > 0,
        planted=tuple(Planted(one.fault.kind, one.told, one.causes, one.saved_ratio) for one in truth.culprits),
        named=tuple(
            Named(one.kind, tuple(one.ranks), one.cause, one.saved_ns / wall, one.error_ns / wall)
            for one in job.stragglers
        ),
        clocks=clock_errors(run, job),
        replay_error_ratio=job.replay_error_ratio,
        is_told=untold_words(job) is None,
    )


def layout_words(run: Run) -> str:
    """Return the layout in short: ddp 16, tp 4 x pp 2 (1f1b) x fsdp 8."""
    layout, model = run.job.layout, run.job.model
    parts = [f"tp {layout.tensor}"] if layout.tensor > 1 else []
    if layout.pipeline > 1:
        parts.append(f"pp {layout.pipeline} ({model.schedule})")
    if layout.data > 1:
        parts.append(f"{'fsdp' if layout.is_sharded else 'ddp'} {layout.data}")
    return ("cpu " if run.job.is_cpu else "") + " x ".join(parts)


def clock_errors(run: Run, job: TraceJob) -> tuple[ClockError, ...]:
    """Return how wrong each host's clock is against the first's, in the middle of what was recorded."""
    layout = run.job.layout
    middle = (run.step_bounds_ns[:, 0].min() + run.step_bounds_ns[:, -1].max()) // 2
    shown = [int(clock.show(middle)) for clock in run.clocks]
    found = []
    for host in range(1, layout.hosts):
        clock = job.clocks[layout.ranks_of_host(host)[0]]
        error = clock.offset_ns - (shown[0] - shown[host])
        tied = clock.method == "collectives"
        found.append(
            ClockError(float(error), float(clock.standard_error_ns) if tied and clock.standard_error_ns else None)
        )
    return tuple(found)


def drawn(args: argparse.Namespace) -> Iterator[tuple[int, Truth]]:
    """Yield the jobs of this run with their numbers, planted ones first."""
    form = FORMS[args.form]
    kinds = args.kinds or [kind for kind in KINDS if form.has_host_rows or kind != "cpu"]
    for is_loud, planted, healthy in ((False, args.planted, args.healthy), (True, args.loud, args.healthy_loud)):
        yield from planted_faults(args.seed, planted, loud=is_loud, kinds=kinds, first=args.first, form=form)
        some = healthy_jobs(args.seed, healthy, loud=is_loud, kinds=kinds, first=args.first, form=form)
        for number, job in enumerate(some, args.first):
            noise = replace(job.noise, lateness_ns=1e3 * args.late_us)
            if args.kernel_noise is not None:
                noise = replace(noise, kernel_ratio=args.kernel_noise)
            noise = replace(noise, has_exponential_hiccups=args.exponential_stops)
            yield number, Truth(simulate(replace(job, noise=noise)))
    yield from planted_faults(args.seed, args.large, kinds=[*LARGE_KINDS], first=args.first)


def misses(case: Case) -> list[str]:
    """Return a line for each fault that was not right, and for ranks named without a fault."""
    planted = [
        f"{one.word}: {one.fault.kind} of {list(one.fault.ranks or ())[:8]}, {one.fault.saved_ratio:.1%}"
        for one in outcomes(case)
        if one.word != "right"
    ]
    false = [
        f"false: {one.kind} {list(one.ranks)[:8]} {one.cause} {one.saved_ratio:.1%}" for one in falsely_named(case)
    ]
    noise = "loud" if case.is_loud else "quiet"
    return [f"  draw {case.number} ({noise}, {case.layout}): {words}" for words in planted + false]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--planted", type=int, default=60, help="quiet jobs with faults")
    parser.add_argument("--loud", type=int, default=30, help="loud jobs with faults: kernels vary by 3 %%, hosts stop")
    parser.add_argument("--healthy", type=int, default=60, help="healthy quiet jobs")
    parser.add_argument("--healthy-loud", type=int, default=30, help="healthy loud jobs")
    parser.add_argument("--large", type=int, default=0, help="jobs of 256 to 1024 ranks with faults; minutes each")
    parser.add_argument("--first", type=int, default=0, help="draw to begin with, as of a miss")
    parser.add_argument("--late-us", type=float, default=0.0, help="mean by which a host leaves collectives later")
    parser.add_argument("--kernel-noise", type=float, help="of healthy jobs, in place of theirs")
    parser.add_argument("--exponential-stops", action="store_true", help="stops of healthy loud jobs: of any length")
    kinds = [*KINDS, *SPANNING_KINDS]
    parser.add_argument("--kinds", nargs="+", choices=kinds, help="only these kinds of jobs")
    parser.add_argument("--form", choices=[*FORMS], default="usual", help="of the jobs, their faults and their traces")
    parser.add_argument("--condensed", action="store_true", help="traces as in a cross-rank window of a running job")
    parser.add_argument("--misses", action="store_true", help="list each fault that was not right")
    args = parser.parse_args(words)
    begun, cases = time.process_time(), []
    for number, truth in drawn(args):
        cases.append(judged(truth, args.seed, number, is_condensed=args.condensed))
        if args.misses:
            sys.stdout.write("".join(f"{line}\n" for line in misses(cases[-1])))
            sys.stdout.flush()
    sys.stdout.write("\n".join(lines(cases)) + "\n")
    sys.stdout.write(f"seed {args.seed}, {len(cases)} jobs, {time.process_time() - begun:.0f} s of the processor\n")


if __name__ == "__main__":
    main()
