"""What does a noisy job of several ranks tell its crew?  Steps with heavy tails, bursts, pauses, checkpoints."""

from __future__ import annotations

import random

import msgspec

from pacecar.profiler.ranks.exchange.phase_sums_message import (
    ROWS_MAX,
    HostPressure,
    StepNote,
    decode,
    encode,
    gather_range,
)
from pacecar.profiler.ranks.straggler_detector import StragglerDetector

MS = 1_000_000
PERIOD = 4
BURSTS = 0.0015
"""Bursts a step and rank: of another program on the machine, seen as waiting for a processor, or of unknown origin."""


class _Bursts:
    def __init__(self, rng, steps_max):
        self.rng, self.steps_max, self.left, self.factor = rng, steps_max, 0, 1.0

    def next(self):
        if not self.left and self.rng.random() < BURSTS:
            self.left, self.factor = self.rng.randrange(1, self.steps_max), 1 + 2 * self.rng.random()
        if not self.left:
            return 1.0
        self.left -= 1
        return self.factor


def simulate(seed, *, steps, world=4, slow=None, until=None, busy=None, collects=None):
    """Return [(step, finding)].  `slow` is (from step, rank, phase, ms); phase "link" slows all tails.

    `busy` is the rank whose sockets are busy while the link is slow; None: nobody's are.  `collects(rng, step, rank)`
    is how many ms garbage collection adds to a step of a rank's.
    """
    rng = random.Random(seed)
    diagnosis, heard = StragglerDetector("j", world), []
    shared = _Bursts(rng, 40)
    starved = [_Bursts(rng, 12) for _ in range(world)]
    others = [_Bursts(rng, 6) for _ in range(world)]
    delays = _Bursts(rng, 12)  # everybody waits longer, and some rank's sockets are busy with it: late acknowledgements
    notes, waits, pressed, acknowledged = [[] for _ in range(world)], [0] * world, 0, [0] * world
    for step in range(steps):
        everybody, delay = shared.next(), 25 * (delays.next() - 1)
        is_slow = slow is not None and slow[0] <= step < (until or steps)
        rows = []
        for rank in range(world):
            on_cpu = everybody * starved[rank].next()
            factor = on_cpu * others[rank].next()
            row = {phase: _noisy(rng, ms * factor) for phase, ms in _STEP.items()}
            waits[rank] += int(sum(row.values()) * (1 - 1 / on_cpu))
            rest = _noisy(rng, 0.5) + (int(rng.uniform(5, 80) * MS) if rng.random() < 0.01 else 0)
            rest += int(200 * MS * (1 + 0.1 * rng.random())) if step % 250 == 249 else 0  # validation, on all ranks
            if step % 200 == 199 and rank == 0:
                row["checkpoint"] = 300 * MS
            if is_slow and slow[1] == rank and slow[2] in row:
                row[slow[2]] += slow[3] * MS
            collected = 0 if collects is None else int(collects(rng, step, rank) * MS)
            row["forward"] += collected
            rows.append((row, rest, collected))
        own = [sum(row.values()) + rest for row, rest, _ in rows]
        common = max(own) + int((4 + delay + (slow[3] if is_slow and slow[2] == "link" else 0)) * MS)
        pressed += int(delay * MS) + max(waits) // 2
        acknowledged[rng.randrange(world) if rng.random() < 0.3 else step // 50 % world] += int(delay * MS)
        for rank, (row, rest, collected) in enumerate(rows):
            row["backward_tail"] = common - own[rank] + int(rng.random() * MS)
            wall = sum(row.values()) + rest
            notes[rank].append(StepNote(step, wall, row, 0, rng.random() < 0.02, gc_ns=collected))
        if step % PERIOD == PERIOD - 1:
            heard += [(step, finding) for finding in diagnosis.judge(_range(rng, step, notes, waits, pressed,
                [delayed + (0.8 * common * PERIOD if is_slow and rank == busy else 0.0)
                 for rank, delayed in enumerate(acknowledged)]), step)]  # fmt: skip
            notes, waits, pressed, acknowledged = [[] for _ in range(world)], [0] * world, 0, [0] * world
    return heard


def _range(rng, step, notes, waits, pressed, busy):
    """Return all ranks' rows as they arrive; sockets are busy up to a quarter of the time with nothing in the way."""
    rows = []
    for rank, mine in enumerate(notes):
        row = gather_range(mine, number=step // PERIOD)
        wall = row.sums["wall"]
        around = HostPressure(rng.random() * 0.25 + busy[rank] / wall, waits[rank] / wall, min(1.0, pressed / wall))
        rows.append(msgspec.structs.replace(row, around=around))
    return decode(step, encode(step, rows)).rows if len(rows) <= ROWS_MAX else rows


_STEP = {"data_wait": 0.5, "forward": 5.0, "backward": 10.0, "optimizer": 2.0}


def _noisy(rng, ms):
    tail = 0.3 * rng.paretovariate(1.5) if rng.random() < 0.1 else 0.0
    return int(ms * MS * (1 + 0.15 * abs(rng.gauss(0, 1)) + tail))
