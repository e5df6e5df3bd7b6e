"""Reads what the kernel says of a rank's process: whether it exists, is stopped or frozen, waits or computes.

A pid may be given to another process, and means another one in another container.  So a rank is known by its pid, the
time its process began, and its host: boot and pid namespace.

Sources: proc_pid_stat(5), proc_pid_status(5), proc_pid_wchan(5), proc_pid_io(5); Documentation/scheduler/
sched-stats.rst (schedstat); Documentation/admin-guide/cgroup-v2.rst (cgroup.events).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pacecar.kernel_files.cgroups import v2_group
from pacecar.kernel_files.reader import KernelFiles, row
from pacecar.records.hangs import ProcessState
from pacecar.records.ranges import Count, Label, Pid

__all__ = ["ProcessIdentity", "own_identity", "read_process"]

_STATE, _BEGAN = 0, 19
"""Fields of /proc/PID/stat after the name in parentheses: `state` and `starttime`."""

_OVER = ("Z", "X")
"""A zombie has ended; only its parent has not asked how."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process and its training thread; `host` is the same for processes that see each other by these pids."""

    host: Label
    pid: Pid
    thread: Pid
    began: Count


def own_identity(thread: int, files: KernelFiles | None = None) -> ProcessIdentity:
    """Return the identity of this process; `thread` is the native id of the training thread."""
    files = files or KernelFiles()
    boot = (files.text(files.proc / "sys" / "kernel" / "random" / "boot_id") or "").strip()
    try:
        namespace = os.readlink(files.proc / "self" / "ns" / "pid")
    except OSError:
        namespace = ""
    host = f"{boot} {namespace}" if boot and namespace else ""
    return ProcessIdentity(host, os.getpid(), thread, _began(_stat(files, files.proc / "self")) or 0)


def read_process(
    who: ProcessIdentity, files: KernelFiles | None = None, cgroups: Path = Path("/sys/fs/cgroup")
) -> ProcessState:
    """Return the state of a process of this host."""
    files = files or KernelFiles()
    process = files.proc / str(who.pid)
    stat = _stat(files, process)
    if not stat or _began(stat) != who.began:
        return ProcessState(pid=who.pid, exists=False)
    if stat[_STATE] in _OVER:
        return ProcessState(pid=who.pid, exists=False, state=stat[_STATE])
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


def _stat(files: KernelFiles, folder: Path) -> list[str]:
    """Return the fields after the name, which may itself have spaces and parentheses; empty if there is no process."""
    return (files.text(folder / "stat") or "").rpartition(")")[2].split()


def _began(stat: list[str]) -> int | None:
    return int(stat[_BEGAN]) if len(stat) > _BEGAN and stat[_BEGAN].isdigit() else None


def _number(text: str, key: str) -> int | None:
    words = row(text, key)
    return int(words[0]) if words and words[0].isdigit() else None
