"""Defines the alerts about jobs, their tuning, and pacecar itself."""

from __future__ import annotations

from pacecar.config import DaemonConfig, HookConfig

from ..queries import CLUSTER, JOB, LAUNCH, NODE, RANK, combine
from .alerts import Alert, Group
from .recording import DAEMON_BUDGET_USED, OVERHEAD, PACE, RULES

__all__ = ["ITSELF_ALERTS", "JOB_ALERTS"]

OF_JOB = (CLUSTER, JOB, LAUNCH)
"""Never the name alone: two jobs may have it, and their knobs, steps and hangs have nothing to do with each other."""

LATE_RATIO = 0.1
"""A tenth of the pace: more than any knob is likely to win."""

STALL_SECONDS, STALL_STEPS = DaemonConfig().stall_seconds, 20
"""As the flight recorder (`monitor/recorder/triggers.py`), which writes a recording at the same time: a job whose steps
take long is not stalled before so many of them would have ended."""

SPEAKS_SECONDS = 240
"""A rank that ended a step less than this ago still counts for its job.  Under the five minutes that alerts wait: the
daemon keeps a job's last values for a while after its end, also when it was started anew on other nodes."""

DAEMON_OVER = 1.2
"""The daemon looks less often as soon as it reaches its budget; a fifth over it means that this does not help."""

RESTARTS_IN_30_MINUTES = 3
"""An upgrade and a change of settings are two."""

_BUDGET = HookConfig().overhead_budget


def _increase(metric: str, window: str, *labels: str) -> str:
    return combine("sum", RULES.increase(metric, window=window), *labels)


def _late() -> str:
    """Return the excess of each late rank as a share of its job's pace."""
    excess = combine("max", RULES.select("pacecar_job_straggler_excess_seconds"), *OF_JOB, RANK, "cause")
    return f"{excess} / on ({', '.join(OF_JOB)}) group_left () ({PACE.name} > 0)"


def _silent() -> str:
    """Return for how long no rank of a job has ended a step, of ranks that are connected.

    The daemon keeps a job for a while after its end, and it sends nothing more; `process_info` is only of ranks that
    are connected.  The node is compared too: a job that was started anew elsewhere has processes, but its old ranks
    are old.
    """
    age = RULES.select("pacecar_job_last_record_age_seconds")
    connected = RULES.select("pacecar_process_info", {JOB: "!="})
    return combine("min", f"{age} and on ({', '.join((CLUSTER, NODE, JOB, LAUNCH, RANK))}) {connected}", *OF_JOB)


def _patience() -> str:
    """Return how long a job may go without ending a step before it counts as stalled."""
    step = combine("max", RULES.select("pacecar_job_step_duration_seconds"), *OF_JOB)
    return f"clamp_min({STALL_STEPS} * {step}, {STALL_SECONDS:g})"


def _speaking(expression: str, *labels: str) -> str:
    """Return the part of `expression` that is of jobs (or of ranks, with that label) that still end steps there."""
    age = RULES.select("pacecar_job_last_record_age_seconds")
    return f"{expression} and on ({', '.join((CLUSTER, NODE, JOB, LAUNCH, *labels))}) ({age} < {SPEAKS_SECONDS})"


def _epoch(operation: str) -> str:
    return combine(operation, _speaking(RULES.select("pacecar_knob_epoch"), RANK), *OF_JOB)


JOB_ALERTS = Group("pacecar-job", (
    Alert("PacecarStraggler", f"{_late()} > {LATE_RATIO}", "2m", "warning",
        "Rank {{ $labels.rank }} of {{ $labels.training_job }} holds the job up: {{ $labels.cause }}",
        "Its step is longer than the others' median by {{ $value | humanizePercentage }} of the job's pace. Without a "
        "rank: all wait for a link that cannot be told."),
    Alert("PacecarJobHangs",
        combine("sum", RULES.select("pacecar_job_hang_suspected"), *OF_JOB) + " > 0", "1m", "critical",
        "{{ $labels.training_job }} may hang",
        "{{ printf \"%.0f\" $value }} ranks have ended no step for suspiciously long. The daemon has written a "
        "recording of the minutes before."),
    Alert("PacecarJobStalled", f"{_silent()} > {_patience()}", "0m", "critical",
        "{{ $labels.training_job }} stands still",
        "No rank has ended a step for {{ $value | humanizeDuration }}, though its processes are there."),
    Alert("PacecarJobOutOfMemory", _increase("pacecar_job_memory_out_of_memory_total", "10m", *OF_JOB) + " > 0", "0m",
        "warning", "{{ $labels.training_job }} runs out of device memory",
        "The allocator raised {{ printf \"%.0f\" $value }} out-of-memory errors in the last ten minutes."),
    Alert("PacecarTuningFrozen",
        combine("max", _speaking(RULES.select("pacecar_tuner_state", {"state": "frozen"})), *OF_JOB) + " == 1", "10m",
        "warning",
        "Tuning of {{ $labels.training_job }} is frozen",
        "The tuner turns nothing any more. The job goes on with the settings in force."),
    Alert("PacecarKnobsApart",
        f"{_epoch('max')} - {_epoch('min')} > 0", "5m", "critical",
        "Ranks of {{ $labels.training_job }} run different knobs",
        "The newest and the oldest knob epoch have been {{ printf \"%.0f\" $value }} apart for five minutes, among "
        "ranks that go on reporting steps."),
))  # fmt: skip

