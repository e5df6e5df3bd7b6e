"""A node worth looking at: eight GPUs, two links and two jobs, one with a straggler and a tuner; all of it made up.

For the tests of the page and of the terminal, for the pictures in docs/images and for the bench of the page:

    python -m tests.monitor.showcase --port 9850
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import tempfile
import threading
import time

from pacecar.clock import SystemClock
from pacecar.config import DaemonConfig
from pacecar.kernel_files.reader import KernelFiles
from pacecar.monitor.collectors.cpu import CpuCollector
from pacecar.monitor.collectors.daemon_process import DaemonProcessCollector
from pacecar.monitor.collectors.memory import MemoryCollector
from pacecar.monitor.daemon import Daemon
from pacecar.records import (
    Bound,
    Decision,
    Goodbye,
    JobHello,
    JobLedger,
    Knobs,
    Ledger,
    Ok,
    Rung,
    Sample,
    StepRecord,
    Straggler,
    TunerStatus,
    Verdict,
    Vitals,
    WhatIf,
)
from pacecar.wire import encode_frame

__all__ = ["ShowCollector", "ShowJob", "show_daemon"]

MS = 1_000_000
GIB = 1 << 30
SHARES = {
    "compute": 610, "exposed_communication": 190, "exposed_copy": 20, "data_wait": 70,
    "host_bound": 60, "optimizer_host": 25, "checkpoint": 10, "unknown": 15,
}  # fmt: skip


class ShowCollector:
    """GPUs and links whose figures go up and down."""

    name = "show"

    def __init__(self, gpus=8):
        self.gpus = gpus
        self.ticks = 0
        self.sent = [0, 0]

    def collect(self):
        self.ticks += 1
        samples = [sample for gpu in range(self.gpus) for sample in self._gpu(gpu)]
        for link in range(2):
            self.sent[link] += int(2e9 * (1 + math.sin(self.ticks / 7 + link)))
            samples += [
                Sample("pacecar_host_network_receive_bytes_total", (f"eth{link}",), self.sent[link]),
                Sample("pacecar_host_network_transmit_bytes_total", (f"eth{link}",), self.sent[link] * 9 // 10),
                Sample("pacecar_host_network_link_bytes_per_second", (f"eth{link}",), 12_500_000_000),
                Sample("pacecar_host_network_receive_utilization_ratio", (f"eth{link}",), 0.16),
                Sample("pacecar_host_network_transmit_utilization_ratio", (f"eth{link}",), 0.14),
                Sample("pacecar_host_network_up", (f"eth{link}",), 1),
                Sample("pacecar_host_network_receive_drops_total", (f"eth{link}",), 3 * link),
            ]
        return Ok(tuple(samples))

    def _gpu(self, number):
        gpu, wave = (str(number),), 0.5 + 0.5 * math.sin(self.ticks / 9 + number / 3)
        yield Sample(
            "pacecar_gpu_info",
            (
                *gpu,
                f"GPU-{number:04d}",
                "NVIDIA H200",
                "570.1",
                f"0000:{number:02x}:00.0",
                "hopper",
                "12.8",
                "9",
                "off",
            ),
            1,
        )
        yield Sample("pacecar_gpu_up", gpu, 1)
        yield Sample("pacecar_gpu_utilization_ratio", gpu, 0.72 + 0.27 * wave)
        yield Sample("pacecar_gpu_sm_active_ratio", gpu, 0.5 + 0.3 * wave)
        yield Sample("pacecar_gpu_tensor_active_ratio", gpu, 0.2 + 0.2 * wave)
        yield Sample("pacecar_gpu_memory_size_bytes", gpu, 141 * GIB)
        yield Sample("pacecar_gpu_memory_used_bytes", gpu, int((88 + 6 * wave + number) * GIB))
        yield Sample("pacecar_gpu_power_watts", gpu, int(420_000 + 250_000 * wave))
        yield Sample("pacecar_gpu_power_limit_watts", gpu, 700_000)
        yield Sample("pacecar_gpu_temperature_celsius", gpu, int(48 + 20 * wave))
        yield Sample("pacecar_gpu_clock_hertz", (*gpu, "sm"), int(1700 + 280 * wave))
        yield Sample("pacecar_gpu_nvlink_receive_bytes_per_second", gpu, 40e9 * wave)
        yield Sample("pacecar_gpu_nvlink_transmit_bytes_per_second", gpu, 41e9 * wave)
        if number == 5:
            yield Sample(
                "pacecar_gpu_clock_event_seconds_total", (*gpu, "sw_thermal_slowdown", "driver"), self.ticks * 900 * MS
            )
            yield Sample("pacecar_gpu_xid_errors_total", (*gpu, "63"), 1)

    def close(self):
        """Hold nothing."""


class ShowJob:
    """A job of `ranks` ranks a node, one at each of `paths`; `step` lets all of them report another step."""

    def __init__(self, *paths, name="llama-8b-pretrain", ranks=8, pace_ms=412, is_tuned=True):
        self.name, self.ranks, self.pace_ms, self.is_tuned = name, ranks, pace_ms, is_tuned
        self.number = 0
        self.totals = [Ledger(wall_ns=0)] * ranks * len(paths)
        self.hooks = []
        for rank in range(len(self.totals)):
            hook = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.hooks.append(hook)
            hook.settimeout(5)
            hook.connect(str(paths[rank // ranks]))
            self._say(rank, self._hello(rank))
        if is_tuned:
            self._tune()

    def _hello(self, rank):
        return JobHello(
            job=self.name, rank=rank, local_rank=rank, world_size=2 * self.ranks, pid=os.getpid(), host="node-a",
            device=f"cuda:{rank}", device_uuid=f"GPU-{rank:04d}", backend="nccl", framework="torch 2.13.0",
            pacecar_version="0.1.0", started_wall_ns=1_700_000_000_000_000_000, attempt=1,
            process_wall_ns=1_699_999_980_000_000_000,
            slurm_job="48213" if self.is_tuned else None,
        )  # fmt: skip

    def _say(self, rank, *records):
        for record in records:
            self.hooks[rank].send(encode_frame(record))

    def step(self):
        """Report one step of every rank."""
        self.number += 1
        for rank in range(len(self.totals)):
            ledger = self._ledger(rank)
            self.totals[rank] += ledger
            self._say(rank, self._record(rank, ledger))
            if self.number % 5 == 1:
                self._say(rank, self._utilization(rank))

    def _ledger(self, rank):
        wall = int(self.pace_ms * MS * (1 + 0.06 * math.sin(self.number / 5 + rank) + (0.2 if rank == 3 else 0)))
        parts = {heading: wall * share // 1000 for heading, share in SHARES.items()}
        parts["compute"] += wall - sum(parts.values())
        return Ledger(
            wall_ns=wall, **{f"{heading}_ns": value for heading, value in parts.items()},
            communication_ns=parts["exposed_communication"],
        )  # fmt: skip

    def _knobs(self):
        return Knobs(3, {"bucket_bytes": 52428800, "micro_batch": 8})

    def _record(self, rank, ledger):
        wall, n = ledger.wall_ns, self.number
        return StepRecord(
            job=self.name, rank=rank, step=n, ended_wall_ns=time.time_ns(), wall_ns=wall, data_wait_ns=wall * 7 // 100,
            forward_ns=wall * 30 // 100, backward_ns=wall * 58 // 100, optimizer_ns=wall * 5 // 100, micro_batches=4,
            samples=32, tokens=65536, ledger=ledger, source="estimate", calibration_age_steps=n % 50,
            totals=self.totals[rank], total_steps=n, total_samples=32 * n, total_tokens=65536 * n,
            overhead_ns=wall // 400, total_overhead_ns=self.totals[rank].wall_ns // 400, total_windows=1 + n // 50,
            dropped_records=0, knobs=self._knobs(), gc_ns=wall // 100, total_gc_ns=self.totals[rank].wall_ns // 100,
            global_step=4000 + n, saved_steps=n // 100 * 100, total_evaluation_ns=self.totals[rank].wall_ns // 50,
            total_compile_ns=31_000 * MS + (n > 120) * 4_300 * MS,
        )  # fmt: skip

    def _utilization(self, rank):
        from pacecar.records import DeviceMemory

        return Vitals(
            job=self.name, rank=rank, step=self.number, ended_wall_ns=time.time_ns(), steps=5, wall_ns=5 * 412 * MS,
            samples=160, tokens=5 * 65536, flops_source="counted", step_flops=10**14, flops=5 * 10**14, flops_steps=5,
            flops_wall_ns=2_060 * MS, arithmetic="bfloat16", peak_flops_per_second=5 * 10**14,
            memory=DeviceMemory(allocated_bytes=71 * GIB, reserved_bytes=84 * GIB),
        )  # fmt: skip

    def _tune(self):
        wall = time.time_ns()
        common = {"job": self.name, "wall_ns": wall}
        why = "half of the all-reduces start after backward ended; larger buckets leave fewer of them exposed"
        kept = "measured over 24 steps against 24 before; the lower bound of the gain is above the dead band"
        self._say(
            0,
            Decision(decision=1, kind="trial", knob="bucket_bytes", from_value=26214400, to_value=52428800, step=120,
                     reason=why, expected_gain_ratio=0.06, **common),
            Verdict(decision=1, knob="bucket_bytes", outcome="kept", step=168, measured_gain_ratio=0.071, gain_low=0.05,
                    gain_high=0.09, evidence=60.0, trial_steps=24, exploration_ns=-300 * MS, reason=kept, **common),
            Decision(decision=2, kind="trial", knob="micro_batch", from_value=4, to_value=8, step=200,
                     reason="device memory has room and launches are a seventh of the step",
                     expected_gain_ratio=0.03, **common),
            Verdict(decision=2, knob="micro_batch", outcome="rolled_back", step=231, measured_gain_ratio=-0.012,
                    gain_low=-0.02, gain_high=0.004, evidence=0.1, trial_steps=20, exploration_ns=90 * MS,
                    reason="steps took longer than before", **common),
            Decision(decision=3, kind="advise", knob="loader_workers", from_value=4, to_value=8, step=260,
                     reason="the loader is awaited for 7 % of the step; it is turned at the next epoch",
                     expected_gain_ratio=0.05, **common),
            TunerStatus(rank=0, state="watching",
                        detail="bucket_bytes 50 MiB is in force; nothing left that promises more",
                        step=260, exploration_ns=1300 * MS, trials=2, **common),
            JobLedger(job=self.name, ranks=16, step=260, pace_ns=478 * MS, median_ns=410 * MS, total_steps=260,
                      total_wall_ns=260 * 412 * MS, total_phases_ns={"forward": 100 * MS, "tail": 40 * MS}),
            Straggler(late_rank=3, cause="throttled", phase="backward", since_step=211, step=260, excess_ns=68 * MS,
                      evidence="its backward takes 68 ms longer and the driver names sw_thermal_slowdown", **common),
            WhatIf(of_rank=None, step=260, steps=200, pace_ns=478 * MS, source="estimate", calibration_age_steps=17,
                   rungs=(
                       Rung("at_most_communication_hidden", 388 * MS, 0.188, Bound.COMPUTE),
                       Rung("at_most_data_free", 445 * MS, 0.069, Bound.REST),
                       Rung("at_most_straggler_median", 410 * MS, 0.142, Bound.NEXT_RANK),
                       Rung("at_most_launch_gaps_gone", 450 * MS, 0.058, Bound.REST),
                       Rung("at_most_all", 331 * MS, 0.307, Bound.COMPUTE),
                   ), **common),
        )  # fmt: skip

    def finish(self):
        """Say goodbye."""
        for rank in range(len(self.totals)):
            self._say(rank, Goodbye(job=self.name, rank=rank, reason="the job ended", wall_ns=time.time_ns()))

    def close(self):
        for hook in self.hooks:
            hook.close()


def show_daemon(path, port=0, period_seconds=1.0):
    """Return a daemon, not started, that shows the made-up node; `path` is its socket."""
    files = KernelFiles()
    collectors = [CpuCollector(files), MemoryCollector(files), ShowCollector(), DaemonProcessCollector()]
    config = DaemonConfig(port=port, socket=str(path), period_seconds=period_seconds, recordings=f"{path}.recordings")
    return Daemon(config, clock=SystemClock(), collectors=collectors)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--port", type=int, default=0)
    arguments.add_argument("--seconds", type=float, default=3600.0)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        daemon = show_daemon(f"{folder}/socket", given.port)
        daemon.start()
        jobs = [
            ShowJob(daemon.socket),
            ShowJob(daemon.socket, name="dlrm-ablation-17", ranks=2, pace_ms=35, is_tuned=False),
        ]
        print(daemon.port, flush=True)  # noqa: T201  a tool's answer
        limit, pause = time.monotonic() + given.seconds, threading.Event()
        try:
            while time.monotonic() < limit:
                for job in jobs:
                    job.step()
                pause.wait(0.4)
        finally:
            for job in jobs:
                job.close()
            daemon.close()


if __name__ == "__main__":
    main()
