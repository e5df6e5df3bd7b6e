"""Encodes and decodes a rank's message about its last steps: for each range a row of sums and medians by phase.

Sums alone cannot find a straggler: one garbage collection of 200 ms in four steps looks like 50 ms in each, but does
not change the median.  So sums go into the job's ledger and medians into the straggler detector.  Medians leave out
steps that a profiled window disturbed on this rank.

    range     steps that are reported in one row; all ranks cut them alike, by the number of the step (`step_partition`)
    measured  those of them that this rank's hook measured: all, one in k, or by chance none
    wall      = data_wait + forward + backward + tail + optimizer + checkpoint + overhead + stopped + rest, of each step

`tail` is the wait after autograd is done, for the last all-reduces: the one phase in which a rank waits for others.
Everything else is the rank's own time, unless ranks meet in its forward, backward or rest (`meets_in`).  On a
device job (`on_device`) the host launches and goes on, so its phases show neither.  There the row also has the medians
of the phases as the device passed them (`device`): its kernels, its wait for the last all-reduces, and its idle time
where the host is late.

A message holds up to ROWS_MAX rows, all ranges that ended since the last one, and the rank's ledger (`totals`).

Pure.  `gloo_transport` carries messages, and `straggler_detector` judges rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import msgspec

from ..cusum import median
from .totals import TOTALS_WORDS, LedgerTotals, decode_totals, encode_totals

__all__ = [
    "MESSAGE_WORDS",
    "PHASES",
    "ROWS_MAX",
    "SAMPLED_PHASES",
    "VERSION",
    "HostPressure",
    "Message",
    "RangeMessageError",
    "RankRange",
    "StepNote",
    "decode",
    "encode",
    "gather_range",
]

PHASES = ("wall", "data_wait", "forward", "backward", "tail", "optimizer", "checkpoint", "overhead", "stopped", "rest")
"""The columns of a row; `tail` is the hook's `backward_tail`, `rest` what no phase claims."""

DEVICE_PHASES = ("data_wait", "forward", "backward", "tail", "optimizer", "checkpoint", "rest")
"""The columns of a device's medians; the device has no mark of a checkpoint, which is idle time of its `rest`."""

VERSION = 8

ROWS_MAX = 16
"""The most ranges in one message."""

SAMPLED_PHASES = ("forward", "backward", "rest")
"""The phases in which waits are sampled."""

_HEAD = 13
_ROW_WORDS = _HEAD + 2 * len(PHASES) + len(DEVICE_PHASES) + len(SAMPLED_PHASES)
_MESSAGE_HEAD = 4
_ROWS_END = _MESSAGE_HEAD + ROWS_MAX * _ROW_WORDS
MESSAGE_WORDS = _ROWS_END + TOTALS_WORDS
"""Number of 64-bit words in a message: 5656 bytes a rank."""

_PARTS = 1_000_000
"""Ratios are encoded in millionths."""


# Which optional words of a row were measured.  Plain numbers: an IntFlag costs microseconds at each use.
_DEVICE, _BUSY, _CPU_WAIT, _PRESSURE, _THROTTLE, _THROTTLED, _MEDIANS, _FORWARD_WAITS, _GC, _PASSED, _BEHIND = (
    1 << bit for bit in range(11)
)
_BACKWARD_WAITS, _REST_WAITS, _WAITED, _WORK = (1 << bit for bit in range(11, 15))
_MEETINGS = {"forward": _FORWARD_WAITS, "backward": _BACKWARD_WAITS, "rest": _REST_WAITS}
_MEETS = _FORWARD_WAITS | _BACKWARD_WAITS | _REST_WAITS


class RangeMessageError(ValueError):
    """A message has another version's format, or is not the one that was due."""


class StepNote(msgspec.Struct, frozen=True):
    """One finished step as the hook measured it; nanoseconds by the phases of `StepTimer`.

    `every` k: the hook measures one step in k at present.  `gc_ns` is what Python's garbage collector took of the step,
    in whichever phase; None where it is not timed.  `device` are its phases as the device passed them, None where they
    are unknown, and `is_behind` says that the device was more than a step behind its host.  `work` is the size of what
    it trained on, in tokens or elements; None if unknown.
    """

    step: int
    wall_ns: int
    phases: Mapping[str, int]
    epoch: int
    disturbed: bool
    every: int = 1
    gc_ns: int | None = None
    device: Mapping[str, int] | None = None
    is_behind: bool = False
    work: int | None = None


class HostPressure(msgspec.Struct, frozen=True):
    """The kernel's figures for the time around a range, as ratios of that time; None where it cannot be read.

    `busy_ratio` is the time in which the rank's TCP sockets had unacknowledged data, summed over the sockets;
    `cpu_wait_ratio` is the time in which its training thread waited for a processor, and `pressure_ratio` that in which
    any task of the machine did.
    """

    busy_ratio: float | None = None
    cpu_wait_ratio: float | None = None
    pressure_ratio: float | None = None


