"""Gives a process less of a processor (needs root and control groups of version 1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["can_limit", "cpu_group", "cpu_quota"]

GROUPS = Path("/sys/fs/cgroup/cpu")


def can_limit() -> bool:
    """Return whether this machine lets us make control groups for processors."""
    return os.access(GROUPS / "cpu.cfs_quota_us", os.W_OK)


@contextmanager
def cpu_group(name: str, share: float, *, period_us: int = 100_000) -> Iterator[Path]:
    """Make a group that uses `share` of one processor, counted over `period_us` microseconds; yield its `cgroup.procs`.

    Whoever is in it must have ended, or left, before it is removed.
    """
    group = GROUPS / f"pacecar-test-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(round(period_us * share)))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


@contextmanager
def cpu_quota(share: float, *, period_us: int = 100_000) -> Iterator[None]:
    """Let all threads of this process use `share` of one processor together."""
    with cpu_group("self", share, period_us=period_us) as members:
        members.write_text(str(os.getpid()))
        try:
            yield
        finally:
            (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
