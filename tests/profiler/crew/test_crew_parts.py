"""Words, sockets, hang watch, flight recorder and the crew's thread: each part of the crew by itself."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.clock import FakeClock
from pacecar.config import HookConfig
from pacecar.profiler.crew.collectives import describe_last
from pacecar.profiler.crew.crew import PENDING_MAX, Crew
from pacecar.profiler.crew.sockets import BusySockets, read_tcp_times
from pacecar.profiler.crew.watch import CHECKPOINT_SECONDS, FIRST_SECONDS, HangWatch, is_in_loader, where
from pacecar.profiler.crew.words import PHASES, WORDS, StepNote, WordsError, decode, encode, gather_range
from pacecar.profiler.loader import TimedLoader
from pacecar.profiler.steptimer import TimedStep
from pacecar.records import HangSuspicion, JobHello, JobLedger, Knobs

S = 1_000_000_000


# --- words --------------------------------------------------------------------------------------

phases = st.dictionaries(
    st.sampled_from(["data_wait", "forward", "backward", "backward_tail", "optimizer", "checkpoint", "overhead"]),
    st.integers(0, 10**10),
)


@given(
    st.lists(st.tuples(phases, st.integers(0, 10**9), st.booleans()), min_size=1, max_size=8),
    st.none() | st.integers(0, 4_000_000).map(lambda n: n / 1_000_000),
    st.none() | st.integers(0, 10**12),
    st.none() | st.booleans(),
)
def test_a_row_survives_its_journey_and_its_phases_sum_to_the_wall(steps, busy, count, throttled):
    notes = [StepNote(7 + n, sum(p.values()) + rest, p, 3, bad) for n, (p, rest, bad) in enumerate(steps)]
    row = gather_range(notes, busy_ratio=busy, cpu_wait_ns=count, sequence=count, is_throttled=throttled)
    assert sum(row.sums[phase] for phase in PHASES[1:]) == row.sums["wall"]
    assert (row.medians is None) == all(bad for _, _, bad in steps)
    words = encode(5, row)
    assert len(words) == WORDS
    assert decode(5, words) == row


def test_zero_is_a_measurement_and_missing_is_missing_in_a_row():
    note = StepNote(0, 10, {}, 0, False)
    zero = decode(0, encode(0, gather_range([note], busy_ratio=0.0, cpu_wait_ns=0, sequence=0, is_throttled=False)))
    assert (zero.busy_ratio, zero.cpu_wait_ns, zero.sequence, zero.is_throttled) == (0.0, 0, 0, False)
    missing = decode(0, encode(0, gather_range([note])))
    assert [missing.busy_ratio, missing.cpu_wait_ns, missing.sequence, missing.is_throttled] == [None] * 4


def test_one_long_step_in_four_is_in_the_sum_and_not_in_the_median():
    row = gather_range([StepNote(n, 10 if n else 1000, {"forward": 8}, 0, False) for n in range(4)])
    assert row.medians is not None
    assert (row.sums["wall"], row.medians["wall"]) == (1030, 10)


def test_rows_of_another_range_version_or_length_are_refused():
    words = encode(5, gather_range([StepNote(0, 10, {}, 0, False)]))
    for number, wrong in ((6, words), (5, words[:-1]), (5, [99, *words[1:]])):
        with pytest.raises(WordsError):
            decode(number, wrong)


# --- sockets ------------------------------------------------------------------------------------


def test_a_socket_whose_peer_does_not_read_is_the_receivers_fault_and_a_descriptor_of_another_kind_is_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        with theirs:
            found = dict(read_tcp_times())
            assert {mine.fileno(), theirs.fileno()} <= set(found)
            assert server.fileno() not in found, "a listening socket sends nothing"
            assert all(busy >= 0 for busy in found.values())


def test_the_ratio_adds_up_sockets_and_takes_a_number_that_fell_for_a_new_socket():
    now, readings = [0], [{1: 100, 2: 50}, {1: 300, 2: 50}, {1: 20, 3: 30}, {}, {1: 5}]
    sockets = BusySockets(lambda: now[0], lambda: iter(readings.pop(0).items()))
    seen = []
    while readings:
        now[0] += 1000
        seen.append(sockets.ratio())
    assert seen == [None, 0.2, 0.05, None, None]


# --- the hang watch -----------------------------------------------------------------------------


def watched():
    watch = HangWatch(10 * S, 0)
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
    assert HangWatch(10 * S, 0).check(round(FIRST_SECONDS) * S - 1, "forward") is None
    assert HangWatch(10 * S, 0).check(round(FIRST_SECONDS) * S + 1, "forward") is not None


def test_slow_steps_have_thirty_times_their_own_length():
    watch = HangWatch(10 * S, 0)
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
        for _ in TimedLoader(slow(), now_ns=time.monotonic_ns, waited=lambda a, b: None, drawn=lambda batch: None):
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
    assert "test_crew_parts.py" in (where(threading.get_ident()) or "")
    assert not is_in_loader(threading.get_ident())


# --- the flight recorder ------------------------------------------------------------------------


def test_the_last_collective_is_the_jobs_and_not_our_own():
    entries = [
        {"profiling_name": "nccl:all_reduce", "collective_seq_id": 41, "process_group": ["0", "default_pg"],
         "input_sizes": [[1024]], "state": "started"},
        {"profiling_name": "gloo:all_gather", "collective_seq_id": 9, "process_group": ["3", "undefined"],
         "input_sizes": [[WORDS]], "state": "scheduled"},
    ]  # fmt: skip
    text = describe_last(json.dumps({"entries": entries}).encode())
    assert text == "nccl:all_reduce #41 on group 0/default_pg, sizes [[1024]], started"
    assert describe_last(b'{"entries": []}') is None
    assert describe_last(b"{}") is None


# --- the crew's thread --------------------------------------------------------------------------


class Training:
    phase = "outside"
    evaluated_ns = None

    def look(self):
        pass


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

    def open(self, claim, name, rest):
        if self.fails == "open":
            raise RuntimeError("no such port")

    def post(self, words):
        self.posts += 1
        if self.fails == self.posts:
            raise RuntimeError("Connection reset by peer")
        self.words = list(words)

    def take(self):
        if not self.answers or self.words is None:
            return None
        words, self.words = self.words, None
        return [words] * self.world

    def close(self):
        self.is_closed = True


def make_crew(road, *, rank=0, world=2, config=None, clock=None):
    records = []
    hello = JobHello(
        job="j", rank=rank, local_rank=rank, world_size=world, pid=1, host="h", device="cpu", backend="gloo",
        framework="torch", pacecar_version="0", started_wall_ns=0,
    )  # fmt: skip
    crew = Crew(hello, config or HookConfig(), Training(), emit=records.append, road=road, clock=clock)
    return crew, records


class Record:
    """What the crew reads of a StepRecord."""

    def __init__(self, step):
        self.step, self.knobs, self.disturbed = step, Knobs(), False


def feed(crew, steps, *, first=0, wall=10_000_000):
    for step in range(first, first + steps):
        timed = TimedStep(
            start_ns=step * wall, end_ns=(step + 1) * wall, phases={"forward": wall // 2}, marks={}, micro_batches=1,
            overhead_ns=0,
        )  # fmt: skip
        crew.note(timed, Record(step))


def until(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_rank_zero_says_the_jobs_ledger_and_others_say_nothing():
    for rank, count in ((0, 1), (1, 0)):
        road = Echo(2)
        crew, records = make_crew(road, rank=rank)
        crew.start()
        feed(crew, 8)
        until(lambda road=road: road.posts == 2 and not road.is_busy)
        crew.close()
        assert road.is_closed
        ledgers = [record for record in records if isinstance(record, JobLedger)]
        assert len(ledgers) == count
        assert all(sum(one.total_phases_ns.values()) == one.total_wall_ns for one in ledgers)


@pytest.mark.parametrize("fails", ["open", 1, 2, 3])
def test_a_road_that_breaks_at_any_use_turns_the_crew_off_with_one_line_and_hangs_are_still_watched(caplog, fails):
    clock = FakeClock()
    crew, records = make_crew(Echo(2, fails=fails), config=HookConfig(hang_seconds=1.0), clock=clock)
    with caplog.at_level(logging.WARNING):
        crew.start()
        feed(crew, 40)
        until(lambda: crew.off_because is not None)
        feed(crew, 40, first=40)
        clock.advance(3000 * S)
        until(lambda: any(isinstance(record, HangSuspicion) for record in records))
        crew.close()
    assert sum("does not compare the ranks" in line for line in caplog.messages) == 1


def test_a_rank_that_never_answers_turns_the_crew_off_and_the_queue_stays_bounded(caplog):
    crew, _ = make_crew(Echo(2, answers=False))
    crew.start()
    feed(crew, 4 * PENDING_MAX + 5000)
    until(lambda: crew.off_because is not None)
    assert "did not answer" in crew.off_because
    crew.close()


def test_short_steps_are_gathered_in_longer_ranges_and_never_longer_than_a_hook_could_bear():
    road = Echo(2)
    crew, _ = make_crew(road)
    crew.start()
    feed(crew, 2000, wall=1_000_000)
    until(lambda: not crew._notes and not road.is_busy)
    crew.close()
    assert PENDING_MAX + 1 + (2000 - 4 * (PENDING_MAX + 1)) // 50 - 1 <= road.posts <= 70


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
