"""Writes the program of one training step for the ranks of one pipeline stage.

One builder covers DDP, FSDP, tensor and pipeline parallelism and what is mixed of them, because they differ only in
what is said before, inside and after a layer:

    forward     [FSDP: gather the next layer]  half, [TP: all-reduce], half, [TP: all-reduce]
    backward    [FSDP: gather the layer before] half, [TP: all-reduce], ..., [DDP: all-reduce | FSDP: reduce-scatter]
    pipeline    receive, wait, layers, send, in the order of `schedules`

Host times are those of eager PyTorch on a fast CPU.  Left out: CPU jobs (`cpu_programs`).
"""

from __future__ import annotations

from pacecar.profiler.ledger.attribution import Work
from pacecar.profiler.trace.columns import HostKind

from .instructions import ALL, AUTOGRAD, MAIN, Code, Instruction, Phase, Program, Stream
from .job import Job, Model
from .kernels import BACKWARD, FORWARD, LOSS, NCCL, OPTIMIZER, Kernel
from .layout import Layout
from .schedules import Pass, passes

__all__ = ["STEP_ROW", "device_program"]

STEP_ROW = "ProfilerStep#"
"""The name of a step's row begins with it; the number follows."""

LOADER_ROW = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
CHECKPOINT_ROW = "save_checkpoint"

BEFORE_NS, INSIDE_NS, CALL_NS, AFTER_NS = 6_000, 9_000, 5_000, 3_000
"""An operator of eager PyTorch: 23 us in all from one to the next."""

MODULE_NS = 20_000
"""What entering a layer's modules and hooks costs in python, before its first operator."""

COLLECTIVE_NS = (8_000, 70_000, 12_000, 40_000)
"""The same parts of the call of a collective: about 130 us, as measured in traces of DDP."""


class _Builder:
    """Collects the instructions of one step."""

    def __init__(self, layout: Layout, model: Model, stage: int) -> None:
        self.layout = layout
        self.model = model
        self.stage = stage
        self.found: list[Instruction] = []
        self.phase = Phase.OTHER
        self.thread = MAIN
        self.microbatch = 0
        self.is_extra = False
        self._events = 0

    def add(self, code: Code, row: str = "", **fields: object) -> Instruction:
        base = {"phase": self.phase, "thread": self.thread, "microbatch": self.microbatch, "is_extra": self.is_extra}
        self.found.append(Instruction(code, row, **(base | fields)))  # type: ignore[arg-type]
        return self.found[-1]

    def event(self) -> int:
        self._events += 1
        return self._events - 1

    def kernel(self, kernel: Kernel, before_ns: int = BEFORE_NS) -> None:
        share = self.layout.tensor if kernel.is_split else 1
        self.add(
            Code.LAUNCH,
            kernel.operator,
            before_ns=before_ns,
            inside_ns=INSIDE_NS,
            call="cudaLaunchKernel",
            call_ns=CALL_NS,
            after_ns=AFTER_NS,
            kernel=kernel.name,
            device_ns=round(kernel.device_ns * self.model.kernel_scale / share),
            grid=kernel.grid,
            power=kernel.power,
        )

    def copy(self, row: str, name: str, device_ns: int, *, is_blocking: bool, stream: int = Stream.COMPUTE) -> None:
        self.add(
            Code.LAUNCH,
            row,
            before_ns=BEFORE_NS,
            inside_ns=INSIDE_NS,
            call="cudaMemcpyAsync",
            call_ns=CALL_NS,
            after_ns=AFTER_NS,
            kernel=name,
            work=Work.COPY,
            device_ns=device_ns,
            power=0,
            is_blocking=is_blocking,
            stream=stream,
        )

    def collective(
        self, operation: str, role: str, size: int, *, stream: int, on_stream: int = Stream.COMPUTE, peer: int = 0
    ) -> int:
        """Launch a collective, a send or a receive; return the event of its end."""
        code = {"send": Code.SEND, "recv": Code.RECV}.get(operation, Code.COLLECTIVE)
        before, inside, call, after = COLLECTIVE_NS
        event = self.event()
        self.add(
            code,
            _CALLS[operation],
            kind=HostKind.COLLECTIVE_CALL,
            before_ns=before,
            inside_ns=inside,
            call="cudaLaunchKernelExC",
            call_ns=call,
            after_ns=after,
            stream=stream,
            on_stream=on_stream,
            event=event,
            kernel=NCCL[operation][0],
            work=Work.COMMUNICATION,
            power=0,
            role=role,
            operation=operation,
            bytes=size,
            peer=peer,
        )
        return event

    def wait(self, event: int, stream: int = Stream.COMPUTE) -> None:
        self.add(Code.WAIT, call="cudaStreamWaitEvent", before_ns=4_000, call_ns=1_000, stream=stream, event=event)

    def record(self, stream: int = Stream.COMPUTE) -> int:
        event = self.event()
        self.add(Code.RECORD, call="cudaEventRecord", before_ns=4_000, call_ns=1_000, stream=stream, event=event)
        return event

    def open(self, row: str, kind: HostKind, before_ns: int = 2_000) -> None:
        self.add(Code.OPEN, row, kind=kind, before_ns=before_ns)

    def close(self) -> None:
        self.add(Code.CLOSE)

    def sum_over_tensor(self) -> None:
        """Sum activations over the tensor parallel ranks; the layer goes on when they are there."""
        if self.layout.tensor > 1:
            size = self.model.activation_bytes
            self.wait(self.collective("all_reduce", "tensor", size, stream=Stream.TENSOR))

    def gather(self, extra: bool) -> int:
        """Gather a layer's parameters, copied in on a stream of their own; return the event of the end."""
        self.wait(self.record(), Stream.COPY_IN)
        before = self.is_extra
        self.is_extra = before or extra
        self.copy(
            "fsdp::all_gather_copy_in",
            "Memcpy DtoD (Device -> Device)",
            8_000,
            is_blocking=False,
            stream=Stream.COPY_IN,
        )
        size = self.model.layer_bytes // self.layout.tensor
        event = self.collective("all_gather", "data", size, stream=Stream.DATA, on_stream=Stream.COPY_IN)
        self.is_extra = before
        return event


