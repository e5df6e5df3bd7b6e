"""Ten thousand steps in virtual time, with evaluations, checkpoints and pauses of all ranks: none is called a hang."""

from __future__ import annotations

import pytest

from pacecar.analysis.hang.judgement import judge
from pacecar.profiler.hangs.hang_detector import HangDetector
from pacecar.profiler.hangs.inquiry import IDLE_SECONDS, Inquiry, Round, is_idle
from pacecar.records.hangs import CollectiveCall, GroupState, HangKind, RankAccount, ThreadStack

S = 1_000_000_000
STEP_NS = S // 10
HANG_NS = 120 * S
WORLD = 4
ROUND_NS = 3 * S

LOADER, SCRIPT = ("loader.py:40 __next__", "train.py:9 main"), ("train.py:31 main",)
WAITING = ("distributed_c10d.py:2810 all_reduce", "train.py:12 main")


class VirtualRank:
    """One rank: its detector, its counters and where its training thread is."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.detector = HangDetector(HANG_NS, 0)
        self.step, self.begun, self.finished = 0, 0, 0
        self.phase, self.frames = "outside", SCRIPT
        self.alive_ns: int | None = None

    def account(self, now_ns: int, backend: str) -> RankAccount:
        calls = tuple(
            CollectiveCall(
                number=number, operation=f"{backend}:all_reduce", sizes="[[9]]", is_finished=number <= self.finished
            )
            for number in range(max(1, self.begun - 3), self.begun + 1)
        )
        group = GroupState(
            name="0", description="default_pg", ranks=tuple(range(WORLD)), enqueued=self.begun,
            completed=self.finished, calls=calls,
        )  # fmt: skip
        stack = ThreadStack(name="MainThread", frames=self.frames, is_training=True)
        return RankAccount(
            rank=self.rank, world_size=WORLD, wall_ns=now_ns, step=self.step, phase=self.phase, groups=(group,),
            silent_ns=self.detector.silent_ns(now_ns, self.alive_ns), stacks=(stack,),
            patience_ns=self.detector.patience_ns(self.phase),
        )  # fmt: skip


class VirtualJob:
    """A job of `backend`, looked at every second as `HangWatch` does; `said` are verdicts and suspicions so far."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.ranks = [VirtualRank(rank) for rank in range(WORLD)]
        self.now_ns = 0
        self.said: list[object] = []
        self.idle_looks = 0
        self._looked_ns = self._round_ns = 0
        self._inquiry = Inquiry(HANG_NS)
        self._is_idle = False

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.pass_time(STEP_NS)
            for one in self.ranks:
                one.begun = one.finished = one.begun + 1
                one.detector.stepped(one.step, STEP_NS, self.now_ns)
                one.step += 1

    def pause(self, seconds: float, phase: str, *frames: tuple[str, ...]) -> None:
        for one in self.ranks:
            one.phase, one.frames = phase, frames[one.rank % len(frames)]
        self.pass_time(round(seconds * S))
        for one in self.ranks:
            one.phase, one.frames = "outside", SCRIPT

    def evaluate(self, seconds: float) -> None:
        for _ in range(round(seconds * 5)):
            self.pass_time(S // 5)
            for one in self.ranks:
                one.alive_ns = self.now_ns

    def pass_time(self, duration_ns: int) -> None:
        end_ns = self.now_ns + duration_ns
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self._looked_ns + S)
            if self.now_ns == self._looked_ns + S:
                self._looked_ns = self.now_ns
                self._look()

    def _look(self) -> None:
        now_ns = self.now_ns
        quiet = [one for one in self.ranks if one.detector.is_quiet(now_ns, one.phase, one.alive_ns)]
        if quiet:
            if now_ns >= self._round_ns:
                self._round_ns = now_ns + ROUND_NS
                accounts = [one.account(now_ns, self.backend) for one in self.ranks]
                verdict = judge(accounts, WORLD)
                self._is_idle = is_idle(verdict)
                self.idle_looks += self._is_idle
                if (found := self._inquiry.add(Round(accounts, now_ns, verdict))) is not None:
                    self.said.append(found)
        else:
            self._inquiry, self._is_idle = Inquiry(HANG_NS), False
        for one in self.ranks:
            suspicion = one.detector.check(now_ns, one.phase, one.alive_ns, is_idle=self._is_idle)
            if suspicion is not None:
                self.said.append(suspicion)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_nothing_is_said_in_ten_thousand_healthy_steps(backend):
    job = VirtualJob(backend)
    for part in range(20):
        job.train(400)
        job.evaluate(20 + part)
        job.train(100)
        job.pause(40 + 3 * part, "checkpoint", SCRIPT)
        if part == 2:  # long before any other long pause was seen
            job.pause(60, "data_wait", LOADER)
        if part == 5:
            job.pause(60, "outside", SCRIPT, ("other.py:7 save",))
    assert job.ranks[0].step == 10_000
    assert job.idle_looks
    assert job.said == []


@pytest.mark.slow
def test_a_pause_of_all_ranks_is_no_hang_until_it_lasts_longer_than_anything_does():
    job = VirtualJob("nccl")
    job.train(100)
    job.pause(IDLE_SECONDS - 10, "data_wait", LOADER)
    assert job.said == []
    job.train(100)
    job.pause(IDLE_SECONDS + 300, "data_wait", LOADER)
    verdict = next(one for one in job.said if hasattr(one, "kind"))
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (HangKind.NOBODY, (), ())
    assert "no rank waits for another" in verdict.summary


def test_after_a_pause_the_rank_that_does_not_come_back_is_named():
    job = VirtualJob("nccl")
    job.train(100)
    job.pause(60, "data_wait", LOADER)
    for one in job.ranks:
        one.phase, one.frames = ("tail", WAITING) if one.rank else ("data_wait", LOADER)
        one.begun += one.rank > 0
    job.pass_time(15 * S)
    (verdict,) = [one for one in job.said if hasattr(one, "kind")][:1]
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (HangKind.NOT_JOINED, (0,), (1, 2, 3))
