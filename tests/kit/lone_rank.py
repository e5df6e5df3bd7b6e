"""A gloo group of one rank in the test's own process, for DistributedDataParallel without peers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

__all__ = ["lone_rank"]

SETTLE_SECONDS = 0.02
"""A collective is said to be done before gloo's thread has let go of it.  torch destroys a group with python's lock
held and waits for that thread, which may need the lock for what it lets go (seen twice, torch 2.13: both wait)."""


@contextmanager
def lone_rank(folder: Path) -> Iterator[None]:
    """Be rank 0 of 1 inside the context; the group's store is a file in `folder`."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        time.sleep(SETTLE_SECONDS)
        dist.destroy_process_group()
