"""Identifies jobs by name and launch, and resolves the names that people type.

Two jobs may have one name: every static torchrun start is called `torchrun-29500`.  The launch is a random number that
the ranks of one start agree on (`pacecar.profiler.hook.identity`).  So daemon, rules and joins identify a job by both.
People type the name and, if it is ambiguous, the first digits of the launch: `torchrun-29500@3f`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pacecar.records.records import JobHello

__all__ = ["LAUNCH", "LAUNCH_DIGITS", "CalledJob", "JobKey", "ambiguity", "meant", "titles"]

LAUNCH_DIGITS = 16
"""64 bits as hexadecimal digits: among ten million launches, the chance of a collision is 3 in a million."""

LAUNCH = re.compile(rf"[0-9a-f]{{{LAUNCH_DIGITS}}}|")
"""The form of a launch; it is empty for a hook older than launches, or if the ranks could not agree on one."""

JOBS_NAMED_MAX = 8
"""Jobs, and processes of a job, in one line."""

TITLE_DIGITS_MIN = 4


class JobKey(NamedTuple):
    """The identity of a job; `str` gives the form that commands take."""

    job: str
    launch: str

    @staticmethod
    def of(hello: JobHello) -> JobKey:
        """Return the job of the rank that sent `hello`."""
        return JobKey(hello.job, hello.launch)

    def __str__(self) -> str:
        return f"{self.job}@{self.launch}" if self.launch else self.job


class CalledJob(NamedTuple):
    """A job that a name may mean, its owner, and the processes of its local ranks."""

    key: JobKey
    uid: int
    pids: tuple[int, ...]


def meant(wanted: str, keys: Iterable[JobKey]) -> list[JobKey]:
    """Return the jobs among `keys` that `wanted` names: a name, or a name, "@" and the launch's first digits.

    A name may contain an "@", so exact matches go first.  Nothing after the "@" means the job without a launch.
    """
    known = sorted(set(keys))
    exact = [key for key in known if wanted in (key.job, str(key))]
    name, at, digits = wanted.rpartition("@")
    if exact or not at:
        return exact
    return [key for key in known if key.job == name and (key.launch.startswith(digits) if digits else not key.launch)]


def titles(keys: Iterable[JobKey]) -> dict[JobKey, str]:
    """Return the shortest form that `meant` resolves to each of these jobs, mostly its name."""
    of_name: dict[str, list[JobKey]] = {}
    for key in sorted(set(keys)):
        of_name.setdefault(key.job, []).append(key)
    found: dict[JobKey, str] = {}
    for name, same in of_name.items():
        digits = TITLE_DIGITS_MIN
        while len({key.launch[:digits] for key in same}) < len(same):
            digits += 1
        found |= {key: name if len(same) == 1 else f"{name}@{key.launch[:digits]}" for key in same}
    return found


def ambiguity(wanted: str, jobs: Sequence[CalledJob]) -> str:
    """Return the message for a name that several jobs have, with an unambiguous name for each."""
    called = titles(job.key for job in jobs)
    shown = [
        f"{called[key]} (uid {uid}, pid {', '.join(map(str, pids[:JOBS_NAMED_MAX]))}"
        f"{', ...' * (len(pids) > JOBS_NAMED_MAX)})"
        for key, uid, pids in jobs[:JOBS_NAMED_MAX]
    ]
    more = f" and {len(jobs) - JOBS_NAMED_MAX} more" if len(jobs) > JOBS_NAMED_MAX else ""
    return f"{len(jobs)} jobs are called {wanted!r}; name one of them: {'; '.join(shown)}{more}"
