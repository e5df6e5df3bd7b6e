"""Judges from the accounts of all ranks who holds a job up.

1. Accounts that contradict their peers are set aside (`rank_facts`).
2. Ranks that are a cause by themselves are found: stopped, gone, lagging (`rank_facts`), in a call that differs from
   the others' (`mismatches`).
3. All waiting is followed to its ends (`wait_graph`).  Each end is a finding: a cause of the above, a rank that never
   joined and waits for nothing itself, a transfer that does not end, or something that cannot be told.
4. Findings are weighed.  A finding that another one may explain is not named, and where several explanations are left
   the verdict is `unknown`: a wrong name costs more than none, since people go and restart that rank.

What these rules cannot see is waiting that torch does not record: sends and receives of gloo, stores, file systems.
So more than one rank that never joined is named only where torch records sends and receives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from pacecar.formatting.quantities import plural
from pacecar.records.hangs import HangKind, HangVerdict, RankAccount
from pacecar.records.ranges import INT64_MAX, LABEL_CHARACTERS_MAX, TEXT_CHARACTERS_MAX, TEXTS_MAX

from .case import HangCase, HangFinding, open_case, training_frames
from .findings import find_ends, why_unknown
from .sentences import call_words, group_words, has_or_have, ranks_words, waits_or_wait
from .weighing import NAMING_KINDS, weigh

__all__ = ["judge"]


def judge(
    accounts: Iterable[RankAccount],
    world_size: int,
    *,
    job: str = "",
    rank: int | None = 0,
    wall_ns: int = 0,
    waited_ns: int | None = None,
) -> HangVerdict:
    """Return who holds the job up.

    `accounts` may lack ranks; of two of one rank the later counts.  `job`, `rank` and `wall_ns` go into the verdict:
    which job it is, who judged (None: the daemon), and when.  `waited_ns` is how long the job hangs, if the caller
    knows; else it is the longest wait that an account shows, by that rank's own clock.
    """
    case = open_case(accounts, world_size)
    findings = weigh(case, list(find_ends(case)))
    named = sorted((one for one in findings if one.kind is not HangKind.UNKNOWN), key=_by_certainty)
    culprits = _culprits(named)
    kind = _kind(case, named[0].kind if named else HangKind.UNKNOWN, culprits)
    waiting = case.waiting - culprits
    wait = next((one.wait for one in named or findings if one.wait is not None), None)
    duration_ns = _longest_wait_ns(case) if waited_ns is None else waited_ns
    return HangVerdict(
        job=job,
        rank=rank,
        wall_ns=wall_ns,
        kind=kind,
        culprits=tuple(sorted(culprits)),
        waiting=tuple(sorted(waiting)),
        waited_ns=max(0, min(duration_ns, INT64_MAX)),
        group=None if wait is None else wait.group.label,
        collective=None if wait is None else call_words(wait.call, wait.number)[:LABEL_CHARACTERS_MAX],
        stack=_stack_text(case.accounts.get(min(culprits))) if culprits else None,
        summary=_summary(named or findings, waiting, duration_ns)[:TEXT_CHARACTERS_MAX],
        evidence=tuple(one[:TEXT_CHARACTERS_MAX] for one in _evidence(case, findings, culprits))[:TEXTS_MAX],
        step=max((one.step for one in case.accounts.values() if one.step is not None), default=None),
    )


def _by_certainty(finding: HangFinding) -> tuple[int, int]:
    kind = finding.kind
    return NAMING_KINDS.index(kind) if kind in NAMING_KINDS else len(NAMING_KINDS), min(finding.ranks, default=0)


def _kind(case: HangCase, kind: HangKind, culprits: frozenset[int]) -> HangKind:
    """Return the kind, of ranks that are gone with how they all ended."""
    if kind is HangKind.GONE:
        ended = [one for rank in culprits & case.facts.gone if (one := case.accounts[rank].process) is not None]
        if ended and all(one.killed_for_memory for one in ended):
            return HangKind.KILLED_FOR_MEMORY
        if ended and all(one.ended_by is not None for one in ended):
            return HangKind.KILLED
    return kind


def _culprits(named: list[HangFinding]) -> frozenset[int]:
    """Return the ranks to name; of a transfer that does not end none, since it is not known where it is stuck."""
    return frozenset[int]().union(*(one.ranks for one in named if one.kind in NAMING_KINDS))


def _summary(findings: list[HangFinding], waiting: Collection[int], waited_ns: int) -> str:
    """Return the sentence for people: what is found, and how many wait since when."""
    sentences = list(dict.fromkeys(one.sentence for one in findings))
    if findings[0].kind is HangKind.UNKNOWN:
        shown = sentences[0] if len(sentences) == 1 else f"{sentences[0]}; {plural(len(sentences) - 1, 'more reason')}"
        return f"it cannot be told who holds the job up: {shown}"
    text = "; ".join(sentences)
    if findings[0].kind in (HangKind.NOBODY, HangKind.LINK) or not waiting:
        return text
    whom = "it" if len(findings) == 1 and len(findings[0].ranks) == 1 else "them"
    since = f" for {waited_ns / 1e9:.0f} s" if waited_ns else ""
    return f"{text}; {plural(len(waiting), 'rank')} {has_or_have(waiting)} waited for {whom}{since}"


def _evidence(case: HangCase, findings: list[HangFinding], culprits: frozenset[int]) -> Iterator[str]:
    """Yield what the verdict rests on, then what is missing."""
    if len(findings) > 1 or not culprits:
        yield from dict.fromkeys(one.sentence for one in findings)
    for wait in {(one.wait.group.name, one.wait.number): one.wait for one in findings if one.wait}.values():
        place = wait.group.name, wait.number
        same = {one.rank for one in case.graph.waits if (one.group.name, one.number) == place}
        call = f"{call_words(wait.call, wait.number)} of {group_words(wait.group)}"
        yield f"{ranks_words(same)} {waits_or_wait(same)} in {call}"
    accounts = [account for account in case.accounts.values() if account.answered]
    yield f"{len(accounts)} of {case.world_size} ranks gave an account; {len(case.waiting)} wait in a call"
    behind = frozenset(rank for wait in case.graph.waits for rank in wait.absent) & case.waiting - culprits
    if behind:
        yield f"also behind, but waiting for others themselves: {ranks_words(behind)}"
    if missing := frozenset(range(case.world_size)) - case.accounts.keys():
        yield f"missing: {ranks_words(missing)} gave no account"
    for rank in sorted(case.contradicted):
        yield f"set aside: {why_unknown(case, rank, None)}"
    if case.told and not case.records_peer_calls:
        yield "missing: sends and receives, which torch does not record here"
    for account in case.accounts.values():
        yield from (f"rank {account.rank}: {problem}" for problem in account.problems)


def _longest_wait_ns(case: HangCase) -> int:
    """Return the longest wait by the clock of the waiting rank, or else the longest silence; 0 if neither is known."""
    waited = [
        account.wall_ns - wait.call.created_ns
        for wait in case.graph.waits
        if (account := case.accounts[wait.rank]).wall_ns is not None
        and wait.call is not None
        and wait.call.created_ns is not None
    ]
    silent = [account.silent_ns for account in case.accounts.values() if account.silent_ns is not None]
    return max(waited or silent, default=0)


def _stack_text(account: RankAccount | None) -> str | None:
    frames = () if account is None else training_frames(account)
    return "\n".join(frames)[:TEXT_CHARACTERS_MAX] or None
