"""Decides who may send requests to a running job: the user who runs it, and root, by the uid that the kernel reports.

Every user can reach the socket of the system's daemon, file modes cannot tell users apart, and a name in the request
proves nothing.  The kernel records the uid (SO_PEERCRED, unix(7)) when the peer connects; neither side can change it.

Only ranks that the daemon accepted count.  A process of another user that claims the job's name was refused; it must
not receive the job's commands.

Left out: groups and lists of names.  To steer another user's job, become that user, or root.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pacecar.records import JobHello, Request
from pacecar.records.job_identity import CalledJob, JobKey, ambiguity, meant, titles

__all__ = ["NOBODY", "RANKS_NAMED_MAX", "ROOT", "Denied", "Target", "listed", "may_dump", "reachable"]

ROOT = 0

NOBODY = 65534
"""The kernel's uid for every user that a user namespace does not map (user_namespaces(7)); it identifies no user."""

RANKS_NAMED_MAX = 8
"""Ranks listed in an answer: as many as a node usually has."""

JOBS_NAMED_MAX = 8
"""Jobs listed in the answer to an unknown name."""


class Denied(ValueError):  # noqa: N818  a verdict, not a failure
    """The request is refused; the message is for the user who sent it."""


class Target(NamedTuple):
    """A connected rank of this node, last heard from at `heard_ns` (monotonic)."""

    connection: int
    hello: JobHello
    uid: int
    heard_ns: int = 0


def reachable(request: Request, uid: int, targets: Iterable[Target]) -> list[Target]:
    """Return the `targets` that `request` means and `uid` may reach; without a name it means the user's only job.

    Raises:
        Denied: the job or rank is not here, the job is another user's, or the name is ambiguous.
    """
    all_targets = list(targets)
    own = [target for target in all_targets if uid == ROOT or NOBODY != uid == target.uid]
    called = meant(request.job, (JobKey.of(target.hello) for target in all_targets))
    if not request.job:
        called = list({JobKey.of(target.hello) for target in own})
        if len(called) != 1:
            which = f"name one of your jobs: {listed(sorted(titles(called).values()), JOBS_NAMED_MAX)}"
            raise Denied(which if called else "no job of yours is connected to this daemon")
    if not called:
        raise Denied(_unknown(request.job, own))
    job = [target for target in own if JobKey.of(target.hello) in called]
    if not job:
        raise Denied(f"job {request.job!r} belongs to another user")
    if len({JobKey.of(target.hello) for target in job}) > 1:
        raise Denied(ambiguity(request.job, _called(job)))
    chosen = [target for target in job if not request.ranks or target.hello.rank in request.ranks]
    if not chosen:
        here = listed(map(str, sorted(target.hello.rank for target in job)), RANKS_NAMED_MAX)
        wanted = ", ".join(map(str, request.ranks[:RANKS_NAMED_MAX]))
        raise Denied(
            f"rank {wanted} of job {request.job!r} is on another node (here: {here}); ask the daemon there,"
            f' the series pacecar_rank_info{{rank="{wanted}"}} names its host'
        )
    return chosen


def listed(names: Iterable[str], most: int) -> str:
    """Return the first `most` of `names`, separated by commas, with an ellipsis if there are more."""
    shown = list(itertools.islice(names, most + 1))
    return ", ".join([*shown[:most], *(["..."] if len(shown) > most else [])])


def may_dump(uid: int, daemon_uid: int) -> bool:
    """Return whether `uid` may request a recording: only root and the daemon's own user, who owns the files.

    A recording shows what all users' jobs did, and takes disk space.
    """
    return uid == ROOT or NOBODY != uid == daemon_uid


def _called(targets: Sequence[Target]) -> list[CalledJob]:
    found: dict[JobKey, list[Target]] = {}
    for target in targets:
        found.setdefault(JobKey.of(target.hello), []).append(target)
    return [CalledJob(key, of[0].uid, tuple(target.hello.pid for target in of)) for key, of in sorted(found.items())]


def _unknown(job: str, own: Sequence[Target]) -> str:
    """Return a message that names the user's `own` jobs."""
    names = sorted({target.hello.job for target in own})
    there = f"there {'is' if len(names) == 1 else 'are'} {listed(map(repr, names), JOBS_NAMED_MAX)}"
    return f"no rank of a job {job!r} is connected to this daemon; {there if names else 'no job of yours is'}"
