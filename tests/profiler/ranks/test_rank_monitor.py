"""Words, sockets, hang watch and the crew's thread: each part of the crew by itself."""

from __future__ import annotations

import logging
import socket
import threading
import time
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.config import HookConfig
from pacecar.profiler.hangs.hang_detector import (
    CHECKPOINT_SECONDS,
    FIRST_SECONDS,
    PATIENCE_SECONDS,
    HangDetector,
    is_in_loader,
    where,
)
from pacecar.profiler.hook.loading import TimedLoader
from pacecar.profiler.ranks import rank_monitor as crew_module
from pacecar.profiler.ranks.cusum import Usual, excesses, median, upper
from pacecar.profiler.ranks.exchange.gather_schedule import GatherSchedule
from pacecar.profiler.ranks.exchange.phase_sums_message import (
    MESSAGE_WORDS,
    PHASES,
    ROWS_MAX,
    HostPressure,
    RangeMessageError,
    StepNote,
    decode,
    encode,
    gather_range,
)
from pacecar.profiler.ranks.exchange.step_partition import (
    GLANCE_SECONDS_MIN,
    LAG,
    RANGE_SECONDS_MIN,
    RANGE_STEPS_MAX,
    WAITING_MAX,
    RangesError,
    StepRanges,
    gather_seconds,
    glance_seconds,
)
from pacecar.profiler.ranks.host_pressure import (
    FIND_SECONDS,
    READ_SECONDS,
    BusySockets,
    HostPressureReader,
    find_descriptors,
    parse_pressure,
    read_tcp_times,
)
from pacecar.profiler.ranks.rank_monitor import RankMonitor
from pacecar.profiler.timing.overhead_budget import OverheadBudget
from pacecar.profiler.timing.step_sampling import next_measured
from pacecar.profiler.timing.step_timer import TimedStep
from pacecar.records import HangSuspicion, JobLedger, Knobs
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello
from tests.kit.waiting import until

S = 1_000_000_000


# --- words --------------------------------------------------------------------------------------

phases = st.dictionaries(
    st.sampled_from(["data_wait", "forward", "backward", "backward_tail", "optimizer", "checkpoint", "overhead"]),
    st.integers(0, 10**10),
)


ratios = st.none() | st.integers(0, 4_000_000).map(lambda n: n / 1_000_000)
rows = st.builds(
    lambda steps, number, around, throttled, waits: msgspec.structs.replace(
        gather_range(
            [
                StepNote(7 + n, sum(p.values()) + rest, p, 3, bad, 2, device=p if bad != throttled else None, work=rest)
                for n, (p, rest, bad) in enumerate(steps)
            ],
            number=number,
            first_step=7,
            steps=20,
            meets_in=frozenset(waits),
        ),
        around=around,
        is_throttled=throttled,
    ),
    st.lists(st.tuples(phases, st.integers(0, 10**9), st.booleans()), max_size=8),
    st.integers(0, 10**6),
    st.builds(HostPressure, ratios, ratios, ratios),
    st.none() | st.booleans(),
    st.sets(st.sampled_from(["forward", "backward", "rest"])),
)


@pytest.mark.slow
@given(st.lists(rows, max_size=ROWS_MAX), st.booleans())
def test_rows_survive_their_journey_and_their_phases_sum_to_the_wall(sent, leaves):
    for row in sent:
        assert sum(row.sums[phase] for phase in PHASES[1:]) == row.sums["wall"]
    words = encode(5, sent, leaves=leaves)
    assert len(words) == MESSAGE_WORDS
    message = decode(5, words)
    assert (list(message.rows), message.leaves, message.totals) == (sent, leaves, None)


def sent(row):
    return decode(0, encode(0, [row])).rows[0]


def test_zero_is_a_measurement_and_missing_is_missing_in_a_row():
    row = gather_range([StepNote(0, 10, {}, 0, False)])
    zero = sent(msgspec.structs.replace(row, around=HostPressure(0.0, 0.0, 0.0), is_throttled=False))
    assert (zero.around, zero.is_throttled) == (HostPressure(0.0, 0.0, 0.0), False)
    missing = sent(row)
    assert (missing.around, missing.is_throttled) == (HostPressure(None, None, None), None)


