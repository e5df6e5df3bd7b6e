"""Builds the status document (`pacecar.records.status_document`) from samples and the views of jobs.

Programs that want everything read /metrics; this is the selection that fits on a screen.  The fields of `Host`,
`GpuStatus`, `LinkStatus`, `DaemonStatus` and `RecorderStatus` have the names of the metrics that fill them.  Rates of
counters (bytes of a link) and recent figures of a job need two ticks, so the builder remembers a few.

Jobs, ranks, links and GPUs in a document are bounded, with a count of jobs and ranks left out.  Not thread-safe.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pacecar.clock import NS_PER_SECOND
from pacecar.gpu_health import REASONS, GpuHealth
from pacecar.metrics.catalog import CATALOG, by_name
from pacecar.records import Absent, JobHello, Sample, Snapshot, Throttling
from pacecar.records.job_identity import JobKey, titles
from pacecar.records.status_document import (
    VERSION,
    CollectorStatus,
    DaemonStatus,
    GpuStatus,
    HealthReasonStatus,
    Host,
    JobStatus,
    LinkStatus,
    MigInstance,
    MissingGpu,
    RecorderStatus,
    StatusDocument,
)

from ..fault_containment import ContainedPart, FaultContainment
from ..gpu.known_gpus import KnownGpu
from ..jobs.cgroup_identity import Residence
from ..jobs.job_energy import sum_known
from ..jobs.tracked_job import JobView
from .job_status import Elapsed, job_document, seconds
from .status_history import GPU_CHARTED, HOST_CHARTED, StatusFigures

__all__ = [
    "GPUS_MAX", "JOBS_MAX", "LINKS_MAX", "NO_VERDICTS", "RANKS_MAX", "GpuVerdicts", "StatusDocumentBuilder",
    "StatusFigures",
]  # fmt: skip

JOBS_MAX = 64
"""Jobs in one document, those with the newest records; more than a person reads."""

RANKS_MAX = 256
"""Ranks of all jobs in one document, shared evenly, with at least RANKS_MIN for each job."""

RANKS_MIN = 4

LINKS_MAX = 64
GPUS_MAX = 64

LATELY_SECONDS = 30.0
"""The period of a job's ledger: long enough for steps of ten seconds, short enough to show a change."""

LATELY_MARKS = 8
"""Totals remembered for a job: the period begins at the oldest."""

_HOST = "pacecar_host_"
_DAEMON = "pacecar_daemon_"
_RECORDER = "pacecar_recorder_"
_GPU = "pacecar_gpu_"
_LINKS = {"pacecar_host_network_": "host_network", "pacecar_rdma_": "rdma"}
_HOST_FIELDS = frozenset(field.name for field in msgspec.structs.fields(Host))
_DAEMON_FIELDS = frozenset(field.name for field in msgspec.structs.fields(DaemonStatus)) - {
    "pacecar_version", "period_seconds", "collectors", "recorder",
}  # fmt: skip
_RECORDER_FIELDS = frozenset(field.name for field in msgspec.structs.fields(RecorderStatus))
_GPU_FIELDS = frozenset(field.name for field in msgspec.structs.fields(GpuStatus)) - {
    "gpu", "name", "uuid", "pci_bus_id", "health", "health_reasons", "instances",
}  # fmt: skip
_INSTANCE = "pacecar_gpu_instance_"
_INSTANCE_FIELDS = ("memory_size_bytes", "memory_used_bytes", "processes")
_LINK_FIELDS = frozenset(field.name for field in msgspec.structs.fields(LinkStatus)) - {"kind", "name"}
_RATES = {"receive_bytes_total": "receive_bytes_per_second", "transmit_bytes_total": "transmit_bytes_per_second"}
_LINK_NAMES = {"port_active": "up", "port_link_bytes_per_second": "link_bytes_per_second"}
_LINK_METRICS = {
    series: (kind, series.removeprefix(prefix), 2 if kind == "rdma" else 1)
    for entry in CATALOG
    for series in entry.series
    for prefix, kind in _LINKS.items()
    if series.startswith(prefix)
}
"""Metric of a link -> its kind, the rest of its name, and how many labels name the link."""
_RATE_METRICS = {metric: of_link for metric, of_link in _LINK_METRICS.items() if of_link[1] in _RATES}
"""Those that are counters and shown as rates."""


