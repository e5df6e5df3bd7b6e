"""One rank, alone in its process group, with NCCL where there is a GPU and gloo where there is none; prints JSON.

    torchrun's variables, then    python -m tests.gpu.nccl_job recorder     flight recorders, completion, RAS
    python -m tests.gpu.nccl_job windows --folder FOLDER                    profiler rows of DDP steps and collectives

NCCL shortcuts collectives of one rank: a sum in place launches nothing, and one that is not in place is a plain copy.
Only an average (`oneRankReduce`) and what is made of messages, as an all-to-all is, launch kernels.

Where GPU_KEEP (or PACECAR_GPU_KEEP) names a folder, dumps and the trace are copied to it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.ledger.classification import classify_device, collective_operation
from pacecar.profiler.hangs.torch_flight_recorder import last_collective, sequence, unfinished
from pacecar.profiler.windows.collective_stats import sum_collectives
from pacecar.profiler.windows.kineto_window import WindowProfiler
from pacecar.profiler.windows.trace_spans import Activity, read_rows

# Taken out of the environment: pacecar refuses a configuration with a section [gpu].
KEEP = os.environ.pop("PACECAR_GPU_KEEP", None) or os.environ.get("GPU_KEEP")
RECORDERS = ("_dump_nccl_trace", "_dump_nccl_trace_json", "_dump_fr_trace", "_dump_fr_trace_json")
RAS_PORT = 28028
"""NCCL's own choice."""

SPIN_CYCLES = 400_000_000
"""About a quarter of a second of a GPU."""

RESTS_MAX = 3
"""Boundaries that are let pass before each window."""

NUMBERS = 1 << 16
WIDTH = 256


class Job:
    """A process group of one rank, and a second one of gloo."""

    def __init__(self) -> None:
        self.is_gpu = torch.cuda.is_available()
        self.backend = "nccl" if self.is_gpu else "gloo"
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        if self.is_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(self.backend)
        self.side = dist.new_group([0], backend="gloo", group_desc="side")

    def numbers(self) -> torch.Tensor:
        """Return numbers to send."""
        return torch.ones(NUMBERS, device=self.device)

    def collectives(self) -> dict[str, Callable[[], Any]]:
        """Return the collectives by name; each is a call that returns when it is queued."""
        sent, received = self.numbers(), self.numbers()
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(sent),
            "all_gather": lambda: dist.all_gather_into_tensor(received, sent),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(received, sent),
            "broadcast": lambda: dist.broadcast(sent, src=0),
            "all_to_all": lambda: dist.all_to_all_single(received, sent),
            "all_to_all by sizes": lambda: dist.all_to_all_single(received, sent, [NUMBERS], [NUMBERS]),
        }
        if self.is_gpu:
            calls["all_reduce of averages"] = lambda: dist.all_reduce(sent, op=dist.ReduceOp.AVG)
        return calls

    def side_collectives(self) -> dict[str, Callable[[], Any]]:
        """Return the same of the gloo group, on the CPU."""
        sent = torch.ones(64)
        return {
            "all_reduce": lambda: dist.all_reduce(sent, group=self.side),
            "broadcast": lambda: dist.broadcast(sent, src=0, group=self.side),
            "all_gather": lambda: dist.all_gather([torch.ones(64)], sent, group=self.side),
        }

    def sync(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def spin(self) -> None:
        """Keep the device's stream busy."""
        if self.is_gpu:
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]


def call_all(calls: dict[str, Callable[[], Any]]) -> dict[str, str | None]:
    """Call each; return why it failed, None where it did not."""
    said: dict[str, str | None] = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = None
        except (RuntimeError, ValueError, NotImplementedError) as error:
            said[name] = str(error)[:200]
    return said


def keep(name: str, text: bytes) -> None:
    """Write a file for later fixtures."""
    if KEEP:
        Path(KEEP).mkdir(parents=True, exist_ok=True)
        (Path(KEEP) / name).write_bytes(text)


# --- flight recorders -----------------------------------------------------------------------------


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")


