"""Builds the Fleet dashboard's row about holders of GPUs: GPU-hours by namespace and by job, and idle GPUs.

A GPU is charged to the owner of any process with memory on it, used or not, because others cannot have it meanwhile;
two owners on one GPU are both charged.  Time is summed over the points of the range shown, without a recording rule.
docs/coming-from.md has the same by team, from Kubernetes' labels.
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
"""As in the alert PacecarGpuIdle."""

LINES = 16

_GPUS = (CLUSTER, NODE, GPU)


def _columns(*owner: str) -> list[Column]:
    """Return the columns for owners, identified by the labels `owner`."""
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
        (10, 9, ranking("GPU-hours by namespace", "Total time for which a namespace held GPUs in the range shown; the "
            "row without a name is for processes outside Kubernetes. Utilization is that of the GPUs that it holds "
            "now.", namespaces, _columns(*namespaces), worst="GPU-hours", empty=NO_OWNER)),
        (14, 9, ranking("GPU-hours by job", "The same by training job; the row without a name is for processes without "
            "pacecar.", jobs, _columns(*jobs), worst="GPU-hours", empty=NO_OWNER)),
        (24, 7, time_series("GPUs held by namespace", f"Of the {LINES} namespaces with most.",
            [Query(f"topk({LINES}, {held})", f"{{{{{NAMESPACE}}}}}")], unit="none", empty=NO_OWNER, stepped=True)),
    ], collapsed=True)  # fmt: skip
