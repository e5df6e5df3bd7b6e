"""Finds what is at each end of the waiting: a rank and what it did, a transfer, or why it cannot be told."""

from __future__ import annotations

from collections.abc import Iterator

from pacecar.records.hangs import HangKind

from .case import HangCase, HangFinding, common_place, is_in_communication, would_record_waits
from .group_members import is_synchronizing, plain_operation
from .sentences import call_words, group_words, ranks_words, waits_or_wait, where_words
from .wait_graph import Wait

__all__ = ["cut_off_finding", "find_ends", "why_unknown"]


def find_ends(case: HangCase) -> Iterator[HangFinding]:
    """Yield a finding for each end of the waiting, and for causes that no recorded wait leads to."""
    transfers: dict[tuple[str, int, frozenset[int]], Wait] = {}
    causes: dict[tuple[HangKind, frozenset[int]], HangFinding] = {}
    for end in case.graph.ends:
        if len(end) > 1:
            yield _circle(case, end)
            continue
        (rank,) = end
        wait = next((one for one in case.graph.waits if one.rank == rank), None)
        if (cause := _cause(case, rank)) is not None:
            causes.setdefault((cause.kind, cause.ranks), cause)
        elif wait is not None:
            transfers.setdefault((wait.group.name, wait.number, wait.joined | {rank}), wait)
        else:
            yield _not_joined(case, rank)
    yield from causes.values()
    for (_, _, ranks), wait in transfers.items():
        yield _transfer(case, ranks, wait)
    if not case.graph.waits:
        yield from _without_waits(case)


def _cause(case: HangCase, rank: int) -> HangFinding | None:
    """Return what the rank does, if it is a cause by itself."""
    blamed = {one for mismatch in case.mismatches for one in mismatch.blamed}
    if rank not in case.facts.all | blamed | case.lags.keys():
        return None
    wait = _main_wait(case.graph.waits_for(rank)) or next((w for w in case.graph.waits if w.rank == rank), None)
    where = where_words(case.accounts.get(rank))
    for kind, ranks, words in (
        (HangKind.GONE, case.facts.gone, "is gone"),
        (HangKind.STOPPED, case.facts.stopped, "does not run"),
    ):
        if rank in ranks:
            return HangFinding(kind, frozenset((rank,)), f"rank {rank} {words}{where}", wait)
    if rank in case.facts.cut_off:
        return cut_off_finding(case, wait)
    for mismatch in case.mismatches:
        if rank in mismatch.blamed:
            return HangFinding(mismatch.kind, frozenset(mismatch.blamed), mismatch.sentence, wait, not mismatch.odd)
    if rank in case.lags:
        group, number = case.lags[rank]
        made = group.call_of(rank, number)
        call = call_words(made, number)
        sentence = (
            f"rank {rank} joined {call} of {group_words(group)} and does not finish it, though others have{where}"
        )
        # Gloo has no device that could be stuck: what the rank lacks is data, from whichever side.
        is_link = made is not None and made.operation.startswith("gloo:")
        return HangFinding(HangKind.LINK if is_link else HangKind.NOT_FINISHED, frozenset((rank,)), sentence, wait)
    has_left = rank in case.accounts and case.accounts[rank].has_left
    words = "has left its training loop" if has_left else "does not answer"
    return HangFinding(HangKind.NO_ANSWER, frozenset((rank,)), f"rank {rank} {words}{where}", wait)


def cut_off_finding(case: HangCase, wait: Wait | None) -> HangFinding:
    """Return the finding on ranks whose hosts can no longer be reached."""
    ranks = case.facts.cut_off
    here = frozenset(rank for rank, account in case.accounts.items() if account.answered)
    sentence = (
        f"{ranks_words(ranks)} cannot be reached any more{f' from {ranks_words(here)}' if here else ''}: "
        f"a dead link, or {'a dead host' if len(ranks) == 1 else 'dead hosts'}"
    )
    return HangFinding(HangKind.LINK, ranks, sentence, wait)


def _not_joined(case: HangCase, rank: int) -> HangFinding:
    """Return the finding on a rank that others wait for and that waits in no recorded call."""
    one = frozenset((rank,))
    wait = _main_wait([wait for wait in case.graph.waits_for(rank) if rank in wait.absent])
    account = case.accounts.get(rank)
    if account is None or rank not in case.told or wait is None:
        wait = _main_wait(case.graph.waits_for(rank))
        return HangFinding(HangKind.UNKNOWN, one, why_unknown(case, rank, wait), wait)
    if is_in_communication(account):
        if (rounds := _rounds_before_message(case, rank)) is not None:
            reason = f"{_absence(rank, wait)}, but began a send or receive, as in none of the {rounds} rounds before"
            return HangFinding(HangKind.NOT_JOINED, one, reason + where_words(account), wait)
        reason = f"rank {rank} has joined none of the recorded calls, but waits inside torch.distributed"
        return HangFinding(HangKind.UNKNOWN, one, reason + where_words(account), wait)
    return HangFinding(HangKind.NOT_JOINED, one, _absence(rank, wait) + where_words(account), wait)


