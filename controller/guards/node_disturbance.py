"""Decides from the signals of the node's daemon whether a trial may run now.

A trial compares step times, so whatever else slows the job must not come and go meanwhile: throttled clocks, a fault, a
shortage of memory, other traffic on the link.  The daemon reports these every few seconds (`HostSignals`).

A signal is valid for AGE_PERIODS of its own periods from its tick.  After that nothing is known and nothing is held: a
dead daemon must neither stop tuning for good nor promise a quiet node.  A disturbance that lasts HOLD_SECONDS_MAX is a
condition of the job, and tuning goes on with it.  So is one that keeps coming and going: the time that it may hold
tuning grows back slowly (REGAIN_RATIO).

    traffic of others   all bytes a second less what the job may be sending itself, as a share of the rated link; bad
    from
                        BUSY_RATIO on, good again under QUIET_RATIO, both for STEADY signals in a row, because the
                        statistics can handle a burst that ends before the next signal
    memory              some task waited for memory (PSI) for STALLED_RATIO of the time

Waiting for a processor does not count: a job that keeps all of them busy waits for them itself, and a node's total does
not tell who else does.  A rank that other programs keep from running is a straggler (`tuning_pause`).

Pure: the caller passes the time.  Left out: other nodes, which their own ranks report (`node_monitor`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from pacecar.clock import NS_PER_SECOND
from pacecar.records.host_signals import HostSignals

__all__ = ["WORDS", "Disturbance", "DisturbanceGate", "own_bytes_per_second"]

AGE_PERIODS = 3
"""Two signals may be lost or late on a busy node."""

PERIOD_NS_MAX = 30 * NS_PER_SECOND
"""Longest period that counts for AGE_PERIODS."""

HOLD_SECONDS_MAX = 120.0
"""Longer than the burst of a backup or a checkpoint, shorter than a neighbour's job."""

REGAIN_RATIO = 0.25
"""Share of undisturbed time by which the time that a disturbance may hold tuning grows back.  One that is present a
fifth of the time belongs to the job, perhaps its data loading over the same link."""

BUSY_RATIO = 0.2
QUIET_RATIO = 0.1
STEADY = 2

STALLED_RATIO = 0.1
"""A node that waits this much for memory reclaims and swaps, which decides how long steps take."""

OWN_MARGIN = 1.5
"""Allows for headers, retransmissions, and steps faster than the mean in the job's own traffic."""


class Disturbance(IntEnum):
    """What makes step times invalid for comparing knobs; ranks send each other the numbers."""

    FAULT = 1
    THROTTLED = 2
    MEMORY = 3
    TRAFFIC = 4


WORDS: Mapping[Disturbance, str] = {
    Disturbance.FAULT: "its device has a fault",
    Disturbance.THROTTLED: "its device is throttled",
    Disturbance.MEMORY: "its node is short of memory",
    Disturbance.TRAFFIC: "others use its node's link",
}
"""The reason shown for another rank's disturbance, of which only the kind is known."""


