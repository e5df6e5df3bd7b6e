"""Computes a job's energy, and that of a step, sample and token, from its GPUs' counters and the job's own totals.

Power times step time, the obvious product, multiplies a sample of the power by one step.  The driver counts energy,
and the hook counts steps, samples and tokens; so the quotient of two differences over the same time misses nothing,
idle time between steps included, which the job pays for too.

A difference is taken between two ticks at which a step had just ended, MIN_SECONDS to twice SPAN_SECONDS apart: a step
that is reported a tick late is then a small share.  It begins anew when the job's GPUs or counters change.

Two jobs on one GPU are not split.  No counter says whose energy it was, and a split by time on the SMs would be a
guess: a memory-bound and a compute-bound kernel differ in power by a factor.  The energy of a shared GPU is charged to
neither job, and the quotients of both are absent until it is one job's again.  MIG instances have no energy counter:
absent.

Not seen: a process that is no rank of a job and uses the GPU beside it; energy of processors, memory and fans.  Only
this node's GPUs are here: of a job on several nodes the quotients a step add up, those a sample and a token do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Sample, Snapshot
from pacecar.records.job_identity import JobKey

from ..catalog_sample import sample
from ..fault_containment import ContainedPart, FaultContainment
from .job_table import JobView, RankView

__all__ = ["MIN_SECONDS", "SPAN_SECONDS", "JobEnergies"]

MIN_SECONDS = 10
SPAN_SECONDS = 60


class _Mark(NamedTuple):
    """A job at one tick: the energy that it has used, and its work, since it was first seen."""

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

    def begin(self) -> None:
        """Start over: compare with nothing from before now."""
        self.marks, self.latest = [], None

    def use(self, energies_mj: dict[str, int], shared: set[str]) -> None:
        """Add what the job's GPUs used since they were read before."""
        alone = {uuid: energy for uuid, energy in energies_mj.items() if uuid not in shared}
        if alone.keys() != self.base_mj.keys() or len(alone) < len(energies_mj):
            self.begin()
        for uuid, energy in alone.items():
            used = energy - self.base_mj.get(uuid, energy)
            if used < 0:  # the driver was loaded anew and counts from zero
                self.begin()
            else:
                self.total_mj = (self.total_mj or 0) + used
        self.base_mj = alone

    def count(self, now: _Mark) -> None:
        """Take the job's totals, at a tick."""
        before = self.latest or (self.marks[-1] if self.marks else None)
        if before is not None and now.steps < before.steps:
            self.begin()
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
        """Yield metric and millijoules of one step, sample and token."""
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
    """Takes ticks in order.  Keeps as many jobs as the daemon knows."""

    def __init__(self, faults: FaultContainment | None = None) -> None:
        self._jobs: dict[JobKey, _Job] = {}
        self._faults = faults or FaultContainment()

    def update(self, snapshot: Snapshot, jobs: Callable[[], Sequence[JobView]]) -> list[Sample]:
        """Return the series of all jobs whose energy is known; `jobs` is asked only where GPUs have counters."""
        energies_mj = _energies(snapshot)
        if not energies_mj and not self._jobs:
            return []
        live = {job.key: [rank for rank in job.ranks if rank.connected and rank.goodbye is None] for job in jobs()}
        used = {key: {rank.hello.device_uuid for rank in ranks} for key, ranks in live.items()}
        shared = {uuid for uuid, users in Counter(u for uuids in used.values() for u in uuids).items() if users > 1}
        self._jobs = {key: self._jobs.get(key) or _Job() for key in live}
        samples: list[Sample] = []
        for key, ranks in live.items():
            try:
                self._use(self._jobs[key], ranks, used[key], energies_mj, shared, snapshot)
                samples += self._jobs[key].samples(key)
            except Exception as error:  # noqa: BLE001  a bug with one job must not cost the others their energy
                self._faults.caught(ContainedPart.JOB, f"job {str(key)!r}", error)
        return samples

    def _use(
        self,
        job: _Job,
        ranks: list[RankView],
        used: set[str | None],
        energies_mj: dict[str, int],
        shared: set[str | None],
        snapshot: Snapshot,
    ) -> None:
        mine = [uuid for uuid in used if uuid is not None]
        if not mine or None in used:
            job.begin()
            job.base_mj = {}
        elif all(uuid in energies_mj for uuid in mine):  # else: what a GPU used meanwhile is in its next reading
            self._tick(job, ranks, {u: energies_mj[u] for u in mine}, shared - {None}, snapshot)

    @staticmethod
    def _tick(
        job: _Job, ranks: list[RankView], energies_mj: dict[str, int], shared: set[str | None], snapshot: Snapshot
    ) -> None:
        attached = frozenset((rank.hello.rank, rank.hello.started_wall_ns) for rank in ranks)
        if attached != job.attached:  # their totals began anew
            job.begin()
            job.attached = attached
        job.use(energies_mj, {uuid for uuid in shared if uuid is not None})
        steps = [rank.step.total_steps for rank in ranks if rank.step is not None]
        if len(steps) == len(ranks) and len(job.base_mj) == len(energies_mj) and job.total_mj is not None:
            job.count(_Mark(snapshot.started_ns, job.total_mj, min(steps), *_work(ranks)))


def _energies(snapshot: Snapshot) -> dict[str, int]:
    """Return uuid -> millijoules of each GPU whose counter was read."""
    uuids = {one.labels[0]: one.labels[1] for one in snapshot.of("pacecar_gpu_info")}
    counters = {one.labels[0]: int(one.value) for one in snapshot.of("pacecar_gpu_energy_joules_total")}
    return {uuids[gpu]: energy for gpu, energy in counters.items() if gpu in uuids}


def _work(ranks: Sequence[RankView]) -> tuple[int | None, int | None]:
    """Return samples and tokens of all `ranks`; None where one does not count them, or ranks may share a sample."""
    if any(rank.hello.world_size > 1 and rank.hello.parallel != {"data": rank.hello.world_size} for rank in ranks):
        return None, None
    return (
        _sum(rank.step.total_samples if rank.step else None for rank in ranks),
        _sum(rank.step.total_tokens if rank.step else None for rank in ranks),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)
