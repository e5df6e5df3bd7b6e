"""Gives the factor from algorithm to bus bandwidth of a collective; bus bandwidth compares with the speed of links.

*Algorithm* bandwidth is the size over the time.  It falls with the number of ranks although the links are as busy as
before.  *Bus* bandwidth is that times a factor per operation; the factors are nccl-tests' (PERFORMANCE.md there).
Profiled windows and traces from files share it.
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
    """Return bus over algorithm bandwidth as in nccl-tests; None when the operation or number of ranks is unknown.

    One rank alone uses no link: its factor is 0 where the operation depends on the number of ranks.
    """
    factor = _RING.get(operation)
    if factor is None or ranks is None or ranks < 1:
        return None
    return factor(ranks)
