"""Runs one contestant of bench_attribution in its own process, and prints one line of JSON.

    python attribution_runs.py ours|decoding|hta|tracelens FILE
    python attribution_runs.py live
    python attribution_runs.py artificial FILE EVENTS

The peers' interpreters run this file too, so imports at the top must exist there.  The line has the CPU time of each
part (`..._s`) and the result, so that the bench compares results as well as speed.  All contestants compute the same:
the device's compute, communication, exposed communication and idle time, by the cheapest public call.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

SEED = 20240229
LIVE_ROUNDS = 9
LIVE_LAYERS = 40
STEP_EVENTS = 2000
"""Events in one step of the artificial trace."""


def ours(path: Path) -> dict[str, Any]:
    """Read and analyze in this process, with the parts timed."""
    from pacecar.analysis.one_rank.one_trace import analyze_trace
    from pacecar.analysis.trace.reader import read_trace

    begun, wall = time.process_time(), time.perf_counter()
    trace = read_trace(path)
    read = time.process_time()
    report = analyze_trace(trace)
    done = time.process_time()
    return {
        "read_s": read - begun,
        "analyze_s": done - read,
        "work_s": done - begun,
        "work_wall_s": time.perf_counter() - wall,
        "events": trace.events,
        "span_us": report.span_ns / 1000,
        "communication_us": report.communication_ns / 1000,
        "exposed_us": report.exposed_communication_ns / 1000,
        "idle_us": report.idle_ns / 1000,
    }


def decoding(path: Path) -> dict[str, Any]:
    """Decompress and decode with types, whole and in one piece, and do nothing with it: the limit for any reader."""
    import msgspec

    args = msgspec.defstruct(
        "Args",
        [
            ("device", Any, None),
            ("stream", Any, None),
            ("correlation", Any, None),
            ("external_id", Any, msgspec.field(name="External id", default=None)),
            ("collective", Any, msgspec.field(name="Collective name", default=None)),
            ("elements_in", Any, msgspec.field(name="In msg nelems", default=None)),
            ("elements_out", Any, msgspec.field(name="Out msg nelems", default=None)),
            ("dtype", Any, None),
            ("group_size", Any, msgspec.field(name="Group size", default=None)),
            ("group", Any, msgspec.field(name="Process Group Name", default=None)),
        ],
        gc=False,
    )
    fields = [("ph", str, ""), ("cat", str, ""), ("name", str, ""), ("pid", Any, None), ("tid", Any, None)]
    event = msgspec.defstruct(
        "Event", [*fields, ("ts", Any, None), ("dur", Any, None), ("args", args | None, None)], gc=False
    )
    document = msgspec.defstruct("Document", [("traceEvents", list[event])], gc=False)  # type: ignore[valid-type]
    decoder = msgspec.json.Decoder(document)
    begun, wall = time.process_time(), time.perf_counter()
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    unpacked = time.process_time()
    events = len(decoder.decode(data).traceEvents)  # type: ignore[attr-defined]
    done = time.process_time()
    return {
        "decompress_s": unpacked - begun,
        "decode_s": done - unpacked,
        "work_s": done - begun,
        "work_wall_s": time.perf_counter() - wall,
        "events": events,
        "bytes": len(data),
    }


def hta(path: Path) -> dict[str, Any]:
    """HolisticTraceAnalysis: its temporal breakdown and its overlap of communication and computation."""
    from hta.trace_analysis import TraceAnalysis

    begun, wall = time.process_time(), time.perf_counter()
    analysis = TraceAnalysis(trace_files={0: str(path)})
    row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    percent = float(analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    done = time.process_time()
    return {
        "work_s": done - begun,
        "work_wall_s": time.perf_counter() - wall,
        "span_us": float(row["kernel_time(us)"]),
        "compute_us": float(row["compute_time(us)"]),
        "idle_us": float(row["idle_time(us)"]),
        "overlap_percent": None if math.isnan(percent) else percent,
        "version": _versions("HolisticTraceAnalysis", "pandas"),
    }


def tracelens(path: Path) -> dict[str, Any]:
    """AMD's TraceLens: load, and its breakdown of the GPU timeline without the call tree, which costs much more."""
    from TraceLens import DataLoader, PytorchGPUEventAnalyser

    begun, wall = time.process_time(), time.perf_counter()
    events = DataLoader.load_data(str(path))["traceEvents"]
    found = PytorchGPUEventAnalyser(events).compute_metrics()
    done = time.process_time()
    return {
        "work_s": done - begun,
        "work_wall_s": time.perf_counter() - wall,
        "span_us": float(found["total_time"]),
        "communication_us": float(found["total_comm_time"]),
        "exposed_us": float(found["exposed_comm_time"]),
        "idle_us": float(found["idle_time"]),
        "version": _versions("TraceLens", "pandas"),
    }


