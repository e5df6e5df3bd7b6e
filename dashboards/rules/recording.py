"""Defines the recording rules: frequently used figures, computed once, with one series per job, node or GPU.

A rate over ten thousand ranks is cheap once, but not in each panel, each alert and each query over a month.  So figures
that alerts compare with a bound are recorded, as `level:metric:operation` (Prometheus' naming practice); a job is a
name and a launch.  Dashboards do not use recorded series, so that they work without the rules.

Some alerts need an earlier state: a port that was never in use is not down, and a disk that was mounted read-only is
not faulty.  A long range query is expensive and clears the alert when the range ends.  So a rule remembers the state:
it starts when the port or disk is good, and lasts as long as its series exists.

Every rule keeps the label `cluster`, if there is one.
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
"""Rules cover everything, over five minutes: twenty scrapes at 15 s, so that a gap of one or two matters little."""

MEMORY = "30m"

DAEMON = RULES.select("pacecar_build_info", {NODE: "!~.+/.+"})
"""The daemons of nodes.  A sidecar's instance is `node/pod`; it normally ends with its job."""

TARGETS = f'up{{job=~"(.+/)?pacecar", {NODE}!~".+/.+"}}'
"""Targets of scrape jobs named as in deploy/prometheus, including those that never answered."""

OF_JOB, OF_NODE, OF_GPU = (CLUSTER, JOB, LAUNCH), (CLUSTER, NODE), (CLUSTER, NODE, GPU)


FAST, LOOKS_BACK = 0.1, "6h"
"""A job's fast times: the 10th percentile of its paces in that time, as on the dashboards."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded series: its name and expression."""

    name: str
    expression: str


def _share_of_steps(counter: str, **where: str) -> str:
    return divide(
        combine("sum", RULES.rate(counter, where), *OF_JOB),
        combine("sum", RULES.rate("pacecar_job_step_wall_seconds_total"), *OF_JOB),
    )


def _remembered(name: str, good: str, there: str, *labels: str) -> Recorded:
    """Return the rule that is 1, by `labels`, since `good` first existed and as long as `there` exists.

    It reads its own series over MEMORY, so it survives gaps of that length, as when Prometheus restarts.
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
    # Only for current jobs; one that has ended also has paces in that time.
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
"""All recorded series, in the order of the file."""

assert len({rule.name for rule in RECORDED}) == len(RECORDED), "a rule is listed twice"
