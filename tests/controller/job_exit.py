"""One rank that closes its side road while a gather is out, and then ends; run by test_channels_exit.py.

The last thing before the interpreter's end holds the GIL (`sum` over a range, called without a python frame), so that
gloo's worker, woken by the other rank's end, waits for the GIL when the interpreter ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from pacecar.profiler.transport.side_group import SideGroup, job_store

RANK = int(os.environ["RANK"])

dist.init_process_group(
    "gloo",
    store=dist.FileStore(os.environ["STORE"], 2),
    rank=RANK,
    world_size=2,
    timeout=timedelta(seconds=60),
)
road = SideGroup(RANK, 2)
road.open(job_store(), "exit", "127.0.0.1")
if RANK == 0:
    road.post([1, 2, 3])
    atexit.register(sum, range(10**8))
    begun = time.monotonic()
    road.close()
    sys.stdout.write(f"closed in {time.monotonic() - begun:.3f} s\n")
else:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()  # the test says when; a GIL is held by rank 0 from then on for a second
    os._exit(0)
