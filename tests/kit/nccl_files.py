"""Files in the formats that NCCL writes: the Inspector's JSON and .prom, and the log of NCCL_DEBUG=INFO.

By NVIDIA/nccl v2.30.7-1: plugins/profiler/inspector/inspector_json.cc, json.cc and inspector_prom.cc; v2.28.3-1:
ext-profiler/inspector/inspector.cc; v2.29.7-1: inspector_prom.cc; src/enqueue.cc (ncclEnqueueCheck), src/init.cc
(ncclCommInitRankFunc) and src/debug.cc of the versions named.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

__all__ = ["call_line", "init_line", "inspector_line", "prom_lines", "split_line", "timings_line", "write_inspector"]

MIB = 1 << 20


def inspector_line(
    rank: int = 0,
    *,
    ranks: int = 8,
    id: str = "0x7f8c496ae9f661",
    name: str | None = "dp",
    operation: str = "AllReduce",
    size: int = 25 * MIB,
    time_us: int = 1000,
    number: int = 1,
    p2p: bool = False,
    source: str = "kernel_gpu",
    host: str = "node-a",
    verbose: bool = False,
    **changes: object,
) -> str:
    """Return the line of one operation; 2.28.3 writes no `name`, as for None; `changes` replace values."""
    what = "p2p" if p2p else "coll"
    traffic = size * (ranks if operation in ("AllGather", "ReduceScatter", "AllGatherV") else 1)
    factor = {"AllReduce": 2 * (ranks - 1) / ranks, "AllGather": (ranks - 1) / ranks,
              "ReduceScatter": (ranks - 1) / ranks, "All2All": 0.0}.get(operation, 1.0)  # fmt: skip
    rate = 0.0 if operation == "All2All" or time_us == 0 else traffic / 1e9 / (time_us / 1e6)
    perf: dict[str, object] = {what: operation, f"{what}_sn": number}
    if p2p:
        perf["p2p_peer"] = 1
    perf |= {
        f"{what}_msg_size_bytes": size, f"{what}_exec_time_us": time_us, f"{what}_timing_source": source,
        f"{what}_algobw_gbs": round(rate, 6), f"{what}_busbw_gbs": round(rate * factor, 6),
    }  # fmt: skip
    if verbose:
        perf["event_trace_sn"] = {"coll_start_sn": 1, "kernel_events": [{"channel_id": one} for one in range(64)]}
    header = {"id": id, "comm_name": name, "rank": rank, "n_ranks": ranks, "nnodes": 1}
    if name is None:
        del header["comm_name"]
    metadata = {
        "inspector_output_format_version": "v4.0", "git_rev": "", "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": 1748030377748202, "hostname": host, "pid": 100 + rank,
    }  # fmt: skip
    document = {"header": header | {key: one for key, one in changes.items() if key in header}, "metadata": metadata,
                f"{what}_perf": perf | {key: one for key, one in changes.items() if key in perf}}  # fmt: skip
    return json.dumps(document, separators=(",", ":")).replace("/", "\\/") + "\n"


def write_inspector(folder: Path, lines: Iterable[str], *, host: str = "node-a", pid: int = 100) -> Path:
    """Write the file of one process; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{host}-pid{pid}.log"
    path.write_text("".join(lines))
    return path


