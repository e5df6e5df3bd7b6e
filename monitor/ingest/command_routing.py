"""Passes people's requests on to the ranks of a running job as commands, and the ranks' answers back.

Hooks keep a connection open for their reports, and a command uses the same one.  So a job needs no port, and only users
who can reach the daemon's socket can reach the job.  Nothing waits: the daemon answers "refused" for a rank that does
not read or goes away, and forgets an unanswered request when the asker disconnects.

The ranks must begin at the same step, but read commands up to a quarter of a second apart.  So the daemon names a step
ahead of all of them; or the asker does, to use the same step on several nodes.

    asker  -- Request -->  daemon  -- Command -->  rank 0, rank 1, ...  (those on this node)
    asker  <-- Answer --   daemon  <-- Answer --   each of them

A request to all ranks of a job, on all nodes, goes to one rank here, which passes it on (`pacecar.profiler.orders`).
It may be stopped, so the asker may ask again for another one: the `attempt`.

`authorization` decides who may ask.  Pure except for `send`, which is passed in.  Left out: what the actions mean; the
hook knows that.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from pacecar.records import Answer, Command, Request
from pacecar.records.job_identity import JobKey
from pacecar.records.job_orders import ALL_RANKS, JobAnswer
from pacecar.records.ranges import INT64_MAX
from pacecar.wire import Message

from ..fair_share import yielding_item
from .authorization import RANKS_NAMED_MAX, Denied, Target, listed, reachable

__all__ = ["REQUESTS_MAX", "CommandRouting", "RankSteps", "Target"]

REQUESTS_MAX = 64
"""Requests without a final answer.  The oldest of the user with most makes room (`fair_share`)."""


class RankSteps(NamedTuple):
    """The steps of a job's ranks: the furthest is at step `at`, and none has reached step `ahead`.

    `pace_ns` is the mean step of the slowest rank.  None and 0 until a rank has reported a step.
    """

    at: int | None = None
    ahead: int = 0
    pace_ns: int | None = None


class _Pending(NamedTuple):
    uid: int
    asker: int
    serial: int
    job: str
    waiting: dict[int, int]
    """Connection -> rank, for ranks that have not sent a final answer."""

    def refusals(self, ranks: Iterable[int], why: str) -> Iterator[Answer]:
        """Yield the answers that refuse the request for `ranks`."""
        for rank in ranks:
            yield Answer(job=self.job, rank=rank, number=self.serial, state="refused", detail=why)


class CommandRouting:
    """The requests that are not answered yet.  Not thread-safe: only the socket server's thread calls it.

    `send(connection, message)` returns whether the message was sent.
    """

    def __init__(self, send: Callable[[int, Message], bool]) -> None:
        self._send = send
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self.displaced = 0

    def route(
        self,
        request: Request,
        *,
        asker: int,
        uid: int,
        targets: Iterable[Target],
        steps_of: Callable[[JobKey], RankSteps],
    ) -> None:
        """Pass `request` on to the `targets` that it means, and tell the asker at once which ranks it reached.

        Several ranks begin at one step; a single rank named in the request begins at its next step.
        """
        try:
            reached_targets = reachable(request, uid, targets)
        except Denied as denied:
            return self._refuse(request, asker, str(denied))
        counts = Counter(target.hello.rank for target in reached_targets)
        twice = [rank for rank, count in counts.items() if count > 1]
        if twice:
            return self._refuse(request, asker, _several(request.job, twice[0], reached_targets))
        if request.action == ALL_RANKS:
            reached_targets = [_next_target(reached_targets, request.arguments.get("attempt", 0))]
            request = msgspec.structs.replace(request, ranks=(reached_targets[0].hello.rank,))
        hello = reached_targets[0].hello
        rank_steps = steps_of(JobKey.of(hello))
        at_step = request.arguments.get("at_step", 0 if len(request.ranks) == 1 else rank_steps.ahead)
        if not isinstance(at_step, int) or at_step < (rank_steps.ahead if "at_step" in request.arguments else 0):
            return self._refuse(request, asker, _too_near(request, at_step, rank_steps))
        number = next(self._numbers)
        command = Command(number=number, action=request.action, at_step=at_step, arguments=request.arguments, uid=uid)
        reached = {
            target.connection: target.hello.rank for target in reached_targets if self._send(target.connection, command)
        }
        if not reached:
            return self._refuse(request, asker, f"no rank of job {request.job!r} reads what the daemon sends")
        self._make_room(uid)
        self._pending[number] = _Pending(uid, asker, request.serial, hello.job, reached)
        self._send(asker, _accepted(request, command, sorted(reached.values()), hello.world_size, rank_steps))
        return None

    def _make_room(self, uid: int) -> None:
        """If there are REQUESTS_MAX, drop the oldest of the user with most, and tell its asker."""
        if len(self._pending) < REQUESTS_MAX:
            return
        oldest = yielding_item(uid, self._pending, lambda number: self._pending[number].uid)
        pending = self._pending.pop(oldest)
        self.displaced += 1
        why = f"{REQUESTS_MAX} requests are pending: this one made room for a newer one, and may still be carried out"
        for answer in pending.refusals(sorted(pending.waiting.values()), why):
            self._send(pending.asker, answer)

    def forward(self, answer: Answer | JobAnswer, *, connection: int) -> None:
        """Pass the answer of the rank at `connection` on to the asker, if it is still connected."""
        pending = self._pending.get(answer.number)
        if pending is None or pending.job != answer.job:
            return
        if isinstance(answer, Answer) and answer.state != "accepted":
            pending.waiting.pop(connection, None)
        self._send(pending.asker, msgspec.structs.replace(answer, number=pending.serial))

    def forget(self, connection: int) -> None:
        """Handle the end of `connection`: drop the requests of an asker, answer for a rank."""
        for number in [number for number, pending in self._pending.items() if pending.asker == connection]:
            del self._pending[number]
        for pending in self._pending.values():
            if connection in pending.waiting:
                rank = pending.waiting.pop(connection)
                for answer in pending.refusals([rank], "the rank went away before it had answered"):
                    self._send(pending.asker, answer)

    def _refuse(self, request: Request, asker: int, why: str) -> None:
        self._send(asker, Answer(job=request.job, rank=None, number=request.serial, state="refused", detail=why))


def _accepted(
    request: Request, command: Command, ranks: Sequence[int], world_size: int, rank_steps: RankSteps
) -> Answer:
    detail = f"{request.action} from step {command.at_step}"
    if not command.at_step and len(request.ranks) == 1:
        detail = f"{request.action} at its next step"
    elif not command.at_step:
        detail = f"{request.action} as soon as each hears of it, perhaps not at the same step: none has reported one"
    expected_ns = None
    if rank_steps.pace_ns is not None and rank_steps.at is not None:
        expected_ns = min(INT64_MAX, (command.at_step - rank_steps.at if command.at_step else 1) * rank_steps.pace_ns)
        detail += f", in about {expected_ns / 1e9:.1f} s"
    detail += f", on {len(ranks)} of {world_size} ranks"
    reached = set(ranks)
    # A generator, because a job may claim to have a million ranks.
    missing = listed((str(rank) for rank in request.ranks or range(world_size) if rank not in reached), RANKS_NAMED_MAX)
    if missing:
        detail += f": not on {missing} (not connected to this daemon; on another node?)"
    return Answer(
        job=request.job,
        rank=None,
        number=request.serial,
        state="accepted",
        detail=detail,
        ranks=tuple(ranks),
        expected_ns=expected_ns,
        pace_ns=rank_steps.pace_ns,
    )


def _next_target(targets: Sequence[Target], attempt: object) -> Target:
    """Return the target for the n-th attempt: first the one that was heard from last, which is likely to run."""
    by_sign = sorted(targets, key=lambda target: (-target.heard_ns, target.hello.rank))
    return by_sign[attempt % len(by_sign) if isinstance(attempt, int) else 0]


def _several(job: str, rank: int, targets: Sequence[Target]) -> str:
    pids = ", ".join(str(target.hello.pid) for target in targets if target.hello.rank == rank)
    return (
        f"several jobs are called {job!r}: rank {rank} is there as pid {pids};"
        " give each a name of its own ([hook] job, or attach(job=...))"
    )


def _too_near(request: Request, at_step: object, rank_steps: RankSteps) -> str:
    if not isinstance(at_step, int):
        return f"at_step must be a number, not {at_step!r}"
    return (
        f"step {at_step} is too near: job {request.job!r} is at {rank_steps.at}, and its ranks can agree on"
        f" step {rank_steps.ahead} at the earliest"
    )
