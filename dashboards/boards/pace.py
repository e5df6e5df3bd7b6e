"""Builds the job dashboard's rows "Pace" and "Ranks side by side": how fast the job is, and which ranks are late.

The pace is that of the slowest rank, because the others wait for it; a mean over ranks would hide it.
"""

from __future__ import annotations

from pacecar.config import HookConfig

from ..palette import BAD, GOOD, WARN
from ..panels import Query, Section, in_order, look, stat, time_series
from ..queries import ONE_JOB, RANK, combine, divide
from .ledgers import share_of_step

__all__ = ["CAUSES", "NO_JOB", "NO_TOKENS", "crew_section", "pace_section"]

NO_JOB = "No job has reported here yet"
NO_TOKENS = "The job does not report its tokens"

PHASES = ("data_wait", "forward", "backward", "optimizer", "tail")
CAUSES = ("compute", "data_wait", "host_bound", "optimizer_host", "checkpoint", "link", "throttled")
"""The values of `Cause` that the running job's comparison of ranks names."""

RANKS_DRAWN = 16
"""Lines of a panel by rank: a thousand would freeze the browser, and the slowest matter."""

GUESSED = " (samples are a guess where pacecar_job_samples_guessed is 1)"
"""Part of the help of each panel about samples."""

_BUDGET = HookConfig().overhead_budget

select, rate, increase, mean_of = ONE_JOB.select, ONE_JOB.rate, ONE_JOB.increase, ONE_JOB.mean_of


def pace_section() -> Section:
    """Return the row about the job's speed."""
    slowest = combine("max", mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total", all_ranks=True))
    samples = combine("sum", rate("pacecar_job_samples_total", all_ranks=True))
    tokens = combine("sum", rate("pacecar_job_tokens_total", all_ranks=True))
    by_rank = mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total")
    pace = combine("max", select("pacecar_job_pace_seconds"))
    baseline = combine("min", ONE_JOB.fast_times("pacecar_job_pace_seconds"))
    hung = combine("max", select("pacecar_job_hang_verdict", all_ranks=True), RANK, "kind")
    return Section("Pace", [
        (2, 4, stat("Ranks", "Ranks that report. If fewer than the world size, some do not report.",
            [Query(combine("count", select("pacecar_rank_info", all_ranks=True)), "ranks")],
            unit="none", empty=NO_JOB)),
        (2, 4, stat("Step", "The last step that any rank reported.",
            [Query(combine("max", select("pacecar_job_step", all_ranks=True)), "step")], unit="none", empty=NO_JOB)),
        (3, 4, stat("Step time", "Mean step time of the slowest rank: the pace of the job.",
            [Query(slowest, "slowest rank")], unit="s", empty=NO_JOB)),
        (3, 4, stat("Samples/s", f"Samples per second of all ranks together{GUESSED}.",
            [Query(samples, "samples/s")], unit="short", empty="The hook cannot count samples")),
        (3, 4, stat("Tokens/s", "Tokens per second of all ranks together.",
            [Query(tokens, "tokens/s")], unit="short", empty=NO_TOKENS)),
        (3, 4, stat("Exposed", "Share of the step in which communication ran and no compute did.",
            [Query(share_of_step("exposed_communication"), "exposed")], unit="percentunit", empty=NO_JOB,
            thresholds=[(0.0, GOOD), (0.05, WARN), (0.15, BAD)], decimals=1)),
        (3, 4, stat("Overhead", "Share of step time that pacecar itself takes; coloured from half the default budget.",
            [Query(divide(combine("sum", rate("pacecar_job_overhead_seconds_total", all_ranks=True)),
                          combine("sum", rate("pacecar_job_step_wall_seconds_total", all_ranks=True))), "overhead")],
            unit="percentunit", empty=NO_JOB, decimals=2,
            thresholds=[(0.0, GOOD), (_BUDGET / 2, WARN), (_BUDGET, BAD)])),
        (2, 4, stat("Silent", "Time since the most silent rank last reported.",
            [Query(combine("max", select("pacecar_job_last_record_age_seconds", all_ranks=True)), "age")],
            unit="s", empty=NO_JOB, thresholds=[(0.0, GOOD), (30.0, WARN), (120.0, BAD)])),
        (3, 4, stat("Hang", "How the job is held up, and the number of the rank that does it, if one is named.",
            [Query(f"{hung} > 0", f"{{{{kind}}}} {{{{{RANK}}}}}")], unit="none", empty="No hang", show="name",
            thresholds=[(0.0, BAD)])),
        (8, 7, time_series("Step time by rank", "Mean time of all steps in the window; of many ranks the "
            f"{RANKS_DRAWN} slowest.", [Query(f"topk({RANKS_DRAWN}, {by_rank})", f"rank {{{{{RANK}}}}}")],
            unit="s", empty=NO_JOB)),
        (8, 7, time_series("Pace against its own baseline", "The pace over the job's own fast pace, the 10th "
            "percentile of the range shown: 10 % means that a step takes a tenth longer than this job can do.",
            [Query(f"{pace} / scalar({baseline}) - 1", "slower by")], unit="percentunit", soft_limit=0.12,
            empty="The ranks are not compared: see the log of rank 0", thresholds=[(0.1, WARN), (0.25, BAD)])),
        (8, 7, time_series("Throughput", f"Samples per second of all ranks together{GUESSED}; tokens on the right.", [
                Query(samples, "samples/s"),
                Query(tokens, "tokens/s"),
            ], unit="short", empty="The hook counts neither samples nor tokens",
            overrides=[look("tokens/s", custom__axisPlacement="right")])),
        (24, 7, time_series("Step time: median and slowest", "Percentiles of all ranks' steps in the window. If p99 "
            "rises and the median does not, some steps wait for a checkpoint, a loader or garbage collection. With "
            "native histograms the error is 2 %, otherwise it depends on the buckets.",
            [Query(ONE_JOB.percentile(share, "pacecar_job_step_duration_distribution_seconds"), name)
             for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))], unit="s", low=0, empty=NO_JOB)),
    ])  # fmt: skip


