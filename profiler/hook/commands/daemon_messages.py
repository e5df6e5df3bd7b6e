"""Holds commands from the daemon until the step boundary at which the training thread executes them.

A command arrives at any time, on a thread that must not touch torch.  The training thread executes it at the boundary
before the step that the daemon named, so that the ranks of a node begin together.  If that step has passed, the command
is executed at once, and the answer says at which step.  `register` adds the actions.

`ThrottleNews` keeps the daemon's latest news of whether this rank's device throttles its clocks.  The hook does not
read this itself: NVML stays out of the job, and a driver call may hang for 45 s.  The daemon reads the throttle reasons
anyway and sends them to its jobs when they change (`Throttling`).  Nothing waits for them: until they arrive, and after
the connection breaks, the state is unknown.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Literal

from pacecar.records import Answer, Command, JobHello, Throttling

__all__ = ["ORDERS_MAX", "Action", "DaemonMessages", "MessageRefusal", "NotYet", "Reply", "ThrottleNews"]

ORDERS_MAX = 16
"""The most commands waiting at once; any more are refused."""

Reply = Callable[[Literal["accepted", "done", "refused"], str], None]
"""Answers one command with a state and a detail, now or later."""

Action = Callable[[Command, Reply], None]
"""Carries out a command on the training thread."""

SendAnswer = Callable[[Answer], None]
"""Sends an answer without waiting."""

_log = logging.getLogger(__name__)


class MessageRefusal(ValueError):  # noqa: N818  an action's way to say no
    """Raised by an action that cannot execute the command; the message goes to the user who gave it."""


class NotYet(Exception):  # noqa: N818  not a failure
    """Raised by an action to be called again at the next boundary."""


class DaemonMessages:
    """One rank's waiting commands.  `receive` may be called on any thread, everything else on the training thread."""

    def __init__(self, job: str, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._actions: dict[str, Action] = {}
        self.waiting: deque[Command] = deque()
        """The commands for `boundary` to check."""

    def register(self, name: str, action: Action) -> None:
        """Execute commands called `name` with `action`."""
        self._actions[name] = action

    def receive(self, command: Command) -> Answer | None:
        """Queue `command` for the boundary before its step, or refuse it and return the answer."""
        if command.action not in self._actions:
            known = ", ".join(sorted(self._actions)) or "nothing"
            return self._answer(command, "refused", f"this job's hook cannot {command.action!r}, it can: {known}")
        if len(self.waiting) >= ORDERS_MAX:
            return self._answer(command, "refused", f"{ORDERS_MAX} commands are waiting already")
        self.waiting.append(command)
        return None

    def boundary(self, step: int, send: SendAnswer) -> None:
        """Execute the commands for `step`, which begins now; `send` sends their answers, now and later."""
        if not self.waiting:
            return
        for _ in range(len(self.waiting)):
            command = self.waiting.popleft()
            if command.at_step > step:
                self.waiting.append(command)
            else:
                self._execute(command, send)

    def close(self, send: SendAnswer, reason: str = "the job ended first") -> None:
        """Refuse all waiting commands."""
        while self.waiting:
            send(self._answer(self.waiting.popleft(), "refused", reason))

    def _execute(self, command: Command, send: SendAnswer) -> None:
        def answer(state: Literal["accepted", "done", "refused"], detail: str) -> None:
            send(self._answer(command, state, detail))

        try:
            self._actions[command.action](command, answer)
        except NotYet:
            self.waiting.append(command)
        except MessageRefusal as refusal:
            answer("refused", str(refusal))
        except Exception as error:  # noqa: BLE001  a command must not end the job
            _log.warning("pacecar could not carry out %r", command.action, exc_info=True)
            answer("refused", f"{type(error).__name__}: {error}")

    def _answer(self, command: Command, state: Literal["accepted", "done", "refused"], detail: str) -> Answer:
        return Answer(job=self._job, rank=self._rank, number=command.number, state=state, detail=detail)


class ThrottleNews:
    """The daemon's last news of the device in `hello`; the queue's thread calls `record`, a single assignment."""

    def __init__(self, hello: JobHello) -> None:
        self._device_uuid = hello.device_uuid
        self._latest: Throttling | None = None

    def record(self, news: Throttling | None) -> None:
        """Record the daemon's news; None: there is no connection."""
        if news is None or news.device_uuid == self._device_uuid:
            self._latest = news

    def is_throttled(self) -> bool | None:
        """Return whether the device throttles its clocks; None if unknown."""
        latest = self._latest
        return None if latest is None or latest.reasons is None else bool(latest.reasons)