def test_one_long_step_in_four_is_in_the_sum_and_not_in_the_median():
    row = gather_range([StepNote(n, 10 if n else 1000, {"forward": 8}, 0, False) for n in range(4)])
    assert row.medians is not None
    assert (row.sums["wall"], row.medians["wall"], row.wall_ns) == (1030, 10, 257)


def test_a_range_in_which_nothing_was_measured_says_that_much():
    row = sent(gather_range([], number=3, first_step=12, steps=4))
    assert (row.number, row.first_step, row.last_step, row.measured) == (3, 12, 15, 0)
    assert (row.medians, row.wall_ns) == (None, None)


def test_messages_of_another_number_version_or_length_are_refused():
    words = encode(5, [gather_range([StepNote(0, 10, {}, 0, False)])])
    for number, wrong in (
        (6, words),
        (5, words[:-1]),
        (5, [99, *words[1:]]),
        (5, [*words[:2], ROWS_MAX + 1, *words[3:]]),
    ):
        with pytest.raises(RangeMessageError):
            decode(number, wrong)


# --- ranges -------------------------------------------------------------------------------------


def note(step, *, wall=10_000_000, every=1):
    return StepNote(step, wall, {}, 0, False, every)


def cut(ranges, notes):
    made = []
    for one in notes:
        ranges.add(one)
        made += list(ranges.cut())
    return made


def row_of(cut):
    every = cut.latest.every
    return gather_range(cut.notes, number=cut.number, first_step=cut.first_step, steps=cut.steps, every=every)


@pytest.mark.slow
@given(st.lists(st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), min_size=1, max_size=6), min_size=2, max_size=4),
       st.integers(20_000, 30_000_000))  # fmt: skip
