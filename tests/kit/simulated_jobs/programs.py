"""Writes the program of one training step for the ranks of one pipeline stage.

One builder covers DDP, FSDP, tensor and pipeline parallelism and what is mixed of them, because they differ only in
what is said before, inside and after a layer:

    forward     [FSDP: gather the next layer]  half, [TP: all-reduce], half, [TP: all-reduce]
    backward    [FSDP: gather the layer before] half, [TP: all-reduce], ..., [DDP: all-reduce | FSDP: reduce-scatter]
    pipeline    receive, wait, layers, send, in the order of `schedules`

Left out: CPU jobs (`cpu_programs`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.analysis.trace.columns import HostKind

from .instructions import ALL, AUTOGRAD, MAIN, Code, Phase, Program, Stream
from .job import Fault, FaultKind, Job
from .kernels import BACKWARD, EXTRA, FORWARD, LOSS, OPTIMIZER
from .messages import Messages
from .schedules import Pass, passes
from .step_builder import BEFORE_NS, MODULE_NS, StepBuilder

__all__ = ["STEP_ROW", "device_program"]

STEP_ROW = "ProfilerStep#"
"""The name of a step's row begins with it; the number follows."""

LOADER_ROW = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
CHECKPOINT_ROW = "save_checkpoint"


def device_program(job: Job, stage: int, faults: Sequence[Fault] = ()) -> Program:
    """Return one step of the ranks of `stage`; the work that `faults` add is marked as extra."""
    layout, model = job.layout, job.model
    b = StepBuilder(layout, model, stage)
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
    messages = Messages(b)
    for one in order:
        _pass(b, messages, one, faults)
    messages.finish()
    _finish(b)
    b.phase = Phase.CHECKPOINT
    b.add(Code.HOST, CHECKPOINT_ROW, kind=HostKind.CHECKPOINT)
    b.close()
    return Program(b.found)


def _pass(b: StepBuilder, messages: Messages, one: Pass, faults: Sequence[Fault]) -> None:
    model = b.model
    extra_layers = sum(round(fault.size) for fault in faults if fault.kind is FaultKind.EXTRA_LAYERS)
    layers = [False] * (model.layers // model.chunks) + [True] * (extra_layers if one.chunk == 0 else 0)
    b.microbatch = one.microbatch
    b.phase, b.thread = (Phase.FORWARD, MAIN) if one.is_forward else (Phase.BACKWARD, AUTOGRAD)
    if one.is_forward:
        b.open("DistributedDataParallel.forward" if b.layout.data > 1 else "forward", HostKind.ANNOTATION)
        messages.receive(one)
        _forward(b, layers)
        if b.stage == b.layout.pipeline - 1 and one.chunk == model.chunks - 1:
            for kernel in LOSS:
                b.kernel(kernel)
        b.close()
    else:
        messages.receive(one)
        _backward(b, layers, is_last=one.microbatch == model.microbatches - 1)
    b.is_extra = True
    for fault in faults:
        if fault.kind is FaultKind.EXTRA_KERNEL and one.is_forward:
            b.kernel(EXTRA, device_ns=round(fault.size))
        elif fault.kind is FaultKind.EXTRA_WORK:
            halves = FORWARD if one.is_forward else BACKWARD
            layer_ns = sum(kernel.device_ns for half in halves for kernel in half) * len(layers)
            b.kernel(EXTRA, device_ns=round(fault.size * layer_ns * model.kernel_scale / b.layout.tensor))
    b.is_extra = False
    messages.send(one)
    b.is_extra, b.thread = False, MAIN


def _forward(b: StepBuilder, layers: list[bool]) -> None:
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


def _backward(b: StepBuilder, layers: list[bool], *, is_last: bool) -> None:
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


def _finish(b: StepBuilder) -> None:
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
