"""Jobs that return share one thread, and any number of hung jobs delay the others only briefly."""

import threading
from contextlib import suppress

import pytest

from pacecar.monitor import worker_pool
from pacecar.monitor.worker_pool import IdleTask, WorkerPool
from tests.kit.waiting import until


class Jobs:
    """Jobs that record their thread, and some that hang until they are released."""

    def __init__(self):
        self.ran = []
        self.let_go = threading.Event()

    def quick(self, name):
        return lambda: self.ran.append((name, threading.current_thread().name))

    def hang(self):
        self.let_go.wait(60)

    def names(self):
        return [name for name, _ in self.ran]

    def threads(self):
        return {thread for _, thread in self.ran}


@pytest.fixture
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.let_go.set()


@pytest.fixture
def pool(jobs):
    pool = WorkerPool("test")
    yield pool
    jobs.let_go.set()
    until(lambda: pool.stop(1), "all have ended")


@pytest.mark.slow
def test_jobs_that_return_share_one_thread_in_order(pool, jobs):
    for turn in range(50):
        for name in range(10):
            pool.submit(jobs.quick((turn, name)))
        until(lambda turn=turn: len(jobs.ran) == 10 * (turn + 1), "all ran")
    assert jobs.names() == [(turn, name) for turn in range(50) for name in range(10)]
    assert len(jobs.threads()) == 1


def test_jobs_that_are_given_together_begin_when_all_are_given(pool, jobs):
    with pool.batch():
        for name in "abc":
            pool.submit(jobs.quick(name))
        assert not pool._workers
    until(lambda: jobs.names() == ["a", "b", "c"], "all ran")
    with suppress(ZeroDivisionError), pool.batch():
        pool.submit(jobs.quick("d"))
        raise ZeroDivisionError
    pool.submit(jobs.quick("e"))
    until(lambda: jobs.names()[3:] == ["d", "e"], "an error keeps no job back")
    assert len(jobs.threads()) == 1


def test_a_job_that_hangs_holds_up_nobody_once_somebody_hastens(pool, jobs):
    pool.submit(jobs.hang)
    until(lambda: not pool.has_waiting, "it hangs")
    for name in "abc":
        pool.submit(jobs.quick(name))
    pool.help_if_stuck()  # the hung one was begun since the last call: it is given until the next
    pool.help_if_stuck()
    until(lambda: len(jobs.ran) == 3, "the others ran")
    assert jobs.names() == ["a", "b", "c"]
    assert len(jobs.threads()) == 1


def test_many_that_hang_cost_a_thread_each_and_the_next_ones_run_at_once(pool, jobs):
    for _ in range(8):
        pool.submit(jobs.hang)
    until(lambda: pool.help_if_stuck() or not pool.has_waiting, "all hang")
    pool.submit(jobs.quick("a"))
    until(lambda: pool.help_if_stuck() or jobs.names() == ["a"], "the other ran")
    assert len(pool._workers) == 9
    jobs.let_go.set()
    until(lambda: len(pool._idle) == len(pool._workers), "all are idle")
    pool.submit(jobs.quick("b"))
    until(lambda: jobs.names() == ["a", "b"], "it runs")


def test_each_that_hangs_delays_the_others_by_one_call(pool, jobs):
    for _ in range(3):
        pool.submit(jobs.hang)
    pool.submit(jobs.quick("a"))
    until(lambda: len(pool._jobs) == 3, "one hangs")
    pool.help_if_stuck()
    for waiting in (2, 1, 0):
        pool.help_if_stuck()
        until(lambda waiting=waiting: len(pool._jobs) == waiting, "the next was begun", seconds=5)
    until(lambda: jobs.names() == ["a"], "the last ran")


def test_a_job_known_to_take_long_is_begun_beside_the_others(pool, jobs):
    pool.submit(jobs.hang, at_once=True)
    pool.submit(jobs.hang, at_once=True)
    until(lambda: not pool.has_waiting, "both have begun, though nobody hastened")
    assert len(pool._workers) == 2


def test_however_often_one_hastens_there_are_no_more_threads_than_jobs(pool, jobs):
    for _ in range(3):
        pool.submit(jobs.hang)
    for _ in range(1000):
        pool.help_if_stuck()
    assert len(pool._workers) <= 3


