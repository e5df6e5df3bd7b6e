"""A small data-parallel job with known truth: every rank launches layers, buckets are all-reduced beside backward.

`simulate` plays the job and returns its traces and its length, so what a fault costs is known by playing again without
it, with the same noise.  It is deliberately plain: for jobs of all kinds see `tests/kit/simulated_jobs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pacecar.profiler.ledger.attribution import Work
from pacecar.profiler.trace.columns import (
    NONE,
    WORKS,
    CollectiveColumns,
    DeviceRows,
    HostKind,
    HostRows,
    StepMark,
    Trace,
)

__all__ = ["Fault", "simulate"]

US = 1_000


@dataclass(frozen=True)
class Fault:
    """What is wrong with one rank: all factors and additions are per step, from step `since` on."""

    compute: float = 1.0
    host: float = 1.0
    data_ns: int = 0
    checkpoint_ns: int = 0
    since: int = 0
    only: int | None = None


@dataclass
class _Rank:
    host: list[tuple[int, int, int, str, int, int]] = field(default_factory=list)  # start end kind name thread corr
    device: list[tuple[int, int, int, str, int, int, int, int]] = field(default_factory=list)
    marks: list[StepMark] = field(default_factory=list)
    now: int = 0
    compute_end: int = 0
    comm_end: int = 0
    count: int = 0


def simulate(
    ranks: int = 8,
    steps: int = 6,
    *,
    layers: int = 12,
    layer_us: float = 300,
    wire_us: float = 250,
    host_us: float = 12,
    noise: float = 0.002,
    hiccup: float = 0.0,
    faults: Mapping[int, Fault] | None = None,
    clock_ns: Mapping[int, int] | None = None,
    hosts: Mapping[int, str] | None = None,
    seed: int = 0,
) -> tuple[list[Trace], int]:
    """Return the traces of the job and how long it took, in ns; the same seed gives the same noise."""
    faults, clock_ns, hosts = faults or {}, clock_ns or {}, hosts or {}
    random = np.random.default_rng(seed)
    kernels = 1 + noise * random.standard_normal((ranks, steps, 4 * layers))
    python = np.exp(0.1 * random.standard_normal((ranks, steps, 8 * layers)))
    hiccups = np.where(random.random((ranks, steps)) < hiccup, 3_000_000, 0)
    wires = 1 + noise * random.random((steps, layers))
    team = [_Rank(now=int(t)) for t in random.integers(0, 50_000, ranks)]

    def host(r: int, step: int, at: int) -> None:
        fault = faults.get(r, Fault())
        factor = fault.host if _active(fault, step) else 1.0
        team[r].now += int(host_us * US * python[r, step, at] * factor)

    def launch(r: int, name: str, kind: HostKind = HostKind.LAUNCH) -> tuple[int, int]:
        me = team[r]
        start, me.count = me.now, me.count + 1
        me.now += 4 * US
        me.host.append((start, me.now, int(kind), name, 0, me.count))
        return start, me.count

    def kernel(r: int, step: int, at: int, name: str, us: float) -> int:
        me, fault = team[r], faults.get(r, Fault())
        host(r, step, at)
        launched, number = launch(r, "cudaLaunchKernel")
        start = max(launched + 5 * US, me.compute_end + US)
        factor = fault.compute if _active(fault, step) else 1.0
        me.compute_end = start + int(us * US * kernels[r, step, at % kernels.shape[2]] * factor)
        me.device.append((start, me.compute_end, WORKS.index(Work.COMPUTE), name, 7, number, launched, NONE))
        return me.compute_end

    begin = min(me.now for me in team)
    sequence = 0
    for step in range(steps):
        starts = [me.now for me in team]
        for r, me in enumerate(team):
            fault = faults.get(r, Fault())
            wait = 60 * US + (fault.data_ns if _active(fault, step) else 0)
            me.host.append((me.now, me.now + wait, int(HostKind.LOADER), "enumerate(DataLoader)#x.__next__", 0, NONE))
            me.now += wait + int(hiccups[r, step])
            for layer in range(layers):
                kernel(r, step, layer, "gemm_forward", layer_us)
        for layer in range(layers):
            arrivals = []
            for r, me in enumerate(team):
                kernel(r, step, layers + layer, "gemm_backward", 2 * layer_us)
                launch(r, "cudaStreamWaitEvent", HostKind.RUNTIME)
                launched, number = launch(r, "cudaLaunchKernelExC")
                arrivals.append((max(launched + 5 * US, me.compute_end + US, me.comm_end + US), launched, number))
            last = max(start for start, _, _ in arrivals)
            for r, me in enumerate(team):
                start, launched, number = arrivals[r]
                me.comm_end = last + int(wire_us * US * wires[step, layer]) + r % 3 * 200
                work = WORKS.index(Work.COMMUNICATION)
                me.device.append((start, me.comm_end, work, "ncclAllReduce", 20, number, launched, sequence))
            sequence += 1
        for r, me in enumerate(team):
            launch(r, "cudaStreamWaitEvent", HostKind.RUNTIME)
            me.compute_end = max(me.compute_end, me.comm_end + US)
            begun = me.now
            kernel(r, step, 2 * layers, "adam", 150)
            me.host.append((begun, me.now, int(HostKind.OPTIMIZER), "Optimizer.step#AdamW.step", 0, NONE))
            fault = faults.get(r, Fault())
            if fault.checkpoint_ns and _active(fault, step):
                me.host.append((me.now, me.now + fault.checkpoint_ns, int(HostKind.CHECKPOINT), "torch.save", 0, NONE))
                me.now += fault.checkpoint_ns
            begun = me.now
            me.now = max(me.now, me.compute_end) + 5 * US
            me.host.append((begun, me.now, int(HostKind.SYNC), "cudaStreamSynchronize", 0, NONE))
            host(r, step, 2 * layers + 1)
            me.marks.append(StepMark(step, starts[r], me.now))
    length = max(max(me.now, me.compute_end) for me in team) - begin
    traces = [_trace(r, ranks, me, sequence, clock_ns.get(r, 0), hosts.get(r, "one")) for r, me in enumerate(team)]
    return traces, length


def _active(fault: Fault, step: int) -> bool:
    return step == fault.only if fault.only is not None else step >= fault.since


def _trace(rank: int, world: int, me: _Rank, collectives: int, clock: int, host: str) -> Trace:
    names: dict[str, int] = {}
    device = sorted(me.device)
    rows = sorted(me.host)
    d = np.array([(*row[:3], names.setdefault(row[3], len(names)), *row[4:]) for row in device], dtype=np.int64).T
    h = np.array([(*row[:3], names.setdefault(row[3], len(names)), *row[4:]) for row in rows], dtype=np.int64).T
    meta = [
        CollectiveColumns(
            operation="all_reduce", bytes=25_000_000, dtype="float", group="0", group_size=world,
            ranks=tuple(range(world)), sequence=number,
        )
        for number in range(collectives)
    ]  # fmt: skip
    return Trace(
        file=f"rank{rank}.json",
        rank=rank,
        world_size=world,
        host=host,
        names=tuple(names),
        threads=(("1", "1"),),
        collectives=tuple(meta),
        device=DeviceRows(
            start_ns=d[0] + clock,
            end_ns=d[1] + clock,
            work=d[2].astype(np.uint8),
            name=d[3].astype(np.int32),
            device=np.zeros(d.shape[1], dtype=np.int32),
            stream=d[4],
            correlation=d[5],
            launch_ns=d[6] + clock,
            grid=np.full(d.shape[1], NONE, dtype=np.int32),
            collective=d[7].astype(np.int32),
        ),
        host_rows=HostRows(
            start_ns=h[0] + clock,
            end_ns=h[1] + clock,
            kind=h[2].astype(np.uint8),
            name=h[3].astype(np.int32),
            thread=h[4].astype(np.int32),
            correlation=h[5],
            collective=np.full(h.shape[1], NONE, dtype=np.int32),
        ),
        steps=tuple(StepMark(mark.number, mark.start_ns + clock, mark.end_ns + clock) for mark in me.marks),
        start_ns=int(h[0].min()) + clock,
        end_ns=int(max(h[1].max(), d[1].max())) + clock,
        events=len(device) + len(rows),
    )