def test_ranks_that_measure_other_steps_cut_the_same_ranges_and_lose_none(cadences, wall):
    """Each rank changes how often it measures every 300 steps."""
    made = []
    ranks = [StepRanges(4) for _ in cadences]
    cuts = [[] for _ in cadences]
    heard = 0
    for step in range(1800):
        for rank, own in enumerate(cadences):
            every = own[step // 300 % len(own)]
            if step % every == 0:
                ranks[rank].add(note(step, wall=wall, every=every))
            cuts[rank] += ranks[rank].cut()
        while heard < min(map(len, cuts)):
            rows = [row_of(mine[heard]) for mine in cuts]
            for ranges in ranks:
                ranges.receive(rows)
            made.append(rows)
            heard += 1
    assert len(made) > 5
    assert all(len({(row.number, row.first_step, row.steps) for row in rows}) == 1 for rows in made)
    assert all(before[0].last_step + 1 == after[0].first_step for before, after in pairwise(made))
    for rank, own in enumerate(cadences):
        last = made[-1][0].last_step
        expected = [s for s in range(last + 1) if s % own[s // 300 % len(own)] == 0]
        assert [n.step for c in cuts[rank][: len(made)] for n in c.notes] == expected
    assert made[-1][0].steps >= 4


def test_ranges_grow_until_every_rank_measures_a_period_in_each():
    ranges, heard = StepRanges(4), []
    for step in range(0, 4000, 16):
        for made in cut(ranges, [note(step, every=16)]):
            ranges.receive([row_of(made), row_of(made)])
            heard.append(made)
    assert [len(made.notes) for made in heard[: LAG + 1]].count(0) > 0, "at first ranges hold less than every 16th step"
    assert {(made.steps, len(made.notes)) for made in heard[LAG + 2 :]} == {(64, 4)}


@pytest.mark.parametrize("every", [1, 4, 64])
@pytest.mark.parametrize("wall", [1_000, 3_000_000, 14_000_000, 100_000_000, 1_500_000_000])
def test_ranges_are_told_together_for_about_as_long_as_gathers_should_be_apart(wall, every):
    """Steps of a second are not told by the minute."""
    ranges, ends, step = StepRanges(4, 2.0), [], 0
    while len(ends) < 6:
        for made in cut(ranges, [note(step, wall=wall, every=every)]):
            ranges.receive([row_of(made)] * 2)
            if made.ends_batch and made.number > 2 * LAG:
                ends.append(made.first_step + made.steps)
        step = next_measured(step + 1, every)
    (steps,) = {after - before for before, after in pairwise(ends[-3:])}
    one = 4 * every
    assert one <= steps <= ROWS_MAX * RANGE_STEPS_MAX
    assert 2 * S <= steps * wall < 4 * S or steps == ROWS_MAX * RANGE_STEPS_MAX or (steps == one and one * wall > 2 * S)
    assert ranges.batch_end is None or ranges.batch_end > ends[-1]


def test_no_range_is_longer_than_a_person_would_wait():
    ranges = StepRanges(4)
    made = []
    for step in range(8000):
        for one in cut(ranges, [note(step, wall=1000)]):
            ranges.receive([row_of(one)] * 2)
            made.append(one.steps)
    assert max(made) == RANGE_STEPS_MAX


def test_nobody_runs_further_ahead_than_all_have_heard_and_waits_in_a_bounded_queue():
    ranges = StepRanges(4)
    assert len(cut(ranges, [note(step) for step in range(1000)])) == LAG + 1
    with pytest.raises(RangesError, match="did not answer"):
        cut(ranges, [note(step) for step in range(1000, 1000 + WAITING_MAX)])


def test_ranks_that_speak_of_different_steps_cannot_go_on():
    ranges = StepRanges(4)
    with pytest.raises(RangesError, match="different steps"):
        ranges.receive([gather_range([], first_step=0, steps=4), gather_range([], first_step=1, steps=4)])


@pytest.mark.parametrize(("count", "expected"), [(0, None), (1, 1), (4, 4), (18, 18), (19, 19), (39, 38), (99, 95)])
def test_of_few_values_the_largest_is_the_bound(count, expected):
    assert upper(range(1, count + 1), 0.95) == expected


# --- exchange -----------------------------------------------------------------------------------


class Seat:
    """A rank's end of roads in this process; a gather is complete when each rank has posted into `table`."""

    def __init__(self, table, rank):
        self.table, self.rank, self.taken = table, rank, 0

    def post(self, words):
        self.table[self.rank].append(list(words))

    def receive(self):
        if min(map(len, self.table)) <= self.taken:
            return None
        self.taken += 1
        return [words[self.taken - 1] for words in self.table]


def seats(world):
    table = [[] for _ in range(world)]
    return [Seat(table, rank) for rank in range(world)]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 300)), max_size=120))
def test_whatever_the_order_of_waking_all_ranks_hear_the_same_ranges_in_order(events):
    """Ranks add rows and look at random moments; then each looks until nothing more comes."""
    now = [0]
    ranks = [GatherSchedule(road, 3, lambda: now[0]) for road in seats(3)]
    added, heard = [0] * 3, [[] for _ in ranks]

    def turn(rank):
        heard[rank] += [[row.number for row in rows] for rows in ranks[rank].receive()]
        if ranks[rank].is_due:
            ranks[rank].post(HostPressure())

    for rank, adds, ms in events:
        now[0] += ms * 1_000_000
        if adds and added[rank] <= min(added) + LAG:
            row = gather_range([note(0, wall=10 + 10 * ms)], number=added[rank])
            ranks[rank].add(row, ends_batch=added[rank] % 4 == 3)
            added[rank] += 1
        turn(rank)
    for rank, exchange in enumerate(ranks):  # what all owe each other comes out in the end
        for number in range(added[rank], max(added) + ROWS_MAX):
            exchange.add(gather_range([note(0)], number=number), ends_batch=True)
    for _ in range(60):
        now[0] += 10**9
        for rank in range(3):
            turn(rank)
    assert heard[0] == heard[1] == heard[2]
    assert heard[0] == [[number] * 3 for number in range(len(heard[0]))]
    assert len(heard[0]) >= max(added)


