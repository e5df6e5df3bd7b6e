"""Judges a job whose ranks say nothing at all by what the kernel says of their processes.

Ranks that hang judge themselves (`profiler.hangs`) and send the verdict.  They cannot if each of them is stopped or
does not let other threads run, as in a C call that holds Python's lock.  Then the daemon sees which processes are
stopped, frozen, held by a debugger or gone, and asks the same judgement (`analysis.hang`).  What it cannot see is who
waits for whom.  So it says nothing of processes that run or sleep, and if all ranks are stopped, it takes that for a
pause until PAUSE_SECONDS have passed.

A verdict needs two looks that agree.  Its `rank` is None, and it is over when a rank speaks again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from pacecar.analysis.hang.judgement import judge
from pacecar.analysis.hang.sentences import process_words
from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.kernel_files.reader import KernelFiles
from pacecar.process_state import identity_of, read_process
from pacecar.records import HangVerdict, JobHello
from pacecar.records.hangs import ProcessState, RankAccount
from pacecar.records.job_identity import JobKey

__all__ = ["SILENT_SECONDS", "SilentJob", "SilentJobs", "SilentRank"]

SILENT_SECONDS = 10.0
"""How long a job says nothing before it is looked at; ranks that can judge have said it by then."""

SILENT_STEPS = 5
"""And so many of its latest steps."""

PAUSE_SECONDS = 120.0
"""How long all ranks may be stopped before that is a hang: whoever stopped them all may want to go on."""

LOOK_SECONDS = 3.0
"""Between two looks at a job."""

READS_MAX = 256
"""Processes read in one tick, some files each."""

_log = logging.getLogger(__name__)


class SilentRank(NamedTuple):
    """One rank of a silent job.  `is_gone`: its connection ended without a goodbye."""

    hello: JobHello
    step: int | None
    is_gone: bool


class SilentJob(NamedTuple):
    """A job of which no rank has said anything for `silent_ns`; `uid` owns it."""

    key: JobKey
    uid: int
    silent_ns: int
    ranks: Sequence[SilentRank]


class _Looks:
    """What was seen of one job: the latest look, and the verdict that was reported."""

    def __init__(self, job: SilentJob) -> None:
        self.job = job
        self.at_ns: int | None = None
        self.latest: HangVerdict | None = None
        self.reported: HangVerdict | None = None


class SilentJobs:
    """Called at every tick.  `members` returns pid and hello of connected ranks, `report` takes verdicts."""

    def __init__(
        self,
        files: KernelFiles,
        clock: Clock,
        members: Callable[[], Iterable[tuple[int, JobHello]]],
        report: Callable[[SilentJob, HangVerdict], None],
    ) -> None:
        self._files = files
        self._clock = clock
        self._members = members
        self._report = report
        self._looks: dict[JobKey, _Looks] = {}

    def tick(self, jobs: Sequence[SilentJob]) -> None:
        """Look at `jobs`, which are all that are silent now; report verdicts, and the end of those on others."""
        for key in self._looks.keys() - {job.key for job in jobs}:
            job, reported = self._looks[key].job, self._looks[key].reported
            del self._looks[key]
            if reported is not None:
                self._report(job, structs.replace(reported, ended=True, wall_ns=self._clock.wall_ns()))
        now_ns = self._clock.monotonic_ns()
        due = [job for job in jobs if self._is_due(job.key, now_ns)]
        pids = {(JobKey.of(hello), hello.rank): pid for pid, hello in self._members()} if due else {}
        reads = 0
        for job in due:
            reads += len(job.ranks)
            if reads > READS_MAX and reads > len(job.ranks):
                return  # the others' turn comes at the next tick
            self._look(job, pids, now_ns)

    def _is_due(self, key: JobKey, now_ns: int) -> bool:
        looks = self._looks.get(key)
        if looks is None:
            return True
        return looks.reported is None and (looks.at_ns is None or now_ns - looks.at_ns >= LOOK_SECONDS * NS_PER_SECOND)

    def _look(self, job: SilentJob, pids: Mapping[tuple[JobKey, int], int], now_ns: int) -> None:
        looks = self._looks.setdefault(job.key, _Looks(job))
        accounts = [self._account(one, pids.get((job.key, one.hello.rank)), job.silent_ns) for one in job.ranks]
        world_size = max(one.hello.world_size for one in job.ranks)
        verdict = judge(
            accounts, world_size, job=job.key.job, rank=None, wall_ns=self._clock.wall_ns(), waited_ns=job.silent_ns
        )
        before, looks.latest, looks.at_ns = looks.latest, verdict, now_ns
        is_pause = len(verdict.culprits) == len(job.ranks) and job.silent_ns < PAUSE_SECONDS * NS_PER_SECOND
        if not verdict.culprits or is_pause or before is None:
            return
        if (before.kind, before.culprits) == (verdict.kind, verdict.culprits):
            looks.reported = verdict
            _log.warning("job %s: no rank says anything: %s", job.key, verdict.summary)
            self._report(job, verdict)

    def _account(self, one: SilentRank, pid: int | None, silent_ns: int) -> RankAccount:
        hello = one.hello
        process: ProcessState | None = None
        if one.is_gone:
            process = ProcessState(pid=hello.pid, exists=False)
        elif pid is not None:
            process = read_process(identity_of(pid, self._files), self._files)
        words = process_words(process)
        return RankAccount(
            rank=hello.rank, world_size=hello.world_size, host=hello.host, step=one.step, silent_ns=silent_ns,
            process=process, answered=False, problems=(words,) if words else (),
        )  # fmt: skip
