"""Builds the dashboard "pacecar / pacecar itself": what pacecar costs, and what it dropped, refused or missed.

Every budget is drawn beside its use, and everything refused, dropped or missed is counted.
"""

from __future__ import annotations

from typing import Any

from grafanalib import core

from pacecar.config import HookConfig

from ..frame import dashboard, variables
from ..palette import BAD, GOOD, WARN
from ..panels import Query, Section, columns, look, stat, table, time_series
from ..queries import CLUSTER, FLEET, JOB, LAUNCH, NODE, combine, divide, or_zero
from .ranking import Column, ranking

__all__ = ["itself_dashboard"]

NO_DAEMON = "No daemon is scraped"
NO_JOB = "No job has reported here"
_BUDGET = HookConfig().overhead_budget
_ON = f"{{{{{NODE}}}}}"
_OF = f"{{{{{JOB}}}}} {{{{{LAUNCH}}}}}"
_RIGHT: dict[str, Any] = {"custom__axisPlacement": "right"}

select, rate, increase = FLEET.select, FLEET.rate, FLEET.increase


def _overhead() -> str:
    return divide(
        combine("sum", rate("pacecar_job_overhead_seconds_total"), CLUSTER, JOB, LAUNCH),
        combine("sum", rate("pacecar_job_step_wall_seconds_total"), CLUSTER, JOB, LAUNCH),
    )


def _now() -> Section:
    def of_all(expression: str) -> str:
        return or_zero(combine("sum", expression), select("pacecar_build_info"))

    used = divide(select("pacecar_daemon_cpu_utilization_ratio"), select("pacecar_daemon_cpu_budget_ratio"))
    dropped = combine("sum", increase("pacecar_job_records_dropped_total", window="$__range"))
    return Section("Now", [
        (3, 4, stat("Daemons", "Daemons that are scraped.",
            [Query(combine("count", select("pacecar_build_info")), "daemons")], unit="none", empty=NO_DAEMON)),
        (3, 4, stat("Daemon CPU", "CPU time of the busiest daemon over its own budget. At one it reads "
            "less often.", [Query(combine("max", used), "used")], unit="percentunit", empty=NO_DAEMON, decimals=0,
            thresholds=[(0.0, GOOD), (0.9, WARN), (1.2, BAD)])),
        (3, 4, stat("Overhead", "Share of step time that the hook takes in the job where it takes most.",
            [Query(combine("max", _overhead()), "overhead")], unit="percentunit", empty=NO_JOB, decimals=2,
            thresholds=[(0.0, GOOD), (_BUDGET / 2, WARN), (_BUDGET, BAD)])),
        (3, 4, stat("Age", "Age of the numbers that the slowest daemon serves.",
            [Query(combine("max", select("pacecar_daemon_snapshot_age_seconds")), "age")], unit="s", empty=NO_DAEMON,
            thresholds=[(0.0, GOOD), (10.0, WARN), (60.0, BAD)])),
        (3, 4, stat("Dropped", "Records that hooks dropped over the range shown: detail is lost, no total.",
            [Query(or_zero(dropped, select("pacecar_rank_info")), "dropped")], unit="none", empty=NO_JOB, decimals=0,
            thresholds=[(0.0, GOOD), (1.0, WARN)])),
        (3, 4, stat("Refused", "Frames that the daemons refused over the range shown.",
            [Query(of_all(increase("pacecar_inbox_frames_refused_total", window="$__range")), "refused")],
            unit="none", empty=NO_DAEMON, decimals=0, thresholds=[(0.0, GOOD), (1.0, WARN)])),
        (3, 4, stat("Ticks missed", "Ticks left out over the range shown, because the one before was still running.",
            [Query(of_all(increase("pacecar_daemon_ticks_missed_total", window="$__range")), "missed")],
            unit="none", empty=NO_DAEMON, decimals=0, thresholds=[(0.0, GOOD), (1.0, WARN)])),
        (3, 4, stat("Old settings", "Daemons that could not load their newest settings and use older ones.",
            [Query(combine("sum", f"1 - {select('pacecar_daemon_config_last_reload_successful')}"), "old")],
            unit="none", empty=NO_DAEMON, thresholds=[(0.0, GOOD), (1.0, BAD)])),
    ])  # fmt: skip


