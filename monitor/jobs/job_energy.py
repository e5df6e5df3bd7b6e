"""Computes a job's energy, in total and per step, sample and token, from GPU counters and the job's own totals.

Power times step time would multiply one sample of the power by one step.  The driver counts energy, and the hook counts
steps, samples and tokens.  So dividing two differences over the same time misses nothing, not even the idle time
between steps, which the job pays for too.

A difference is taken between two ticks at which a step had just ended, MIN_SECONDS to twice SPAN_SECONDS apart, so that
a step reported one tick late matters little.  It starts over when the job's GPUs or counters change.

If two jobs share a GPU, no counter tells whose energy it was.  A split by time on the SMs would be a guess, because the
power of memory-bound and compute-bound kernels differs by a factor.  So neither job is charged, and the quotients of
both are absent until one has the GPU alone.  MIG instances have no energy counter: absent.

Not included: processes on the GPU that are not ranks; processors, memory and fans; other nodes.  For a job on several
nodes the energy per step adds up over nodes; per sample and per token it does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.metrics.catalog import by_name
from pacecar.records import Sample, Snapshot
from pacecar.records.job_identity import JobKey

from ..catalog_sample import sample
from ..fault_containment import ContainedPart, FaultContainment
from .tracked_job import JobView, RankView

__all__ = ["MIN_SECONDS", "SPAN_SECONDS", "JobEnergies", "sum_known"]

MIN_SECONDS = 10
SPAN_SECONDS = 60

_INFO = by_name("pacecar_gpu_info")


class _Mark(NamedTuple):
    """A job at one tick: its energy and work since it was first seen."""

    at_ns: int
    energy_mj: int
    steps: int
    samples: int | None
    tokens: int | None


class _Job:
    """The energy of one job."""

    def __init__(self) -> None:
        self.total_mj: int | None = None
        self.base_mj: dict[str, int] = {}
        self.attached: frozenset[tuple[int, int]] = frozenset()
        self.marks: list[_Mark] = []
        self.latest: _Mark | None = None

    def restart(self) -> None:
        """Compare with nothing from before now."""
        self.marks, self.latest = [], None

    def add_energy(self, energies_mj: dict[str, int], shared: set[str]) -> None:
        """Add what the job's GPUs used since their previous reading."""
        alone = {uuid: energy for uuid, energy in energies_mj.items() if uuid not in shared}
        if alone.keys() != self.base_mj.keys() or len(alone) < len(energies_mj):
            self.restart()
        for uuid, energy in alone.items():
            used = energy - self.base_mj.get(uuid, energy)
            if used < 0:  # the driver was reloaded and counts from zero
                self.restart()
            else:
                self.total_mj = (self.total_mj or 0) + used
        self.base_mj = alone

    def add_work(self, now: _Mark) -> None:
        """Add the job's totals at a tick."""
        before = self.latest or (self.marks[-1] if self.marks else None)
        if before is not None and now.steps < before.steps:
            self.restart()
        elif before is not None and now.steps == before.steps:
            return
        if not self.marks:
            self.marks = [now]
            return
        self.latest = now
        if now.at_ns - self.marks[-1].at_ns >= SPAN_SECONDS * NS_PER_SECOND:
            self.marks = [self.marks[-1], now]

    def samples(self, key: JobKey) -> Iterator[Sample]:
        """Yield the series of the job `key`."""
        if self.total_mj is not None:
            yield sample("pacecar_job_energy_joules_total", self.total_mj, *key)
        for metric, millijoules in self.quotients():
            yield sample(metric, millijoules, *key)

    def quotients(self) -> Iterator[tuple[str, float]]:
        """Yield metric and millijoules per step, sample and token."""
        if self.latest is None or self.latest.at_ns - self.marks[0].at_ns < MIN_SECONDS * NS_PER_SECOND:
            return
        since, now = self.marks[0], self.latest
        for what, first, last in (
            ("step", since.steps, now.steps),
            ("sample", since.samples, now.samples),
            ("token", since.tokens, now.tokens),
        ):
            if first is not None and last is not None and last > first:
                yield f"pacecar_job_energy_per_{what}_joules", (now.energy_mj - since.energy_mj) / (last - first)


