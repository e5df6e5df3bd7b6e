"""Builds a table of jobs, nodes or GPUs: a row for each, a column per figure, worst first.

Values out of bounds are coloured, and names link to the dashboard of that job or node.

Each column is one instant query, grouped by the same labels, so that Grafana's `merge` can join them.  A label that is
absent everywhere (`cluster`, mostly) makes no column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafanalib import core

from ..panels import Query, Steps, heads, look, table, thresholds_of
from ..queries import CLUSTER, GPU, JOB, LAUNCH, NODE

__all__ = ["LINKS", "Column", "ranking"]

_CARRIED = "${datasource:queryparam}&${cluster:queryparam}&${__url_time_range}"

_ONE_JOB = f"var-job=${{__value.text}}&var-launch=${{__data.fields.{heads(LAUNCH)}}}"
"""Selects the job of this row by name and launch, because two jobs may have one name."""

LINKS = {
    JOB: [
        {"title": "The job: where its time goes", "url": f"/d/pacecar-job?{_ONE_JOB}&{_CARRIED}"},
        {"title": "Its tuning", "url": f"/d/pacecar-tuning?{_ONE_JOB}&{_CARRIED}"},
    ],
    NODE: [
        {"title": "The node", "url": f"/d/pacecar-node?var-node=${{__value.text}}&{_CARRIED}"},
        {"title": "Its daemon", "url": f"/d/pacecar-itself?var-node=${{__value.text}}&{_CARRIED}"},
    ],
}
"""Where the name of a job or a node links to."""


WIDTHS = {CLUSTER: 90, GPU: 60, JOB: 200, LAUNCH: 150, NODE: 160, "knob": 140, "pod_namespace": 150}
"""Widths in pixels of columns that need less than their share, and of names, which should not be cut.

Not minimum widths, which Grafana adds to the shares, so that the table would be wider than its panel.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: a query with one value per row; `steps` colour cells from a value on."""

    title: str
    expression: str
    unit: str = "none"
    steps: Steps = ()
    decimals: int | None = None
    width: int | None = None


def ranking(
    title: str,
    text: str,
    keys: Sequence[str],
    questions: Sequence[Column],
    *,
    worst: str,
    empty: str,
) -> core.Table:
    """Return the table with a row per combination of the labels `keys`, sorted by `worst`, highest first."""
    titles = [question.title for question in questions]
    assert worst in titles, f"{title}: no column {worst}"
    columns = [*keys, *(f"Value #{chr(ord('A') + index)}" for index in range(len(questions)))]
    # If only one query returns series, Grafana calls its column just "Value".
    renamed = {"Value": titles[0], **dict(zip(columns, [*(heads(key) for key in keys), *titles], strict=True))}
    return table(
        title, text, [Query(question.expression, "", instant=True) for question in questions], empty=empty,
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {
                "excludeByName": {"Time": True}, "renameByName": renamed,
                "indexByName": {name: index for index, name in enumerate(columns)}}},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": worst, "desc": True}]}},
        ],
        overrides=[
            {"matcher": {"id": "byType", "options": "number"}, "properties": [{"id": "noValue", "value": "-"}]},
            *(look(heads(key), links=LINKS[key]) for key in keys if key in LINKS),
            *(look(heads(key), custom__width=width) for key, width in WIDTHS.items() if key in keys),
            *map(_look, questions),
        ],
    )  # fmt: skip


def _look(question: Column) -> dict[str, Any]:
    said: dict[str, Any] = {"unit": question.unit}
    if question.decimals is not None:
        said["decimals"] = question.decimals
    if question.width is not None:
        said["custom__width"] = question.width
    if question.steps:
        said["thresholds"] = {"mode": "absolute", "steps": thresholds_of(question.steps, base="transparent")}
        said["custom__cellOptions"] = {"type": "color-background", "mode": "basic"}
    return look(question.title, **said)