def live() -> dict[str, Any]:
    """Stop, read and attribute windows of torch.profiler over steps of a small model, as the hook does."""
    import torch

    from pacecar.clock import SystemClock
    from pacecar.profiler.timing.step_timer import TimedStep
    from pacecar.profiler.windows.window_reader import WindowReader

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    width = 32
    layers = [part for _ in range(LIVE_LAYERS) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.ones(8, width)
    clock = SystemClock()
    reader = WindowReader(clock, on_device=False)
    reader.install()

    def step() -> None:
        for _ in range(4):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    rounds: list[tuple[float, float]] = []
    rows = 0
    while len(rounds) < LIVE_ROUNDS:
        step()
        reader.observed_from(clock.monotonic_ns())
        if not reader.may_open():
            continue  # two windows have a whole step between them
        reader.open()
        start = clock.monotonic_ns()
        reader.observed_from(start)
        step()
        end = clock.monotonic_ns()
        timed = TimedStep(start_ns=start, end_ns=end, phases={}, marks={}, micro_batches=4, overhead_ns=0)
        begun, wall = time.process_time_ns(), time.perf_counter_ns()
        taken = reader.close(timed)
        cost, wall = time.process_time_ns() - begun, time.perf_counter_ns() - wall
        if taken is not None:
            rows = taken.row_count
            rounds.append((cost / rows / 1000, wall / rows / 1000))
    reader.uninstall()
    cpu, walls = zip(*rounds[1:], strict=True)  # the first round warms up
    return {"us_per_event": cpu, "wall_us_per_event": walls, "events": rows, "version": f"torch {torch.__version__}"}


def artificial(path: Path, events: int) -> dict[str, Any]:
    """Write a trace as torch would, of about as many events: with a fixed seed."""
    rows = trace_events(events)
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Artificial GPU", "totalGlobalMem": 1}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
        "traceEvents": rows,
    }
    path.write_bytes(gzip.compress(json.dumps(document, indent=1).encode(), 6, mtime=0))
    return {"events": len(rows)}


def trace_events(count: int) -> list[dict[str, Any]]:
    """Return `count` events or a few fewer: steps of operators, launches, kernels, all-reduces, copies and flows."""
    dice = random.Random(SEED)
    host = {"ph": "X", "pid": 100, "tid": 100}
    rows: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}}]
    now, device_free, wire_free, correlation, step = 1_000_000, 0, 0, 0, 0
    size = max(40, min(STEP_EVENTS, count // 3))
    while len(rows) + size <= count:
        first, begun, ends = len(rows), now, len(rows) + size - 1
        while len(rows) + 7 <= ends:
            correlation += 1
            dur = dice.randrange(8, 40)
            is_wire, is_copy = dice.random() < 0.03, dice.random() < 0.05
            ids = {"External id": correlation, "Ev Idx": correlation}
            shapes = {"Input Dims": [[512, 1024], [1024, 1024]], "Input type": ["float", "float"]}
            rows.append({**host, "cat": "cpu_op", "name": "aten::linear", "ts": now, "dur": dur, "args": ids | shapes})
            rows.append({**host, "cat": "cpu_op", "name": "aten::mm", "ts": now + 1, "dur": dur - 3, "args": ids})
            launch = {"external id": correlation, "cbid": 211, "correlation": correlation}
            name = "cudaMemcpyAsync" if is_copy else "cudaLaunchKernel"
            rows.append({**host, "cat": "cuda_runtime", "name": name, "ts": now + 3, "dur": 4, "args": launch})
            flow = {"id": correlation, "cat": "ac2g", "name": "ac2g"}
            rows.append({**flow, "ph": "s", "pid": 100, "tid": 100, "ts": now + 3})
            stream = 20 if is_wire else 7
            start = max(now + 8, wire_free if is_wire else device_free)
            length = dice.randrange(200, 900) if is_wire else dice.randrange(2, 30)
            rows.append({**flow, "ph": "f", "pid": 0, "tid": stream, "ts": start, "bp": "e"})
            rows.append(_device_row(start, length, stream, correlation, is_wire=is_wire, is_copy=is_copy))
            if is_wire:
                wire_free = start + length + 1
            else:
                device_free = start + length + 1
            now += dur + dice.randrange(0, 12)
        now = max(now, device_free, wire_free)
        mark = {**host, "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begun, "dur": now - begun}
        rows.insert(first, {**mark, "args": {"External id": 0}})
        now, step = now + 5, step + 1
    return rows


def _device_row(
    start: int, length: int, stream: int, correlation: int, *, is_wire: bool, is_copy: bool
) -> dict[str, Any]:
    args: dict[str, Any] = {"External id": correlation, "device": 0, "stream": stream, "correlation": correlation}
    row = {"ph": "X", "pid": 0, "tid": stream, "ts": start, "dur": length, "args": args}
    if is_wire:
        args |= {"Collective name": "allreduce", "In msg nelems": 262144, "Out msg nelems": 262144, "dtype": "Float"}
        args |= {"Group size": 8, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}
        return {
            **row,
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        }
    if is_copy:
        return {**row, "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)"}
    args |= {"grid": [64, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 50, "registers per thread": 128}
    return {**row, "cat": "kernel", "name": "ampere_sgemm_128x64_tn"}


def _versions(*names: str) -> str:
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in names)


PROGRAMS = {"ours": ours, "decoding": decoding, "hta": hta, "tracelens": tracelens}


def main(argv: list[str]) -> None:
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # what libraries say on the way
        if argv[0] == "live":
            result = live()
        elif argv[0] == "artificial":
            result = artificial(Path(argv[1]), int(argv[2]))
        else:
            result = PROGRAMS[argv[0]](Path(argv[1]))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
