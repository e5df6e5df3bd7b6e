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
import time
from collections.abc import Iterable, Sequence

import msgspec

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
    Straggler,
    TunerStatus,
    Verdict,
    WhatIf,
)
from pacecar.records.job_identity import LAUNCH_DIGITS
from tests.monitor.showcase import MS, SHARES, ShowJob

__all__ = ["LivelyJob"]

GB, MIB = 10**9, 1 << 20
TRIAL, KEPT, SECOND, BACK, TROUBLE = 40.0, 70.0, 100.0, 120.0, 150.0
PEAK_FLOPS = 989 * 10**12
"""Dense bf16 of an H200 SXM, by NVIDIA's data sheet."""


class LivelyJob(ShowJob):
    """`ranks` ranks a daemon, on as many nodes as `sockets` has; `step` lets all of them report one more step."""

    def __init__(
        self, name: str, sockets: Sequence[str], ranks: int, *, step_ms: float, late_rank: int | None, is_tuned: bool
    ) -> None:
        self._began, self._told, self._late = time.monotonic(), 0, late_rank
        self._paces: list[int] = [0] * ranks * len(sockets)
        super().__init__(*sockets, name=name, ranks=ranks, pace_ms=step_ms, is_tuned=is_tuned)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def step(self) -> None:
        """Report one step of every rank, and the tuner's reaction."""
        super().step()
        if self.number % 4 == 0:
            self._say(0, *self._crew())
        if self.is_tuned:
            self._say(0, *self._tuner())

    def _tune(self) -> None:
        """Say nothing at once."""

    def _hello(self, rank: int) -> JobHello:
        now_ns = time.time_ns()
        hello: JobHello = msgspec.structs.replace(
            super()._hello(rank), launch=hashlib.sha256(self.name.encode()).hexdigest()[:LAUNCH_DIGITS],
            local_rank=rank % self.ranks, host=f"node-{'abcd'[rank // self.ranks]}", device=f"cuda:{rank % self.ranks}",
            device_uuid=f"GPU-{rank % self.ranks:04d}", started_wall_ns=now_ns, slurm_job=None,
            world_size=len(self.totals), parallel={"data": len(self.totals)},
            process_wall_ns=now_ns - (31 + rank % 4) * 1000 * MS,
        )  # fmt: skip
        return hello

    def _knobs(self) -> Knobs:
        t = self._seconds
        if not self.is_tuned or t < TRIAL:
            return Knobs(0, {"bucket_bytes": 25 * MIB, "micro_batch": 4})
        micro = 8 if SECOND <= t < BACK else 4
        return Knobs(1 + (t >= SECOND) + (t >= BACK), {"bucket_bytes": 50 * MIB, "micro_batch": micro})

    def _ledger(self, rank: int) -> Ledger:
        base = self.pace_ms * MS / 1000
        noise = 1 + 0.012 * math.sin(self.number / 5 + rank) + 0.006 * math.sin(self.number * 1.9 + 7 * rank)
        parts = {heading: int(base * share * noise) for heading, share in SHARES.items()}
        hidden = int(base * 150)
        knobs = self._knobs()
        if knobs.values["bucket_bytes"] == 50 * MIB:
            won = int(base * 100)
            parts["exposed_communication"] -= won
            hidden += won
        if knobs.values["micro_batch"] == 8:
            parts["compute"] += int(base * 15)
        if self._late is not None and self._seconds >= TROUBLE:
            heading = "compute" if rank == self._late else "exposed_communication"  # the others wait for it
            parts[heading] += int(base * 170)
        exposed = parts["exposed_communication"]
        return Ledger(
            wall_ns=sum(parts.values()), communication_ns=exposed + hidden, overlapped_communication_ns=hidden,
            **{f"{heading}_ns": value for heading, value in parts.items()},
        )  # fmt: skip

    def _record(self, rank: int, ledger: Ledger) -> JobRecord:
        self._paces[rank] = ledger.wall_ns
        if self.number % 5 == 1:
            self._say(rank, *self._window(rank, ledger))
        record: JobRecord = super()._record(rank, ledger)
        return record

    def _utilization(self, rank: int) -> JobRecord:
        flops, wall = int(0.41 * PEAK_FLOPS * self.pace_ms / 1000), 5 * self._paces[rank]
        saved = self.number // 100
        memory = DeviceMemory(
            allocated_bytes=78 * GB + rank % 8 * GB // 4, reserved_bytes=95 * GB, allocated_peak_bytes=92 * GB,
            interval_peak_bytes=92 * GB, inactive_split_bytes=4 * GB, total_allocation_retries=0,
            total_out_of_memory=0,
        )  # fmt: skip
        vitals: JobRecord = msgspec.structs.replace(
            super()._utilization(rank), wall_ns=wall, flops_wall_ns=wall, step_flops=flops, flops=5 * flops,
            peak_flops_per_second=PEAK_FLOPS, total_checkpoints=saved, total_checkpoint_ns=saved * 900 * MS,
            memory=memory,
        )  # fmt: skip
        return vitals

    def _window(self, rank: int, ledger: Ledger) -> Iterable[JobRecord]:
        """The records of an exact window: collectives, and the estimate's error."""
        off = ledger.wall_ns // 100
        yield CollectiveWindow(
            job=self.name, rank=rank, step=self.number, ended_wall_ns=time.time_ns(),
            sums=(
                CollectiveSum(operation="all_reduce", count=12, duration_ns=ledger.communication_ns * 9 // 10,
                              bytes=16 * GB, bus_bytes=30 * GB),
                CollectiveSum(operation="all_gather", count=2, duration_ns=ledger.communication_ns // 10,
                              bytes=GB // 2, bus_bytes=GB // 2),
            ),
        )  # fmt: skip
        estimate = msgspec.structs.replace(
            ledger, communication_ns=ledger.communication_ns - off, compute_ns=ledger.compute_ns + off,
            exposed_communication_ns=ledger.exposed_communication_ns - off,
        )  # fmt: skip
        yield EstimateCheck(
            job=self.name, rank=rank, step=self.number, ended_wall_ns=time.time_ns(), calibration_age_steps=40,
            is_own_setting=True, windows=2, exact=ledger, estimate=estimate, slowdown_ns=off,
        )  # fmt: skip

    def _crew(self) -> Iterable[JobRecord]:
        """Rank 0's records about all ranks: pace, ladder and stragglers."""
        paces = sorted(self._paces)
        pace, median, n = paces[-1], paces[len(paces) // 2], self.number
        if self._late is not None and self._seconds >= TROUBLE:
            median = int(pace / 1.17)
        walls = sum(ledger.wall_ns for ledger in self.totals)
        phases = {"data_wait": 7, "forward": 30, "backward": 46, "tail": 12, "optimizer": 5}
        yield JobLedger(
            job=self.name, ranks=len(self.totals), step=n, pace_ns=pace, median_ns=median, total_steps=n,
            total_wall_ns=walls, total_phases_ns={phase: walls * share // 100 for phase, share in phases.items()},
        )  # fmt: skip
        exposed = self.totals[0].exposed_communication_ns / self.totals[0].wall_ns
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
        if self._late is not None and self._seconds >= TROUBLE:
            yield Straggler(
                job=self.name, late_rank=self._late, cause="throttled", phase="backward", since_step=n - 3, step=n,
                wall_ns=time.time_ns(), excess_ns=pace - median,
                evidence="its backward takes longer and the driver names sw_thermal_slowdown",
            )  # fmt: skip

    def _tuner(self) -> Iterable[JobRecord]:
        """The tuner's events, each once, and its state."""
        n, t = self.number, self._seconds
        common = {"job": self.name, "step": n, "wall_ns": time.time_ns()}
        moments: list[tuple[float, list[JobRecord]]] = [
            (TRIAL, [Decision(decision=1, kind="trial", knob="bucket_bytes", from_value=25 * MIB, to_value=50 * MIB,
                              reason="half of the all-reduces start after backward ended", expected_gain_ratio=0.08,
                              **common), *self._switches(1)]),
            (KEPT, [Verdict(decision=1, knob="bucket_bytes", outcome="kept", measured_gain_ratio=0.1, gain_low=0.08,
                            gain_high=0.12, evidence=60.0, trial_steps=24, exploration_ns=-900 * MS,
                            reason="the lower bound of the gain is above the dead band", **common)]),
            (SECOND, [Decision(decision=2, kind="trial", knob="micro_batch", from_value=4, to_value=8,
                               reason="device memory has room", expected_gain_ratio=0.03, **common),
                      *self._switches(2)]),
            (BACK, [Verdict(decision=2, knob="micro_batch", outcome="rolled_back", measured_gain_ratio=-0.017,
                            gain_low=-0.02, gain_high=-0.01, evidence=0.1, trial_steps=20, exploration_ns=700 * MS,
                            reason="steps took longer than before", **common), *self._switches(2)]),
            (BACK + 10, [Decision(decision=3, kind="advise", knob="loader_workers", from_value=4, to_value=8,
                                  reason="the loader is awaited for 7 % of the step", expected_gain_ratio=0.05,
                                  **common)]),
        ]  # fmt: skip
        while self._told < len(moments) and t >= moments[self._told][0]:
            yield from moments[self._told][1]
            self._told += 1
        is_trial = TRIAL <= t < KEPT or SECOND <= t < BACK
        state = "warming" if t < TRIAL - 15 else "screening" if t < TRIAL else "trial" if is_trial else "watching"
        lost = -900 if t >= KEPT else 0
        yield TunerStatus(
            rank=0, state=state, detail="", exploration_ns=(lost + (700 if t >= BACK else 0)) * MS,
            trials=(t >= TRIAL) + (t >= SECOND), **common,
        )  # fmt: skip

    def _switches(self, decision: int) -> list[JobRecord]:
        return [
            KnobSwitch(job=self.name, rank=0, decision=decision, epoch=self._knobs().epoch, step=self.number,
                       knobs=self._knobs(), duration_ns=11 * MS)
        ]  # fmt: skip