def dump(name: str, kept_as: str) -> dict[str, Any]:
    """Call one of torch's dumps and say what is in it."""
    import torch._C._distributed_c10d as c10d

    call = getattr(c10d, name, None)
    if call is None:
        return {"is_there": False}
    begun = time.perf_counter()
    try:
        text: bytes = call()
    except Exception as error:  # noqa: BLE001  whatever torch says is what is asked
        return {"is_there": True, "error": f"{type(error).__name__}: {error}"[:300]}
    took_ms = (time.perf_counter() - begun) * 1e3
    keep(f"{kept_as}.{'json' if name.endswith('_json') else 'pkl'}", text)
    said: dict[str, Any] = {"is_there": True, "bytes": len(text), "took_ms": took_ms, "doc": (call.__doc__ or "")[:300]}
    try:
        document = json.loads(text) if name.endswith("_json") else _Plain(io.BytesIO(text)).load()
    except Exception as error:  # noqa: BLE001  as above
        return {**said, "error": f"cannot be read: {type(error).__name__}: {error}"[:300]}
    entries = document.get("entries", [])
    timed = [entry for entry in entries if entry.get("duration_ms") is not None]
    said |= {
        "keys": sorted(map(str, document)),
        "version": document.get("version"),
        "pg_config": document.get("pg_config"),
        "pg_status": document.get("pg_status"),
        "entries": len(entries),
        "entry_keys": sorted({str(key) for entry in entries for key in entry}),
        "timed": len(timed),
        "states": sorted({str(entry.get("state")) for entry in entries}),
        "names": [entry.get("profiling_name") for entry in entries],
        "first": {k: v for k, v in entries[0].items() if k != "frames"} if entries else None,
        "last": {k: v for k, v in entries[-1].items() if k != "frames"} if entries else None,
    }
    if name.endswith("_json"):
        # What the product says of each entry, as if there were no other.
        said["described"] = [unfinished([json.dumps(document | {"entries": [entry]}).encode()]) for entry in entries]
        said["operations"] = [collective_operation(str(entry.get("profiling_name"))) for entry in entries]
    return said


def completion(job: Job, *, has_all_to_all: bool) -> dict[str, Any]:
    """Queue a collective behind a long kernel and ask whether it has ended until it has."""
    sent, received = job.numbers(), job.numbers()

    def queue() -> Any:
        if has_all_to_all:
            return dist.all_to_all_single(received, sent, async_op=True)
        return dist.all_reduce(sent, async_op=True)

    job.sync()
    job.spin()
    begun = time.perf_counter()
    work = queue()
    queued = time.perf_counter()
    meanwhile = last_collective()
    asked: list[float] = []
    answers: list[bool] = []
    asking = time.perf_counter()
    while time.perf_counter() - asking < 5.0:
        before = time.perf_counter()
        answers.append(bool(work.is_completed()))
        asked.append((time.perf_counter() - before) * 1e6)
        if answers[-1]:
            break
        time.sleep(0.001)
    ended = time.perf_counter()
    job.sync()
    durations: dict[str, Any] = {}
    for name in ("_get_duration", "_get_op_type", "_get_sequence_number"):
        try:
            durations[name] = str(getattr(work, name)())
        except Exception as error:  # noqa: BLE001  as above
            durations[name] = f"{type(error).__name__}: {error}"[:200]
    return {
        "work": type(work).__name__, "queue_us": (queued - begun) * 1e6, "first_answer": answers[0],
        "first_answer_us": asked[0], "median_answer_us": median(asked), "largest_answer_us": max(asked),
        "answers": len(answers), "is_completed": answers[-1], "completed_after_ms": (ended - begun) * 1e3,
        "meanwhile": meanwhile, **durations,
    }  # fmt: skip


# --- NCCL's RAS -----------------------------------------------------------------------------------


def ras(port: int, command: str = "verbose status\n") -> dict[str, Any]:
    """Ask NCCL's RAS on `port` of loopback."""
    said = b""
    begun = time.perf_counter()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2.0) as connection:
            connection.sendall(command.encode())
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                connection.settimeout(max(0.01, until - time.monotonic()))
                part = connection.recv(65536)
                if not part:
                    break
                said += part
        why = None
    except OSError as error:
        why = f"{type(error).__name__}: {error}"
    text = said.decode(errors="replace")
    if text:
        keep("ras_verbose.txt", said)
    return {"port": port, "answer": text[:2000] or None, "bytes": len(said), "error": why,
            "took_ms": (time.perf_counter() - begun) * 1e3}  # fmt: skip


def recorder(job: Job) -> dict[str, Any]:
    """Call collectives, and look at what torch and NCCL say of them."""
    timing = os.environ.get("TORCH_NCCL_ENABLE_TIMING", "0")
    failed = {name: why for name, why in call_all(job.collectives()).items() if why is not None}
    side_failed = {name: why for name, why in call_all(job.side_collectives()).items() if why is not None}
    job.sync()
    until = time.monotonic() + 3.0  # NCCL's watchdog and gloo's threads retire their entries a moment later
    while time.monotonic() < until and "completed" not in str(last_collective()):
        time.sleep(0.1)
    suffix = "_timed" if timing == "1" else ""
    dumps = {name: dump(name, ("fr_nccl" if "nccl" in name else "fr_gloo") + suffix) for name in RECORDERS}
    said: dict[str, Any] = {"last_collective": last_collective(), "sequence": sequence()}
    begun = time.perf_counter()
    last_collective()
    said["last_collective_ms"] = (time.perf_counter() - begun) * 1e3
    address = os.environ.get("NCCL_RAS_ADDR")
    return {
        "torch": torch.__version__,
        "nccl": torch.cuda.nccl.version() if job.is_gpu else None,  # type: ignore[no-untyped-call]
        "backend": job.backend, "failed": failed, "side_failed": side_failed, "dumps": dumps, "product": said,
        "completion": completion(job, has_all_to_all="all_to_all" not in failed),
        "ras": ras(int(address.rpartition(":")[2]) if address else RAS_PORT),
    }  # fmt: skip