_UNKNOWN = HostPressure()


class RankRange(msgspec.Struct, frozen=True):
    """One rank's row.

    `steps` belong to the range and `measured` of them are in `sums`; `medians` is None when every measured step was
    disturbed, or none was measured.  `every` k: the hook measures one step in k.  `is_throttled`: its device
    throttles its clocks; None where that is unknown.  `gc_ns` is what garbage collection took of the measured steps,
    None where it is not timed, and `gc_longest_ns` the most of one of them.  `device` are the medians of the phases on
    the device, over the undisturbed steps that have them; None if there are none.  `is_behind`: in most of these the
    device was more than a step behind, so it did not wait for its host.  `meets_in`: which of SAMPLED_PHASES may
    contain waits for other ranks.  `waited` are the waits in SAMPLED_PHASES as ratios of the wall time, by samples of
    the last seconds (`collective_waits`); None without enough of them.  `work` is the median of the undisturbed steps;
    None if one of them has none.
    """

    number: int
    first_step: int
    steps: int
    measured: int
    epoch: int
    every: int
    sums: Mapping[str, int]
    medians: Mapping[str, int] | None
    on_device: bool = False
    meets_in: frozenset[str] = frozenset()
    around: HostPressure = _UNKNOWN
    is_throttled: bool | None = None
    gc_ns: int | None = None
    gc_longest_ns: int = 0
    device: Mapping[str, int] | None = None
    is_behind: bool = False
    waited: Mapping[str, float] | None = None
    work: int | None = None

    @property
    def last_step(self) -> int:
        """The last step that belongs to the range."""
        return self.first_step + self.steps - 1

    @property
    def wall_ns(self) -> int | None:
        """The mean wall time of its measured steps; None when there is none."""
        return self.sums["wall"] // self.measured if self.measured else None


class Message(msgspec.Struct, frozen=True):
    """One rank's part of one gather; `leaves`: it is the last one.  `totals` are None before a calibration."""

    rows: tuple[RankRange, ...]
    leaves: bool = False
    totals: LedgerTotals | None = None


def gather_range(
    notes: Sequence[StepNote],
    *,
    number: int = 0,
    first_step: int | None = None,
    steps: int | None = None,
    epoch: int = 0,
    every: int = 1,
    on_device: bool = False,
    meets_in: frozenset[str] = frozenset(),
) -> RankRange:
    """Return the row of the measured steps `notes` of a range.

    `first_step` and `steps` default to those of `notes`; `epoch` and `every` hold where there is no note.
    """
    columns = [_columns(note) for note in notes]
    collections = [note.gc_ns for note in notes if note.gc_ns is not None]
    calm = [row for row, note in zip(columns, notes, strict=True) if not note.disturbed]
    timed = [note for note in notes if not note.disturbed and note.device is not None]
    work = [note.work for note in notes if not note.disturbed and note.work is not None]
    return RankRange(
        number=number,
        first_step=notes[0].step if first_step is None else first_step,
        steps=len(notes) if steps is None else steps,
        measured=len(notes),
        epoch=notes[-1].epoch if notes else epoch,
        every=notes[-1].every if notes else every,
        sums=dict(zip(PHASES, map(sum, zip(*columns, strict=True)) if notes else [0] * len(PHASES), strict=True)),
        medians=dict(zip(PHASES, map(median, zip(*calm, strict=True)), strict=True)) if calm else None,
        on_device=on_device,
        meets_in=meets_in,
        gc_ns=sum(collections) if len(collections) == len(notes) else None,
        gc_longest_ns=max(collections, default=0),
        device=_device_medians(timed) if timed else None,
        is_behind=2 * sum(note.is_behind for note in timed) > len(timed),
        work=median(work) if work and len(work) == len(calm) else None,
    )


def encode(
    number: int, rows: Sequence[RankRange], *, leaves: bool = False, totals: LedgerTotals | None = None
) -> list[int]:
    """Return the words of the `number`-th message: at most ROWS_MAX rows."""
    assert len(rows) <= ROWS_MAX, f"{len(rows)} rows do not fit into a message"
    words = [VERSION, number, len(rows), int(leaves)]
    for row in rows:
        words += _encode_row(row)
    message = [*words, *([0] * (_ROWS_END - len(words))), *encode_totals(totals)]
    assert len(message) == MESSAGE_WORDS, "messages are all of one size, so that all ranks' fit into one gather"
    return message