@pytest.mark.parametrize(
    ("may_hurry", "expected"), [(True, [15, 31, 40, 41, 42, 43, 47, 63]), (False, [15, 31, 47, 63])]
)
def test_rows_of_usual_steps_wait_for_each_other_and_an_unusual_one_goes_at_once_if_it_may(may_hurry, expected):
    now = [0]
    exchange = GatherSchedule(seats(1)[0], 1, lambda: now[0])
    exchange.may_hurry = may_hurry
    posted = []
    for number in range(64):
        now[0] += 200_000_000
        exchange.add(
            gather_range([note(0, wall=100 if number != 40 else 120)], number=number), ends_batch=number % 16 == 15
        )
        list(exchange.receive())
        if exchange.is_due:
            posted.append(number)
            exchange.post(HostPressure())
    assert posted == expected, "batches end at the same ranges whatever was told between"


def test_hurrying_for_ever_is_not_within_the_budget():
    """Now and then a range is long, for ever: after a first burst gathers are as far apart as the budget wants."""
    now = [0]
    exchange = GatherSchedule(seats(1)[0], 1, lambda: now[0], gather_seconds=4.0)
    posted = []
    for number in range(12 * ROWS_MAX):
        now[0] += 200_000_000
        wall = 1500 if number % 6 == 5 else 1000
        exchange.add(gather_range([note(0, wall=wall)], number=number), ends_batch=number % ROWS_MAX == ROWS_MAX - 1)
        list(exchange.receive())
        if exchange.is_due:
            posted.append(number)
            exchange.post(HostPressure())
    assert posted[:6] == [11, 12, 13, 14, 15, 17]
    late = [number for number in posted if number >= 4 * ROWS_MAX]
    batches = [number for number in late if number % ROWS_MAX == ROWS_MAX - 1]
    assert len(batches) == 8
    assert len(late) <= 8 + 0.35 * (8 * ROWS_MAX * 0.2) / 4.0 + 1, "a batch each, and in between what the budget allows"