_CALLS = {
    "all_reduce": "c10d::allreduce_",
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
    "send": "c10d::send",
    "recv": "c10d::recv_",
}


def device_program(job: Job, stage: int, extra_layers: int = 0) -> Program:
    """Return one step of the ranks of `stage`; layers beyond the model's own are marked as extra."""
    layout, model = job.layout, job.model
    b = _Builder(layout, model, stage)
    b.open(STEP_ROW, HostKind.ANNOTATION, before_ns=0)
    b.phase = Phase.DATA
    b.add(Code.HOST, LOADER_ROW, kind=HostKind.LOADER, before_ns=10_000, call_ns=model.loader_ns)
    b.phase = Phase.OTHER
    b.add(Code.HOST, "Optimizer.zero_grad#AdamW.zero_grad", kind=HostKind.OPTIMIZER, before_ns=10_000, call_ns=30_000)
    if stage == 0:
        b.phase = Phase.INPUT
        memory = "Pageable" if model.has_pageable_input else "Pinned"
        b.copy("aten::copy_", f"Memcpy HtoD ({memory} -> Device)", 80_000, is_blocking=model.has_pageable_input)
    order = passes(model.schedule, stage, layout.pipeline, model.microbatches, model.chunks)
    for one in order:
        _pass(b, one, extra_layers, is_last=one.microbatch == model.microbatches - 1)
    _finish(b)
    b.phase = Phase.CHECKPOINT
    b.add(Code.HOST, CHECKPOINT_ROW, kind=HostKind.CHECKPOINT)
    b.close()
    return Program(b.found)