def _rounds_before_message(case: HangCase, rank: int) -> int | None:
    """Return how often the order was kept in which the rank now makes a send or receive that is not recorded.

    None if it makes none out of turn, or if any rank that waits for it does not keep the order of its calls.
    """
    departure = case.turns.departures.get(rank)
    waiting = {wait.rank for wait in case.graph.waits_for(rank)}
    if departure is None or departure.operation or not waiting <= case.turns.kept.keys():
        return None
    return min(case.turns.kept[one] for one in waiting)


def _absence(rank: int, wait: Wait) -> str:
    """Return what the rank did last in the group, and what it never did."""
    call, group = call_words(wait.call, wait.number), group_words(wait.group)
    if _is_p2p(wait):
        return f"rank {rank} has not made its side of {call} in {group}"
    latest = wait.group.members[rank].joined or 0
    if not latest:
        return f"rank {rank} never joined {call} of {group}"
    finished = call_words(wait.group.call_of(rank, latest), latest)
    return f"rank {rank} finished {finished} of {group} and never joined {_next_call(wait, latest + 1)}"


def _next_call(wait: Wait, number: int) -> str:
    call = wait.group.call(number)
    if call is not None and wait.call is not None and plain_operation(call) == plain_operation(wait.call):
        return f"#{number}"
    return call_words(call, number)


def why_unknown(case: HangCase, rank: int, wait: Wait | None) -> str:
    """Return why nothing is known of a rank that others wait for."""
    others = f", and waiting leads to it in {group_words(wait.group)}" if wait is not None else ""
    if (found := case.contradicted.get(rank)) is not None:
        call = call_words(found.group.call(found.number), found.number)
        pair = (
            f"rank {found.ahead} has finished {call} of {group_words(found.group)}, rank {found.behind} never joined it"
        )
        return f"the account of rank {rank} contradicts another, so one is of another time: {pair}"
    if rank not in case.accounts:
        return f"there is no account of rank {rank}{others}"
    return f"the account of rank {rank} does not say what it has called{others}"