def crew_section() -> Section:
    """Return the row that compares the ranks."""
    late = select("pacecar_job_straggler_excess_seconds", all_ranks=True)
    last = select("pacecar_job_step_duration_seconds", all_ranks=True)
    waits = divide(
        combine("sum", rate("pacecar_job_phase_seconds_total", all_ranks=True), "phase"),
        combine("sum", rate("pacecar_job_phase_seconds_total", all_ranks=True)),
        matching="on () group_left ()",
    )
    return Section("Ranks side by side", [
        (12, 8, time_series("Stragglers", "How much the step of a late rank exceeds the other ranks' median while it "
            "is late, which the job would gain. Without a rank: all wait for an unidentified link.",
            [Query(late, f"rank {{{{{RANK}}}}}: {{{{cause}}}}")], unit="s", empty="No rank is late")),
        (12, 8, time_series("Pace of the slowest and the median rank", "Mean step over the last steps compared.", [
                Query(combine("max", select("pacecar_job_pace_seconds", all_ranks=True)), "slowest"),
                Query(combine("max", select("pacecar_job_median_pace_seconds", all_ranks=True)), "median"),
            ], unit="s", empty="The ranks are not compared: see the log of rank 0")),
        (8, 7, time_series("Spread of the last step", "The slowest rank sets the pace; the distance to the median "
            "is the cost of a straggler.", [
                Query(combine("max", last), "slowest"),
                Query(combine("quantile(0.5)", last), "median"),
                Query(combine("min", last), "fastest"),
            ], unit="s", empty=NO_JOB)),
        (8, 7, time_series("Phases of the step", "Host time of the last step's phases, mean of the ranks. On a GPU "
            "the host runs ahead: read the ledger for where device time went.",
            [Query(combine("avg", select("pacecar_job_step_phase_duration_seconds"), "phase"), "{{phase}}")],
            unit="s", empty=NO_JOB, overrides=in_order(*PHASES))),
        (8, 7, time_series("Host time of all ranks", "Share of all ranks' time by phase of the step. "
            "The tail is the wait for the last all-reduces.", [Query(waits, "{{phase}}")],
            unit="percentunit", empty="The ranks are not compared: see the log of rank 0", stacked=True, limit=1.0,
            overrides=in_order(*PHASES))),
        (8, 6, time_series("Found late so far", "Times that a rank was found late since the job began, by cause.",
            [Query(combine("sum", select("pacecar_job_stragglers_total", all_ranks=True), "cause"), "{{cause}}")],
            unit="none", empty="No rank was late", stepped=True, low=0, overrides=in_order(*CAUSES))),
        (8, 6, time_series("Garbage collection and torch.compile", "Share of time for which Python's collector stops a "
            "rank, and for which it compiles. Compilations long after the start are recompilations.", [
                Query(rate("pacecar_job_garbage_collection_seconds_total"), f"collects, rank {{{{{RANK}}}}}"),
                Query(rate("pacecar_job_compilation_seconds_total"), f"compiles, rank {{{{{RANK}}}}}"),
            ], unit="percentunit", empty=NO_JOB)),
        (8, 6, time_series("Hangs", "Ranks that have ended no step for suspiciously long, and new suspicions.", [
                Query(combine("sum", select("pacecar_job_hang_suspected", all_ranks=True)), "now"),
                Query(combine("max", select("pacecar_job_hang_silent", all_ranks=True), "rank") + " > 0",
                      "rank {{rank}} is silent"),
                Query(combine("max", select("pacecar_job_hang_verdict", all_ranks=True), RANK, "kind"),
                      "rank {{rank}}: {{kind}}"),
                Query(combine("sum", increase("pacecar_job_hangs_total", all_ranks=True)), "begun in the window"),
            ], unit="none", empty="No hang was suspected")),
    ])  # fmt: skip
