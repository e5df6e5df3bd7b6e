"""Builds the job dashboard's rows about the ledger (shares of the step that sum to one), its error, and communication.

A heading has the same colour and place in the stack on all panels, so that they can be compared.
"""

from __future__ import annotations

from grafanalib import core

from ..palette import BAD, HEADING_COLOURS
from ..panels import Query, Section, bar_chart, colour, look, time_series
from ..queries import ONE_JOB, RANK, combine, divide
from .whatif import ladder_age_panel, what_if_panels

__all__ = ["communication_section", "each_rank_section", "ledger_section", "share_of_step", "trust_section"]

NO_JOB = "No job has reported here yet"

select, rate, increase = ONE_JOB.select, ONE_JOB.rate, ONE_JOB.increase


def share_of_step(heading: str, *, all_ranks: bool = True) -> str:
    """Return the share of step time that went to `heading`, of all ranks or of the selected ones."""
    return divide(
        combine("sum", rate("pacecar_job_ledger_seconds_total", {"heading": heading}, all_ranks=all_ranks)),
        combine("sum", rate("pacecar_job_step_wall_seconds_total", all_ranks=all_ranks)),
    )


def _ledger_stack(title: str, text: str, *, repeat: str | None = None) -> core.TimeSeries:
    """Return the stack, with one query per heading, because Prometheus does not guarantee the order of series."""
    return time_series(
        title, text, [Query(share_of_step(heading, all_ranks=False), heading) for heading in HEADING_COLOURS],
        unit="percentunit", empty=NO_JOB, stacked=True, limit=1.0, repeat=repeat,
        overrides=[colour(heading, shade) for heading, shade in HEADING_COLOURS.items()],
    )  # fmt: skip


def _ledger_by_rank() -> core.BarChart:
    grown = increase("pacecar_job_ledger_seconds_total", window="$__range")
    wall = increase("pacecar_job_step_wall_seconds_total", window="$__range")
    share = divide(
        combine("sum", grown, RANK, "heading"), combine("sum", wall, RANK), matching=f"on ({RANK}) group_left ()"
    )
    order = {f"{RANK}\\heading": 0, **{heading: index for index, heading in enumerate(HEADING_COLOURS, start=1)}}
    return bar_chart(
        "Ledger by rank", "Where each rank's time went in the range shown. A rank that waits for another has more "
        "exposed communication than the one it waits for.",
        [Query(share, "", instant=True)], unit="percentunit", empty=NO_JOB, limit=1.0, x_field=f"{RANK}\\heading",
        transformations=[
            # As numbers, so that 2 comes before 10.
            {"id": "convertFieldType",
             "options": {"conversions": [{"targetField": RANK, "destinationType": "number"}], "fields": {}}},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": RANK}]}},
            {"id": "groupingToMatrix",
             "options": {"columnField": "heading", "rowField": RANK, "valueField": "Value"}},
            {"id": "organize", "options": {"indexByName": order, "excludeByName": {}, "renameByName": {}}},
        ],
        overrides=[
            *(colour(heading, shade) for heading, shade in HEADING_COLOURS.items()),
            look(f"{RANK}\\heading", unit="string"),
        ],
    )  # fmt: skip


def ledger_section() -> Section:
    """Return the row about the ledger and what would help."""
    return Section("Ledger: where the step went", [
        (14, 10, _ledger_stack("Ledger", "Share of step time by heading, of the selected ranks; they sum to one. "
            "Only compute and the optimizer's own work are useful.")),
        (10, 10, _ledger_by_rank()),
        *what_if_panels(),
    ])  # fmt: skip