def _daemon() -> Section:
    return Section("Daemons", [
        (24, 8, ranking("Daemons, the busiest first", "Used: CPU time over the daemon's own budget; at one it reads "
            "less often. Age: of the numbers served.", [CLUSTER, NODE], [
                Column("Used", f"{_by_node('max', 'pacecar_daemon_cpu_utilization_ratio')} / "
                       f"{_by_node('max', 'pacecar_daemon_cpu_budget_ratio')}", "percentunit",
                       steps=[(0.9, WARN), (1.2, BAD)], decimals=0),
                Column("CPU", _by_node("max", "pacecar_daemon_cpu_utilization_ratio"), "percentunit", decimals=2),
                Column("Memory", _by_node("max", "pacecar_daemon_resident_memory_bytes"), "bytes"),
                Column("Age", _by_node("max", "pacecar_daemon_snapshot_age_seconds"), "s",
                       steps=[(10.0, WARN), (60.0, BAD)]),
                Column("Glances a second", _by_node("max", "pacecar_daemon_glance_frequency_hertz"), "hertz",
                       decimals=1),
                Column("Jobs", _by_node("max", "pacecar_inbox_jobs")),
                Column("Hooks", _by_node("max", "pacecar_inbox_connections")),
                Column("Running since", _by_node("max", "pacecar_daemon_start_time_seconds") + " * 1000",
                       "dateTimeAsIso", width=190),
            ], worst="Used", empty=NO_DAEMON)),
        (8, 7, time_series("Daemon's CPU against its budget", "CPU time per second of each daemon, and its budget "
            "(dashed).", [
                Query(rate("pacecar_daemon_cpu_seconds_total"), _ON),
                Query(combine("min", select("pacecar_daemon_cpu_budget_ratio")), "budget"),
            ], unit="percentunit", empty=NO_DAEMON, decimals=2,
            overrides=[look("budget", custom__lineStyle={"fill": "dash", "dash": [8, 8]})])),
        (8, 7, time_series("Daemon's memory", "Resident memory of the daemon on each node.",
            [Query(select("pacecar_daemon_resident_memory_bytes"), _ON)], unit="bytes", empty=NO_DAEMON)),
        (8, 7, time_series("Threads and files", "Of the daemon with the most; a steady rise is a leak.", [
                Query(combine("max", select("pacecar_daemon_threads")), "threads"),
                Query(combine("max", select("pacecar_daemon_open_files")), "open files"),
            ], unit="none", empty=NO_DAEMON)),
        (8, 7, time_series("Scrapes", "Mean time of a scrape in the daemon, and scrapes per second.", [
                Query(divide(rate("pacecar_daemon_scrape_seconds_total"), rate("pacecar_daemon_scrapes_total")), _ON),
                Query(combine("sum", rate("pacecar_daemon_scrapes_total")), "scrapes a second"),
            ], unit="s", empty="No recent scrapes", overrides=[
                look("scrapes a second", unit="cps", **_RIGHT)])),
        (8, 7, time_series("Beat", "How late ticks began, how old the numbers served are, ticks per second, each of "
            "the worst daemon, and ticks left out.", [
                Query(combine("max", select("pacecar_daemon_tick_lateness_seconds")), "lateness"),
                Query(combine("max", select("pacecar_daemon_snapshot_age_seconds")), "age of the numbers"),
                Query(combine("min", rate("pacecar_daemon_ticks_total")), "ticks a second"),
                Query(combine("sum", increase("pacecar_daemon_ticks_missed_total")), "ticks missed"),
            ], unit="s", empty=NO_DAEMON, overrides=[look("ticks .*", regex=True, unit="none", **_RIGHT)])),
        (8, 7, time_series("Glances", "How often collectors read between ticks, and how often the budget changed "
            "that.", [
                Query(combine("min", select("pacecar_daemon_glance_frequency_hertz")), "looks a second, fewest"),
                Query(combine("sum", increase("pacecar_daemon_glance_changes_total"), "direction"), "{{direction}}"),
            ], unit="none", empty=NO_DAEMON)),
        (24, 6, time_series("Bugs contained, threads", "Bugs that cost one job, collector, hook, page or step of a "
            "tick its output once; threads that failed and were restarted; threads that ended or hang.", [
                Query(combine("sum", increase("pacecar_daemon_faults_total"), "part"), "bugs: {{part}}"),
                Query(combine("sum", increase("pacecar_daemon_thread_restarts_total"), "thread"),
                      "restarts: {{thread}}"),
                Query(combine("sum", f"1 - {select('pacecar_daemon_thread_up')}", "thread"), "down: {{thread}}"),
            ], unit="none", empty=NO_DAEMON)),
    ])  # fmt: skip


