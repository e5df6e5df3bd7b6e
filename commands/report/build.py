"""Builds the report's document: reads the records twice, then computes each figure from the sums.

A figure that cannot be known is None: the pace needs all ranks, money needs a price.  A notice explains it where that
would surprise the reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pacecar import __version__
from pacecar.formatting.plain_text import clean_values
from pacecar.ledger.attempts import JobLife
from pacecar.records import StepRecord
from pacecar.run_statistics import estimate_error, proven

from .document import Piece, Report, RunSide
from .figures import Interval, drift_ratio, ratio_interval, spread_of
from .formatting import elapsed
from .reading.attempts import AttemptSums
from .reading.before_after import BeforeAfterPlan, SettingStretch
from .reading.inputs import Inputs
from .reading.notices import ReportError, ReportNotices
from .reading.run_index import RunIndex, index_jobs
from .reading.step_join import join_steps
from .reading.step_sums import Bin, StepSumPart, StepSums
from .reading.windows import WindowSums, added
from .sections.communicators import communicators_of
from .sections.costs import Prices, cost_of
from .sections.events import changes_of, hang_verdicts_of, hangs_of, orders_of, slowdowns_of, stops_of
from .sections.hangs import ranks_word
from .sections.loss_log import read_losses
from .sections.rank_totals import mean_ledger, overhead_of, rank_rows, total_of
from .sections.utilization_rows import energies_of, utilization_of
from .significance import judge, noise_of

__all__ = ["BuildOptions", "Built", "build_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What the records do not hold: the job to report, prices, and the hook's budget for records without it."""

    job: str | None = None
    prices: Prices = field(default_factory=Prices)
    budget_ratio: float = 0.01


@dataclass(slots=True)
class Stretches:
    """The compared parts of a run, and the rates of their windows by (stretch, unit)."""

    unit: str
    parts: dict[str, StepSumPart]
    every: dict[tuple[str, str], list[float]]

    def rates(self, name: str) -> list[float]:
        """Return the rates of a stretch's windows; empty if it has no steps."""
        return self.every.get((name, self.unit), [])


class Built(NamedTuple):
    """A report, and the rates of its windows by (stretch, unit), for comparisons."""

    report: Report
    rates: dict[tuple[str, str], list[float]]


def build_report(inputs: Inputs, options: BuildOptions) -> Built:
    """Return the report of one run.

    Raises:
        ReportError: there is no usable record, or there are several jobs and none was chosen.
    """
    index = _choose_job(index_jobs(inputs.events()), inputs, options.job)
    ranks_of = {life: len(ranks) for life, (ranks, _) in index.worlds.items()}
    sums = StepSums(BeforeAfterPlan.of(index), _ranks_with_steps(inputs, index), ranks_of)
    attempts = AttemptSums(index)
    for key, measured in join_steps(inputs.steps_by_rank(), index.job, inputs.notices):
        sums.add(key, measured)
        attempts.add(key, measured)
    sums.complete(index.goodbyes, index.lives)
    has_steps = any(total.lives for total in sums.ranks.values())
    if not has_steps and not index.hellos:
        said = "; ".join(f"{notice.place}: {notice.text}" for notice in inputs.notices.list()[:3])
        raise ReportError(f"{inputs.name}: no step of job {index.job!r} can be read" + (f" ({said})" if said else ""))
    if has_steps:
        _check_ranks(inputs, index, sums)
    else:
        ranks = f"{len(index.hellos)} of {index.world_size} ranks introduced themselves"
        inputs.notices.add(inputs.name, "stepless", f"no step was recorded: {ranks}, and none ended a step")
    return _assemble(inputs, options, index, sums, attempts.life(inputs.name, inputs.notices))


