"""What does a rank tell the others about its last few steps?  A fixed row of integers: sums and medians by phase.

Sums alone cannot find a straggler: one collection of garbage of 200 ms in four steps looks like 50 ms in each.  The
median of the same steps does not see it.  So sums go into the job's ledger and medians into the diagnosis, which
leaves out the steps that a window of ours disturbed on this rank.

    range     consecutive steps that are told in one row; all ranks cut them alike, by the number of the step
    wall      = data_wait + forward + backward + tail + optimizer + checkpoint + overhead + rest, of each step

`tail` is the wait after autograd is done, for the last all-reduces: the one phase in which a rank waits for others.
Everything else is the rank's own time.  On a device job host timers cannot tell the two apart; `on_device` says so.

Pure; left out: how rows travel (`road`) and what they mean (`diagnosis`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

__all__ = ["PHASES", "WORDS", "RankRange", "StepNote", "WordsError", "decode", "encode", "gather_range"]

PHASES = ("wall", "data_wait", "forward", "backward", "tail", "optimizer", "checkpoint", "overhead", "rest")
"""The columns of a row; `tail` is the hook's `backward_tail`, `rest` what no phase claims."""

VERSION = 1

_HEAD = 10
WORDS = _HEAD + 2 * len(PHASES)
"""Words of 64 bits in a row: 224 bytes a rank and range."""


class _Known(IntFlag):
    """Which optional words of a row were measured."""

    DEVICE = 1
    BUSY = 2
    CPU_WAIT = 4
    SEQUENCE = 8
    THROTTLE = 16
    THROTTLED = 32


class WordsError(ValueError):
    """A row is not what this version writes, or is not of the range that was asked for."""


@dataclass(frozen=True, slots=True)
class StepNote:
    """One finished step, as the hook noted it; nanoseconds by the phases of `StepTimer`."""

    step: int
    wall_ns: int
    phases: Mapping[str, int]
    epoch: int
    disturbed: bool


@dataclass(frozen=True, slots=True)
class RankRange:
    """One rank's row.

    `medians` is None when every step was disturbed.  `busy_ratio` is the time in which the rank's TCP sockets had
    something to send that was not acknowledged, all sockets added up, over the time of the range; `cpu_wait_ns` what
    its training thread waited for a processor; `sequence` the number of the last collective that it entered on the
    job's default group; `is_throttled` whether its device holds its clocks down.  Each None where nobody can tell.
    """

    first_step: int
    steps: int
    epoch: int
    sums: Mapping[str, int]
    medians: Mapping[str, int] | None
    on_device: bool = False
    busy_ratio: float | None = None
    cpu_wait_ns: int | None = None
    sequence: int | None = None
    is_throttled: bool | None = None


def gather_range(
    notes: Sequence[StepNote],
    *,
    on_device: bool = False,
    busy_ratio: float | None = None,
    cpu_wait_ns: int | None = None,
    sequence: int | None = None,
    is_throttled: bool | None = None,
) -> RankRange:
    """Return the row of `notes`, which are consecutive steps and at least one."""
    rows = [_columns(note) for note in notes]
    calm = [row for row, note in zip(rows, notes, strict=True) if not note.disturbed]
    return RankRange(
        first_step=notes[0].step,
        steps=len(notes),
        epoch=notes[-1].epoch,
        sums=dict(zip(PHASES, map(sum, zip(*rows, strict=True)), strict=True)),
        medians=dict(zip(PHASES, map(_median, zip(*calm, strict=True)), strict=True)) if calm else None,
        on_device=on_device,
        busy_ratio=busy_ratio,
        cpu_wait_ns=cpu_wait_ns,
        sequence=sequence,
        is_throttled=is_throttled,
    )


def encode(number: int, row: RankRange) -> list[int]:
    """Return the words of `row`, the `number`-th range."""
    known = _Known(0)
    for flag, is_set in (
        (_Known.DEVICE, row.on_device),
        (_Known.BUSY, row.busy_ratio is not None),
        (_Known.CPU_WAIT, row.cpu_wait_ns is not None),
        (_Known.SEQUENCE, row.sequence is not None),
        (_Known.THROTTLE, row.is_throttled is not None),
        (_Known.THROTTLED, bool(row.is_throttled)),
    ):
        known |= flag if is_set else _Known(0)
    busy = round((row.busy_ratio or 0.0) * 1_000_000)
    medians = row.medians or dict.fromkeys(PHASES, 0)
    head = [VERSION, number, row.first_step, row.steps, row.epoch, int(known), busy, row.cpu_wait_ns or 0]
    head += [row.sequence or 0, int(row.medians is not None)]
    return [*head, *(row.sums[phase] for phase in PHASES), *(medians[phase] for phase in PHASES)]


def decode(number: int, words: Sequence[int]) -> RankRange:
    """Return the row in `words`.

    Raises:
        WordsError: another length, version or range.
    """
    if len(words) != WORDS or words[0] != VERSION:
        raise WordsError(f"{len(words)} words of version {words[0] if words else None}, not {WORDS} of {VERSION}")
    if words[1] != number:
        raise WordsError(f"range {words[1]} where {number} was due")
    known = _Known(words[5])
    sums = dict(zip(PHASES, words[_HEAD : _HEAD + len(PHASES)], strict=True))
    medians = dict(zip(PHASES, words[_HEAD + len(PHASES) :], strict=True))
    return RankRange(
        first_step=words[2],
        steps=words[3],
        epoch=words[4],
        sums=sums,
        medians=medians if words[9] else None,
        on_device=_Known.DEVICE in known,
        busy_ratio=words[6] / 1_000_000 if _Known.BUSY in known else None,
        cpu_wait_ns=words[7] if _Known.CPU_WAIT in known else None,
        sequence=words[8] if _Known.SEQUENCE in known else None,
        is_throttled=_Known.THROTTLED in known if _Known.THROTTLE in known else None,
    )


def _columns(note: StepNote) -> list[int]:
    phases = note.phases
    named = [phases.get(phase if phase != "tail" else "backward_tail", 0) for phase in PHASES[1:-1]]
    return [note.wall_ns, *named, max(0, note.wall_ns - sum(named))]


def _median(values: Sequence[int]) -> int:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2
