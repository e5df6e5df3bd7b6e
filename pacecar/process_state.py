"""Reads what the kernel says of a rank's process: whether it exists, is stopped or frozen, waits or computes.

Of a process that has ended it says by which signal, until its parent has asked; and of a control group, how many of its
processes were killed for memory.  So a rank was killed for memory if that number has grown, and no other signal ended
it.  A process without such a group counts the kills of its host, and then the signal must be known.

A pid may be given to another process, and means another one in another container.  So a rank is known by its pid, the
time its process began, and its host: boot and pid namespace.

Sources: proc_pid_stat(5), proc_pid_status(5), proc_pid_wchan(5), proc_pid_io(5); Documentation/scheduler/
sched-stats.rst (schedstat); Documentation/admin-guide/cgroup-v2.rst (cgroup.events, memory.events) and
cgroup-v1/memory.rst (memory.oom_control); mm/vmstat.c (oom_kill).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pacecar.kernel_files.cgroups import V2, parse_cgroup_line, v2_group
from pacecar.kernel_files.reader import KernelFiles, lines_of, row
from pacecar.records.hangs import ProcessState
from pacecar.records.ranges import LABEL_CHARACTERS_MAX, Count, Label, Pid

__all__ = [
    "CGROUPS",
    "ProcessIdentity",
    "identity_of",
    "memory_kills",
    "own_age_ns",
    "own_identity",
    "read_process",
    "thread_age_ns",
]

CGROUPS = Path("/sys/fs/cgroup")

_STATE, _BEGAN, _EXIT_CODE = 0, 19, 49
"""Fields of /proc/PID/stat after the name in parentheses: `state`, `starttime` and `exit_code`, as wait(2) returns it;
the latter is 0 to those who must not trace the process."""

THREADS_MAX = 4096
"""A read takes 10 us, and this is read once, before the first step."""

_OVER = ("Z", "X")
"""A zombie has ended; only its parent has not asked how."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process and its training thread; `host` is the same for processes that see each other by these pids.

    `kills_file` counts the kills for memory in its control group; None if it has no such group.
    """

    host: Label
    pid: Pid
    thread: Pid
    began: Count
    kills_file: Label | None = None


def own_identity(thread: int, files: KernelFiles | None = None) -> ProcessIdentity:
    """Return the identity of this process; `thread` is the native id of the training thread."""
    files = files or KernelFiles()
    boot = (files.text(files.proc / "sys" / "kernel" / "random" / "boot_id") or "").strip()
    try:
        namespace = os.readlink(files.proc / "self" / "ns" / "pid")
    except OSError:
        namespace = ""
    host = f"{boot} {namespace}" if boot and namespace else ""
    return identity_of(os.getpid(), files, thread=thread, host=host)


def identity_of(
    pid: int, files: KernelFiles, *, thread: int | None = None, host: str = "", cgroups: Path = CGROUPS
) -> ProcessIdentity:
    """Return the identity of a process; its training thread is its first one if `thread` is not known."""
    process = files.proc / str(pid)
    began = _began(_stat(files, process)) or 0
    return ProcessIdentity(host, pid, thread or pid, began, _kills_file(files, process, cgroups))


def own_age_ns(files: KernelFiles | None = None, *, boot_ns: int | None = None) -> int | None:
    """Return how long ago this process began, to a clock tick (10 ms); None if the kernel does not tell.

    `boot_ns` is the time of CLOCK_BOOTTIME to count back from; default now.
    """
    files = files or KernelFiles()
    return _age_ns(_began(_stat(files, files.proc / "self")), boot_ns)


def thread_age_ns(names: Sequence[str], files: KernelFiles | None = None, *, boot_ns: int | None = None) -> int | None:
    """Return how long ago the first thread of this process began whose name begins with one of `names`.

    None: it has none, or too many threads to look at.
    """
    files = files or KernelFiles()
    tasks = files.proc / "self" / "task"
    try:
        numbers = files.names(tasks)
    except OSError:
        return None
    if len(numbers) > THREADS_MAX:
        return None
    named = (one for one in numbers if (files.text(tasks / one / "comm") or "").startswith(tuple(names)))
    ages = (_age_ns(_began(_stat(files, tasks / one)), boot_ns) for one in named)
    return max((age for age in ages if age is not None), default=None)


def _age_ns(began: int | None, boot_ns: int | None) -> int | None:
    if began is None:
        return None
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) if boot_ns is None else boot_ns
    return max(0, now_ns - began * (1_000_000_000 // os.sysconf("SC_CLK_TCK")))


def memory_kills(who: ProcessIdentity, files: KernelFiles | None = None) -> int | None:
    """Return how many processes of its group, or else of its host, were killed for memory; None if that is unknown."""
    files = files or KernelFiles()
    return _number(files.text(Path(who.kills_file) if who.kills_file else files.proc / "vmstat") or "", "oom_kill")


def read_process(
    who: ProcessIdentity,
    files: KernelFiles | None = None,
    cgroups: Path = CGROUPS,
    *,
    kills_before: int | None = None,
) -> ProcessState:
    """Return the state of a process of this host; `kills_before` is what `memory_kills` returned while it lived."""
    files = files or KernelFiles()
    process = files.proc / str(who.pid)
    stat = _stat(files, process)
    if not stat or _began(stat) != who.began or stat[_STATE] in _OVER:
        is_left = bool(stat) and _began(stat) == who.began
        ended_by = _signal(stat) if is_left else None
        return ProcessState(
            pid=who.pid,
            exists=False,
            state=stat[_STATE] if is_left else None,
            ended_by=ended_by,
            killed_for_memory=_is_killed_for_memory(who, ended_by, kills_before, memory_kills(who, files)),
        )
    task = process / "task" / str(who.thread)
    thread = _stat(files, task) or stat
    status, io = files.text(task / "status") or "", files.text(task / "io") or ""
    waits = (files.text(task / "wchan") or "").strip()
    group = v2_group(files.text(process / "cgroup") or "")
    events = "" if group is None else files.text(cgroups / group.lstrip("/") / "cgroup.events") or ""
    spent = (files.text(task / "schedstat") or "").split()
    moved = [_number(io, key) for key in ("rchar:", "wchar:")]
    return ProcessState(
        pid=who.pid,
        state=thread[_STATE][:1],
        wait_channel=waits if waits not in ("", "0") else None,
        tracer_pid=_number(status, "TracerPid:") or None,
        is_frozen=_number(events, "frozen") == 1,
        processor_ns=int(spent[0]) if spent and spent[0].isdigit() else None,
        wakeups=_number(status, "voluntary_ctxt_switches:"),
        transferred_bytes=None if None in moved else sum(each for each in moved if each is not None),
    )


def _is_killed_for_memory(who: ProcessIdentity, ended_by: int | None, before: int | None, now: int | None) -> bool:
    if before is None or now is None or now <= before:
        return False
    return ended_by == signal.SIGKILL or (ended_by is None and who.kills_file is not None)


def _kills_file(files: KernelFiles, process: Path, cgroups: Path) -> str | None:
    """Return where the control group of a process counts kills for memory."""
    groups: dict[str, str] = {}
    for line in lines_of(files.text(process / "cgroup") or ""):
        try:
            groups |= dict(parse_cgroup_line(line))
        except ValueError:
            continue
    for hierarchy, top, name in ((V2, cgroups, "memory.events"), ("memory", cgroups / "memory", "memory.oom_control")):
        if hierarchy in groups:
            path = top / groups[hierarchy].lstrip("/") / name
            if len(str(path)) <= LABEL_CHARACTERS_MAX and _number(files.text(path) or "", "oom_kill") is not None:
                return str(path)
    return None


def _signal(stat: list[str]) -> int | None:
    """Return the signal that ended a process; None if it exited, or if that is not told."""
    code = stat[_EXIT_CODE] if len(stat) > _EXIT_CODE else ""
    return int(code) & 0x7F or None if code.isdigit() else None


def _stat(files: KernelFiles, folder: Path) -> list[str]:
    """Return the fields after the name, which may itself have spaces and parentheses; empty if there is no process."""
    return (files.text(folder / "stat") or "").rpartition(")")[2].split()


def _began(stat: list[str]) -> int | None:
    return int(stat[_BEGAN]) if len(stat) > _BEGAN and stat[_BEGAN].isdigit() else None


def _number(text: str, key: str) -> int | None:
    words = row(text, key)
    return int(words[0]) if words and words[0].isdigit() else None
