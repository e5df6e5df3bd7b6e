"""Learns when scrapers come, so that a page is written in advance only for a tick that one will ask for.

A daemon that writes the page at each tick and is scraped every 15 s writes fifteen, of which nobody reads fourteen.  To
write it in the scrape instead makes the scraper wait, behind all collectors that want the interpreter.  But a scraper
keeps its beat to a few milliseconds.  So from the times at which each came the next is computed:

    one scraper        . . . . .         the last time, and the time between the last two
    two of one beat    .  .  .  .        two Prometheus of one address: the time before the last, and the time from it

A scraper that keeps no beat, but comes as often as ticks do, is expected at every tick.  A scrape that was not
foreseen is answered all the same, with a page that is written then.

Pure: times in, a forecast out.  Left out: what is written (`pages`) and when ticks come.
"""

from __future__ import annotations

from collections import deque

__all__ = ["ScrapeBeat"]

SCRAPERS_MAX = 16
"""Sources whose times are kept; the one that was silent for longest makes room."""

SHARED_MAX = 3
"""Scrapers of one beat behind one address that are told apart."""

TIMES_KEPT = SHARED_MAX + 2
"""What it takes to find the same interval twice: then it is a beat."""

JITTER_RATIO = 0.05
JITTER_NS_MIN, JITTER_NS_MAX = 50_000_000, 200_000_000
"""How far two intervals may differ, and how much earlier or later than forecast a scrape may come: Prometheus keeps its
beat to milliseconds, on a busy machine to tens of them."""

BEATS_MISSED_MAX = 3
"""After so many beats without a scrape it is expected no more."""

Times = deque[int]


class ScrapeBeat:
    """The times at which scrapers asked for one form of the page.  One thread at a time."""

    def __init__(self) -> None:
        self._times: dict[str, Times] = {}  # in order of the latest time

    def record(self, source: str, now_ns: int) -> None:
        """Take a scrape by `source` at `now_ns` (monotonic)."""
        times = self._times.pop(source, None)
        if times is None:
            times = deque(maxlen=TIMES_KEPT)
            if len(self._times) >= SCRAPERS_MAX:
                del self._times[next(iter(self._times))]
        times.append(now_ns)
        self._times[source] = times

    def is_due(self, now_ns: int, until_ns: int) -> bool:
        """Return whether a scrape is to be expected between now and `until_ns`."""
        return any(_is_due(times, now_ns, until_ns) for times in self._times.values())


def _is_due(times: Times, now_ns: int, until_ns: int) -> bool:
    ahead_ns = until_ns - now_ns
    for shared in range(1, SHARED_MAX + 1):
        beat_ns = _beat_ns(times, shared)
        if beat_ns is not None and beat_ns > ahead_ns:
            return _comes(times[-shared] + beat_ns, beat_ns, now_ns, until_ns)
    is_fast = len(times) > 1 and times[-1] - times[-2] <= ahead_ns
    return is_fast and now_ns - times[-1] <= BEATS_MISSED_MAX * ahead_ns


def _beat_ns(times: Times, shared: int) -> int | None:
    """Return the time between two scrapes of the same of `shared` scrapers; None where it was not found twice."""
    if len(times) < shared + 2:
        return None
    last, before = times[-1] - times[-1 - shared], times[-2] - times[-2 - shared]
    return last if abs(last - before) <= _jitter_ns(last) else None


def _comes(next_ns: int, beat_ns: int, now_ns: int, until_ns: int) -> bool:
    """Return whether `next_ns`, or one of the few beats after it, lies between now and `until_ns`."""
    jitter_ns = _jitter_ns(beat_ns)
    for _ in range(BEATS_MISSED_MAX):
        if next_ns >= now_ns - jitter_ns:
            return next_ns <= until_ns + jitter_ns
        next_ns += beat_ns
    return False


def _jitter_ns(beat_ns: int) -> int:
    return min(max(JITTER_NS_MIN, int(JITTER_RATIO * beat_ns)), JITTER_NS_MAX)
