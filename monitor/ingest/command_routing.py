"""Passes people's requests on to the ranks of a running job as commands, and the ranks' answers back.

The hooks keep a connection open to report what they measure; a command goes down the same one.  So a job needs no port
of its own, and nobody can reach it who cannot reach the daemon's socket.  Nothing waits: for a rank that does not read
or goes away the daemon answers "refused", and what is not answered is forgotten when the asker disconnects.

The ranks shall begin at the same step, but learn of it up to a quarter of a second apart.  So the daemon names a step
that lies ahead of all of them; or the asker does, who asks the daemons of several nodes for the same one.

    asker  -- Request -->  daemon  -- Command -->  rank 0, rank 1, ...  (those on this node)
    asker  <-- Answer --   daemon  <-- Answer --   each of them

`authorization` decides who may ask.  Pure but for `send`, which is passed in.

Left out: what the actions mean; the hook knows that.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from pacecar.records import Answer, Command, Request
from pacecar.records.job_identity import JobKey
from pacecar.records.ranges import INT64_MAX
from pacecar.wire import Message

from ..fair_share import yielding_holder
from .authorization import RANKS_NAMED_MAX, Denied, Target, reachable

__all__ = ["REQUESTS_MAX", "CommandRouting", "RankSteps", "Target"]

REQUESTS_MAX = 64
"""Requests without a final answer at one time.  The oldest of the user with most makes room (`fair_share`)."""


class RankSteps(NamedTuple):
    """The steps of a job's ranks: the furthest is at step `at`, and none has reached step `ahead` yet.

    `pace_ns` is the mean step of the slowest.  None and 0 while no rank has reported a step.
    """

    at: int | None = None
    ahead: int = 0
    pace_ns: int | None = None


class _Out(NamedTuple):
    uid: int
    asker: int
    serial: int
    job: str
    waiting: dict[int, int]
    """Connection -> rank, of those that have not sent a final answer."""


class CommandRouting:
    """The requests that are not answered yet.  Not safe for threads: the socket server calls it from its own.

    `send(connection, message)` returns whether the message went out.
    """

    def __init__(self, send: Callable[[int, Message], bool]) -> None:
        self._send = send
        self._out: dict[int, _Out] = {}
        self._numbers = itertools.count(1)
        self.displaced = 0

    def ask(
        self, request: Request, *, asker: int, uid: int, targets: Iterable[Target], meet: Callable[[JobKey], RankSteps]
    ) -> None:
        """Pass `request` on to those of `targets` that it means, and tell the asker at once whom it reached.

        Several ranks begin together; one that was asked for by name has nobody to wait for.
        """
        try:
            mine = reachable(request, uid, targets)
        except Denied as denied:
            return self._refuse(request, asker, str(denied))
        twice = [rank for rank, count in Counter(target.hello.rank for target in mine).items() if count > 1]
        if twice:
            return self._refuse(request, asker, _several(request.job, twice[0], mine))
        key = JobKey.of(mine[0].hello)
        rank_steps = meet(key)
        at_step = request.arguments.get("at_step", 0 if len(request.ranks) == 1 else rank_steps.ahead)
        if not isinstance(at_step, int) or at_step < (rank_steps.ahead if "at_step" in request.arguments else 0):
            return self._refuse(request, asker, _passed(request, at_step, rank_steps))
        number = next(self._numbers)
        command = Command(number=number, action=request.action, at_step=at_step, arguments=request.arguments, uid=uid)
        reached = {target.connection: target.hello.rank for target in mine if self._send(target.connection, command)}
        if not reached:
            return self._refuse(request, asker, f"no rank of job {request.job!r} reads what the daemon sends")
        self._make_room(uid)
        self._out[number] = _Out(uid, asker, request.serial, key.job, reached)
        self._send(asker, _accepted(request, command, sorted(reached.values()), mine[0].hello.world_size, rank_steps))
        return None

    def _make_room(self, uid: int) -> None:
        """Drop the oldest request of the user with most, when there are REQUESTS_MAX, and tell its asker."""
        if len(self._out) < REQUESTS_MAX:
            return
        held = Counter(out.uid for out in self._out.values())
        giver = yielding_holder(uid, held)
        giver = giver if giver is not None or uid not in held else uid
        oldest = next(number for number, out in self._out.items() if giver in (None, out.uid))
        out = self._out.pop(oldest)
        self.displaced += 1
        why = f"{REQUESTS_MAX} requests are out: this one made room for a newer one; what it asked for may happen yet"
        for rank in sorted(out.waiting.values()):
            self._send(out.asker, Answer(job=out.job, rank=rank, number=out.serial, state="refused", detail=why))

    def answered(self, answer: Answer, *, connection: int) -> None:
        """Pass the answer of the rank at `connection` on to the asker, if he is still there."""
        out = self._out.get(answer.number)
        if out is None or out.job != answer.job:
            return
        if answer.state != "accepted":
            out.waiting.pop(connection, None)
        self._send(out.asker, msgspec.structs.replace(answer, number=out.serial))

    def left(self, connection: int) -> None:
        """Forget what the asker at `connection` wanted, or answer for the rank that was there."""
        for number in [number for number, out in self._out.items() if out.asker == connection]:
            del self._out[number]
        for out in self._out.values():
            rank = out.waiting.pop(connection, None)
            if rank is not None:
                why = "the rank went away before it had answered"
                self._send(out.asker, Answer(job=out.job, rank=rank, number=out.serial, state="refused", detail=why))

    def _refuse(self, request: Request, asker: int, why: str) -> None:
        self._send(asker, Answer(job=request.job, rank=None, number=request.serial, state="refused", detail=why))


def _accepted(
    request: Request, command: Command, ranks: Sequence[int], world_size: int, rank_steps: RankSteps
) -> Answer:
    detail = f"{request.action} from step {command.at_step}"
    if not command.at_step and len(request.ranks) == 1:
        detail = f"{request.action} at its next step"
    elif not command.at_step:
        detail = f"{request.action} as soon as each hears of it, perhaps not at the same step: none was reported yet"
    expected_ns = None
    if rank_steps.pace_ns is not None and rank_steps.at is not None:
        expected_ns = min(INT64_MAX, (command.at_step - rank_steps.at if command.at_step else 1) * rank_steps.pace_ns)
        detail += f", in about {expected_ns / 1e9:.1f} s"
    detail += f", on {len(ranks)} of {world_size} ranks"
    reached = set(ranks)
    # A job may claim to have a million ranks: no more of them are looked for than are named.
    others = (str(rank) for rank in request.ranks or range(world_size) if rank not in reached)
    missing = list(itertools.islice(others, RANKS_NAMED_MAX + 1))
    if missing:
        shown = ", ".join(missing[:RANKS_NAMED_MAX]) + (", ..." if len(missing) > RANKS_NAMED_MAX else "")
        detail += f": not on {shown}, of which this daemon does not hear (another node's?)"
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


def _several(job: str, rank: int, mine: Sequence[Target]) -> str:
    pids = ", ".join(str(target.hello.pid) for target in mine if target.hello.rank == rank)
    return (
        f"several jobs are called {job!r}: rank {rank} is there as pid {pids};"
        " give each a name of its own ([hook] job, or attach(job=...))"
    )


def _passed(request: Request, at_step: object, rank_steps: RankSteps) -> str:
    if not isinstance(at_step, int):
        return f"at_step must be a number, not {at_step!r}"
    return (
        f"step {at_step} is too near: job {request.job!r} is at {rank_steps.at}, and its ranks hear in time of"
        f" steps from {rank_steps.ahead} on"
    )
