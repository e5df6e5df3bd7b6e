"""Adjusts the order of candidates, and rules some out, by the state of the node; no signal decides what is kept.

    link full          what saves bytes or hides them goes first: buckets and compression
    processors full    more loader workers go last: they would wait for the same processors
    memory short       no larger micro-batch: a trial must not be what makes the job run out of memory

What is not known adjusts nothing.  Pure.
Left out: what a size would really take (`memory_forecast`, before it first runs).
"""

from __future__ import annotations

from ..observation import NodeView

__all__ = ["OF_COMMUNICATION", "no_room", "sway"]

FULL_LINK_RATIO = 0.7
"""Share of the rated speed, averaged over seconds that contain computing too: the link is then nearly always full
while gradients travel."""

FULL_LINK_GAIN = 0.05
"""More than any other prior, so that these go before other candidates without a forecast."""

STALLED_CPU_RATIO = 0.5
STALLED_CPU_GAIN = -0.05

ROOM_RATIO_MIN = 0.1
"""Share of the memory that must be free.  A caching allocator needs some to work in, and a neighbour may grow too."""

OF_COMMUNICATION = frozenset({"bucket_bytes", "first_bucket_bytes", "compression"})
"""Knobs that can save no more than the exposed communication."""

OF_MEMORY = frozenset({"micro_batch", "micro_tokens"})
"""Knobs whose larger values take more memory at once."""


def sway(knob: str, *, is_more: bool, node: NodeView | None) -> float:
    """Return what is to be added to a prior gain for a larger (`is_more`) or smaller value of `knob`."""
    if node is None:
        return 0.0
    if knob in OF_COMMUNICATION and node.link_ratio is not None and node.link_ratio >= FULL_LINK_RATIO:
        return FULL_LINK_GAIN
    is_stalled = node.cpu_stalled_ratio is not None and node.cpu_stalled_ratio >= STALLED_CPU_RATIO
    return STALLED_CPU_GAIN if knob == "loader_workers" and is_more and is_stalled else 0.0


def no_room(knob: str, *, node: NodeView | None) -> str | None:
    """Return why a larger value of `knob` must not be tried now, or None."""
    if node is None or node.headroom_ratio is None or knob not in OF_MEMORY:
        return None
    if node.headroom_ratio >= ROOM_RATIO_MIN:
        return None
    return f"{knob}: nothing larger while {node.headroom_ratio:.1%} of the memory is free"
