"""Formats what the ranks of a job replied: one document for JSON and for a terminal, a line per node.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import structs

from pacecar.clock import NS_PER_SECOND
from pacecar.formatting.ledger_headings import heading_words
from pacecar.formatting.plain_text import clean, clean_values
from pacecar.formatting.quantities import DASH, duration, percent, plural
from pacecar.formatting.tables import TextColumn, table_lines
from pacecar.knobs import setting
from pacecar.records import Answer, HangVerdict, JobLedger, Straggler, TunerStatus
from pacecar.records.job_orders import AttemptSoFar, JobAnswer, RankReply

from .report.formatting import elapsed

__all__ = ["JobDocument", "absent_lines", "hang_lines", "job_document", "json_of", "lines"]

RANKS_NAMED_MAX = 32
"""Ranks that are named one by one; of more, the first."""

HOSTS_SHOWN_MAX = 64

SHARE_MIN = 0.005
"""Smaller shares of an attempt's time are left out."""

SILENT_NS = 5 * NS_PER_SECOND
"""No step for so long is worth a word."""


class JobDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a job of `world_size` ranks; None where no rank that knows it has answered.

    `lost` are ranks whose replies did not come through the daemon.
    """

    job: str
    world_size: int | None
    replies: Sequence[RankReply]
    lost: Sequence[int]
    ledger: JobLedger | None = None
    late: Sequence[Straggler] = ()
    hang: HangVerdict | None = None
    tuner: TunerStatus | None = None
    attempt: AttemptSoFar | None = None
    problem: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every rank has answered."""
        return self.problem is None and not self.lost and all(one.state == "done" for one in self.replies)


def job_document(final: Answer, answers: Iterable[JobAnswer]) -> JobDocument:
    """Join the replies; of news that several ranks have, the one of the lowest rank counts."""
    answers = list(answers)
    replies = {reply.rank: reply for answer in answers for reply in answer.replies}
    world_size = max((answer.world_size for answer in answers), default=None)
    problem = None if final.state == "done" else final.detail
    if not answers and final.state == "done":
        problem = "the daemon here is of an older version and drops the ranks' replies: upgrade it"
    news = [one.news for _, one in sorted(replies.items()) if one.news is not None]
    return JobDocument(
        job=final.job,
        world_size=world_size,
        replies=[reply for _, reply in sorted(replies.items())],
        lost=[rank for rank in range(world_size or 0) if rank not in replies],
        ledger=next((one.ledger for one in news if one.ledger is not None), None),
        late=next((one.late for one in news if one.late), ()),
        hang=next((one.hang for one in news if one.hang is not None), None),
        tuner=next((one.tuner for one in news if one.tuner is not None), None),
        attempt=next((one.attempt for one in news if one.attempt is not None), None),
        problem=problem,
    )


def json_of(document: JobDocument) -> dict[str, object]:
    """Return the document for JSON with every field of each reply; on the wire, those with their default are absent."""
    return {**structs.asdict(document), "replies": [structs.asdict(reply) for reply in document.replies]}


def lines(document: JobDocument, *, width: int = 80) -> Iterator[str]:
    """Yield the document; its texts are untrusted and are cleaned."""
    document = clean_values(document)
    answering = [one for one in document.replies if one.state == "done"]
    yield _title(document, answering)
    for words in (document.problem, document.hang and f"hang: {document.hang.summary}"):
        if words:
            yield f"  {words}"
    for late in document.late:
        who = "a rank" if late.late_rank is None else f"rank {late.late_rank}"
        cost = duration(late.excess_ns)
        yield f"  {who} is late since step {late.since_step}: {late.cause} costs {cost} a step ({late.evidence})"
    yield from absent_lines(document)
    if document.attempt is not None:
        yield f"  {_attempt(document.attempt)}"
    if document.ledger is not None:
        yield f"  {_ledger(document.ledger)}"
    elif document.world_size not in (None, 1) and answering:
        yield "  no ledger: rank 0, which makes it, has not answered or has none yet"
    yield from _knobs(document, answering)
    if answering:
        yield ""
        yield from _hosts(answering, width)


def _title(document: JobDocument, answering: Sequence[RankReply]) -> str:
    steps = sorted({one.step for one in answering if one.step is not None})
    at = "" if not steps else f", step {steps[0]}" if len(steps) == 1 else f", steps {steps[0]} to {steps[-1]}"
    return f"{document.job}: {len(answering)} of {plural(document.world_size or len(answering), 'rank')} answer{at}"


def hang_lines(document: JobDocument, summary: str) -> Iterator[str]:
    """Yield `summary`, ranks that do not answer, and the evidence of the verdict."""
    document = clean_values(document)
    yield clean(summary)
    yield from absent_lines(document)
    if document.hang is not None:
        yield from (f"  {words}" for words in document.hang.evidence)