def communication_section() -> Section:
    """Return the row about communication: how much, how much of it is hidden, and how fast."""

    def of_step(name: str) -> str:
        return divide(combine("sum", rate(name)), combine("sum", rate("pacecar_job_step_wall_seconds_total")))

    overlap = divide(
        combine("sum", rate("pacecar_job_overlapped_communication_seconds_total"), RANK),
        combine("sum", rate("pacecar_job_communication_seconds_total"), RANK),
    )
    return Section("Communication", [
        (6, 7, time_series("Overlap ratio", "Communication that ran under compute, over all communication; of "
            "many ranks, the 16 lowest. Absent without communication.",
            [Query(f"bottomk(16, {overlap})", f"rank {{{{{RANK}}}}}")],
            unit="percentunit", limit=1.0, empty="No communication was measured")),
        (6, 7, time_series("Communication", "Communication per second of step: all of it, and the part hidden under "
            "compute. The job waits for the difference.", [
                Query(of_step("pacecar_job_communication_seconds_total"), "all"),
                Query(of_step("pacecar_job_overlapped_communication_seconds_total"), "overlapped"),
            ], unit="percentunit", empty=NO_JOB)),
        (6, 7, time_series("Collectives of a step", "Time of collectives by operation, in the step of the last exact "
            "window, mean of the selected ranks, including waits for late ranks.", [
                Query(combine("avg", select("pacecar_job_collective_duration_seconds"), "op"), "{{op}}"),
                Query(combine("avg", select("pacecar_job_collectives"), "op"), "{{op}}: count"),
            ], unit="s", empty="No collective was seen in an exact window", overrides=[
                look(".*: count", regex=True, unit="none", custom__axisPlacement="right")])),
        (6, 7, time_series("Bus bandwidth", "Bus bandwidth of those collectives, comparable with the links' speed, "
            "and their size. Absent on gloo, which does not report sizes.", [
                Query(combine("avg", select("pacecar_job_collective_bus_bandwidth_bytes_per_second"), "op"), "{{op}}"),
                Query(combine("avg", select("pacecar_job_collective_bytes"), "op"), "{{op}}: size"),
            ], unit="Bps", empty="The backend does not report the size of collectives", overrides=[
                look(".*: size", regex=True, unit="bytes", custom__axisPlacement="right")])),
    ])  # fmt: skip


def each_rank_section() -> Section:
    """Return the row with one ledger per rank."""
    panel = _ledger_stack("Rank $rank", "Share of step time by heading, of one rank.", repeat="rank")
    return Section("Ledger of each rank over time", [(6, 7, panel)], collapsed=True)


def trust_section() -> Section:
    """Return the row about the accuracy of the ledger."""
    return Section("How far the ledger can be trusted", [
        (12, 7, time_series("Age of the calibration", "Steps since the exact window behind the estimate. "
            "Absent before the first window, when most of the ledger is unknown.",
            [Query(combine("max", select("pacecar_job_ledger_calibration_age_steps"), RANK), f"rank {{{{{RANK}}}}}")],
            unit="none", empty="No exact window was taken yet")),
        (12, 7, ladder_age_panel()),
        (12, 7, time_series("Error of the estimate", "Share of the step that the estimate would put under a wrong "
            "heading, checked at each exact window before it is used for calibration; and a bound on the profiler's "
            "own effect. The goal is less than 5 %.", [
                Query(combine("max", select("pacecar_job_estimate_error_ratio"), RANK), f"rank {{{{{RANK}}}}}"),
                Query(combine("max", select("pacecar_job_estimate_bias_limit_ratio")), "bound of the profiler's bias"),
            ], unit="percentunit", empty="Fewer than two exact windows were taken", thresholds=[(0.05, BAD)])),
        (12, 7, time_series("Error by heading", "Estimate minus exact, over the step, mean of the selected ranks; "
            "positive if the estimate is too high.",
            [Query(combine("avg", select("pacecar_job_estimate_heading_error_ratio", {"heading": heading})), heading)
             for heading in HEADING_COLOURS],
            unit="percentunit", empty="Fewer than two exact windows were taken",
            overrides=[colour(heading, shade) for heading, shade in HEADING_COLOURS.items()])),
        (24, 5, time_series("Not calibrated yet", "Ranks without an exact window so far, by reason, and the expected "
            "cost of the first. `price`: it waits until the overhead budget allows it.", [
                Query(combine("sum", select("pacecar_job_ledger_uncalibrated"), "reason"), "{{reason}}"),
                Query(combine("max", select("pacecar_job_window_predicted_seconds")), "expected cost of a window"),
            ], unit="none", empty="Every rank has had an exact window", overrides=[
                look("expected cost of a window", unit="s", custom__axisPlacement="right")])),
    ], collapsed=True)  # fmt: skip
