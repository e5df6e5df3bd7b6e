"""What is asked in which tick: bounded calls, nobody starves."""

from hypothesis import given
from hypothesis import strategies as st

from pacecar.monitor.gpu.queries.queries import NEVER, NvmlQuery, Processes, gpu_questions
from pacecar.monitor.gpu.queries.query_schedule import REFUSALS_MAX, QuerySchedule

SECOND = 1_000_000_000
BUDGET = 11


def question(name, calls=1, stale=0):
    return NvmlQuery(name, calls, stale, lambda nvml, handle: ())


def names(asked):
    return [each.question.name for each in asked]


def tick(schedule, now, calls=BUDGET):
    due = schedule.due(now, calls)
    for asked in due:
        asked.answered((), now)
    return due


def test_the_questions_of_every_tick_and_then_the_longest_overdue():
    schedule = QuerySchedule([question("a"), question("slow", stale=10), question("slower", stale=20)])
    assert names(tick(schedule, 0, None)) == ["a", "slow", "slower"]
    assert names(tick(schedule, 5)) == ["a"]
    assert names(tick(schedule, 30, 2)) == ["a", "slow"]
    assert names(tick(schedule, 31, 2)) == ["a", "slower"]


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 20)), max_size=60), st.integers(0, 9))
def test_no_tick_is_over_its_calls_and_every_question_is_asked_again(slow, fast):
    schedule = QuerySchedule(
        [
            *(question(f"f{n}") for n in range(fast)),
            *(question(f"s{n}", c, t * SECOND) for n, (c, t) in enumerate(slow)),
        ]
    )
    tick(schedule, 0, None)
    seen = set()
    for second in range(1, 2 * 60 + 22):
        due = tick(schedule, second * SECOND)
        assert sum(asked.question.calls for asked in due) <= BUDGET
        seen.update(names(due))
    assert seen == {f"f{n}" for n in range(fast)} | {f"s{n}" for n in range(len(slow))}


def test_what_is_asked_of_a_gpu_leaves_two_calls_for_the_longest_overdue():
    """The longest overdue blocks those behind it, so each slow question must fit into the tick of the fullest GPU."""
    fast = sum(each.calls for each in gpu_questions("0") if each.stale_ns == 0)
    fullest = fast + 1 + 1 + 2 + 1  # fields, clock events, performance monitor, energy without a field
    assert fullest + 2 <= 12
    slow = [each for each in [*gpu_questions("0"), *Processes("0").questions()] if 0 < each.stale_ns < NEVER]
    assert max(each.calls for each in slow) <= 2


def test_a_question_never_answered_is_dropped_at_once_and_an_answered_one_after_some_refusals():
    schedule = QuerySchedule([question("a")])
    [asked] = schedule.due(0, BUDGET)
    assert asked.refused(0)
    asked.answered((), 0)
    assert [asked.refused(n) for n in range(REFUSALS_MAX)] == [False] * (REFUSALS_MAX - 1) + [True]
