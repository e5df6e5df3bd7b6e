"""Defines the document of `pacecar analyze --hang`, and makes it from a folder of dumps.

Fields are added and not renamed, as in those of traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pacecar.clock import Clock
from pacecar.nccl_debug_log import launch_words, read_launches
from pacecar.records.hangs import HangVerdict
from pacecar.records.ranges import TEXT_CHARACTERS_MAX, TEXTS_MAX

from .case import open_case
from .dumps.dump_folder import read_folder
from .group_members import CollectiveGroup
from .judgement import judge
from .sentences import call_words
from .wait_graph import Wait

__all__ = ["HangDocument", "WaitedGroup", "hang_document"]


class WaitedGroup(msgspec.Struct, frozen=True):
    """A process group whose ranks do not agree: some wait in `call`, and those of `absent` have not joined it.

    Of those in `unknown` it is not known.  `joined` and `finished` are the lowest and highest number of a rank's latest
    collective; null where there are none.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    call: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    unknown: tuple[int, ...]
    joined: tuple[int, int] | None
    finished: tuple[int, int] | None


class HangDocument(msgspec.Struct, frozen=True):
    """Why a job hangs, by its dumps; NCCL's logs only add evidence.  `problems` says what could not be used."""

    verdict: HangVerdict
    groups: list[WaitedGroup]
    world_size: int
    files: int
    problems: list[str]
    version: int = 1


def hang_document(folder: Path, clock: Clock) -> HangDocument:
    """Read the dumps in `folder` and judge; raises OSError if it cannot be listed."""
    found = read_folder(folder)
    verdict = judge(found.accounts, found.world_size, wall_ns=clock.wall_ns())
    communicators, notes = read_launches(found.logs)
    said = [words[:TEXT_CHARACTERS_MAX] for words in launch_words(communicators)]  # beside the verdict, not its ground
    verdict = msgspec.structs.replace(verdict, evidence=(*verdict.evidence, *said)[:TEXTS_MAX])
    case = open_case(found.accounts, found.world_size)
    groups = [row for group in case.groups for row in _waited(group, case.graph.waits)]
    groups.sort(key=lambda row: (not row.absent, -len(row.waiting), row.name))
    return HangDocument(verdict, groups, found.world_size, found.files, [*found.problems, *notes])


def _waited(group: CollectiveGroup, waits: Iterable[Wait]) -> Iterator[WaitedGroup]:
    """Yield the group if its ranks do not agree, with the first call that some wait in."""
    own = [wait for wait in waits if wait.group is group]
    states = {(member.joined, member.finished) for member in group.members.values()}
    if not own or (len(states) == 1 and all(wait.has_all for wait in own)):
        return
    first = min(own, key=lambda wait: (wait.has_all, wait.number))
    absent = frozenset().union(*(wait.absent for wait in own))
    yield WaitedGroup(
        name=group.name,
        description=group.description,
        ranks=group.ranks if group.knows_ranks else (),
        call=call_words(first.call, first.number),
        waiting=tuple(sorted({wait.rank for wait in own})),
        absent=tuple(sorted(absent)),
        unknown=tuple(sorted(frozenset().union(*(wait.unknown for wait in own)) - absent)),
        joined=_range(member.joined for member in group.members.values()),
        finished=_range(member.finished for member in group.members.values()),
    )


def _range(numbers: Iterable[int | None]) -> tuple[int, int] | None:
    known = [number for number in numbers if number is not None]
    return (min(known), max(known)) if known else None
