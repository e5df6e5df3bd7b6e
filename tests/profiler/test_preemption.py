"""What others had of the processor is not ours, and what the job waits for is."""

import threading
import time

import pytest

from pacecar.config import HookConfig
from pacecar.profiler.timing.preemption import SCHEDSTAT, Preemption

MS = 1_000_000


def delayed(path, delay_ns):
    path.write_text(f"123456789 {delay_ns} 77\n")


@pytest.fixture
def stat(tmp_path):
    path = tmp_path / "schedstat"
    delayed(path, 0)
    return path


def test_what_passed_in_line_is_taken_off_once(stat):
    preemption = Preemption(stat)
    delayed(stat, 5 * MS)
    preemption.begin()
    delayed(stat, 12 * MS)
    assert preemption.is_begun
    assert preemption.end() == 7 * MS
    assert not preemption.is_begun
    assert preemption.own_ns(10 * MS) == 3 * MS
    assert preemption.own_ns(10 * MS) == 10 * MS
    preemption.close()


def test_several_stretches_add_up_and_more_than_all_is_not_taken_off(stat):
    preemption = Preemption(stat)
    for delay_ms in (3, 9):
        preemption.begin()
        delayed(stat, delay_ms * MS)
        preemption.end()
    assert preemption.own_ns(20 * MS) == 11 * MS
    preemption.begin()
    delayed(stat, 99 * MS)
    preemption.end()
    assert preemption.own_ns(20 * MS) == 0


def test_an_end_without_a_beginning_finds_nothing(stat):
    preemption = Preemption(stat)
    assert preemption.end() == 0
    assert preemption.own_ns(5) == 5


def test_where_the_kernel_tells_nothing_all_of_the_time_is_ours(tmp_path):
    for path in (tmp_path / "missing", tmp_path / "empty"):
        if path.name == "empty":
            path.write_text("")
        preemption = Preemption(path)
        preemption.begin()
        assert preemption.end() == 0
        assert preemption.own_ns(5 * MS) == 5 * MS
        preemption.close()


def test_another_thread_is_asked_for_its_own(stat, tmp_path):
    preemption = Preemption(stat)
    preemption.begin()
    other = tmp_path / "other"
    delayed(other, 40 * MS)
    preemption._path = other
    found = []

    def ask():
        preemption.begin()
        delayed(other, 45 * MS)
        found.append(preemption.end())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [5 * MS]
    preemption.close()


@pytest.mark.slow
@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="this kernel has no schedstat")
def test_the_kernel_counts_no_time_in_line_for_a_thread_that_sleeps_by_itself():
    preemption = Preemption()
    slept = []
    for _ in range(20):  # a busy machine lets a thread wait after it woke; not each time for so long
        preemption.begin()
        time.sleep(0.02)
        slept.append(preemption.end())
    preemption.close()
    assert min(slept) < 20 * MS


@pytest.mark.slow
def test_a_boundary_at_which_a_listener_began_is_charged_without_what_others_had(job, attach, sink, stat):
    """It takes as long twice; the first time it says `begin`, and the kernel that others had all of it and more."""
    hooks = []

    def listen(step):
        if step is None or step.step not in (5, 8):
            return
        preemption = hooks[0].preemption
        if step.step == 5:
            preemption.close()
            preemption._path = stat
            preemption.begin()
            delayed(stat, 10_000 * MS)
        time.sleep(0.3)

    hooks.append(attach(job, config=HookConfig(overhead_budget=1.0, windows=False), on_boundary=listen))
    job.run(12)
    hooks[0].close()
    costs = {record.step: record.overhead_ns for record in sink.steps}
    assert costs[6] < 300 * MS
    assert costs[9] >= 300 * MS, "what nobody said `begin` of is ours, as is what the job waits for"


def test_each_lap_gives_the_delay_since_the_last(stat):
    preemption = Preemption(stat)
    delayed(stat, 5 * MS)
    assert preemption.lap() == 0
    delayed(stat, 12 * MS)
    assert preemption.lap() == 7 * MS
    assert preemption.lap() == 0
    preemption.close()


def test_what_is_left_out_counts_like_delay_where_the_kernel_tells_nothing_too(stat, tmp_path):
    for path, delay_ms in ((stat, 4), (tmp_path / "missing", 0)):
        preemption = Preemption(path)
        preemption.begin()
        preemption.leave_out(3 * MS)
        delayed(stat, delay_ms * MS)
        assert preemption.so_far() == preemption.end() == (3 + delay_ms) * MS
        assert preemption.own_ns(10 * MS) == (7 - delay_ms) * MS
        preemption.begin()
        assert preemption.end() == 0
        preemption.close()
        delayed(stat, 0)
