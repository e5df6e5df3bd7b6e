"""Measures the link between two ranks by torch.distributed: latency, and bandwidth one way and the other.

The sender counts until the receiver has acknowledged.  It begins with FIRST_BYTES and doubles until one transfer takes
LONG_SECONDS: shorter ones may be faster than the link, as network cards and shapers let bursts through.  The best of
LONG_TRANSFERS such transfers counts.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from .document import LinkMeeting

__all__ = ["meet"]

PINGS = 20
FIRST_BYTES, BYTES_MAX = 1 << 18, 1 << 28
LONG_SECONDS = 0.15
LONG_TRANSFERS = 3


def meet(number: int, pair: tuple[int, int], rank: int, device: torch.device) -> LinkMeeting:
    """Measure the link between the two of `pair`, of which this is `rank`; both call it.

    Raises:
        RuntimeError: the other did not answer, as the backend says.
    """
    low, high = pair
    other = high if rank == low else low
    latency_ns = _latency_ns(rank == low, other, device)
    forth = _send(other, device) if rank == low else _receive(other, device)
    back = _receive(other, device) if rank == low else _send(other, device)
    return LinkMeeting(
        round=number, ranks=pair, forth_bytes_per_second=forth, back_bytes_per_second=back, latency_ns=latency_ns
    )


def _latency_ns(is_first: bool, other: int, device: torch.device) -> int:
    """Return half the median round trip of eight bytes; ranks differ by what one of them measures."""
    word = torch.zeros(1, dtype=torch.int64, device=device)
    trips = []
    for _ in range(PINGS):
        begun = time.perf_counter_ns()
        if is_first:
            dist.send(word, other)
            dist.recv(word, other)
        else:
            dist.recv(word, other)
            dist.send(word, other)
        _wait_for(device)
        trips.append(time.perf_counter_ns() - begun)
    return round(median(trips) / 2)


def _send(other: int, device: torch.device) -> float:
    """Return the best rate in bytes/s."""
    size, best, counted = FIRST_BYTES, 0.0, 0
    word = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        word.fill_(size)
        dist.send(word, other)
        begun = time.perf_counter()
        dist.send(data, other)
        dist.recv(word, other)
        _wait_for(device)
        passed = time.perf_counter() - begun
        if passed < LONG_SECONDS and size < BYTES_MAX and not counted:
            size = min(2 * size, BYTES_MAX)
            continue
        best, counted = max(best, size / passed), counted + 1
        if counted == LONG_TRANSFERS:
            break
    word.zero_()
    dist.send(word, other)
    rate = torch.tensor([best], dtype=torch.float64, device=device)
    dist.send(rate, other)
    return best


def _receive(other: int, device: torch.device) -> float:
    """Return the rate that the sender measured."""
    word = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        dist.recv(word, other)
        size = int(word.item())
        if size == 0:
            break
        dist.recv(torch.empty(size, dtype=torch.uint8, device=device), other)
        dist.send(word, other)
    rate = torch.zeros(1, dtype=torch.float64, device=device)
    dist.recv(rate, other)
    return float(rate.item())


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
