"""Whether two rounds of accounts allow a verdict, or the job is merely slow."""

from __future__ import annotations

import pytest
from msgspec import structs

from pacecar.profiler.hangs.inquiry import IDLE_SECONDS, WORKS_BYTES, Inquiry, Round, are_counters_unequal
from pacecar.records.hangs import GroupState, HangKind, HangVerdict, ProcessState, RankAccount, ThreadStack

S = 1_000_000_000
HANG_NS = 120 * S


def account(rank, *, silent=20 * S, step=7, enqueued=5, **more):
    groups = (GroupState(name="0", enqueued=enqueued, completed=4),)
    fields = {"step": step, "silent_ns": silent, "patience_ns": 10 * S, "groups": groups}
    return RankAccount(rank=rank, world_size=2, **{**fields, **more})


def absent(rank, **process):
    return RankAccount(rank=rank, world_size=2, answered=False, process=ProcessState(pid=9, **process))


def verdict(kind, culprits=(1,), waiting=(0,)):
    return HangVerdict(
        job="j", rank=0, wall_ns=0, kind=kind, culprits=culprits, waiting=waiting, waited_ns=0, summary="so"
    )


def judged(kind, first, second, *, culprits=(1,), waiting=(0,), not_nameable=(), apart=3 * S):
    inquiry = Inquiry(HANG_NS)
    said = verdict(kind, culprits, waiting)
    assert inquiry.add(Round(first, 0, said, not_nameable)) is None, "one round proves nothing"
    return inquiry.add(Round(second, apart, said, not_nameable))


def test_a_rank_that_has_not_joined_is_named_after_the_silence_that_the_job_has_shown():
    def after(silent):
        return judged(HangKind.NOT_JOINED, [account(0, silent=1), account(1, silent=1)],
                      [account(0, silent=silent), account(1, silent=silent)])  # fmt: skip

    assert after(10 * S - 1) is None
    assert after(10 * S) is not None


def test_what_cannot_pass_by_itself_is_named_at_once():
    rounds = [account(0, silent=5 * S), absent(1, state="T")], [account(0, silent=8 * S), absent(1, state="T")]
    assert judged(HangKind.STOPPED, *rounds) is not None
    assert judged(HangKind.NO_ANSWER, *rounds) is None


def test_a_rank_that_ended_is_not_to_blame_if_nobody_waits_and_a_mismatch_is_its_own_wait():
    both = [account(0), account(1)]
    assert judged(HangKind.GONE, both, both, waiting=()) is None
    assert judged(HangKind.MISMATCHED, both, both, culprits=(0, 1), waiting=()) is not None


@pytest.mark.parametrize(
    "second",
    [
        account(1, step=8),
        account(1, enqueued=6),
        account(1, silent=S),
        account(1, groups=(GroupState(name="0", enqueued=5, completed=4, operations=99),)),
        absent(1, state="S"),
    ],
    ids=["step", "collective", "sign of life", "message", "no answer any more"],
)
def test_nothing_is_said_while_anything_moves(second):
    assert judged(HangKind.SKIPPED, [account(0), account(1)], [account(0), second]) is None


def test_nothing_is_said_while_the_rounds_disagree():
    inquiry, both = Inquiry(HANG_NS), [account(0), account(1)]
    assert inquiry.add(Round(both, 0, verdict(HangKind.SKIPPED, (1,)))) is None
    assert inquiry.add(Round(both, 3 * S, verdict(HangKind.SKIPPED, (0,)))) is None
    assert inquiry.add(Round(both, 6 * S, verdict(HangKind.SKIPPED, (0,)))) is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ProcessState(pid=9, processor_ns=0), ProcessState(pid=9, processor_ns=S)),
        (ProcessState(pid=9, wakeups=0), ProcessState(pid=9, wakeups=3)),
        (ProcessState(pid=9, transferred_bytes=0), ProcessState(pid=9, transferred_bytes=WORKS_BYTES)),
    ],
    ids=["computes", "wakes", "writes"],
)
def test_a_rank_that_works_is_given_the_longest_time(before, after):
    def named(silent, process):
        first, second = [account(0), account(1, process=before)], [account(0), account(1, process=process)]
        second = [structs.replace(each, silent_ns=silent) for each in second]
        return judged(HangKind.NOT_JOINED, first, second) is not None

    assert named(60 * S, before)
    assert not named(60 * S, after)
    assert named(HANG_NS, after)


def test_a_rank_whose_code_goes_on_works():
    def stack(line):
        return (ThreadStack(name="MainThread", frames=(f"save.py:{line} write",), is_training=True),)

    first, second = [account(0), account(1, stacks=stack(3))], [account(0), account(1, stacks=stack(4))]
    assert judged(HangKind.NOT_JOINED, first, second) is None
    assert judged(HangKind.NOT_JOINED, second, second) is not None


def test_a_rank_that_closed_pacecar_or_could_not_be_asked_is_given_the_longest_time():
    rounds = [account(0), absent(1)], [account(0), absent(1)]
    assert judged(HangKind.NO_ANSWER, *rounds) is not None
    assert judged(HangKind.NO_ANSWER, *rounds, not_nameable={1}) is None


def test_where_no_rank_waits_for_another_nothing_is_said_for_as_long_as_torch_would_wait():
    def said(kind, waiting, silent):
        both = [account(0, silent=silent), account(1, silent=silent)]
        return judged(kind, both, both, culprits=(), waiting=waiting)

    long = round(IDLE_SECONDS * S)
    assert said(HangKind.NOBODY, (), long - 1) is None
    assert said(HangKind.NOBODY, (), long) is not None
    assert said(HangKind.NOBODY, (0,), 10 * S) is not None, "one that waits for the others is a hang of all"


def test_a_process_that_its_parent_buries_between_two_rounds_is_the_same_that_was_killed():
    inquiry, both = Inquiry(HANG_NS), [account(0), absent(1)]
    assert inquiry.add(Round(both, 0, verdict(HangKind.KILLED))) is None
    assert inquiry.add(Round(both, 3 * S, verdict(HangKind.GONE))) is not None


def test_counters_are_compared_among_the_members_of_a_group():
    def counters(rank, **groups):
        states = tuple(
            GroupState(name=name, ranks=ranks, operations=operations) for name, (ranks, operations) in groups.items()
        )
        return RankAccount(rank=rank, world_size=4, groups=states)

    first, second = (0, 1), (2, 3)
    ranks = [
        counters(0, tp=(first, 5)),
        counters(1, tp=(first, 5)),
        counters(2, tp=(second, 9)),
        counters(3, tp=(second, 9)),
    ]
    assert not are_counters_unequal(ranks)
    assert are_counters_unequal([*ranks[:3], counters(3, tp=(second, 8))])
    assert not are_counters_unequal([*ranks[:3], counters(3, tp=(second, None))])
    assert are_counters_unequal([counters(0, tp=(first, 0)), counters(1, tp=(first, 1))]), "zero is a count"
