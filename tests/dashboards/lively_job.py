"""A job with events for dashboards: it is tuned, becomes faster, and then one of its ranks becomes slow.

    0 s     steps are slow: communication is exposed for a fifth of them
    40 s    the tuner tries larger buckets, and keeps them: a tenth of the step is won
    100 s   it tries a larger micro-batch, and takes it back
    150 s   a rank's GPU becomes too hot: a straggler is named, and the whole job slows down

All of it is made up, but for the arithmetic: headings sum to the step, totals to the steps, and gains to the pace.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections.abc import Iterable, Sequence

from pacecar.records import (
    Bound,
    CollectiveSum,
    CollectiveWindow,
    Decision,
    DeviceMemory,
    EstimateCheck,
    JobHello,
    JobLedger,
    JobRecord,
    Knobs,
    KnobSwitch,
    Ledger,
    Rung,
    StepRecord,
    Straggler,
    TunerStatus,
    Verdict,
    Vitals,
    WhatIf,
)
from pacecar.records.job_identity import LAUNCH_DIGITS
from pacecar.wire import encode_frame

__all__ = ["LivelyJob"]

MS, GB, MIB = 1_000_000, 10**9, 1 << 20
TRIAL, KEPT, SECOND, BACK, TROUBLE = 40.0, 70.0, 100.0, 120.0, 150.0
SHARES = {
    "compute": 610, "exposed_communication": 190, "exposed_copy": 20, "data_wait": 70,
    "host_bound": 60, "optimizer_host": 25, "checkpoint": 10, "unknown": 15,
}  # fmt: skip
"""Heading -> thousandths of the untuned step."""
PEAK_FLOPS = 989 * 10**12
"""Dense bf16 of an H200 SXM, by NVIDIA's data sheet."""


