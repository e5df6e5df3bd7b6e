"""Detects what is worth a recording: an Xid, a GPU that is lost, a job that hangs or stalls; each once, until it ends.

A state that lasts must not write a file a tick, and 8 ranks that suspect the same hang are one hang.  So a trigger is
a change: a counter that rose, a GPU that was up and is not.  What was so when the daemon started is no change.

Pure: what was seen in, triggers out.  Left out: writing, and how often (`recorder`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.formatting.plain_text import clean
from pacecar.records import HangSuspicion, Snapshot
from pacecar.records.recording import Trigger

from ..fair_share import yielding_holder

__all__ = ["STALL_STEPS", "TriggerPace", "Triggers"]

STALL_STEPS = 20
"""A job whose steps take long is not stalled before so many of them would have ended."""

TOGETHER_SECONDS = 5
"""GPUs that are lost within so long of the first are lost for one reason, or are in its recording anyway."""

JOBS_MAX = 1024
"""Jobs whose hang is remembered; the oldest of the user with most of them makes room."""


class TriggerPace(NamedTuple):
    """A running job (`str` of its key): how long ago its last step was reported, how long it took, and whose it is."""

    job: str
    age_ns: int
    step_ns: int
    uid: int | None = None


class Triggers:
    """Finds changes, and remembers the state before; a job is `str` of its key."""

    def __init__(self, *, stall_ns: int) -> None:
        self._stall_ns = stall_ns
        self._xids: dict[tuple[str, str], int | float] | None = None
        self._up: dict[str, bool] = {}
        self._lost: set[str] = set()
        self._lost_wall_ns = -TOGETHER_SECONDS * NS_PER_SECOND
        self._hanging: dict[str, set[int]] = {}
        self._uids: dict[str, int | None] = {}
        self._stalled: set[str] = set()

    def tick(self, snapshot: Snapshot) -> list[Trigger]:
        """Return what happened to GPUs since the tick before."""
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
        """Yield one trigger for all GPUs that are lost together: a driver that goes takes all of them with it."""
        together = wall_ns - self._lost_wall_ns < TOGETHER_SECONDS * NS_PER_SECOND
        if gpus and together and self._lost.isdisjoint(gpus):
            self._lost.update(gpus)
        elif gpus:
            self._lost, self._lost_wall_ns = set(gpus), wall_ns
            who = f"GPU {gpus[0]} answers" if len(gpus) == 1 else f"GPUs {', '.join(gpus)} answer"
            yield Trigger(kind="gpu_lost", subject=gpus[0], detail=f"{who} no more", wall_ns=wall_ns)

    def hang(self, job: str, record: HangSuspicion, wall_ns: int, uid: int | None = None) -> list[Trigger]:
        """Return the trigger, if this is the first rank of `job`, which is `uid`'s, that suspects a hang."""
        ranks = self._hanging.get(job, set())
        if record.ended:
            ranks.discard(record.rank)
            if not ranks:
                self.over(job)
            return []
        is_new = not ranks
        if job not in self._hanging and len(self._hanging) >= JOBS_MAX:
            held = Counter(self._uids.values())
            giver = yielding_holder(uid, held)
            giver = giver if giver is not None or uid not in held else uid
            self.over(next(name for name, owner in self._uids.items() if giver in (None, owner)))
        self._hanging.setdefault(job, ranks).add(record.rank)
        self._uids[job] = uid
        if not is_new:
            return []
        silent = record.silent_ns / NS_PER_SECOND
        where = f"rank {record.rank} of job {job}"
        detail = clean(f"{where}: step {record.step} not over after {silent:.0f} s, in {record.phase}")
        return [Trigger(kind="hang", subject=job, detail=detail, wall_ns=wall_ns, uid=uid)]

    def over(self, job: str) -> None:
        """Note that `job` said goodbye: it hangs no more."""
        self._hanging.pop(job, None)
        self._uids.pop(job, None)

    def paces(self, paces: Iterable[TriggerPace], wall_ns: int) -> list[Trigger]:
        """Return the jobs that stall now and did not before."""
        stalled = {pace.job: pace for pace in paces if pace.age_ns >= max(self._stall_ns, STALL_STEPS * pace.step_ns)}
        before, self._stalled = self._stalled, set(stalled)
        return list(_stalls((pace for job, pace in stalled.items() if job not in before), wall_ns))


def _stalls(paces: Iterable[TriggerPace], wall_ns: int) -> Iterator[Trigger]:
    for pace in paces:
        age, step = pace.age_ns / NS_PER_SECOND, pace.step_ns / NS_PER_SECOND
        detail = clean(f"job {pace.job}: no step for {age:.0f} s, the last took {step:.3g} s")
        yield Trigger(kind="stall", subject=pace.job, detail=detail, wall_ns=wall_ns, uid=pace.uid)
