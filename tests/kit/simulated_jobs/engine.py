"""Runs a simulated job: a discrete-event simulation of all hosts, streams, collectives and messages on one true clock.

    host      executes its program; runs ahead of the device until it has to wait for it
    stream    runs what was put on it in order, each after its launch, its predecessor and the events waited for
    meeting   a collective or a message: complete when the last of its ranks has come; all leave after the wire time,
              each a little later than the earliest could; on a shared link those of a group slow each other
    device    a kernel runs slower while a communication kernel is resident, if the job has contention

The agenda holds what happens next, in the order of true time.  Times are integers of nanoseconds.  This is written
for being right and simple to check, and knows nothing of how pacecar analyzes traces: there is no graph here.

Left out: what a trace shows of it (`traces`).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .durations import Durations, durations, generator
from .instructions import ALL, Code, Instruction, Program
from .job import Job
from .lanes import DeviceWork, Meeting, Rank, StreamQueue
from .layout import Group
from .links import peer_wires, wires

__all__ = ["GAP_NS", "RankTimes", "Simulation"]

GAP_NS = 900
"""From the end of a kernel to the begin of the next on its stream."""

EVENT_NS = 1_500
"""From the end of what recorded an event to the begin of what waits for it on another stream."""

SYNC_NS = 4_000
"""From the end of what the host waits for to the return of its call."""

START_SPREAD_NS = 200_000
"""Ranks begin their first step within this time of each other."""

_START, _END, _ARRIVED = -1, 0, -2
_SKEW = 30


class RankTimes(NamedTuple):
    """What happened on a rank, in true time.

    `host_start` holds when each instruction began, by step and place in the program, and `host_end` when it was done.
    `device_start` and `device_end` are those of its work on the device, -1 where it has none.
    """

    host_start: NDArray[np.int64]
    host_end: NDArray[np.int64]
    device_start: NDArray[np.int64]
    device_end: NDArray[np.int64]


class Simulation:
    """One run of a job.  `program_of` gives the program of each pipeline stage.

    `run` returns what happened on each rank, and raises RuntimeError where ranks wait for each other for ever.
    """

    def __init__(self, job: Job, program_of: Callable[[int], Program]) -> None:
        self.job = job
        self._agenda: list[tuple[int, int, int, DeviceWork]] = []
        self._serial = count()
        self._meetings: dict[tuple[object, ...], Meeting] = {}
        self._wires: dict[tuple[object, ...], list[int]] = {}
        self._on_link: dict[object, dict[Meeting, None]] = {}
        self._program_of = program_of

    def run(self) -> list[RankTimes]:
        job = self.job
        begins = generator(job, _SKEW).integers(0, START_SPREAD_NS, job.layout.ranks).tolist()
        ranks = [Rank(number, self._program_of(job.layout.stage(number)), begin) for number, begin in enumerate(begins)]
        for rank in ranks:
            self._begin_step(rank)
            self._advance(rank)
        agenda = self._agenda
        while agenda:
            now, _, version, work = heappop(agenda)
            if version == _START:
                self._start(work, now)
            elif version == _ARRIVED:
                self._arrived(work, now)
            elif version == work.version:
                self._end(work, now)
        stuck = [rank.number for rank in ranks if rank.step < job.all_steps]
        if stuck or self._meetings:
            raise RuntimeError(f"deadlock: ranks {stuck} wait, and at {list(self._meetings)[:8]} not all have come")
        return [_times(rank) for rank in ranks]

    # ---- host

    def _begin_step(self, rank: Rank) -> None:
        drawn = durations(self.job, rank.program, rank.number, rank.step)
        rank.lists = _lists(drawn)
        rank.events = {}
        rank.place = 0
        n = len(rank.program)
        rank.starts += [-1] * n
        rank.ends += [-1] * n

    def _advance(self, rank: Rank) -> None:
        """Execute instructions until the host has to wait or the job is over."""
        while rank.step < self.job.all_steps:
            if self._execute(rank):
                return
            rank.step += 1
            if rank.step < self.job.all_steps:
                self._begin_step(rank)

    def _execute(self, rank: Rank) -> bool:
        """Execute the rest of the step's instructions; return whether the host waits."""
        instructions = rank.program.instructions
        before, after, device, latency, scatter = rank.lists
        now, base = rank.now, rank.step * len(instructions)
        starts, ends = rank.host_start, rank.host_end
        for place in range(rank.place, len(instructions)):
            one = instructions[place]
            starts.append(now)
            called = now + before[place]
            now = called + after[place]
            waits: list[DeviceWork] = []
            code = one.code
            if code <= Code.BATCH:
                if one.role:
                    rank.batch.append(self._meeting(rank, one))
                    if one.on_stream != one.stream:
                        self._wait_for(rank, one.stream, rank.stream(one.on_stream).tail)
                if not one.is_batched:
                    work = DeviceWork(rank, base + place, called + latency[place], device[place])
                    if code == Code.LAUNCH:
                        work.is_kernel = one.power > 0
                    else:
                        work.met, rank.batch, work.left = rank.batch, [], scatter[place]
                        rank.events[one.event] = work
                    self._enqueue(rank.stream(one.stream), work)
                    if one.is_blocking:
                        waits = [work]
            elif code == Code.WAIT:
                self._wait_for(rank, one.stream, rank.events.get(one.event))
            elif code == Code.RECORD:
                if (tail := rank.stream(one.stream).tail) is not None:
                    rank.events[one.event] = tail
            elif code == Code.SYNC:
                waits = self._awaited(rank, one.stream, one.event)
            open_ = [work for work in waits if work.end < 0]
            if open_:
                for work in open_:
                    work.has_waiter = True
                rank.waits_for = len(open_)
                rank.now, rank.place = now, place + 1
                return True
            for work in waits:
                now = max(now, work.end + SYNC_NS)
            ends.append(now)
        rank.now = now
        return False

    def _awaited(self, rank: Rank, stream: int, event: int) -> list[DeviceWork]:
        if event >= 0:
            return [rank.events[event]] if event in rank.events else []
        chosen = rank.streams.values() if stream == ALL else [rank.stream(stream)]
        return [one.tail for one in chosen if one.tail is not None]

    def _resume(self, rank: Rank, now: int) -> None:
        rank.waits_for -= 1
        rank.now = max(rank.now, now + SYNC_NS)
        if rank.waits_for == 0:
            rank.host_end.append(rank.now)
            self._advance(rank)

    # ---- device

    def _wait_for(self, rank: Rank, stream: int, awaited: DeviceWork | None) -> None:
        """Let all that comes on the stream wait for `awaited`; an event that nothing was recorded in is done."""
        if awaited is not None:
            rank.stream(stream).waits.append(awaited)

    def _enqueue(self, stream: StreamQueue, work: DeviceWork) -> None:
        for awaited, lag in [(stream.tail, GAP_NS), *((one, EVENT_NS) for one in stream.waits)]:
            if awaited is None:
                continue
            if awaited.end < 0:
                awaited.followers.append((work, lag))
                work.ahead += 1
            else:
                work.ready = max(work.ready, awaited.end + lag)
        stream.waits.clear()
        stream.tail = work
        if work.ahead == 0:
            heappush(self._agenda, (work.ready, next(self._serial), _START, work))

    def _start(self, work: DeviceWork, now: int) -> None:
        rank = work.rank
        rank.starts[work.place] = now
        work.since = now
        if work.met:
            self._change_residents(rank, now, 1)
            work.meetings = len(work.met)
            for meeting in work.met:
                self._come(meeting, work, now)
            return
        if work.is_kernel and self.job.contention_ratio:
            rank.running.add(work)
        self._plan_end(work, now)

    def _plan_end(self, work: DeviceWork, now: int) -> None:
        left = work.left
        if work.is_kernel and work.rank.resident:
            left = round(left * (1 + self.job.contention_ratio))
        heappush(self._agenda, (now + left, next(self._serial), work.version, work))

    def _end(self, work: DeviceWork, now: int) -> None:
        rank = work.rank
        work.end = rank.ends[work.place] = now
        work.version += 1
        if work.met:
            self._change_residents(rank, now, -1)
            work.met = []
        rank.running.discard(work)
        for follower, lag in work.followers:
            follower.ready = max(follower.ready, now + lag)
            follower.ahead -= 1
            if follower.ahead == 0:
                heappush(self._agenda, (follower.ready, next(self._serial), _START, follower))
        work.followers.clear()
        if work.has_waiter:
            self._resume(rank, now)

    def _change_residents(self, rank: Rank, now: int, change: int) -> None:
        """Count the communication kernels on the device; kernels that run beside them get slower or fast again."""
        was, rank.resident = rank.resident, rank.resident + change
        if not rank.running or bool(was) == bool(rank.resident):
            return
        slow = 1 + self.job.contention_ratio
        for work in sorted(rank.running, key=lambda one: one.place):
            done = (now - work.since) / (slow if was else 1)
            work.left = max(round(work.left - done), 0)
            work.since = now
            work.version += 1
            self._plan_end(work, now)

    # ---- meetings

    def _meeting(self, rank: Rank, instruction: Instruction) -> Meeting:
        """Return the collective or message, which the first rank to launch it makes."""
        layout, code = self.job.layout, instruction.code
        group = layout.group(rank.number, instruction.role)
        key: tuple[object, ...] = (group.name,)
        if code != Code.COLLECTIVE:
            other = layout.neighbour(rank.number, instruction.peer)
            key = (group.name, *((rank.number, other) if code == Code.SEND else (other, rank.number)))
        number = rank.counts.get((*key, code == Code.RECV), 0)
        rank.counts[(*key, code == Code.RECV)] = number + 1
        met = self._meetings.get((*key, number))
        if met is None:
            members = len(group.ranks) if code == Code.COLLECTIVE else 2
            met = Meeting(members, self._wire_ns(rank, key, number, instruction.role), self._shared_links(group, key))
            self._meetings[(*key, number)] = met
        met.launched += 1
        if met.launched == met.members:
            del self._meetings[(*key, number)]
        return met

    def _wire_ns(self, rank: Rank, key: tuple[object, ...], number: int, role: str) -> int:
        program, step = rank.program, rank.step
        found = self._wires.get((*key, step))
        if found is None:
            if len(key) == 1:
                found = wires(self.job, program, self.job.layout.group(rank.number, role), step)
            else:
                source, destination = int(str(key[1])), int(str(key[2]))
                code, other = (Code.SEND, destination) if source == rank.number else (Code.RECV, source)
                ones = [program.instructions[place] for place in program.exchanges[role]]
                its = [one for one in ones if one.code == code]
                sizes = [one.bytes for one in its if self.job.layout.neighbour(rank.number, one.peer) == other]
                found = peer_wires(self.job, source, destination, role, sizes, step)
            self._wires[(*key, step)] = found
        return found[number - step * len(found)]

    def _come(self, meeting: Meeting, work: DeviceWork, now: int) -> None:
        """Let the work wait for the others; the last one to come sets all of them on their way."""
        meeting.come.append(work)
        if len(meeting.come) < meeting.members:
            return
        if meeting.links:
            self._change_links(now, meeting, is_over=False)
            return
        for one in meeting.come:
            one.meetings -= 1
            one.leaves = max(one.leaves, now + meeting.wire_ns)
            if one.meetings == 0:
                heappush(self._agenda, (one.leaves + one.left, next(self._serial), one.version, one))

    def _shared_links(self, group: Group, key: tuple[object, ...]) -> tuple[object, ...]:
        """Return what the meeting shares with others while it is under way; nothing where it has links of its own."""
        links, layout = self.job.links, self.job.layout
        if links.nic_shares is None:
            return (group.name,) if links.is_shared and len(key) == 1 else ()
        if len(key) == 1:
            hosts = sorted({layout.host(rank) for rank in group.ranks})
            return tuple((host, way) for host in hosts for way in ("out", "in")) if len(hosts) > 1 else ()
        source, destination = (layout.host(int(str(rank))) for rank in key[1:])
        return ((source, "out"), (destination, "in")) if source != destination else ()

    def _slowdown(self, meeting: Meeting) -> float:
        """Return how many times as long a meeting takes that shares its links with all that are on them now."""
        sharing = max(len(self._on_link[link]) for link in meeting.links)
        return max(sharing / (self.job.links.nic_shares or 1), 1.0)

    def _change_links(self, now: int, meeting: Meeting, *, is_over: bool) -> None:
        """Put a meeting on its links or take it off; all that are on one get equal shares of it from now on."""
        on_links = [self._on_link.setdefault(link, {}) for link in meeting.links]
        others = dict.fromkeys(other for on_link in on_links for other in on_link)
        for other in others:
            other.left_ns -= (now - other.since) / self._slowdown(other)
        for on_link in on_links:
            if is_over:
                del on_link[meeting]
            else:
                on_link[meeting] = None
        if is_over:
            meeting.due = -1
            del others[meeting]
        else:
            others[meeting] = None
        for other in others:
            other.since = now
            other.due = now + max(round(other.left_ns * self._slowdown(other)), 0)
            heappush(self._agenda, (other.due, next(self._serial), _ARRIVED, other.come[0]))

    def _arrived(self, work: DeviceWork, now: int) -> None:
        """Let all ranks leave a meeting whose last byte has come; what was planned before a change is void."""
        for meeting in work.met:
            if meeting.due == now:
                self._change_links(now, meeting, is_over=True)
                for one in meeting.come:
                    one.meetings -= 1
                    one.leaves = max(one.leaves, now)
                    if one.meetings == 0:
                        heappush(self._agenda, (one.leaves + one.left, next(self._serial), one.version, one))


def _instruction(work: DeviceWork) -> Instruction:
    program = work.rank.program
    return program.instructions[work.place % len(program)]


def _lists(drawn: Durations) -> tuple[list[int], ...]:
    before, inside, call, after = drawn.host
    return (
        (before + inside).tolist(),
        (call + after).tolist(),
        drawn.device.tolist(),
        drawn.latency.tolist(),
        drawn.scatter.tolist(),
    )


def _times(rank: Rank) -> RankTimes:
    return RankTimes(
        *(np.array(part, dtype=np.int64) for part in (rank.host_start, rank.host_end, rank.starts, rank.ends))
    )
