"""A policy sees each step once, in order, whenever the first exact window was."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pacecar.controller.consensus.protocol import JobPace
from pacecar.controller.consensus.step_observations import ObservationBacklog
from pacecar.controller.observation import KnobSpace
from pacecar.records import Knobs, StepRecord
from tests.kit.records import step_record

LIVE = (KnobSpace("micro_batch", 1, (1, 2)),)
KNOBS = Knobs(0, {"micro_batch": 1})


@dataclass
class Written:
    """A finished step whose record exists."""

    record: StepRecord
    backward: None = None
    disturbed: bool = False
    is_held: bool = False

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def wall_ns(self) -> int:
        return self.record.wall_ns

    pace_ns = wall_ns

    @property
    def source(self) -> str:
        return self.record.source

    def settled(self) -> StepRecord:
        return self.record


@pytest.mark.parametrize("exact", range(12))
def test_the_early_exact_step_is_seen_first_and_no_step_before_it_after_it(exact: int) -> None:
    """Paces come in blocks of four steps, and a block may have begun before the exact step that a policy sees first."""
    backlog = ObservationBacklog()
    for step in range(12):
        source = "exact" if step == exact else "estimate"
        backlog.remember(Written(step_record(step=step, source=source, knobs=KNOBS)))
    backlog.begin(LIVE)
    for first in (8, 12):
        for step in range(first + 4, first + 8):
            backlog.remember(Written(step_record(step=step, knobs=KNOBS)))
        backlog.pair([JobPace(step, 100, profiled=False) for step in range(first, first + 4)], LIVE, is_calm=False)
    seen = [observation.step for observation in backlog.drain()]
    assert seen == sorted({exact, *range(max(8, exact), 16)})


def test_a_window_that_is_read_while_the_next_step_runs_is_an_early_exact_step_too() -> None:
    """In gloo jobs the hook reads it there: the step was still an estimate when the tuner first received it."""
    for following in (0, 1, 5):
        backlog = ObservationBacklog()
        profiled = Written(step_record(step=3, knobs=KNOBS))
        backlog.remember(profiled)
        profiled.record = step_record(step=3, source="exact", knobs=KNOBS)
        for step in range(4, 4 + following):
            backlog.remember(Written(step_record(step=step, knobs=KNOBS)))
        backlog.begin(LIVE)
        assert [(seen.step, seen.exact) for seen in backlog.drain()] == [(3, True)]
