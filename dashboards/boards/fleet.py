"""Builds the dashboard "pacecar / Fleet": tables of all jobs, nodes and GPUs, worst first.

Utilization is a poor ranking, because a waiting rank keeps its GPU busy.  So jobs are ranked by their slowdown: the
current pace over the fast times of the same job.  GPUs are ranked by what holds their clocks down, nodes by how much
their tasks stall.

Each table is a few instant queries grouped by job, node or GPU.  Those for GPUs and nodes return only the worst, so
that ten thousand cost little.  Left out: the causes, to which the first column links, and who pays for the machines.
"""

from __future__ import annotations

from dataclasses import replace

from grafanalib import core

from pacecar.config import HookConfig

from ..frame import dashboard, variables
from ..palette import BAD, GOOD, WARN
from ..panels import Query, Section, in_order, stat, time_series
from ..queries import CLUSTER, FLEET, GPU, JOB, LAUNCH, NODE, combine, divide, or_zero
from .gpu_hours import gpu_hours_section
from .pace import CAUSES
from .ranking import Column, ranking

__all__ = ["FAULTS_OF_CLOCKS", "fleet_dashboard"]

TOP = 25
"""Rows of a table of GPUs: more than people read."""

NODES_TOP = 50
"""Nodes by stalling; half as many each by TCP retransmissions and by RDMA errors."""

LINES = 10
"""Lines of a graph: as many colours as people can distinguish."""

FAULTS_OF_CLOCKS = "sw_power_cap|hw_slowdown|sw_thermal_slowdown|hw_thermal_slowdown|hw_power_brake"
"""Reasons that slow down a working GPU (as in `monitor/jobs/node_signals.py`); idle and set clocks are not faults."""

NO_DAEMON = "No daemon is scraped"
NO_JOB = "No job has reported here"
NO_GPU = "No GPU in these nodes"
_BUDGET = HookConfig().overhead_budget
_OF = f"{{{{{JOB}}}}} {{{{{LAUNCH}}}}}"
_JOBS, _NODES, _GPUS = (CLUSTER, JOB, LAUNCH), (CLUSTER, NODE), (CLUSTER, NODE, GPU)

select, rate, increase = FLEET.select, FLEET.rate, FLEET.increase


def _pace() -> str:
    """Return the pace of each job, or the mean step of its slowest rank if ranks are not compared."""
    compared = combine("max", select("pacecar_job_pace_seconds"), *_JOBS)
    steps = FLEET.mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total")
    return f"{compared} or {combine('max', steps, *_JOBS)}"


def _slower() -> str:
    """Return how much slower each job is than its own fast times in the range shown."""
    pace = select("pacecar_job_pace_seconds")
    fast = combine("max", FLEET.fast_times("pacecar_job_pace_seconds"), *_JOBS)
    return f"{combine('max', pace, *_JOBS)} / {fast} - 1"


def _share(counter: str, **where: str) -> str:
    whole = combine("sum", rate("pacecar_job_step_wall_seconds_total"), *_JOBS)
    return divide(combine("sum", rate(counter, where), *_JOBS), whole)


def _late() -> str:
    """Return what the latest rank of a job costs each step, as a share of the pace."""
    excess = combine("max", select("pacecar_job_straggler_excess_seconds"), *_JOBS)
    return divide(excess, combine("max", select("pacecar_job_pace_seconds"), *_JOBS))


def _held() -> str:
    faults = rate("pacecar_gpu_clock_event_seconds_total", {"reason": f"=~{FAULTS_OF_CLOCKS}"})
    return combine("max", faults, *_GPUS)


