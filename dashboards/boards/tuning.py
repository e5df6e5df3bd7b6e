"""Builds the dashboard "pacecar / Tuning": what was decided in one job, the gain expected and measured, and the cost.

Knobs and throughput both change for other reasons too.  So each decision is marked on the pace, each verdict has the
gain measured in interleaved windows, and the cost of trials is shown beside their gain.
"""

from __future__ import annotations

from grafanalib import core

from pacecar.config import TuneConfig

from ..frame import dashboard, decision_marks, variables
from ..palette import BAD, GOOD, WARN
from ..panels import Query, Section, look, stat, state_timeline, time_series
from ..queries import ONE_JOB, RANK, combine, divide
from .ranking import Column, ranking

__all__ = ["tuning_dashboard"]

NO_JOB = "No job has reported here yet"
NO_TUNER = "No tuner is at work in this job"
NO_TRIAL = "No trial was decided yet"

_BUDGET = TuneConfig().exploration_budget
_DASHED = {"custom__lineStyle": {"fill": "dash", "dash": [8, 8]}}

select, rate, increase, mean_of = ONE_JOB.select, ONE_JOB.rate, ONE_JOB.increase, ONE_JOB.mean_of


def _spent() -> str:
    """Return the time lost to trials over the time trained."""
    lost = combine("max", select("pacecar_tuner_exploration_seconds"))
    return divide(lost, combine("max", select("pacecar_job_step_wall_seconds_total", all_ranks=True)))


def _now() -> Section:
    decided = select("pacecar_tuner_decisions_total")
    kept = combine("sum", select("pacecar_tuner_verdicts_total", {"outcome": "kept"}))
    verdicts = combine("sum", select("pacecar_tuner_verdicts_total"))
    return Section("Now", [
        (4, 4, stat("Tuner", "The state of the tuner. Frozen: it has stopped.",
            [Query(select("pacecar_tuner_state") + " == 1", "{{state}}", instant=True)], unit="none", empty=NO_TUNER,
            show="name")),
        (4, 4, stat("Trials and advice", "Decisions so far.", [Query(combine("sum", decided), "decisions")],
            unit="none", empty=NO_TRIAL)),
        (4, 4, stat("Kept", "Verdicts that kept the change, as a share of all verdicts. A low share is fine, because "
            "a trial that is taken back costs little.",
            [Query(divide(f"({kept} or 0 * {verdicts})", verdicts), "kept")],
            unit="percentunit", empty="No verdict yet", decimals=0)),
        (4, 4, stat("Exploration spent", "Time lost to trials as a share of the time trained, against the default "
            "budget. Negative: the trials gained.", [Query(_spent(), "spent")], unit="percentunit", empty=NO_TUNER,
            decimals=2, thresholds=[(-1.0, GOOD), (_BUDGET, WARN), (2 * _BUDGET, BAD)])),
        (4, 4, stat("Forecasts off by", "Difference between the last judged forecast and its measurement, for the "
            "worst knob.", [Query(combine("max", select("pacecar_tuner_forecast_error_ratio")), "off by")],
            unit="percentunit", empty="No forecast was judged yet", decimals=1,
            thresholds=[(0.0, GOOD), (0.1, WARN)])),
        (4, 4, stat("Epochs apart", "Difference between the newest and the oldest knob epoch. Above zero for longer "
            "than a step means that ranks run different settings.",
            [Query(f"{_epoch('max')} - {_epoch('min')}", "apart")],
            unit="none", empty=NO_TUNER, thresholds=[(0.0, GOOD), (1.0, BAD)])),
    ])  # fmt: skip


def _epoch(operation: str) -> str:
    return combine(operation, select("pacecar_knob_epoch", all_ranks=True))


