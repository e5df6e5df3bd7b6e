"""Builds the job dashboard's panels of the what-if bounds: how much of the step each change could save at most.

A bound is easily read as a promise, so names say "at most".
"""

from __future__ import annotations

from grafanalib import core

from ..panels import Query, bar_chart, time_series
from ..queries import ONE_JOB, combine

__all__ = ["ladder_age_panel", "what_if_panels"]

NO_LADDER = "No exact window was taken yet, or the ranks are not compared"

select = ONE_JOB.select


def what_if_panels() -> list[tuple[int, int, core.Panel]]:
    """Return the panels: how much each change could save, and the remaining step."""
    gain = combine("max", select("pacecar_job_what_if_gain_ratio", all_ranks=True), "scenario")
    step = combine("max", select("pacecar_job_what_if_step_seconds", all_ranks=True), "scenario")
    pace = Query(combine("max", select("pacecar_job_pace_seconds", all_ranks=True)), "today")
    return [
        (10, 8, bar_chart("What would help most (at most)", "The share of the step that would be saved at most if only "
            "this cost were gone on all ranks. Bounds, not promises, and they do not add up: what is hidden still has "
            "to run, and another resource binds next. Mean of the last ten seconds, from the ledgers of all ranks.",
            [Query(gain, "", instant=True)], unit="percentunit", empty=NO_LADDER, limit=1.0, x_field="scenario",
            transformations=[
                {"id": "organize", "options": {
                    "excludeByName": {"Time": True}, "indexByName": {"scenario": 0, "Value": 1},
                    "renameByName": {"Value": "saves at most"}}},
                {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "saves at most", "desc": True}]}},
            ], overrides=[], is_horizontal=True)),
        (14, 8, time_series("The step, if only this were gone", "Today's pace, and the shortest step that each change "
            "could leave. Where a line lies on today's, that change would win nothing.", [
                pace, Query(step, "{{scenario}}")],
            unit="s", empty=NO_LADDER)),
    ]  # fmt: skip


def ladder_age_panel() -> core.TimeSeries:
    """Return the panel with the age of the calibration behind the what-if bounds."""
    return time_series(
        "Age of the ladder's calibration",
        "Steps since the oldest exact window behind the ladder: as old as this is what it knows of communication.",
        [Query(combine("max", select("pacecar_job_what_if_calibration_age_steps", all_ranks=True)), "steps")],
        unit="none",
        empty=NO_LADDER,
    )