def _by_node(operation: str, metric: str) -> str:
    return combine(operation, select(metric), CLUSTER, NODE)


def _collectors() -> Section:
    return Section("Collectors", [
        (8, 7, time_series("Collectors", "Time of each collector per tick, on the slowest node.",
            [Query(combine("max", select("pacecar_collector_duration_seconds"), "collector"), "{{collector}}")],
            unit="s", empty=NO_DAEMON)),
        (8, 7, table("Collectors that do not read", "Collectors whose last outcome was failed or absent. Absent is "
            "healthy: the node has nothing of that kind.",
            [Query(select("pacecar_collector_outcome", {"outcome": "!=ok"}) + " == 1", "", instant=True)],
            empty="Every collector reads its source", transformations=columns(NODE, "collector", "outcome"))),
        (8, 7, time_series("Failures of collectors", "Ticks and glances in which a collector failed, and single "
            "rows and numbers that it left out; the log names them.", [
                Query(combine("sum", increase("pacecar_collector_failures_total"), "collector"), "{{collector}}"),
                Query(combine("sum", increase("pacecar_collector_glance_failures_total"), "collector"),
                      "{{collector}} glances"),
                Query(combine("sum", increase("pacecar_collector_read_failures_total"), "collector"),
                      "{{collector}} numbers"),
            ], unit="none", empty="No collector has failed")),
        (12, 6, time_series("Looks between ticks", "Readings of windowed metrics between ticks, per second.",
            [Query(combine("sum", rate("pacecar_collector_glances_total"), "collector"), "{{collector}}")],
            unit="cps", empty=NO_DAEMON)),
        (12, 6, time_series("Calls of the GPU driver", "Calls per second and node, at most 12 per GPU and tick. "
            "Openings: more than one means that GPUs were lost or the driver was reloaded.", [
                Query(combine("sum", rate("pacecar_gpu_driver_calls_total"), NODE), _ON),
                Query(combine("max", select("pacecar_gpu_driver_openings_total")), "openings, most"),
            ], unit="cps", empty="No GPU on these nodes", overrides=[
                look("openings, most", unit="none", **_RIGHT)])),
    ], collapsed=True)  # fmt: skip


def _hooks() -> Section:
    hook = combine("sum", increase("pacecar_job_records_dropped_total"), CLUSTER, JOB, LAUNCH)
    return Section("Hooks in the jobs", [
        (8, 7, time_series("Overhead against its budget", "Share of step time that the hook and the tuner take, "
            "windows included. The line is the default budget.", [Query(_overhead(), _OF)],
            unit="percentunit", empty=NO_JOB, decimals=2, low=0, soft_limit=1.2 * _BUDGET,
            thresholds=[(_BUDGET, BAD)])),
        (8, 7, time_series("Dropped records", "Records that hooks dropped because the daemon was full, gone or slow: "
            "detail is lost, no total.", [Query(hook, _OF)], unit="none", empty=NO_JOB)),
        (8, 7, time_series("Exact windows", "Profiled windows taken: what the ledger's estimate is calibrated with.",
            [Query(combine("sum", increase("pacecar_job_windows_total"), CLUSTER, JOB, LAUNCH), _OF)],
            unit="none", empty=NO_JOB)),
        (12, 6, time_series("Steps measured", "One step in this many is measured; more than 1 if steps are too short "
            "for the budget.",
            [Query(combine("max", select("pacecar_job_measured_every_steps"), CLUSTER, JOB, LAUNCH), _OF)],
            unit="none", empty=NO_JOB)),
        (12, 6, time_series("Hooks that turned themselves off", "Ranks whose hook no longer measures steps, because "
            "that alone exceeded the budget.",
            [Query(combine("sum", f"1 - {select('pacecar_job_hook_measuring')}", CLUSTER, JOB, LAUNCH), _OF)],
            unit="none", empty=NO_JOB, thresholds=[(1.0, BAD)])),
    ])  # fmt: skip


