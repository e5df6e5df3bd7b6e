"""Defines the recording rules: figures that are asked for often, computed once, one series a job, node or GPU.

A rate over ten thousand ranks costs little once, and much in each panel, each alert and each query over a month.  So
what alerts compare with a bound is recorded, under `level:metric:operation` (Prometheus' naming practice); a job is a
name and a launch.  The dashboards do not use the recorded series: they work where nobody loaded the rules.

Some alerts ask whether something *was* there before: a port that was never in use is not down, and a disk that was
mounted read-only is not ill.  A range that looks back far enough is dear, and ends an alert when the time is over,
though nothing has changed.  So a rule remembers: it begins when the thing is good, and stays as long as the thing is
there.

Every rule keeps the label `cluster`, which is absent where nobody has added it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..queries import CLUSTER, GPU, JOB, LAUNCH, NODE, OWNER, Scope, combine, divide, gpus_held

__all__ = [
    "BASELINE",
    "DAEMON",
    "DAEMON_BUDGET_USED",
    "EXPOSED",
    "GPU_HELD_DOWN",
    "HELD_BY",
    "LOOKS_BACK",
    "MEMORY",
    "OVERHEAD",
    "PACE",
    "PORT_USED",
    "RECORDED",
    "RULES",
    "SAMPLES",
    "SENT",
    "SENT_AGAIN",
    "TARGET",
    "TARGETS",
    "TOKENS",
    "WRITABLE",
    "Recorded",
]

RULES = Scope(interval="5m")
"""Rules look at everything, over five minutes: twenty scrapes at 15 s, so that a gap of one or two changes little."""

MEMORY = "30m"

DAEMON = RULES.select("pacecar_build_info", {NODE: "!~.+/.+"})
"""A daemon of a node.  A sidecar's instance is `node/pod`: it ends with its job, and nothing is wrong."""

TARGETS = f'up{{job=~"(.+/)?pacecar", {NODE}!~".+/.+"}}'
"""Targets of scrape jobs that are called as in deploy/prometheus; also of those that never answered."""

OF_JOB, OF_NODE, OF_GPU = (CLUSTER, JOB, LAUNCH), (CLUSTER, NODE), (CLUSTER, NODE, GPU)


FAST, LOOKS_BACK = 0.1, "6h"
"""A job's fast times: the lowest tenth of its paces in that time, as on the dashboards."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A series that Prometheus computes: its name, and the expression behind it."""

    name: str
    expression: str


def _share_of_steps(counter: str, **where: str) -> str:
    return divide(
        combine("sum", RULES.rate(counter, where), *OF_JOB),
        combine("sum", RULES.rate("pacecar_job_step_wall_seconds_total"), *OF_JOB),
    )


def _remembered(name: str, good: str, there: str, *labels: str) -> Recorded:
    """Return the rule that is 1 from when `good` was there first, by `labels`, as long as there is any of `there`.

    It reads what it wrote itself, over MEMORY: so long a series may be gone, when a daemon or Prometheus is restarted.
    """
    by = ", ".join(labels)
    return Recorded(name, f"group by ({by}) ({good}) or (max_over_time({name}[{MEMORY}]) and on ({by}) {there})")


def _traffic(name: str) -> str:
    return combine("sum", RULES.rate(f"pacecar_host_network_{name}_bytes_total"), *OF_NODE)


