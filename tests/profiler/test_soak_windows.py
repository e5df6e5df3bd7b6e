"""10 000 windows in one process: resident memory flat, descriptors and threads constant.  `make soak-windows`."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from pacecar.config import HookConfig

pytestmark = pytest.mark.soak

WINDOWS = 10_000
GROWTH_BYTES_MAX = 8 * 1024 * 1024
"""Between the second quarter and the last: two steps of the heap, as any process takes; 1 KiB a window is over it."""


class Nothing:
    """A sink that keeps nothing: what grows is the hook's."""

    dropped = 0

    def put(self, record):
        self.last = record

    def close(self, timeout_seconds):
        pass


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_resident_memory_is_flat_over_ten_thousand_windows(job, attach):
    from pacecar.profiler.hook.hook import Hook, make_hello

    torch.set_num_threads(1)
    sink = Nothing()
    config = HookConfig(overhead_budget=1.0, window_interval_steps=1, window_warmup_steps=1)
    hook = Hook(job.model, job.optimizer, hello=make_hello(job.model, environ={}), config=config, sinks=[sink])
    hook.start()
    seen = []
    try:
        while hook.budget.windows < WINDOWS:
            job.run(200)
            hook.records.flush()
            seen.append((hook.budget.windows, resident_bytes(), len(os.listdir("/proc/self/fd"))))
    finally:
        hook.close()
    quarter = len(seen) // 4
    early = sorted(size for _, size, _ in seen[quarter : 2 * quarter])[quarter // 2]
    late = sorted(size for _, size, _ in seen[-quarter:])[quarter // 2]
    for windows, size, files in seen[:: max(1, len(seen) // 10)]:
        sys.stdout.write(
            f"{windows:6d} windows  {size / 1e6:7.2f} MB  {files} files  {threading.active_count()} threads\n"
        )
    sys.stdout.write(f"second quarter {early / 1e6:.2f} MB, last {late / 1e6:.2f} MB\n")
    assert late - early <= GROWTH_BYTES_MAX
    assert seen[-1][2] == seen[quarter][2], "no descriptor stays open"
