"""Words what a verdict says of ranks, calls and processes."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection

from pacecar.records.hangs import CollectiveCall, ProcessState, RankAccount

from .group_members import CollectiveGroup, plain_operation

__all__ = ["call_words", "group_words", "has_or_have", "process_words", "ranks_words", "waits_or_wait", "where_words"]

RANKS_SHOWN_MAX = 8

_CHANNELS = (
    ("pipe", "asleep on a pipe"),
    ("futex", "asleep on a lock"),
    ("poll", "asleep on files or sockets"),
    ("nanosleep", "asleep for a set time"),
    ("sk_wait", "asleep on a socket"),
    ("tcp_", "asleep on a socket"),
)
"""What wait channels of the kernel mean (proc_pid_wchan(5)), by a part of their name."""


def ranks_words(ranks: Collection[int]) -> str:
    """Return "rank 7", "ranks 1, 2 and 3", or "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 23 more"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    rest = len(names) - RANKS_SHOWN_MAX
    if rest > 1:
        return f"ranks {', '.join(names[:RANKS_SHOWN_MAX])} and {rest} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def has_or_have(ranks: Collection[int]) -> str:
    """Return the verb that goes with `ranks_words`."""
    return "has" if len(ranks) == 1 else "have"


def waits_or_wait(ranks: Collection[int]) -> str:
    """Return the verb that goes with `ranks_words`."""
    return "waits" if len(ranks) == 1 else "wait"


def group_words(group: CollectiveGroup) -> str:
    """Return "group `dp`", and its name if the description does not tell it from others."""
    shown = f"group `{group.label}`"
    return shown if group.label == group.name or group.name == "0" else f"{shown} ({group.name})"


def call_words(call: CollectiveCall | None, number: int) -> str:
    """Return "all_reduce #183"; the operation is left out where it is unknown."""
    return f"#{number}" if call is None else f"{plain_operation(call)} #{number}"


def where_words(account: RankAccount | None) -> str:
    """Return ": in loader.py:40 __next__, asleep on a pipe"; empty if nothing is known."""
    if account is None:
        return ""
    stack = next((stack for stack in account.stacks if stack.is_training and stack.frames), None)
    place = f"in {stack.frames[0]}" if stack is not None else f"in {account.phase}" if account.phase else ""
    parts = [part for part in (place, process_words(account.process)) if part]
    return f": {', '.join(parts)}" if parts else ""


def _ending_words(process: ProcessState) -> str:
    if process.killed_for_memory:
        return "was killed for memory" if process.ended_by else "has ended, and its control group ran out of memory"
    return "has ended" if process.ended_by is None else f"was ended by {_signal_words(process.ended_by)}"


def _signal_words(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def process_words(process: ProcessState | None) -> str:
    """Return what the kernel says of the process; empty if nothing."""
    if process is None:
        return ""
    if not process.exists or process.state in ("Z", "X"):
        return f"process {process.pid} {_ending_words(process)}"
    if process.is_frozen:
        return f"process {process.pid} is frozen with its control group"
    if process.state == "t":
        return f"process {process.pid} is held by debugger {process.tracer_pid or '(unknown)'}"
    if process.state == "T":
        return f"process {process.pid} is stopped by a signal"
    channel = process.wait_channel or ""
    if process.state == "D":
        return "in uninterruptible sleep" + (f" in {channel}" if channel else "")
    if process.state == "S":
        known = next((words for part, words in _CHANNELS if re.search(part, channel)), None)
        return known or (f"asleep in {channel}" if channel not in ("", "0") else "asleep")
    return "running" if process.state == "R" else ""
