"""How does a person reach a running job?  Requests in, commands out to its ranks, answers back.

The hooks keep a connection open to say what they measure; a command goes down the same one, so a job needs no port of
its own and nobody can reach it who cannot reach the daemon's socket.  Nothing waits: a hook that does not read is
answered for as "refused", and what is still out is forgotten when the asker hangs up.

    asker  -- Request -->  daemon  -- Command -->  rank 0, rank 1, ...  (those on this node)
    asker  <-- Answer --   daemon  <-- Answer --   each of them

Who may ask is decided in `permission`.  Pure but for `send`, which is passed in.

Left out: what the actions mean; the hook knows that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from pacecar.monitor.permission import Denied, Target, reachable
from pacecar.records import Answer, Command, Request
from pacecar.wire import Message

__all__ = ["REQUESTS_MAX", "Requests", "Target"]

REQUESTS_MAX = 64
"""Requests that are out at one time; the oldest makes room."""


class _Out(NamedTuple):
    asker: int
    serial: int
    job: str


class Requests:
    """What was asked and is not yet answered.  Not safe for threads: the inbox calls it from its own.

    `send(connection, message)` returns whether the message went out.
    """

    def __init__(self, send: Callable[[int, Message], bool]) -> None:
        self._send = send
        self._out: dict[int, _Out] = {}
        self._numbers = itertools.count(1)

    def ask(self, request: Request, *, asker: int, uid: int, targets: Iterable[Target], at_step: int) -> None:
        """Pass `request` on to those of `targets` that it means, and tell the asker at once whom it reached.

        Several ranks begin together `at_step`; one has nobody to wait for.
        """
        try:
            mine = reachable(request, uid, targets)
        except Denied as denied:
            return self._refuse(request, asker, str(denied))
        if len(request.ranks) == 1:
            at_step = 0
        number = next(self._numbers)
        command = Command(number=number, action=request.action, at_step=at_step, arguments=request.arguments, uid=uid)
        reached = [target for target in mine if self._send(target.connection, command)]
        ranks = tuple(sorted(target.hello.rank for target in reached))
        if not reached:
            return self._refuse(request, asker, f"no rank of job {request.job!r} reads what the daemon sends")
        while len(self._out) >= REQUESTS_MAX:
            del self._out[next(iter(self._out))]
        self._out[number] = _Out(asker, request.serial, request.job)
        when = f"at step {at_step}" if at_step else "at its next step"
        detail = f"{request.action} {when} on {len(ranks)} of {mine[0].hello.world_size} ranks"
        accepted = Answer(
            job=request.job, rank=None, number=request.serial, state="accepted", detail=detail, ranks=ranks
        )
        self._send(asker, accepted)
        return None

    def answered(self, answer: Answer) -> None:
        """Pass a rank's answer on to whoever asked; nobody, if he has gone."""
        out = self._out.get(answer.number)
        if out is None or out.job != answer.job:
            return
        self._send(out.asker, msgspec.structs.replace(answer, number=out.serial))

    def left(self, connection: int) -> None:
        """Forget what the asker at `connection` wanted."""
        for number in [number for number, out in self._out.items() if out.asker == connection]:
            del self._out[number]

    def _refuse(self, request: Request, asker: int, why: str) -> None:
        self._send(asker, Answer(job=request.job, rank=None, number=request.serial, state="refused", detail=why))