def _choose_job(indexes: dict[str, RunIndex], inputs: Inputs, wanted: str | None) -> RunIndex:
    """Return the index of the job `wanted`, or of the only job.

    Raises:
        ReportError: there is no such job, or there are several and `wanted` is None.
    """
    if not indexes:
        # A file that lost its first records still names the job in its steps.
        for stream in inputs.steps_by_rank():
            for _, _, _, record in stream:
                indexes.setdefault(record.job, RunIndex(record.job))
                break
    names = sorted(indexes)
    if wanted is not None:
        if wanted not in indexes:
            raise ReportError(f"{inputs.name}: no record of job {wanted!r}; there are {', '.join(names) or 'none'}")
        return indexes[wanted]
    if not names:
        said = "; ".join(f"{notice.place}: {notice.text}" for notice in inputs.notices.list()[:3])
        raise ReportError(f"{inputs.name}: not one record can be read" + (f" ({said})" if said else ""))
    if len(names) > 1:
        each = ", ".join(f"{name} ({indexes[name].records} records)" for name in names[:8])
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise ReportError(f"{inputs.name} holds {len(names)} jobs: {each}{more}: choose one with --job NAME")
    return indexes[names[0]]


def _ranks_with_steps(inputs: Inputs, index: RunIndex) -> int:
    """Return how many ranks recorded any step, and so make a step complete; reads each file up to its first step."""
    found = 0
    for stream in inputs.steps_by_rank(ReportNotices()):
        found += any(isinstance(record, StepRecord) and record.job == index.job for _, _, _, record in stream)
    return max(1, found)


def _check_ranks(inputs: Inputs, index: RunIndex, sums: StepSums) -> None:
    """Add notices about missing ranks, restarts, clock changes and unknown parallelism."""
    notices, world = inputs.notices, index.world_size
    seen = {rank for rank, total in sums.ranks.items() if total.lives}
    if world is None:
        notices.add(inputs.name, "hello", "no rank introduced itself: world size, hosts and devices are unknown")
    elif missing := sorted(set(range(world)) - seen):
        text = f"ranks {_ranges(missing)} of {world} left no step here: pace and samples are those of the other ranks"
        # A recording covers one node only, so other ranks are not expected in it.
        notices.add(inputs.name, "missing", text, is_damage=inputs.recording is None)
    if len(index.lives) > 1:
        text = f"the job was attached {len(index.lives)} times in this folder; its steps begin at 0 each time"
        notices.add(inputs.name, "lives", text, is_damage=False)
    if sums.jumps_ns:
        text = f"the clock was set by {elapsed(sum(sums.jumps_ns))}: the time line is wrong there, sums are without it"
        notices.add(inputs.name, "clock", text, is_damage=False)
    if len(worlds := {world for _, world in index.worlds.values()}) > 1:
        text = f"the job had {' and '.join(map(str, sorted(worlds)))} ranks in turn: pace and cost are of both"
        notices.add(inputs.name, "elastic", text, is_damage=False)
    if _is_guessed(sums):
        text = (
            "samples are a guess: the first dimension of a tensor, which may be time or tokens;"
            " pacer.data(loader) or pacer.count(samples=...) counts them"
        )
        notices.add(inputs.name, "samples", text, is_damage=False)
    if not _is_data_parallel(index) and (world or 1) > 1:
        text = "ranks are not known to be data-parallel: samples and tokens are the sum over ranks all the same"
        notices.add(inputs.name, "parallel", text, is_damage=False)


def _ranges(numbers: Sequence[int]) -> str:
    """Format [1, 2, 3, 7] as "1-3, 7"."""
    pieces: list[list[int]] = []
    for number in numbers:
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in pieces[:12]]
    return ", ".join(said) + (" ..." if len(pieces) > 12 else "")


def _is_guessed(sums: StepSums) -> bool:
    """Return whether most steps' samples are guessed; a loop that draws no batch for a step has a few of those."""
    return 2 * sums.guessed_steps > sums.complete_steps


def _is_data_parallel(index: RunIndex) -> bool:
    return all(hello.world_size == 1 or hello.parallel == {"data": hello.world_size} for hello in index.hellos.values())


