"""What a rank answers when it no longer measures, and whom the one that judges takes for cut off."""

from __future__ import annotations

import threading

import pytest
from msgspec import structs

from pacecar.clock import NS_PER_SECOND
from pacecar.process_state import own_identity
from pacecar.profiler.hangs import hang_watch
from pacecar.profiler.hangs.account_road import Door, Question, Road, Silence
from pacecar.profiler.hangs.hang_watch import HangWatch
from pacecar.profiler.hangs.rank_account import TrainingProgress
from pacecar.records.hangs import HangKind, HangVerdict, RankAccount
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello

UNREACHABLE, MUTE = Silence("no connection within 1.5 s", unreachable=True), Silence("no answer within 1.5 s")
LEFT = Silence("nothing listens there any more", refused=True)


def watch_of(
    said: list[HangVerdict], *, world: int = 1, is_measuring: bool = True, is_in_step: bool = True
) -> HangWatch:
    return HangWatch(
        job_hello(0, world), said.append, FakeClock(), hang_ns=120 * NS_PER_SECOND,
        training=(threading.get_ident(), threading.get_native_id()),
        progress=lambda: TrainingProgress(7, "tail", 40 * NS_PER_SECOND, 10 * NS_PER_SECOND),
        is_measuring=lambda: is_measuring, is_closing=lambda: False,
        answer_others=lambda _: pytest.fail("no window"),
    )  # fmt: skip


@pytest.mark.parametrize("is_measuring", [True, False])
def test_a_rank_that_measures_no_more_says_where_it_is_and_does_not_judge(is_measuring):
    watch = watch_of([], is_measuring=is_measuring)
    account = watch._answer(Question(what="account"))
    assert account.stacks
    assert account.step == (7 if is_measuring else None)
    assert watch._answer(Question(what="summon")).judges is is_measuring


def verdict_on(
    monkeypatch, answer: Silence, *, was_reached: bool, address: str = "10.0.0.2", **given
) -> HangVerdict | None:
    """Return what rank 0 says of rank 1 after two rounds in which rank 1 gave this answer."""
    said: list[HangVerdict] = []
    watch = watch_of(said, world=2)
    here = own_identity(threading.get_native_id())
    elsewhere = structs.replace(here, host="another")
    watch._road = Road("", (Door("10.0.0.1", 1, here), Door(address, 1, elsewhere)))
    if was_reached:
        watch.heard([1])
    monkeypatch.setattr(hang_watch, "ask", lambda road, ranks, question, **_: dict.fromkeys(ranks, answer))
    clock = watch._clock
    for _ in range(3):
        watch.check(clock.monotonic_ns(), is_suspected=True)
        clock.advance(10 * NS_PER_SECOND)
    return said[0] if said else None


def test_a_host_that_was_reached_and_takes_no_connection_is_cut_off_and_not_named(monkeypatch):
    verdict = verdict_on(monkeypatch, UNREACHABLE, was_reached=True)
    assert (verdict.kind, verdict.culprits) == (HangKind.LINK, ())
    assert verdict_on(monkeypatch, UNREACHABLE, was_reached=False) is None, "a firewall, as far as is known"
    same_host = verdict_on(monkeypatch, UNREACHABLE, was_reached=True, address="10.0.0.1")
    assert same_host is None or same_host.kind is not HangKind.LINK, "this host reaches itself"


def test_no_rank_speaks_for_another_one(monkeypatch):
    watch = watch_of([], world=3)
    here = own_identity(threading.get_native_id())
    watch._road = Road("", (Door("10.0.0.1", 1, here),) * 3)
    alike = RankAccount(rank=2, world_size=3, step=9)
    monkeypatch.setattr(hang_watch, "ask", lambda road, ranks, question, **_: dict.fromkeys(ranks, alike))
    accounts = watch.look().accounts
    assert [(one.rank, one.answered, one.step) for one in accounts] == [(0, True, 7), (1, False, None), (2, True, 9)]
    assert accounts[1].problems == ("it answers for rank 2",)