def decode(number: int, words: Sequence[int]) -> Message:
    """Return the message in `words`.

    Raises:
        RangeMessageError: another length, version or number, or an impossible count.
    """
    if len(words) != MESSAGE_WORDS or words[0] != VERSION:
        raise RangeMessageError(
            f"{len(words)} words of version {words[0] if words else None}, not {MESSAGE_WORDS} of {VERSION}"
        )
    if words[1] != number or not 0 <= words[2] <= ROWS_MAX:
        raise RangeMessageError(f"message {words[1]} of {words[2]} rows where message {number} was due")
    starts = range(_MESSAGE_HEAD, _MESSAGE_HEAD + words[2] * _ROW_WORDS, _ROW_WORDS)
    rows = tuple(_decode_row(words[start : start + _ROW_WORDS]) for start in starts)
    return Message(rows, leaves=bool(words[3]), totals=decode_totals(words[_ROWS_END:]))


def _encode_row(row: RankRange) -> list[int]:
    around = row.around
    known = (
        _DEVICE * row.on_device
        | sum(_MEETINGS[phase] for phase in row.meets_in)
        | _MEDIANS * (row.medians is not None)
        | _BUSY * (around.busy_ratio is not None)
        | _CPU_WAIT * (around.cpu_wait_ratio is not None)
        | _PRESSURE * (around.pressure_ratio is not None)
        | _THROTTLE * (row.is_throttled is not None)
        | _THROTTLED * bool(row.is_throttled)
        | _GC * (row.gc_ns is not None)
        | _PASSED * (row.device is not None)
        | _BEHIND * row.is_behind
        | _WAITED * (row.waited is not None)
        | _WORK * (row.work is not None)
    )
    head = [row.number, row.first_step, row.steps, row.measured, row.epoch, row.every, known]
    head += [_millionths(around.busy_ratio), _millionths(around.cpu_wait_ratio), _millionths(around.pressure_ratio)]
    head += [row.gc_ns or 0, row.gc_longest_ns, row.work or 0]
    medians = [0] * len(PHASES) if row.medians is None else [row.medians[phase] for phase in PHASES]
    device = [0 if row.device is None else row.device[phase] for phase in DEVICE_PHASES]
    waited = [_millionths(None if row.waited is None else row.waited[phase]) for phase in SAMPLED_PHASES]
    return head + [row.sums[phase] for phase in PHASES] + medians + device + waited


def _decode_row(words: Sequence[int]) -> RankRange:
    number, first_step, steps, measured, epoch, every, known, busy, cpu_wait, pressure, gc_ns, longest, work = words[
        :_HEAD
    ]
    sums, medians, device = _HEAD, _HEAD + len(PHASES), _HEAD + 2 * len(PHASES)
    waited = device + len(DEVICE_PHASES)
    return RankRange(
        number=number,
        first_step=first_step,
        steps=steps,
        measured=measured,
        epoch=epoch,
        every=every,
        sums=dict(zip(PHASES, words[sums:medians], strict=True)),
        medians=dict(zip(PHASES, words[medians:device], strict=True)) if known & _MEDIANS else None,
        on_device=bool(known & _DEVICE),
        meets_in=_meetings(known & _MEETS),
        around=HostPressure(
            busy_ratio=busy / _PARTS if known & _BUSY else None,
            cpu_wait_ratio=cpu_wait / _PARTS if known & _CPU_WAIT else None,
            pressure_ratio=pressure / _PARTS if known & _PRESSURE else None,
        ),
        is_throttled=bool(known & _THROTTLED) if known & _THROTTLE else None,
        gc_ns=gc_ns if known & _GC else None,
        gc_longest_ns=longest,
        device=dict(zip(DEVICE_PHASES, words[device:waited], strict=True)) if known & _PASSED else None,
        is_behind=bool(known & _BEHIND),
        waited=_waited(words[waited:]) if known & _WAITED else None,
        work=work if known & _WORK else None,
    )


@cache
def _meetings(bits: int) -> frozenset[str]:
    return frozenset(phase for phase, bit in _MEETINGS.items() if bits & bit)


def _waited(words: Sequence[int]) -> dict[str, float]:
    return {phase: word / _PARTS for phase, word in zip(SAMPLED_PHASES, words, strict=True)}


def _millionths(ratio: float | None) -> int:
    return round((ratio or 0.0) * _PARTS)


def _columns(note: StepNote) -> list[int]:
    phases = note.phases
    named = [phases.get(phase if phase != "tail" else "backward_tail", 0) for phase in PHASES[1:-1]]
    return [note.wall_ns, *named, max(0, note.wall_ns - sum(named))]


def _device_medians(notes: Sequence[StepNote]) -> dict[str, int]:
    columns = []
    for note in notes:
        passed = dict(note.device or {})
        passed["tail"] = passed.pop("backward_tail", 0)
        rest = passed.get("rest", 0)
        passed["checkpoint"] = min(rest, note.phases.get("checkpoint", 0))
        passed["rest"] = rest - passed["checkpoint"]
        columns.append([passed.get(phase, 0) for phase in DEVICE_PHASES])
    return dict(zip(DEVICE_PHASES, map(median, zip(*columns, strict=True)), strict=True))
