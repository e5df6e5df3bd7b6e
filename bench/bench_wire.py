"""Measures the time to encode and decode a step record, and to write it as JSON; medians over many."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import msgspec

from pacecar.records import Knobs, Ledger, StepRecord
from pacecar.wire import decode_frame, encode_frame

ROUNDS = 2000

LEDGER = Ledger(wall_ns=200_000_000, compute_ns=150_000_000, host_bound_ns=50_000_000)
RECORD = StepRecord(
    job="20261121T000000Z-abcd", rank=0, step=1234, ended_wall_ns=1_700_000_000_000_000_000, wall_ns=200_000_000,
    data_wait_ns=100_000, forward_ns=60_000_000, backward_ns=120_000_000, optimizer_ns=5_000_000, micro_batches=8,
    samples=16, tokens=512, ledger=LEDGER, source="estimate", calibration_age_steps=12, totals=LEDGER, total_steps=1234,
    total_samples=19744, total_tokens=631808, overhead_ns=50_000, total_overhead_ns=61_700_000, total_windows=24,
    dropped_records=0, knobs=Knobs(epoch=3, values={"bucket_bytes": 26214400, "micro_batch": 8}),
)  # fmt: skip


def microseconds(call: Callable[[], object]) -> float:
    """Return the median duration of `call`."""
    costs = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        call()
        costs.append(time.perf_counter_ns() - start)
    return statistics.median(costs) / 1000


def main() -> None:
    frame = encode_frame(RECORD)
    sys.stdout.write(f"frame of a step record        {len(frame):8d} bytes\n")
    for name, call in (
        ("encode a frame", lambda: encode_frame(RECORD)),
        ("decode a frame", lambda: decode_frame(frame)),
        ("encode as JSON", lambda: msgspec.json.encode(RECORD)),
    ):
        sys.stdout.write(f"{name:<29} {microseconds(call):8.2f} us\n")


if __name__ == "__main__":
    main()