def _now() -> Section:
    ranks, gpus = select("pacecar_rank_info"), select("pacecar_gpu_up")
    late = combine("count", select("pacecar_job_straggler_excess_seconds"))
    frozen = combine("sum", select("pacecar_tuner_state", {"state": "frozen"}))
    return Section("Now", [
        (3, 4, stat("Nodes", "Daemons that are scraped.",
            [Query(combine("count", select("pacecar_build_info")), "nodes")], unit="none", empty=NO_DAEMON)),
        (3, 4, stat("Jobs", "Training jobs that report, including those that ended in the last quarter of an hour.",
            [Query(combine("count", combine("count", ranks, *_JOBS)), "jobs")], unit="none", empty=NO_JOB)),
        (3, 4, stat("Ranks", "Ranks of all jobs.", [Query(combine("count", ranks), "ranks")], unit="none",
            empty=NO_JOB)),
        (3, 4, stat("GPUs", "GPUs that the daemons know, including those that are down.",
            [Query(combine("count", gpus), "GPUs")],
            unit="none", empty=NO_GPU)),
        (3, 4, stat("GPUs down", "GPUs that the last tick could not read.",
            [Query(f"{combine('count', gpus)} - {combine('sum', gpus)}", "down")], unit="none", empty=NO_GPU,
            thresholds=[(0.0, GOOD), (1.0, BAD)])),
        (3, 4, stat("Late ranks", "Ranks that hold their job up now.",
            [Query(or_zero(late, ranks), "late")], unit="none", empty=NO_JOB,
            thresholds=[(0.0, GOOD), (1.0, WARN)])),
        (3, 4, stat("Hangs", "Ranks that ended no step for suspiciously long.",
            [Query(or_zero(combine("sum", select("pacecar_job_hang_suspected")), ranks), "hangs")],
            unit="none", empty=NO_JOB, thresholds=[(0.0, GOOD), (1.0, BAD)])),
        (3, 4, stat("Frozen", "Jobs whose tuner has stopped.",
            [Query(or_zero(frozen, ranks), "frozen")], unit="none", empty=NO_JOB,
            thresholds=[(0.0, GOOD), (1.0, WARN)])),
    ])  # fmt: skip


def _jobs() -> Section:
    return Section("Jobs", [
        (24, 9, ranking("Jobs, the slowest against its own baseline first", "Slower: the pace over the job's own fast "
            "times in the range shown, the lowest tenth; absent for a job whose ranks are not compared. Exposed: share "
            "of the step in which communication ran and no compute did. Late by: what the latest rank costs each "
            "step.", _JOBS, [
                Column("Slower", _slower(), "percentunit", steps=[(0.1, WARN), (0.25, BAD)], decimals=1),
                Column("Pace", _pace(), "s"),
                Column("Exposed", _share("pacecar_job_ledger_seconds_total", heading="exposed_communication"),
                       "percentunit", steps=[(0.05, WARN), (0.15, BAD)], decimals=1),
                Column("Late by", _late(), "percentunit", steps=[(0.02, WARN), (0.1, BAD)], decimals=1),
                Column("Data wait", _share("pacecar_job_ledger_seconds_total", heading="data_wait"), "percentunit",
                       steps=[(0.05, WARN), (0.15, BAD)], decimals=1),
                Column("MFU", combine("avg", select("pacecar_job_mfu_ratio"), *_JOBS), "percentunit", decimals=1),
                Column("Overhead", _share("pacecar_job_overhead_seconds_total"), "percentunit",
                       steps=[(_BUDGET / 2, WARN), (_BUDGET, BAD)], decimals=2),
                Column("Ranks", combine("count", select("pacecar_rank_info"), *_JOBS)),
                Column("Silent for", combine("max", select("pacecar_job_last_record_age_seconds"), *_JOBS), "s",
                       steps=[(30.0, WARN), (120.0, BAD)]),
                Column("Power", combine("sum", rate("pacecar_job_energy_joules_total"), *_JOBS), "watt"),
            ], worst="Slower", empty=NO_JOB)),
        (12, 7, time_series("Slower than the own baseline", f"The {LINES} jobs that lose most against their own fast "
            "times in the range shown.", [Query(f"topk({LINES}, {_slower()})", _OF)], unit="percentunit",
            empty="No job here compares its ranks", soft_limit=0.12, thresholds=[(0.1, WARN), (0.25, BAD)])),
        (12, 7, time_series("Exposed communication", f"The {LINES} jobs that wait most for communication, as a share "
            "of their steps.", [
                Query(f"topk({LINES}, "
                      f"{_share('pacecar_job_ledger_seconds_total', heading='exposed_communication')})", _OF),
            ], unit="percentunit", empty=NO_JOB, low=0, soft_limit=0.16, thresholds=[(0.15, BAD)])),
        (12, 7, time_series("Stragglers", "Late ranks by cause.",
            [Query(combine("count", select("pacecar_job_straggler_excess_seconds"), "cause"), "{{cause}}")],
            unit="none", empty="No rank is late", stacked=True, overrides=in_order(*CAUSES))),
        (12, 7, time_series("Overhead of the hooks", f"The {LINES} jobs in which pacecar takes most of the step. The "
            "line is the default budget.", [
                Query(f"topk({LINES}, {_share('pacecar_job_overhead_seconds_total')})", _OF),
            ], unit="percentunit", empty=NO_JOB, decimals=2, low=0, soft_limit=1.2 * _BUDGET,
            thresholds=[(_BUDGET, BAD)])),
    ])  # fmt: skip