PACE = Recorded(
    "training_job:pacecar_job_pace_seconds:max",
    f"{combine('max', RULES.select('pacecar_job_pace_seconds'), *OF_JOB)} or "
    + combine("max", RULES.mean_of("pacecar_job_step_wall_seconds_total", "pacecar_job_steps_total"), *OF_JOB),
)
EXPOSED = Recorded(
    "training_job:pacecar_job_exposed_communication:ratio_rate5m",
    _share_of_steps("pacecar_job_ledger_seconds_total", heading="exposed_communication"),
)
OVERHEAD = Recorded(
    "training_job:pacecar_job_overhead:ratio_rate5m", _share_of_steps("pacecar_job_overhead_seconds_total")
)
GPU_HELD_DOWN = Recorded(
    "instance_gpu:pacecar_gpu_clock_event:ratio_rate5m",
    combine("max", RULES.rate("pacecar_gpu_clock_event_seconds_total"), *OF_GPU, "reason"),
)
SENT = Recorded(
    "instance:pacecar_host_tcp_segments_sent:rate5m",
    combine("sum", RULES.rate("pacecar_host_tcp_segments_sent_total"), *OF_NODE),
)
SENT_AGAIN = Recorded(
    "instance:pacecar_host_tcp_segments_retransmitted:ratio_rate5m",
    divide(
        combine("sum", RULES.rate("pacecar_host_tcp_segments_retransmitted_total"), *OF_NODE),
        combine("sum", RULES.rate("pacecar_host_tcp_segments_sent_total"), *OF_NODE),
    ),
)
DAEMON_BUDGET_USED = Recorded(
    "instance:pacecar_daemon_cpu_budget_used:ratio_rate5m",
    divide(
        combine("sum", RULES.rate("pacecar_daemon_cpu_seconds_total"), *OF_NODE),
        combine("max", RULES.select("pacecar_daemon_cpu_budget_ratio"), *OF_NODE),
    ),
)

TARGET = _remembered("instance:pacecar_build_info:known", f"{DAEMON} or {TARGETS}", "up", CLUSTER, NODE, "job")
PORT_USED = _remembered(
    "instance_device:pacecar_rdma_port_active:known", RULES.select("pacecar_rdma_port_active") + " == 1",
    RULES.select("pacecar_rdma_port_active"), CLUSTER, NODE, "device", "port",
)  # fmt: skip
WRITABLE = _remembered(
    "instance_mountpoint:pacecar_host_filesystem_read_only:was_writable",
    RULES.select("pacecar_host_filesystem_read_only") + " == 0", RULES.select("pacecar_host_filesystem_read_only"),
    CLUSTER, NODE, "mountpoint",
)  # fmt: skip
SAMPLES = Recorded(
    "training_job:pacecar_job_samples:rate5m", combine("sum", RULES.rate("pacecar_job_samples_total"), *OF_JOB)
)
TOKENS = Recorded(
    "training_job:pacecar_job_tokens:rate5m", combine("sum", RULES.rate("pacecar_job_tokens_total"), *OF_JOB)
)
BASELINE = Recorded(
    "training_job:pacecar_job_pace_seconds:fast6h",
    # Only of jobs that are there: one that ended has paces in that time, too.
    f"quantile_over_time({FAST}, {PACE.name}[{LOOKS_BACK}]) and on ({', '.join(OF_JOB)}) "
    + RULES.select("pacecar_rank_info"),
)
HELD_BY = Recorded("instance_gpu:pacecar_gpu_held:by_owner", gpus_held(RULES, CLUSTER, *OWNER))

RECORDED: tuple[Recorded, ...] = (
    PACE,
    EXPOSED,
    OVERHEAD,
    Recorded(
        "training_job:pacecar_job_data_wait:ratio_rate5m",
        _share_of_steps("pacecar_job_ledger_seconds_total", heading="data_wait"),
    ),
    SAMPLES,
    TOKENS,
    BASELINE,
    Recorded(
        "training_job:pacecar_job_power_watts:sum_rate5m",
        combine("sum", RULES.rate("pacecar_job_energy_joules_total"), *OF_JOB),
    ),
    GPU_HELD_DOWN,
    SENT,
    SENT_AGAIN,
    Recorded("instance:pacecar_host_network_receive_bytes:rate5m", _traffic("receive")),
    Recorded("instance:pacecar_host_network_transmit_bytes:rate5m", _traffic("transmit")),
    DAEMON_BUDGET_USED,
    TARGET,
    PORT_USED,
    WRITABLE,
    HELD_BY,
)
"""All of them, in the order in which they stand in the file."""

assert len({rule.name for rule in RECORDED}) == len(RECORDED), "a rule is listed twice"
