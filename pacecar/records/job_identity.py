"""Identifies jobs by name and launch, and finds the job that a person means by what he typed.

A name is what a launcher or a person gave, and two jobs may have the same: every static torchrun start is called
`torchrun-29500`.  The launch is a random number that the ranks of one start agreed on, and that no other job has
(`pacecar.profiler.hook.identity.launch_id`).  So the daemon, the rules and the joins tell jobs apart by both.  People
type the name, with as many digits of the launch as it takes: `torchrun-29500@3f`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pacecar.records.records import JobHello

__all__ = ["LAUNCH", "LAUNCH_DIGITS", "CalledJob", "JobKey", "ambiguity", "meant", "titles"]

LAUNCH_DIGITS = 16
"""64 bits as hexadecimal digits: two of ten million launches are alike with a chance of 3 in a million."""

LAUNCH = re.compile(rf"[0-9a-f]{{{LAUNCH_DIGITS}}}|")
"""What a launch looks like; empty: a hook older than launches, or one that could agree on none."""

JOBS_NAMED_MAX = 8
"""Jobs, and processes of one, that one line names."""

TITLE_DIGITS_MIN = 4


class JobKey(NamedTuple):
    """What tells one job from all others; `str` of it is what a command takes."""

    job: str
    launch: str

    @staticmethod
    def of(hello: JobHello) -> JobKey:
        """Return the job of the rank that says `hello`."""
        return JobKey(hello.job, hello.launch)

    def __str__(self) -> str:
        return f"{self.job}@{self.launch}" if self.launch else self.job


class CalledJob(NamedTuple):
    """A job that a name may mean: whose it is, and the processes of its ranks here."""

    key: JobKey
    uid: int
    pids: tuple[int, ...]


def meant(wanted: str, keys: Iterable[JobKey]) -> list[JobKey]:
    """Return the jobs among `keys` that `wanted` names: a name, or a name, "@" and the launch's first digits.

    A name may have an "@" in it too, so one that is exactly so called goes first.  Nothing behind the "@" means the
    job without a launch.
    """
    known = sorted(set(keys))
    exact = [key for key in known if wanted in (key.job, str(key))]
    name, at, digits = wanted.rpartition("@")
    if exact or not at:
        return exact
    return [key for key in known if key.job == name and (key.launch.startswith(digits) if digits else not key.launch)]


def titles(keys: Iterable[JobKey]) -> dict[JobKey, str]:
    """Return the shortest words that `meant` takes for each of these jobs: mostly its name."""
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
    """Return the message for a name that several jobs have, with a name for each that is its own."""
    called = titles(job.key for job in jobs)
    shown = [
        f"{called[key]} (uid {uid}, pid {', '.join(map(str, pids[:JOBS_NAMED_MAX]))}"
        f"{', ...' * (len(pids) > JOBS_NAMED_MAX)})"
        for key, uid, pids in jobs[:JOBS_NAMED_MAX]
    ]
    more = f" and {len(jobs) - JOBS_NAMED_MAX} more" if len(jobs) > JOBS_NAMED_MAX else ""
    return f"{len(jobs)} jobs are called {wanted!r}; name one of them: {'; '.join(shown)}{more}"