class JobEnergies:
    """The energy of all jobs; `update` takes ticks in order.  Keeps as many jobs as the daemon knows."""

    def __init__(self, faults: FaultContainment | None = None) -> None:
        self._jobs: dict[JobKey, _Job] = {}
        self._faults = faults or FaultContainment()

    def update(self, snapshot: Snapshot, jobs: Callable[[], Sequence[JobView]]) -> list[Sample]:
        """Return the series of all jobs whose energy is known; `jobs` is called only if GPUs have counters."""
        energies_mj = _energies(snapshot)
        if not energies_mj and not self._jobs:
            return []
        live = {job.key: [rank for rank in job.ranks if rank.connected and rank.goodbye is None] for job in jobs()}
        used = {key: {rank.hello.device_uuid for rank in ranks} for key, ranks in live.items()}
        users = Counter(uuid for uuids in used.values() for uuid in uuids if uuid is not None)
        shared = {uuid for uuid, count in users.items() if count > 1}
        self._jobs = {key: self._jobs.get(key) or _Job() for key in live}
        samples: list[Sample] = []
        for key, ranks in live.items():
            job, own = self._jobs[key], {uuid for uuid in used[key] if uuid is not None}
            try:
                if not own or None in used[key]:
                    job.restart()
                    job.base_mj = {}
                elif own <= energies_mj.keys():  # else its next reading has what a GPU used meanwhile
                    _update_job(job, ranks, {uuid: energies_mj[uuid] for uuid in own}, shared, snapshot.started_ns)
                samples += job.samples(key)
            except Exception as error:  # noqa: BLE001  a bug with one job must not cost the others their energy
                self._faults.caught(ContainedPart.JOB, f"job {str(key)!r}", error)
        return samples


def _update_job(job: _Job, ranks: list[RankView], energies_mj: dict[str, int], shared: set[str], now_ns: int) -> None:
    attached = frozenset((rank.hello.rank, rank.hello.started_wall_ns) for rank in ranks)
    if attached != job.attached:  # their totals restarted
        job.restart()
        job.attached = attached
    job.add_energy(energies_mj, shared)
    steps = [rank.step.total_steps for rank in ranks if rank.step is not None]
    if len(steps) == len(ranks) and len(job.base_mj) == len(energies_mj) and job.total_mj is not None:
        job.add_work(_Mark(now_ns, job.total_mj, min(steps), *_work(ranks)))


def _energies(snapshot: Snapshot) -> dict[str, int]:
    """Return uuid -> millijoules of each GPU whose counter was read.

    GPUs that are, or may be, cut into MIG instances are left out: older CUDA gives a rank on an instance the UUID of
    the whole GPU, whose energy the other instances used too.
    """
    infos = (dict(zip(_INFO.labels, one.labels, strict=True)) for one in snapshot.of(_INFO.name))
    uuids = {info["gpu"]: info["uuid"] for info in infos if info["mig"] == "off"}
    counters = {one.labels[0]: int(one.value) for one in snapshot.of("pacecar_gpu_energy_joules_total")}
    return {uuids[gpu]: energy for gpu, energy in counters.items() if gpu in uuids}


def _work(ranks: Sequence[RankView]) -> tuple[int | None, int | None]:
    """Return samples and tokens of all `ranks`; None if one does not count them, or ranks may share a sample."""
    if any(rank.hello.world_size > 1 and rank.hello.parallel != {"data": rank.hello.world_size} for rank in ranks):
        return None, None
    return (
        sum_known(rank.step.total_samples if rank.step else None for rank in ranks),
        sum_known(rank.step.total_tokens if rank.step else None for rank in ranks),
    )


def sum_known(counts: Iterable[int | None]) -> int | None:
    """Return the sum; None if one is not known."""
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)
