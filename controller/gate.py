"""May a trial run now?  What the node's daemon says, while it is fresh.

A trial compares step times, so what slows the job besides the knob must not come and go meanwhile: throttled clocks,
somebody else's traffic on the link.  The daemon sees both and says so each few seconds (`HostSignals`).

A signal is believed for AGE_PERIODS of its own periods.  After that nothing is known, and then nothing is held: a
daemon that died must neither stop tuning for good nor promise a quiet node.  What is bad and stays so for
HOLD_SECONDS_MAX is no event but the world, and is tuned for.

    traffic of others   everybody's bytes a second less what the job may be sending itself, as a share of the rated link
                        bad from BUSY_RATIO on, good again under QUIET_RATIO, both for STEADY signals on end: a burst
                        that ends before the next signal is noise, which the statistics are there for

Pure: the caller says what time it is.  Left out: other nodes.  Their ranks mark their own steps as disturbed.
"""

from __future__ import annotations

from pacecar.clock import NS_PER_SECOND
from pacecar.signals import HostSignals

__all__ = ["Gate", "own_bytes_per_second"]

AGE_PERIODS = 3
"""Two signals may be lost or late, as on a node that is busy."""

PERIOD_NS_MAX = 30 * NS_PER_SECOND
"""A daemon that promises to speak less often is not believed for longer than this allows."""

HOLD_SECONDS_MAX = 120.0
"""Longer than a backup's or a checkpoint's burst, shorter than a neighbour's job."""

BUSY_RATIO = 0.2
QUIET_RATIO = 0.1
STEADY = 2

OWN_MARGIN = 1.5
"""Headers, retransmissions, and steps faster than the mean: what may still be the job's own."""


class Gate:
    """Remembers the last signal and since when the node is disturbed; one thread, or a lock around it."""

    def __init__(self) -> None:
        self._signal: HostSignals | None = None
        self._heard_ns = 0
        self._busy = self._quiet = 0
        self._is_busy = False
        self._bad: str | None = None
        self._bad_since_ns = 0

    def heed(self, signal: HostSignals | None, now_ns: int, *, own_bytes_per_second: float | None) -> None:
        """Take what the daemon says; None: there is nobody to say anything.  What the job sends is None if unknown."""
        if self.fresh(now_ns) is None:
            self._busy = self._quiet = 0
            self._is_busy = False  # what was before the silence is not what is
        self._signal, self._heard_ns = signal, now_ns
        if signal is None:
            return
        others = _others_ratio(signal, own_bytes_per_second)
        self._busy = self._busy + 1 if others is not None and others >= BUSY_RATIO else 0
        self._quiet = self._quiet + 1 if others is None or others < QUIET_RATIO else 0
        if self._busy >= STEADY:
            self._is_busy = True
        elif self._quiet >= STEADY:
            self._is_busy = False

    def fresh(self, now_ns: int) -> HostSignals | None:
        """Return the last signal while it may be believed."""
        signal = self._signal
        if signal is None:
            return None
        is_fresh = 0 <= now_ns - self._heard_ns <= AGE_PERIODS * min(max(signal.period_ns, 0), PERIOD_NS_MAX)
        return signal if is_fresh else None

    def reason(self, now_ns: int) -> str | None:
        """Return why no trial shall run now, or None."""
        bad = self._what_is_bad(now_ns)
        if bad is None:
            self._bad = None
            return None
        kind, sentence = bad
        if self._bad != kind:
            self._bad, self._bad_since_ns = kind, now_ns
        return sentence if now_ns - self._bad_since_ns <= HOLD_SECONDS_MAX * NS_PER_SECOND else None

    def headroom_bytes(self, now_ns: int) -> int | None:
        """Return the device memory that nobody uses, this job's neighbours included; None when nobody knows."""
        signal = self.fresh(now_ns)
        return None if signal is None else signal.device_free_bytes

    def link_ratio(self, now_ns: int) -> float | None:
        """Return how full the link is, the fuller direction, as a share of its rated speed; None when nobody knows."""
        signal = self.fresh(now_ns)
        rate = None if signal is None else _rate(signal)
        if signal is None or rate is None or not signal.link_bytes_per_second:
            return None
        return rate / signal.link_bytes_per_second

    def _what_is_bad(self, now_ns: int) -> tuple[str, str] | None:
        signal = self.fresh(now_ns)
        if signal is None:
            return None
        if signal.throttled_by:
            return "throttled", f"this node's device is throttled: {', '.join(signal.throttled_by)}"
        if self._is_busy:
            return "traffic", f"others send over {signal.interface}: over {BUSY_RATIO:.0%} of the link"
        return None


def own_bytes_per_second(
    gradient_bytes: int, *, world_size: int, ranks_on_node: int, pace_ns: int, sent_ratio: float = 1.0
) -> float | None:
    """Return the most that this node's ranks send a second for an all-reduce of all gradients each step.

    A ring sends 2(n-1)/n of the bytes from each rank (Patarasuk and Yuan, JPDC 69, 2009; nccl-tests PERFORMANCE.md); at
    worst all of a node's ranks have their next one on another node.  `sent_ratio` is what compression leaves.
    """
    if pace_ns <= 0 or world_size < 1:
        return None
    sent = 2 * (world_size - 1) / world_size * gradient_bytes * sent_ratio * ranks_on_node
    return sent * NS_PER_SECOND / pace_ns


def _rate(signal: HostSignals) -> float | None:
    rates = [r for r in (signal.receive_bytes_per_second, signal.transmit_bytes_per_second) if r is not None]
    return max(rates) if rates else None


def _others_ratio(signal: HostSignals, own: float | None) -> float | None:
    """Return others' share of the link, None where that cannot be told."""
    rate = _rate(signal)
    if rate is None or own is None or not signal.link_bytes_per_second:
        return None
    return max(0.0, rate - OWN_MARGIN * own) / signal.link_bytes_per_second