def prom_lines(
    bus: float = 45.5,
    time_us: float = 998.5,
    *,
    gpu: int = 0,
    name: str = "dp",
    operation: str = "AllReduce",
    size: str = "25-26MB",
    p2p: bool = False,
    old: bool = False,
) -> str:
    """Return the samples of one operation; `old`: as 2.29.7 wrote them, for one collective."""
    if old:
        labels = (
            f'comm_id="0xa1",hostname="node-a",rank="{gpu}",slurm_job="unknown",slurm_job_id="unknown",nranks="8",'
            f'n_nodes="1",gpu_device_id="GPU{gpu}",collective="{operation}",coll_sn="7",'
            f'timestamp="2026-01-01T00:00:00Z",message_size="25.00MB"'
        )
        return (
            f"nccl_algorithm_bandwidth_gbs{{{labels}}} 26\nnccl_bus_bandwidth_gbs{{{labels}}} {bus:.6g}\n"
            f"nccl_collective_exec_time_microseconds{{{labels}}} {time_us:.6g}\n"
        )
    labels = (
        f'version="v5.1",slurm_job_id="unknown",node="node-a",gpu="GPU{gpu}",comm_name="{name}",n_nodes="1",'
        f'nranks="8",{"p2p_operation" if p2p else "collective"}="{operation}",message_size="{size}"'
        + ("" if p2p else ',algo_proto="Ring_Simple"')
    )
    names = ("p2p_bus_bandwidth", "p2p_exec_time") if p2p else ("bus_bandwidth", "collective_exec_time")
    return f"nccl_{names[0]}_gbs{{{labels}}} {bus:.6g}\nnccl_{names[1]}_microseconds{{{labels}}} {time_us:.6g}\n"


def _prefix(rank: int, host: str) -> str:
    return f"{host}:{100 + rank}:{200 + rank} [{rank}] NCCL INFO "


def init_line(rank: int, *, ranks: int = 4, comm: str = "0x55a0", id: str = "0xc1", when: str = "COMPLETE",
              host: str = "node-a", version: str = "2.30") -> str:  # fmt: skip
    """Return the line of a new communicator, as 2.18, 2.27 or 2.30 write it."""
    said = "" if version == "2.18" else "ncclCommInitRankConfig "
    said = f"[Rank {rank}] {said}" if (version, when) == ("2.30", "START") else said
    return (
        f"{_prefix(rank, host)}{said}comm {comm} rank {rank} nranks {ranks} cudaDev {rank} nvmlDev {rank}"
        f" busId 1b000 commId {id} - Init {when}\n"
    )


def split_line(rank: int, *, process: int, ranks: int = 2, comm: str = "0x77b0", parent: str = "0x55a0",
               count: int = 0, color: int = 0, when: str = "START", word: str = "split") -> str:  # fmt: skip
    """Return the line of a split communicator; 2.30 says childCount, and no version a blank before `- Init START`."""
    prefix = _prefix(process, "node-a")
    return (
        f"{prefix}ncclCommSplit comm {comm} rank {rank} nranks {ranks} cudaDev 0 nvmlDev 0 busId 1b000 parent {parent}"
        f" {word}Count {count} color {color} key 0{'' if when == 'START' else ' '}- Init {when}\n"
    )


def call_line(rank: int, *, operation: str = "AllReduce", comm: str = "0x55a0", ranks: int = 4, op_count: int = 0,
              count: int = 1024, host: str = "node-a", stamp: str = "") -> str:  # fmt: skip
    """Return the line of one call; `stamp` is a time before it (NCCL_DEBUG_TIMESTAMP_LEVELS)."""
    return (
        f"{stamp}{_prefix(rank, host)}{operation}: opCount {op_count:x} sendbuff 0x7f0000000000 recvbuff 0x7f0000000000"
        f" count {count} datatype 7 op 0 root 0 comm {comm} [nranks={ranks}] stream 0x55b0\n"
    )


def timings_line(seconds: float, *, version: str = "2.30") -> str:
    """Return the init timings; 2.22, the first, names neither the function nor the time to allocate."""
    said, alloc = (": ", "") if version == "2.22" else (" - ncclCommInitRankConfig: ", "alloc 0.10, ")
    return (
        f"{_prefix(0, 'node-a')}Init timings{said}rank 0 nranks 4 total {seconds:.2f} (kernels 0.20, {alloc}bootstrap"
        f" {seconds - 1:.2f}, allgathers 0.10, topo 0.10, graphs 0.10, connections 0.10, rest 0.30)\n"
    )
