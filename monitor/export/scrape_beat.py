"""Forecasts scrapes, so that the daemon writes a page in advance only at ticks that are followed by one.

Writing the page at each tick, with a scrape every 15 s, writes fourteen pages that nobody reads.  Writing it during the
scrape makes the scraper wait for the interpreter behind all collectors.  But scrapers keep their interval to a few
milliseconds, so the next scrape follows from the earlier ones:

    one scraper        . . . . .         the last time plus the interval of the last two
    two, one interval  .  .  .  .        two Prometheus at one address: the last time but one plus its interval

A scraper without a fixed interval that comes as often as ticks is expected at every tick.  An unexpected scrape gets a
page that is written during it.

Pure: times in, a forecast out.
"""

from __future__ import annotations

from collections import deque

__all__ = ["ScrapeBeat"]

SCRAPERS_MAX = 16
"""Sources whose times are kept; the one that was silent for the longest time makes room."""

SHARED_MAX = 3
"""Scrapers with one interval behind one address that are told apart."""

TIMES_KEPT = SHARED_MAX + 2
"""Enough to find the same interval twice, which makes it a beat."""

JITTER_RATIO = 0.05
JITTER_NS_MIN, JITTER_NS_MAX = 50_000_000, 200_000_000
"""How far two intervals may differ, and a scrape may be off its forecast: Prometheus is punctual to milliseconds, or to
tens of them on a busy machine."""

BEATS_MISSED_MAX = 3
"""After this many beats without a scrape, none is expected."""

Times = deque[int]


class ScrapeBeat:
    """The times of scrapes for one form of the page.  One thread at a time."""

    def __init__(self) -> None:
        self._times: dict[str, Times] = {}  # in order of the latest time

    def record(self, source: str, now_ns: int) -> None:
        """Record a scrape by `source` at `now_ns` (monotonic)."""
        times = self._times.pop(source, None)
        if times is None:
            times = deque(maxlen=TIMES_KEPT)
            if len(self._times) >= SCRAPERS_MAX:
                del self._times[next(iter(self._times))]
        times.append(now_ns)
        self._times[source] = times

    def is_due(self, now_ns: int, until_ns: int) -> bool:
        """Return whether a scrape is expected between now and `until_ns`."""
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
    """Return the interval of each of `shared` scrapers; None if it did not repeat."""
    if len(times) < shared + 2:
        return None
    last, before = times[-1] - times[-1 - shared], times[-2] - times[-2 - shared]
    return last if abs(last - before) <= _jitter_ns(last) else None


def _comes(next_ns: int, beat_ns: int, now_ns: int, until_ns: int) -> bool:
    """Return whether `next_ns` or one of the next few beats lies between now and `until_ns`."""
    jitter_ns = _jitter_ns(beat_ns)
    for _ in range(BEATS_MISSED_MAX):
        if next_ns >= now_ns - jitter_ns:
            return next_ns <= until_ns + jitter_ns
        next_ns += beat_ns
    return False


def _jitter_ns(beat_ns: int) -> int:
    return min(max(JITTER_NS_MIN, int(JITTER_RATIO * beat_ns)), JITTER_NS_MAX)