class DisturbanceGate:
    """Keeps the last signal, and how long each disturbance may still hold tuning.  For one thread."""

    def __init__(self) -> None:
        self._signal: HostSignals | None = None
        self._busy = self._quiet = 0
        self._is_busy = False
        self._held: Disturbance | None = None
        self._exhausted: set[Disturbance] = set()
        self._hold_left_ns = dict.fromkeys(Disturbance, HOLD_SECONDS_MAX * NS_PER_SECOND)
        self._asked_ns: int | None = None

    def record(self, signal: HostSignals | None, now_ns: int, *, own_bytes_per_second: float | None) -> None:
        """Take the daemon's signal, None without a daemon; and what the job sends, None if unknown."""
        if self.fresh(now_ns) is None:
            self._busy = self._quiet = 0
            self._is_busy = False  # what was true before the gap may not be now
        self._signal = signal
        if signal is None:
            return
        others = _others_ratio(signal, own_bytes_per_second)
        self._busy = self._busy + 1 if others is not None and others >= BUSY_RATIO else 0
        self._quiet = self._quiet + 1 if others is None or others < QUIET_RATIO else 0
        if self._busy >= STEADY:
            self._is_busy = True
        elif self._quiet >= STEADY:
            self._is_busy = False

    @property
    def last(self) -> HostSignals | None:
        """The last signal of any age; None without a daemon."""
        return self._signal

    def fresh(self, now_ns: int) -> HostSignals | None:
        """Return the last signal while it is valid."""
        signal = self._signal
        if signal is None:
            return None
        is_fresh = 0 <= now_ns - signal.taken_ns <= AGE_PERIODS * min(signal.period_ns, PERIOD_NS_MAX)
        return signal if is_fresh else None

    def reason(self, now_ns: int) -> tuple[Disturbance, str] | None:
        """Return why no trial may run now, or None.  Call it at every vote: it counts the time between calls."""
        bad = self._disturbances(now_ns)
        elapsed_ns = 0 if self._asked_ns is None else max(0, now_ns - self._asked_ns)
        self._asked_ns = now_ns
        self._exhausted &= bad.keys()
        for kind in Disturbance:
            if kind is self._held:
                self._hold_left_ns[kind] -= elapsed_ns
            elif kind not in bad:
                regained = self._hold_left_ns[kind] + REGAIN_RATIO * elapsed_ns
                self._hold_left_ns[kind] = min(HOLD_SECONDS_MAX * NS_PER_SECOND, regained)
            if self._hold_left_ns[kind] < 0 and kind in bad:
                self._exhausted.add(kind)
        self._held = next((kind for kind in Disturbance if kind in bad and kind not in self._exhausted), None)
        return None if self._held is None else (self._held, bad[self._held])

    def link_ratio(self, now_ns: int) -> float | None:
        """Return the use of the link's fuller direction as a share of its rated speed; None if unknown."""
        signal = self.fresh(now_ns)
        rate = None if signal is None else _rate(signal)
        if signal is None or rate is None or not signal.link_bytes_per_second:
            return None
        return rate / signal.link_bytes_per_second

    def _disturbances(self, now_ns: int) -> dict[Disturbance, str]:
        """Return every present disturbance with a sentence."""
        signal = self.fresh(now_ns)
        bad: dict[Disturbance, str] = {}
        if signal is None:
            return bad
        if signal.faults:
            bad[Disturbance.FAULT] = f"this node's device has a fault: {', '.join(signal.faults)}"
        if signal.throttled_by:
            bad[Disturbance.THROTTLED] = f"this node's device is throttled: {', '.join(signal.throttled_by)}"
        stalled = signal.memory_stalled_ratio
        if stalled is not None and stalled >= STALLED_RATIO:
            bad[Disturbance.MEMORY] = f"this node is short of memory: tasks waited for it {stalled:.0%} of the time"
        if self._is_busy:
            bad[Disturbance.TRAFFIC] = f"others send over {signal.interface}: over {BUSY_RATIO:.0%} of the link"
        return bad


def own_bytes_per_second(
    gradient_bytes: int, *, world_size: int, ranks_on_node: int, pace_ns: int, sent_ratio: float = 1.0
) -> float | None:
    """Return the most bytes a second that this node's ranks send to all-reduce all gradients each step.

    A ring sends 2(n-1)/n of the bytes from each rank (Patarasuk and Yuan, JPDC 69, 2009; nccl-tests PERFORMANCE.md); in
    the worst case each rank of the node sends to another node.  `sent_ratio` is what compression leaves.
    """
    if pace_ns <= 0 or world_size < 1:
        return None
    sent = 2 * (world_size - 1) / world_size * gradient_bytes * sent_ratio * ranks_on_node
    return sent * NS_PER_SECOND / pace_ns


def _rate(signal: HostSignals) -> float | None:
    rates = [r for r in (signal.receive_bytes_per_second, signal.transmit_bytes_per_second) if r is not None]
    return max(rates) if rates else None


def _others_ratio(signal: HostSignals, own: float | None) -> float | None:
    """Return the share of the link that others use; None where it cannot be computed."""
    rate = _rate(signal)
    if rate is None or own is None or not signal.link_bytes_per_second:
        return None
    return max(0.0, rate - OWN_MARGIN * own) / signal.link_bytes_per_second
