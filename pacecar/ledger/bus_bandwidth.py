"""Gives the factor from algorithm to bus bandwidth of a collective.

*Algorithm* bandwidth is size over time.  It falls with the number of ranks although the links are equally busy.  *Bus*
bandwidth, comparable with the speed of links, is that times a factor per operation (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["bus_bandwidth_factor"]

_RING: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send", "recv", "send_recv"), lambda n: 1.0),
}


def bus_bandwidth_factor(operation: str, ranks: int | None) -> float | None:
    """Return bus over algorithm bandwidth as in nccl-tests; None if the operation or the number of ranks is unknown.

    A single rank uses no link: its factor is 0 if the operation depends on the number of ranks.
    """
    factor = _RING.get(operation)
    if factor is None or ranks is None or ranks < 1:
        return None
    return factor(ranks)
