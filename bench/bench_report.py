"""Measures time and memory of `pacecar report` on a large synthetic run.

    python bench/bench_report.py                       100 000 step records of 8 ranks
    python bench/bench_report.py --records 1000000     the figures in docs/report.md

The records come from the hook's encoder; steps vary, ranks wait for each other, two changes are tried and one is kept.
The command runs in its own process, so that its peak memory (wait4) is its own.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from pacecar.records import Decision, JobHello, JobRecord, Knobs, KnobSwitch, Ledger, StepRecord, Verdict

START_NS = 1_800_000_000_000_000_000
MS = 1_000_000


def write_run(folder: Path, records: int, ranks: int) -> int:
    """Write a run of `records` step records; return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    return sum(_write_rank(folder / f"rank{rank}.jsonl", rank, ranks, records // ranks) for rank in range(ranks))


def _write_rank(path: Path, rank: int, ranks: int, steps: int) -> int:
    encode = msgspec.json.Encoder().encode
    noise = random.Random(rank)
    tried, kept = steps // 4, steps // 3
    with path.open("wb") as stream:

        def put(record: JobRecord) -> None:
            stream.write(encode(record) + b"\n")

        put(
            JobHello(job="large", rank=rank, local_rank=rank, world_size=ranks, pid=rank, host="node-a", device="cuda",
                     backend="nccl", framework="torch 2.13", pacecar_version="0.1.0", parallel={"data": ranks},
                     started_wall_ns=START_NS)
        )  # fmt: skip
        totals = Ledger(wall_ns=0)
        at_ns = START_NS
        epoch, micro_batch = 0, 8
        for step in range(steps):
            wall = round(250 * MS * (0.9 if micro_batch == 16 else 1.0) * noise.lognormvariate(0, 0.04))
            exposed, host = wall // 10, wall // 50
            ledger = Ledger(wall_ns=wall, compute_ns=wall - exposed - host, exposed_communication_ns=exposed,
                            host_bound_ns=host, communication_ns=exposed * 3,
                            overlapped_communication_ns=exposed * 2)  # fmt: skip
            totals = totals + ledger
            at_ns += wall
            put(
                StepRecord(
                    job="large", rank=rank, step=step, ended_wall_ns=at_ns, wall_ns=wall, data_wait_ns=MS,
                    forward_ns=wall // 3, backward_ns=wall // 2, optimizer_ns=wall // 20, micro_batches=4, samples=64,
                    tokens=131072, ledger=ledger, source="estimate", calibration_age_steps=step % 50, totals=totals,
                    total_steps=step + 1, total_samples=64 * (step + 1), total_tokens=131072 * (step + 1),
                    overhead_ns=100_000, total_overhead_ns=100_000 * (step + 1), total_windows=step // 50,
                    dropped_records=0, knobs=Knobs(epoch=epoch, values={"micro_batch": micro_batch}),
                )
            )  # fmt: skip
            if step in (tried, kept):
                if rank == 0 and step == tried:
                    put(Decision(job="large", decision=1, kind="trial", knob="micro_batch", from_value=8, to_value=16,
                                 step=step, wall_ns=at_ns, reason="larger", expected_gain_ratio=0.1))  # fmt: skip
                if step == tried:
                    epoch, micro_batch = 1, 16
                    put(KnobSwitch(job="large", rank=rank, decision=1, epoch=1, step=step,
                                   knobs=Knobs(epoch=1, values={"micro_batch": 16}), duration_ns=MS))  # fmt: skip
                elif rank == 0:
                    put(Verdict(job="large", decision=1, knob="micro_batch", outcome="kept", step=step, wall_ns=at_ns,
                                measured_gain_ratio=0.1, gain_low=0.08, gain_high=0.12, evidence=1e6, trial_steps=64,
                                exploration_ns=-MS, reason="saves 10 %"))  # fmt: skip
    return path.stat().st_size


def measure(command: list[str]) -> tuple[float, float, int, int]:
    """Run `command`; return wall seconds, processor seconds, peak resident bytes, exit code."""
    started = time.monotonic()
    pid = os.posix_spawn(command[0], command, os.environ)
    _, status, usage = os.wait4(pid, 0)
    wall = time.monotonic() - started
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)


def main() -> None:
    """Write the run, report it in each form, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="write the run there and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / "run"
        size = write_run(folder, options.records, options.ranks)
        sys.stdout.write(f"{options.records} step records of {options.ranks} ranks, {size / 1e6:.0f} MB\n")
        sys.stdout.flush()
        for form, flags in (("page", []), ("json", ["--json"])):
            command = [sys.executable, "-m", "pacecar", "report", str(folder), *flags]
            wall, cpu, peak, code = measure([*command, "--output", str(folder / f"report.{form}")])
            each = cpu / max(1, options.records) * 1e6
            sys.stdout.write(
                f"{form}  {wall:6.1f} s wall  {cpu:6.1f} s cpu  {each:5.1f} us a record  {peak / 1e6:6.1f} MB"
                f"  exit {code}\n"
            )


if __name__ == "__main__":
    main()
