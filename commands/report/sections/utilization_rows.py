"""Computes utilization of device, memory and network, and energy: rows of the utilization table.

There are three sources, and each row names its own: the ranks' ledgers, torch's allocator and FLOP count, and the
daemon's recordings.  They are not merged, since they may disagree: a GPU at 100 % utilization may compute only half the
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from ..document import Energy, PowerPoint, ReportUtilization, RunSide, Stat
from ..figures import Moments
from ..reading.inputs import Inputs
from ..reading.run_index import RunIndex
from ..reading.step_sums import StepSumPart, StepSums
from .power_limits import PowerLimits
from .recorded_utilization import COUNTERS, GAUGES, QUOTIENTS, Hosts

__all__ = ["energies_of", "utilization_of"]

METRICS_BYTES_MAX = 64 << 20

_LEDGER_ROWS = (
    ("busy", "device busy (compute, communication, copies)"),
    ("compute", "device computes"),
    ("exposed", "exposed communication"),
)
_VITAL_ROWS = (
    ("mfu", "model FLOPs utilization (MFU)", "ratio"),
    ("model_flops_per_second", "model FLOPs per second, a rank", "flops_per_second"),
    ("memory_allocated_bytes", "device memory in tensors", "bytes"),
    ("memory_reserved_bytes", "device memory held by torch", "bytes"),
    ("memory_fragmentation", "held but not in tensors", "ratio"),
)


def utilization_of(
    inputs: Inputs, index: RunIndex, sums: StepSums, parts: Mapping[str, StepSumPart], sides: Mapping[str, RunSide]
) -> tuple[Hosts, tuple[PowerPoint, ...], tuple[ReportUtilization, ...]]:
    """Return the sums over recordings, the power limits of the last stretch, and all rows with figures."""
    names = ("before", "after")
    spans = {name: (sides[name].began_wall_ns, sides[name].ended_wall_ns) for name in names if name in sides}
    hosts = Hosts(spans, tuple(index.hellos.values()))
    power = PowerLimits(hosts, spans.get("after", spans.get("before")), sums.line)
    for host, tick in inputs.ticks():
        hosts.add(host, tick)
        power.add(host, tick)
    rows = []
    for name, label in _LEDGER_ROWS:
        found = [_stat(getattr(parts[side], name)) if side in parts else None for side in names]
        rows.append(_row(name, label, "ratio", "ledger", found[0], found[1]))
    for name, label, unit in _VITAL_ROWS:
        measured = sums.vital(name)
        if measured is not None:
            rows.append(_row(name, label, unit, "torch", _stat(measured[0]), _stat(measured[1])))
    for name in (*GAUGES, *QUOTIENTS, *COUNTERS):
        if name in hosts.rows:
            label, unit, by_side = hosts.rows[name]
            found = [_stat(by_side[side]) if side in by_side else None for side in names]
            rows.append(_row(name, label, unit, "daemon", found[0], found[1]))
    return hosts, power.points(), tuple(row for row in rows if row.before is not None or row.after is not None)


def _row(name: str, label: str, unit: str, source: str, before: Stat | None, after: Stat | None) -> ReportUtilization:
    return ReportUtilization(name=name, label=label, unit=unit, source=source, before=before, after=after)


def _stat(moments: Moments) -> Stat | None:
    if moments.count == 0:
        return None
    return Stat(moments.count, moments.mean, moments.sd, moments.low, moments.high)


def energies_of(
    inputs: Inputs, job: str, launches: frozenset[str], hosts: Hosts, before: RunSide | None, after: RunSide | None
) -> tuple[Energy | None, Energy | None]:
    """Return the energy before and after, from the GPUs' counters in recordings.

    Without a recording it comes from the daemon's last metrics page, which describes the end of the run and so the last
    side.
    """
    found = [
        None if side is None else _recorded_energy(hosts, name, side)
        for name, side in (("before", before), ("after", after))
    ]
    if found[0] is None and found[1] is None and inputs.metrics is not None:
        last = _energy_of_last_scrape(inputs, job, launches)
        found = [None, last] if after is not None else [last, None]
    return found[0], found[1]


def _recorded_energy(hosts: Hosts, name: str, side: RunSide) -> Energy | None:
    power = hosts.watts(name)
    if power is None:
        return None
    watts, gpus, covered_ns = power
    return Energy(
        source="recording",
        gpus=gpus,
        watts=watts,
        joules_per_step=watts * side.step_mean_ns / 1e9,
        joules_per_sample=watts / side.samples_per_second if side.samples_per_second else None,
        joules_per_token=watts / side.tokens_per_second if side.tokens_per_second else None,
        covered_ns=covered_ns,
    )


def _energy_of_last_scrape(inputs: Inputs, job: str, launches: frozenset[str]) -> Energy | None:
    """Return the job's energy from the daemon's last metrics page; None if it has none."""
    assert inputs.metrics is not None, "asked only where there is one"
    values: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(_text(inputs.metrics)):
            if not family.name.startswith("pacecar_job_energy_per_"):
                continue
            for one in family.samples:
                if one.labels.get("training_job") == job and one.labels.get("launch", "") in launches:
                    values[family.name] = float(one.value)
    except (ValueError, OSError) as error:
        inputs.notices.add(inputs.metrics.name, "metrics", f"cannot be read: {error}")
        return None
    if not values:
        return None
    return Energy(
        source="metrics",
        gpus=None,
        watts=None,
        joules_per_step=values.get("pacecar_job_energy_per_step_joules"),
        joules_per_sample=values.get("pacecar_job_energy_per_sample_joules"),
        joules_per_token=values.get("pacecar_job_energy_per_token_joules"),
    )


def _text(path: Path) -> str:
    with path.open("rb") as stream:
        data = stream.read(METRICS_BYTES_MAX + 1)
    if len(data) > METRICS_BYTES_MAX:
        raise ValueError(f"larger than {METRICS_BYTES_MAX} bytes")
    return data.decode("utf-8")