def _links_down() -> str:
    """Return how many NVLinks of each GPU are down, without links that the board does not connect."""
    led = f"on ({', '.join((*_GPUS, 'link'))}) {select('pacecar_gpu_nvlink_info')}"
    return combine("count", f"{select('pacecar_gpu_nvlink_link_state')} == 0 and {led}", *_GPUS)


def _gpus() -> Section:
    def most(expression: str) -> str:
        return f"topk({TOP}, {expression} > 0)"

    def grown(metric: str, **where: str) -> str:
        return most(combine("sum", increase(metric, where, window="$__range"), *_GPUS))

    def of_worst(expression: str) -> str:
        return f"({combine('max', expression, *_GPUS)}) and on ({', '.join(_GPUS)}) topk({TOP}, {_held()})"

    clock = divide(
        select("pacecar_gpu_clock_hertz", {"clock": "sm"}), select("pacecar_gpu_clock_max_hertz", {"clock": "sm"})
    )
    power = divide(select("pacecar_gpu_power_watts"), select("pacecar_gpu_power_limit_watts"))
    pending = f"({select('pacecar_gpu_row_remap_pending')} or {select('pacecar_gpu_retired_pages_pending')})"
    return Section("GPUs", [
        (12, 9, ranking(f"Hot and throttled GPUs, the {TOP} worst", "Held: share of time in which power, heat or the "
            "power brake held the clocks down. Idle clocks, and clocks set by a user, do not count.", _GPUS, [
                Column("Held", f"topk({TOP}, {_held()})", "percentunit", steps=[(0.2, WARN), (0.5, BAD)], decimals=0),
                Column("Core", of_worst(select("pacecar_gpu_temperature_celsius")), "celsius",
                       steps=[(85.0, WARN), (90.0, BAD)]),
                Column("SM clock", of_worst(clock), "percentunit", decimals=0),
                Column("Power", of_worst(power), "percentunit", decimals=0),
            ], worst="Held", empty=NO_GPU)),
        (12, 9, ranking("GPUs with faults", "GPUs that are down, and GPUs with errors in the range shown; for each "
            f"column the {TOP} worst.", _GPUS, [
                Column("Down", most(combine("max", f"1 - {select('pacecar_gpu_up')}", *_GPUS)), steps=[(1.0, BAD)]),
                Column("Xid", grown("pacecar_gpu_xid_errors_total"), steps=[(1.0, BAD)], decimals=0),
                Column("ECC", grown("pacecar_gpu_ecc_errors_total", severity="uncorrected", lifetime="volatile"),
                       steps=[(1.0, BAD)], decimals=0),
                Column("Reset due", most(combine("max", pending, *_GPUS)), steps=[(1.0, WARN)]),
                Column("NVLinks down", most(_links_down()), steps=[(1.0, BAD)]),
            ], worst="Down", empty="Good news: no GPU is down, and none reported an error in this range")),
        (12, 7, time_series("GPUs held down", "GPUs that a reason held down for more than a fifth of the time, by "
            "reason.", [
                Query(combine("count", rate("pacecar_gpu_clock_event_seconds_total",
                                            {"reason": f"=~{FAULTS_OF_CLOCKS}"}) + " > 0.2", "reason"), "{{reason}}"),
            ], unit="none", empty="No GPU is held down", stacked=True,
            overrides=in_order(*FAULTS_OF_CLOCKS.split("|")))),
        (12, 7, time_series("Power of the GPUs", "Of all GPUs together, and their limits (dashed).", [
                Query(combine("sum", select("pacecar_gpu_power_watts")), "drawn"),
                Query(combine("sum", select("pacecar_gpu_power_limit_watts")), "limit"),
            ], unit="watt", empty=NO_GPU, low=0,
            overrides=[{"matcher": {"id": "byName", "options": "limit"}, "properties": [
                {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}}]}])),
    ])  # fmt: skip


