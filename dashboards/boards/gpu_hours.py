"""Builds the Fleet dashboard's row about who holds the GPUs: GPU-hours by namespace and by job, and what of it idles.

A GPU counts for whoever has a process with memory on it, used or not: that is what others cannot have meanwhile.  Two
owners on one GPU are charged for it both.  Time is counted in steps of the range shown over its points, which needs no
recording rule; docs/coming-from.md has the same by team, from the labels that Kubernetes knows.
"""

from __future__ import annotations

from ..palette import WARN
from ..panels import Query, Section, time_series
from ..queries import CLUSTER, FLEET_NODES, GPU, JOB, LAUNCH, NODE, combine, gpus_held
from .ranking import Column, ranking

__all__ = ["gpu_hours_section"]

NO_OWNER = "No process on a GPU whose owner the daemon knows"
NAMESPACE = "pod_namespace"
IDLE_RATIO = 0.02
"""As the alert PacecarGpuIdle."""

LINES = 16

_GPUS = (CLUSTER, NODE, GPU)


def _columns(*owner: str) -> list[Column]:
    """Return the columns for owners that are told apart by the labels `owner`."""
    held = gpus_held(FLEET_NODES, *owner)
    utilization = combine("max", FLEET_NODES.select("pacecar_gpu_utilization_ratio"), *_GPUS)
    used = f"{held} * on ({', '.join(_GPUS)}) group_left () {utilization}"
    hours = f"sum_over_time(({held})[$__range:$__interval]) * $__interval_ms / 3600000"
    return [
        Column("GPU-hours", combine("sum", hours, *owner), decimals=1),
        Column("GPUs now", combine("count", held, *owner)),
        Column("Utilization", combine("avg", used, *owner), "percentunit", decimals=0),
        Column("Idle now", combine("sum", f"({used}) < bool {IDLE_RATIO}", *owner), steps=[(1.0, WARN)]),
    ]


def gpu_hours_section() -> Section:
    """Return the row."""
    namespaces, jobs = (CLUSTER, NAMESPACE), (CLUSTER, JOB, LAUNCH)
    held = combine("count", gpus_held(FLEET_NODES, *namespaces), *namespaces)
    return Section("Who holds the GPUs", [
        (10, 9, ranking("GPU-hours by namespace", "Time in the range shown for which a namespace held GPUs, all of "
            "them added; the line without a name is of processes outside Kubernetes. Utilization is that of the GPUs "
            "that it holds now.", namespaces, _columns(*namespaces), worst="GPU-hours", empty=NO_OWNER)),
        (14, 9, ranking("GPU-hours by job", "The same by training job; the line without a name is of processes without "
            "pacecar.", jobs, _columns(*jobs), worst="GPU-hours", empty=NO_OWNER)),
        (24, 7, time_series("GPUs held by namespace", f"Of the {LINES} namespaces with most.",
            [Query(f"topk({LINES}, {held})", f"{{{{{NAMESPACE}}}}}")], unit="none", empty=NO_OWNER, stepped=True)),
    ], collapsed=True)  # fmt: skip
