"""A cross-rank window is due on a suspicion, or while ranks wait unevenly, and rarer if it changes nothing."""

from __future__ import annotations

from pacecar.clock import NS_PER_SECOND
from pacecar.profiler.ranks.cross_rank.window_trigger import LOOK_STEPS, PAUSE_SECONDS, UNEVEN_LOOKS, WindowTrigger
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
    trigger.done(0, has_changed=True)
    assert not trigger.is_due(round(PAUSE_SECONDS * NS_PER_SECOND))


def test_uneven_waiting_is_a_reason_even_or_unknown_waiting_is_not() -> None:
    assert looked(WindowTrigger(), 30.0, 2.0).is_due(0)
    assert not looked(WindowTrigger(), 30.0, 25.0).is_due(0)
    assert looked(WindowTrigger(), 0.0, 0.0).is_even
    trigger = WindowTrigger()
    for number in range(1, 9):
        trigger.look([totals(number, 30.0)[0], None])
    assert not trigger.is_due(0)


def test_windows_become_rarer_while_they_change_nothing() -> None:
    trigger, second = WindowTrigger(), NS_PER_SECOND
    trigger.named()
    trigger.done(0, has_changed=False)
    trigger.named()
    assert not trigger.is_due(round(1.5 * PAUSE_SECONDS) * second)
    assert trigger.is_due(round(2 * PAUSE_SECONDS) * second)
    trigger.done(0, has_changed=True)
    trigger.named()
    assert trigger.is_due(round(PAUSE_SECONDS) * second)
