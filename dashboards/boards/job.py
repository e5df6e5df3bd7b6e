"""Builds the dashboard "pacecar / Job": pace, time ledger, late ranks, devices, tuner and machines of one job.

The rows follow the order of questions: how fast is it (pace), where does the time go (ledger, communication), which
rank is late (ranks side by side), how well are the devices used, what does the tuner do, and what are the machines
doing.  GPU utilization is near the end on purpose, because a GPU at 98 % may still be slow.

Left out: the tuner's reasons (`tuning`), the machines in full (`node`), other jobs (`fleet`).
"""

from __future__ import annotations

from grafanalib import core

from ..frame import dashboard, decision_marks, variables
from ..palette import BAD, GOOD, WARN
from ..panels import Query, Section, columns, look, state_timeline, table, time_series
from ..queries import NODE, ONE_JOB, RANK, combine, divide
from .efficiency_and_memory import NO_CHECKPOINT, efficiency_section, memory_section
from .ledgers import communication_section, each_rank_section, ledger_section, trust_section
from .pace import NO_JOB, crew_section, pace_section

__all__ = ["job_dashboard"]

NO_NODE = "No daemon is scraped on this job's nodes"
NO_GPU = "No GPU on this job's nodes"
NO_TUNER = "No tuner is at work in this job"
UNPRODUCTIVE = ("data_wait", "exposed_communication", "checkpoint", "stopped")
"""Headings of a step's ledger that train nothing."""

_ON = f"{{{{{NODE}}}}}"

select, rate = ONE_JOB.select, ONE_JOB.rate


def _tuner() -> Section:
    return Section("Tuner (reasons and gains: dashboard Tuning)", [
        (12, 7, state_timeline("State of the tuner", "One bar for each state while the tuner is in it. "
            "Frozen: it has stopped; `pacecar tune status` tells why.",
            [Query(select("pacecar_tuner_state") + " == 1", "{{state}}")], empty=NO_TUNER, shade=GOOD)),
        (12, 7, time_series("Knobs", "Numeric knobs in force. Bytes on the right axis.",
            [Query(combine("max", select("pacecar_knob_value", all_ranks=True), "knob"), "{{knob}}")],
            unit="none", empty="No knob was reported", stepped=True,
            overrides=[look(".*_bytes", regex=True, unit="bytes", custom__axisPlacement="right")])),
    ])  # fmt: skip


def _restarts() -> Section:
    of_rank = f"rank {{{{{RANK}}}}}"
    productive = combine(
        "sum", rate("pacecar_job_ledger_seconds_total", {"heading": f"!~{'|'.join(UNPRODUCTIVE)}"}), RANK
    )
    return Section("Restarts", [
        (12, 7, time_series("Productive time", "Share of time in steps, without waits for data, exposed communication, "
            "checkpoints and stops; steps that are trained again count. Missing while the job is down or starts up.",
            [Query(productive, of_rank)], unit="percentunit", limit=1.0, empty=NO_JOB)),
        (12, 7, time_series("Step of the whole training", "Optimizer updates over all restarts. Where it falls, the "
            "job trains steps again.", [Query(select("pacecar_job_global_step"), of_rank)], unit="none",
            empty="The optimizer does not count its steps: pacer.resume(step)", stepped=True)),
        (8, 6, time_series("Unsaved steps", "Steps since the last checkpoint: what a failure now would lose.",
            [Query(select("pacecar_job_unsaved_steps"), of_rank)], unit="none", empty=NO_CHECKPOINT)),
        (8, 6, time_series("Evaluation", "Share of time that the model is evaluated between steps.",
            [Query(rate("pacecar_job_evaluation_seconds_total"), of_rank)], unit="percentunit", empty=NO_JOB)),
        (4, 6, time_series("Start-up", "From the start of the rank's process to attach.",
            [Query(select("pacecar_job_start_up_seconds"), of_rank)], unit="s", empty=NO_JOB)),
        (4, 6, time_series("Attempt", "How often the job was restarted, as its launchers or the user say.",
            [Query(combine("max", select("pacecar_job_attempt")), "attempt")], unit="none",
            empty="Nothing says which attempt this is", stepped=True)),
    ], collapsed=True)  # fmt: skip


def _machines() -> Section:
    gpu = f"{_ON} GPU {{{{gpu}}}}"
    clock = divide(
        select("pacecar_gpu_clock_hertz", {"clock": "sm"}), select("pacecar_gpu_clock_max_hertz", {"clock": "sm"})
    )
    network = [
        Query(combine("max", select(f"pacecar_host_network_{way}_utilization_ratio"), NODE), f"{_ON} {way}")
        for way in ("receive", "transmit")
    ]
    return Section("Machines of the job (in full: dashboard Node)", [
        (8, 7, time_series("GPU utilization", "Share of time in which any kernel ran, a waiting communication kernel "
            "included. High here does not mean fast: read the ledger.",
            [Query(select("pacecar_gpu_utilization_ratio"), gpu)], unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("GPU clock", "Clock of the multiprocessors, as a share of the highest. One GPU below its "
            "neighbours is a straggler.", [Query(clock, gpu)], unit="percentunit", limit=1.0, empty=NO_GPU)),
        (8, 7, time_series("GPU power", "Power draw, as a share of the enforced limit. At the limit, clocks fall.",
            [Query(divide(select("pacecar_gpu_power_watts"), select("pacecar_gpu_power_limit_watts")), gpu)],
            unit="percentunit", empty=NO_GPU, thresholds=[(1.0, WARN)])),
        (8, 7, time_series("Links in use", "Bytes as a share of the rated speed, on the busiest interface of each "
            "node.",
            network, unit="percentunit", limit=1.0, empty="No interface of these nodes reports its speed")),
        (8, 7, time_series("CPU in use", "Share of CPU time not idle nor waiting for I/O. Data loading and gloo "
            "compete here with the training threads.", [Query(select("pacecar_host_cpu_utilization_ratio"), _ON)],
            unit="percentunit", limit=1.0, empty=NO_NODE)),
        (8, 7, time_series("Memory left", "Share of memory that can be given out without swapping.",
            [Query(divide(select("pacecar_host_memory_available_bytes"), select("pacecar_host_memory_size_bytes")),
                   _ON)],
            unit="percentunit", limit=1.0, empty=NO_NODE)),
    ], collapsed=True)  # fmt: skip


def _ranks() -> Section:
    shown = (RANK, NODE, "host", "local_rank", "device", "backend", "framework", "pid")
    return Section("Ranks", [
        (24, 8, table("Who is who", "One row per rank: where it runs, and on which device.",
            [Query(select("pacecar_rank_info"), "", instant=True)], empty=NO_JOB,
            transformations=columns(*shown))),
        (24, 7, time_series("Silence", "Time since each rank's last step record. It rises while a rank is stuck, "
            "stopped, or in a long step.",
            [Query(select("pacecar_job_last_record_age_seconds"), f"rank {{{{{RANK}}}}}")], unit="s", empty=NO_JOB,
            thresholds=[(120.0, BAD)])),
    ], collapsed=True)  # fmt: skip


def job_dashboard() -> core.Dashboard:
    """Return the dashboard of one training job."""
    return dashboard(
        "pacecar-job",
        "One training job: its pace, where its steps went, which rank is late, the use of its devices, its machines.",
        variables("job", "launch", "node", "gpu", "rank", one_job=True),
        [
            pace_section(), ledger_section(), communication_section(), crew_section(), efficiency_section(), _tuner(),
            memory_section(), _restarts(), each_rank_section(), trust_section(), _machines(), _ranks(),
        ],
        annotations=decision_marks(),
    )  # fmt: skip
