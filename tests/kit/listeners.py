"""Listeners for tests: of a hook's steps, and of what a daemon sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pacecar.profiler.hook.hook import StepListener
from pacecar.profiler.transport.daemon_socket import DaemonInbox, News
from pacecar.records import Answer, Command

__all__ = ["HeardInbox", "HeardSteps"]


class HeardSteps(StepListener):
    """Calls functions with what a hook tells; a function that is None is not called."""

    def __init__(
        self, on_boundary: Callable[[Any], object] | None = None, on_timed: Callable[[Any, Any], object] | None = None
    ) -> None:
        self._boundary = on_boundary
        self._timed = on_timed

    def on_boundary(self, step: Any) -> None:
        if self._boundary is not None:
            self._boundary(step)

    def wants_boundary(self) -> bool:
        return self._boundary is not None

    def on_timed(self, timed: Any, record: Any) -> None:
        if self._timed is not None:
            self._timed(timed, record)


class HeardInbox(DaemonInbox):
    """Keeps what a daemon sends, and refuses no command."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.news: list[News | None] = []

    def receive_command(self, command: Command) -> Answer | None:
        self.commands.append(command)
        return None

    def receive_news(self, news: News | None) -> None:
        self.news.append(news)
