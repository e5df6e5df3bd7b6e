"""A cross-rank window is due on a suspicion, when all steps get longer, or while ranks wait unevenly."""

from __future__ import annotations

from pacecar.clock import NS_PER_SECOND
from pacecar.profiler.ranks.cross_rank.window_trigger import (
    FIRST_RANGES,
    LOOK_STEPS,
    PAUSE_SECONDS,
    SLOWER_RANGES,
    UNEVEN_LOOKS,
    USUAL_MIN,
    WindowTrigger,
)
from pacecar.profiler.ranks.exchange.phase_sums_message import RankRange, StepNote, gather_range
from pacecar.profiler.ranks.exchange.totals import LedgerTotals
from pacecar.records import Ledger

STEP_NS = 100_000_000


def totals(looks: int, *waits_ms: float) -> list[LedgerTotals]:
    """The ledgers of ranks that wait for so long in each step, after so many looks."""
    steps = looks * LOOK_STEPS
    found = []
    for wait in waits_ms:
        waited_ns = round(wait * 1e6) * steps
        compute_ns = STEP_NS * steps - waited_ns
        ledger = Ledger(
            wall_ns=STEP_NS * steps,
            compute_ns=compute_ns,
            exposed_communication_ns=waited_ns,
            communication_ns=waited_ns,
        )
        found.append(LedgerTotals(ledger, steps, steps, 0))
    return found


def looked(trigger: WindowTrigger, *waits_ms: float, first: int = 1, looks: int = UNEVEN_LOOKS + 1) -> WindowTrigger:
    for number in range(first, first + looks):
        trigger.look(totals(number, *waits_ms))
    return trigger


def test_a_named_rank_is_a_reason_once() -> None:
    trigger = WindowTrigger()
    assert not trigger.is_due(0)
    trigger.named()
    assert trigger.is_due(0)
    trigger.done(0, 0, has_changed=True)
    assert not trigger.is_due(round(PAUSE_SECONDS * NS_PER_SECOND))


def test_uneven_waiting_is_a_reason_even_or_unknown_waiting_is_not() -> None:
    assert looked(WindowTrigger(), 30.0, 2.0).is_due(0)
    assert not looked(WindowTrigger(), 30.0, 25.0).is_due(0)
    assert looked(WindowTrigger(), 0.0, 0.0).is_over
    trigger = WindowTrigger()
    for number in range(1, 9):
        trigger.look([totals(number, 30.0)[0], None])
    assert not trigger.is_due(0)


def test_windows_become_rarer_while_they_change_nothing() -> None:
    trigger, second = WindowTrigger(), NS_PER_SECOND
    trigger.named()
    trigger.done(0, 0, has_changed=False)
    trigger.named()
    assert not trigger.is_due(round(1.5 * PAUSE_SECONDS) * second)
    assert trigger.is_due(round(2 * PAUSE_SECONDS) * second)
    trigger.done(0, 0, has_changed=True)
    trigger.named()
    assert trigger.is_due(round(PAUSE_SECONDS) * second)


def ranges(
    trigger: WindowTrigger, *walls_ms: float, work: int | None = None, epoch: int = 0, odd: bool = False
) -> None:
    """Add a range of two ranks for each length of a step."""
    for wall in walls_ms:
        note = StepNote(0, round(wall * 1e6), {}, epoch, odd, work=work)
        rows: list[RankRange] = [gather_range([note])] * 2
        trigger.add(rows)


USUAL = [100.0, 101.0] * ((FIRST_RANGES + USUAL_MIN) // 2)


def test_longer_steps_of_all_ranks_are_a_reason() -> None:
    trigger = WindowTrigger()
    ranges(trigger, *USUAL, *[150.0] * (SLOWER_RANGES - 1))
    assert not trigger.is_due(0)
    ranges(trigger, 150.0)
    assert trigger.is_due(0)
    ranges(trigger, 100.0)
    assert not trigger.is_due(0), "it was for a moment"


def test_a_window_makes_the_new_length_the_usual_one_until_steps_are_as_short_as_before() -> None:
    trigger = WindowTrigger()
    ranges(trigger, *USUAL, *[150.0] * SLOWER_RANGES)
    trigger.ordered()
    ranges(trigger, *[150.0] * SLOWER_RANGES)
    assert not trigger.is_outdated
    trigger.done(0, 80, has_changed=True)
    ranges(trigger, *[150.0] * 20)
    assert not trigger.is_due(10**18)
    assert not trigger.is_over
    ranges(trigger, *[100.0] * SLOWER_RANGES)
    assert trigger.is_over
    ranges(trigger, *[100.0] * USUAL_MIN)
    assert not trigger.is_over
    ranges(trigger, *[150.0] * SLOWER_RANGES)
    assert trigger.is_due(10**18), "it is slow again"


def test_a_window_for_longer_steps_is_outdated_once_they_are_short_again() -> None:
    for is_named in (False, True):
        trigger = WindowTrigger()
        ranges(trigger, *USUAL, *[150.0] * SLOWER_RANGES)
        if is_named:
            trigger.named()
        trigger.ordered()
        ranges(trigger, *[100.0] * SLOWER_RANGES)
        assert trigger.is_outdated is not is_named


def test_steps_that_are_longer_for_a_reason_are_no_suspicion() -> None:
    for reason in ({"work": 1600}, {"epoch": 1}, {"odd": True}):
        trigger = WindowTrigger()
        ranges(trigger, *USUAL, work=1000)
        ranges(trigger, *[150.0] * SLOWER_RANGES, **{"work": 1000} | reason)
        assert not trigger.is_due(0), reason


def test_even_waits_count_only_if_they_were_measured_after_the_verdict() -> None:
    trigger = WindowTrigger()
    trigger.done(0, LOOK_STEPS * (UNEVEN_LOOKS + 2), has_changed=True)
    assert not looked(trigger, 0.0, 0.0).is_over
    assert looked(trigger, 0.0, 0.0, first=UNEVEN_LOOKS + 3).is_over