def test_what_differs_as_much_as_usual_is_usual_and_the_first_values_are():
    quiet = Usual()
    assert [quiet.add(value) for value in (100, 200, 50, 10, 100, 101, 130, 99)][:4] == [False] * 4
    noisy, heard = Usual(), 0
    for number in range(400):
        heard += noisy.add(1000 + 300 * (number * 7 % 11 - 5) // 5)
    assert heard <= 40, "not one in ten of what is noise"
    assert noisy.add(2000)


@pytest.mark.slow
@given(st.lists(st.integers(0, 30), min_size=2, max_size=12))
def test_an_excess_is_over_the_median_of_the_others(values):
    assert excesses(values) == [value - median(values[:at] + values[at + 1 :]) for at, value in enumerate(values)]


@pytest.mark.parametrize(
    ("budget", "world", "seconds"),
    [
        (0.01, 2, 1.1667),
        (0.002, 2, 5.8333),
        (0.01, 64, 6.3333),
        (0.01, 1024, 5.0),
        (0.5, 2, 0.8),
        (1.0, 2, 0.8),
        (0.0, 2, 0.8),
    ],
)
def test_gathers_take_their_share_of_the_budget_at_most(budget, world, seconds):
    assert gather_seconds(budget, world) == pytest.approx(seconds, rel=1e-3)
    assert seconds >= ROWS_MAX * RANGE_SECONDS_MIN
    assert glance_seconds(budget) >= GLANCE_SECONDS_MIN


# --- sockets and the rest of the machine --------------------------------------------------------


def test_a_socket_whose_peer_does_not_read_is_the_receivers_fault_and_a_descriptor_of_another_kind_is_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        with theirs:
            found = read_tcp_times(find_descriptors())
            assert {mine.fileno(), theirs.fileno()} <= set(found)
            assert server.fileno() not in found, "a listening socket sends nothing"
            assert all(busy >= 0 for busy in found.values())


def test_busy_time_adds_up_sockets_and_takes_a_number_that_fell_for_a_new_socket():
    now, readings = [0], [{1: 100, 2: 50}, {1: 300, 2: 50}, {1: 20, 3: 30}, {}, {1: 5}]
    sockets = BusySockets(lambda: now[0], find=lambda: [1, 2, 3], read=lambda known: readings.pop(0))
    seen = []
    while readings:
        now[0] += round(FIND_SECONDS * 1e9)
        seen.append(sockets.total_ns())
    assert seen == [0, 200, 250, None, 255]


def test_between_two_searches_only_known_sockets_are_asked():
    now, asked = [0], []
    sockets = BusySockets(
        lambda: now[0], find=lambda: [1, 2, 3], read=lambda known: asked.append(list(known)) or dict.fromkeys([2], 7)
    )
    for _ in range(3):
        sockets.total_ns()
        now[0] += round(FIND_SECONDS * 1e9) // 2
    assert asked == [[1, 2, 3], [2], [1, 2, 3]]


def test_the_machines_pressure_is_the_total_of_some_and_nothing_else():
    assert parse_pressure(b"some avg10=0.00 avg60=1.20 avg300=0.10 total=123\nfull avg10=0.00 total=9\n") == 123_000
    assert parse_pressure(b"full total=1") is None
    assert parse_pressure(b"") is None
    with pytest.raises(ValueError, match="no total"):
        parse_pressure(b"some avg10=0.00")


def test_surroundings_are_ratios_over_the_time_between_two_readings_and_none_where_nobody_tells(tmp_path):
    now = [0]
    task = tmp_path / "self" / "task" / "77"
    task.mkdir(parents=True)
    (task / "schedstat").write_text("1 1000000 3\n")
    busy = [100, 100 + 150_000_000, 0]
    sockets = BusySockets(lambda: now[0], find=lambda: [4], read=lambda known: {4: busy.pop(0)})
    reader = HostPressureReader(lambda: now[0], sockets=sockets, proc=str(tmp_path))
    reader.open(77)
    (task / "schedstat").write_text("1 51000000 3\n")
    now[0] = round(READ_SECONDS * 1e9) - 1
    assert reader.latest() == HostPressure(), "too soon for a ratio"
    now[0] = 200_000_000
    assert reader.latest() == HostPressure(0.75, 0.25, None)
    now[0] += 1
    assert reader.latest() == HostPressure(0.75, 0.25, None), "ranges cut together share a reading"
    reader.close()
    reader.close()


# --- the hang watch -----------------------------------------------------------------------------


def watched():
    watch = HangDetector(10 * S, 0)
    for step in range(8):
        watch.stepped(step, S // 10, step * S)
    return watch


def test_a_hang_is_suspected_once_and_taken_back_when_a_step_ends():
    watch = watched()
    assert watch.check(17 * S, "tail") is None
    suspicion = watch.check(18 * S, "tail")
    assert suspicion is not None
    assert (suspicion.step, suspicion.phase, suspicion.silent_ns, suspicion.has_ended) == (8, "tail", 11 * S, False)
    assert watch.check(60 * S, "tail") is None
    watch.stepped(8, 53 * S, 60 * S)
    ended = watch.check(61 * S, "forward")
    assert ended is not None
    assert (ended.step, ended.silent_ns, ended.has_ended) == (8, 53 * S, True)
    assert watch.check(62 * S, "forward") is None


def test_a_checkpoint_an_evaluation_and_the_first_step_have_longer():
    assert watched().check(round(CHECKPOINT_SECONDS) * S, "checkpoint") is None
    assert watched().check(30 * S, "outside", alive_ns=25 * S) is None
    assert HangDetector(10 * S, 0).check(round(FIRST_SECONDS) * S - 1, "forward") is None
    assert HangDetector(10 * S, 0).check(round(FIRST_SECONDS) * S + 1, "forward") is not None


def test_all_ranks_are_asked_after_some_seconds_and_in_the_first_step_later():
    watch = watched()
    assert not watch.is_quiet(12 * S, "tail", None)
    assert watch.is_quiet(12 * S + 1, "tail", None)
    assert not watch.is_quiet(13 * S, "tail", 9 * S), "the model ran forward"
    first = HangDetector(10 * S, 0)
    assert not first.is_quiet(30 * S, "forward", None)
    assert first.is_quiet(30 * S + 1, "forward", None)


def test_a_rank_is_given_longer_after_long_pauses_of_the_same_kind_but_not_after_a_hang():
    def patience(phase, pause, *, is_hang=False):
        watch = HangDetector(120 * S, 0)
        watch.stepped(0, S // 10, 0)
        for second in range(1, pause):
            watch.is_quiet(second * S, phase, None)
            if is_hang:
                watch.forget_pause()
        watch.stepped(1, S // 10, pause * S)
        watch.is_quiet(pause * S, "tail", None)
        return watch.patience_ns(phase) / S

    assert patience("tail", 2) == PATIENCE_SECONDS
    assert patience("tail", 20) == 1.5 * 20
    assert patience("tail", 20, is_hang=True) == PATIENCE_SECONDS
    assert patience("tail", 900) == 120
    assert patience("checkpoint", 60) == 1.5 * 60
    assert HangDetector(S, 0).patience_ns("tail") == FIRST_SECONDS * S


def test_a_checkpoint_is_given_as_long_as_ever_after_the_process_was_stopped_in_it():
    watch = HangDetector(120 * S, 0)
    watch.stepped(0, S // 10, 0)
    for second in range(1, 20):
        watch.is_quiet(second * S, "checkpoint", 6 * S if second > 6 else None)
    assert watch.patience_ns("checkpoint") == CHECKPOINT_SECONDS * S
    watch.stepped(1, S // 10, 20 * S)
    watch.is_quiet(20 * S, "tail", 6 * S)
    assert watch.patience_ns("checkpoint") == 1.5 * (20 - 6) * S


def test_a_model_that_is_trained_on_without_steps_is_not_hung_and_said_once_with_how_long(caplog):
    clock = FakeClock()
    crew, records = make_crew(None, world=1, clock=clock, config=HookConfig(hang_seconds=10.0))
    feed(crew, 20)
    crew._record_steps()
    for second in range(60):
        crew._watched.trained_ns = clock.monotonic_ns()
        clock.advance(S)
        crew._check_for_hang()
        assert crew._watched.is_watched == (second >= 2), "calls are watched once half the time to an inquiry is over"
    assert records == []
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "ended step 20 for 11 s" in said[0]
    clock.advance(11 * S)  # now it does nothing at all
    crew._check_for_hang()
    assert [record.step for record in records] == [20]


def test_an_evaluation_is_not_taken_for_training_by_something_else():
    watch = watched()
    assert watch.unseen_ns(40 * S, "outside", None) is None
    assert watch.unseen_ns(40 * S, "outside", 8 * S) is None, "trained last when the last step ended"
    assert watch.unseen_ns(40 * S, "outside", 39 * S) == 33 * S
    assert watch.unseen_ns(9 * S, "outside", 9 * S) is None


def test_slow_steps_have_thirty_times_their_own_length():
    watch = HangDetector(10 * S, 0)
    watch.stepped(0, 5 * S, 5 * S)
    assert watch.check(150 * S, "forward") is None
    assert watch.check(156 * S, "forward") is not None


def test_a_thread_is_found_where_it_stands_and_in_the_loader_only_while_it_waits():
    go, stand, loaded = threading.Event(), threading.Event(), threading.Event()

    def slow():
        stand.set()
        go.wait(10)
        yield 1

    def train():
        for _ in TimedLoader(slow(), now_ns=time.monotonic_ns, waited=lambda a, b: None, drawn=lambda *_: None):
            loaded.set()
            go.wait(10)

    thread = threading.Thread(target=train)
    thread.start()
    assert thread.ident is not None
    stand.wait(10)
    assert is_in_loader(thread.ident)
    go.set()
    loaded.wait(10)
    thread.join()
    assert where(thread.ident) is None
    assert "test_rank_monitor.py" in (where(threading.get_ident()) or "")
    assert not is_in_loader(threading.get_ident())


# --- the crew's thread --------------------------------------------------------------------------


@pytest.fixture
def farewell_is_short(monkeypatch):
    """Another rank may close a little before this one: nothing here does, so nothing is waited for."""
    monkeypatch.setattr(crew_module, "FAREWELL_SECONDS", 0.05)


class Training:
    def __init__(self):
        self.phase, self.evaluated_ns, self.step, self.is_alive = "outside", None, 0, True
        self.begun_ns, self.looks, self.trained_ns, self.is_watched = None, 0, None, False
        self.budget, self.records = OverheadBudget(1.0, warmup_steps=3, interval_steps=50), self

    def watch_calls(self):
        self.is_watched = True

    def current_step(self):
        return self.step, self.begun_ns

    def flush_in_background(self, after_seconds):
        self.looks += 1

    is_ddp = True

    def meeting_phases(self):
        return frozenset()


class Echo:
    """A road on which all ranks are this one; `fails` says at which post it breaks."""

    def __init__(self, world, *, fails=None, answers=True):
        self.world, self.fails, self.answers, self.words, self.posts, self.is_closed = (
            world,
            fails,
            answers,
            None,
            0,
            False,
        )

    @property
    def is_busy(self):
        return self.words is not None

    def connect(self, claim, name, rest):
        if self.fails == "connect":
            raise RuntimeError("no such port")

    def post(self, words):
        self.posts += 1
        if self.fails == self.posts:
            raise RuntimeError("Connection reset by peer")
        self.words = list(words)

    def receive(self):
        if not self.answers or self.words is None:
            return None
        words, self.words = self.words, None
        return [words] * self.world

    def close(self):
        self.is_closed = True


def make_crew(road, *, rank=0, world=2, config=None, clock=None):
    records = []
    hello = job_hello(rank, world)
    crew = RankMonitor(hello, config or HookConfig(), Training(), emit=records.append, transport=road, clock=clock)
    return crew, records


class Record:
    """What the crew reads of a StepRecord."""

    def __init__(self, step, every):
        self.step, self.knobs, self.disturbed, self.measured_every = step, Knobs(), False, every
        self.source, self.calibration_age_steps, self.gc_ns, self.tokens = "estimate", None, 0, None


def feed(crew, steps, *, first=0, wall=10_000_000, every=1):
    for step in range(first, first + steps, every):
        timed = TimedStep(
            start_ns=step * wall, end_ns=(step + 1) * wall, phases={"forward": wall // 2}, marks={}, micro_batches=1,
            overhead_ns=0,
        )  # fmt: skip
        crew.note(timed, Record(step, every))
        crew._watched.step, crew._watched.begun_ns = step + 1, timed.end_ns


@pytest.mark.slow
def test_rank_zero_says_the_jobs_ledger_and_others_say_nothing():
    for rank, speaks in ((0, True), (1, False)):
        road = Echo(2)
        crew, records = make_crew(road, rank=rank)
        crew.start()
        feed(crew, 4 * ROWS_MAX)
        until(lambda road=road: road.posts >= 1 and not road.is_busy)
        crew.close()
        assert road.is_closed
        ledgers = [record for record in records if isinstance(record, JobLedger)]
        assert bool(ledgers) == speaks
        assert all(sum(one.total_phases_ns.values()) == one.total_wall_ns for one in ledgers)


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["connect", 1, 2, 3])
def test_a_road_that_breaks_at_any_use_turns_the_crew_off_with_one_line_and_hangs_are_still_watched(
    caplog, fails, farewell_is_short
):
    clock = FakeClock()
    crew, records = make_crew(Echo(2, fails=fails), config=HookConfig(hang_seconds=1.0), clock=clock)
    with caplog.at_level(logging.WARNING):
        crew.start()
        feed(crew, 4 * 4 * ROWS_MAX)
        until(lambda: crew.off_because is not None)
        feed(crew, 40, first=4 * 4 * ROWS_MAX)
        clock.advance(3000 * S)
        until(lambda: any(isinstance(record, HangSuspicion) for record in records))
        crew.close()
    assert sum("does not compare the ranks" in line for line in caplog.messages) == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [False, True])
def test_a_rank_that_has_gone_is_said_in_one_line_by_the_crew_or_by_the_tuner(caplog, farewell_is_short, is_told):
    crew, _ = make_crew(Echo(2, fails=2))
    crew._is_told = lambda: is_told
    with caplog.at_level(logging.WARNING):
        crew.start()
        feed(crew, 4 * 4 * ROWS_MAX)
        until(lambda: crew.off_because is not None)
        crew.close()
    lines = ["pacecar does not compare the ranks of this job: the connection to another rank has ended"]
    assert caplog.messages == ([] if is_told else lines)


class GoneAtTheEnd(Echo):
    """Its other rank ended before this one had heard its last gather."""

    closing = None

    def receive(self):
        if self.closing.is_set():
            raise RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1")


@pytest.mark.slow
def test_at_the_end_of_a_job_a_rank_that_was_faster_is_nothing_to_speak_of(caplog):
    road = GoneAtTheEnd(2)
    crew, _ = make_crew(road)
    road.closing = crew._closing
    with caplog.at_level(logging.INFO):
        crew.start()
        feed(crew, 4 * 4 * ROWS_MAX)
        until(lambda: road.posts == 1)
        crew.close()
        until(lambda: road.is_closed)
    assert caplog.records == []


@pytest.mark.slow
@pytest.mark.usefixtures("farewell_is_short")
def test_a_rank_that_never_answers_turns_the_crew_off_and_the_queue_stays_bounded():
    crew, _ = make_crew(Echo(2, answers=False))
    crew.start()
    feed(crew, 3000)
    until(lambda: not crew._notes)
    feed(crew, 3000, first=3000)
    until(lambda: crew.off_because is not None)
    assert "did not answer" in crew.off_because
    crew.close()


@pytest.mark.slow
def test_short_steps_are_gathered_in_longer_ranges_and_never_longer_than_a_hook_could_bear():
    road = Echo(2)
    crew, _ = make_crew(road)
    crew.start()
    feed(crew, 2000, wall=1_000_000)
    least = (LAG + 1) // ROWS_MAX + (2000 - 4 * (LAG + 1)) // 128 // ROWS_MAX
    until(lambda: road.posts >= least)
    crew.close()
    assert road.posts <= 40


@pytest.mark.slow
def test_a_hook_that_measures_every_sixteenth_step_keeps_its_crew_and_says_how_much_was_measured():
    road = Echo(2)
    crew, records = make_crew(road)
    crew.start()
    feed(crew, 64 * 60, wall=5_000_000, every=16)

    until(lambda: road.posts == 7 and not road.is_busy)  # all 3840 steps are told then
    crew.close()
    assert crew.off_because is None
    last = [record for record in records if isinstance(record, JobLedger)][-1]
    assert last.total_measured_steps is not None
    assert abs(last.total_measured_steps / 2 - last.total_steps / 16) < 20


@pytest.mark.slow
@pytest.mark.usefixtures("farewell_is_short")
def test_a_hook_that_turned_itself_off_says_goodbye_to_the_crew_and_is_not_taken_for_hung(caplog):
    clock = FakeClock()
    crew, records = make_crew(Echo(2), clock=clock, config=HookConfig(hang_seconds=1.0))
    with caplog.at_level(logging.WARNING):
        crew.start()
        feed(crew, 20)
        until(lambda: not crew._notes)
        crew._watched.is_alive = False
        clock.advance(3000 * S)
        until(lambda: not crew._thread.is_alive())
        crew.close()
    assert crew.off_because == "rank 0 measures no more"
    assert not any(isinstance(record, HangSuspicion) for record in records)


@pytest.mark.slow
def test_steps_that_are_only_counted_are_signs_of_life():
    clock = FakeClock()
    crew, records = make_crew(None, world=1, clock=clock, config=HookConfig(hang_seconds=1.0))
    crew.start()
    feed(crew, 2)
    until(lambda: not crew._notes)
    for step in range(10, 16):
        crew._watched.step = step
        until(lambda step=step: crew._hang_detector._step == step)
        clock.advance(S * 9 // 10)
    assert records == []
    clock.advance(2 * S)
    until(lambda: records)
    crew.close()
    assert records[0].step == 15


def test_one_process_alone_is_watched_and_gathers_nothing():
    crew, records = make_crew(None, world=1)
    crew.start()
    feed(crew, 20)
    crew.close()
    assert records == []
    assert crew.off_because is not None


def test_closing_twice_and_without_a_start_is_harmless():
    crew, _ = make_crew(None, world=1)
    crew.close()
    crew.start()
    crew.close()
    crew.close()
