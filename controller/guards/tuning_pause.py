"""Pauses tuning while a straggler, a hang or a disturbed node makes step times useless for comparing knobs.

A rank that is throttled or hangs slows every step of the job, and the tuner would measure that rank.  So while a
straggler, a hang or a disturbance of some rank's node (`node_monitor`) is reported, the policy is held: its trial is
taken back, nothing is judged, and it goes on when the report ends.

A straggler that stays is a condition of the job: after STRAGGLER_STEPS_MAX steps tuning goes on with it, and after
KNOB_STEPS_MAX if a link is slow or data comes late, because communication and loader knobs may help against those.  The
change detector then opens the search.

Records come from the rank monitor's thread, the tuner asks on the training thread, neither waits.
Left out: a loss that is not finite (`compression_rollback`); checkpoints and evaluations, whose steps are marked one by
one (`tuner`) and not judged.
"""

from __future__ import annotations

import threading

from pacecar.records import Cause, HangSuspicion, JobRecord, Straggler

from ..observation import Guard
from .node_monitor import NodeMonitor

__all__ = ["TuningPause"]

STRAGGLER_STEPS_MAX = 512
"""As long as a new search takes; a rank that is still slow then will stay slow."""

KNOB_STEPS_MAX = 64
"""The same for causes that a knob may help against: some windows, so that none spans the change."""

_KNOB_CAUSES = frozenset({Cause.LINK, Cause.DATA_WAIT})

REASONS_MAX = 64
"""Most late or hung ranks kept: the first ones are reason enough."""


class TuningPause(Guard):
    """The present reasons to pause, from records and from `node`.  A thread-safe sink for records."""

    def __init__(self, node: NodeMonitor | None = None) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._late: dict[tuple[int | None, Cause], Straggler] = {}
        self._hung: dict[int, HangSuspicion] = {}
        self._missed: HangSuspicion | None = None  # reported once afterwards: ranks that hang observe no steps

    def put(self, record: JobRecord) -> None:
        """Take a record; only stragglers and hangs count."""
        if isinstance(record, Straggler):
            key = (record.late_rank, record.cause)
            with self._lock:
                if record.ended:
                    self._late.pop(key, None)
                elif key in self._late or len(self._late) < REASONS_MAX:
                    self._late.setdefault(key, record)
        elif isinstance(record, HangSuspicion):
            with self._lock:
                if record.ended:
                    self._hung.pop(record.rank, None)
                elif record.rank in self._hung or len(self._hung) < REASONS_MAX:
                    self._hung[record.rank] = self._missed = record

    @property
    def dropped(self) -> int:
        """Always 0: a record that does not fit would only repeat a reason."""
        return 0

    def close(self, timeout_seconds: float) -> None:
        """Do nothing: nothing is queued."""

    def pause_reason(self, step: int) -> str | None:
        """Return why tuning must pause at `step`, or None."""
        with self._lock:
            hung, self._missed = next(iter(self._hung.values()), self._missed), None
            if hung is not None:
                return f"rank {hung.rank} may hang in {hung.phase} of step {hung.step}"
            for late in self._late.values():
                if step - late.since_step <= (KNOB_STEPS_MAX if late.cause in _KNOB_CAUSES else STRAGGLER_STEPS_MAX):
                    who = "the job" if late.late_rank is None else f"rank {late.late_rank}"
                    return f"{who} is late: {late.cause}, since step {late.since_step}"
        return None if self._node is None else self._node.reason()