def _circle(case: HangCase, ranks: frozenset[int]) -> HangFinding:
    """Return the finding on ranks that wait for each other: one of them has left the common order."""
    found = {one.ranks: one for one in (_out_of_turn(case, ranks), _alone(case, ranks)) if one is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    return HangFinding(HangKind.UNKNOWN, ranks, f"{ranks_words(ranks)} wait for each other in a circle")


def _alone(case: HangCase, ranks: frozenset[int]) -> HangFinding | None:
    """Return the finding on the rank that is alone in its call, while all others wait for it in another one."""
    for rank in sorted(ranks):
        alone = _alone_in(case, rank, ranks)
        others = ranks - {rank}
        if alone is None or any(set(case.graph.arrows[other]) != {rank} for other in others):
            continue
        wait = _main_wait([one for one in case.graph.waits_for(rank) if one.absent == {rank}])
        if wait is None:
            continue
        own, theirs = call_words(alone.call, alone.number), call_words(wait.call, wait.number)
        kind = HangKind.SKIPPED if _is_usual(alone) else HangKind.EXTRA
        sentence = (
            f"rank {rank} called {own} of {group_words(alone.group)} that no other rank has joined, "
            f"while {ranks_words(others)} wait for it in {theirs} of {group_words(wait.group)}"
        )
        return HangFinding(kind, frozenset((rank,)), sentence, wait)
    return None


def _out_of_turn(case: HangCase, ranks: frozenset[int]) -> HangFinding | None:
    """Return the finding on the rank that made a call out of turn, if all others kept the order of theirs."""
    out = ranks & case.turns.departures.keys()
    others = ranks - out
    if len(out) != 1 or not others <= case.turns.kept.keys():
        return None
    (rank,) = out
    departure = case.turns.departures[rank]
    group = next((one for one in case.groups if one.name == departure.group and rank in one.members), None)
    wait = _main_wait([one for one in case.graph.waits_for(rank) if one.rank in others])
    if group is None or wait is None or not departure.operation:
        return None
    number = departure.number
    joined = [member.joined or 0 for one, member in group.members.items() if one in others]
    if number is not None and not any(one < number for one in joined):
        return None  # others have made that call as well
    steps = [case.accounts[one].step for one in (rank, wait.rank)]
    is_behind = steps[0] is not None and steps[1] is not None and steps[0] < steps[1]
    kind = HangKind.SKIPPED if departure.left_out and not is_behind else HangKind.EXTRA
    call = departure.operation.rpartition(":")[2] + ("" if number is None else f" #{number}")
    theirs = f"{call_words(wait.call, wait.number)} of {group_words(wait.group)}"
    sentence = (
        f"rank {rank} called {call} of {group_words(group)} out of turn, while {ranks_words(others)} kept the order of "
        f"the {case.turns.kept[wait.rank]} rounds before and {waits_or_wait(others)} for it in {theirs}"
    )
    return HangFinding(kind, frozenset((rank,)), sentence, wait)


def _alone_in(case: HangCase, rank: int, ranks: frozenset[int]) -> Wait | None:
    """Return the call that the rank alone has joined, of a group with at least two others, all in the circle."""
    for wait in case.graph.waits:
        if wait.rank == rank and not wait.joined and not wait.unknown and len(wait.absent) >= 2:
            return wait if wait.absent <= ranks else None
    return None


def _is_usual(wait: Wait) -> bool:
    """Return whether other members have called such an operation before: then something else was left out."""
    if wait.call is None:
        return True
    others = [call for rank, m in wait.group.members.items() if rank != wait.rank for call in m.calls.values()]
    return any((call.operation, call.sizes) == (wait.call.operation, wait.call.sizes) for call in others)


def _transfer(case: HangCase, ranks: frozenset[int], wait: Wait) -> HangFinding:
    """Return the finding on a call that all have joined and that does not end."""
    where = f"{call_words(wait.call, wait.number)} of {group_words(wait.group)}"
    if any(one.group.name == wait.group.name and not one.blamed for one in case.mismatches):
        sentence = f"{ranks_words(ranks)} called different operations as {where}, and no majority tells which is right"
        return HangFinding(HangKind.UNKNOWN, ranks, sentence, wait)
    waiting = {one.rank for one in case.graph.waits if (one.group.name, one.number) == (wait.group.name, wait.number)}
    if 2 * len(waiting) <= len(ranks) and wait.call is not None and is_synchronizing(wait.call):
        sentence = f"{ranks_words(waiting)} joined {where} and did not finish it as the others did, at another time"
        return HangFinding(HangKind.UNKNOWN, ranks, sentence, wait)
    return HangFinding(HangKind.LINK, ranks, f"{ranks_words(ranks)} have all joined {where}, and it does not end", wait)


def _without_waits(case: HangCase) -> Iterator[HangFinding]:
    """Yield what can be said if no rank waits in a recorded call."""
    have_left = _have_left(case)
    for rank in sorted((case.facts.gone | case.facts.stopped) - have_left):
        if (cause := _cause(case, rank)) is not None:
            yield cause
    if case.facts.cut_off:
        yield cut_off_finding(case, None)
    elif (place := common_place(case, case.accounts)) is not None and _is_complete(case):
        yield HangFinding(HangKind.NOBODY, frozenset(), f"no rank waits for another; all are in {place}")
    elif _is_complete(case) and case.facts.all <= have_left and would_record_waits(case):
        places: dict[str, list[int]] = {}
        for one in case.accounts.values():
            places.setdefault(where_words(one), []).append(one.rank)
        words = "; ".join(ranks_words(ranks) + place for place, ranks in places.items())
        yield HangFinding(HangKind.NOBODY, frozenset(), f"no rank waits for another; {words}")
    else:
        reason = "no rank waits in a recorded collective" if case.accounts else "there is no account of any rank"
        yield HangFinding(HangKind.UNKNOWN, frozenset(), reason)


def _have_left(case: HangCase) -> frozenset[int]:
    """Return the ranks that ended by themselves, or closed pacecar, and that no other one waits for: they are done."""
    ended = {rank: case.accounts[rank].process for rank in case.facts.gone if would_record_waits(case)}
    exited = {rank for rank, one in ended.items() if one and one.ended_by is None and not one.killed_for_memory}
    return frozenset(exited | {one.rank for one in case.accounts.values() if one.has_left})


def _is_complete(case: HangCase) -> bool:
    return len(case.accounts) == case.world_size and not case.contradicted


def _main_wait(waits: list[Wait]) -> Wait | None:
    """Return the wait to show: in a collective if there is one, in the group in which most wait, and the oldest."""
    sizes: dict[str, int] = {}
    for wait in waits:
        sizes[wait.group.name] = sizes.get(wait.group.name, 0) + 1
    return min(
        waits,
        key=lambda wait: (_is_p2p(wait), -sizes[wait.group.name], _created_ns(wait), wait.group.name, wait.number),
        default=None,
    )


def _created_ns(wait: Wait) -> int:
    """Return when the call was made; of several ranks their clocks decide what is shown, and nothing else."""
    return wait.call.created_ns or 0 if wait.call is not None else 0


def _is_p2p(wait: Wait) -> bool:
    return wait.call is not None and wait.call.is_p2p