def _stretches(sums: StepSums, *, is_tuned: bool) -> Stretches:
    """Return before, after and the whole run, with the rates of their windows in the unit common to all."""
    run = sums.run
    unit = "samples" if run.windows.samples is not None else "steps"
    parts: dict[str, StepSumPart] = {}
    every: dict[tuple[str, str], list[float]] = {}
    chosen = {"whole": [run], "before": [sums.parts[SettingStretch.BEFORE]] if is_tuned else [run]}
    if is_tuned:
        chosen["after"] = [sums.parts[stretch] for stretch in sums.after_stretches()]
    for name, several in chosen.items():
        several = [part for part in several if part.windows.steps]
        if not several:
            continue
        joined = several[0]
        if len(several) > 1:
            joined = StepSumPart()
            for part in several:
                joined.join(part)
        parts[name] = joined
        for one in ("samples", "tokens", "steps"):
            every[name, one] = [rate for part in several for rate in part.windows.rates(one)]
        joined.windows = _windows(several)
    return Stretches(unit, parts, every)


def _windows(several: Sequence[StepSumPart]) -> WindowSums:
    if len(several) == 1:
        return several[0].windows
    total = WindowSums()
    total.steps_each = several[0].windows.steps_each
    for part in several:
        windows = part.windows
        total.steps += windows.steps
        total.rank_walls = added(total.rank_walls, windows.rank_walls)
        for name in ("samples", "tokens"):
            mine, theirs = getattr(total, name), getattr(windows, name)
            setattr(total, name, None if mine is None or theirs is None else mine + theirs)
    return total


def _side(part: StepSumPart, rates: Sequence[float]) -> RunSide:
    windows = part.windows
    assert part.first is not None, "a part that has steps"
    assert part.last is not None, "a part that has steps"
    assert part.first_wall_ns is not None, "a part that has steps"
    assert part.last_wall_ns is not None, "a part that has steps"
    seconds = windows.wall_ns / 1e9
    counts = (windows.samples, windows.tokens)
    samples, tokens = (None if count is None or seconds == 0 else count / seconds for count in counts)
    rate = spread_of(rates)
    p50, p95, p99 = (round(part.paces.percentile(share) or 0) for share in (0.5, 0.95, 0.99))
    return RunSide(
        first=part.first,
        last=part.last,
        began_wall_ns=part.first_wall_ns,
        ended_wall_ns=part.last_wall_ns,
        steps=windows.steps,
        windows=len(rates),
        window_steps=windows.steps_each,
        rate=rate,
        is_stable=None if rate is None else rate.is_stable,
        drift_ratio=drift_ratio(rates),
        samples_per_second=samples,
        tokens_per_second=tokens,
        step_mean_ns=windows.wall_ns // windows.steps,
        step_p50_ns=p50,
        step_p95_ns=p95,
        step_p99_ns=p99,
        step_max_ns=part.paces.high,
        ledger_ns=mean_ledger(part.ledger, part.ledger_steps, sees_data=part.sees_data),
        communication_ns=part.communication_ns // part.ledger_steps,
        overlap_ratio=part.overlapped_ns / part.communication_ns if part.communication_ns else None,
        knobs=dict(part.knobs),
    )


