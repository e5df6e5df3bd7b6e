"""Simulates DDP's backward with its bucketed all-reduces, for any bucket size, to find when the last bucket is done.

Communication of 30 % of the step does not mean that 30 % can be saved: what runs under backward costs little already.
A bucket size can only save the tail, the communication that is left when backward ends:

    backward        |=====|=====|=====|=====|            gradients become ready, spread by their bytes
    buckets                [b0 ----][b1 ----][b2 ----]   each starts when it is full and has a stream to run on
    exposed                                  '-------'

A bucket costs alpha + bytes * beta (Hockney 1994).  With several `streams` the latency of one passes under the bytes of
another: gloo takes two (its default number of threads), while NCCL runs the collectives of a group one after the other.

Assumptions, which are wrong somewhere: a gradient takes time in proportion to its bytes, and the bytes of several
collectives cross the link one after the other, as in a queue.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..observation import KnobSpace

__all__ = ["BucketTimeline", "distinct_buckets", "pack_buckets", "play"]


@dataclass(frozen=True, slots=True)
class BucketTimeline:
    """One simulated backward; `spans` are start and end of each bucket's all-reduce since backward began."""

    communication_ns: float
    exposed_ns: float
    spans: tuple[tuple[float, float], ...] = ()

    @property
    def overlapped_ns(self) -> float:
        """Communication that ran before backward ended."""
        return self.communication_ns - self.exposed_ns


def pack_buckets(gradient_bytes: Sequence[int], bucket_bytes: int, first_bytes: int | None = None) -> list[int]:
    """Return bucket sizes as DDP fills them: in ready order, closed by the gradient that reaches the cap."""
    buckets, filled = [], 0
    cap = bucket_bytes if first_bytes is None else min(first_bytes, bucket_bytes)
    for size in gradient_bytes:
        filled += size
        if filled >= cap:
            buckets.append(filled)
            filled, cap = 0, bucket_bytes
    if filled:
        buckets.append(filled)
    return buckets


def distinct_buckets(
    space: KnobSpace, gradient_bytes: Sequence[int], present_first_bytes: int | None = None
) -> KnobSpace:
    """Return the space without bucket sizes that make the same buckets as a larger size or the present one.

    A layer of 4 MiB fills a bucket of 1 MiB as it fills one of 4 MiB, so trying both would try one of them twice.
    """
    if not gradient_bytes:
        return space
    made: dict[tuple[int, ...], int] = {}
    for size in (space.value, *sorted(space.domain, reverse=True)):
        first = present_first_bytes if size == space.value else None
        made.setdefault(tuple(pack_buckets(gradient_bytes, size, first)), size)
    return KnobSpace(space.knob, space.value, tuple(sorted(made.values())))


def play(
    buckets: Sequence[int], backward_ns: float, alpha_ns: float, ns_per_byte: float, streams: int = 1
) -> BucketTimeline:
    """Simulate one backward: bucket i is ready when its share of all bytes is, and waits for a stream and the link."""
    total = sum(buckets)
    done, link_free, busy_until, communication = 0, 0.0, 0.0, 0.0
    spans: list[tuple[float, float]] = []
    for i, size in enumerate(buckets):
        done += size
        start = max(backward_ns * done / total, spans[i - streams][1] if i >= streams else 0.0)
        link_free = max(link_free, start + alpha_ns) + size * ns_per_byte
        communication += link_free - max(start, busy_until)
        busy_until = link_free
        spans.append((start, link_free))
    exposed = min(communication, max(0.0, link_free - backward_ns))
    return BucketTimeline(communication_ns=communication, exposed_ns=exposed, spans=tuple(spans))
