"""Which queries run in a tick: bounded calls, and every query gets its turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.monitor.gpu.queries.queries import NEVER, NvmlQuery, Processes, gpu_queries
from pacecar.monitor.gpu.queries.query_schedule import QuerySchedule, ScheduledQuery
from pacecar.monitor.gpu.queries.refusals import FAILURES_MAX, REFUSALS_MAX, RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX
from pacecar.records import Sample

SECOND = 1_000_000_000
BUDGET = 11


def query(name, calls=1, stale=0):
    return NvmlQuery(name, calls, stale, lambda nvml, handle: ())


def names(asked):
    return [each.query.name for each in asked]


def tick(schedule, now, calls=BUDGET):
    due = schedule.due(now, calls)
    for asked in due:
        asked.answered((), now)
    return due


def test_the_queries_of_every_tick_and_then_the_longest_overdue():
    schedule = QuerySchedule([query("a"), query("slow", stale=10), query("slower", stale=20)])
    assert names(tick(schedule, 0, None)) == ["a", "slow", "slower"]
    assert names(tick(schedule, 5)) == ["a"]
    assert names(tick(schedule, 30, 2)) == ["a", "slow"]
    assert names(tick(schedule, 31, 2)) == ["a", "slower"]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 20)), max_size=60), st.integers(0, 9))
def test_no_tick_is_over_its_calls_and_every_query_is_asked_again(slow, fast):
    schedule = QuerySchedule(
        [
            *(query(f"f{n}") for n in range(fast)),
            *(query(f"s{n}", c, t * SECOND) for n, (c, t) in enumerate(slow)),
        ]
    )
    tick(schedule, 0, None)
    seen = set()
    for second in range(1, 2 * 60 + 22):
        due = tick(schedule, second * SECOND)
        assert sum(asked.query.calls for asked in due) <= BUDGET
        seen.update(names(due))
    assert seen == {f"f{n}" for n in range(fast)} | {f"s{n}" for n in range(len(slow))}


def test_what_is_asked_of_a_gpu_leaves_two_calls_for_the_longest_overdue():
    """The longest overdue query blocks those behind it, so each slow one must fit into the fullest GPU's tick."""
    fast = sum(each.calls for each in gpu_queries("0") if each.stale_ns == 0)
    fullest = fast + 1 + 1 + 2 + 1  # fields, clock events, performance monitor, energy without a field
    assert fullest + 2 <= 12
    slow = [each for each in [*gpu_queries("0"), *Processes("0").queries()] if 0 < each.stale_ns < NEVER]
    assert max(each.calls for each in slow) <= 2


def waits(note, asked, attempts):
    """Return the seconds until the query is due again, for each attempt in a row."""
    found, now = [], 0
    for _ in range(attempts):
        note(asked, now)
        found.append((asked.due_ns - now) // SECOND)
        now = asked.due_ns
    return found


def test_a_refused_query_is_asked_for_ever_and_ever_less_often():
    schedule = QuerySchedule([query("a")])
    [asked] = schedule.due(0, BUDGET)
    assert waits(ScheduledQuery.refused, asked, 12) == [*(10 << n for n in range(9)), *[RETRY_SECONDS_MAX] * 3]
    assert schedule.due(asked.due_ns - 1, BUDGET) == []
    assert schedule.due(asked.due_ns, BUDGET) == [asked]


def test_one_that_was_answered_is_asked_at_its_rate_for_some_refusals_and_one_answer_forgives_them():
    schedule = QuerySchedule([query("a")])
    [asked] = schedule.due(0, BUDGET)
    for _ in range(2):
        asked.answered((), 0)
        assert schedule.refused() == (0, 0)
        at_its_rate = [0] * (REFUSALS_MAX - 1)
        assert waits(ScheduledQuery.refused, asked, REFUSALS_MAX + 1) == [
            *at_its_rate, RETRY_SECONDS_FIRST, 2 * RETRY_SECONDS_FIRST
        ]  # fmt: skip
        assert schedule.refused() == (0, 1)


def test_one_that_only_ever_failed_is_asked_less_often_and_one_that_was_answered_is_not():
    schedule = QuerySchedule([query("a", stale=SECOND)])
    [asked] = schedule.due(0, BUDGET)
    assert waits(ScheduledQuery.failed, asked, FAILURES_MAX)[-2:] == [1, RETRY_SECONDS_FIRST]
    assert schedule.refused() == (1, 0)
    asked.answered((), 0)
    assert waits(ScheduledQuery.failed, asked, 2 * FAILURES_MAX)[-1] == 1


def test_a_refused_query_of_every_tick_takes_its_turn_among_the_slow_ones():
    schedule = QuerySchedule([query("a"), query("b"), query("slow", stale=SECOND)])
    first = schedule.due(0, BUDGET)
    for asked in first[1:]:
        asked.answered((), 0)
    first[0].refused(0)
    assert schedule.fast_calls() == 1
    assert names(schedule.due(RETRY_SECONDS_FIRST * SECOND, 2)) == ["b", "slow"]
    first[2].answered((), RETRY_SECONDS_FIRST * SECOND)
    assert names(schedule.due(RETRY_SECONDS_FIRST * SECOND, 2)) == ["b", "a"]


def test_details_that_were_answered_stand_and_one_that_was_not_is_asked():
    schedule = QuerySchedule([query("a"), query("level")._replace(is_detail=True)])
    assert names(schedule.due(0, BUDGET, with_details=False)) == ["a", "level"]
    for asked in schedule.due(0, BUDGET):
        asked.answered((Sample("pacecar_gpu_up", ("0",), 0),), 0)
    assert names(schedule.due(SECOND, BUDGET, with_details=False)) == ["a"]
    assert schedule.detail_calls() == 1
    assert names(schedule.due(SECOND, BUDGET)) == ["a", "level"]
