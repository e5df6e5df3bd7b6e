"""Waits in collectives are told from work by where the training thread stands."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from pacecar.profiler.ranks.collective_waits import SAMPLES_MIN, SECONDS, CollectiveWaits, is_in_collective
from tests.kit.fake_clock import FakeClock

SITE = "/usr/lib/python3/site-packages/"


class Frame:
    """What is read of a frame: its function, and the frame that called it."""

    def __init__(self, *places: tuple[str, str]) -> None:
        *callers, (file, function) = places
        self.f_code = SimpleNamespace(co_filename=SITE + file, co_name=function)
        self.f_back = Frame(*callers) if callers else None


C10D = ("torch/distributed/distributed_c10d.py", "all_gather_single")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([C10D], True),
        ([C10D, ("torch/distributed/c10d_logger.py", "wrapper")], True),
        ([("torch/distributed/_functional_collectives.py", "wait_tensor"), ("torch/_ops.py", "__call__")], True),
        ([("torch/distributed/pipelining/schedules.py", "_wait_batch_p2p")], True),
        ([("torch/distributed/pipelining/schedules.py", "step")], False),
        ([C10D, ("train.py", "slow")], False),
        ([("train.py", "forward"), ("torch/_ops.py", "__call__")], False),
    ],
)
def test_a_thread_waits_where_torch_waits_and_nowhere_else(places: list[tuple[str, str]], expected: bool) -> None:
    assert is_in_collective(Frame(*places)) is expected  # type: ignore[arg-type]


def test_ratios_are_of_the_last_seconds_by_phase_and_need_enough_samples() -> None:
    clock = FakeClock()
    waits = CollectiveWaits(threading.get_ident(), lambda: "forward", clock.monotonic_ns)
    for _ in range(SAMPLES_MIN - 1):
        waits.sample()
    assert waits.ratios() is None
    waits.sample()
    assert waits.ratios() == {"forward": 0.0, "backward": 0.0, "rest": 0.0}
    clock.advance(round((SECONDS + 1) * 1e9))
    waits.sample()
    assert waits.ratios() is None, "what is older is forgotten"


def test_another_thread_that_stands_in_a_collective_is_seen_in_its_phase_and_not_in_the_tail() -> None:
    clock, phases, entered, leave = FakeClock(), ["backward"], threading.Event(), threading.Event()
    names: dict[str, object] = {}
    exec(compile("def all_reduce(lock):\n    lock.acquire()", SITE + C10D[0], "exec"), names)
    lock = threading.Lock()
    lock.acquire()

    def work() -> None:
        entered.set()
        names["all_reduce"](lock)  # type: ignore[operator]
        leave.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    entered.wait()
    waits = CollectiveWaits(thread.ident or 0, lambda: phases[0], clock.monotonic_ns)
    while not is_in_collective(sys._current_frames().get(thread.ident or 0)):
        pass
    for phases[0] in ("backward", "outside", "tail", "optimizer"):
        for _ in range(SAMPLES_MIN // 4):
            waits.sample()
    assert waits.ratios() == {"forward": 0.0, "backward": 0.25, "rest": 0.25}
    lock.release()
    leave.set()
    thread.join()
