"""Asks all ranks what they do when the job seems to hang, and reports the rank that holds it up.

    monitor thread     check(): is there a suspicion?  who judges?  a round of questions; at most ROUND_SECONDS_MAX
    accounts' thread   answers the questions of other ranks

The lowest rank that answers judges, so that one rank asks all: a rank with a suspicion summons the ranks below it, in
batches, and asks itself only if none answers.  It repeats the summons while its suspicion lasts, since the judge may
fall silent as well.  A suspicion costs no more than an inquiry, and `inquiry` decides whether there is a verdict.

Before that, as soon as a silence is longer than the job's steps explain, rank 0 compares the operations that all ranks
have begun on their process groups, and the others whether rank 0 answers.  If not all is equal, that is a suspicion.

A verdict is reported once, and once more with `ended` when the job goes on.  If no rank waits for another, one line of
the log says so, and nothing is reported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from pacecar.analysis.hang.judgement import judge
from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.process_state import ProcessIdentity, memory_kills, own_identity, read_process
from pacecar.records import HangVerdict, JobHello, JobRecord
from pacecar.records.hangs import HangEvidence, ProcessState, RankAccount

from .account_road import (
    ABSENT_MAX,
    ANSWER_SECONDS,
    AccountListener,
    Door,
    Heard,
    Later,
    ProcessStates,
    Question,
    Road,
    RoadAnswer,
    Silence,
    ask,
    exchange_doors,
)  # fmt: skip
from .hang_evidence import keep_evidence
from .inquiry import Inquiry, Round, are_counters_unequal, is_idle
from .nccl_witness import LogWitness, NcclWitness, RasWitness, has_nccl_log, may_have_ras
from .rank_account import RankSpeaker, TrainingProgress

__all__ = ["HangWatch"]

ROUND_SECONDS = 3.0
"""Between two rounds: a rank that moves at all in a slow job moves in this time, or is said to work."""

COMPARE_NS = 1_000_000_000
COMPARE_COST_FACTOR = 100
"""Between two comparisons of counters during one silence, and at least so many times what one cost: the silence may be
an evaluation of a thousand ranks."""

ROUND_NS_MIN = 1_000_000_000
"""The least between two rounds."""

APART_NS = 400_000_000
"""Ranks end their last steps at most so far apart, or it takes a round more."""

ROUND_RATIO = 0.125
"""Rounds become rarer as a silence lasts: one in so much of it."""

SUMMON_SECONDS = 1.0
"""How long a rank below may take to answer a summons."""

SUMMONED_AT_ONCE = 8

SUMMONS_SECONDS = 20.0
"""How long a summons lasts; the ranks with the suspicion repeat it."""

EVIDENCE_MAX = 32
EVIDENCE_CHARACTERS_MAX = 400
"""Sentences of evidence in a record, and their length: a frame to the daemon has 64 KiB."""

KILLS_SECONDS = 30.0
"""How often to read what was killed for memory.  The reading before the last one is what later ones are compared with,
since a kill in the last seconds may be the reason of a suspicion that is still to come."""

DOORS_SECONDS = 10.0
"""How long ranks wait for each other's doors; they have just met."""

_log = logging.getLogger("pacecar")


