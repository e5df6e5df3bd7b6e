"""Defines the alerts about jobs, their tuning, and pacecar itself."""

from __future__ import annotations

from pacecar.config import DaemonConfig, HookConfig

from ..queries import CLUSTER, JOB, LAUNCH, NODE, RANK, combine
from .alerts import Alert, Group
from .recording import BASELINE, DAEMON, DAEMON_BUDGET_USED, LOOKS_BACK, OVERHEAD, PACE, RULES, SAMPLES, TARGET, TOKENS

__all__ = ["ITSELF_ALERTS", "JOB_ALERTS"]

OF_JOB = (CLUSTER, JOB, LAUNCH)
"""Not the name alone, because two jobs may share it."""

REMEMBERED = "6h"
"""How far back the step that a job had reached is looked for; a longer range query is expensive."""

LATE_RATIO = 0.1
"""A tenth of the pace: more than a knob is likely to gain."""

STALL_SECONDS, STALL_STEPS = DaemonConfig().stall_seconds, 20
"""As in the flight recorder (`monitor/recorder/triggers.py`), which writes a recording at the same time: a job is
stalled only after the time of this many steps."""

SPEAKS_SECONDS = 240
"""A rank counts for its job if it ended a step less than this ago.  Shorter than the five minutes that alerts wait,
because the daemon keeps a job's last values for a while after its end, also if it restarts on other nodes."""

SLOWER_RATIO = 0.25
"""As the red threshold of the Fleet dashboard; less is often due to data, neighbours or the time of day."""

STILL_AS_FAST = 0.9
"""A job with this share of its best throughput is not slower: its steps became larger."""

QUIET_SECONDS = 60
"""A rank of a hung job that ended no step for this long and does not report a hang itself is stopped or gone.  Ranks
suspect a hang within a second of each other, and the alert waits another minute."""

DAEMON_OVER = 1.2
"""The daemon slows down when it reaches its budget; a fifth over it means that this does not help."""

RESTARTS_IN_30_MINUTES = 3
"""An upgrade and a change of settings make two."""

_BUDGET = HookConfig().overhead_budget


def _increase(metric: str, window: str, *labels: str) -> str:
    return combine("sum", RULES.increase(metric, window=window), *labels)


def _stays_failed() -> str:
    """Return the failed collectors, without that of GPUs while a GPU is down, which has its own alert."""
    failed = RULES.select("pacecar_collector_outcome", {"outcome": "failed"}) + " == 1"
    down = f'label_replace({RULES.select("pacecar_gpu_down")} == 1, "collector", "gpu", "", "")'
    return f"{failed} unless on ({CLUSTER}, {NODE}, collector) {down}"


def _late() -> str:
    """Return the excess of each late rank as a share of its job's pace."""
    excess = combine("max", RULES.select("pacecar_job_straggler_excess_seconds"), *OF_JOB, RANK, "cause")
    return f"{excess} / on ({', '.join(OF_JOB)}) group_left () ({PACE.name} > 0)"


def _silent() -> str:
    """Return for how long no connected rank of a job has ended a step.

    The daemon keeps a job for a while after its end; `process_info` has only connected ranks.  The node is matched too,
    because a job that restarts elsewhere has processes there, but its old ranks are here.
    """
    age = RULES.select("pacecar_job_last_record_age_seconds")
    connected = RULES.select("pacecar_process_info", {JOB: "!="})
    return combine("min", f"{age} and on ({', '.join((CLUSTER, NODE, JOB, LAUNCH, RANK))}) {connected}", *OF_JOB)


def _patience() -> str:
    """Return how long a job may end no step before it counts as stalled."""
    step = combine("max", RULES.select("pacecar_job_step_duration_seconds"), *OF_JOB)
    return f"clamp_min({STALL_STEPS} * {step}, {STALL_SECONDS:g})"


def _speaking(expression: str, *labels: str) -> str:
    """Return `expression` for jobs (or for ranks, with that label) that still end steps on that node."""
    age = RULES.select("pacecar_job_last_record_age_seconds")
    return f"{expression} and on ({', '.join((CLUSTER, NODE, JOB, LAUNCH, *labels))}) ({age} < {SPEAKS_SECONDS})"


def _trains_again() -> str:
    """Return how many steps a restarted job still has to train again, by name: a new start is a new launch."""
    labels, step = (CLUSTER, JOB), RULES.select("pacecar_job_global_step")
    reached = combine("max", f"max_over_time({step}[{REMEMBERED}])", *labels)
    restarted = combine("max", RULES.select("pacecar_job_attempt"), *labels)
    on = f"on ({', '.join(labels)})"
    return f"{reached} - {on} {combine('max', _speaking(step, RANK), *labels)} > 0 and {on} {restarted} > 0"


def _slower() -> str:
    """Return how much slower a job is than its own fast times, as a share, if its throughput fell as well."""
    of_job = f"on ({', '.join(OF_JOB)})"
    slower = f"{PACE.name} / {BASELINE.name} - 1 > {SLOWER_RATIO}"
    for rate in (SAMPLES, TOKENS):
        slower += f" unless {of_job} {rate.name} > {STILL_AS_FAST} * quantile_over_time(0.9, {rate.name}[{LOOKS_BACK}])"
    age = combine("min", RULES.select("pacecar_job_last_record_age_seconds"), *OF_JOB)
    return f"({slower}) and {of_job} {age} < {SPEAKS_SECONDS}"


