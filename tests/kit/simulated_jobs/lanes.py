"""Holds the state of a simulation: what each rank's host and streams are at, and what waits for what.

The rules by which it changes are in `engine`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .instructions import Program

__all__ = ["DeviceWork", "Meeting", "Rank", "StreamQueue"]


class DeviceWork:
    """One piece of work on a stream, from its launch to its end.

    A communication kernel has met with others when none of its `meetings` is open; the last of them lets it leave at
    `leaves`, and then it is late by what is `left`.
    """

    __slots__ = (
        *("ahead", "end", "followers", "has_waiter", "is_kernel", "leaves", "left"),
        *("meetings", "met", "place", "rank", "ready", "since", "version"),
    )

    def __init__(self, rank: Rank, place: int, ready: int, left: int) -> None:
        self.rank = rank
        self.place = place
        self.ready = ready
        self.left = left
        self.met: list[Meeting] = []
        self.meetings = 0
        self.leaves = 0
        self.is_kernel = False
        self.ahead = 0
        self.end = -1
        self.since = 0
        self.version = 0
        self.followers: list[tuple[DeviceWork, int]] = []
        self.has_waiter = False


class Meeting:
    """A collective or message of so many `members`; it takes `wire_ns` from when the last has come.

    On `links` that are shared `left_ns` of that remained at `since`, and it would be done at `due` if nothing changed.
    """

    __slots__ = ("come", "due", "launched", "left_ns", "links", "members", "since", "wire_ns")

    def __init__(self, members: int, wire_ns: int, links: tuple[object, ...]) -> None:
        self.members = members
        self.wire_ns = wire_ns
        self.launched = 0
        self.left_ns = float(wire_ns)
        self.since = self.due = -1
        self.links = links
        self.come: list[DeviceWork] = []


class StreamQueue:
    """What was put on a stream last, and what the next on it has to wait for."""

    __slots__ = ("tail", "waits")

    def __init__(self) -> None:
        self.tail: DeviceWork | None = None
        self.waits: list[DeviceWork] = []


@dataclass(slots=True, eq=False)
class Rank:
    """The state of one rank: where its host is, its streams, and what it waits for."""

    number: int
    program: Program
    now: int
    step: int = 0
    place: int = 0
    waits_for: int = 0
    resident: int = 0
    running: set[DeviceWork] = field(default_factory=set)
    streams: dict[int, StreamQueue] = field(default_factory=dict)
    events: dict[int, DeviceWork] = field(default_factory=dict)
    batch: list[Meeting] = field(default_factory=list)
    counts: dict[tuple[object, ...], int] = field(default_factory=dict)
    lists: tuple[list[int], ...] = ()
    host_start: list[int] = field(default_factory=list)
    host_end: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def stream(self, number: int) -> StreamQueue:
        """Return the stream of this number, which begins to exist when it is first used."""
        found = self.streams.get(number)
        if found is None:
            found = self.streams[number] = StreamQueue()
        return found
