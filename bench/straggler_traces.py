"""Writes recorded operations of a pipeline-parallel job as torch.profiler traces.

The operations are those of ByteDance's StragglerAnalysis (github.com/ByteDance-Seed/StragglerAnalysis, Apache 2.0; the
paper is "Understanding Stragglers in Large Model Training Using What-if Analysis"): for some steps of a job, the start
and duration of each forward, backward, send, receive and collective on each worker, on one clock that restarts with
every step.  Here the steps follow each other.

On each worker an operation begins when the one before has ended, so all are put on one stream, in that order.  A send
and a receive of exactly the same times are one batch (Megatron's send_forward_recv_backward): one kernel, as torch
writes it.  The host launches a whole step ahead and waits for the device at its end, so nothing here is host-bound.

With `Rows.DEVICE` only the device is recorded, as by `activities=[CUDA]`: no launches and no steps, each message is a
kernel of its own on a stream of its kind, and nothing says which row waits for which.

Pure: operations in, documents of Chrome's JSON out.  Left out: collections of garbage (of no length in these tables),
and tensor-parallel ranks, which the tables do not have, so layer norms are not all-reduced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple

__all__ = ["Operation", "Rows", "documents"]

LEAD_NS = 20_000_000
"""How long before the first operation of a step its launches begin."""

CALL_NS = 500

STREAM = 7

PEERS = {"forward-send": 1, "backward-send": -1, "forward-recv": -1, "backward-recv": 1}
"""Message -> how many stages away its peer is."""

COMPUTE = ("forward-compute", "backward-compute", "layernorm-grads-all-reduce", "optimizer")

COLLECTIVES = {
    "params-all-gather": ("_allgather_base", "AllGather_RING_LL", "data"),
    "grads-reduce-scatter": ("_reduce_scatter_base", "ReduceScatter_Sum_bf16_RING_LL", "data"),
    "embedding-grads-all-reduce": ("allreduce", "AllReduce_Sum_bf16_RING_LL", "ends"),
    "optimizer-clip-main-grad": ("allreduce", "AllReduce_Sum_f32_RING_LL", "world"),
}
"""Operation -> torch's name of the collective, a part of NCCL's name of the kernel, and who takes part: the ranks of
a stage (data), the first and the last stage of a pipeline (ends), or all (world)."""

IGNORED = ("gc",)

KINDS = {*COMPUTE, *PEERS, *COLLECTIVES, *IGNORED}


class Rows(StrEnum):
    """What a trace has rows of."""

    ALL = "all"
    DEVICE = "device"


class Operation(NamedTuple):
    """A row of a table; times are in ns from the begin of its step, on the same clock for all ranks."""

    data_rank: int
    stage: int
    step: int
    kind: str
    start_ns: int
    duration_ns: int


@dataclass
class _Rank:
    """The trace of one rank, while it is written."""

    rank: int
    groups: dict[str, list[int]]
    """What takes part (of `COLLECTIVES`, or `pipeline`) -> the ranks of this rank's group."""
    names: dict[str, str]
    """The same -> the name of the group."""
    rows: Rows = Rows.ALL
    events: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    at_ns: int = 0

    def add(self, category: str, name: str, start_ns: int, duration_ns: int, args: dict[str, Any]) -> None:
        """Add an event of the host, or of the device if `args` name its stream."""
        pid, tid = (0, args["stream"]) if "stream" in args else (1000 + self.rank, 1000 + self.rank)
        times = {"ts": start_ns / 1_000, "dur": duration_ns / 1_000}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid} | times | {"args": args})

    def call(self, name: str, duration_ns: int = CALL_NS) -> int:
        """Add a call of the runtime and return its correlation."""
        self.launches += 1
        self.add("cuda_runtime", name, self.at_ns, duration_ns, {"cbid": 211, "correlation": self.launches})
        self.at_ns += duration_ns + CALL_NS
        return self.launches

    def kernel(self, name: str, start_ns: int, duration_ns: int, more: dict[str, Any], *, stream: int = STREAM) -> None:
        """Launch a kernel."""
        where = {"device": 0, "context": 1, "stream": stream}
        if self.rows is Rows.ALL:
            where["correlation"] = self.call("cudaLaunchKernel")
        self.add("kernel", name, start_ns, duration_ns, where | more)

    def described(self, kind: str) -> dict[str, Any]:
        """Return what torch says of a message or a collective, counted."""
        who = COLLECTIVES[kind][2] if kind in COLLECTIVES else "pipeline"
        members, name = self.groups[who], self.names[who]
        self.counts[name] = self.counts.get(name, 0) + 1
        peer = self.rank + PEERS.get(kind, 0)
        operation = COLLECTIVES[kind][0] if kind in COLLECTIVES else kind.rsplit("-", 1)[1]
        args: dict[str, Any] = {
            "Collective name": operation, "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "BFloat16",
            "Group size": len(members), "In split size": "[]", "Out split size": "[]", "Process Group Name": name,
            "Process Group Description": "default_pg" if name == "0" else "undefined",
            "Process Group Ranks": f"[{', '.join(map(str, members))}]", "Seq": self.counts[name],
            "Rank": members.index(peer),
        }  # fmt: skip
        if operation in ("send", "recv"):
            args["Dst Rank" if operation == "send" else "Src Rank"] = peer
        return args