def test_a_job_that_raises_costs_itself_only(pool, jobs, caplog):
    pool.submit(lambda: 1 / 0)
    pool.submit(jobs.quick("a"))
    until(lambda: jobs.names() == ["a"], "the next ran")
    assert "ZeroDivisionError" in caplog.text


def test_a_thread_that_the_system_refuses_is_asked_for_again(pool, jobs, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            pool.submit(jobs.quick("a"))
        assert pool.stop(0.01), "there is nothing to end"
    pool.help_if_stuck()
    until(lambda: jobs.names() == ["a"], "it ran")


def test_threads_that_are_not_needed_end_but_for_one(jobs, monkeypatch):
    monkeypatch.setattr(worker_pool, "IDLE_SECONDS", 0.05)
    pool = WorkerPool("test")
    for _ in range(4):
        pool.submit(jobs.hang, at_once=True)
    until(lambda: not pool.has_waiting, "all have begun")
    jobs.let_go.set()
    until(lambda: len(pool._workers) == 1, "one is left")
    pool.submit(jobs.quick("a"))
    until(lambda: jobs.names() == ["a"], "it works")
    until(lambda: pool.stop(1), "all have ended")


def test_a_pool_that_stops_leaves_a_hung_thread_behind(jobs):
    pool = WorkerPool("test")
    pool.submit(jobs.hang)
    until(lambda: not pool.has_waiting, "it hangs")
    assert not pool.stop(0.01)
    jobs.let_go.set()
    until(lambda: not pool._workers, "it ended when its job returned")


class Turns:
    """An idle task that records its thread, and hangs when told to."""

    def __init__(self, jobs, pause_seconds=0.001):
        self.pause_seconds = pause_seconds
        self.threads = []
        self.hangs = False
        self._jobs = jobs

    def run(self):
        self.threads.append(threading.current_thread().name)
        if self.hangs:
            self.hangs = False
            self._jobs.hang()
        if len(self.threads) == 3:
            raise ValueError("the third")


@pytest.fixture
def turns(jobs):
    return Turns(jobs)


@pytest.fixture
def turning(jobs, turns):
    pool = WorkerPool("test", IdleTask(lambda: turns.pause_seconds, turns.run))
    yield pool
    jobs.let_go.set()
    until(lambda: pool.stop(1), "all have ended")


def test_what_is_between_jobs_is_done_by_their_thread_again_and_again_also_after_it_raised(
    turning, turns, jobs, caplog
):
    turning.submit(jobs.quick("a"))
    until(lambda: len(turns.threads) > 5, "there were some turns")
    turning.submit(jobs.quick("b"))
    until(lambda: jobs.names() == ["a", "b"], "both ran")
    assert set(turns.threads) == jobs.threads()
    assert len(jobs.threads()) == 1
    assert "the third" in caplog.text


def test_without_a_pause_nothing_is_done_before_the_next_job(turning, turns, jobs):
    turns.pause_seconds = None
    turning.submit(jobs.quick("a"))
    until(lambda: turning._idle, "it waits")
    assert turns.threads == []
    turns.pause_seconds = 0.001
    turning.submit(jobs.quick("b"))
    until(lambda: turns.threads, "there was a turn")


def test_a_turn_between_jobs_that_hangs_holds_up_no_job_and_the_next_thread_takes_the_turns(turning, turns, jobs):
    turns.hangs = True
    turning.submit(jobs.quick("a"))
    until(lambda: turns.threads and not turns.hangs, "it hangs")
    turning.submit(jobs.quick("b"))
    until(lambda: turning.help_if_stuck() or jobs.names() == ["a", "b"], "the next ran")
    until(lambda: len(turns.threads) > 5, "there were turns")
    assert len(jobs.threads()) == 2
    assert len(turning._workers) == 2
    jobs.let_go.set()
    until(lambda: len(turning._idle) > 1, "both are idle")


def test_of_two_idle_threads_only_one_takes_turns_and_the_other_ends(turning, turns, jobs, monkeypatch):
    monkeypatch.setattr(worker_pool, "IDLE_SECONDS", 0.05)
    for _ in range(2):
        turning.submit(jobs.hang, at_once=True)
    until(lambda: not turning.has_waiting, "both have begun")
    jobs.let_go.set()
    until(lambda: len(turning._workers) == 1, "one is left")
    turns.threads.clear()
    until(lambda: len(turns.threads) > 5, "there were some turns")
    assert len(set(turns.threads)) == 1