def absent_lines(document: JobDocument) -> Iterator[str]:
    """Yield a line for each rank that did not answer, or refused."""
    document = clean_values(document)
    absent = [one for one in document.replies if one.state != "done"]
    for one in absent[:RANKS_NAMED_MAX]:
        heard = (
            "never heard from"
            if one.silent_ns is None
            else f"last heard from {one.silent_ns / NS_PER_SECOND:.1f} s ago"
        )
        words = heard if one.state == "silent" else one.state
        where = f" ({one.host})" if one.host else ""
        yield f"  rank {one.rank}{where}: {words}: {one.detail}"
    if len(absent) > RANKS_NAMED_MAX:
        yield f"  and {len(absent) - RANKS_NAMED_MAX} more that do not answer"
    if document.lost:
        yield f"  the replies of {plural(len(document.lost), 'rank')} from {document.lost[0]} on were lost: ask again"


def _attempt(attempt: AttemptSoFar) -> str:
    """Return how old the attempt is, and what its time was spent in, the productive part first."""
    number = "" if attempt.attempt is None else f"attempt {attempt.attempt}, "
    others = sorted(attempt.headings_ns.items(), key=lambda item: (item[0] != "productive", -item[1]))
    shares = [(heading_words(name), length / attempt.wall_ns) for name, length in others if attempt.wall_ns]
    said = ", ".join(f"{words} {percent(share)}" for words, share in shares if share >= SHARE_MIN) or DASH
    at = "" if attempt.global_step is None else f"; step {attempt.global_step} of the training"
    saved = (
        "" if attempt.unsaved_steps is None else f"; {plural(attempt.unsaved_steps, 'step')} since the last checkpoint"
    )
    return f"{number}{elapsed(attempt.wall_ns)} old: {said}{at}{saved}"


def _ledger(ledger: JobLedger) -> str:
    phases = sorted(ledger.total_phases_ns.items(), key=lambda item: -item[1])
    total_ns = ledger.total_wall_ns
    shares = ", ".join(f"{phase} {percent(ns / total_ns)}" for phase, ns in phases if total_ns and ns)
    return f"pace {duration(ledger.pace_ns)} (median {duration(ledger.median_ns)}); time of all ranks: {shares or DASH}"


def _knobs(document: JobDocument, answering: Sequence[RankReply]) -> Iterator[str]:
    """Yield the tuner's state and the knobs in force; ranks differ while a switch is under way."""
    if document.tuner is not None:
        yield f"  tuner {document.tuner.state}: {document.tuner.detail}"
    by_epoch = {one.knobs.epoch: one.knobs.values for one in answering if one.knobs is not None}
    for epoch, values in sorted(by_epoch.items()):
        shown = ", ".join(f"{knob} {setting(knob, value)}" for knob, value in sorted(values.items()))
        ranks = [one.rank for one in answering if one.knobs is not None and one.knobs.epoch == epoch]
        some = "" if len(by_epoch) == 1 else f" on {plural(len(ranks), 'rank')} from {ranks[0]} on"
        if shown:
            yield f"  knobs{some}: {shown}"


def _hosts(answering: Sequence[RankReply], width: int) -> Iterator[str]:
    hosts: dict[str, list[RankReply]] = {}
    for one in answering:
        hosts.setdefault(one.host, []).append(one)
    rows = []
    for host, there in list(hosts.items())[:HOSTS_SHOWN_MAX]:
        steps = [one.step for one in there if one.step is not None]
        paces = [one.pace_ns for one in there if one.pace_ns is not None]
        silent_ns = max((one.silent_ns for one in there if one.silent_ns is not None), default=0)
        words = [f"no step for {silent_ns / NS_PER_SECOND:.0f} s"] if silent_ns > SILENT_NS else []
        words += [] if all(one.has_daemon for one in there) else ["without a daemon"]
        pace = duration(max(paces)) if paces else DASH
        rows.append((host or DASH, _ranks(there), str(min(steps)) if steps else DASH, pace, ", ".join(words)))
    columns = (TextColumn("host", 24), TextColumn("ranks", 12), TextColumn("step", 9, is_number=True),
               TextColumn("pace", 9, is_number=True), TextColumn(""))  # fmt: skip
    yield from table_lines(columns, rows, width)
    if len(hosts) > HOSTS_SHOWN_MAX:
        yield f"and {len(hosts) - HOSTS_SHOWN_MAX} more hosts"


def _ranks(there: Sequence[RankReply]) -> str:
    """Return "0-2,4": ranks are in order."""
    runs: list[list[int]] = []
    for one in there:
        if runs and one.rank == runs[-1][-1] + 1:
            runs[-1].append(one.rank)
        else:
            runs.append([one.rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