# --- the profiler's rows --------------------------------------------------------------------------


def described(row: Activity) -> dict[str, Any]:
    """Say what a row is, and what pacecar takes it for."""
    linked = row.linked_activity()
    linked_name = linked.name() if linked is not None else None
    kind = classify_device(row.type(), row.name(), linked_name)
    return {
        "type": row.type(), "name": row.name()[:160], "us": row.duration() / 1e3, "linked": linked_name,
        "kind": kind.name if kind is not None else None, "operation": collective_operation(row.name()),
        "said": row.metadata_json()[:600], "linked_said": linked.metadata_json()[:600] if linked is not None else None,
    }  # fmt: skip


def window(job: Job, profiler: WindowProfiler, act: Callable[[], object]) -> dict[str, Any]:
    """Take a window over `act` as the product does; return the rows on the device, and what they were read as."""
    job.sync()
    for _ in range(RESTS_MAX):
        profiler.step_passed()
    assert profiler.may_open(), profiler.outlived_by
    profiler.open()
    act()
    job.sync()
    rows, _ = profiler.close()
    profiler.step_passed()
    reading = read_rows(rows, training_thread=None, on_device=job.is_gpu)
    found = [described(row) for row in rows if row.type() in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [row for row in rows if row.name() == "record_param_comms" or row.name().startswith(("nccl:", "gloo:"))]
    sums = sum_collectives(reading.collectives, (0, 1 << 63))
    return {
        "rows": len(rows), "device_rows": found, "row_class": type(rows[0]).__name__ if rows else None,
        "calls": [{"type": row.type(), "name": row.name(), "said": row.metadata_json()[:600]} for row in calls],
        "work_us": {kind.name: sum(int(e - b) for b, e in spans) / 1e3 for kind, spans in reading.work.items()},
        "sums": [
            {"operation": s.operation, "count": s.count, "us": s.duration_ns / 1e3, "bytes": s.bytes,
             "bus_bytes": s.bus_bytes} for s in sums
        ],
    }  # fmt: skip


def windows(job: Job, folder: Path, steps: int) -> dict[str, Any]:
    """Train with DDP, and look at its collectives by the product's windows, by torch's profiler, and attached."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(job.device)
    model = DistributedDataParallel(plain, device_ids=[0] if job.is_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, WIDTH, device=job.device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    calls = job.collectives()
    failed = {name: why for name, why in call_all(calls).items() if why is not None}
    calls = {name: call for name, call in calls.items() if name not in failed}
    profiler = WindowProfiler(on_device=job.is_gpu)
    profiler.install()
    window(job, profiler, step)  # the first one may lose rows
    found = {"ddp step": window(job, profiler, step)}
    found |= {name: window(job, profiler, call) for name, call in calls.items()}
    profiler.uninstall()

    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if job.is_gpu else []
    with torch.profiler.profile(activities=kinds) as prof:
        for number in range(4):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step()
                for call in calls.values():
                    call()
                job.sync()
    trace = folder / "trace.json"
    prof.export_chrome_trace(str(trace))
    keep(f"trace_{job.backend}.json", trace.read_bytes())
    events = json.loads(trace.read_text())["traceEvents"]
    told = [event for event in events if "Collective name" in (event.get("args") or {})]
    names = [
        {"cat": event.get("cat"), "name": str(event.get("name"))[:120],
         "args": {k: v for k, v in event["args"].items() if "ollective" in k or "nelems" in k or "roup" in k
                  or k in ("dtype", "Rank")}}
        for event in told
    ]  # fmt: skip
    unique = list({json.dumps(name, sort_keys=True, default=str): name for name in names}.values())
    kernels = sorted({str(event.get("name"))[:120] for event in events if event.get("cat") == "kernel"})

    with pacecar.attach(
        model, optimizer, tune="off", run_dir=folder, overhead_budget=0.9, window_interval_steps=6,
    ) as pacer:  # fmt: skip
        for _ in range(steps):
            for batch in pacer.data([x]):
                model(batch).square().mean().backward()
                for name in ("all_reduce of averages", "all_to_all"):
                    if name in calls:
                        calls[name]()
                optimizer.step()
                optimizer.zero_grad()
                job.sync()
    return {"failed": failed, "windows": found, "trace": str(trace), "told": unique[:40], "trace_kernels": kernels[:60],
            "inert_because": getattr(pacer, "inert_because", None)}  # fmt: skip


def main() -> None:
    """Run one kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("recorder", "windows"))
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    job = Job()
    found = recorder(job) if options.kind == "recorder" else windows(job, options.folder, options.steps)
    sys.stdout.write(json.dumps(found, default=str) + "\n")
    sys.stdout.flush()
    # Not by the interpreter's end, at which gloo aborts the process now and then (pytorch issue 190489).
    os._exit(0)


if __name__ == "__main__":
    main()