def _nodes() -> Section:
    def of(operation: str, expression: str) -> str:
        return combine(operation, expression, *_NODES)

    receive, transmit = (
        of("max", select(f"pacecar_host_network_{way}_utilization_ratio")) for way in ("receive", "transmit")
    )
    drops = " + ".join(
        f"({of('sum', increase(f'pacecar_host_network_{way}_drops_total'))})" for way in ("receive", "transmit")
    )
    free = divide(select("pacecar_host_filesystem_available_bytes"), select("pacecar_host_filesystem_size_bytes"))
    left = divide(select("pacecar_host_memory_available_bytes"), select("pacecar_host_memory_size_bytes"))
    again = divide(
        of("sum", rate("pacecar_host_tcp_segments_retransmitted_total")),
        of("sum", rate("pacecar_host_tcp_segments_sent_total")),
    )
    stalled = rate("pacecar_host_pressure_stalled_seconds_total", {"kind": "some"})
    errors = of("sum", increase("pacecar_rdma_errors_total"))
    worst = (
        f"topk({NODES_TOP}, {of('max', stalled)} or 0 * {of('count', select('pacecar_build_info'))})"
        f" or topk({NODES_TOP // 2}, {again}) or topk({NODES_TOP // 2}, {errors} > 0)"
    )

    def of_worst(expression: str) -> str:
        return f"({expression}) and on ({', '.join(_NODES)}) ({worst})"

    budget = divide(
        of("max", select("pacecar_daemon_cpu_utilization_ratio")), of("max", select("pacecar_daemon_cpu_budget_ratio"))
    )
    return Section("Nodes", [
        (24, 9, ranking("Nodes, the most stalled first", "Stalled: share of time in which tasks waited for processor, "
            "memory or disk, whichever was worst (PSI); absent if the kernel does not count it. Link: the busiest "
            f"interface. Daemon: its CPU time over its own budget. Of many nodes, the {NODES_TOP} that stall most, and "
            f"{NODES_TOP // 2} each with most TCP retransmissions and RDMA errors.", _NODES, [
                replace(column, expression=of_worst(column.expression)) for column in (
                    Column("Stalled", of("max", stalled), "percentunit", steps=[(0.1, WARN), (0.3, BAD)], decimals=0),
                    Column("CPU", of("max", select("pacecar_host_cpu_utilization_ratio")), "percentunit",
                           steps=[(0.9, WARN)], decimals=0),
                    Column("Memory left", of("min", left), "percentunit", decimals=0),
                    Column("Link", f"({receive} > {transmit}) or {transmit} or {receive}", "percentunit",
                           steps=[(0.9, WARN)], decimals=0),
                    Column("TCP again", again, "percentunit", steps=[(0.001, WARN), (0.01, BAD)], decimals=3),
                    Column("Drops", drops, steps=[(1.0, WARN)], decimals=0),
                    Column("RDMA errors", errors, steps=[(1.0, BAD)], decimals=0),
                    Column("Disk left", of("min", free), "percentunit", decimals=0),
                    Column("Daemon", budget, "percentunit", steps=[(0.9, WARN), (1.2, BAD)], decimals=0),
                )
            ], worst="Stalled", empty=NO_DAEMON)),
    ])  # fmt: skip


def fleet_dashboard() -> core.Dashboard:
    """Return the dashboard of all jobs, nodes and GPUs."""
    return dashboard(
        "pacecar-fleet",
        "All jobs, GPUs and nodes, the worst first; names link to details.",
        variables("job", "node"),
        [_now(), _jobs(), _gpus(), _nodes(), gpu_hours_section()],
        time="now-6h",
        refresh="30s",
    )