def documents(operations: Sequence[Operation], rows: Rows = Rows.ALL) -> Iterator[tuple[int, str]]:
    """Yield each rank and its trace, which has these rows.

    Ranks are numbered pipeline by pipeline, and within one by stage.

    Raises:
        ValueError: for no operation, one of an unknown kind, or a worker that lacks a step.
    """
    if not operations:
        raise ValueError("there are no operations")
    stages = 1 + max(one.stage for one in operations)
    replicas = 1 + max(one.data_rank for one in operations)
    found: dict[tuple[int, int], list[Operation]] = {}
    ends: dict[int, int] = {}
    for one in operations:
        if one.kind not in KINDS:
            raise ValueError(f"step {one.step}, stage {one.stage}: {one.kind!r} is none of {', '.join(sorted(KINDS))}")
        if one.kind not in IGNORED:
            found.setdefault((one.step, one.data_rank * stages + one.stage), []).append(one)
        ends[one.step] = max(ends.get(one.step, 0), one.start_ns + one.duration_ns)
    for number in range(replicas * stages):
        rank = _rank(number, replicas, stages)
        rank.rows = rows
        begin_ns = 0
        for step in sorted(ends):
            mine = found.get((step, number))
            if mine is None:
                replica, stage = divmod(number, stages)
                raise ValueError(f"step {step} is missing on data-parallel rank {replica}, stage {stage}")
            _add_step(rank, mine, step, begin_ns, ends[step])
            begin_ns += ends[step] + 2 * LEAD_NS
        yield number, _document(rank, replicas * stages)


def _rank(number: int, replicas: int, stages: int) -> _Rank:
    world = list(range(replicas * stages))
    replica, stage = divmod(number, stages)
    pipeline = world[replica * stages : (replica + 1) * stages]
    groups = {"world": world, "data": world[stage::stages], "pipeline": pipeline, "ends": [pipeline[0], pipeline[-1]]}
    names = {
        "world": "0", "data": str(1 + stage), "pipeline": str(1 + stages + replica),
        "ends": str(1 + stages + replicas + replica),
    }  # fmt: skip
    return _Rank(number, groups, names)


def _add_step(rank: _Rank, mine: Sequence[Operation], step: int, begin_ns: int, length_ns: int) -> None:
    """Add one step of a rank: its launches, and at the end a wait for the device."""
    rank.at_ns, zero = begin_ns + CALL_NS, begin_ns + LEAD_NS
    if rank.rows is Rows.DEVICE:
        for one in sorted(mine, key=lambda each: each.start_ns):
            more = rank.described(one.kind) if one.kind not in COMPUTE else {}
            stream = STREAM + 1 + [*PEERS].index(one.kind) if one.kind in PEERS else STREAM
            rank.kernel(_kernel(one.kind), zero + one.start_ns, one.duration_ns, more, stream=stream)
        return
    ordered = sorted(mine, key=lambda one: (one.start_ns, one.start_ns + one.duration_ns))
    for (start, duration), together in groupby(ordered, key=lambda one: (one.start_ns, one.duration_ns)):
        several = list(together)
        if len(several) > 1 and all(one.kind in PEERS for one in several):
            _add_batch(rank, several, zero + start, duration)
            continue
        for one in several:
            more = rank.described(one.kind) if one.kind not in COMPUTE else {}
            rank.kernel(_kernel(one.kind), zero + start, duration, more)
    end = max(one.start_ns + one.duration_ns for one in mine)
    rank.call("cudaDeviceSynchronize", max(zero + end - rank.at_ns, CALL_NS))
    rank.add("user_annotation", f"ProfilerStep#{step}", begin_ns, length_ns + 2 * LEAD_NS, {})


def _add_batch(rank: _Rank, messages: Sequence[Operation], start_ns: int, duration_ns: int) -> None:
    """Add a call for each message, and the one kernel of all."""
    for one in messages:
        rank.add("cpu_op", "record_param_comms", rank.at_ns, CALL_NS, rank.described(one.kind))
        rank.at_ns += 2 * CALL_NS
    rank.add("user_annotation", "nccl:coalesced", rank.at_ns, 4 * CALL_NS, {})
    rank.at_ns += CALL_NS
    rank.kernel(_kernel(messages[0].kind), start_ns, duration_ns, {})
    rank.at_ns += 4 * CALL_NS


def _kernel(kind: str) -> str:
    if kind in COMPUTE:
        return kind.removesuffix("-all-reduce").replace("-", "_")  # which would be a collective by its name
    name = COLLECTIVES[kind][1] if kind in COLLECTIVES else "SendRecv"
    return f"ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)"


def _document(rank: _Rank, world: int) -> str:
    groups = [
        {
            "pg_name": rank.names[who], "pg_desc": "default_pg" if who == "world" else "undefined",
            "backend_config": "cuda:nccl", "pg_size": len(members), "ranks": members,
        }
        for who, members in rank.groups.items()
    ]  # fmt: skip
    about = {"backend": "nccl", "rank": rank.rank, "world_size": world, "pg_count": len(groups), "pg_config": groups}
    return json.dumps({
        "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}], "distributedInfo": about,
        "displayTimeUnit": "ms", "baseTimeNanoseconds": 1_790_000_000_000_000_000,
        "traceEvents": [*rank.events, *(_arrows(rank.events) if rank.rows is Rows.ALL else ())],
    })  # fmt: skip


def _arrows(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield both ends of the arrows from launches to kernels."""
    for event in events:
        is_launch = event["name"] == "cudaLaunchKernel"
        if is_launch or event["cat"] == "kernel":
            yield {
                "ph": "s" if is_launch else "f", "id": event["args"]["correlation"], "pid": event["pid"],
                "tid": event["tid"], "ts": event["ts"], "cat": "ac2g", "name": "ac2g", "bp": "e",
            }  # fmt: skip
