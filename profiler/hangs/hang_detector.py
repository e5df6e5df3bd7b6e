"""Suspects that this rank hangs when no step has ended for much longer than steps take.

The training thread is the one that hangs, so another thread checks how long ago the last step ended.  Once that is
longer than the larger of `hang_seconds` and STEPS times the median step, it reports once: the phase of the training
thread, its line of Python, and the collective it entered last.  It withdraws the suspicion when a step ends.

A long step is not a hang.  A checkpoint announces itself (`checkpoint()`) and may take CHECKPOINT_SECONDS.  A forward,
in training or evaluation, is a sign of life.  Any other work between steps may take `hang_seconds`.  The first step,
which may compile for minutes, may take FIRST_SECONDS.  If no rank waits for another (`hang_watch`), a silence may take
`inquiry.IDLE_SECONDS`.

If the model keeps running in training but no step ends, something unobserved updates it; `unseen_ns` returns for how
long.  A stopped process cannot report; the other ranks' reports and the age of its last record in the daemon show it.

Long before that, `is_quiet` says that it is time to ask all ranks (`hang_watch`): after QUIET_SECONDS, or QUIET_STEPS
median steps.  It is often wrong and costs an inquiry.  `is_longer_than_steps` says earlier that it is time to compare
the ranks' counters, which costs little.  `patience_ns` is how long ranks of this job have been silent before without a
hang, with a margin: a rank that may merely be slow is not blamed before that.

Pure except for the stack that `where` reads.  `torch_flight_recorder` shows the collective that the rank is in.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from statistics import median_high

from pacecar.formatting.plain_text import clean

from ..hook.loading import TimedLoader
from .inquiry import IDLE_SECONDS

__all__ = ["HangDetector", "Suspicion", "is_in_loader", "where"]

STEPS = 30
"""How many median steps one step may take before it is suspected."""

CHECKPOINT_SECONDS = 1800.0
FIRST_SECONDS = 1800.0

QUIET_SECONDS = 5.0
QUIET_STEPS = 5
COMPARE_SECONDS = 1.0
"""The least silence after which counters are compared."""

QUIET_SECONDS_FIRST = 30.0
"""The first step may compile; a job that hangs in its first collective is still found."""

PATIENCE_SECONDS = 10.5
"""The least silence after which a rank that may merely be slow is blamed: 15 s with the last round of an inquiry."""

PATIENCE_RATIO = 1.5
"""How much longer than the longest pause so far the next one may be."""

PAUSE_NS_MIN = 1_000_000_000
PAUSES = 16
"""Pauses longer than PAUSE_NS_MIN are kept, so many of each kind."""

_STEP, _CHECKPOINT = "step", "checkpoint"
"""Kinds of pauses; the latter is a phase as well."""

RECENT = 64
"""The median is over this many recent steps."""

FRAMES = 3
"""The number of innermost Python frames to report."""

FRAMES_DEPTH_MAX = 64


@dataclass(frozen=True, slots=True)
class Suspicion:
    """This rank has not ended step `step` for `silent_ns`, or has now (`has_ended`)."""

    step: int
    phase: str
    silent_ns: int
    has_ended: bool = False


class HangDetector:
    """Records steps and is checked by a thread of ours; all times are monotonic nanoseconds."""

    def __init__(self, hang_ns: int, now_ns: int) -> None:
        self._hang_ns = hang_ns
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._step = 0
        self._since_ns = now_ns
        self._raised: Suspicion | None = None
        self._raised_since_ns = now_ns
        self._pauses: dict[str, deque[int]] = {}
        self._pause: tuple[int, str, int] = (now_ns, _STEP, 0)
        """Since when the present pause lasts, its kind, and how long it was when last looked at."""

    @property
    def median_ns(self) -> int | None:
        """The median duration of recent steps; None before the first one."""
        return median_high(self._recent) if self._recent else None

    def stepped(self, step: int, wall_ns: int, ended_ns: int) -> None:
        """Record that step number `step` ended."""
        self._recent.append(wall_ns)
        self._step = max(self._step, step + 1)
        self._since_ns = max(self._since_ns, ended_ns)

    def seen(self, step: int, now_ns: int) -> None:
        """Record that step number `step` has begun, whether or not earlier ones were measured."""
        if step > self._step:
            self._step = step
            self._since_ns = max(self._since_ns, now_ns)

    def is_doubtful(self, now_ns: int, phase: str) -> bool:
        """Return whether half the time until a suspicion or an inquiry has passed, by the steps alone."""
        return 2 * (now_ns - self._since_ns) > min(self._bound_ns(phase), self.quiet_ns)

    def unseen_ns(self, now_ns: int, phase: str, trained_ns: int | None) -> int | None:
        """Return for how long no step ended though the model trained at `trained_ns`; None if that is not unusual."""
        silent = now_ns - self._since_ns
        if silent <= self._bound_ns(phase) or trained_ns is None or 2 * (trained_ns - self._since_ns) < silent:
            return None
        return silent

    def check(self, now_ns: int, phase: str, alive_ns: int | None = None, *, is_idle: bool = False) -> Suspicion | None:
        """Return a new suspicion or the end of one.

        `alive_ns` is the last sign of life besides steps; with `is_idle` no rank of the job waits for another.
        """
        since = max(self._since_ns, alive_ns or 0)
        silent = now_ns - since
        is_hung = silent > max(self._bound_ns(phase), round(IDLE_SECONDS * 1e9) if is_idle else 0)
        raised = self._raised
        if raised is None and is_hung:
            self._raised = Suspicion(self._step, phase, silent)
            self._raised_since_ns = since
            return self._raised
        if raised is not None and not is_hung:
            self._raised = None
            return Suspicion(raised.step, raised.phase, max(0, since - self._raised_since_ns), has_ended=True)
        return None

    def silent_ns(self, now_ns: int, alive_ns: int | None) -> int:
        """Return how long there has been no sign of life."""
        return max(0, now_ns - max(self._since_ns, alive_ns or 0))

    def is_quiet(self, now_ns: int, phase: str, alive_ns: int | None) -> bool:
        """Return whether it is time to ask all ranks; learns how long pauses of this kind last."""
        silent, since = self.silent_ns(now_ns, alive_ns), max(self._since_ns, alive_ns or 0)
        began, kind, lasted = self._pause
        if since != began:
            # A checkpoint in which the process was stopped for a moment is not over.
            is_saving = kind == phase == _CHECKPOINT and since > self._since_ns
            if lasted >= PAUSE_NS_MIN and not is_saving:
                self._pauses.setdefault(kind, deque(maxlen=PAUSES)).append(max(lasted, since - began))
            kind = _kind(phase)
        self._pause = since, _CHECKPOINT if phase == _CHECKPOINT else kind, silent
        return silent > self.quiet_ns

    def is_longer_than_steps(self, now_ns: int, phase: str, alive_ns: int | None) -> bool:
        """Return whether no step has ended for longer than this job's steps and announced checkpoints explain."""
        if self.median_ns is None or phase == _CHECKPOINT:
            return False
        return self.silent_ns(now_ns, alive_ns) > max(round(COMPARE_SECONDS * 1e9), QUIET_STEPS * self.median_ns)

    @property
    def quiet_ns(self) -> int:
        """How long a silence is before all ranks are asked."""
        median = self.median_ns
        if median is None:
            return round(QUIET_SECONDS_FIRST * 1e9)
        return max(round(QUIET_SECONDS * 1e9), QUIET_STEPS * median)

    def patience_ns(self, phase: str) -> int:
        """Return how long this rank may be silent in `phase` by what it has seen so far."""
        longest = max(self._pauses.get(_kind(phase), ()), default=None)
        if self.median_ns is None or (phase == _CHECKPOINT and longest is None):
            return self._bound_ns(phase)
        usual = max(QUIET_STEPS * self.median_ns, round(PATIENCE_RATIO * (longest or 0)))
        return min(max(round(PATIENCE_SECONDS * 1e9), usual), self._bound_ns(phase))

    def forget_pause(self) -> None:
        """Do not learn from the present pause, which is a hang."""
        began, kind, _ = self._pause
        self._pause = began, kind, 0

    def _bound_ns(self, phase: str) -> int:
        if phase == "checkpoint":
            return round(CHECKPOINT_SECONDS * 1e9)
        median = self.median_ns
        return round(FIRST_SECONDS * 1e9) if median is None else max(self._hang_ns, STEPS * median)


def _kind(phase: str) -> str:
    return _CHECKPOINT if phase == _CHECKPOINT else _STEP


def where(thread: int) -> str | None:
    """Return the innermost Python frames of the thread with ident `thread`, outermost first; None if it is gone."""
    frame = sys._current_frames().get(thread)
    found: list[str] = []
    for _ in range(FRAMES_DEPTH_MAX):
        if frame is None or len(found) == FRAMES:
            break
        code = frame.f_code
        found.append(f"{code.co_name} ({'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno})")
        frame = frame.f_back
    return clean(" > ".join(reversed(found))) or None


def is_in_loader(thread: int) -> bool:
    """Return whether thread `thread` waits for data: only then the hook's timed loader is on its stack."""
    frame = sys._current_frames().get(thread)
    for _ in range(FRAMES_DEPTH_MAX):
        if frame is None:
            return False
        if frame.f_code is TimedLoader.__iter__.__code__:
            return True
        frame = frame.f_back
    return False