ITSELF_ALERTS = Group("pacecar-itself", (
    Alert("PacecarOverheadOverBudget", f"{OVERHEAD.name} > {_BUDGET:g}", "15m", "warning",
        "pacecar takes {{ $value | humanizePercentage }} of the steps of {{ $labels.training_job }}",
        f"That is more than the default budget of {_BUDGET:.0%}. Where the job set `overhead_budget` higher, raise the "
        "bound of this alert."),
    Alert("PacecarHookOff",
        combine("count", _speaking(RULES.select("pacecar_job_hook_measuring") + " == 0", RANK), *OF_JOB) + " > 0", "5m",
        "warning",
        "The hook of {{ $labels.training_job }} turned itself off",
        "{{ printf \"%.0f\" $value }} ranks measure no steps any more, because measuring alone was over the budget."),
    Alert("PacecarRecordsDropped", _increase("pacecar_job_records_dropped_total", "10m", *OF_JOB) + " > 0", "10m",
        "warning", "Hooks of {{ $labels.training_job }} drop records",
        "{{ printf \"%.0f\" $value }} records were dropped in the last ten minutes, because the daemon was full, gone "
        "or slow. Totals are right, detail is missing."),
    Alert("PacecarFramesRefused",
        _increase("pacecar_inbox_frames_refused_total", "15m", CLUSTER, NODE, "refusal") + " > 0", "5m", "warning",
        "The daemon of {{ $labels.instance }} refuses frames: {{ $labels.refusal }}",
        "{{ printf \"%.0f\" $value }} frames were refused in the last 15 minutes. Its log says whose."),
    Alert("PacecarRanksLeftOut", _increase("pacecar_inbox_left_out_total", "15m", CLUSTER, NODE, "kind") + " > 0", "0m",
        "warning", "The daemon of {{ $labels.instance }} has no room for more ({{ $labels.kind }})",
        "{{ printf \"%.0f\" $value }} ranks were turned away in the last 15 minutes; they are on no dashboard."),
    Alert("PacecarDaemonOverBudget", f"{DAEMON_BUDGET_USED.name} > {DAEMON_OVER}", "15m", "warning",
        "The daemon of {{ $labels.instance }} takes more than it allows itself",
        "Its CPU time is {{ $value | humanizePercentage }} of its budget "
        f"(`cpu_budget`, {DaemonConfig().cpu_budget:.0%} of one processor by default)."),
    Alert("PacecarDaemonGone",
        # A sidecar's instance is `node/pod`: it ends with its job, and nothing is wrong.
        f"{RULES.select('pacecar_build_info', {NODE: '!~.+/.+'})} offset 15m unless on ({CLUSTER}, {NODE}) "
        + RULES.select("pacecar_build_info"), "5m", "warning",
        "The daemon of {{ $labels.instance }} is not scraped any more",
        "It was there 15 minutes ago. Nothing is known of this node, and none of its other alerts can fire."),
    Alert("PacecarDaemonNotAnswering",
        f"up == 0 and on ({CLUSTER}, {NODE}) "
        f"max_over_time({RULES.select('pacecar_build_info', {NODE: '!~.+/.+'})}[15m])", "1m", "warning",
        "The daemon of {{ $labels.instance }} serves no numbers",
        "It did within the last 15 minutes. It has ended, hangs, or answers 503 because its newest numbers are old."),
    Alert("PacecarDaemonRestarting",
        f"changes({RULES.select('pacecar_daemon_start_time_seconds', {NODE: '!~.+/.+'})}[30m])"
        f" >= {RESTARTS_IN_30_MINUTES}", "0m", "warning", "The daemon of {{ $labels.instance }} starts again and again",
        "It was started anew {{ printf \"%.0f\" $value }} times in the last half hour."),
    Alert("PacecarDaemonFault",
        _increase("pacecar_daemon_faults_total", "15m", CLUSTER, NODE, "part") + " > 0 or "
        + _increase("pacecar_daemon_thread_restarts_total", "15m", CLUSTER, NODE, "thread") + " > 0 or "
        + combine("max", RULES.select("pacecar_daemon_thread_up") + " == 0", CLUSTER, NODE, "thread"), "0m", "warning",
        "The daemon of {{ $labels.instance }} has a bug: {{ $labels.part }}{{ $labels.thread }}",
        "It was contained and cost one job, collector, hook, page or step of a tick its numbers; or a thread failed. "
        "The daemon's log has the traceback."),
    Alert("PacecarSettingsNotLoaded",
        RULES.select("pacecar_daemon_config_last_reload_successful") + " == 0", "5m", "warning",
        "The daemon of {{ $labels.instance }} could not use its newest settings",
        "It goes on with older ones. Its log names the line."),
    Alert("PacecarRecordingLost", _increase("pacecar_recorder_lost_total", "30m", CLUSTER, NODE) + " > 0", "0m",
        "warning", "The daemon of {{ $labels.instance }} could not write a recording",
        "{{ printf \"%.0f\" $value }} recordings of the minutes before a fault were given up in the last half hour."),
))  # fmt: skip
