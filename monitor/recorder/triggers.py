"""Detects what is worth a recording: an Xid, a lost GPU, a job that hangs or stalls; each once, until it ends.

A lasting state must not write a file at each tick, and 8 ranks that suspect the same hang are one hang.  So a trigger
is a change: a counter that rose, a GPU that was up and is not.  The state at the daemon's start is not a change.

Pure: observations in, triggers out.  Left out: writing, and how often (`recorder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.formatting.plain_text import clean
from pacecar.records import HangSuspicion, HangVerdict, Snapshot
from pacecar.records.recording import Trigger

from ..fair_share import yielding_item

__all__ = ["STALL_STEPS", "TriggerPace", "Triggers"]

STALL_STEPS = 20
"""A job stalls only after the time of this many steps, so that long steps are not stalls."""

TOGETHER_SECONDS = 5
"""GPUs lost within this time of the first one share its trigger: they have the same cause or are in its recording."""

JOBS_MAX = 1024
"""Jobs whose hang is remembered; the oldest of the user with most makes room."""


class TriggerPace(NamedTuple):
    """A running job (`str` of its key): the age and duration of its last step, and its user."""

    job: str
    age_ns: int
    step_ns: int
    uid: int | None = None


class Triggers:
    """Finds changes by comparing with the previous state; jobs are identified by `str` of their key."""

    def __init__(self, *, stall_ns: int) -> None:
        self._stall_ns = stall_ns
        self._xids: dict[tuple[str, str], int | float] | None = None
        self._up: dict[str, bool] = {}
        self._lost: set[str] = set()
        self._lost_wall_ns = -TOGETHER_SECONDS * NS_PER_SECOND
        self._hanging: dict[str, set[int | None]] = {}
        self._uids: dict[str, int | None] = {}
        self._stalled: set[str] = set()

    def tick(self, snapshot: Snapshot) -> list[Trigger]:
        """Return what happened to GPUs since the previous tick."""
        xids: dict[tuple[str, str], int | float] = {}
        found: list[Trigger] = []
        lost: list[str] = []
        for sample in snapshot.of("pacecar_gpu_xid_errors_total"):
            xids[sample.labels[0], sample.labels[1]] = sample.value
        for sample in snapshot.of("pacecar_gpu_up"):
            gpu, is_up = sample.labels[0], bool(sample.value)
            if self._up.get(gpu, False) and not is_up:
                lost.append(gpu)
            self._up[gpu] = is_up
        found += self._lose(lost, snapshot.wall_ns)
        if not xids:  # no driver at this tick
            return found
        if self._xids is not None:
            for (gpu, code), count in xids.items():
                more = count - self._xids.get((gpu, code), 0)
                if more > 0:
                    detail = f"Xid {code} of GPU {gpu}" + (f", {more:.0f} times" if more > 1 else "")
                    found.append(Trigger(kind="xid", subject=gpu, detail=detail, wall_ns=snapshot.wall_ns, xid=code))
        self._xids = (self._xids or {}) | xids
        return found

    def _lose(self, gpus: list[str], wall_ns: int) -> Iterator[Trigger]:
        """Yield one trigger for all GPUs that are lost together: a failing driver takes all of them along."""
        is_together = wall_ns - self._lost_wall_ns < TOGETHER_SECONDS * NS_PER_SECOND
        if gpus and is_together and self._lost.isdisjoint(gpus):
            self._lost.update(gpus)
        elif gpus:
            self._lost, self._lost_wall_ns = set(gpus), wall_ns
            what = f"GPU {gpus[0]} no longer answers" if len(gpus) == 1 else f"GPUs {', '.join(gpus)} no longer answer"
            yield Trigger(kind="gpu_lost", subject=gpus[0], detail=what, wall_ns=wall_ns)

    def hang(
        self, job: str, record: HangSuspicion | HangVerdict, wall_ns: int, uid: int | None = None
    ) -> list[Trigger]:
        """Return a trigger if this is the first word of a hang of `job`, of user `uid`: a rank's, or a verdict."""
        speaker = record.rank if isinstance(record, HangSuspicion) else None
        speakers = self._hanging.get(job, set())
        if record.ended:
            speakers.discard(speaker)
            if not speakers:
                self.over(job)
            return []
        is_new = not speakers
        if job not in self._hanging and len(self._hanging) >= JOBS_MAX:
            self.over(yielding_item(uid, self._uids, lambda name: self._uids[name]))
        self._hanging.setdefault(job, speakers).add(speaker)
        self._uids[job] = uid
        if not is_new:
            return []
        if isinstance(record, HangSuspicion):
            silent = record.silent_ns / NS_PER_SECOND
            where = f"rank {record.rank} of job {job}"
            detail = f"{where}: step {record.step} has not ended after {silent:.0f} s, in {record.phase}"
        else:
            detail = f"job {job} hangs: {record.summary}"
        return [Trigger(kind="hang", subject=job, detail=clean(detail), wall_ns=wall_ns, uid=uid)]

    def over(self, job: str) -> None:
        """Record that `job` said goodbye and so no longer hangs."""
        self._hanging.pop(job, None)
        self._uids.pop(job, None)

    def paces(self, paces: Iterable[TriggerPace], wall_ns: int) -> list[Trigger]:
        """Return triggers for jobs that stall now and did not before."""
        stalled = {pace.job: pace for pace in paces if pace.age_ns >= max(self._stall_ns, STALL_STEPS * pace.step_ns)}
        before, self._stalled = self._stalled, set(stalled)
        return list(_stalls((pace for job, pace in stalled.items() if job not in before), wall_ns))


def _stalls(paces: Iterable[TriggerPace], wall_ns: int) -> Iterator[Trigger]:
    for pace in paces:
        age, step = pace.age_ns / NS_PER_SECOND, pace.step_ns / NS_PER_SECOND
        detail = clean(f"job {pace.job}: no step for {age:.0f} s, the last took {step:.3g} s")
        yield Trigger(kind="stall", subject=pace.job, detail=detail, wall_ns=wall_ns, uid=pace.uid)
