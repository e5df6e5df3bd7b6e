"""Builds what all dashboards share: variables, links, annotations, and the settings around the panels.

Variables have the same names everywhere, so that links keep the selection: from GPU 3 of node7 to the job on that
node.  The data source is a variable too, so a dashboard can be imported unchanged.

`cluster` is a label that users with several clusters add in Prometheus.  Without it, the variable has only the value
All, which stands for `.*` and matches series without the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafanalib import core

from .palette import GOOD, WARN
from .panels import DATASOURCE, Section, place
from .queries import CLUSTER, GPU, INTERVAL, JOB, LAUNCH, NODE, ONE_JOB, RANK, Scope, combine

__all__ = ["TITLES", "dashboard", "decision_marks", "variables"]

SCHEMA_VERSION = 39
"""The version of Grafana 10; with grafanalib's default, 12, Grafana would run ten years of migrations per panel."""

TITLES = {
    "pacecar-fleet": "Fleet", "pacecar-node": "Node", "pacecar-job": "Job", "pacecar-tuning": "Tuning",
    "pacecar-itself": "pacecar itself",
}  # fmt: skip
"""Uid -> title of the dashboard, in the order of the links."""

ANY = ".*"
"""The value of All: a regex of 10 000 names would be refused, and this also matches a missing label."""


class _Variable(core.Template):  # type: ignore[misc]  # grafanalib has no types
    """A variable whose initial value is All, if it has one; grafanalib would write neither text nor value."""

    def to_json_data(self) -> dict[str, Any]:
        """Return grafanalib's JSON with the initial value All, or without one."""
        said: dict[str, Any] = super().to_json_data()
        # Without a value, Grafana takes the first one.
        del said["current"]
        return said | ({"current": {"text": ["All"], "value": ["$__all"]}} if self.includeAll else {})


def _query(name: str, label: str, text: str, *, many: bool = True, all_value: str | None = ANY) -> core.Template:
    return _Variable(
        name=name, label=label, query=text, dataSource=DATASOURCE, type="query", includeAll=many, multi=many,
        allValue=all_value if many else None, refresh=2, sort=3, default=None,
    )  # fmt: skip


def _launches() -> core.Template:
    """Return the variable of the launches of one job, newest first, because Grafana selects the first.

    Launches are random numbers, so `label_values` would return them in no useful order.
    """
    started = Scope({CLUSTER: '=~"$cluster"', JOB: '="$job"'}).select("pacecar_job_start_time_seconds")
    newest = combine("max", f"last_over_time({started}[$__range])", LAUNCH)
    return _Variable(
        name="launch", label="Launch", query=f"query_result(sort_desc({newest}))", regex=f'/{LAUNCH}="([^"]*)"/',
        dataSource=DATASOURCE, type="query", includeAll=False, multi=False, refresh=2, sort=0, default=None,
    )  # fmt: skip


def variables(*names: str, one_job: bool = False) -> core.Templating:
    """Return the variables `names`, after data source and cluster.

    With `one_job` a single launch of a single job is selected, and nodes and ranks are those of it.
    """
    within = f'{CLUSTER}=~"$cluster"'
    of_job = f'{within}, {JOB}="$job", {LAUNCH}="$launch"'
    known = {
        "job": _query("job", "Job", f"label_values(pacecar_rank_info{{{within}}}, {JOB})", many=not one_job),
        "launch": _launches(),
        # All nodes of one job are listed, because `.*` would include nodes of other jobs.
        "node": _query("node", "Node", f"label_values(pacecar_rank_info{{{of_job}}}, {NODE})", all_value=None)
        if one_job
        else _query("node", "Node", f"label_values(pacecar_build_info{{{within}}}, {NODE})"),
        "gpu": _query("gpu", "GPU", f'label_values(pacecar_gpu_info{{{within}, {NODE}=~"$node"}}, {GPU})'),
        "rank": _query("rank", "Rank", f"label_values(pacecar_rank_info{{{of_job}}}, {RANK})", all_value=".+"),
    }
    return core.Templating(list=[
        _Variable(name="datasource", label="Data source", query="prometheus", type="datasource", refresh=1),
        _query("cluster", "Cluster", f"label_values(pacecar_build_info, {CLUSTER})"),
        *(known[name] for name in names),
    ])  # fmt: skip


def _links(uid: str) -> list[core.DashboardLink]:
    """Return the links to the other dashboards, which keep variables and time."""
    return [
        core.DashboardLink(
            title=title, type="link", uri=f"/d/{other}", icon="dashboard", includeVars=True, keepTime=True,
            tooltip=f"The same selection on the dashboard {title}",
        )
        for other, title in TITLES.items()
        if other != uid
    ]  # fmt: skip


def decision_marks() -> core.Annotations:
    """Return the annotations of the tuner's decisions and verdicts and of orders by hand."""

    def marks(name: str, metric: str, labels: str, title: str, shade: str) -> dict[str, object]:
        counter = ONE_JOB.select(metric)
        # A counter that starts at 1 has no increase, so new series count too.
        fresh = f"({counter} unless {counter} offset {INTERVAL})"
        return {
            "name": name, "datasource": DATASOURCE, "enable": True, "hide": False, "iconColor": shade,
            "expr": f"({ONE_JOB.increase(metric)} > 0) or {fresh}", "titleFormat": title, "tagKeys": labels,
        }  # fmt: skip

    return core.Annotations(list=[
        marks("Decisions", "pacecar_tuner_decisions_total", "knob,kind", "{{kind}}: {{knob}}", GOOD),
        marks("Verdicts", "pacecar_tuner_verdicts_total", "knob,outcome", "{{outcome}}: {{knob}}", WARN),
        marks("Orders", "pacecar_tuner_orders_total", "action,outcome", "by hand: {{action}}, {{outcome}}", WARN),
    ])  # fmt: skip


def dashboard(
    uid: str,
    description: str,
    templating: core.Templating,
    sections: Sequence[Section],
    *,
    annotations: core.Annotations | None = None,
    time: str = "now-1h",
    refresh: str = "10s",
) -> core.Dashboard:
    """Return the dashboard `uid`, ready to be tidied and written."""
    return core.Dashboard(
        title=f"pacecar / {TITLES[uid]}",
        uid=uid,
        description=description,
        tags=["pacecar", "training"],
        schemaVersion=SCHEMA_VERSION,
        graphTooltip=1,
        refresh=refresh,
        time=core.Time(time, "now"),
        timezone="browser",
        editable=True,
        templating=templating,
        annotations=annotations or core.Annotations(),
        links=_links(uid),
        panels=place(sections),
    )
