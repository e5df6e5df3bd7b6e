"""What pacecar keeps out of profilers is all that it keeps out, and torch records again as soon as nobody minds."""

from __future__ import annotations

import threading

import pytest
import torch

from pacecar.profiler.windows import recording_switch
from pacecar.profiler.windows.kineto_window import WindowProfiler, WindowUnavailable


def names() -> list[str]:
    """Return what a profiler of the user's sees of an addition."""
    with torch.autograd.profiler.profile() as profile:
        torch.ones(1).add(1.0)
    return [event.name for event in profile.function_events or ()]


def test_the_inner_one_of_two_pauses_does_not_end_the_outer_one() -> None:
    recording_switch.pause()
    recording_switch.pause()
    recording_switch.resume()
    assert "aten::add" not in names()
    recording_switch.resume()
    assert "aten::add" in names()


def test_a_pause_is_its_threads_own() -> None:
    recording_switch.pause()
    seen: list[list[str]] = []
    thread = threading.Thread(target=lambda: seen.append(names()))
    thread.start()
    thread.join()
    recording_switch.resume()
    assert "aten::add" in seen[0]


def paused() -> WindowProfiler:
    profiler = WindowProfiler(on_device=False)
    profiler.install()
    profiler.open()
    torch.ones(1).mul(1.0)
    assert profiler.pause()
    torch.ones(1).add(1.0)
    return profiler


def test_a_paused_session_sees_no_more_and_ends_as_any_other() -> None:
    profiler = paused()
    seen = {row.name() for row in profiler.close()[0]}
    profiler.uninstall()
    assert "aten::mul" in seen
    assert "aten::add" not in seen
    assert "aten::add" in names()


def test_where_the_user_begins_to_profile_his_own_profiler_sees_all() -> None:
    profiler = paused()
    assert "aten::add" in names()
    profiler.uninstall()


def test_a_loop_that_changed_threads_leaves_no_thread_paused() -> None:
    profiler = paused()

    def close() -> None:
        with pytest.raises(WindowUnavailable, match="another thread"):
            profiler.close()

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    profiler.uninstall()
    assert "aten::add" in names()
