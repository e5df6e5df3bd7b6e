"""Parts of the critical path are in the module of what launched them, where the traces have modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pacecar.analysis.document.report import CriticalPart, TraceJob
from pacecar.analysis.reading.parallel_reading import Options, analyze
from tests.analysis.one_rank.tables.test_built_tables import FORWARD, event, launched

US = 1_000

ALL_REDUCE = {
    "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float", "Group size": 2,
    "Process Group Name": "0",
}  # fmt: skip


def on_device() -> list[dict[str, Any]]:
    """One kernel of a linear layer, one of nobody's, and a sum over the ranks, for which the host waits."""
    kernel = event("ncclDevKernel_AllReduce", 228, 110, "kernel", 20, device=0, stream=20, correlation=3)
    kernel["args"] |= ALL_REDUCE
    return [
        event("ProfilerStep#4", 0, 350, "user_annotation"),
        *FORWARD,
        event("aten::add", 150, 10),
        *launched(2, 156, 70, 152, name="void at::native::vectorized_elementwise_kernel"),
        event("cudaEventRecord", 160, 1, "cuda_runtime", correlation=4),
        event("cudaStreamWaitEvent", 162, 1, "cuda_runtime", correlation=5),
        event("cudaLaunchKernelExC", 165, 1, "cuda_runtime", correlation=3),
        kernel,
        event("cudaStreamSynchronize", 180, 162, "cuda_runtime", correlation=6),
    ]


def on_cpu(late_us: int) -> list[dict[str, Any]]:
    """The operators of a linear layer are the work, and gloo sums up on a thread of its own."""
    rows = [one for one in FORWARD if one["cat"] not in ("cuda_runtime", "kernel")]
    return [
        event("ProfilerStep#4", 0, 300, "user_annotation"),
        *rows,
        event("aten::add", 100, 60 + late_us),
        event("c10d::allreduce_", 165 + late_us, 5),
        event("gloo:all_reduce", 172 + late_us, 60 - late_us, "user_annotation", 9),
    ]


def analyzed(folder: Path, ranks: list[list[dict[str, Any]]], backend: str, *, with_tables: bool = True) -> TraceJob:
    for rank, events in enumerate(ranks):
        info = {"backend": backend, "rank": rank, "world_size": 2}
        base = {"baseTimeNanoseconds": 1_700_000_000_000_000_000, "distributedInfo": info}
        (folder / f"rank{rank}.json").write_text(json.dumps({**base, "traceEvents": events}))
    job = analyze(sorted(folder.iterdir()), Options(makes_tables=with_tables)).document.job
    assert job is not None
    assert sum(part.duration_ns for part in job.critical_path) == job.wall_ns
    return job


def time_of(parts: list[CriticalPart], cause: str, family: str | None = None) -> dict[str | None, int]:
    found: dict[str | None, int] = {}
    for part in parts:
        if part.cause == cause and (family is None or part.family == family):
            found[part.module] = found.get(part.module, 0) + part.duration_ns
    return found


def test_a_kernel_is_in_the_module_that_launched_it_and_so_is_the_host_until_then(tmp_path: Path) -> None:
    job = analyzed(tmp_path, [on_device(), on_device()], "nccl")
    assert time_of(job.critical_path, "compute", "elementwise") == {None: 70 * US}
    host = time_of(job.critical_path, "host_bound")
    assert set(host) == {None, "Net/Linear"}
    assert host["Net/Linear"] == 24 * US, "from the step's beginning to the launch of the linear layer's kernel"
    assert time_of(job.critical_path, "compute", "gemm") == {}, "which is over before the next is launched"


def test_what_a_stream_runs_is_in_its_module_where_it_holds_the_job_up(tmp_path: Path) -> None:
    """The linear layer's kernel runs until the next one begins, so that it is on the path."""
    events = [on_device(), on_device()]
    for rank in events:
        kernel = next(one for one in rank if one["name"] == "sgemm")
        kernel["dur"] = 116
    job = analyzed(tmp_path, events, "nccl")
    assert time_of(job.critical_path, "compute", "gemm") == {"Net/Linear": 116 * US}


def test_operators_of_a_cpu_job_are_in_their_modules(tmp_path: Path) -> None:
    job = analyzed(tmp_path, [on_cpu(0), on_cpu(20)], "gloo")
    compute = time_of(job.critical_path, "compute")
    assert compute == {"Net/Linear": 10 * US, None: 80 * US}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_without_tables_modules_are_not_read(tmp_path: Path, backend: str) -> None:
    ranks = [on_device(), on_device()] if backend == "nccl" else [on_cpu(0), on_cpu(20)]
    assert {part.module for part in analyzed(tmp_path, ranks, backend, with_tables=False).critical_path} == {None}


@pytest.mark.slow
def test_traces_without_modules_have_none(tmp_path: Path) -> None:
    ranks = [[one for one in on_device() if one["cat"] != "python_function"] for _ in range(2)]
    assert {part.module for part in analyzed(tmp_path, ranks, "nccl").critical_path} == {None}
