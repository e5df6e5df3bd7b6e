"""Decides when the ranks' steps are worth a cross-rank window.

A rank that seems late is one reason.  The others are signs that some rank is late although the always-on timers cannot
tell which, as where all ranks meet many times a step (sharded parameters, tensor parallelism):

    longer     the steps of the whole job have become longer, for SLOWER_RANGES ranges in a row, and not in proportion
               to their work
    uneven     the ranks' exposed communication, the time for which they wait for each other, is high and uneven

A window that changed nothing makes the next one rarer, and steps of the new length are then the usual ones.

Pure: rows of ranges, totals and suspicions in, a decision out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pacecar.clock import NS_PER_SECOND

from ..cusum import median
from ..exchange.phase_sums_message import RankRange
from ..exchange.totals import LedgerTotals

__all__ = ["Pace", "WindowTrigger"]

UNEVEN_RATIO = 0.10
UNEVEN_NS = 1_000_000
"""The ranks' exposed communication is uneven if it differs by this share of a step, and by as much time.  Steps are
longer by the same measure."""

UNEVEN_LOOKS = 3
"""Totals in a row that must be uneven; they are based on windows of different steps."""

LOOK_STEPS = 8
"""Steps between two looks at totals."""

PAUSE_SECONDS = 60.0
PAUSE_SECONDS_MAX = 3600.0
"""The least time between two windows; it doubles for each that changed nothing."""

RETRY_SECONDS = 20.0
"""Time between two offers while a rank refuses."""

SLOWER_RANGES = 3

FIRST_RANGES = 4
"""Ranges that are left out: the first steps allocate, compile and fill caches."""

USUAL_MIN = 4
USUAL_MAX = 32
"""Ranges from which the usual length of a step is known."""

NOISE_FACTOR = 3.0
"""Longer steps exceed this multiple of the median difference between usual ones.  By chance they do so now and then,
but seldom SLOWER_RANGES times in a row, and a window for nothing costs no more than its price."""


class Pace:
    """Whether the job's steps have become longer, or are as short again as before that."""

    def __init__(self) -> None:
        self._skipped = self._short = 0
        self._usual: deque[int] = deque(maxlen=USUAL_MAX)
        self._work: deque[int] = deque(maxlen=USUAL_MAX)
        self._longer: deque[int] = deque(maxlen=USUAL_MAX)
        self._epoch: int | None = None
        self._before: int | None = None
        self.is_slower = False
        """Whether steps are longer than usual."""
        self.has_recovered = False
        """Whether steps were longer, and no longer are."""

    def add(self, rows: Sequence[RankRange]) -> None:
        """Add a range of all ranks; one without an undisturbed step on some rank is left out."""
        walls = [row.medians["wall"] for row in rows if row.medians is not None]
        if len(walls) < len(rows):
            return
        if self._epoch != rows[0].epoch:  # the knobs changed, and with them the usual length
            self._epoch, self._before, self.is_slower = rows[0].epoch, None, False
            self._usual.clear()
            self._work.clear()
            self._longer.clear()
        self._skipped += 1
        if self._skipped <= FIRST_RANGES:
            return
        wall = median(walls)
        bound = self._bound(rows)
        if bound is None or wall <= bound:
            self._usual.extend([*self._longer, wall])
            self._longer.clear()
            self.is_slower = False
        else:
            self._longer.append(wall)
            self.is_slower = len(self._longer) >= SLOWER_RANGES
        self._short = self._short + 1 if self._before is not None and wall <= self._before else 0
        self.has_recovered = self._short >= SLOWER_RANGES
        if self.has_recovered:
            self._before = None
            self._usual.clear()

    def ordered(self) -> None:
        """Keep how long steps were before they became longer: a window is to look into it."""
        if self.is_slower and self._before is None:
            self._before = self._limit()

    def accept(self) -> None:
        """Take the present length for the usual one: a window has looked at it."""
        if self._longer:
            self._usual.clear()
            self._usual.extend(self._longer)
            self._longer.clear()
        self.is_slower = False

    def _bound(self, rows: Sequence[RankRange]) -> int | None:
        """Return the length from which on steps with the work of `rows` are longer than usual; None if unknown."""
        work = [row.work for row in rows if row.work is not None]
        more = 1.0
        if len(work) == len(rows):
            if len(self._work) >= USUAL_MIN:
                more = max(1.0, max(work) / max(1, median(self._work)))
            if not self._longer:
                self._work.append(max(work))
        return None if len(self._usual) < USUAL_MIN else round(self._limit() * more)

    def _limit(self) -> int:
        usual = median(self._usual)
        noise = median([abs(wall - usual) for wall in self._usual])
        return usual + max(UNEVEN_NS, round(UNEVEN_RATIO * usual), round(NOISE_FACTOR * noise))


class WindowTrigger:
    """The suspicion that a window would clear up."""

    def __init__(self) -> None:
        self._before: Sequence[LedgerTotals] = ()
        self._uneven = self._even = 0
        self._judged_step = 0
        self._is_named = False
        self._pace = Pace()
        self.is_outdated = False
        """Whether the window under way was ordered for longer steps alone, which have become short again since."""
        self._next_ns = 0
        self._pause_seconds = PAUSE_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether the job is as it was before a rank seemed late: as fast, or with even waits."""
        return self._pace.has_recovered or self._even >= UNEVEN_LOOKS

    def named(self) -> None:
        """Record that the detector names a rank anew."""
        self._is_named = True

    def add(self, rows: Sequence[RankRange]) -> None:
        """Add a range of all ranks."""
        self._pace.add(rows)
        self.is_outdated |= self._pace.has_recovered and not self._is_named

    def look(self, totals: Sequence[LedgerTotals | None]) -> None:
        """Add the ledgers of all ranks so far."""
        known = [each for each in totals if each is not None]
        if len(known) < len(totals) or len(known) < 2:
            return
        if len(self._before) != len(known):
            self._before = known
            return
        waits, walls = [], []
        for now, before in zip(known, self._before, strict=True):
            if now.steps - before.steps < LOOK_STEPS:
                return
            steps = now.steps - before.steps
            waited_ns = now.ledger.exposed_communication_ns - before.ledger.exposed_communication_ns
            waits.append(waited_ns // steps)
            walls.append((now.ledger.wall_ns - before.ledger.wall_ns) // steps)
        self._before = known
        is_uneven = max(waits) - min(waits) > max(UNEVEN_NS, UNEVEN_RATIO * max(walls))
        is_new = all(each.step - each.age_steps > self._judged_step for each in known)
        self._uneven = self._uneven + 1 if is_uneven else 0
        self._even = self._even + 1 if is_new and not is_uneven else 0

    def is_due(self, now_ns: int) -> bool:
        """Return whether a window should be ordered."""
        is_suspected = self._is_named or self._pace.is_slower or self._uneven >= UNEVEN_LOOKS
        return is_suspected and now_ns >= self._next_ns

    def ordered(self) -> None:
        """Record that a window is ordered."""
        self.is_outdated = False
        self._pace.ordered()

    def put_off(self, now_ns: int) -> None:
        """Record that a window could not be ordered now."""
        self._next_ns = now_ns + round(RETRY_SECONDS * NS_PER_SECOND)

    def done(self, now_ns: int, step: int, *, has_changed: bool) -> None:
        """Record the end of a window, at `step`, and whether it changed what is known."""
        self._pause_seconds = PAUSE_SECONDS if has_changed else min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
        self._next_ns = now_ns + round(self._pause_seconds * NS_PER_SECOND)
        self._is_named, self._uneven, self._even, self._judged_step = False, 0, 0, step
        self._pace.accept()
