"""Tells the running job's comparison of ranks what its timers would see of a simulated device job.

The shipped `DeviceTimer` records its events into the simulated stream of compute: an event is passed when the host has
recorded it and the stream has done what was put on it before, waits for other streams included.  The shipped
`time_step` adds up what the host did.  Messages of a pipeline lie outside the module's forward and backward, as in a
loop that calls torch's schedules.

Left out: windows, and the overhead of the hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import structs

from pacecar.ledger.attribution import REST
from pacecar.profiler.ranks.exchange.phase_sums_message import (
    HostPressure,
    RankRange,
    StepNote,
    decode,
    encode,
    gather_range,
)
from pacecar.profiler.timing.cuda_timer import DeviceTimer
from pacecar.profiler.timing.step_timer import RawStep, time_step

from .durations import lengths
from .instructions import Code, Phase, Program, Stream
from .job import FaultKind
from .run import Run

__all__ = ["notes_of", "ranges_of"]

_PHASES = {
    Phase.DATA: "data_wait", Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer",
    Phase.CHECKPOINT: "checkpoint",
}  # fmt: skip

TOKENS = 4096
"""Of a microbatch of the usual length."""

_MESSAGES = ("forward", "backward", "pipeline")
"""Roles of the groups that pass activations and gradients up and down a pipeline."""


class _Event:
    """A CUDA event: when the stream passed it."""

    def __init__(self, stream: _ComputeStream) -> None:
        self._stream = stream
        self.passed_ns = 0

    def record(self, _: object = None) -> None:
        self.passed_ns = max(self._stream.now_ns, self._stream.tail_ns)

    def query(self) -> bool:
        return self.passed_ns <= self._stream.now_ns

    def elapsed_time(self, end: _Event) -> float:
        return (end.passed_ns - self.passed_ns) / 1e6


class _ComputeStream:
    """The stream that the job launches into; `now_ns` is the host's time, `tail_ns` the end of what is on it."""

    def __init__(self) -> None:
        self.now_ns = self.tail_ns = 0

    def make(self) -> _Event:
        return _Event(self)

    def record(self, event: _Event) -> int:
        event.record()
        return Stream.COMPUTE

    def is_capturing(self) -> bool:
        return False


class _Place(NamedTuple):
    """One instruction of the step: its phase, and the instruction at whose end compute goes on; -1: at none."""

    phase: str
    awaits: int


def _places(program: Program) -> list[_Place]:
    instructions = program.instructions
    made = {one.event: place for place, one in enumerate(instructions) if one.event >= 0 and one.code <= Code.BATCH}
    work = [p for p, one in enumerate(instructions) if one.phase == Phase.BACKWARD and one.code <= Code.BATCH]
    last_work = max((p for p in work if instructions[p].role not in _MESSAGES), default=-1)
    places = []
    for place, one in enumerate(instructions):
        phase, awaits = _PHASES.get(one.phase, REST), -1
        source = instructions[made[one.event]] if one.code == Code.WAIT and one.event in made else one
        if one.code <= Code.BATCH and one.stream == Stream.COMPUTE:
            awaits = place
        elif one.code == Code.WAIT and one.stream == Stream.COMPUTE and one.event in made:
            awaits = made[one.event]
        if source.role in _MESSAGES or source.code == Code.BATCH:
            phase = REST
        elif phase == "backward" and place > last_work:
            phase = "backward_tail"
        places.append(_Place(phase, awaits))
    return places


def notes_of(run: Run, rank: int) -> list[StepNote]:
    """Return the steps of a rank from the second on; a step ends where the optimizer's does."""
    program, times, stream = run.program(rank), run.times[rank], _ComputeStream()
    places, n = _places(program), len(program)
    timer = DeviceTimer(stream)  # type: ignore[arg-type]  # its events are of this module
    ended: list[tuple[int, RawStep]] = []
    events: list[tuple[str, int, int]] = []
    phase, since, start = REST, int(times.host_start[0]), int(times.host_start[0])
    for number, (host_start, host_end) in enumerate(
        zip(times.host_start.tolist(), times.host_end.tolist(), strict=True)
    ):
        place = places[number % n]
        stream.now_ns = host_start
        if place.phase != phase:
            if phase != REST:
                events.append((phase, since, host_start))
            if phase == "optimizer":
                device = timer.finish()
                ended.append((number // n, RawStep(start, host_start, events, 0, False, None, device)))
                events, start = [], host_start
            else:
                # A loop marks no checkpoint on the device, and what surrounds phases is the rest.
                timer.enter(REST if place.phase == "checkpoint" else place.phase)
            phase, since = place.phase, host_start
        if place.awaits >= 0:
            stream.tail_ns = max(stream.tail_ns, int(times.device_end[number - number % n + place.awaits]))
        stream.now_ns = host_end
    stream.now_ns += 10**12
    for _ in range(len(ended)):
        timer.finish()
    return [_note(run, rank, step, raw) for step, raw in ended[1:]]


def _note(run: Run, rank: int, step: int, raw: RawStep) -> StepNote:
    timed, device = time_step(raw), raw.device
    uneven = next((fault.size for fault in run.job.faults if fault.kind is FaultKind.IMBALANCE), 0.0)
    kinds = [(fault.kind, fault.size) for fault in run.job.faults if fault.hits(rank, step)]
    return StepNote(
        step,
        timed.wall_ns,
        timed.phases,
        0,
        disturbed=False,
        gc_ns=sum(int(size) for kind, size in kinds if kind is FaultKind.GC),
        device=None if device is None else device.phases,
        is_behind=device is not None and device.is_behind,
        work=round(TOKENS * float(lengths(run.job, run.program(rank), rank, step, uneven).sum())),
    )


def ranges_of(
    run: Run, *, throttled: tuple[int, ...] = (), larger: Mapping[int, float] | None = None, period: int = 4
) -> Iterator[list[RankRange]]:
    """Yield the rows of all ranks as rank 0 gets them, range by range.

    `throttled` devices hold their clocks down; `larger` says by what factor a rank's batches are larger where it has a
    fault.
    """
    layout = run.job.layout
    notes = []
    for rank in range(layout.ranks):
        factor = (larger or {}).get(rank, 1.0)
        hit = [any(fault.hits(rank, step) for fault in run.job.faults) for step in range(run.job.all_steps)]
        notes.append([
            structs.replace(note, work=round((note.work or 0) * (factor if hit[note.step] else 1.0)))
            for note in notes_of(run, rank)
        ])  # fmt: skip
    is_sharded = layout.tensor > 1 or (layout.is_sharded and layout.data > 1)
    # As the hook knows by the parameters, and by the ranks of their groups.
    meets_in = frozenset(("forward", "backward") if is_sharded else ()) | ({"rest"} if layout.pipeline > 1 else set())
    for first in range(0, len(notes[0]) - period + 1, period):
        rows = [
            structs.replace(
                gather_range(mine[first : first + period], number=first // period, on_device=True, meets_in=meets_in),
                around=HostPressure(0.0, 0.0, 0.0),
                is_throttled=rank in throttled,
            )
            for rank, mine in enumerate(notes)
        ]
        yield [decode(0, encode(0, [row])).rows[0] for row in rows]