def _pass(b: _Builder, one: Pass, extra_layers: int, *, is_last: bool) -> None:
    layout, model = b.layout, b.model
    stages, first = layout.pipeline, b.stage == 0 and one.chunk == 0
    last = b.stage == stages - 1 and one.chunk == model.chunks - 1
    layers = [False] * (model.layers // model.chunks) + [True] * (extra_layers if one.chunk == 0 else 0)
    b.microbatch = one.microbatch
    b.phase, b.thread = (Phase.FORWARD, MAIN) if one.is_forward else (Phase.BACKWARD, AUTOGRAD)
    if one.is_forward:
        b.open("DistributedDataParallel.forward" if layout.data > 1 else "forward", HostKind.ANNOTATION)
        if stages > 1 and not first:
            b.wait(_exchange(b, "recv", "forward", -1))
        _forward(b, layers)
        if last:
            for kernel in LOSS:
                b.kernel(kernel)
        b.close()
        if stages > 1 and not last:
            _exchange(b, "send", "forward", 1)
    else:
        if stages > 1 and not last:
            b.wait(_exchange(b, "recv", "backward", 1))
        _backward(b, layers, is_last=is_last)
        if stages > 1 and not first:
            _exchange(b, "send", "backward", -1)
    b.is_extra, b.thread = False, MAIN


def _exchange(b: _Builder, operation: str, role: str, peer: int) -> int:
    stream = Stream[f"{operation}_{role}".upper()]
    return b.collective(operation, role, b.model.activation_bytes // b.layout.tensor, stream=stream, peer=peer)


def _forward(b: _Builder, layers: list[bool]) -> None:
    is_sharded = b.layout.is_sharded and b.layout.data > 1
    gathered = b.gather(layers[0]) if is_sharded else None
    for place, extra in enumerate(layers):
        event = gathered
        if is_sharded and place + 1 < len(layers):
            gathered = b.gather(layers[place + 1])
        b.is_extra = extra
        if event is not None:
            b.wait(event)
        for half in FORWARD:
            for number, kernel in enumerate(half):
                b.kernel(kernel, BEFORE_NS if number else MODULE_NS)
            b.sum_over_tensor()
    b.is_extra = False


def _backward(b: _Builder, layers: list[bool], *, is_last: bool) -> None:
    layout, model = b.layout, b.model
    is_sharded = layout.is_sharded and layout.data > 1
    events: list[int] = []
    size, waiting = model.layer_bytes // layout.tensor, 0
    gathered = b.gather(layers[-1]) if is_sharded else None
    for place, extra in reversed(list(enumerate(layers))):
        event = gathered
        if is_sharded and place > 0:
            gathered = b.gather(layers[place - 1])
        b.is_extra = extra
        if event is not None:
            b.wait(event)
        for half in BACKWARD:
            for number, kernel in enumerate(half):
                b.kernel(kernel, BEFORE_NS if number else MODULE_NS)
            b.sum_over_tensor()
        if layout.data > 1 and is_sharded:
            events.append(b.collective("reduce_scatter", "data", size, stream=Stream.DATA))
        elif layout.data > 1 and is_last:
            waiting += 1
            if waiting == model.buckets_of or place == 0 or extra:
                events.append(b.collective("all_reduce", "data", waiting * size, stream=Stream.DATA))
                waiting = 0
    b.is_extra = False
    if is_last or is_sharded:
        for event in events:
            b.wait(event)


def _finish(b: _Builder) -> None:
    """Update the parameters and read the loss, for which the host waits."""
    b.phase = Phase.OPTIMIZER
    b.open("Optimizer.step#AdamW.step", HostKind.OPTIMIZER)
    b.add(Code.HOST, before_ns=80_000)
    for _ in range(b.model.optimizer_kernels):
        b.kernel(OPTIMIZER)
    b.close()
    b.phase = Phase.END
    if b.model.ends_with_sync:
        b.copy("aten::_local_scalar_dense", "Memcpy DtoH (Device -> Pageable)", 2_000, is_blocking=True)
        b.add(Code.SYNC, call="cudaStreamSynchronize", before_ns=2_000, call_ns=4_000)
        if b.layout.pipeline > 1:
            b.add(Code.SYNC, call="cudaDeviceSynchronize", before_ns=2_000, call_ns=4_000, stream=ALL)
    b.add(Code.HOST, before_ns=30_000)
