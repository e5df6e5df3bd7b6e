"""Two looks at a job: one that goes on, one that pauses as before, one that waits too long, one with a stopped rank."""

from __future__ import annotations

import msgspec
import pytest

from pacecar.analysis.hang.judgement import judge
from pacecar.clock import NS_PER_SECOND
from pacecar.profiler.orders.two_looks import EVIDENCE_MAX, for_a_frame, summary_of
from pacecar.records.hangs import HangEvidence, ProcessState, RankAccount
from pacecar.wire import FRAME_BYTES_MAX


def look(step: int, silent_seconds: float, *, stopped: bool = False) -> HangEvidence:
    """Return what two ranks say, which were silent for up to 10 s before; one of them may be stopped."""
    accounts = [
        RankAccount(
            rank=rank, world_size=2, step=step, silent_ns=round(silent_seconds * NS_PER_SECOND),
            patience_ns=10 * NS_PER_SECOND,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    if stopped:
        accounts[1] = RankAccount(
            rank=1, world_size=2, answered=False, process=ProcessState(pid=7, state="T"), problems=("no answer",)
        )
    return HangEvidence(verdict=judge(accounts, 2, job="j", rank=0, wall_ns=1), accounts=tuple(accounts))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (look(4, 0.0), look(6, 0.1), "the job does not hang: it went from step 4 to 6 between two looks"),
        (look(4, 7.0), look(4, 8.0), "no step has ended for 8.0 s, which this job has done before"),
        (look(4, 12.0), look(4, 13.0), "no step has ended for 13.0 s: "),
        (look(4, 2.0, stopped=True), look(4, 3.0, stopped=True), "no step has ended for 3.0 s: rank 1 does not run"),
        (look(4, 2.0, stopped=True), look(5, 0.0, stopped=True), "the job does not hang: "),
    ],
    ids=["goes on", "pauses", "too long", "stopped", "goes on without it"],
)
def test_what_is_said(before: HangEvidence, after: HangEvidence, words: str) -> None:
    assert summary_of(before, after).startswith(words)


def test_a_verdict_with_endless_evidence_fits_into_a_frame() -> None:
    verdict = msgspec.structs.replace(look(4, 12.0).verdict, evidence=("x" * 4096,) * 64)
    cut = for_a_frame(verdict)
    assert len(cut.evidence) == EVIDENCE_MAX
    assert len(msgspec.msgpack.encode(cut)) < FRAME_BYTES_MAX / 2
