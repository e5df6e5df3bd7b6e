"""Builds the job dashboard's rows about the ledger (shares of the step that sum to one), its error, and communication.

Every heading has its colour and its place in the stack on all panels, so that one picture can be compared with another.
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
    """Return the share of step time that went to `heading`, of all ranks or of those chosen."""
    return divide(
        combine("sum", rate("pacecar_job_ledger_seconds_total", {"heading": heading}, all_ranks=all_ranks)),
        combine("sum", rate("pacecar_job_step_wall_seconds_total", all_ranks=all_ranks)),
    )


def _ledger_stack(title: str, text: str, *, repeat: str | None = None) -> core.TimeSeries:
    """One query a heading: Prometheus returns series in no promised order, and a stack needs one."""
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
        "Ledger by rank", "Where each rank's time went over the range shown. A rank that waits for another shows "
        "exposed communication; the one that is waited for shows less of it.",
        [Query(share, "", instant=True)], unit="percentunit", empty=NO_JOB, limit=1.0, x_field=f"{RANK}\\heading",
        transformations=[
            # As numbers, or 10 comes before 2.
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
    """Return the row about the ledger and about what would help."""
    return Section("Ledger: where the step went", [
        (14, 10, _ledger_stack("Ledger", "Share of step time by heading, of the ranks chosen; the headings sum to one. "
            "Only compute, and the optimizer's own work, is what the job is for.")),
        (10, 10, _ledger_by_rank()),
        *what_if_panels(),
    ])  # fmt: skip


def communication_section() -> Section:
    """Return the row about what is communicated, how much of it is hidden, and how fast it goes."""

    def of_step(name: str) -> str:
        return divide(combine("sum", rate(name)), combine("sum", rate("pacecar_job_step_wall_seconds_total")))

    overlap = divide(
        combine("sum", rate("pacecar_job_overlapped_communication_seconds_total"), RANK),
        combine("sum", rate("pacecar_job_communication_seconds_total"), RANK),
    )
    return Section("Communication", [
        (6, 7, time_series("Overlap ratio", "Communication that ran under compute, over all communication; of "
            "many ranks the 16 with least. Absent while nothing was communicated.",
            [Query(f"bottomk(16, {overlap})", f"rank {{{{{RANK}}}}}")],
            unit="percentunit", limit=1.0, empty="No communication was measured")),
        (6, 7, time_series("Communication", "Communication per second of step: all of it, and the part that was hidden "
            "under compute. The gap between the lines is what the job waits for.", [
                Query(of_step("pacecar_job_communication_seconds_total"), "all"),
                Query(of_step("pacecar_job_overlapped_communication_seconds_total"), "overlapped"),
            ], unit="percentunit", empty=NO_JOB)),
        (6, 7, time_series("Collectives of a step", "Time of the collectives of one operation in the step of the last "
            "exact window, mean of the ranks chosen; waiting for a late rank is inside.", [
                Query(combine("avg", select("pacecar_job_collective_duration_seconds"), "op"), "{{op}}"),
                Query(combine("avg", select("pacecar_job_collectives"), "op"), "{{op}}: count"),
            ], unit="s", empty="No collective was seen in an exact window", overrides=[
                look(".*: count", regex=True, unit="none", custom__axisPlacement="right")])),
        (6, 7, time_series("Bus bandwidth", "Bus bandwidth of those collectives, to compare with the links' speed, "
            "and their size. Absent on gloo, which does not say sizes.", [
                Query(combine("avg", select("pacecar_job_collective_bus_bandwidth_bytes_per_second"), "op"), "{{op}}"),
                Query(combine("avg", select("pacecar_job_collective_bytes"), "op"), "{{op}}: size"),
            ], unit="Bps", empty="The backend does not say how large its collectives are", overrides=[
                look(".*: size", regex=True, unit="bytes", custom__axisPlacement="right")])),
    ])  # fmt: skip


def each_rank_section() -> Section:
    """Return the row with one ledger a rank."""
    panel = _ledger_stack("Rank $rank", "Share of step time by heading, of one rank.", repeat="rank")
    return Section("Ledger of each rank over time", [(6, 7, panel)], collapsed=True)


def trust_section() -> Section:
    """Return the row that says how far the ledger can be trusted."""
    return Section("How far the ledger can be trusted", [
        (12, 7, time_series("Age of the calibration", "Steps since the exact window that the estimate rests on. "
            "Absent before the first window, when most of the ledger is unknown.",
            [Query(combine("max", select("pacecar_job_ledger_calibration_age_steps"), RANK), f"rank {{{{{RANK}}}}}")],
            unit="none", empty="No exact window was taken yet")),
        (12, 7, ladder_age_panel()),
        (12, 7, time_series("Error of the estimate", "Share of the step that the estimate would have put under a wrong "
            "heading, asked at each exact window before it is learned from; and the bound of what the profiler's own "
            "slow-down can have moved. The estimate is meant to stay under 5 %.", [
                Query(combine("max", select("pacecar_job_estimate_error_ratio"), RANK), f"rank {{{{{RANK}}}}}"),
                Query(combine("max", select("pacecar_job_estimate_bias_limit_ratio")), "bound of the profiler's bias"),
            ], unit="percentunit", empty="Fewer than two exact windows were taken", thresholds=[(0.05, BAD)])),
        (12, 7, time_series("Error by heading", "Estimate minus exact over the step, mean of the ranks chosen: above "
            "zero the estimate says too much.",
            [Query(combine("avg", select("pacecar_job_estimate_heading_error_ratio", {"heading": heading})), heading)
             for heading in HEADING_COLOURS],
            unit="percentunit", empty="Fewer than two exact windows were taken",
            overrides=[colour(heading, shade) for heading, shade in HEADING_COLOURS.items()])),
        (24, 5, time_series("Not calibrated yet", "Ranks without an exact window so far, by the reason, and what the "
            "first is expected to cost. By `price` it waits until the overhead budget has earned it.", [
                Query(combine("sum", select("pacecar_job_ledger_uncalibrated"), "reason"), "{{reason}}"),
                Query(combine("max", select("pacecar_job_window_predicted_seconds")), "expected cost of a window"),
            ], unit="none", empty="Every rank has had an exact window", overrides=[
                look("expected cost of a window", unit="s", custom__axisPlacement="right")])),
    ], collapsed=True)  # fmt: skip