def _assemble(inputs: Inputs, options: BuildOptions, index: RunIndex, sums: StepSums, life: JobLife | None) -> Built:
    is_tuned = index.first_switch is not None
    stretches = _stretches(sums, is_tuned=is_tuned)
    sides = {name: _side(part, stretches.rates(name)) for name, part in stretches.parts.items()}
    before, after = sides.get("before"), sides.get("after")
    hosts, power, utilization = utilization_of(inputs, index, sums, stretches.parts, sides)
    launches = frozenset({hello.launch for hello in index.hellos.values()} | {""})  # older hooks have none
    energy_before, energy_after = energies_of(inputs, index.job, launches, hosts, before, after)
    if before is None and sums.ranks:
        text = "the run ended in its warm-up, or no step was measured by all ranks: there is nothing to compare"
        inputs.notices.add(inputs.name, "short", text, is_damage=False)
    hello = index.hellos.get(min(index.hellos, default=0))
    ranks = rank_rows(index, sums)
    lives = max((len(total.lives) for total in sums.ranks.values()), default=1)
    began = sums.line.start_ns
    hangs = hangs_of(index, sums)
    if hung := sorted({hang.rank for hang in hangs if not hang.is_over}):
        text = f"{ranks_word(hung, index.world_size)} hung and {'was' if len(hung) == 1 else 'were'} not seen to go on:"
        inputs.notices.add(inputs.name, "hung", f"{text} this is what was recorded before")
    changes = changes_of(index)
    together = proven(change for change in changes if change.is_in_force)
    change, noise, verdict, why = _before_after(stretches) if after is not None else (None, None, None, None)
    report = Report(
        pacecar_version=__version__,
        run=inputs.name,
        job=index.job,
        world_size=index.world_size,
        ranks_seen=sum(bool(total.lives) for total in sums.ranks.values()),
        lives=lives,
        hosts=tuple(sorted({one.host for one in index.hellos.values()})),
        device=hello.device if hello is not None else None,
        backend=hello.backend if hello is not None else None,
        framework=hello.framework if hello is not None else None,
        recorded_by=hello.pacecar_version if hello is not None else None,
        is_data_parallel=_is_data_parallel(index),
        began_wall_ns=began,
        duration_ns=sums.run_ns,
        steps=max((row.steps for row in ranks), default=0),
        samples=total_of(sums, "total_samples"),
        samples_guessed=_is_guessed(sums),
        tokens=total_of(sums, "total_tokens"),
        compared_steps=sums.complete_steps,
        incomplete_steps=sums.incomplete_steps,
        is_sampled=sums.is_sampled,
        rate_unit=stretches.unit,
        is_tuned=is_tuned,
        before=before,
        after=after,
        whole=sides.get("whole"),
        change=change,
        change_verdict=verdict,
        change_why=why,
        change_noise_ratio=noise,
        proven_gain_ratio=together.ratio,
        proven_gain_low=together.low,
        proven_gain_high=together.high,
        changes=changes,
        orders=orders_of(index),
        tuner=index.tuner,
        ladder=index.last_ladder,
        utilization=utilization,
        ranks=ranks,
        slowdowns=slowdowns_of(index),
        hangs=hangs,
        hang_verdicts=hang_verdicts_of(index),
        stops=stops_of(index),
        estimate_error=estimate_error(index.checks),
        overhead=overhead_of(index, sums, changes, options.budget_ratio),
        energy_before=energy_before,
        energy_after=energy_after,
        power=power,
        cost=cost_of(options.prices, index.world_size or len(ranks), len(ranks), sides, sums.run_ns),
        losses=read_losses(inputs.losses, inputs.notices) if inputs.losses is not None else None,
        line_start_wall_ns=began,
        line_width_ns=sums.line.width_ns,
        line=tuple(_piece(place * sums.line.width_ns, one) for place, one in sorted(sums.line.bins.items())),
        communicators=communicators_of(inputs, index.hellos.values()),
        life=life,
        notices=inputs.notices.list(),
    )
    return Built(clean_values(report), stretches.every)  # names, reasons and hosts come from files


def _before_after(stretches: Stretches) -> tuple[Interval | None, float | None, str, str]:
    """Return the change of the rate, the noise, the verdict and its reason."""
    before, after = stretches.rates("before"), stretches.rates("after")
    change, noise = ratio_interval(before, after), noise_of(before, after)
    return change, noise, *judge(change, noise, "stretch")


def _piece(at_ns: int, one: Bin) -> Piece:
    rate = None
    if one.pace_ns > 0 and one.samples is not None:
        rate = one.samples * 1e9 / one.pace_ns
    return Piece(
        at_ns=at_ns,
        rank_steps=one.rank_steps,
        ledger_ns=mean_ledger(one.ledger, one.rank_steps, sees_data=one.sees_data),
        pace_ns=one.pace_ns // one.steps if one.steps else None,
        rate=rate,
    )