def _hung() -> str:
    """Return the ranks that a hung job waits for or, if unknown, how many ranks wait, without a rank.

    They are those in the job's own verdict, if there is one.  Without it they are ranks on any node that send nothing,
    as a stopped process does, or else the ranks that have started fewer collectives than the others, if they are a
    minority.
    """
    of_job, of_rank = f"on ({', '.join(OF_JOB)})", f"on ({', '.join((*OF_JOB, RANK))})"
    suspected = combine("max", RULES.select("pacecar_job_hang_suspected"), *OF_JOB, RANK) + " > 0"
    many = combine("sum", RULES.select("pacecar_job_hang_suspected"), *OF_JOB) + " > 0"
    age = combine("min", RULES.select("pacecar_job_last_record_age_seconds"), *OF_JOB, RANK)
    silent = f"({age} > {QUIET_SECONDS} and {of_job} ({many}) unless {of_rank} ({suspected}))"
    begun = combine("max", RULES.select("pacecar_job_hang_collectives"), *OF_JOB, RANK)
    behind = f"({begun} < {of_job} group_left () {combine('max', begun, *OF_JOB)})"
    few = f"(2 * {combine('count', behind, *OF_JOB)} < {combine('count', begun, *OF_JOB)})"
    verdict = combine("max", RULES.select("pacecar_job_hang_verdict", {RANK: "!="}), *OF_JOB, RANK, "kind") + " > 0"
    seen = f"{silent} or {of_job} ({behind} and {of_job} {few}) or {of_job} ({many})"
    return f"{verdict} or ({seen}) unless {of_job} ({verdict})"


def _epoch(operation: str) -> str:
    return combine(operation, _speaking(RULES.select("pacecar_knob_epoch"), RANK), *OF_JOB)


JOB_ALERTS = Group("pacecar-job", (
    Alert("PacecarStraggler", f"{_late()} > {LATE_RATIO}", "2m", "warning",
        "Rank {{ $labels.rank }} of {{ $labels.training_job }} holds the job up: {{ $labels.cause }}",
        "Its step is longer than the others' median by {{ $value | humanizePercentage }} of the job's pace. Without a "
        "rank: all wait for an unidentified link."),
    Alert("PacecarJobSlower", _slower(), "15m", "warning",
        "{{ $labels.training_job }} is slower than it was",
        "A step takes {{ $value | humanizePercentage }} longer than in this job's own fast times of the last six "
        "hours, and its throughput has fallen."),
    Alert("PacecarJobHangs", _hung(), "1m", "critical",
        "{{ $labels.training_job }} may hang{{ with $labels.rank }}: look at rank {{ . }}{{ end }}",
        "Ranks have ended no step for suspiciously long. {{ with $labels.rank }}Most likely they wait for rank "
        "{{ . }}. {{ end }}{{ with $labels.kind }}Why ({{ . }}): see the page, `pacecar top` "
        "or the log of the rank that judged. {{ end }}The daemon has written a recording of the minutes before."),
    Alert("PacecarJobStalled", f"{_silent()} > {_patience()}", "0m", "critical",
        "{{ $labels.training_job }} is stalled",
        "No rank has ended a step for {{ $value | humanizeDuration }}, though its processes exist."),
    Alert("PacecarJobTrainsAgain", _trains_again(), "10m", "warning",
        "{{ $labels.training_job }} trains steps again after a restart",
        "It is still {{ printf \"%.0f\" $value }} steps behind what it had reached, ten minutes after it resumed. "
        "Checkpoints are further apart than restarts allow."),
    Alert("PacecarJobOutOfMemory", _increase("pacecar_job_memory_out_of_memory_total", "10m", *OF_JOB) + " > 0", "0m",
        "warning", "{{ $labels.training_job }} runs out of device memory",
        "The allocator raised {{ printf \"%.0f\" $value }} out-of-memory errors in the last ten minutes."),
    Alert("PacecarTuningFrozen",
        combine("max", _speaking(RULES.select("pacecar_tuner_state", {"state": "frozen"})), *OF_JOB) + " == 1", "10m",
        "warning",
        "Tuning of {{ $labels.training_job }} is frozen",
        "The tuner has stopped. The job continues with the current settings."),
    Alert("PacecarKnobsApart",
        f"{_epoch('max')} - {_epoch('min')} > 0", "5m", "critical",
        "Ranks of {{ $labels.training_job }} run different knobs",
        "The newest and the oldest knob epoch have differed by {{ printf \"%.0f\" $value }} for five minutes, among "
        "ranks that still report steps."),
))  # fmt: skip

