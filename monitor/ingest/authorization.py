"""Decides who may send requests to a running job: the user who runs it, and root, by the uid that the kernel reports.

Whoever can reach the daemon's socket can send a request, and the socket of a system's daemon is for everybody.  The
file's mode cannot tell users apart, and a name in the request proves nothing.  SO_PEERCRED (unix(7)) is what the kernel
noted when the peer connected: neither side can change it.

A rank counts only if the daemon accepted it.  A foreign process that claims the job's name is refused there, and must
neither receive the job's commands nor make them look like somebody else's.

Left out: groups and lists of names.  To steer another user's job, become that user, or root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pacecar.records import JobHello, Request
from pacecar.records.job_identity import CalledJob, JobKey, ambiguity, meant

__all__ = ["NOBODY", "RANKS_NAMED_MAX", "ROOT", "Denied", "Target", "may_dump", "reachable"]

ROOT = 0

NOBODY = 65534
"""What the kernel calls every user that a user namespace does not know (user_namespaces(7)): it names nobody, so that
two different users would look the same."""

RANKS_NAMED_MAX = 8
"""Ranks that an answer lists: eight are a node's, and a sentence must end."""

JOBS_NAMED_MAX = 8
"""Jobs that the answer to a wrong name lists."""


class Denied(ValueError):  # noqa: N818  a verdict, not a failure
    """The request is refused; the message is for whoever sent it."""


class Target(NamedTuple):
    """A connected rank of this node."""

    connection: int
    hello: JobHello
    uid: int


def reachable(request: Request, uid: int, targets: Iterable[Target]) -> list[Target]:
    """Return those of `targets` that `uid` may reach with `request`.

    Raises:
        Denied: no such job or rank is here, the job is another user's, or several are called so.
    """
    all_targets = list(targets)
    called = meant(request.job, (JobKey.of(target.hello) for target in all_targets))
    if not called:
        raise Denied(_unknown(request.job, uid, all_targets))
    job = [
        target
        for target in all_targets
        if JobKey.of(target.hello) in called and (uid == ROOT or NOBODY != uid == target.uid)
    ]
    if not job:
        raise Denied(f"job {request.job!r} belongs to another user")
    if len({JobKey.of(target.hello) for target in job}) > 1:
        raise Denied(ambiguity(request.job, _called(job)))
    chosen = [target for target in job if not request.ranks or target.hello.rank in request.ranks]
    if not chosen:
        here = sorted(target.hello.rank for target in job)
        named = ", ".join(map(str, here[:RANKS_NAMED_MAX])) + (", ..." if len(here) > RANKS_NAMED_MAX else "")
        wanted = ", ".join(map(str, request.ranks[:RANKS_NAMED_MAX]))
        raise Denied(
            f"rank {wanted} of job {request.job!r} is on another node (here: {named}); ask the daemon there,"
            f' the series pacecar_rank_info{{rank="{wanted}"}} names its host'
        )
    return chosen


def may_dump(uid: int, daemon_uid: int) -> bool:
    """Return whether `uid` may have a recording written: it holds what all users' jobs did, and takes disk.

    Root, and the user that the daemon runs as, whose files they become.
    """
    return uid == ROOT or NOBODY != uid == daemon_uid


def _called(targets: Sequence[Target]) -> list[CalledJob]:
    found: dict[JobKey, list[Target]] = {}
    for target in targets:
        found.setdefault(JobKey.of(target.hello), []).append(target)
    return [CalledJob(key, of[0].uid, tuple(target.hello.pid for target in of)) for key, of in sorted(found.items())]


def _unknown(job: str, uid: int, targets: Sequence[Target]) -> str:
    """Return a message that names the jobs that are there, but none of other users."""
    names = sorted({target.hello.job for target in targets if uid == ROOT or NOBODY != uid == target.uid})
    there = (
        "no job of yours is"
        if not names
        else f"there {'is' if len(names) == 1 else 'are'} "
        + ", ".join(map(repr, names[:JOBS_NAMED_MAX]))
        + (", ..." if len(names) > JOBS_NAMED_MAX else "")
    )
    return f"no rank of a job {job!r} is connected to this daemon; {there}"
