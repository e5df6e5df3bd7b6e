"""Weighs findings against each other: one that another may explain is not named.

A wrong name costs more than none, since people go and restart that rank.  So where several explanations are left, the
findings become `unknown`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pacecar.records.hangs import HangKind

from .case import QUIET_PHASES, HangCase, HangFinding, common_place
from .findings import cut_off_finding
from .sentences import call_words, group_words, ranks_words, where_words
from .wait_graph import Wait

__all__ = ["NAMING_KINDS", "weigh"]

NAMING_KINDS = (
    HangKind.STOPPED,
    HangKind.GONE,
    HangKind.MISMATCHED,
    HangKind.SKIPPED,
    HangKind.EXTRA,
    HangKind.NOT_FINISHED,
    HangKind.NOT_JOINED,
    HangKind.NO_ANSWER,
)
"""Kinds that name ranks; a verdict with several has the first."""

_BEYOND_DOUBT = frozenset(NAMING_KINDS) - {HangKind.NOT_JOINED, HangKind.NO_ANSWER}
"""A rank that only seems not to join may itself wait for one of these."""


def weigh(case: HangCase, findings: list[HangFinding]) -> list[HangFinding]:
    """Return the findings, of kind `unknown` where another one may explain them."""
    if (alone := _extra_alone(case)) is not None:
        return [alone]
    for rule in (
        _weigh_debugged,
        _weigh_gone,
        _weigh_further_on,
        _weigh_not_joined,
        _weigh_no_answer,
        _weigh_pairs,
        _weigh_transfers,
    ):
        findings = rule(case, findings)
    return findings


def _extra_alone(case: HangCase) -> HangFinding | None:
    """Return the one rank that waits, if all others have gone on without its collective."""
    if len(case.waiting) != 1 or len(case.graph.waits) != 1:
        return None
    (wait,) = case.graph.waits
    own, others = case.accounts[wait.rank], [case.accounts[one] for one in wait.absent]
    if len(others) < 2 or wait.joined or wait.unknown:
        return None
    if own.step is None or any(one.step is None or one.step <= own.step for one in others):
        return None
    call = f"{call_words(wait.call, wait.number)} of {group_words(wait.group)}"
    sentence = f"rank {wait.rank} called {call}, and all others have gone on without it{where_words(own)}"
    return HangFinding(HangKind.EXTRA, frozenset((wait.rank,)), sentence, wait)


def _weigh_debugged(case: HangCase, findings: list[HangFinding]) -> list[HangFinding]:
    """Name a rank that a debugger holds only if it is alone: people attach one to see why a job hangs."""
    processes = {rank: case.accounts[rank].process for rank in _ranks(findings, HangKind.STOPPED)}
    held = {rank for rank, process in processes.items() if process is not None and process.state == "t"}
    if all(one.ranks <= held or one.kind not in NAMING_KINDS for one in findings):
        return findings
    reason = "but the debugger may have come after the hang"
    return _doubted(findings, HangKind.STOPPED, reason, lambda one: one.ranks <= held)


def _weigh_gone(case: HangCase, findings: list[HangFinding]) -> list[HangFinding]:
    """Name gone ranks only if they cannot have died of the hang: one alone, or a whole host."""
    gone = _ranks(findings, HangKind.GONE)
    if not gone:
        return findings
    hosts = {case.accounts[rank].host for rank in gone}
    on_host = {one.rank for one in case.accounts.values() if one.host in hosts and one.host is not None}
    if len(gone) > 1 and (len(hosts) != 1 or on_host != gone):
        return _doubted(findings, HangKind.GONE, "others have ended too, and which was first is not known")
    if _ranks(findings, HangKind.NOT_JOINED):
        findings = _doubted(findings, HangKind.NOT_JOINED, "which may do so because a rank has ended")
        return _doubted(findings, HangKind.GONE, "which may have ended because another rank did not join")
    return findings


def _weigh_further_on(case: HangCase, findings: list[HangFinding]) -> list[HangFinding]:
    """Do not name a rank that is in a later step than those who wait for it: their call may be one too many."""

    def is_further_on(finding: HangFinding) -> bool:
        (rank,) = finding.ranks
        own = case.accounts[rank].step
        steps = [case.accounts[wait.rank].step for wait in case.graph.waits_for(rank)]
        return own is not None and all(step is not None and step < own for step in steps)

    reason = "but it is in a later step than those who wait for it"
    return _doubted(findings, HangKind.NOT_JOINED, reason, is_further_on)


def _weigh_not_joined(case: HangCase, findings: list[HangFinding]) -> list[HangFinding]:
    """Name ranks that did not join if they are a minority, and their waiting would be recorded."""
    ranks = _ranks(findings, HangKind.NOT_JOINED)
    has_cause = any(one.kind in _BEYOND_DOUBT for one in findings)
    if 2 * len(ranks) > len(case.told):
        if case.records_peer_calls and not has_cause and (place := common_place(case, ranks)) is not None:
            sentence = f"{ranks_words(ranks)} have not joined what the others wait in; all are in {place}"
            return [HangFinding(HangKind.NOBODY, frozenset(), sentence, _first_wait(findings))]
        return _doubted(findings, HangKind.NOT_JOINED, "most ranks have not, and may all wait for something outside")
    if case.records_peer_calls or (len(ranks) == 1 and not has_cause and _has_no_receives(case, ranks)):
        return findings
    reason = "but may wait in a send or receive, which torch does not record here"
    return _doubted(findings, HangKind.NOT_JOINED, reason, lambda one: not _is_in_quiet_phase(case, one.ranks))


def _has_no_receives(case: HangCase, ranks: frozenset[int]) -> bool:
    """Return whether unrecorded receives explain nothing: all others wait for `ranks`, and in groups of the whole job.

    Sends and receives are for pipelines, which have groups of some ranks only.
    """
    is_whole = all(len(wait.group.ranks) == case.world_size for wait in case.graph.waits)
    return is_whole and case.waiting | ranks == frozenset(range(case.world_size)) and not _unexplained(case)


def _is_in_quiet_phase(case: HangCase, ranks: Iterable[int]) -> bool:
    return all(rank in case.accounts and case.accounts[rank].phase in QUIET_PHASES for rank in ranks)


def _unexplained(case: HangCase) -> frozenset[int]:
    """Return the ranks that wait though no rank is known to be absent, here or where those wait that joined."""
    explained = {wait.rank for wait in case.graph.waits if wait.absent}
    while more := {wait.rank for wait in case.graph.waits if not wait.joined.isdisjoint(explained)} - explained:
        explained |= more
    return case.waiting - explained


def _weigh_no_answer(case: HangCase, findings: list[HangFinding]) -> list[HangFinding]:
    """Name silent ranks only where no other rank explains the hang, and most ranks do answer."""
    if any(one.kind in NAMING_KINDS and one.kind is not HangKind.NO_ANSWER for one in findings):
        return _doubted(findings, HangKind.NO_ANSWER, "but another rank explains the hang")
    if case.facts.cut_off:
        return _doubted(findings, HangKind.NO_ANSWER, "but others cannot be reached at all")
    if 2 * len(_ranks(findings, HangKind.NO_ANSWER)) > case.world_size:
        return _doubted(findings, HangKind.NO_ANSWER, "as most ranks: the network, or this rank's own link")
    return findings


def _weigh_pairs(case: HangCase, findings: list[HangFinding]) -> list[HangFinding]:
    """Name both members of a group of two only if they are all there is: one of them is innocent."""
    pairs = {one.ranks for one in findings if one.is_pair}
    if len(pairs) == 1 and all(one.is_pair or one.kind is HangKind.UNKNOWN for one in findings):
        return findings
    return _doubted(findings, HangKind.MISMATCHED, "and other ranks are named", lambda one: one.is_pair)


def _weigh_transfers(case: HangCase, findings: list[HangFinding]) -> list[HangFinding]:
    """Blame a transfer only if nothing else is found or missing, and all ranks of its group are known.

    Hosts that cannot be reached any more explain all transfers that do not end.
    """
    if case.facts.cut_off and not any(one.kind in NAMING_KINDS for one in findings):
        others = [one for one in findings if one.kind is not HangKind.LINK or one.ranks == case.facts.cut_off]
        return others or [cut_off_finding(case, None)]
    if len(findings) == 1 and (findings[0].wait is None or findings[0].wait.group.knows_ranks):
        return findings
    return _doubted(findings, HangKind.LINK, "but there may be another reason")


def _doubted(
    findings: list[HangFinding], kind: HangKind, reason: str, which: Callable[[HangFinding], bool] = lambda _: True
) -> list[HangFinding]:
    """Return the findings, with those of `kind` that fit `which` as unknown, for a reason."""
    return [
        HangFinding(HangKind.UNKNOWN, one.ranks, f"{one.sentence}; {reason}", one.wait)
        if one.kind is kind and which(one)
        else one
        for one in findings
    ]


def _ranks(findings: Iterable[HangFinding], kind: HangKind) -> frozenset[int]:
    return frozenset(rank for one in findings if one.kind is kind for rank in one.ranks)


def _first_wait(findings: Iterable[HangFinding]) -> Wait | None:
    return next((one.wait for one in findings if one.wait is not None), None)
