"""Pauses tuning while a straggler, a hang or a disturbed node makes the pace no measure of any knob.

A rank that is throttled or hangs slows every step of the job, and a tuner that goes on measures that rank.  So while a
straggler, a hang or a disturbance of some rank's node (`node_monitor`) is reported the policy is held: what is tried is
taken back, nothing is judged, and it goes on when the report ends.

A straggler that stays is no event but a condition of the job: after `STRAGGLER_STEPS_MAX` steps tuning goes on with it.
Where a link is slow or data comes late that is so after `KNOB_STEPS_MAX`.  The change itself says nothing of any knob.
But for what then stays there are knobs, of communication and of the loader, and the change detector opens the search.

Records come from the rank monitor's thread, the policy asks on the training thread, neither waits.
Left out: a loss that is not finite (`compression_rollback` watches it); steps with a checkpoint or an evaluation inside
on any rank, which are marked one by one (`tuner`) and not judged: nothing need be taken back for them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from pacecar.records import Decision, HangSuspicion, JobRecord, Straggler, TunerStatus, Verdict

from ..observation import Observation, Policy, PolicyLayer, TuningTurn
from .node_monitor import NodeMonitor

__all__ = ["PausedPolicy", "TuningPause"]

STRAGGLER_STEPS_MAX = 512
"""As long as a tuner needs to search anew; a slower rank that is still slow then will stay so."""

KNOB_STEPS_MAX = 64
"""The same for the causes that a knob may help against: some windows, so that none lies across the change."""

_KNOB_CAUSES = frozenset({"link", "data_wait"})

REASONS_MAX = 64
"""Most late or hung ranks that are kept apart; the first ones are as good a reason as all."""


class TuningPause:
    """The reasons to pause that are in force.  A sink for records; thread-safe.

    `node` is asked last, on the training thread, for one more reason.
    """

    def __init__(self, node: NodeMonitor | None = None) -> None:
        self.node = node
        self._lock = threading.Lock()
        self._late: dict[tuple[int | None, str], Straggler] = {}
        self._hung: dict[int, HangSuspicion] = {}
        self._missed: HangSuspicion | None = None  # not reported while it lasted: ranks that hang observe no steps

    def put(self, record: JobRecord) -> None:
        """Take a record; all but stragglers and hangs are ignored."""
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

    def reason(self, step: int) -> str | None:
        """Return why tuning must pause at `step`, or None."""
        with self._lock:
            hung, self._missed = next(iter(self._hung.values()), self._missed), None
            if hung is not None:
                return f"rank {hung.rank} may hang in {hung.phase} of step {hung.step}"
            for late in self._late.values():
                if step - late.since_step <= (KNOB_STEPS_MAX if late.cause in _KNOB_CAUSES else STRAGGLER_STEPS_MAX):
                    who = "the job" if late.late_rank is None else f"rank {late.late_rank}"
                    return f"{who} is late: {late.cause}, since step {late.since_step}"
        return None if self.node is None else self.node.reason()


class PausedPolicy(PolicyLayer):
    """A policy that pauses while `pause` gives a reason, and gets with each step what is known of the node."""

    def __init__(self, policy: Policy, pause: TuningPause) -> None:
        super().__init__(policy)
        self._pause = pause
        self._held: str | None = None

    def advance(
        self, observations: Sequence[Observation]
    ) -> tuple[TuningTurn | None, list[Decision | Verdict | TunerStatus]]:
        """Hold or release the policy by the present reason, then pass on."""
        reason = self._pause.reason(observations[-1].step) if observations else self._held
        if reason != self._held:
            self._held = reason
            self._policy.hold(reason)
        if self._pause.node is not None:
            view = self._pause.node.view
            observations = [replace(step, node=view) for step in observations]
        return self._policy.advance(observations)
