"""Every nanosecond of a life is charged once, whatever happened, and lost steps are those trained again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.ledger.attempts import (
    CLOCK_JUMP_NS,
    GOOGLE_NAMES,
    IN_STEPS,
    LIFE_HEADINGS,
    START_UP,
    Attempt,
    JobLife,
    StepRow,
    charge,
)

S = 1_000_000_000
STEP_NS = 10 * S


def lived(*attempts: Attempt) -> JobLife:
    life = charge(attempts)
    assert life is not None
    return life


def attempt(
    began_s: int, steps: int, *, resumed: int | None = 0, start_up_s: int = 20, tail_s: int = 0,
    saved: int | None = None, is_failed: bool = True, rendezvous_s: int | None = None, hangs: bool = False,
) -> Attempt:  # fmt: skip
    """An attempt of 10 s steps that goes on from the step `resumed` (None: unknown)."""
    first_ns = (began_s + start_up_s) * S
    rows = [
        StepRow(first_ns + n * STEP_NS, 1, STEP_NS, None if resumed is None else resumed + n)
        for n in range(1, steps + 1)
    ]
    return Attempt(
        began_ns=began_s * S, rows=rows, ended_ns=first_ns + steps * STEP_NS + tail_s * S, saved_steps=saved,
        is_failed=is_failed, hangs=hangs, rendezvous_ns=None if rendezvous_s is None else (began_s + rendezvous_s) * S,
    )  # fmt: skip


def seconds(life: JobLife) -> dict[str, float]:
    return {heading: length / S for heading, length in life.headings_ns.items() if length}


def test_a_step_that_a_later_attempt_trains_again_is_lost() -> None:
    life = lived(attempt(0, 10), attempt(200, 10, resumed=6, is_failed=False))
    assert life.lost_steps == 4
    assert [one.lost_steps for one in life.attempts] == [4, 0]
    assert [(one.first_step, one.last_step) for one in life.attempts] == [(1, 10), (7, 16)]
    assert seconds(life) == {
        "start_up": 40, "start_up_first_step": 20, "productive": 50 + 90, "lost_steps": 40, "down": 80,
    }  # fmt: skip
    assert life.productive_time_ratio == 140 / 320
    assert life.ettr == 140 / 320
    assert not life.lost_is_partial


def test_an_attempt_that_goes_back_behind_two_loses_steps_of_both() -> None:
    life = lived(attempt(0, 10), attempt(200, 5, resumed=8), attempt(400, 10, resumed=4, is_failed=False))
    assert [one.lost_steps for one in life.attempts] == [6, 5, 0]


def test_steps_that_went_on_are_not_lost_because_an_attempt_between_made_none() -> None:
    life = lived(attempt(0, 10), attempt(200, 0), attempt(300, 10, resumed=10, is_failed=False))
    assert life.lost_steps == 0
    assert life.headings_ns["start_up"] == 60 * S


def test_a_job_that_fails_loses_what_no_checkpoint_holds() -> None:
    assert lived(attempt(0, 10, saved=7)).lost_steps == 3
    assert lived(attempt(0, 10, saved=7, is_failed=False)).lost_steps == 0
    # Earlier attempts saved, the last one did not: all of it.
    assert lived(attempt(0, 10, saved=10), attempt(200, 5, resumed=10)).attempts[-1].lost_steps == 5


def test_without_any_checkpoint_the_loss_of_a_failed_job_is_unknown() -> None:
    life = lived(attempt(0, 10))
    assert life.lost_steps is None
    assert life.lost_is_partial
    assert life.headings_ns["lost_steps"] == 0


def test_without_numbers_an_attempt_loses_what_followed_its_last_checkpoint() -> None:
    life = lived(attempt(0, 10, resumed=None, saved=8), attempt(200, 3, resumed=None, is_failed=False))
    assert [one.lost_steps for one in life.attempts] == [2, 0]
    assert life.lost_is_partial
    unknown = lived(attempt(0, 10, resumed=None), attempt(200, 3, resumed=None, is_failed=False))
    assert unknown.attempts[0].lost_steps is None


def test_a_number_that_becomes_known_late_counts_for_the_steps_before() -> None:
    first = attempt(0, 10)
    late = first._replace(rows=[row._replace(number=None) for row in first.rows[:6]] + list(first.rows[6:]))
    assert lived(late, attempt(200, 3, resumed=4, is_failed=False)).attempts[0].lost_steps == 6


def test_a_step_that_goes_back_within_an_attempt_loses_what_is_trained_again() -> None:
    there, back = attempt(0, 6), attempt(60, 6, resumed=3, start_up_s=20)
    life = lived(there._replace(rows=[*there.rows, *back.rows], ended_ns=back.ended_ns, is_failed=False))
    assert life.lost_steps == 3


def test_start_up_is_split_only_where_the_rendezvous_is_known() -> None:
    known = lived(attempt(0, 1, rendezvous_s=5))
    assert seconds(known) == {"start_up_rendezvous": 5, "start_up_preparation": 15, "start_up_first_step": 10}
    assert "start_up" in seconds(lived(attempt(0, 1, rendezvous_s=25)))  # after the first step began: another group


def test_the_end_of_a_job_that_hangs_is_a_hang() -> None:
    assert seconds(lived(attempt(0, 2, tail_s=30, hangs=True)))["hang"] == 30
    assert seconds(lived(attempt(0, 2, tail_s=30)))["unrecorded"] == 30


def test_zero_is_a_measurement() -> None:
    row = StepRow(30 * S, 1, STEP_NS, 0)
    life = lived(Attempt(began_ns=0, rows=[row], ended_ns=30 * S, number=0))
    assert life.attempts[0].number == 0
    assert (life.attempts[0].first_step, life.attempts[0].last_step) == (0, 0)


def test_parts_of_a_step_are_taken_out_of_it_and_lost_with_it() -> None:
    rows = [
        StepRow(10 * S, 1, 10 * S, 1, {"checkpoint_restore": 4 * S, "data_wait": 3 * S, "compilation": 5 * S}),
        StepRow(30 * S, 2, 20 * S, 3, {"data_wait": 6 * S, "exposed_communication": 4 * S, "hang": 50 * S}),
        StepRow(50 * S, 2, 20 * S, 5, {"data_wait": 6 * S, "exposed_communication": 4 * S, "compilation": 2 * S}),
    ]
    first = Attempt(began_ns=0, rows=rows, ended_ns=50 * S)
    assert seconds(lived(first, attempt(50, 1, resumed=4, start_up_s=0, is_failed=False))) == {
        "checkpoint_restore": 4, "start_up_compilation": 5, "start_up_first_step": 1 + 10, "hang": 20, "compilation": 1,
        "data_wait": 3, "exposed_communication": 2, "productive": 4, "lost_steps": 10,
    }  # fmt: skip


def test_a_clock_that_was_set_is_counted_and_left_out() -> None:
    first, later = attempt(0, 5), attempt(1_000_000, 5, resumed=5, is_failed=False)
    rows = [row._replace(ended_ns=row.ended_ns + (place >= 2) * 3600 * S) for place, row in enumerate(first.rows)]
    set_ahead = first._replace(rows=rows, ended_ns=rows[-1].ended_ns)
    life = lived(set_ahead, later)
    assert life.jumps_ns == (3600 * S,)
    assert life.attempts[0].wall_ns == 70 * S
    back = lived(later, first._replace(is_failed=False))
    assert len(back.jumps_ns) == 1
    assert back.wall_ns == 140 * S


def test_what_follows_the_last_step_may_take_long() -> None:
    evaluated = lived(attempt(0, 2, tail_s=1800, is_failed=False))
    assert evaluated.jumps_ns == ()
    assert seconds(evaluated)["unrecorded"] == 1800
    assert seconds(lived(attempt(0, 2, tail_s=1800, hangs=True)))["hang"] == 1800
    assert lived(attempt(0, 2, tail_s=-1800)).jumps_ns == (-1800 * S,)


def test_clocks_that_are_apart_by_a_little_make_the_life_no_longer() -> None:
    steady = attempt(0, 6, is_failed=False)
    rows = [row._replace(ended_ns=row.ended_ns + 1000 * (place % 2)) for place, row in enumerate(steady.rows, start=1)]
    assert 0 <= lived(steady._replace(rows=rows)).wall_ns - 80 * S <= 1000, "it does not add up over the steps"


def test_attempts_that_overlap_share_no_time() -> None:
    life = lived(attempt(0, 5), attempt(65, 5, resumed=5, is_failed=False))
    assert life.wall_ns == 135 * S
    assert life.headings_ns["down"] == 0


def test_every_heading_has_one_name_of_googles() -> None:
    assert sorted(heading for names in GOOGLE_NAMES.values() for heading in names) == sorted(LIFE_HEADINGS)
    assert {*IN_STEPS, *START_UP} <= LIFE_HEADINGS.keys()


lengths = st.integers(0, 10**13)


@st.composite
def attempts(draw: st.DrawFn, *, wild: bool) -> list[Attempt]:
    """Attempts as they happen, or with wild clocks, numbers and parts."""
    found, now = [], draw(lengths)
    for _ in range(draw(st.integers(1, 4))):
        now += draw(st.integers(-(10**15), 10**15)) if wild else draw(lengths)
        began, rows = now, []
        for place in range(draw(st.integers(0, 5))):
            now += draw(st.integers(0, CLOCK_JUMP_NS)) if not wild else draw(st.integers(-(10**15), 10**15))
            wall_ns, steps = draw(lengths), 1 if place == 0 else draw(st.integers(1, 9))
            now += wall_ns
            parts = {heading: draw(lengths) for heading in draw(st.sets(st.sampled_from(IN_STEPS)))}
            number = draw(st.none() | st.integers(0, 50))
            rows.append(StepRow(now, steps, wall_ns, number, parts))
        now += draw(st.integers(0, CLOCK_JUMP_NS))
        met = draw(st.none() | st.integers(0, 10**13))
        found.append(Attempt(
            began_ns=began, rows=rows, ended_ns=now, rendezvous_ns=None if met is None else began + met,
            is_failed=draw(st.booleans()), saved_steps=draw(st.none() | st.integers(0, 50)), hangs=draw(st.booleans()),
        ))  # fmt: skip
    return found


@pytest.mark.slow
@given(attempts(wild=True), st.integers(1, 30))
def test_headings_attempts_and_intervals_each_sum_to_the_life(several: list[Attempt], count: int) -> None:
    life = charge(several, intervals=count)
    assert life is not None
    assert min(life.headings_ns.values()) >= 0
    assert sum(life.headings_ns.values()) == life.wall_ns
    assert sum(life.google_ns.values()) == life.wall_ns
    assert sum(one.wall_ns for one in life.attempts) == life.wall_ns
    assert len(life.intervals) <= count
    for heading, length in life.headings_ns.items():
        assert sum(one.headings_ns.get(heading, 0) for one in life.attempts) == length
        assert sum(one.headings_ns.get(heading, 0) for one in life.intervals) == length
    assert all(after.at_ns == before.at_ns + before.wall_ns for before, after in pairwise(life.intervals))


@pytest.mark.slow
@given(attempts(wild=False))
def test_the_life_is_as_long_as_its_clock_says(several: list[Attempt]) -> None:
    life = lived(*several)
    assert life.jumps_ns == ()
    assert life.wall_ns == several[-1].ended_ns - several[0].began_ns


@pytest.mark.slow
@given(attempts(wild=False))
def test_no_more_steps_are_lost_than_were_trained(several: list[Attempt]) -> None:
    for one in lived(*several).attempts:
        assert one.lost_steps is None or 0 <= one.lost_steps <= one.steps