def _pace() -> Section:
    pace = combine("max", mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total", all_ranks=True))
    samples = combine("sum", rate("pacecar_job_samples_total", all_ranks=True))
    tokens = combine("sum", rate("pacecar_job_tokens_total", all_ranks=True))
    return Section("Pace and decisions", [
        (16, 9, time_series("Pace and decisions", "Mean step of the slowest rank. The marks are decisions, verdicts "
            "and orders by hand; hover over one for its knob. A step with more samples takes longer, so compare "
            "the throughput beside it.", [Query(pace, "slowest rank")], unit="s", empty=NO_JOB)),
        (8, 9, time_series("Throughput", "Samples and tokens per second. If the batch changes, this shows the gain, "
            "and not the step time.", [
                Query(samples, "samples/s"),
                Query(tokens, "tokens/s"),
            ], unit="short", empty="The hook counts neither samples nor tokens",
            overrides=[look("tokens/s", custom__axisPlacement="right")])),
        (24, 5, state_timeline("State of the tuner", "One bar for each state while the tuner is in it. Frozen: it has "
            "stopped; `pacecar tune status` tells why, and `pacecar tune resume` starts it again.",
            [Query(select("pacecar_tuner_state") + " == 1", "{{state}}")], empty=NO_TUNER, shade=GOOD)),
    ])  # fmt: skip


def _gains() -> Section:
    def of_knob(metric: str) -> str:
        return combine("max", select(metric), "knob")

    def verdicts(outcome: str) -> str:
        one = combine("sum", select("pacecar_tuner_verdicts_total", {"outcome": outcome}), "knob")
        return f"{one} or 0 * {combine('sum', select('pacecar_tuner_verdicts_total'), 'knob')}"

    return Section("Expected and measured gain", [
        (12, 8, time_series("Expected and measured gain", "Share of step time that the last decision expected to save "
            "(dashed), and that the last verdict measured. Negative: it cost time, and was taken back.", [
                Query(of_knob("pacecar_tuner_expected_gain_ratio"), "{{knob}} expected"),
                Query(of_knob("pacecar_tuner_measured_gain_ratio"), "{{knob}} measured"),
                Query(of_knob("pacecar_tuner_forecast_error_ratio"), "{{knob}} off by"),
            ], unit="percentunit", empty=NO_TRIAL, stepped=True,
            overrides=[look(".* expected", regex=True, **_DASHED)])),
        (12, 8, ranking("Gain by knob", "The last decision and verdict of each knob, and the outcomes of all "
            "trials: kept, rolled back, barred (never again) or abandoned (conditions changed).", ["knob"], [
                Column("Expected", of_knob("pacecar_tuner_expected_gain_ratio"), "percentunit", decimals=1),
                Column("Measured", of_knob("pacecar_tuner_measured_gain_ratio"), "percentunit", decimals=1,
                       steps=[(0.001, GOOD)]),
                Column("Off by", of_knob("pacecar_tuner_forecast_error_ratio"), "percentunit", decimals=1),
                Column("Kept", verdicts("kept")),
                Column("Rolled back", verdicts("rolled_back"), width=88),
                Column("Barred", verdicts("barred")),
                Column("Abandoned", verdicts("abandoned"), width=88),
            ], worst="Measured", empty=NO_TRIAL)),
        (8, 7, time_series("Decisions and verdicts", "Trials started, advice given, and their outcomes, so far.", [
                Query(combine("sum", select("pacecar_tuner_decisions_total"), "kind"), "{{kind}}"),
                Query(combine("sum", select("pacecar_tuner_verdicts_total"), "outcome"), "{{outcome}}"),
            ], unit="none", empty=NO_TRIAL, stepped=True)),
        (8, 7, time_series("Exploration against its budget", "Time lost to trials as a share of the time trained, "
            "against the setting in force before each. The line is the default budget; negative when the trials "
            "themselves gained.", [Query(_spent(), "spent")], unit="percentunit", empty=NO_TUNER, decimals=2,
            soft_limit=1.2 * _BUDGET, thresholds=[(_BUDGET, BAD)])),
        (8, 7, time_series("Exploration in seconds", "Time lost to trials so far.",
            [Query(combine("max", select("pacecar_tuner_exploration_seconds")), "lost")], unit="s", empty=NO_TUNER)),
    ])  # fmt: skip


def _knobs() -> Section:
    def in_force(knobs: str) -> list[Query]:
        value = select("pacecar_knob_value", {"knob": knobs})
        return [Query(combine("max", value, "knob"), "{{knob}}")]

    return Section("Knobs", [
        (8, 7, time_series("Knobs in bytes", "Sizes in force: buckets and the like.", in_force("=~.*_bytes"),
            unit="bytes", empty="No knob of this job is a size", stepped=True)),
        (8, 7, time_series("Knobs in numbers", "All other numeric knobs in force; choices such as compression are in "
            "the log and in `pacecar report`.", in_force("!~.*_bytes"),
            unit="none", empty="No numeric knob was reported", stepped=True)),
        (8, 7, time_series("Micro-batches", "Micro-batches in the last step of a rank.",
            [Query(select("pacecar_job_micro_batches"), f"rank {{{{{RANK}}}}}")], unit="none", empty=NO_JOB,
            stepped=True)),
        (8, 7, time_series("Knob epoch by rank", "How often the knobs were switched; the same on all ranks.",
            [Query(select("pacecar_knob_epoch"), f"rank {{{{{RANK}}}}}")], unit="none", empty=NO_TUNER,
            stepped=True)),
        (8, 7, time_series("What switching takes", "Duration of the last switch, and number of switches per "
            "rank.", [
                Query(combine("max", select("pacecar_knob_switch_duration_seconds")), "last switch, slowest rank"),
                Query(combine("max", increase("pacecar_knob_switches_total")), "switches in the window"),
            ], unit="s", empty="No knob was turned", overrides=[
                look("switches in the window", unit="none", custom__axisPlacement="right")])),
        (8, 7, time_series("Orders by hand", "Orders given with `pacecar tune` so far, and their outcomes.",
            [Query(combine("sum", select("pacecar_tuner_orders_total"), "action", "outcome"),
                   "{{action}} {{outcome}}")],
            unit="none", empty="No orders were given", stepped=True)),
    ])  # fmt: skip


def _unrest() -> Section:
    late = select("pacecar_job_straggler_excess_seconds", all_ranks=True)
    return Section("What else moves the pace", [
        (12, 7, time_series("Stragglers meanwhile", "Trials pause while a rank is late.",
            [Query(late, f"rank {{{{{RANK}}}}}: {{{{cause}}}}")], unit="s", empty="No rank is late")),
        (12, 7, time_series("Links meanwhile", "The busiest interface of each of the job's nodes. Trials pause for "
            "foreign traffic, which changes step times.",
            [Query(combine("max", select("pacecar_host_network_transmit_utilization_ratio"), "instance"),
                   "{{instance}}")],
            unit="percentunit", limit=1.0, empty="No interface of these nodes reports its speed")),
    ], collapsed=True)  # fmt: skip


def tuning_dashboard() -> core.Dashboard:
    """Return the dashboard of what the tuner did in one job."""
    return dashboard(
        "pacecar-tuning",
        "What the tuner of one job decided, what it expected, what was measured, and what the trials cost.",
        variables("job", "launch", "node", "rank", one_job=True),
        [_now(), _pace(), _gains(), _knobs(), _unrest()],
        annotations=decision_marks(),
    )
