"""What tests may see of the inside of a hook, read in this one place: a part's own tests are about the part alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from pacecar.job.handle import Pacer
from pacecar.profiler.hook.hook import Hook
from pacecar.profiler.timing.failure_guard import FAILURES_MAX

__all__ = ["HookState", "hook_of", "inspect", "turn_off"]


class HookState(NamedTuple):
    """A hook at one moment."""

    failures: int  # exceptions of its own that it caught
    waiting: tuple[Any, ...]  # finished steps whose records are not written
    events: int  # what is noted of the step under way
    inputs: int
    is_resting: bool  # steps are only counted
    is_watching_calls: bool  # it sees the model's calls nevertheless
    is_counting_flops: bool
    last_record: Any  # from which utilization was computed
    cut_because: str | None  # why the window under way is dropped when it ends
    shape: Any  # of the step, which a window's price is predicted from
    price: Any
    slices: dict[str, Any]
    profiler: Any
    device_timer: Any


def inspect(measured: Any) -> HookState:
    """Return the state of a hook, or of the hook of a pacer."""
    hook = hook_of(measured)
    timer, phases, schedule, utilization = hook._timer, hook._phases, hook._window_schedule, hook._utilization
    return HookState(
        hook._guard.failures,
        waiting=tuple(hook._boundary.waiting),
        events=len(timer.events),
        inputs=len(phases.inputs),
        is_resting=phases.is_resting,
        is_watching_calls=phases._calls is not None,
        is_counting_flops=utilization._counter is not None and utilization._counter.is_armed,
        last_record=utilization._last,
        cut_because=schedule._cut_because,
        shape=schedule._shape(hook.step),
        price=schedule._price,
        slices=dict(schedule._price._slices),
        profiler=hook.windows._profiler,
        device_timer=timer.device,
    )


def hook_of(pacer: Pacer | Hook) -> Hook:
    """Return the hook of an active pacer; a hook is its own."""
    hook = pacer if isinstance(pacer, Hook) else pacer._hook
    assert hook is not None, "inert"
    return hook


def turn_off(pacer: Pacer) -> None:
    """Have the hook turn itself off, as it does after failures of its own."""

    def fail() -> None:
        raise RuntimeError("planted")

    for _ in range(FAILURES_MAX):
        hook_of(pacer)._guard.wrap(fail)()
