"""Says from two looks at all ranks, a moment apart, what they are doing and whether the job hangs.  Pure.

One look cannot: every rank of a healthy job waits for others now and then.  A watched job judges itself, over more
rounds (`hangs.inquiry`), and such a verdict is shown before what is said here.
"""

from __future__ import annotations

from msgspec import structs

from pacecar.clock import NS_PER_SECOND
from pacecar.records import HangVerdict
from pacecar.records.hangs import HangEvidence

from ..hangs.inquiry import CERTAIN

__all__ = ["EVIDENCE_CHARACTERS_MAX", "for_a_frame", "summary_of"]

EVIDENCE_MAX = 32
EVIDENCE_CHARACTERS_MAX = 400
"""Sentences of evidence, and their length: a frame has 64 KiB."""


def summary_of(before: HangEvidence, after: HangEvidence) -> str:
    """Return the sentence for people."""
    steps = [[one.step for one in look.accounts if one.step is not None] for look in (before, after)]
    silent = [one.silent_ns for one in after.accounts if one.silent_ns is not None]
    if not all(steps) or not silent:
        return after.verdict.summary
    if max(steps[1]) > max(steps[0]):
        return f"the job does not hang: it went from step {max(steps[0])} to {max(steps[1])} between two looks"
    patience_ns = max((one.patience_ns for one in after.accounts if one.patience_ns is not None), default=0)
    words = f"no step has ended for {min(silent) / NS_PER_SECOND:.1f} s"
    is_certain = after.verdict.kind in CERTAIN and before.verdict.culprits == after.verdict.culprits
    if min(silent) <= patience_ns and not is_certain:
        return f"{words}, which this job has done before"
    return f"{words}: {after.verdict.summary}"


def for_a_frame(verdict: HangVerdict) -> HangVerdict:
    """Return `verdict` with so much of its evidence as a frame to the daemon has room for."""
    evidence = tuple(words[:EVIDENCE_CHARACTERS_MAX] for words in verdict.evidence[:EVIDENCE_MAX])
    return structs.replace(verdict, evidence=evidence)