ITSELF_ALERTS = Group("pacecar-itself", (
    Alert("PacecarOverheadOverBudget", f"{OVERHEAD.name} > {_BUDGET:g}", "15m", "warning",
        "pacecar takes {{ $value | humanizePercentage }} of the steps of {{ $labels.training_job }}",
        f"That is more than the default budget of {_BUDGET:.0%}. If the job sets a higher `overhead_budget`, raise the "
        "bound of this alert."),
    Alert("PacecarHookOff",
        combine("count", _speaking(RULES.select("pacecar_job_hook_measuring") + " == 0", RANK), *OF_JOB) + " > 0", "5m",
        "warning",
        "The hook of {{ $labels.training_job }} turned itself off",
        "{{ printf \"%.0f\" $value }} ranks no longer measure steps, because measuring alone exceeded the budget."),
    Alert("PacecarRecordsDropped", _increase("pacecar_job_records_dropped_total", "10m", *OF_JOB) + " > 0", "10m",
        "warning", "Hooks of {{ $labels.training_job }} drop records",
        "{{ printf \"%.0f\" $value }} records were dropped in the last ten minutes, because the daemon was full, gone "
        "or slow. Totals are correct, but detail is missing."),
    Alert("PacecarFramesRefused",
        _increase("pacecar_inbox_frames_refused_total", "15m", CLUSTER, NODE, "refusal") + " > 0", "5m", "warning",
        "The daemon of {{ $labels.instance }} refuses frames: {{ $labels.refusal }}",
        "{{ printf \"%.0f\" $value }} frames were refused in the last 15 minutes. Its log says whose."),
    Alert("PacecarRanksLeftOut", _increase("pacecar_inbox_left_out_total", "15m", CLUSTER, NODE, "kind") + " > 0", "0m",
        "warning", "The daemon of {{ $labels.instance }} has no room for more ({{ $labels.kind }})",
        "{{ printf \"%.0f\" $value }} ranks were refused in the last 15 minutes and are on no dashboard."),
    Alert("PacecarCollectorFailed", _stays_failed(), "15m", "warning",
        "Collector {{ $labels.collector }} of {{ $labels.instance }} stays failed",
        "It failed in each tick of the last 15 minutes. What it could not read has no series; page and log tell why."),
    Alert("PacecarDaemonOverBudget", f"{DAEMON_BUDGET_USED.name} > {DAEMON_OVER}", "15m", "warning",
        "The daemon of {{ $labels.instance }} exceeds its CPU budget",
        "Its CPU time is {{ $value | humanizePercentage }} of its budget "
        f"(`cpu_budget`, {DaemonConfig().cpu_budget:.0%} of one processor by default)."),
    Alert("PacecarDaemonGone",
        # A target that does not answer has the next alert.
        f"{DAEMON} offset 15m unless on ({CLUSTER}, {NODE}) {RULES.select('pacecar_build_info')} "
        f"unless on ({CLUSTER}, {NODE}, job) up", "5m", "warning",
        "The daemon of {{ $labels.instance }} is no longer scraped",
        "It was scraped 15 minutes ago, and now Prometheus has no such target. Nothing is known about this node, and "
        "none of its other alerts can fire."),
    Alert("PacecarDaemonNotAnswering",
        f"up == 0 and on ({CLUSTER}, {NODE}, job) {TARGET.name}", "1m", "warning",
        "The daemon of {{ $labels.instance }} serves no numbers",
        "It has ended, hangs, or answers 503 because its newest numbers are old. Nothing is known about this node, "
        "and none of its other alerts can fire."),
    Alert("PacecarDaemonRestarting",
        f"changes({RULES.select('pacecar_daemon_start_time_seconds', {NODE: '!~.+/.+'})}[30m])"
        f" >= {RESTARTS_IN_30_MINUTES}", "0m", "warning", "The daemon of {{ $labels.instance }} keeps restarting",
        "It has restarted {{ printf \"%.0f\" $value }} times in the last half hour."),
    Alert("PacecarDaemonFault",
        _increase("pacecar_daemon_faults_total", "15m", CLUSTER, NODE, "part") + " > 0 or "
        + _increase("pacecar_daemon_thread_restarts_total", "15m", CLUSTER, NODE, "thread") + " > 0 or "
        + combine("max", RULES.select("pacecar_daemon_thread_up") + " == 0", CLUSTER, NODE, "thread"), "0m", "warning",
        "The daemon of {{ $labels.instance }} has a bug: {{ $labels.part }}{{ $labels.thread }}",
        "It was contained and cost one job, collector, hook, page or step of a tick its numbers, or a thread failed. "
        "The daemon's log has the traceback."),
    Alert("PacecarSettingsNotLoaded",
        RULES.select("pacecar_daemon_config_last_reload_successful") + " == 0", "5m", "warning",
        "The daemon of {{ $labels.instance }} could not load its newest settings",
        "It uses older ones. Its log names the line."),
    Alert("PacecarRecordingLost", _increase("pacecar_recorder_lost_total", "30m", CLUSTER, NODE) + " > 0", "0m",
        "warning", "The daemon of {{ $labels.instance }} could not write a recording",
        "{{ printf \"%.0f\" $value }} recordings of the minutes before a fault were given up in the last half hour."),
))  # fmt: skip
