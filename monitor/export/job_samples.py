"""Turns the views of jobs into samples, in the catalog's internal units.

What a hook could not measure is absent.  A state is one series of 0 or 1 for each possible state, so that a change of
state makes no new series.  The host's samples are in the snapshot already, and each part of the daemon yields its own
(`own_samples`).

Everything here is pure: views in, samples out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from pacecar.records import (
    CollectiveWindow,
    EstimateCheck,
    JobHello,
    Sample,
    StepRecord,
    Vitals,
    WhatIf,
)
from pacecar.records.job_identity import JobKey

from ..catalog_sample import sample
from ..fault_containment import ContainedPart, FaultContainment
from ..histogram import HistogramSample, Served
from ..jobs.cgroup_identity import Residence, reside
from ..jobs.rank_health import rank_health_samples
from ..jobs.tracked_job import JobView, RankView

__all__ = ["TUNER_STATES", "job_samples"]

TUNER_STATES = ("off", "advising", "warming", "screening", "trial", "watching", "frozen")
"""The states of `TunerStatus`, in the order in which a tuner reaches them."""


Labels = tuple[str, str, str]


def _nowhere(hello: JobHello) -> Residence:
    return reside(None, {}, hello)


def job_samples(
    jobs: Sequence[JobView],
    residence: Callable[[JobHello], Residence] = _nowhere,
    faults: FaultContainment | None = None,
) -> Iterator[Served]:
    """Yield the series of all jobs; `residence` returns where a rank runs.

    If the samples of a rank or job raise, it has no series this time, and `faults` counts it.
    """
    faults = faults or FaultContainment()
    for job in jobs:
        subject = f"job {job.job!r}"
        for rank in job.ranks:
            yield from faults.each(ContainedPart.JOB, subject, partial(_rank_samples, rank, residence))
        yield from faults.each(ContainedPart.JOB, subject, partial(_whole_job_samples, job))


def _whole_job_samples(job: JobView) -> Iterator[Served]:
    if job.ranks:
        started_ns = min(rank.hello.started_wall_ns for rank in job.ranks)
        yield sample("pacecar_job_start_time_seconds", started_ns, *job.key)
        attempts = [rank.hello.attempt for rank in job.ranks if rank.hello.attempt is not None]
        yield from _known({"pacecar_job_attempt": max(attempts, default=None)}, *job.key)
    if job.step_durations is not None:
        metric = "pacecar_job_step_duration_distribution_seconds"
        yield HistogramSample(metric, tuple(job.key), job.step_durations)
    yield from _tuner_samples(job)
    yield from rank_health_samples(job.key, job.health)
    if job.what_if is not None:
        yield from _what_if_samples(job.key, job.what_if)


def _rank_samples(rank: RankView, residence: Callable[[JobHello], Residence]) -> Iterator[Sample]:
    hello = rank.hello
    labels = (*JobKey.of(hello), str(hello.rank))
    yield sample(
        "pacecar_rank_info",
        1,
        *labels,
        str(hello.local_rank),
        str(hello.world_size),
        hello.host,
        str(hello.pid),
        hello.device,
        hello.device_uuid or "",
        hello.backend or "",
        hello.framework,
        *residence(hello),
    )
    began_ns = hello.process_wall_ns
    if began_ns is not None and began_ns <= hello.started_wall_ns:
        yield sample("pacecar_job_start_up_seconds", hello.started_wall_ns - began_ns, *labels)
    if rank.step is not None:
        yield from _step_samples(rank.step, labels)
    if rank.vitals is not None:
        yield from _vitals_samples(rank.vitals, labels)
    if rank.check is not None:
        yield from _check_samples(rank.check, labels)
    if rank.collectives is not None:
        yield from _collective_samples(rank.collectives, labels)
    if rank.step_age_ns is not None:
        yield sample("pacecar_job_last_record_age_seconds", rank.step_age_ns, *labels)
    if rank.knobs is not None:
        yield sample("pacecar_knob_epoch", rank.knobs.epoch, *labels)
        for knob, value in rank.knobs.values.items():
            if not isinstance(value, str):
                yield sample("pacecar_knob_value", value, *labels, knob)
    yield sample("pacecar_knob_switches_total", rank.switches, *labels)
    if rank.switch is not None:
        yield sample("pacecar_knob_switch_duration_seconds", rank.switch.duration_ns, *labels)


def _known(figures: Mapping[str, int | float | None], *labels: str) -> Iterator[Sample]:
    """Yield a sample of each metric whose figure is not None."""
    for metric, value in figures.items():
        if value is not None:
            yield sample(metric, value, *labels)


def _step_samples(step: StepRecord, labels: Labels) -> Iterator[Sample]:
    figures: dict[str, int | float | None] = {
        "pacecar_job_steps_total": step.total_steps,
        "pacecar_job_step": step.step,
        "pacecar_job_global_step": step.global_step,
        "pacecar_job_unsaved_steps": None if step.saved_steps is None else max(0, step.total_steps - step.saved_steps),
        "pacecar_job_step_duration_seconds": step.wall_ns,
        "pacecar_job_step_wall_seconds_total": step.totals.wall_ns,
        "pacecar_job_communication_seconds_total": step.totals.communication_ns,
        "pacecar_job_overlapped_communication_seconds_total": step.totals.overlapped_communication_ns,
        "pacecar_job_windows_total": step.total_windows,
        "pacecar_job_overhead_seconds_total": step.total_overhead_ns,
        "pacecar_job_garbage_collection_seconds_total": step.total_gc_ns,
        "pacecar_job_compilation_seconds_total": step.total_compile_ns,
        "pacecar_job_evaluation_seconds_total": step.total_evaluation_ns,
        "pacecar_job_hook_measuring": int(step.measured_every is not None),
        "pacecar_job_records_dropped_total": step.dropped_records,
        "pacecar_job_samples_total": step.total_samples,
        "pacecar_job_samples_guessed": None if step.total_samples is None else int(step.samples_guessed),
        "pacecar_job_tokens_total": step.total_tokens,
        "pacecar_job_ledger_calibration_age_steps": step.calibration_age_steps,
        "pacecar_job_micro_batches": step.micro_batches,
        "pacecar_job_window_predicted_seconds": step.window_price_ns,
        "pacecar_job_measured_every_steps": step.measured_every,
    }
    yield from _known(figures, *labels)
    if step.uncalibrated is not None:
        yield sample("pacecar_job_ledger_uncalibrated", 1, *labels, step.uncalibrated)
    for phase in ("data_wait", "forward", "backward", "optimizer"):
        duration = getattr(step, f"{phase}_ns")
        if duration is not None:
            yield sample("pacecar_job_step_phase_duration_seconds", duration, *labels, phase)
    for heading, duration in step.totals.parts().items():
        yield sample("pacecar_job_ledger_seconds_total", duration, *labels, heading)


def _vitals_samples(vitals: Vitals, labels: Labels) -> Iterator[Sample]:
    if vitals.flops_source is not None:
        yield sample("pacecar_job_flops_info", 1, *labels, vitals.flops_source, vitals.arithmetic or "")
    figures: dict[str, int | float | None] = {
        "pacecar_job_step_flops": vitals.step_flops,
        "pacecar_job_model_flops_per_second": vitals.flops_per_second,
        "pacecar_job_device_peak_flops_per_second": vitals.peak_flops_per_second,
        "pacecar_job_mfu_ratio": vitals.mfu_ratio,
        "pacecar_job_checkpoints_total": vitals.total_checkpoints,
        "pacecar_job_checkpoint_seconds_total": vitals.total_checkpoint_ns,
    }
    memory = vitals.memory
    if memory is not None:
        figures |= {
            "pacecar_job_memory_allocated_bytes": memory.allocated_bytes,
            "pacecar_job_memory_reserved_bytes": memory.reserved_bytes,
            "pacecar_job_memory_allocated_peak_bytes": memory.allocated_peak_bytes,
            "pacecar_job_memory_inactive_split_bytes": memory.inactive_split_bytes,
            "pacecar_job_memory_fragmentation_ratio": memory.fragmentation_ratio,
            "pacecar_job_memory_allocation_retries_total": memory.total_allocation_retries,
            "pacecar_job_memory_out_of_memory_total": memory.total_out_of_memory,
        }
    yield from _known(figures, *labels)


def _what_if_samples(job: JobKey, what_if: WhatIf) -> Iterator[Sample]:
    yield sample("pacecar_job_what_if_calibration_age_steps", what_if.calibration_age_steps, *job)
    for scenario in what_if.rungs:
        yield sample("pacecar_job_what_if_step_seconds", scenario.step_ns, *job, scenario.name)
        yield sample("pacecar_job_what_if_gain_ratio", scenario.gain_ratio, *job, scenario.name)


def _check_samples(check: EstimateCheck, labels: Labels) -> Iterator[Sample]:
    figures = {
        "pacecar_job_estimate_error_ratio": check.error_ratio,
        "pacecar_job_estimate_bias_limit_ratio": check.bias_limit_ratio,
    }
    yield from _known(figures, *labels)
    if check.exact.wall_ns:
        for heading, error_ns in check.heading_errors_ns.items():
            ratio = error_ns / check.exact.wall_ns
            yield sample("pacecar_job_estimate_heading_error_ratio", ratio, *labels, heading)


def _collective_samples(window: CollectiveWindow, labels: Labels) -> Iterator[Sample]:
    for one in window.sums:
        figures = {
            "pacecar_job_collectives": one.count,
            "pacecar_job_collective_duration_seconds": one.duration_ns,
            "pacecar_job_collective_bytes": one.bytes,
            "pacecar_job_collective_bus_bandwidth_bytes_per_second": one.bus_bandwidth,
        }
        yield from _known(figures, *labels, one.operation)


def _tuner_samples(job: JobView) -> Iterator[Sample]:
    for (action, outcome), count in job.order_tallies.items():
        yield sample("pacecar_tuner_orders_total", count, *job.key, action, outcome)
    if job.tuner is not None:
        for state in TUNER_STATES:
            yield sample("pacecar_tuner_state", int(state == job.tuner.state), *job.key, state)
        yield sample("pacecar_tuner_exploration_seconds", job.tuner.exploration_ns, *job.key)
    for what, tallies in (("decisions", job.decision_tallies), ("verdicts", job.verdict_tallies)):
        for (knob, kind), count in tallies.items():
            yield sample(f"pacecar_tuner_{what}_total", count, *job.key, knob, kind)
    for what in ("expected_gain", "measured_gain", "forecast_error"):
        for knob, ratio in getattr(job, what).items():
            yield sample(f"pacecar_tuner_{what}_ratio", ratio, *job.key, knob)