def _socket_server() -> Section:
    return Section("What came in and what was refused", [
        (8, 7, time_series("Frames", "Frames taken in and refused by the daemons, by reason.", [
                Query(combine("sum", rate("pacecar_inbox_frames_total")), "taken"),
                Query(combine("sum", rate("pacecar_inbox_frames_refused_total"), "refusal"), "refused: {{refusal}}"),
            ], unit="cps", empty=NO_DAEMON)),
        (8, 7, time_series("Left out", "Ranks that were refused for lack of room, and processes that are not looked up "
            "because there are too many.", [
                Query(combine("sum", increase("pacecar_inbox_left_out_total"), "kind"), "{{kind}}"),
                Query(combine("sum", increase("pacecar_inbox_displaced_total"), "kind"), "made room: {{kind}}"),
                Query(combine("sum", select("pacecar_processes_left_out")), "processes"),
            ], unit="none", empty=NO_DAEMON)),
        (8, 7, time_series("Clients of the endpoint", "Connected clients, and clients that were not served, by reason.",
            [
                Query(combine("sum", select("pacecar_web_connections")), "connected"),
                Query(combine("sum", increase("pacecar_web_refused_total"), "refusal"), "refused: {{refusal}}"),
            ], unit="none", empty=NO_DAEMON)),
        (8, 7, time_series("Pages and terminals", "Viewers that receive each tick, and viewers that were displaced by "
            "a new one or disconnected.", [
                Query(combine("sum", select("pacecar_daemon_viewers")), "connected"),
                Query(combine("sum", increase("pacecar_daemon_viewers_displaced_total")), "displaced"),
                Query(combine("sum", increase("pacecar_daemon_viewers_dropped_total")), "hung up"),
                Query(combine("sum", rate("pacecar_daemon_viewer_frames_total")), "ticks pushed a second"),
            ], unit="none", empty=NO_DAEMON)),
        (8, 7, time_series("Page's history", "Series for which the page's history had no room.",
            [Query(select("pacecar_daemon_history_series_left_out"), _ON)], unit="none", empty=NO_DAEMON)),
        (8, 7, time_series("Settings", "Reloads of the settings, by outcome.",
            [Query(combine("sum", increase("pacecar_daemon_config_reloads_total"), "outcome"), "{{outcome}}")],
            unit="none", empty=NO_DAEMON)),
    ], collapsed=True)  # fmt: skip


def _recorder() -> Section:
    return Section("Flight recorder", [
        (8, 7, time_series("Reach of the recorder", "How far back the shortest memory goes, and so a recording of "
            "the time before a fault.",
            [Query(combine("min", select("pacecar_recorder_span_seconds")), "shortest memory")],
            unit="s", empty="No daemon keeps a recorder")),
        (8, 7, time_series("Size of the recorder", "Memory of the fullest daemon, and recordings on disk.", [
                Query(combine("max", select("pacecar_recorder_memory_bytes")), "memory"),
                Query(combine("max", select("pacecar_recorder_files_bytes")), "on disk"),
            ], unit="bytes", empty="No daemon keeps a recorder")),
        (8, 7, time_series("Taken and dropped", "Entries recorded, and recent entries that are missing.", [
                Query(combine("sum", rate("pacecar_recorder_entries_total")), "taken"),
                Query(combine("sum", rate("pacecar_recorder_dropped_total"), "reason"), "dropped: {{reason}}"),
            ], unit="cps", empty="No daemon keeps a recorder")),
        (12, 6, time_series("Reasons to record", "Why daemons wrote recordings: an Xid, a lost GPU, a hang, a "
            "stall, or a request.",
            [Query(combine("sum", increase("pacecar_recorder_triggers_total"), "trigger"), "{{trigger}}")],
            unit="none", empty="No daemon keeps a recorder")),
        (12, 6, time_series("Recordings", "Recordings written, attempts that failed, and recordings given up.", [
                Query(combine("sum", increase("pacecar_recorder_files_total")), "written"),
                Query(combine("sum", increase("pacecar_recorder_write_failures_total")), "attempts failed"),
                Query(combine("sum", increase("pacecar_recorder_lost_total")), "given up"),
            ], unit="none", empty="No daemon keeps a recorder")),
    ], collapsed=True)  # fmt: skip


def itself_dashboard() -> core.Dashboard:
    """Return the dashboard of what pacecar costs and loses."""
    return dashboard(
        "pacecar-itself",
        "What pacecar costs the machines and the jobs, against its budgets, and what it dropped, refused or missed.",
        variables("job", "node"),
        [_now(), _daemon(), _hooks(), _collectors(), _socket_server(), _recorder()],
    )