class HangWatch:
    """One rank's part, called on the monitor thread.  With `run_dir` the evidence of a verdict is written there.

    Until `close` it answers the others, though without its progress and as no judge if not `is_measuring`.
    """

    def __init__(
        self,
        hello: JobHello,
        emit: Callable[[JobRecord], None],
        clock: Clock,
        *,
        hang_ns: int,
        training: tuple[int, int],
        progress: Callable[[], TrainingProgress],
        is_measuring: Callable[[], bool],
        is_closing: Callable[[], bool],
        run_dir: str | None = None,
        answer_others: Callable[[Question], RoadAnswer | Later],
    ) -> None:
        self._answer_others = answer_others
        self._hello = hello
        self._emit = emit
        self._clock = clock
        self._hang_ns = hang_ns
        self._identity = own_identity(training[1])
        self._is_measuring = is_measuring
        self._speaker = RankSpeaker(hello, self._identity, training[0], lambda: progress() if is_measuring() else None)
        self._progress = progress
        self._is_closing = is_closing
        self._run_dir = run_dir
        self._listener = AccountListener(self._answer)
        self._speaker.problems = self._listener.problems
        self._road: Road | None = None
        self._inquiry = Inquiry(hang_ns)
        self._reached: dict[int, int] = {}
        self._next_ns = 0
        self._compare_ns = 0
        self._is_unequal = False
        self._summoned_ns: int | None = None
        self._verdict: HangVerdict | None = None
        self._told_step: int | None = None
        self._accounts: Sequence[RankAccount] = ()
        """Those behind the verdict, for words that come later."""
        self._writing: threading.Thread | None = None
        self._is_idle = False
        self._witnesses: list[NcclWitness] = []
        self._kills: deque[dict[int, int | None]] = deque(maxlen=2)
        self._kills_at_ns: int | None = None
        self._ended: dict[int, ProcessState] = {}
        self._charged_ns = 0

    @property
    def road(self) -> Road | None:
        """Where the ranks listen, None as long as they have not said so."""
        return self._road

    @property
    def has_verdict(self) -> bool:
        """Whether a hang was reported that lasts."""
        return self._verdict is not None

    @property
    def is_idle(self) -> bool:
        """Whether no rank waits for another though no step ends, by the latest look of the rank that judges."""
        return self._is_idle

    def heard(self, ranks: Iterable[int]) -> None:
        """Note that these ranks showed now that they run."""
        now_ns = self._clock.monotonic_ns()
        self._reached |= dict.fromkeys(ranks, now_ns)

    def heard_ns(self, rank: int) -> int | None:
        """Return when `rank` was last heard from, on the monotonic clock; None: never."""
        return self._reached.get(rank)

    def open(self, store: Any, address: str, name: str, rest: Callable[[float], object]) -> None:  # noqa: ANN401
        """Exchange doors with the other ranks, which call this as well; raises RendezvousError and OSError."""
        port = self._listener.open(address)
        own = Door(address, port, self._identity)
        rank, world_size = self._hello.rank, self._hello.world_size
        road = exchange_doors(store, rank, world_size, own, name=name, seconds=DOORS_SECONDS, rest=rest)
        self._listener.start(road.token)
        self._road = road
        if rank == 0:  # a rank that was reached once and does not answer is to blame itself
            self._ask(range(1, world_size), "greeting")

    def close(self) -> None:
        """Answer no more questions."""
        self._listener.close()
        self._road = None

    def take_cost(self) -> int:
        """Return the processor time of the accounts' thread since the last call."""
        spent, self._charged_ns = self._listener.spent_ns - self._charged_ns, self._listener.spent_ns
        return spent

    # --- the accounts' thread ---------------------------------------------------------------------

    def _answer(self, question: Question) -> RoadAnswer | Later:
        match question.what:
            case "account":
                return self._speaker.account()
            case "counters":
                return self._speaker.counters()
            case "summon":
                self._summoned_ns = self._clock.monotonic_ns()
                return Heard(self._is_idle, judges=self._is_measuring())
            case "processes":
                return ProcessStates(tuple(self._process_of(rank) for rank in question.ranks))
            case "greeting":
                self.heard([0])  # which alone greets
            case _:
                return self._answer_others(question)
        return Heard()

    # --- the monitor thread -------------------------------------------------------------------------

    def check(self, now_ns: int, *, is_suspected: bool, is_long: bool = False) -> None:
        """Look into a suspicion of this rank's, or of one that summoned it; report the end of a hang.

        `is_long`: no step has ended for longer than the job's own steps explain.
        """
        if self._verdict is not None and self._progress().step != self._told_step:
            self._report(structs.replace(self._verdict, ended=True, wall_ns=self._clock.wall_ns()))
            self._verdict, self._accounts = None, ()
        if self._verdict is not None and (words := self._testimony()):
            self._verdict = _with_evidence(self._verdict, words)
            self._emit(self._verdict)
            if self._run_dir is not None:
                keep_evidence(Path(self._run_dir), self._verdict, self._accounts, after=self._writing)
        summoned_ns = self._summoned_ns
        is_summoned = summoned_ns is not None and now_ns - summoned_ns < SUMMONS_SECONDS * NS_PER_SECOND
        is_suspected = is_suspected or self._are_ranks_unequal(now_ns, is_long=is_long)
        if self._road is None or not (is_suspected or is_summoned):
            self._next_ns, self._inquiry, self._is_idle = 0, Inquiry(self._hang_ns), False
            self._witnesses = [one for one in self._witnesses if not one.is_done]
            self._note_kills(now_ns)
            return
        if now_ns < self._next_ns or self._verdict is not None:
            return
        progress = self._progress()
        if not self._does_another_judge():
            self._hold_round(self._road)
        pause_ns = max(round(ROUND_SECONDS * NS_PER_SECOND), round(ROUND_RATIO * progress.silent_ns))
        left_ns = progress.patience_ns - progress.silent_ns + APART_NS
        if left_ns > 0:  # do not miss the moment from which a slow rank may be blamed
            pause_ns = min(pause_ns, max(left_ns, ROUND_NS_MIN))
        self._next_ns = now_ns + pause_ns

    def _are_ranks_unequal(self, now_ns: int, *, is_long: bool) -> bool:
        """Return whether counters differ or a rank does not answer; once they do, as long as this silence lasts."""
        if not is_long:
            self._is_unequal = False
        elif not self._is_unequal and now_ns >= self._compare_ns and self._road is not None:
            own, begun_ns = self._hello.rank, time.thread_time_ns()
            if own > SUMMONED_AT_ONCE:  # a few see whether rank 0 answers
                return False
            others = range(1, len(self._road.doors)) if own == 0 else range(1)
            answers = self._ask(others, "counters")
            silent = [one for one in answers.values() if isinstance(one, Silence) and one.was_asked]
            told = [one for one in answers.values() if isinstance(one, RankAccount)]
            self._is_unequal = bool(silent) or (own == 0 and are_counters_unequal([*told, self._speaker.counters()]))
            spent_ns = time.thread_time_ns() - begun_ns
            self._compare_ns = now_ns + max(COMPARE_NS, COMPARE_COST_FACTOR * spent_ns)
        return self._is_unequal

    def _does_another_judge(self) -> bool:
        """Summon the ranks below this one; return whether any heard it."""
        for first in range(0, self._hello.rank, SUMMONED_AT_ONCE):
            below = range(first, min(first + SUMMONED_AT_ONCE, self._hello.rank))
            answers = self._ask(below[:1] if first == 0 else below, "summon")
            if first == 0 and not any(_judges(answer) for answer in answers.values()):
                answers = self._ask(below[1:], "summon")
            heard = [answer for answer in answers.values() if _judges(answer)]
            if heard:
                self._is_idle = any(answer.is_idle for answer in heard)
                return True
        return False

    def _hold_round(self, road: Road) -> None:
        begun_ns = self._clock.monotonic_ns()
        if not self._witnesses and may_have_ras(self._hello.backend):
            ranks = {(door.address, door.process.pid): rank for rank, door in enumerate(road.doors)}
            self._witnesses.append(RasWitness(ranks))
        accounts, not_nameable = self._gather_accounts(road)
        verdict = self._judge(accounts)
        _log.debug("a round of accounts: %s %s: %s", verdict.kind, verdict.culprits, verdict.summary)
        found = self._inquiry.add(Round(accounts, begun_ns, verdict, not_nameable))
        if (idle := is_idle(verdict)) and not self._is_idle and found is None:
            _log.info("pacecar: no step has ended for %.0f s: %s", verdict.waited_ns / NS_PER_SECOND, verdict.summary)
        self._is_idle = idle
        if found is not None:
            found = _with_evidence(found, self._testimony())
            if has_nccl_log(self._hello.backend):
                self._witnesses.append(LogWitness([door.process.pid for door in road.doors]))
            self._verdict, self._told_step = found, accounts[self._hello.rank].step
            self._report(found)
            if self._run_dir is not None:
                self._accounts = accounts
                self._writing = keep_evidence(Path(self._run_dir), found, accounts)

    def look(self) -> HangEvidence | None:
        """Return what all ranks are doing now, and what this look alone would say of it; None: they cannot be asked.

        May be called on any thread.
        """
        road = self._road
        if road is None:
            return None
        accounts, _ = self._gather_accounts(road)
        return HangEvidence(verdict=self._judge(accounts), accounts=tuple(accounts))

    def _judge(self, accounts: Sequence[RankAccount]) -> HangVerdict:
        hello = self._hello
        return judge(accounts, len(accounts), job=hello.job, rank=hello.rank, wall_ns=self._clock.wall_ns())

    def _gather_accounts(self, road: Road) -> tuple[list[RankAccount], set[int]]:
        """Return the accounts of all ranks, and the ranks that must not be named."""
        own, rank = self._speaker.account(), self._hello.rank
        answers = self._ask((other for other in range(len(road.doors)) if other != rank), "account")
        answers = {other: _own_word(other, answer) for other, answer in answers.items()}
        silent = {other: answer for other, answer in answers.items() if isinstance(answer, Silence)}
        heard = {other: answer for other, answer in answers.items() if other not in silent} | {rank: own}
        states = self.processes([*silent], [*heard])
        cut_off = self._cut_off(road, silent, heard)
        accounts: list[RankAccount] = []
        not_nameable: set[int] = set()
        for other in range(len(road.doors)):
            if other in heard:
                accounts.append(heard[other])
                continue
            state, why = states.get(other), silent[other]
            has_left = why.refused and state is not None and state.exists
            is_cut_off = other in cut_off
            accounts.append(self._absent(other, state, why, has_left=has_left, is_cut_off=is_cut_off))
            is_unknown = state is None and other not in self._reached and not is_cut_off
            # All others are in a step, and wait: a rank that has left its loop will not come.
            has_stayed_away = has_left and all(account.is_in_step for account in heard.values())
            if is_unknown or not why.was_asked or (has_left and not has_stayed_away):
                not_nameable.add(other)
        return accounts, not_nameable

    def _ask(self, ranks: Sequence[int] | range | Any, what: Any) -> dict[int, Any]:  # noqa: ANN401
        if self._road is None:
            return {}
        question = Question(what=what)
        seconds = SUMMON_SECONDS if what == "summon" else ANSWER_SECONDS
        answers = ask(self._road, ranks, question, seconds=seconds, is_over=self._is_closing)
        self.heard(rank for rank, answer in answers.items() if not isinstance(answer, Silence))
        return answers

    def processes(
        self, silent: Sequence[int], heard: Sequence[int], *, seconds: float = ANSWER_SECONDS
    ) -> dict[int, ProcessState]:
        """Return the processes of `silent` ranks, by the word of a rank on the same host, each asked for `seconds`."""
        road = self._road
        if road is None:
            return {}
        found: dict[int, ProcessState] = {}
        by_host: dict[str, list[int]] = {}
        for rank in silent:
            by_host.setdefault(road.doors[rank].process.host, []).append(rank)
        for host, ranks in by_host.items():
            there = next((rank for rank in heard if host and road.doors[rank].process.host == host), None)
            if host and host == self._identity.host:
                states: Sequence[ProcessState | None] = [self._process_of(rank) for rank in ranks]
            elif there is not None:
                asked = Question(what="processes", ranks=tuple(ranks[:ABSENT_MAX]))
                answer = ask(road, [there], asked, seconds=seconds, is_over=self._is_closing).get(there)
                states = answer.states if isinstance(answer, ProcessStates) else ()
            else:
                continue
            found |= {rank: state for rank, state in zip(ranks, states, strict=False) if state is not None}
        return found

    def _process_of(self, rank: int) -> ProcessState | None:
        if rank not in self._neighbors():
            return None
        if rank in self._ended:
            return self._ended[rank]
        kills_before = self._kills[0].get(rank) if self._kills else None
        state = read_process(self._neighbors()[rank], kills_before=kills_before)
        if state.ended_by is not None:  # which is no longer told once its parent has asked
            self._ended[rank] = state
        return state

    def _neighbors(self) -> dict[int, ProcessIdentity]:
        """Return the ranks whose processes this host has."""
        own = self._identity.host
        doors = () if self._road is None or not own else self._road.doors
        return {rank: door.process for rank, door in enumerate(doors) if door.process.host == own}

    def _note_kills(self, now_ns: int) -> None:
        if self._kills_at_ns is None or now_ns - self._kills_at_ns >= KILLS_SECONDS * NS_PER_SECOND:
            self._kills_at_ns = now_ns
            files = {process.kills_file: process for process in self._neighbors().values()}
            counts = {file: memory_kills(process) for file, process in files.items()}
            self._kills.append({rank: counts[one.kills_file] for rank, one in self._neighbors().items()})

    def _cut_off(self, road: Road, silent: Mapping[int, Silence], heard: Collection[int]) -> Collection[int]:
        """Return the ranks whose hosts cannot be reached any more; none if not one of them ever was.

        A host that answers for one rank has a link, and this one reaches itself.
        """
        answering = {road.doors[rank].address for rank in heard}
        found = {rank for rank, why in silent.items() if why.unreachable and road.doors[rank].address not in answering}
        return found if found & self._reached.keys() else ()

    def _absent(
        self, rank: int, state: ProcessState | None, why: Silence, *, has_left: bool, is_cut_off: bool
    ) -> RankAccount:
        problem = "pacecar is closed on it" if has_left else why.reason
        return RankAccount(
            rank=rank,
            world_size=self._hello.world_size,
            process=state,
            answered=False,
            has_left=has_left,
            is_cut_off=is_cut_off,
            problems=(problem,) if why.was_asked else (problem, "it may be fine: this rank could not ask it"),
        )

    def _testimony(self) -> tuple[str, ...]:
        """Return what NCCL has said since the last call."""
        return tuple(words for one in self._witnesses for words in one.take())

    def _report(self, verdict: HangVerdict) -> None:
        if verdict.ended:
            _log.warning("pacecar: the job goes on after a hang at step %s", verdict.step)
        else:
            _log.warning("pacecar: %s", verdict.summary)
        self._emit(verdict)


def _judges(answer: Heard | Silence) -> bool:
    return isinstance(answer, Heard) and answer.judges


def _own_word(rank: int, answer: RankAccount | Silence) -> RankAccount | Silence:
    """Return the answer of `rank`; an account of another rank is none, and would stand for that one's."""
    if isinstance(answer, RankAccount) and answer.rank != rank:
        return Silence(f"it answers for rank {answer.rank}")
    return answer


def _with_evidence(verdict: HangVerdict, words: Sequence[str]) -> HangVerdict:
    """Return the verdict with `words` as its last sentences of evidence."""
    words = words[:EVIDENCE_MAX]
    evidence = (*verdict.evidence[: EVIDENCE_MAX - len(words)], *words)
    return structs.replace(verdict, evidence=tuple(each[:EVIDENCE_CHARACTERS_MAX] for each in evidence))