def _nowhere(_: JobHello) -> Residence:
    return Residence()


class GpuVerdicts(NamedTuple):
    """What is known about GPUs beyond the figures of a tick.

    `health` is by GPU label; `missing` are GPUs that were here before; `last_known` returns the GPU that had a label.
    """

    health: Mapping[str, GpuHealth] = {}
    missing: Sequence[KnownGpu] = ()
    last_known: Callable[[str], KnownGpu | None] = lambda _: None


NO_VERDICTS = GpuVerdicts()


class _Mark(NamedTuple):
    at_ns: int
    ranks: tuple[tuple[int, int], ...]
    parts_ns: dict[str, int]
    steps: int
    samples: int | None
    tokens: int | None


class StatusDocumentBuilder:
    """Builds documents; remembers earlier ticks for rates."""

    def __init__(
        self,
        residence: Callable[[JobHello], Residence] = _nowhere,
        faults: FaultContainment | None = None,
        *,
        node: str,
        period_seconds: float,
    ) -> None:
        """`residence` returns where a rank runs, without reading.  `faults` counts what raises and is left out."""
        self._node, self._period_seconds = node, period_seconds
        self._residence = residence
        self._faults = faults or FaultContainment()
        self._tick: int | None = None
        self._tick_of_rates: int | None = None
        self._counters: dict[tuple[str, str, str], float] = {}
        self._counters_ns = 0
        self._rates: dict[tuple[str, str, str], float] = {}
        self._host, self._gpus, self._links = Host(), tuple[GpuStatus, ...](), tuple[LinkStatus, ...]()
        self._gpus_missing: tuple[MissingGpu, ...] = ()
        self._collectors: tuple[CollectorStatus, ...] = ()
        self._of_process: dict[str, Any] = {}
        self._marks: dict[JobKey, deque[_Mark]] = {}

    def build(
        self,
        snapshot: Snapshot | None,
        jobs: Sequence[JobView],
        own: Sequence[Sample],
        *,
        wall_ns: int,
        now_ns: int,
        throttled: Mapping[str, Throttling],
        gpus: GpuVerdicts = NO_VERDICTS,
    ) -> StatusDocument:
        """Return the current document.

        `own` are the samples of the daemon's parts, `throttled` is the result of `Throttles.update`.
        """
        if snapshot is not None and snapshot.tick != self._tick:
            self._update(snapshot, throttled, gpus)
        of_jobs = self._of_jobs(jobs, now_ns)
        return StatusDocument(
            version=VERSION,
            node=self._node,
            time_seconds=wall_ns / NS_PER_SECOND,
            tick=None if snapshot is None else snapshot.tick,
            snapshot_age_seconds=None if snapshot is None else max(0, now_ns - snapshot.started_ns) / NS_PER_SECOND,
            daemon=DaemonStatus(
                pacecar_version=next((s.labels[0] for s in own if s.metric == "pacecar_build_info"), None),
                period_seconds=self._period_seconds,
                collectors=self._collectors,
                recorder=_recorder(own),
                **(self._of_process | _figures(own, _DAEMON, _DAEMON_FIELDS)),
            ),
            host=self._host,
            gpus=self._gpus,
            gpus_missing=self._gpus_missing,
            links=self._links,
            jobs=of_jobs,
            jobs_left_out=len(jobs) - len(of_jobs),
        )

    def figures(self, snapshot: Snapshot | None, jobs: Sequence[JobView], *, now_ns: int) -> StatusFigures:
        """Return the part of a document that the history keeps: without viewers a tick costs no more."""
        host, gpus, links = Host(), tuple[GpuStatus, ...](), tuple[LinkStatus, ...]()
        if snapshot is not None:
            contain, part = self._faults.contain, ContainedPart.COLLECTOR
            host = contain(part, "the host in the history", lambda: _host(snapshot, HOST_CHARTED), host)
            gpus = contain(part, "the GPUs in the history", lambda: _charted_gpus(snapshot), gpus)
            rates = partial(self._read_links, snapshot, _RATE_METRICS)
            links = contain(part, "the links in the history", rates, links)
        return StatusFigures(host, gpus, links, self._of_jobs(jobs, now_ns))

    def _of_jobs(self, jobs: Sequence[JobView], now_ns: int) -> tuple[JobStatus, ...]:
        self._marks = {job.key: self._marks.get(job.key, deque(maxlen=LATELY_MARKS)) for job in jobs}
        shown = sorted(jobs, key=_silence)[:JOBS_MAX]
        title_of = titles(job.key for job in jobs)
        ranks_max = max(RANKS_MIN, RANKS_MAX // max(1, len(shown)))
        found = [self._job(job, title_of[job.key], now_ns, ranks_max) for job in sorted(shown, key=lambda job: job.key)]
        return tuple(job for job in found if job is not None)

    def _job(self, job: JobView, title: str, now_ns: int, ranks_max: int) -> JobStatus | None:
        """Return the document of `job`; None if a bug prevents it."""
        try:
            return job_document(job, title, self._lately(job, now_ns), ranks_max, self._residence)
        except Exception as error:  # noqa: BLE001  a bug with one job must not remove all others from the document
            self._faults.caught(ContainedPart.JOB, f"job {job.job!r}", error)
            return None

    def _update(self, snapshot: Snapshot, throttled: Mapping[str, Throttling], gpus: GpuVerdicts) -> None:
        self._tick = snapshot.tick
        contain, part = self._faults.contain, ContainedPart.COLLECTOR
        self._host = contain(part, "the host in documents", lambda: _host(snapshot, _HOST_FIELDS), Host())
        self._gpus = contain(part, "the GPUs in documents", lambda: _gpus(snapshot, throttled, gpus), ())
        self._gpus_missing = tuple(map(_missing, gpus.missing))
        links = partial(self._read_links, snapshot, _LINK_METRICS)
        self._links = contain(part, "the links in documents", links, ())
        self._of_process = _plain_figures(snapshot, _DAEMON, _DAEMON_FIELDS)
        self._collectors = tuple(
            CollectorStatus(
                name=name,
                outcome=str(outcome.__struct_config__.tag),
                reason=outcome.reason or None,
                read_failures=0 if isinstance(outcome, Absent) else outcome.read_failures,
                duration_seconds=seconds(snapshot.durations_ns.get(name)),
            )
            for name, outcome in snapshot.outcomes.items()
        )

    def _update_rates(self, snapshot: Snapshot) -> None:
        """Compute the rates of links since the previous tick, once per tick."""
        if snapshot.tick == self._tick_of_rates:
            return
        counters = {
            (kind, "/".join(sample.labels[:names]), _RATES[stem]): sample.value
            for metric, (kind, stem, names) in _RATE_METRICS.items()
            for sample in snapshot.of(metric)
        }
        elapsed_ns = None if self._tick_of_rates is None else snapshot.started_ns - self._counters_ns
        self._rates = {
            key: (value - before) * NS_PER_SECOND / elapsed_ns
            for key, value in counters.items()
            # a reloaded driver counts from zero
            if (before := self._counters.get(key)) is not None and elapsed_ns and value >= before
        }
        self._tick_of_rates, self._counters, self._counters_ns = snapshot.tick, counters, snapshot.started_ns

    def _read_links(self, snapshot: Snapshot, metrics: Mapping[str, tuple[str, str, int]]) -> tuple[LinkStatus, ...]:
        """Return the links, with their rates and the fields in `metrics`."""
        self._update_rates(snapshot)
        found: dict[tuple[str, str], dict[str, Any]] = {}
        reported = ((of_link, one) for metric, of_link in metrics.items() for one in snapshot.of(metric))
        for (kind, stem, names), sample in reported:
            figures = found.setdefault((kind, "/".join(sample.labels[:names])), {})
            if "errors_total" in stem or "drops_total" in stem:
                figures["errors_total"] = figures.get("errors_total", 0) + int(sample.value)
            elif (field := _LINK_NAMES.get(stem, stem)) in _LINK_FIELDS:
                figures[field] = _outside(sample)
        for (kind, name, field), rate in self._rates.items():
            found[kind, name][field] = rate
        return tuple(
            LinkStatus(kind=kind, name=name, **figures) for (kind, name), figures in list(found.items())[:LINKS_MAX]
        )

    def _lately(self, job: JobView, now_ns: int) -> Elapsed | None:
        """Return what the job's ranks did since the oldest mark; None without one."""
        mark = _mark(job, now_ns)
        marks = self._marks[job.key]
        if mark is None:
            marks.clear()
            return None
        if marks and (
            marks[-1].ranks != mark.ranks or any(mark.parts_ns[h] < n for h, n in marks[-1].parts_ns.items())
        ):
            marks.clear()  # a rank came, left or restarted: its totals do not continue
        while len(marks) > 1 and now_ns - marks[1].at_ns >= LATELY_SECONDS * NS_PER_SECOND:
            marks.popleft()
        oldest = marks[0] if marks else None
        if not marks or now_ns - marks[-1].at_ns >= LATELY_SECONDS * NS_PER_SECOND / (LATELY_MARKS - 2):
            marks.append(mark)
        return None if oldest is None else _between(oldest, mark)


def _between(old: _Mark, new: _Mark) -> Elapsed | None:
    parts = {heading: value - old.parts_ns.get(heading, 0) for heading, value in new.parts_ns.items()}
    if new.at_ns <= old.at_ns or not any(parts.values()):
        return None
    return Elapsed(
        window_ns=new.at_ns - old.at_ns,
        parts_ns=parts,
        steps=(new.steps - old.steps) / len(new.ranks),
        samples=_difference(old.samples, new.samples),
        tokens=_difference(old.tokens, new.tokens),
    )


def _difference(old: int | None, new: int | None) -> int | None:
    return None if old is None or new is None or new < old else new - old


def _mark(job: JobView, now_ns: int) -> _Mark | None:
    reported = [(rank.hello, rank.step) for rank in job.ranks if rank.step is not None]
    if not reported:
        return None
    parts: Counter[str] = Counter()
    for _, step in reported:
        parts.update(step.totals.parts())
    return _Mark(
        now_ns,
        tuple((hello.rank, hello.started_wall_ns) for hello, _ in reported),
        dict(parts),
        sum(step.total_steps for _, step in reported),
        sum_known(step.total_samples for _, step in reported),
        sum_known(step.total_tokens for _, step in reported),
    )


def _silence(job: JobView) -> int:
    ages = [rank.step_age_ns for rank in job.ranks if rank.step_age_ns is not None]
    return min(ages, default=1 << 62)


def _host(snapshot: Snapshot, fields: Iterable[str]) -> Host:
    return Host(**_plain_figures(snapshot, _HOST, fields))


def _recorder(samples: Sequence[Sample]) -> RecorderStatus | None:
    """Return the status of the recorder; None if it has no samples, because it is off."""
    figures = _figures(samples, _RECORDER, _RECORDER_FIELDS)
    triggers = {s.labels[0]: int(s.value) for s in samples if s.metric == f"{_RECORDER}triggers_total"}
    return RecorderStatus(triggers_total=triggers, **figures) if figures else None


def _figures(samples: Iterable[Sample], prefix: str, fields: frozenset[str]) -> dict[str, Any]:
    """Return field -> value in base units, for metrics without labels named by `prefix` and one of `fields`."""
    return {
        stem: _outside(sample)
        for sample in samples
        if not sample.labels and (stem := sample.metric.removeprefix(prefix)) in fields
    }


def _plain_figures(snapshot: Snapshot, prefix: str, fields: Iterable[str]) -> dict[str, Any]:
    """Return the same for a tick."""
    return {field: _outside(one) for field in fields for one in snapshot.of(prefix + field) if not one.labels}


def _gpus(snapshot: Snapshot, throttled: Mapping[str, Throttling], verdicts: GpuVerdicts) -> tuple[GpuStatus, ...]:
    found = _gpu_figures(snapshot, _GPU_FIELDS)
    for sample in snapshot.of("pacecar_gpu_info"):
        figures, throttling = found[sample.labels[0]], throttled.get(sample.labels[1])
        _, figures["uuid"], figures["name"], _, figures["pci_bus_id"], *_ = sample.labels
        figures["throttled_by"] = None if throttling is None else throttling.reasons
    for sample in snapshot.of("pacecar_gpu_xid_errors_total"):
        figures = found[sample.labels[0]]
        figures["xid_errors_total"] = figures.get("xid_errors_total", 0) + int(sample.value)
    for sample in snapshot.of("pacecar_gpu_clock_hertz"):
        if sample.labels[1] == "sm":
            found[sample.labels[0]]["sm_clock_hertz"] = _outside(sample)
    for sample in snapshot.of("pacecar_gpu_down"):
        if sample.value:
            found[sample.labels[0]]["down_reason"] = sample.labels[1]
    for gpu, figures in found.items():
        if "uuid" not in figures and (known := verdicts.last_known(gpu)) is not None:
            figures.update(uuid=known.uuid, name=known.name, pci_bus_id=known.pci_bus_id)
        if (health := verdicts.health.get(gpu)) is not None:
            figures["health"], figures["health_reasons"] = health.verdict.value, _reasons(health)
    for gpu, instances in _instances(snapshot).items():
        found[gpu]["instances"] = instances
    return tuple(GpuStatus(gpu=gpu, **figures) for gpu, figures in sorted(found.items(), key=_numbered)[:GPUS_MAX])


def _charted_gpus(snapshot: Snapshot) -> tuple[GpuStatus, ...]:
    found = sorted(_gpu_figures(snapshot, GPU_CHARTED).items(), key=_numbered)
    return tuple(GpuStatus(gpu=gpu, **figures) for gpu, figures in found[:GPUS_MAX])


def _gpu_figures(snapshot: Snapshot, fields: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return GPU -> field -> value in base units, for metrics whose only label is the GPU."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for field in fields:
        for sample in snapshot.of(_GPU + field):
            if len(sample.labels) == 1:
                found[sample.labels[0]][field] = _outside(sample)
    return found


def _reasons(health: GpuHealth) -> tuple[HealthReasonStatus, ...]:
    return tuple(
        HealthReasonStatus(
            reason=finding.reason.value,
            verdict=REASONS[finding.reason].verdict.value,
            words=finding.words,
            remedy=finding.remedy,
        )
        for finding in health.findings
    )


def _instances(snapshot: Snapshot) -> dict[str, tuple[MigInstance, ...]]:
    """Return the MIG instances of each GPU that has some."""
    found: dict[str, dict[tuple[str, str], dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for sample in snapshot.of("pacecar_gpu_instance_info"):
        gpu, gpu_instance, compute_instance, uuid, name = sample.labels
        found[gpu][gpu_instance, compute_instance].update(uuid=uuid, name=name)
    for stem in _INSTANCE_FIELDS:
        for sample in snapshot.of(_INSTANCE + stem):
            gpu, gpu_instance, compute_instance = sample.labels
            found[gpu][gpu_instance, compute_instance][stem] = _outside(sample)
    return {
        gpu: tuple(
            MigInstance(gpu_instance=key[0], compute_instance=key[1], **figures)
            for key, figures in sorted(instances.items(), key=lambda item: [_number(part) for part in item[0]])
        )
        for gpu, instances in found.items()
    }


def _missing(known: KnownGpu) -> MissingGpu:
    return MissingGpu(
        gpu=known.gpu, name=known.name, uuid=known.uuid, pci_bus_id=known.pci_bus_id,
        seen_time_seconds=known.seen_wall_ns / NS_PER_SECOND,
    )  # fmt: skip


def _numbered(item: tuple[str, Any]) -> tuple[int, str]:
    return _number(item[0])


def _number(label: str) -> tuple[int, str]:
    return (int(label) if label.isdecimal() else 1 << 30, label)


def _outside(sample: Sample) -> int | float:
    return by_name(sample.metric).unit.convert(sample.value)