class LivelyJob:
    """`ranks` ranks a daemon, on as many nodes as `sockets` has; `step` lets all of them report one more step."""

    def __init__(
        self, name: str, sockets: Sequence[str], ranks: int, *, step_ms: float, late_rank: int | None, is_tuned: bool
    ) -> None:
        self.name, self.step_ms, self._late, self._is_tuned = name, step_ms, late_rank, is_tuned
        self.launch = hashlib.sha256(name.encode()).hexdigest()[:LAUNCH_DIGITS]
        self._began, self._number, self._said = time.monotonic(), 0, 0
        self._totals = [Ledger(wall_ns=0)] * (ranks * len(sockets))
        self._paces: list[int] = []
        self._hooks = []
        for rank in range(len(self._totals)):
            hook = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            hook.connect(sockets[rank // ranks])
            self._hooks.append(hook)
            self._say(rank, self._hello(rank, rank % ranks, rank // ranks))

    def step(self) -> None:
        """Report one step of every rank, and the tuner's reaction."""
        self._number += 1
        t = time.monotonic() - self._began
        ledgers = [self._ledger(rank, t) for rank in range(len(self._totals))]
        self._paces = [ledger.wall_ns for ledger in ledgers]
        for rank, ledger in enumerate(ledgers):
            self._totals[rank] += ledger
            self._say(rank, self._step(rank, ledger))
            if self._number % 5 == 1:
                self._say(rank, self._utilization(rank, ledger), *self._window(rank, ledger))
        if self._number % 4 == 0:
            self._say(0, *self._crew(t))
        if self._is_tuned:
            self._say(0, *self._tuner(t))

    def close(self) -> None:
        for hook in self._hooks:
            hook.close()

    def _say(self, rank: int, *records: JobRecord) -> None:
        for record in records:
            self._hooks[rank].send(encode_frame(record))

    def _hello(self, rank: int, local: int, node: int) -> JobHello:
        return JobHello(
            job=self.name, launch=self.launch, rank=rank, local_rank=local, world_size=len(self._totals),
            pid=os.getpid(), host=f"node-{'abcd'[node]}", device=f"cuda:{local}", device_uuid=f"GPU-{local:04d}",
            backend="nccl", framework="torch 2.13.0", pacecar_version="0.1.0", started_wall_ns=time.time_ns(),
            parallel={"data": len(self._totals)},
        )  # fmt: skip

    def _knobs(self, t: float) -> Knobs:
        if not self._is_tuned or t < TRIAL:
            return Knobs(0, {"bucket_bytes": 25 * MIB, "micro_batch": 4})
        micro = 8 if SECOND <= t < BACK else 4
        return Knobs(1 + (t >= SECOND) + (t >= BACK), {"bucket_bytes": 50 * MIB, "micro_batch": micro})

    def _ledger(self, rank: int, t: float) -> Ledger:
        base = self.step_ms * MS / 1000
        noise = 1 + 0.012 * math.sin(self._number / 5 + rank) + 0.006 * math.sin(self._number * 1.9 + 7 * rank)
        parts = {heading: int(base * share * noise) for heading, share in SHARES.items()}
        hidden = int(base * 150)
        knobs = self._knobs(t)
        if knobs.values["bucket_bytes"] == 50 * MIB:
            won = int(base * 100)
            parts["exposed_communication"] -= won
            hidden += won
        if knobs.values["micro_batch"] == 8:
            parts["compute"] += int(base * 15)
        if self._late is not None and t >= TROUBLE:
            heading = "compute" if rank == self._late else "exposed_communication"  # the others wait for it
            parts[heading] += int(base * 170)
        exposed = parts["exposed_communication"]
        return Ledger(
            wall_ns=sum(parts.values()), communication_ns=exposed + hidden, overlapped_communication_ns=hidden,
            **{f"{heading}_ns": value for heading, value in parts.items()},
        )  # fmt: skip

    def _step(self, rank: int, ledger: Ledger) -> StepRecord:
        wall, n = ledger.wall_ns, self._number
        return StepRecord(
            job=self.name, rank=rank, step=n, ended_wall_ns=time.time_ns(), wall_ns=wall, data_wait_ns=wall * 7 // 100,
            forward_ns=wall * 30 // 100, backward_ns=wall * 58 // 100, optimizer_ns=wall * 5 // 100, micro_batches=4,
            samples=32, tokens=65536, ledger=ledger, source="estimate", calibration_age_steps=n % 50,
            totals=self._totals[rank], total_steps=n, total_samples=32 * n, total_tokens=65536 * n,
            overhead_ns=wall // 400, total_overhead_ns=self._totals[rank].wall_ns // 400, total_windows=n // 50,
            dropped_records=0, knobs=self._knobs(time.monotonic() - self._began),
        )  # fmt: skip

    def _utilization(self, rank: int, ledger: Ledger) -> Vitals:
        flops = int(0.41 * PEAK_FLOPS * self.step_ms / 1000)
        saved = self._number // 100
        return Vitals(
            job=self.name, rank=rank, step=self._number, ended_wall_ns=time.time_ns(), steps=5,
            wall_ns=5 * ledger.wall_ns, samples=160, tokens=5 * 65536, flops_source="counted", step_flops=flops,
            flops=5 * flops, flops_steps=5, flops_wall_ns=5 * ledger.wall_ns, arithmetic="bfloat16",
            peak_flops_per_second=PEAK_FLOPS, total_checkpoints=saved, total_checkpoint_ns=saved * 900 * MS,
            memory=DeviceMemory(
                allocated_bytes=78 * GB + rank % 8 * GB // 4, reserved_bytes=95 * GB, allocated_peak_bytes=92 * GB,
                interval_peak_bytes=92 * GB, inactive_split_bytes=4 * GB, total_allocation_retries=0,
                total_out_of_memory=0,
            ),
        )  # fmt: skip

    def _window(self, rank: int, ledger: Ledger) -> Iterable[JobRecord]:
        """The records of an exact window: collectives, and the estimate's error."""
        off = ledger.wall_ns // 100
        yield CollectiveWindow(
            job=self.name, rank=rank, step=self._number, ended_wall_ns=time.time_ns(),
            sums=(
                CollectiveSum(operation="all_reduce", count=12, duration_ns=ledger.communication_ns * 9 // 10,
                              bytes=16 * GB, bus_bytes=30 * GB),
                CollectiveSum(operation="all_gather", count=2, duration_ns=ledger.communication_ns // 10,
                              bytes=GB // 2, bus_bytes=GB // 2),
            ),
        )  # fmt: skip
        estimate = Ledger(
            wall_ns=ledger.wall_ns, communication_ns=ledger.communication_ns - off,
            overlapped_communication_ns=ledger.overlapped_communication_ns, compute_ns=ledger.compute_ns + off,
            exposed_communication_ns=ledger.exposed_communication_ns - off, exposed_copy_ns=ledger.exposed_copy_ns,
            data_wait_ns=ledger.data_wait_ns, host_bound_ns=ledger.host_bound_ns,
            optimizer_host_ns=ledger.optimizer_host_ns, checkpoint_ns=ledger.checkpoint_ns,
            unknown_ns=ledger.unknown_ns,
        )  # fmt: skip
        yield EstimateCheck(
            job=self.name, rank=rank, step=self._number, ended_wall_ns=time.time_ns(), calibration_age_steps=40,
            is_own_setting=True, windows=2, exact=ledger, estimate=estimate, slowdown_ns=off,
        )  # fmt: skip

    def _crew(self, t: float) -> Iterable[JobRecord]:
        """Rank 0's records about all ranks: pace, ladder and stragglers."""
        paces = sorted(self._paces)
        pace, median, n = paces[-1], paces[len(paces) // 2], self._number
        if self._late is not None and t >= TROUBLE:
            median = int(pace / 1.17)
        walls = sum(ledger.wall_ns for ledger in self._totals)
        phases = {"data_wait": 7, "forward": 30, "backward": 46, "tail": 12, "optimizer": 5}
        yield JobLedger(
            job=self.name, ranks=len(self._totals), step=n, pace_ns=pace, median_ns=median, total_steps=n,
            total_wall_ns=walls, total_phases_ns={phase: walls * share // 100 for phase, share in phases.items()},
        )  # fmt: skip
        exposed = self._totals[0].exposed_communication_ns / self._totals[0].wall_ns
        scenarios = {
            "at_most_communication_hidden": 0.8 * exposed, "at_most_data_free": 0.06,
            "at_most_launch_gaps_gone": 0.05, "at_most_straggler_median": 1 - median / pace,
            "at_most_all": 0.1 + exposed,
        }  # fmt: skip
        yield WhatIf(
            job=self.name, of_rank=None, step=n, wall_ns=time.time_ns(), steps=200, pace_ns=pace, source="estimate",
            calibration_age_steps=n % 50,
            rungs=tuple(Rung(name, int(pace * (1 - gain)), gain, Bound.COMPUTE) for name, gain in scenarios.items()),
        )  # fmt: skip
        if self._late is not None and t >= TROUBLE:
            yield Straggler(
                job=self.name, late_rank=self._late, cause="throttled", phase="backward", since_step=n - 3, step=n,
                wall_ns=time.time_ns(), excess_ns=pace - median,
                evidence="its backward takes longer and the driver names sw_thermal_slowdown",
            )  # fmt: skip

    def _tuner(self, t: float) -> Iterable[JobRecord]:
        """The tuner's events, each once, and its state."""
        n = self._number
        common = {"job": self.name, "step": n, "wall_ns": time.time_ns()}
        moments: list[tuple[float, list[JobRecord]]] = [
            (TRIAL, [Decision(decision=1, kind="trial", knob="bucket_bytes", from_value=25 * MIB, to_value=50 * MIB,
                              reason="half of the all-reduces start after backward ended", expected_gain_ratio=0.08,
                              **common), *self._switches(1, t)]),
            (KEPT, [Verdict(decision=1, knob="bucket_bytes", outcome="kept", measured_gain_ratio=0.1, gain_low=0.08,
                            gain_high=0.12, evidence=60.0, trial_steps=24, exploration_ns=-900 * MS,
                            reason="the lower bound of the gain is above the dead band", **common)]),
            (SECOND, [Decision(decision=2, kind="trial", knob="micro_batch", from_value=4, to_value=8,
                               reason="device memory has room", expected_gain_ratio=0.03, **common),
                      *self._switches(2, t)]),
            (BACK, [Verdict(decision=2, knob="micro_batch", outcome="rolled_back", measured_gain_ratio=-0.017,
                            gain_low=-0.02, gain_high=-0.01, evidence=0.1, trial_steps=20, exploration_ns=700 * MS,
                            reason="steps took longer than before", **common), *self._switches(2, t)]),
            (BACK + 10, [Decision(decision=3, kind="advise", knob="loader_workers", from_value=4, to_value=8,
                                  reason="the loader is awaited for 7 % of the step", expected_gain_ratio=0.05,
                                  **common)]),
        ]  # fmt: skip
        while self._said < len(moments) and t >= moments[self._said][0]:
            yield from moments[self._said][1]
            self._said += 1
        is_trial = TRIAL <= t < KEPT or SECOND <= t < BACK
        state = "warming" if t < TRIAL - 15 else "screening" if t < TRIAL else "trial" if is_trial else "watching"
        lost = -900 if t >= KEPT else 0
        yield TunerStatus(
            rank=0, state=state, detail="", exploration_ns=(lost + (700 if t >= BACK else 0)) * MS,
            trials=(t >= TRIAL) + (t >= SECOND), **common,
        )  # fmt: skip

    def _switches(self, decision: int, t: float) -> list[JobRecord]:
        return [
            KnobSwitch(job=self.name, rank=0, decision=decision, epoch=self._knobs(t).epoch, step=self._number,
                       knobs=self._knobs(t), duration_ns=11 * MS)
        ]  # fmt: skip
